"""Updates streamed through the device: the plan's bytes, the plain loop's bits, and no way to come too early."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import kernels
from gemini.errors import GeminiError
from gemini.memory.devices.device import Event
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.planes import GRAD
from gemini.planning.traffic import by_name
from gemini.planning.working import DEVICE_SLOTS
from gemini.tiers import Tier
from gemini.train.update import tiles
from gemini.train.update import worker as update_worker
from tests import models
from tests.standin_device import StandinDevice
from tests.train.helpers import manage, train
from tests.world import world_of

MAX_CHUNK = 8192
BATCHES = [batch for batches in models.make_batches(6, 1) for batch in batches]


def wrap(
    folder: Path, device: Any = "standin", *, gpu: str | int = "2MiB", cpu: str | int = "64MiB", homes: Any = None,
    **how: Any,
) -> Any:  # fmt: skip
    placement = gemini.StaticPlacement(**{"updates_on_gpu": 1.0, **(homes or {})})
    how = {"max_chunk": MAX_CHUNK, "placement": placement, **how}
    return manage(models.make_model("llama"), folder, device, gpu=gpu, cpu=cpu, **how)


def plain(**how: Any) -> Any:
    """All in host memory, in turn."""
    config = gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB"), device="cpu", overlap=False, **how)
    return gemini.GeminiDDP(models.make_model("llama"), config)


def adam(model: Any, **how: Any) -> gemini.HybridAdam:
    """Two groups."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return gemini.HybridAdam(groups, lr=1e-2, **how)


def step(model: Any, optimizer: Any, number: int) -> float:
    return train(model, optimizer, [number], lambda model, number: model(**BATCHES[number]).loss, clip=None)[0]


