"""In fp16 a backward needs a scaler: one without is refused before a gradient is kept, and nothing is lost by it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gemini
from tests.scaling import backward, clip_grads, make_step
from tests.train.half_programs import REMEDY, SCALE, Extra, Toy, assert_same_grads, data, each_program, stock
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    llama,
    on_batch,
    same_bits,
    snapshot,
    train_plain,
    trainable,
    wrap,
)
from tests.world import world_of

NOT_SCALED = rf"in fp16 the loss of this backward was not scaled.*{REMEDY}.*scaler\.step\(optimizer\)"


def on_toy(model: Any, seed: int) -> torch.Tensor:
    return model(data(seed))


@each_program
def test_a_plain_backward_is_refused_before_a_gradient_is_kept(program: Any, where: str, tmp_path: Path) -> None:
    """And the remedy works on the same model: the gradients of the stock loop, which never had a plain backward."""
    gives, loss_of = program
    model, plain = wrap(Toy(gives), where, tmp_path, precision="fp16"), stock(gives)
    own: Extra = {}
    theirs: Extra = {}
    with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
        loss_of(model, {}, data()).backward()
    assert all(model.full_grad(name) is None for name, _ in model.named_parameters())
    gemini.GradScaler("cpu", init_scale=SCALE).scale(loss_of(model, own, data())).backward()
    torch.amp.GradScaler("cpu", init_scale=SCALE).scale(loss_of(plain, theirs, data())).backward()
    assert_same_grads(model, plain)
    for name, tensor in own.items():
        assert tensor.grad is not None and same_bits(tensor.grad, theirs[name].grad), name  # type: ignore[arg-type]
    world_of(model).check()


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
def test_nothing_is_lost_by_a_refusal(gradients: str, where: str, tmp_path: Path) -> None:
    """Before the first step, between steps, and between two micro-batches of a step."""
    model = wrap(llama(), where, tmp_path, precision="fp16", gradients=gradients)
    optimizer, plain = adam(model), Plain(llama(), "fp16", scale=2.0**16)
    for seed in range(2):
        before = snapshot(model)
        with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
            on_batch(model, seed).backward()
        assert_same_snapshot(before, snapshot(model))
        backward(model, on_batch(model, seed))
        with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
            on_batch(model, seed + 10).backward()
        clip_grads(model, optimizer, 1.0)
        make_step(model, optimizer)
        optimizer.zero_grad()
    train_plain(plain, range(2))
    assert_same_state(model, plain)


@pytest.mark.parametrize("first", ["plain", "broken off"])
def test_another_backward_of_the_same_graph(first: str, where: str, tmp_path: Path) -> None:
    """No forward in between has forgotten the one that did not end."""
    model, plain = wrap(Toy("loss"), where, tmp_path, precision="fp16"), stock("loss")
    loss, broken = model(data()), model(data(1))
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    if first == "plain":
        with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
            loss.backward(retain_graph=True)
        scaler.scale(loss).backward()
        torch.amp.GradScaler("cpu", init_scale=SCALE).scale(plain(data())).backward()
        assert_same_grads(model, plain)
    else:
        hook = model.layers[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scaler.scale(broken).backward()
        hook.remove()
        with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
            loss.backward()


@pytest.mark.parametrize("which", ["torch's own", "disabled"])
def test_scalers_that_gemini_does_not_know_are_none(which: str, tmp_path: Path) -> None:
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16")
    scaler = torch.amp.GradScaler("cpu") if which == "torch's own" else gemini.GradScaler("cpu", enabled=False)
    with pytest.raises(gemini.GeminiError, match=NOT_SCALED + r".*bf16"):
        scaler.scale(model(data())).backward()
    assert model.full_grad("layers.0.weight") is None


def test_gradients_with_respect_to_inputs_alone_are_torchs(where: str, tmp_path: Path) -> None:
    """Nothing lands, so nothing needs a scale: saliency maps are those of a plain fp16 model. Nor does inference."""
    model, plain = wrap(Toy("loss"), where, tmp_path, precision="fp16"), stock("loss")
    mine, theirs = data().requires_grad_(True), data().requires_grad_(True)
    assert same_bits(torch.autograd.grad(model(mine), [mine])[0], torch.autograd.grad(plain(theirs), [theirs])[0])
    with torch.inference_mode():
        assert same_bits(model.eval()(data()), plain.eval()(data()))
    backward(model.train(), model(mine.detach()))
    world_of(model).check()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_whole_model_in_a_reentrant_checkpoint(precision: str, tmp_path: Path) -> None:
    """Its first gradient lands in the inner backward; one that broke off before does not make the next one scaled."""
    model, optimizer = trainable(Toy("loss"), "ram", tmp_path, precision=precision)

    def loss() -> torch.Tensor:
        return checkpoint(on_toy, model, 0, torch.zeros((), requires_grad=True), use_reentrant=True)

    def on_toy(model: Any, seed: int, anchor: torch.Tensor) -> torch.Tensor:
        return model(data(seed)) + anchor

    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    for breaks in (True, False):
        hook = model.layers[2].weight.register_hook(lambda grad, b=breaks: 1 / 0 if b else grad)
        if breaks:
            with pytest.raises(ZeroDivisionError):
                scaler.scale(loss()).backward()
        else:
            scaler.scale(loss()).backward()
            with pytest.raises(gemini.GeminiError, match=r"scaler\.step"):
                optimizer.step()
            scaler.step(optimizer)
            scaler.update()
        hook.remove()
        optimizer.zero_grad()
        if precision == "fp16":
            with pytest.raises(gemini.GeminiError, match=NOT_SCALED):
                loss().backward()
        else:
            loss().backward()
            optimizer.step()
        optimizer.zero_grad()
    world_of(model).check()


def during(look: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
    """A hook that looks in another thread, while the backward that it is called in waits."""

    def hook(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    return hook


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_backward_in_another_thread(on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it has nothing to do with the scaled one that runs; nodes of a GPU run in a thread of autograd's own."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    model, outer = wrap(Toy("loss"), "ram", tmp_path, precision="fp16"), torch.ones((), requires_grad=True)
    loss, told = model(data()), []

    def look() -> None:
        try:
            loss.backward()
        except gemini.GeminiError as e:
            told.append(str(e))

    inner = outer.exp()
    inner.register_hook(during(look))
    gemini.GradScaler("cpu", init_scale=SCALE).scale(inner).backward()
    assert len(told) == (not on_gpu) and (model.full_grad("layers.0.weight") is None) == bool(told)
