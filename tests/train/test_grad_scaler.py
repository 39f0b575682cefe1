"""``gemini.GradScaler``: the bits of the stock loop (fp16 weights, torch.amp.GradScaler), whatever the program does."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.train.gradients.scaling import Scale
from tests.train.half_programs import REMEDY, SCALE, Toy, data, outside, stock
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    llama,
    on_batch,
    same_bits,
    snapshot,
    wrap,
)
from tests.world import world_of

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
        if world_of(model).handles[0].num_steps == before["layers.0.weight"]["step"]:
            num_skipped += 1
            assert_same_snapshot(before, snapshot(model))
        assert_same_state(model, theirs.plain)
    assert 1 < num_skipped < 7


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
        optimizer.zero_grad()
        assert_same_snapshot(before, snapshot(model))
        assert scaler.get_scale() == scale / 2
    scaler.scale(outside(model, {}, data())).backward()
    scaler.step(optimizer)
    assert world_of(model).handles[0].num_steps == 1


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
    handles = [world_of(first).by_names[f"layers.{i}.weight"] for i in (0, 1)]
    handles.append(world_of(second).by_names["layers.0.weight"])
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
            optimizer.zero_grad()
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
            optimizer.zero_grad()
        states.append((snapshot(model), grad, norm))
    assert_same_snapshot(states[0][0], states[1][0])  # a power of two: the same bits
    assert same_bits(states[0][1], states[1][1]) and same_bits(states[0][2], states[1][2])


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
    world_of(model).check()


def test_scales_do_not_mix_in_a_step(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path, gradients="accumulate")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    on_batch(model, 0).backward()
    with pytest.raises(gemini.GeminiError, match=r"cannot be added up.*zero_grad"):
        scaler.scale(on_batch(model, 0)).backward()
    with pytest.raises(gemini.GeminiError, match="was not scaled"):
        scaler.step(optimizer)
    model = wrap(Toy("loss"), "ram", tmp_path, precision="fp16", gradients="accumulate")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(data())).backward()
    scaler.update(SCALE / 2)
    with pytest.raises(gemini.GeminiError, match="scaled by 4096.*scaled by 2048"):
        scaler.scale(model(data())).backward()
    grad = model.full_grad("layers.0.weight")
    scaler.step(optimizer)  # with the scale that the gradients have
    plain = stock("loss")
    plain(data()).backward(torch.tensor(SCALE))
    assert same_bits(grad, plain.layers[0].weight.grad.float() / SCALE)  # type: ignore[union-attr, operator]


def test_no_backward_waits_for_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its value is there when all that was launched is: it is read where gradients of two backwards meet."""
    read, is_backward = list[bool](), [False]

    def value(scale: Scale) -> float:
        read.append(is_backward[0])
        return float(scale._given)

    monkeypatch.setattr(Scale, "value", property(value))
    model, scaler = wrap(Toy(), "standin", tmp_path, precision="fp16"), gemini.GradScaler("cpu", init_scale=8.0)
    optimizer = adam(model)
    for step in range(3):
        loss = scaler.scale(outside(model, {}, data(step)))
        is_backward[0] = True
        loss.backward()
        is_backward[0] = False
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert read and not any(read)


def test_the_stock_scaler_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path)  # in fp16 its backward is: test_plain_half.py
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(on_batch(model, 0)).backward()
    with pytest.raises(gemini.GeminiError, match=REMEDY):
        scaler.step(adam(model))


def test_updates_inside_backward_are_refused(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    with pytest.raises(gemini.GeminiError, match="step_in_backward=True"):
        gemini.GradScaler("cpu").scale(on_batch(model, 0)).backward()
    on_batch(model, 0).backward()
    optimizer.step()


def test_what_torch_refuses_changes_nothing(tmp_path: Path) -> None:
    model, half = wrap(Toy(), "ram", tmp_path, precision="fp16"), nn.Parameter(torch.ones(4, 32).half())
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE)
    optimizer.add_param_group({"params": [half]})
    scaler.scale(outside(model, {}, data() * half)).backward()
    scaled = half.grad.clone()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.step(optimizer)
    assert same_bits(half.grad, scaled)
    with pytest.raises(gemini.GeminiError, match="scaler.step"):
        optimizer.step()
    half.grad = None
    scaler.step(optimizer)


def test_gradients_that_wait_for_a_later_step_stay_scaled(tmp_path: Path) -> None:
    """Two optimizers, of which one steps every second time: gradients of its params are summed up meanwhile.

    The third layer belongs to none: nobody waits for its gradients.
    """
    models = [wrap(Toy(), where, tmp_path, precision="fp16", gradients="accumulate") for where in ("ram", "disk")]
    theirs = Plain(Toy(), "fp16", scale=SCALE, weight_decay=0.01)
    scaler, norms = gemini.GradScaler("cpu", init_scale=SCALE), []
    pairs = [[gemini.HybridAdam(m.layers[i].parameters(), lr=1e-2, weight_decay=0.01) for i in (0, 1)] for m in models]
    for step in range(2):
        for model, optimizers in zip(models, pairs, strict=True):
            scaler.scale(outside(model, {}, data(step))).backward()
            norms.append(float(model.clip_grad_norm_(1e9)))  # scaled, all of them: in torch it would be so
            for optimizer in optimizers[: step + 1]:
                scaler.step(optimizer)
                optimizer.zero_grad()
        scaler.update()
    assert norms[0] == norms[1] > 10 and norms[2] == norms[3] > 10
    for step in range(2):
        theirs.backward(outside(theirs.model, {}, data(step)))
        theirs.grads = {name: grad for name, grad in theirs.grads.items() if not name.startswith("layers.2")}
        later = {
            name: theirs.grads.pop(name) for name in list(theirs.grads) if name.startswith("layers.1") and not step
        }
        theirs.step()
        theirs.grads = later
    for name, param in theirs.model.named_parameters():
        for model in models:
            assert same_bits(model.full_param(name), param.detach()), name


def test_states_come_back(tmp_path: Path) -> None:
    model = wrap(Toy(), "ram", tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    for step in range(2):
        scaler.scale(outside(model, {}, data(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
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


# ---- beside a scaler ------------------------------------------------------------------------------------------------


class ReadsAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) @ self.other.weight


def test_a_jacobian_is_taken_beside_a_scaler(tmp_path: Path) -> None:
    """A scaler anywhere in the program makes every backward look for its scale: those of ``torch.func`` have none."""
    x, memory = torch.randn(2, 8), gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(
        precision="fp32", memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=1), max_chunk=64
    )
    model, plain = gemini.GeminiDDP(ReadsAnother(), config), ReadsAnother()
    gemini.GradScaler("cpu").scale(model(x).sum()).backward()
    found, wanted = (torch.func.jacrev(lambda x, m=m: m(x).sum(0))(x) for m in (model, plain))
    assert same_bits(found, wanted)
    world_of(model).check()