def assert_same(a: Any, b: Any) -> None:
    first, second = a.state_dict(dtype=torch.float32), b.state_dict(dtype=torch.float32)
    for name, value in second.items():
        models.assert_same_bits(first[name], value, name)


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_transient_gradients_without_room_to_wait_are_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the worker all the same: its slots on the device are all there are."""
    model, other = wrap(tmp_path, gradients="transient"), plain()
    monkeypatch.setattr(world_of(model).updates, "_hold", lambda num_bytes: False)
    threads, run = set[str](), tiles.StreamedTile.run
    monkeypatch.setattr(
        tiles.StreamedTile, "run", lambda tile: (threads.add(threading.current_thread().name), run(tile))
    )
    first, second = adam(model, step_in_backward=True), adam(other)
    for number in range(3):
        loss = model(**BATCHES[number]).loss
        loss.backward()
        assert not world_of(model).updates_in_flight, "their gradients are not in the ledger: none may wait"
        first.step()
        step(other, second, number)
    assert_same(model, other)
    assert threads == {"gemini-update"}


def test_sums_that_went_to_the_spill_file_are_added_by_the_host(tmp_path: Path) -> None:
    """Nothing is streamed from NVMe: such a chunk is updated as if nobody had said that it is streamed."""
    model, other = wrap(tmp_path), plain()
    ledger = world_of(model).ledger
    ledger.reserve(Tier.CPU, ledger.free(Tier.CPU) - 100_000, "somebody else")
    optimizers = adam(model), adam(other)
    for managed, optimizer in zip((model, other), optimizers, strict=True):
        for number in range(2):
            managed(**BATCHES[number]).loss.backward()
        optimizer.step()
    tiers = Counter(chunk.planes[GRAD].tier for chunk in world_of(model).chunks)
    assert tiers[Tier.NVME] and tiers[Tier.CPU], "some of the sums, for the test to see both"
    assert_same(model, other)


# ---- what the plan says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["retain", "accumulate", "transient"])
@pytest.mark.parametrize("homes", [{}, {"updates_on_gpu": 0.5}, {"weights_on_gpu": 0.5, "optimizer_on_gpu": 0.2}])
def test_bytes_held_and_moved_are_the_plan_s(gradients: str, homes: dict[str, float], tmp_path: Path) -> None:
    unwrapped = models.make_model("llama")
    trace = gemini.trace(unwrapped, BATCHES[0], precision="bf16", target="cpu")
    static = gemini.StaticPlacement(**{"updates_on_gpu": 1.0, **homes})
    there = {Tier.GPU: 2**21, Tier.CPU: 2**26, Tier.NVME: 2**26}
    said = gemini.plan(trace, None, there, placement=static, gradients=gradients, max_chunk=MAX_CHUNK)
    assert said.placement.streamed
    said = gemini.plan(trace, None, there, placement=said.placement, gradients=gradients, max_chunk=MAX_CHUNK)
    model = wrap(tmp_path, gpu=2**21, gradients=gradients, placement=type(said).from_json(said.to_json()))
    world, optimizer = world_of(model), adam(model, step_in_backward=gradients == "transient")
    assert world.placement == said.placement
    assert {i for i, chunk in enumerate(world.chunks) if chunk.streamed} == said.placement.streamed
    for tier, num_bytes in said.bytes_per_tier.items():
        gathers = said.problem.working_set + said.problem.in_flight if tier is Tier.GPU else 0
        assert world.used(tier) - world.held(tier, "pool") == num_bytes - gathers
    assert world.held(Tier.GPU, "staging") == said.problem.device_staging
    for number in range(3):
        step(model, optimizer, number)
        assert model.memory_report()["moved"] == by_name(said.traffic), "byte for byte"
    for tier in world.tiers:
        assert world.peak(tier) <= world.budget(tier)
    assert "staging" in str(model.memory_report())


def test_auto_streams_on_a_machine_whose_link_beats_its_host(tmp_path: Path) -> None:
    figures = {
        "h2d": 1e13, "d2h": 1e13, "gpu_bandwidth": 1e13, "update_cpu": 5e-9, "update_gpu": 1e-12, "nvme_read": 1e9,
        "nvme_write": 1e9, "gpu_flops_bf16": 1e15,
    }  # fmt: skip
    machine = Hardware("made up", {key: Figure(value, "a test") for key, value in figures.items()})
    trace = gemini.trace(models.make_model("llama"), BATCHES[0], precision="bf16", target="cpu")
    model = wrap(tmp_path, gpu="500KiB", placement="auto", trace=trace, hardware=machine, activations=0)
    other = plain()
    assert any(chunk.streamed for chunk in world_of(model).chunks)
    first, second = adam(model), adam(other)
    for number in range(3):
        assert step(model, first, number) == step(other, second, number)
        assert model.memory_report()["moved"] == by_name(world_of(model).plan.traffic)
    assert_same(model, other)


# ---- in a pipeline, and in order -------------------------------------------------------------------------------------


class Gate:
    """Notes the copies of each stream as they begin; ``fate`` may hold or fail one."""

    def __init__(self, fate: Callable[[str, int], None] = lambda stream, number: None):
        self.begun: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.fate = fate

    def __call__(self, stream: str) -> None:
        with self.changed:
            self.begun[stream] += 1
            number = self.begun[stream]
            self.changed.notify_all()
        self.fate(stream, number)


def test_tiles_go_through_in_a_pipeline_over_the_borders_of_chunks(tmp_path: Path) -> None:
    """The first copy out is held until every slot is on its way in: had each tile been waited for, it would stay so."""
    slots = 5 * DEVICE_SLOTS  # of each tile weights, residual, both states, and the gradient

    def hold(stream: str, number: int) -> None:
        if (stream, number) == ("update out", 1):
            with gate.changed:
                assert gate.changed.wait_for(lambda: gate.begun["update in"] >= slots, 10), dict(gate.begun)

    gate = Gate(hold)
    model = wrap(tmp_path, StandinDevice(gate=gate))
    world = world_of(model)
    first = min(world.chunks, key=lambda chunk: world.first_use[chunk.spec.index])
    tile = world.update_worker._device_tile
    assert first.spec.numel < DEVICE_SLOTS * tile, "it does not fill the slots alone"
    step(model, adam(model), 0)
    world.settle()
    tiles = gate.begun["update in"] // 5
    assert tiles * tile >= world.layout.numel and gate.begun["update out"] == 4 * tiles


def test_copies_of_an_update_wait_for_nothing_that_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots were waited for; what they take back comes after the kernel, by its event."""
    model = wrap(tmp_path)
    device, found, marks = world_of(model).device, list[tuple[str, bool, bool]](), list[Event]()
    copy = device.copy

    def mark() -> Event:
        marks.append(Event())
        marks[-1].finish()
        return marks[-1]

    def copying(into: Any, source: Any, stream: str, after: Any = None, **how: Any) -> Event:
        found.append((stream, after in marks, how.get("behind_computing", True)))
        return copy(into, source, stream, after, **how)

    monkeypatch.setattr(device, "copy", copying)
    monkeypatch.setattr(device, "mark", mark)
    step(model, adam(model), 0)
    world_of(model).settle()
    of_updates = {how for how in found if how[0].startswith("update")}
    assert of_updates == {("update in", False, False), ("update out", True, False)}


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_no_kernel_before_what_was_computed_when_it_was_handed_over(
    gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients may not be there yet, and weights that live on the device may still be read."""
    homes = {"weights_on_gpu": 1.0} if gradients == "retain" else {}
    model = wrap(tmp_path, gradients=gradients, homes=homes)
    optimizer = adam(model, step_in_backward=gradients == "transient")
    step(model, optimizer, 0)
    world_of(model).settle()
    trainer, early, beside = threading.get_ident(), list[bool](), list[str]()
    device, real, check = world_of(model).device, kernels.update, update_worker.check_finite
    worker = world_of(model).update_worker
    run, under_way = worker._update, list[Any]()

    def mark() -> Event:
        event = Event()
        if threading.get_ident() == trainer:  # what training computes takes its time
            threading.Timer(0.05, event.finish).start()
        else:
            event.finish()
        return event

    def looked(segments: Any) -> None:
        early.append(not next(reversed(worker._open)).ready.is_complete())
        check(segments)

    def updating(job: Any, tile: Any) -> None:
        under_way[:] = [job]
        run(job, tile)

    def update(*args: Any) -> bool:
        early.append(not under_way[0].ready.is_complete())
        return real(*args)

    monkeypatch.setattr(worker, "_update", updating)

    monkeypatch.setattr(device, "mark", mark)
    monkeypatch.setattr(device, "beside", lambda name: (beside.append(name), type(device).beside(device, name))[1])
    monkeypatch.setattr(kernels, "update", update)
    monkeypatch.setattr(update_worker, "check_finite", looked)
    step(model, optimizer, 1)
    world_of(model).settle()
    assert early and not any(early) and set(beside) == {"update"}


def test_an_update_that_waits_for_its_gradients_keeps_none_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update has begun, and is held, when a second one comes, whose gradients then do not."""

    def until(come: Callable[[], bool]) -> None:
        for _ in range(3000):
            if come():
                return
            time.sleep(0.01)
        raise AssertionError("it did not come")

    def hold(stream: str, number: int) -> None:
        if (stream, number) == ("update in", 1):
            until(lambda: len(world.updates_in_flight) > 1)

    gate = Gate(hold)
    model = wrap(tmp_path, StandinDevice(gate=gate), gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    world, trainer, marks = world_of(model), threading.get_ident(), list[Event]()

    def mark() -> Event:
        event = Event()
        if threading.get_ident() != trainer or not marks:
            event.finish()
        if threading.get_ident() == trainer:
            if marks:
                until(lambda: bool(gate.begun["update in"]))
            marks.append(event)
        return event

    monkeypatch.setattr(world.device, "mark", mark)
    model(**BATCHES[0]).loss.backward()
    first, *others = world.updates_in_flight
    first.wait()
    assert others and not any(job.is_complete() for job in others)
    for event in marks[1:]:
        event.finish()
    optimizer.step()
    world.check()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("stream", "number"), [("in", 1), ("in", 30), ("out", 1), ("out", 9)])
def test_a_copy_that_fails_surfaces_and_nothing_hangs(stream: str, number: int, overlap: bool, tmp_path: Path) -> None:
    fails = list[int]()

    def fail(at: str, count: int) -> None:
        if at == f"update {stream}" and count - before == number and fails:
            raise OSError("the link is down")

    gate, before = Gate(fail), 0
    model, other = wrap(tmp_path, StandinDevice(gate=gate), overlap=overlap), plain()
    first, second = adam(model), adam(other)
    step(model, first, 0)
    gemini.save_checkpoint(tmp_path / "ckpt", model, first)
    before = gate.begun[f"update {stream}"]
    fails.append(1)
    with pytest.raises(GeminiError, match="the link is down"):
        step(model, first, 1)
        model(**BATCHES[2])
    fails.clear()
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        step(model, first, 2)
    gemini.load_checkpoint(tmp_path / "ckpt", model, first)
    step(other, second, 0)
    for count in (1, 2):
        assert step(model, first, count) == step(other, second, count)
    assert_same(model, other)
    world_of(model).check()


def test_a_budget_without_room_for_the_staging_is_refused_with_the_remedy(tmp_path: Path) -> None:
    problem = world_of(wrap(tmp_path, overlap=False)).problem
    needed = problem.spoken_for(streams=True)[Tier.GPU]
    with pytest.raises(gemini.BudgetExceeded, match=r"1 B missing on gpu.*which these budgets hold"):
        wrap(tmp_path, gpu=needed - 1)
    assert wrap(tmp_path, gpu=needed - 1, homes={"updates_on_gpu": 0.0}) is not None
    model, other = wrap(tmp_path, gpu=needed), plain()
    assert len(world_of(model).staging.on_device) == 1, "one slot, which the lane has for itself"
    first, second = adam(model), adam(other)
    for number in range(3):
        assert step(model, first, number) == step(other, second, number)
    assert_same(model, other)
