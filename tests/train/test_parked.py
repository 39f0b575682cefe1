"""``model.parked()``: nothing is left on the GPU, everything is readable by name, and training keeps its bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import gemini
from gemini.errors import BudgetExceeded, GeminiError
from gemini.planning import rules as spec_rules
from gemini.tiers import Tier
from tests.scaling import backward, clip_grads, make_step, new_scaler
from tests.standin_device import StandinDevice
from tests.standins import PieceDevice
from tests.train import helpers
from tests.train.helpers import batch, llama, step_on
from tests.train.moments import interrupt_at, moments_of
from tests.world import world_of

PLENTY = {"gpu": "64MiB", "cpu": "64MiB", "nvme": "64MiB"}
RESIDENT: dict[str, Any] = {}
HALF: dict[str, Any] = {
    "placement": gemini.StaticPlacement(weights_on_gpu=0.5, optimizer_on_gpu=0.3, optimizer_on_nvme=0.2)
}
STREAMED: dict[str, Any] = {"placement": gemini.StaticPlacement(weights_on_gpu=0.4, updates_on_gpu=1.0)}


def wrap(path: Path, model: Any = None, memory: dict[str, Any] | None = None, **how: Any) -> Any:
    memory = {"nvme_path": path, **PLENTY, **(memory or {})}
    settings = {"device": CountingDevice(), "max_chunk": 8192, "memory": gemini.MemoryBudget(**memory), **how}
    return gemini.GeminiDDP(llama(tied=True) if model is None else model, gemini.GeminiConfig(**settings))


class CountingDevice(StandinDevice):
    """Knows what memory it has given out and not got back."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = super().make_buffer(num_bytes)
        self.made.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer


def bytes_there(model: Any) -> int:
    """Bytes behind buffers and windows, and frames that wait for the next one, asked of the memory itself."""
    world = world_of(model)
    storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in world.device.made]  # type: ignore[attr-defined]
    windows = sum(c.window.num_bytes for c in world.chunks if c.window is not None and c.gathered)
    return sum(s.nbytes() for s in storages if s is not None) + windows + world.device.frames.parked_bytes


@contextmanager
def parked(model: Any) -> Iterator[None]:
    """Parked, and looked at from all sides."""
    world = world_of(model)
    before = {tier: world.holders(tier) for tier in world.tiers}
    homes = [{kind: plane.tier for kind, plane in chunk.planes.items()} for chunk in world.chunks]
    with model.parked():
        assert world.used(Tier.GPU) == 0 and bytes_there(model) == 0
        assert all(plane.tier is not Tier.GPU for chunk in world.chunks for plane in chunk.planes.values())
        world.check()
        yield
    world.check()
    assert [{kind: plane.tier for kind, plane in chunk.planes.items()} for chunk in world.chunks] == homes
    for tier, held in before.items():
        now = world.holders(tier)
        if tier is Tier.GPU:  # windows are empty, and their pool is as large as the two were
            held = {**held, "windows": 0, "pool": held.get("pool", 0) + held.get("windows", 0)}
        flights = ("gradients in flight", "guesses")  # over now, perhaps not then
        wanted = {holder: size for holder, size in held.items() if size and holder not in flights}
        assert {holder: size for holder, size in now.items() if size} == wanted


def train(model: Any, *, parks: bool, steps: int = 4, micro: int = 2, **how: Any) -> Any:
    """Train, parking between micro-batches, before the step and right behind it."""
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1, **how)
    keeps = not how.get("step_in_backward")
    for step in range(steps):
        for number in range(micro if keeps else 1):
            model(**batch(10 * step + number)).loss.backward()
            if parks:
                with parked(model):
                    grad = model.full_grad("model.norm.weight")
                    assert not keeps or (grad is not None and grad.any())
        if keeps:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        if parks:
            with parked(model):  # its updates are in flight
                model.full_param("model.norm.weight")
        optimizer.zero_grad()
    return helpers.snapshot(model)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(helpers.same_bits(value, wanted[name]) for name, value in found.items())


CASES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT, "half": HALF, "streamed": STREAMED, "fp32": {**HALF, "precision": "fp32"},
    "windows": {"placement": gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=0.5)},
    "in turn": {**HALF, "overlap": False}, "compact": {"states": "compact"},
    "activations": {**HALF, "offload_activations": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_keeps_its_bits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)
    how = {"gradients": "accumulate", **CASES[case]}
    wanted = train(wrap(tmp_path, **how), parks=False)
    helpers.assert_same_snapshot(train(wrap(tmp_path, **how), parks=True), wanted)


@pytest.mark.parametrize("how", [{"step_in_backward": True}, {"step_in_backward": True, "speculate": True}])
def test_updates_inside_backward(how: dict[str, Any], tmp_path: Path) -> None:
    wanted = train(wrap(tmp_path, **HALF), parks=False, **how)
    helpers.assert_same_snapshot(train(wrap(tmp_path, **HALF), parks=True, **how), wanted)


