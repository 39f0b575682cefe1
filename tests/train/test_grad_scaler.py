"""``gemini.GradScaler`` in fp16: the bits of the stock loop (fp16 weights, torch.amp.GradScaler), whatever the program.

The programs are those that the loss scale of an output cannot serve: gradients that go around the outputs, that leave
the model, or that come through it twice. Each is refused without a scaler, before anything has landed.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.train.backward_calls import nodes_below, running_calls
from tests.train.helpers import (
    PLACEMENTS,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    batch,
    engine_of,
    llama,
    on_batch,
    same_bits,
    snapshot,
    train_plain,
    wrap,
)

SCALE = 2.0**12
REMEDY = r"gemini\.GradScaler"


class Toy(nn.Module):
    """Three layers, with every way out of a module that a loss may take."""

    def __init__(self, gives: str = "tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.gives = gives
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.layers[0](x.half()))
        self.aux = h.float().square().mean()
        h = torch.tanh(self.layers[1](h))
        out = self.layers[2](h)
        if self.gives == "loss":
            return out.float().square().mean()
        if self.gives == "half loss":
            return out.square().mean()
        if self.gives == "distribution":
            return torch.distributions.Normal(out.float(), 1.0)
        if self.gives == "pieces":
            return (piece for piece in out.split(1))
        if self.gives == "both":
            return {"loss": out.float().square().mean(), "hidden": h}
        return out


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))


# ---- programs: each returns its loss; ``extra`` holds tensors outside whose gradients are looked at too -------------

Extra = dict[str, torch.Tensor]


def outside(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), torch.arange(4)) / 7


def hooked_feature(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(x)
    hook.remove()
    return (seen[0] - 1).float().square().mean() + 0.1 * out.float().mean()


def only_a_feature(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    model(x)
    hook.remove()
    return seen[0].float().square().mean()


def distribution(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return -model(x).log_prob(torch.ones(4, 32)).mean()


def kept_aux(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(x) + 0.5 * model.aux


def input_gradient(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(extra.setdefault("x", x.requires_grad_(True)))


def upstream(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    prompt = extra.setdefault("prompt", nn.Parameter(torch.full((4, 32), 0.25)))
    return model(x * prompt)


def fed_back(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(model(x)).float().square().mean()


def pieces(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([piece.float().square().mean() * i for i, piece in enumerate(model(x))]).sum()


def a_part(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x.half()).float().square().mean() + model(x).float().mean()


def two_scalars_in_a_row(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(x * model(x))


def kept_output(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out["hidden"].retain_grad()
    extra["hidden"] = out["hidden"]
    return out["loss"]


def recomputed(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, extra.setdefault("x", x.requires_grad_(True)), use_reentrant=True)


def recomputed_twice(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    h = checkpoint(model, extra.setdefault("x", x.requires_grad_(True)), use_reentrant=False)
    return checkpoint(model, h, use_reentrant=False).float().square().mean()


PROGRAMS: dict[str, tuple[str, Callable[[Any, Extra, torch.Tensor], torch.Tensor]]] = {
    "loss outside": ("tensor", outside), "hooked feature": ("tensor", hooked_feature),
    "feature alone": ("tensor", only_a_feature), "distribution": ("distribution", distribution),
    "aux in an attribute": ("loss", kept_aux), "x.grad": ("loss", input_gradient),
    "params upstream": ("loss", upstream), "fed back": ("tensor", fed_back), "generator": ("pieces", pieces),
    "a part": ("tensor", a_part), "scalar fed back": ("loss", two_scalars_in_a_row), "kept": ("both", kept_output),
    "recomputed": ("loss", recomputed), "recomputed twice": ("tensor", recomputed_twice),
}  # fmt: skip


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield PROGRAMS[request.param]


@pytest.fixture(params=PLACEMENTS)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def stock(gives: str = "tensor") -> nn.Module:
    return Toy(gives).half()


def assert_same_grads(model: Any, plain: nn.Module, scale: float = SCALE) -> None:
    inverse = torch.tensor(scale).double().reciprocal().float()
    for name, param in plain.named_parameters():
        grad = model.full_grad(name)
        assert (grad is None) == (param.grad is None), name
        assert grad is None or same_bits(grad, param.grad.float() * inverse), name


def test_gradients_are_those_of_the_stock_loop(program: Any, where: str, tmp_path: Path) -> None:
    gives, loss_of = program
    model, plain = wrap(Toy(gives), where, tmp_path, precision="fp16"), stock(gives)
    own: Extra = {}
    theirs: Extra = {}
    gemini.GradScaler("cpu", init_scale=SCALE).scale(loss_of(model, own, data())).backward()
    torch.amp.GradScaler("cpu", init_scale=SCALE).scale(loss_of(plain, theirs, data())).backward()
    assert_same_grads(model, plain)
    for name, tensor in own.items():
        assert tensor.grad is not None and same_bits(tensor.grad, theirs[name].grad), name  # type: ignore[arg-type]
    engine_of(model).check_invariants()


@pytest.mark.parametrize("where", ["ram", "disk"])
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
    engine_of(model).check_invariants()


# ---- whole steps ----------------------------------------------------------------------------------------------------


class StockLoop:
    """fp16 weights, fp32 masters, and torch's own scaler over fp32 copies of the gradients."""

    def __init__(self, model: nn.Module, **scaler: Any):
        self.plain = Plain(model, "fp16")
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.copies = {name: nn.Parameter(torch.zeros(p.shape)) for name, p in model.named_parameters()}
        self.judge = torch.optim.SGD(self.copies.values(), lr=0.0)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.plain.collect()

    def step(self, max_norm: float | None) -> None:
        for name, copied in self.copies.items():
            copied.grad = self.plain.grads[name].view(copied.shape).clone() if name in self.plain.grads else None
        self.plain.scale = self.scaler.get_scale()
        self.scaler.step(self.judge)
        if max_norm is not None:
            self.plain.clip(max_norm)
        self.plain.step()
        self.scaler.update()


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_steps_scales_and_skips_are_those_of_the_stock_loop(where: str, max_norm: float | None, tmp_path: Path) -> None:
    """Losses outside, two micro-batches, a scale that is too high at first and grows every second step."""
    settings = {"init_scale": 2.0**30, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.125}
    model, theirs = wrap(Toy(), where, tmp_path, precision="fp16", gradients="accumulate"), StockLoop(Toy(), **settings)
    scaler, optimizer = gemini.GradScaler("cpu", **settings), adam(model)
    assert isinstance(scaler, torch.amp.GradScaler)
    num_skipped = 0
    for step in range(8):
        for micro in range(2):
            scaler.scale(outside(model, {}, data(2 * step + micro)) / 2).backward()
            theirs.backward(outside(theirs.plain.model, {}, data(2 * step + micro)) / 2)
        before = snapshot(model)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        theirs.step(max_norm)
        assert scaler.state_dict() == theirs.scaler.state_dict()
        if engine_of(model).handles[0].num_steps == before["layers.0.weight"]["step"]:
            num_skipped += 1
            assert_same_snapshot(before, snapshot(model))
        assert_same_state(model, theirs.plain)
    assert 1 < num_skipped < 7


