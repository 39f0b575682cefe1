"""``zero_grad(set_to_none=False)``: what gets no gradient afterwards is updated with zeros, as in torch."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.memory.chunks.chunk import FilePlane
from gemini.memory.devices.pages import host_bytes
from gemini.memory.nvme import SpillFile
from gemini.planning.planes import ADAM
from tests.train.helpers import (
    ALL_PLACEMENTS,
    DTYPES,
    PLACEMENTS,
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    batch,
    failing,
    llama,
    make_config,
    noise,
    same_bits,
    snapshot,
    squares,
    train,
    trainable,
    wrap,
)
from tests.world import world_of

PATHS = ((0, 1), (1, 2), (1,), (2, 0), (0, 1))
"""Which layers each step uses: layer 2 has had no gradient when the first step is over, and so has no zeros then."""


def loss_of(model: Any, step: int, precision: str) -> torch.Tensor:
    model.path = PATHS[step]
    return model(noise(2, 5, 32, seed=step, dtype=DTYPES[precision])).float().square().mean()  # type: ignore[no-any-return]


def train_plain(plain: Plain, zeroing: list[str], *, clip: bool) -> None:
    kept: dict[str, torch.Tensor] = {}
    for step, how in enumerate(zeroing):
        plain.backward(loss_of(plain.model, step, plain.precision))
        plain.grads = {**kept, **plain.grads}
        there = dict(plain.grads)
        if clip:
            plain.clip(0.01)
        plain.step()
        kept = {} if how == "none" else {name: torch.zeros_like(grad) for name, grad in there.items()}


def zero(model: Any, optimizer: Any, how: str) -> None:
    if how == "parts":
        for layer in model.layers:
            layer.zero_grad(set_to_none=False)
    elif how == "none":
        optimizer.zero_grad()
    else:
        (model if how == "model" else optimizer).zero_grad(set_to_none=False)


@pytest.mark.parametrize("how", ["optimizer", "model", "parts"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_unused_params_are_updated_with_zeros(where: str, precision: str, how: str, tmp_path: Path) -> None:
    zeroing = [how, how, how, "none", how]
    plain = Plain(Blocks(), precision, scale=2.0**16 if precision == "fp16" else None)
    train_plain(plain, zeroing, clip=True)
    model = wrap(Blocks(), where, tmp_path, precision=precision)
    optimizer, scaler = adam(model), gemini.GradScaler(init_scale=2.0**16, enabled=precision == "fp16")
    for step, zeroed in enumerate(zeroing):
        scaler.scale(loss_of(model, step, precision)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()
        assert model.full_grad("layers.1.weight") is None, "the step has used it"
        zero(model, optimizer, zeroed)
        grad = model.full_grad("layers.1.weight")
        assert grad is None if zeroed == "none" else grad is not None and not grad.any()
    assert_same_state(model, plain)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_when_the_optimizer_steps_in_backward(where: str, tmp_path: Path) -> None:
    plain = Plain(Blocks())
    train_plain(plain, ["optimizer"] * 5, clip=False)
    model = wrap(Blocks(), where, tmp_path)
    optimizer = adam(model, step_in_backward=True)
    for step in range(5):
        loss_of(model, step, "bf16").backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert_same_state(model, plain)


def test_a_skipped_step_leaves_zeros_as_well(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler(init_scale=2.0**16)
    scaler.scale(loss_of(model, 0, "fp16") * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss_of(model, 2, "fp16")).backward()
    scaler.step(optimizer)
    steps = {name: int(optimizer.full_state(name)["step"]) for name in ("layers.0.weight", "layers.1.weight")}
    assert steps == {"layers.0.weight": 1, "layers.1.weight": 1}


def test_a_gradient_of_zeros_is_dropped_as_any_other(tmp_path: Path) -> None:
    model, optimizer = trainable(Blocks(), "disk", tmp_path)
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.layers[1].weight.grad = None
    assert model.full_grad("layers.1.weight") is None and model.full_grad("layers.1.bias") is not None
    loss_of(model, 3, "bf16").backward()
    optimizer.step()
    assert [int(optimizer.full_state(f"layers.1.{name}")["step"]) for name in ("weight", "bias")] == [1, 2]


def test_gradients_that_are_kept_nowhere_cannot_be_zeros(tmp_path: Path) -> None:
    model = gemini.GeminiDDP(Blocks(), make_config(Blocks(), "ram", tmp_path, gradients="transient"))
    optimizer = adam(model, step_in_backward=True)
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    with pytest.raises(gemini.GeminiError, match=r'set_to_none=False.*gradients="transient".*zero_grad\(\)'):
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()


def test_a_gradient_that_a_step_has_used_is_not_added_to(where: str, tmp_path: Path) -> None:
    """torch would add; params that get no gradient, or were dropped one by one, are nobody's business."""
    plain, model = Plain(Blocks()), wrap(Blocks(), where, tmp_path)
    optimizer = adam(model)
    plain.backward(loss_of(plain.model, 0, "bf16"))
    plain.step()
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    loss_of(model, 1, "bf16").backward()  # another loss may bring gradients that nobody uses
    for use in (optimizer.step, lambda: model.clip_grad_norm_(1.0), lambda: model.full_grad("layers.1.weight")):
        with pytest.raises(gemini.GeminiError, match=r"step\(\) has used the one before it without zero_grad\(\)"):
            use()
    optimizer.zero_grad()
    plain.backward(loss_of(plain.model, 1, "bf16"))
    plain.step()
    loss_of(model, 1, "bf16").backward()
    optimizer.step()
    for layer in (model.layers[1], model.layers[2]):
        for param in layer.parameters():
            param.grad = None
    plain.backward(loss_of(plain.model, 2, "bf16"))
    plain.step()
    loss_of(model, 2, "bf16").backward()
    optimizer.step()
    assert_same_state(model, plain)


