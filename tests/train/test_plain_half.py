"""Plain backwards in fp16: exact for a loss that the model computes, else refused before a gradient lands."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.train.gradients.scaled_backward import nodes_below, running_calls
from tests.train.half_programs import REMEDY, SCALE, Extra, Toy, data, each_program, stock
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_state,
    llama,
    on_batch,
    same_bits,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of


@pytest.mark.parametrize("where", ["ram", "disk"])
@each_program
def test_a_plain_backward_is_refused_before_anything_lands(program: Any, where: str, tmp_path: Path) -> None:
    gives, loss_of = program
    model = wrap(Toy(gives), where, tmp_path, precision="fp16")
    optimizer = adam(model)
    extra: Extra = {}
    loss = loss_of(model, extra, data())
    with pytest.raises(gemini.GeminiError, match=REMEDY):
        loss.backward()
    assert all(model.full_grad(name) is None for name, _ in model.named_parameters())
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    extra.clear()
    scaler.scale(loss_of(model, extra, data())).backward()  # and the remedy works on the same model
    scaler.step(optimizer)
    scaler.update()
    world_of(model).check()


# ---- plain backwards ------------------------------------------------------------------------------------------------


def divided(model: Any, seed: int) -> torch.Tensor:
    return model(data(seed)) / 3 + 1.0


def summed(model: Any, seed: int) -> torch.Tensor:
    return 0.5 * model(data(seed)) - model(data(seed + 100)) * model(data(seed)).detach()


def squared(model: Any, seed: int) -> torch.Tensor:
    return (model(data(seed)) + 1) ** 2


def recomputing(model: Any, seed: int) -> torch.Tensor:
    return checkpoint(model, data(seed), use_reentrant=False)


@pytest.mark.parametrize("gives", ["loss", "half loss"])
@pytest.mark.parametrize("loss_of", [divided, summed, squared, recomputing])
def test_plain_backwards_of_a_loss_inside_are_exact(loss_of: Any, gives: str, where: str, tmp_path: Path) -> None:
    model, plain = wrap(Toy(gives), where, tmp_path, precision="fp16"), Plain(Toy(gives), "fp16", scale=SCALE)
    world_of(model).loss_scale.scale = SCALE
    train_plain(plain, range(2), loss_of)
    train(model, adam(model), range(2), loss_of)
    assert_same_state(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_checkpointed_blocks(reentrant: bool, scaled: bool, where: str, tmp_path: Path) -> None:
    """Reentrant checkpointing runs graphs of its own inside backward; they belong to the loss around them."""

    def make() -> Any:
        made: Any = llama()
        for part in (made.model.embed_tokens, made.model.layers[0]):
            part.requires_grad_(False)
        return made

    how = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model, plain = wrap(make(), where, tmp_path, precision="fp16"), Plain(make(), "fp16", scale=SCALE)
    for each in (model, plain.model):
        each.gradient_checkpointing_enable(**how)
        each.enable_input_require_grads()  # a leaf inside, whose gradient nobody sees
        each.train()
    world_of(model).loss_scale.scale = SCALE
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    train_plain(plain, range(2), clip=None)
    for seed in range(2):
        scaler.scale(on_batch(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same_state(model, plain)


def test_gradients_with_respect_to_inputs_alone_are_torchs(where: str, tmp_path: Path) -> None:
    """Nothing lands, so nothing needs a scale: saliency maps are those of a plain fp16 model."""
    model, plain = wrap(Toy("loss"), where, tmp_path, precision="fp16"), stock("loss")
    mine, theirs = data().requires_grad_(True), data().requires_grad_(True)
    assert same_bits(torch.autograd.grad(model(mine), [mine])[0], torch.autograd.grad(plain(theirs), [theirs])[0])
    model(mine.detach()).backward()
    world_of(model).check()


def test_params_without_an_optimizer_do_not_hold_the_scale(tmp_path: Path) -> None:
    """Their gradients stay when those of the others are used: the next step has a scale of its own nevertheless."""
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16")
    optimizer, scale = adam(model.layers[0]), world_of(model).loss_scale.scale
    for bad in (float("inf"), 1.0):
        (model(data()) * bad).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = stock("loss")
    plain(data()).backward(torch.tensor(scale / 2))
    assert world_of(model).handles[0].num_steps == 1 and world_of(model).loss_scale.scale == scale / 2
    grad = plain.layers[2].weight.grad.float() / (scale / 2)  # type: ignore[union-attr, operator]
    assert same_bits(model.full_grad("layers.2.weight"), grad)


def test_a_half_loss_that_underflows_outside_is_refused(tmp_path: Path) -> None:
    model = wrap(Toy("half loss"), "ram", tmp_path, precision="fp16")
    with pytest.raises(gemini.GeminiError, match=rf"fp16 has rounded it.*{REMEDY}"):
        (model(data()) * 1e-7).backward()
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    (scaler.scale(model(data())) * 1e-7).backward()
    assert float(model.full_grad("layers.2.weight").abs().max()) > 0


def test_a_loss_of_another_managed_model_is_refused(tmp_path: Path) -> None:
    """Two managed models in a row: the scale of the second one's loss is not the first one's."""
    first, second = (wrap(Toy(gives), "ram", tmp_path, precision="fp16") for gives in ("tensor", "loss"))
    with pytest.raises(gemini.GeminiError, match=REMEDY):
        second(first(data())).backward()
    assert first.full_grad("layers.0.weight") is None and second.full_grad("layers.0.weight") is None


def test_the_call_that_waits_in_another_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose nodes run in a thread of autograd's own."""
    found: list[Any] = []

    def look() -> None:
        found.extend(running_calls())

    def from_another_thread(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    x = torch.ones((), requires_grad=True)
    loss = x.exp()
    loss.register_hook(from_another_thread)
    loss.backward(retain_graph=True)
    assert found == []  # of a CPU's backward that is none of its business
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    loss.backward()
    (call,) = found
    assert call.roots == (loss.grad_fn,) and call.inputs == () and call.accumulates


def test_nodes_come_before_what_they_lead_to() -> None:
    x = torch.ones((), requires_grad=True)
    a = x.exp()
    b = a * a + a.sin()
    order = nodes_below((a.grad_fn, b.grad_fn, a.grad_fn))
    place = {node: i for i, node in enumerate(order)}
    assert len(order) == len(place) == 5
    assert all(place[node] < place[child] for node in order for child, _ in node.next_functions)