def test_share_of_zeros_is_that_of_stock_scaling(tmp_path: Path) -> None:
    """Cross entropy over many classes, divided for an accumulation: the logits' gradient is far below fp16."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.half())

    def loss_of(model: Any) -> torch.Tensor:
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
        return nn.functional.cross_entropy(model(x).float(), torch.arange(256)) / 32

    plain, model = Head().half(), wrap(Head(), "ram", tmp_path, precision="fp16")
    torch.amp.GradScaler("cpu").scale(loss_of(plain)).backward()
    gemini.GradScaler("cpu").scale(loss_of(model)).backward()
    assert_same_grads(model, plain, 2.0**16)
    grads = [model.full_grad(name) for name, _ in model.named_parameters()]
    assert sum(int((g == 0).sum()) for g in grads) < 0.01 * sum(g.numel() for g in grads)


def test_a_step_with_inf_is_skipped_in_every_bit(where: str, tmp_path: Path) -> None:
    model = wrap(Toy(), where, tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    for bad in (float("inf"), float("nan")):
        before, scale = snapshot(model), scaler.get_scale()
        scaler.scale(outside(model, {}, data()) * bad).backward()
        scaler.unscale_(optimizer)
        assert not torch.isfinite(model.clip_grad_norm_(1.0))
        scaler.step(optimizer)
        scaler.update()
        assert_same_snapshot(before, snapshot(model))
        assert scaler.get_scale() == scale / 2
    scaler.scale(outside(model, {}, data())).backward()
    scaler.step(optimizer)
    assert engine_of(model).handles[0].num_steps == 1


def test_plain_params_are_treated_as_torch_does(tmp_path: Path) -> None:
    """A HybridAdam over managed and plain params, and a stock optimizer beside it, with one scaler."""
    outcomes = []
    for managed in (True, False):
        model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16") if managed else stock("loss")
        prompt, other = (nn.Parameter(torch.full((4, 32), v)) for v in (0.25, 0.5))
        params = [*model.parameters(), prompt] if managed else [prompt]
        optimizer, beside = gemini.HybridAdam(params, lr=0.1), torch.optim.SGD([other], lr=0.1)
        make: Any = gemini.GradScaler if managed else torch.amp.GradScaler
        scaler = make("cpu", init_scale=SCALE)
        for step in range(4):
            loss = model(data(step) * prompt * other)
            scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            scaled = prompt.grad.clone()
            scaler.unscale_(optimizer)
            assert same_bits(prompt.grad, scaled / scaler.get_scale()) or step == 2
            scaler.step(optimizer)
            scaler.step(beside)
            scaler.update()
            for o in (optimizer, beside):
                o.zero_grad()
            if managed:
                model.load_state_dict(Toy("loss").half().state_dict())  # the plain one has no masters: both stand still
        outcomes.append((prompt.detach(), other.detach(), scaler.get_scale()))
    assert all(same_bits(a, b) for a, b in zip(outcomes[0][:2], outcomes[1][:2], strict=True))
    assert outcomes[0][2] == outcomes[1][2] == SCALE / 2


def test_what_was_found_is_of_each_optimizer(tmp_path: Path) -> None:
    """Two optimizers on one model and a third on another: only what holds inf is skipped, the scale falls once."""
    first, second = (wrap(Toy(), "ram", tmp_path, precision="fp16") for _ in range(2))
    halves = [list(first.layers[0].parameters()), [p for i in (1, 2) for p in first.layers[i].parameters()]]
    optimizers = [gemini.HybridAdam(params, lr=1e-2) for params in (*halves, list(second.parameters()))]
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    handles = [engine_of(first).by_names[f"layers.{i}.weight"] for i in (0, 1)]
    handles.append(engine_of(second).by_names["layers.0.weight"])
    for step, counts in enumerate([[1, 1, 1], [1, 2, 2], [2, 3, 3]]):
        hook = first.layers[0].weight.register_hook(lambda g, bad=step == 1: g * float("inf") if bad else g)
        scaler.scale(outside(first, {}, data(step)) + outside(second, {}, data(step))).backward()
        hook.remove()
        if step == 2:
            scaler.unscale_(optimizers[0])
            with pytest.raises(gemini.GeminiError, match="some are unscaled"):
                first.clip_grad_norm_(1.0)
            assert float(first.clip_grad_norm_(1e9, params=halves[0])) < 10
            assert float(first.clip_grad_norm_(1e9, params=halves[1])) > 10  # scaled still, as in torch
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [handle.num_steps for handle in handles] == counts
        assert scaler.get_scale() == (SCALE if step == 0 else SCALE / 2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_other_precisions_take_a_scaler_too(precision: str, tmp_path: Path) -> None:
    states = []
    for scales in (True, False):
        model = wrap(llama(), "disk", tmp_path, precision=precision)
        optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE, enabled=scales)
        for seed in range(2):
            scaler.scale(on_batch(model, seed)).backward()
            grad = model.full_grad("lm_head.weight").float()
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
        states.append((snapshot(model), grad, norm))
    assert_same_snapshot(states[0][0], states[1][0])  # a power of two: the same bits
    assert same_bits(states[0][1], states[1][1]) and same_bits(states[0][2], states[1][2])


def test_soft_prompts_before_a_managed_transformer(where: str, tmp_path: Path) -> None:
    """``get_input_embeddings()(ids)`` calls a part of the model with gradients enabled."""
    managed, plain = wrap(llama(tied=True), where, tmp_path, precision="fp16"), Plain(llama(tied=True), "fp16").model
    ids, grads = batch()["input_ids"], []
    for model, make in ((managed, gemini.GradScaler), (plain, torch.amp.GradScaler)):
        prompt = nn.Parameter(torch.full((1, 3, 32), 0.1))
        embedded = torch.cat([prompt.half().expand(2, -1, -1), model.get_input_embeddings()(ids)], dim=1)
        labels = torch.cat([torch.full((2, 3), -100), ids], dim=1)
        make("cpu", init_scale=SCALE).scale(model(inputs_embeds=embedded, labels=labels).loss).backward()
        grads.append(prompt.grad)
    assert_same_grads(managed, plain)
    assert same_bits(*grads)


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
    engine_of(model).loss_scale.scale = SCALE
    optimizer = adam(model)
    train_plain(plain, range(2), loss_of)
    for seed in range(2):
        loss_of(model, seed).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
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
    engine_of(model).loss_scale.scale = SCALE
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    train_plain(plain, range(2), clip=None)
    for seed in range(2):
        scaler.scale(on_batch(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_state(model, plain)


def test_gradients_with_respect_to_inputs_alone_are_torchs(where: str, tmp_path: Path) -> None:
    """Nothing lands, so nothing needs a scale: saliency maps are those of a plain fp16 model."""
    model, plain = wrap(Toy("loss"), where, tmp_path, precision="fp16"), stock("loss")
    mine, theirs = data().requires_grad_(True), data().requires_grad_(True)
    assert same_bits(torch.autograd.grad(model(mine), [mine])[0], torch.autograd.grad(plain(theirs), [theirs])[0])
    model(mine.detach()).backward()
    engine_of(model).check_invariants()


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


# ---- refusals and states --------------------------------------------------------------------------------------------


def test_the_order_of_calls_is_torchs(tmp_path: Path) -> None:
    model = wrap(Toy(), "ram", tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    scaler.scale(torch.zeros(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(outside(model, {}, data())).backward()
    with pytest.raises(gemini.GeminiError, match=r"scaler\.step\(optimizer\)"):
        optimizer.step()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(gemini.GeminiError, match=r"after GradScaler\.unscale_"):
        scaler.scale(outside(model, {}, data())).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    engine_of(model).check_invariants()


def test_scales_do_not_mix_in_a_step(tmp_path: Path) -> None:
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16", gradients="accumulate")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    model(data()).backward()
    with pytest.raises(gemini.GeminiError, match=r"cannot be added up.*zero_grad"):
        scaler.scale(model(data())).backward()
    with pytest.raises(gemini.GeminiError, match="was not scaled"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaler = gemini.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(data())).backward()
    scaler.update(SCALE / 2)
    with pytest.raises(gemini.GeminiError, match="scaled by 4096.*scaled by 2048"):
        scaler.scale(model(data())).backward()
    grad = model.full_grad("layers.0.weight")
    scaler.step(optimizer)  # with the scale that the gradients have
    plain = stock("loss")
    plain(data()).backward(torch.tensor(SCALE))
    assert same_bits(grad, plain.layers[0].weight.grad.float() / SCALE)  # type: ignore[union-attr, operator]


def test_the_stock_scaler_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(data())).backward()
    with pytest.raises(gemini.GeminiError, match=REMEDY):
        scaler.step(adam(model))


def test_updates_inside_backward_are_refused(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    with pytest.raises(gemini.GeminiError, match="step_in_backward=True"):
        gemini.GradScaler("cpu").scale(on_batch(model, 0)).backward()
    on_batch(model, 0).backward()
    optimizer.step()


def test_a_disabled_scaler_leaves_the_plain_path(tmp_path: Path) -> None:
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16")
    scaler = gemini.GradScaler("cpu", enabled=False)
    assert scaler.get_scale() == 1.0 and not scaler.is_enabled()
    scaler.scale(model(data())).backward()
    scaler.step(adam(model))
    scaler.update()
    assert engine_of(model).loss_scale.num_good_steps == 1


def test_states_come_back(tmp_path: Path) -> None:
    model = wrap(Toy(), "ram", tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    for step in range(2):
        scaler.scale(outside(model, {}, data(step))).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert state["_growth_tracker"] == 2
    others = [gemini.GradScaler("cpu") for _ in range(2)]
    stock_scaler = torch.amp.GradScaler("cpu")
    stock_scaler.load_state_dict(state)
    others[0].load_state_dict(state)
    others[1].load_state_dict(stock_scaler.state_dict())
    for other in (*others, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == state
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer, extra={"scaler": state})
    fresh = wrap(Toy(), "ram", tmp_path, precision="fp16")
    assert gemini.load_checkpoint(tmp_path / "saved", fresh, adam(fresh))["scaler"] == state


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