def test_a_gradient_that_a_step_has_used_is_not_used_again(where: str, tmp_path: Path) -> None:
    """Neither by a second step nor by one of other params; a backward and zero_grad() go on as if neither was asked."""
    plain, model = Plain(Blocks()), wrap(Blocks(), where, tmp_path)
    optimizer = adam(model)
    plain.backward(loss_of(plain.model, 0, "bf16"))
    plain.step()
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    refusal = r"one of \d+, has no new gradient, and optimizer.step\(\) has used the one before it without zero"
    with pytest.raises(gemini.GeminiError, match=refusal):
        optimizer.step()
    model.layers[1](noise(2, 32)).float().square().mean().backward()
    model.layers[1].zero_grad()
    with pytest.raises(gemini.GeminiError, match=refusal):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert_same_state(model, plain)


# ---- ``p.grad`` of a managed model, which is None: whoever would do nothing with it is refused, or warned once -------


CLIPPING = {
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.1),
    "clip_grads_with_norm_": lambda params: nn.utils.clip_grads_with_norm_(params, 0.1, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_torchs_clipping_is_refused(name: str, where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path)
    squares(model, 0).backward()
    for params in (model.parameters(), list(model.parameters()), model.layers[1].weight):
        with pytest.raises(gemini.GeminiError, match=rf"nn.utils.{name} would .*clip_grad_norm_\(max_norm\)"):
            CLIPPING[name](params)


def reads(model: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for param in model.parameters():
            assert param.grad is None
    return told


@pytest.mark.parametrize("gradients", ["retain", "accumulate", "transient"])
def test_a_read_after_a_backward_warns_once(gradients: str, tmp_path: Path) -> None:
    model, other = (wrap(Blocks(), "disk", tmp_path, gradients=gradients) for _ in range(2))
    optimizer = adam(model, step_in_backward=gradients == "transient")
    squares(model, 0)
    assert reads(model) == []  # there is none to be missed
    squares(model, 0).backward()
    (told,) = reads(model)
    assert told.category is UserWarning and told.filename == __file__
    assert "p.grad of managed param 'layers.0.weight'" in str(told.message)
    assert "model.full_grad(name)" in str(told.message)
    optimizer.step()
    optimizer.zero_grad()
    squares(model, 0).backward()
    assert reads(model) == []
    keep = adam(other, step_in_backward=gradients == "transient")
    squares(other, 0).backward()
    assert len(reads(other)) == 1, "once per model"
    del keep


def test_nothing_of_ours_warns(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(Blocks(), where, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(2), squares)
        for seed in range(2):  # a second backward finds gradients
            squares(model, seed).backward()
            model.full_grad("layers.0.weight")
            snapshot(model)
        repr(model)
        optimizer.step()
        gemini.save_checkpoint(tmp_path / "c", model, optimizer)
        optimizer.zero_grad()
        model.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        gemini.HybridAdam(model.parameters())


@pytest.mark.parametrize("where", PLACEMENTS)
def test_hooks_see_a_gradient_before_it_is_taken(where: str, tmp_path: Path) -> None:
    """``register_post_accumulate_grad_hook``, before wrapping and after it: both see and change ``param.grad``."""

    def grads(*, before: bool) -> list[torch.Tensor]:
        net = Blocks()
        model = net if before else wrap(net, where, tmp_path, precision="fp32")
        param, seen = model.layers[1].weight, []

        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            seen.append(param.grad.clone())
            param.grad.mul_(2.0)

        param.register_post_accumulate_grad_hook(hook)
        model = wrap(net, where, tmp_path, precision="fp32") if before else model
        model(noise(2, 5, 32, dtype=torch.float32)).square().mean().backward()
        return [*seen, model.full_grad("layers.1.weight")]

    (seen, kept), (other_seen, other_kept) = grads(before=True), grads(before=False)
    assert same_bits(seen, other_seen) and same_bits(kept, other_kept)
    assert same_bits(kept.view_as(seen), seen * 2.0)


# ---- a second backward turns retained gradients into fp32 sums -------------------------------------------------------

# Where they fit, and never in the room that steps need.


def managed(cpu: int, nvme: int, path: Path) -> Any:
    memory = gemini.MemoryBudget(cpu=cpu * 2**10, nvme=nvme * 2**10, nvme_path=path)
    return gemini.GeminiDDP(llama(), gemini.GeminiConfig(device="cpu", memory=memory))


def holders(model: Any) -> dict[Any, dict[str, int]]:
    ledger = world_of(model).ledger
    return {tier: ledger.holders(tier) for tier in ledger.tiers}


@pytest.mark.parametrize("cpu", [1036, 1060, 1108, 1156, 1228])
@pytest.mark.parametrize("nvme", [2**16, 700, 200])
def test_every_budget_has_the_right_bits_or_the_documented_error(cpu: int, nvme: int, tmp_path: Path) -> None:
    """Where a plan has kept everything in memory: sums are kept there too, or refused; for them nothing goes to NVMe.

    A refused backward leaves gradients, ledger and spill file as they were, however often it is tried.
    """
    model, plain = managed(cpu, nvme, tmp_path), Plain(llama())
    optimizer = adam(model)
    refused = 0
    for step in range(3):
        model(**batch(0)).loss.backward()
        plain.backward(plain.model(**batch(0)).loss)
        before, grads = holders(model), {name: model.full_grad(name) for name in plain.states}
        try:
            model(**batch(1)).loss.backward()
            plain.backward(plain.model(**batch(1)).loss)
        except gemini.BudgetExceeded as e:
            refused += 1
            assert "a second backward before optimizer.step() needs fp32 sums" in str(e)
            assert holders(model) == before
            for name, grad in grads.items():
                assert same_bits(model.full_grad(name), grad), name  # type: ignore[arg-type]
            if step == 1:
                model.zero_grad()
                plain.grads = {}
                assert holders(model) == before
                continue
        model.clip_grad_norm_(1.0)
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        assert_same_state(model, plain)
    assert refused == (0 if cpu >= 896 + 256 else 3)  # weights, states and gradients, and the sums


def test_sums_that_do_not_all_fit_leave_room_for_the_staging_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemini.planning.working.TILE", 4096)
    model = managed(1108, 2**16, tmp_path)
    for _ in range(2):
        model(**batch()).loss.backward()
    assert all(held.get("grad") for held in holders(model).values() if held)
    world_of(model).check()


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_a_failing_disk_loses_no_gradient(number: int, tmp_path: Path) -> None:
    """In the middle of it: gradients in either form, and nothing is reserved for nothing."""
    model = managed(700, 2**16, tmp_path)
    world, optimizer = world_of(model), adam(model)
    model(**batch(0)).loss.backward()
    before, grads = snapshot(model), {h.name: model.full_grad(h.name) for h in world.handles}
    gone = gemini.StorageError("the disk is gone")
    with failing(SpillFile, "begin_write", number + 1, gone), pytest.raises(gemini.StorageError, match="is gone"):
        model(**batch(1)).loss.backward()
    world.forget_interrupted()
    assert_same_snapshot(before, snapshot(model))
    for name, grad in grads.items():
        found = model.full_grad(name)
        assert found is not None and grad is not None and torch.equal(found.float(), grad.float()), name
    for tier in world.tiers:
        for kind in ADAM.kinds:
            planes = [c.planes[kind] for c in world.chunks if kind in c.planes and c.planes[kind].tier is tier]
            assert world.held(tier, kind) == sum(plane.num_bytes for plane in planes), (tier, kind)
    model(**batch(1)).loss.backward()
    optimizer.step()
    world.check()


def test_a_slot_that_was_given_back_reads_as_zeros(tmp_path: Path) -> None:
    """What stood there was a gradient, and what comes there may be states of a param that becomes trained."""
    spill = SpillFile(tmp_path, 2**21 + 4096)
    numel = (2**21 + 4096) // 4
    plane, ones = FilePlane(spill, numel, torch.float32), host_bytes(4 * numel).view(torch.float32)
    plane.store(0, numel, ones.fill_(1.0))
    plane.give_back()
    again, found = FilePlane(spill, numel, torch.float32), host_bytes(4 * numel).view(torch.float32).fill_(2.0)
    again.load(0, numel, found)
    assert again._offset == plane._offset and not found.any()
    spill.close()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_gradient_of_minus_zero_onto_zeros(placement: str, tmp_path: Path) -> None:
    """0.0 + -0.0 is 0.0; where nothing was before, -0.0 stays."""
    model = wrap(Scaled(), placement, tmp_path, precision="fp32")
    optimizer, signs = adam(model), list[bool]()
    for _ in range(2):
        model(torch.full((32,), -0.0)).sum().backward()
        signs.append(bool(model.full_grad("scale").signbit().any()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert signs == [True, False]