def test_on_a_cpu_nothing_moves_and_nothing_computes(tmp_path: Path) -> None:
    model = helpers.wrap(llama(), "disk", tmp_path)
    before = world_of(model).holders(Tier.CPU)
    with model.parked():
        assert world_of(model).holders(Tier.CPU) == before
        with pytest.raises(GeminiError, match="the model is parked"):
            model(**batch(0))
    model(**batch(0))


def test_many_cycles_grow_nothing(tmp_path: Path) -> None:
    model = wrap(tmp_path, memory={"cpu": "600KiB"}, **HALF)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    world, sizes = world_of(model), set()
    for cycle in range(200):
        if cycle % 50 == 0:
            step_on(model(**batch(cycle)).loss, optimizer)
        with parked(model):
            assert any(p.tier is Tier.NVME for c in world.chunks for p in c.planes.values())
        if cycle % 50 == 10:
            gc.collect()
            sizes.add((world.spill.num_bytes, len(gc.get_objects()) // 1000))
    assert len(sizes) == 1, sizes


# ---- inside ----------------------------------------------------------------------------------------------------------


def test_what_computes_is_refused_and_what_reads_is_not(tmp_path: Path) -> None:
    model = wrap(tmp_path, **HALF)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    loss = model(**batch(0)).loss
    loss.backward()
    whole = model.state_dict()
    name, param = next(iter(model.named_parameters()))
    with model.parked():
        for compute in (
            lambda: model(**batch(0)),
            lambda: model.model.norm(torch.zeros(1, 32, dtype=torch.bfloat16)),
            lambda: model.gathered(param).__enter__(),
            lambda: (param.float() ** 2).sum(),
            optimizer.step,
        ):
            with pytest.raises(GeminiError, match="the model is parked"):
                compute()
        assert_same(model.state_dict(), whole)
        assert torch.equal(param.data, whole[name]) and torch.equal(model.full_param(name), whole[name])
        model.save_pretrained(tmp_path / "inside")
        with pytest.raises(GeminiError, match="the model is parked"):
            gemini.release(model)
        with model.parked():
            pass
        assert world_of(model).used(Tier.GPU) == 0, "the outer block is not over"
    model.save_pretrained(tmp_path / "outside")
    files = [(tmp_path / where / "model.safetensors").read_bytes() for where in ("inside", "outside")]
    assert files[0] == files[1]
    with pytest.raises(GeminiError, match="inside a forward, a backward or gathered"), model.gathered():
        with model.parked():
            raise AssertionError("inside")
    optimizer.step()
    model(**batch(0)).loss.backward()


def test_what_is_loaded_and_saved_inside_stays(tmp_path: Path) -> None:
    other = llama(tied=True)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
    model, wanted = wrap(tmp_path, **HALF), wrap(tmp_path, other, **HALF)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    step_on(model(**batch(1)).loss, optimizer)
    with model.parked():
        gemini.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    saved = helpers.snapshot(model)
    with model.parked():
        model.load_state_dict(wanted.state_dict(dtype=torch.float32))
    assert_same(model.state_dict(dtype=torch.float32), wanted.state_dict(dtype=torch.float32))
    assert torch.equal(model(**batch(0)).loss, wanted(**batch(0)).loss)
    with model.parked():
        gemini.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    helpers.assert_same_snapshot(helpers.snapshot(model), saved)


def test_a_backward_of_before_finds_its_weights_or_is_refused(tmp_path: Path) -> None:
    """A graph of weights that stay on the GPU looks into them; one of weights that move does not."""
    model = wrap(tmp_path, **RESIDENT)
    loss = model(**batch(0)).loss
    held = world_of(model).holders(Tier.GPU)
    with pytest.raises(GeminiError, match=r"a graph whose backward is to come, still looks into"), model.parked():
        pass
    assert world_of(model).holders(Tier.GPU) == held
    loss.backward()
    wanted = model.full_grad("model.norm.weight")
    moving = wrap(tmp_path, placement=gemini.StaticPlacement())
    loss = moving(**batch(0)).loss
    with parked(moving):
        with pytest.raises(GeminiError, match="the model is parked"):
            loss.backward(retain_graph=True)
    loss = moving(**batch(0)).loss
    with parked(moving):
        pass
    loss.backward()
    assert wanted is not None and torch.equal(moving.full_grad("model.norm.weight"), wanted)


def test_a_view_of_the_program_is_named(tmp_path: Path) -> None:
    for how in (RESIDENT, {"placement": gemini.StaticPlacement()}):
        model = wrap(tmp_path, **how)
        with model.gathered():
            view = dict(model.named_parameters())["model.norm.weight"].detach()
        with pytest.raises(GeminiError, match=r"looks into the weights of 1 chunks on gpu"), model.parked():
            pass
        del view
        with parked(model):
            pass


def test_an_error_inside_comes_out_and_the_model_comes_back(tmp_path: Path) -> None:
    wanted, model = wrap(tmp_path, **HALF), wrap(tmp_path, **HALF)
    with pytest.raises(ZeroDivisionError), parked(model):
        raise ZeroDivisionError
    helpers.assert_same_snapshot(train(model, parks=False), train(wanted, parks=False))


# ---- no room ---------------------------------------------------------------------------------------------------------


def test_no_room_below_is_told_before_anything_moves(tmp_path: Path) -> None:
    model = wrap(tmp_path, memory={"cpu": "300KiB", "nvme": None, "nvme_path": None}, **RESIDENT)
    world = world_of(model)
    held = {tier: dict(world.holders(tier)) for tier in world.tiers}
    with pytest.raises(BudgetExceeded, match=r"have no room there .*raise the cpu budget, or give nvme_path="):
        with model.parked():
            raise AssertionError("inside")
    for tier, before in held.items():
        assert {k: v for k, v in world.holders(tier).items() if v} == before
    wanted = wrap(tmp_path, **RESIDENT)
    helpers.assert_same_snapshot(train(model, parks=False), train(wanted, parks=False))


def test_weights_come_first_into_host_memory(tmp_path: Path) -> None:
    model = wrap(tmp_path, memory={"cpu": "300KiB"}, **RESIDENT)
    with parked(model):
        tiers = {kind: {c.planes[kind].tier for c in world_of(model).chunks} for kind in ("weights", "exp_avg_sq")}
        assert tiers["weights"] == {Tier.CPU} and Tier.NVME in tiers["exp_avg_sq"]


def test_others_that_hold_the_memory_keep_it_parked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = wrap(tmp_path, **HALF), wrap(tmp_path, **HALF)
    device = world_of(model).device

    def refuse(budget: Any, *args: Any, **how: Any) -> None:
        if budget is not None:
            raise BudgetExceeded("others hold it")

    with monkeypatch.context() as patch:
        patch.setattr(device, "begin_budget", refuse)
        with pytest.raises(BudgetExceeded, match="others hold it"), model.parked():
            pass
    assert world_of(model).used(Tier.GPU) == 0 and bytes_there(model) == 0
    with pytest.raises(GeminiError, match="tries again"):
        model(**batch(0))
    with model.parked():
        assert world_of(model).used(Tier.GPU) == 0
    helpers.assert_same_snapshot(train(model, parks=False), train(wanted, parks=False))


@pytest.mark.parametrize("every", [60, pytest.param(9, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_parks_all_of_it_or_nothing(every: int, tmp_path: Path) -> None:
    """And the next block brings back what it has left parked."""
    model = wrap(tmp_path, **HALF)
    world = world_of(model)
    train(model, parks=False, steps=1)

    def park() -> None:
        with model.parked():
            pass

    def held() -> dict[Tier, dict[str, int]]:
        return {tier: {holder: n for holder, n in world.holders(tier).items() if n} for tier in world.tiers}

    park()
    before, wanted, num_interrupted = held(), helpers.snapshot(model), 0
    for moment in moments_of(park)[::every]:
        try:
            interrupt_at(moment, park)
        except KeyboardInterrupt:
            num_interrupted += 1
        park()  # not sooner: the frames of the interrupt look into the planes
        world.check()
        assert held() == before, moment
        helpers.assert_same_snapshot(helpers.snapshot(model), wanted)
    assert num_interrupted > 30


# ---- what is special about some models -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [RESIDENT, HALF])
def test_a_loss_scale_and_masters_that_are_cast(how: dict[str, Any], tmp_path: Path) -> None:
    def run(*, parks: bool) -> Any:
        model = wrap(tmp_path, precision="fp16", **how)
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
        new_scaler(model, 2.0**10)
        for step in range(3):
            loss = model(**batch(step)).loss
            backward(model, loss)
            del loss
            if parks:
                with parked(model):
                    weights = dict(gemini.weights_for(model))
                assert weights["model.norm.weight"].dtype == torch.float16
            clip_grads(model, optimizer, 1.0)
            make_step(model, optimizer)
            optimizer.zero_grad()
            if parks:
                with parked(model):
                    pass
        return helpers.snapshot(model)

    helpers.assert_same_snapshot(run(parks=True), run(parks=False))


def test_windows_that_are_cut_out_of_one_piece(tmp_path: Path) -> None:
    def run(*, parks: bool) -> Any:
        device = PieceDevice(poison=True)
        model = wrap(tmp_path, device=device, placement=gemini.StaticPlacement())
        pieces, optimizer = device.pieces, gemini.HybridAdam(model.parameters(), lr=1e-2)
        assert pieces.num_bytes > 0
        for step in range(4):
            step_on(model(**batch(step)).loss, optimizer)
            if parks:
                with model.parked():
                    assert pieces.num_bytes == world_of(model).used(Tier.GPU) == 0
        return helpers.snapshot(model)

    helpers.assert_same_snapshot(run(parks=True), run(parks=False))
