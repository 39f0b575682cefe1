"""Offloaded activations beside computing: the bits of doing it in turn, whatever the timing and the room."""

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.memory.nvme import SpillFile
from gemini.planning import working
from gemini.tiers import Tier
from gemini.train.activations import flights as activation_flights
from gemini.train.activations.flights import IN_FLIGHT, Flights
from tests.standin_device import StandinDevice
from tests.standins import RandomClock
from tests.train.helpers import least, manage, step_on
from tests.world import world_of

ROWS, WIDTH, LAYERS = 128, 64, 6
INPUT = ROWS * WIDTH * 2
"""Bytes of what one block is given, in bf16: four pages, and the least that is offloaded."""
WAYS = [("cpu", "nvme"), ("standin", "cpu"), ("standin", "nvme")]
PATIENCE = 30.0


class Stack(nn.Module):
    """Checkpointed blocks that share a second input; ``spoils``: what a block was given is overwritten after it."""

    def __init__(self, *, spoils: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.spoils = spoils

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0.5, 1.5, x.numel()).view_as(x).to(x.dtype)
        x = x * scale
        for number, layer in enumerate(self.layers):
            given = x.t().contiguous().t() if number == 2 else x  # once another layout
            x = checkpoint(lambda t, s, layer=layer: torch.tanh(layer(t)) * s, given, scale, use_reentrant=False)
            if self.spoils:
                given.detach().fill_(float("nan"))
        return x.float().square().mean()


def wrap(
    folder: Path, device: Any = "cpu", offload: str | None = "nvme", *, overlap: bool = True, spoils: bool = False,
    placement: Any = "auto", **memory: Any,
) -> Any:  # fmt: skip
    budget = {"cpu": "16MiB", "gpu": None if device == "cpu" else "16MiB", "nvme": "16MiB", **memory}
    how = {"offload_activations": offload, "overlap": overlap, "placement": placement}
    return manage(Stack(spoils=spoils), folder, device, **budget, **how).train()


def noise(step: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


def adam(model: Any) -> gemini.HybridAdam:
    return gemini.HybridAdam(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any = None, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = optimizer or adam(model), []
    for step in range(steps):
        loss = model(noise(step))
        loss.backward()
        losses += [loss.item(), float(model.clip_grad_norm_(1.0))]
        optimizer.step()
        optimizer.zero_grad()
    nothing_is_left(model)
    return losses, model.state_dict(dtype=torch.float32)


def same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def held(model: Any, holder: str) -> int:
    world_of(model).activations.parked.trim()
    ledger = world_of(model).ledger
    return sum(ledger.held(tier, holder) for tier in ledger.tiers)


def nothing_is_left(model: Any) -> None:
    """Nothing in flight, no place taken, every slot of the file that activations had given back."""
    world = world_of(model)
    world.check()
    assert held(model, IN_FLIGHT) == held(model, "activations") == 0
    spill, planes = world.spill, world.held
    given_back = sum(size * len(slots) for size, slots in spill._given_back.items())
    on_disk = sum(planes(Tier.NVME, holder) for holder in world.holders(Tier.NVME))
    assert spill._used == on_disk + given_back


def worker_of_now() -> str:
    return threading.current_thread().name


class Gate:
    """Reads or writes of the spill file by one worker wait until it opens; then ``error``, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, worker: str):
        self.open, self.calls, self.error = threading.Event(), list[int](), list[BaseException | None]()
        real = getattr(SpillFile, name)

        def call(spill: SpillFile, tensor: torch.Tensor, offset: int) -> None:
            if worker_of_now() == worker:
                assert self.open.wait(PATIENCE), f"somebody waited for {worker} while it could not go on"
                self.calls.append(offset)
                error = self.error.pop(0) if self.error else None
                if error is not None:
                    raise error
            real(spill, tensor, offset)

        monkeypatch.setattr(SpillFile, name, call)


@pytest.fixture
def unruly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Reads and writes of the file that take their time, before and after."""
    rng, lock = random.Random(), threading.Lock()

    def pause() -> None:
        with lock:
            kind, fraction = rng.random(), rng.random()
        if kind < 0.3:
            time.sleep(0.002 * fraction)

    for name in ("read", "write"):
        real = getattr(SpillFile, name)

        def call(*args: Any, real: Any = real) -> None:
            pause()
            real(*args)
            pause()

        monkeypatch.setattr(SpillFile, name, call)
    yield rng.seed


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_beside_as_in_turn(
    device: str, offload: str, tmp_path: Path, unruly: Callable[[int], None], summary: Callable[[str], None]
) -> None:
    """Random schedules, some with weights that come and go, some whose blocks overwrite what they were given."""
    plain = train(wrap(tmp_path, offload=None))
    jobs = 0
    for seed in range(6):
        unruly(seed)
        there = device if device == "cpu" else StandinDevice(gate=RandomClock(seed), poison=True)
        in_file = {"weights_on_nvme": 1.0, "optimizer_on_nvme": 1.0} if seed % 2 else {}
        placement: Any = gemini.StaticPlacement(**in_file) if in_file else "auto"
        model = wrap(tmp_path, there, offload, spoils=seed % 4 > 1, placement=placement, overlap=seed != 5)
        workers = world_of(model).activation_workers
        assert (workers is None) == (seed == 5)
        if workers is not None:
            begun: list[Any] = []
            workers._begin_restore = lambda o, real=workers._begin_restore, begun=begun: begun.append(1) or real(o)
        same(train(model), plain)
        if workers is not None:
            jobs += len(begun)
    assert jobs >= 5 * LAYERS
    summary(f"activations beside computing: {device} to {offload}, {jobs} reads ahead in 5 schedules")


@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_forward_does_not_wait_and_what_it_was_given_may_be_overwritten(
    device: str, offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte moves before forward has ended and its blocks have overwritten everything."""
    plain = train(wrap(tmp_path, offload=None), steps=1)
    gate = threading.Event()
    there: Any = device
    if device == "standin":
        there = StandinDevice(gate=lambda stream: None if stream != "offload" else assert_(gate.wait(PATIENCE)))
    writes = Gate(monkeypatch, "write", "gemini-offload")
    model = wrap(tmp_path, there, offload, spoils=True)
    loss = model(noise())
    assert not writes.calls and held(model, IN_FLIGHT) >= LAYERS * INPUT
    gate.set()
    writes.open.set()
    loss.backward()
    loss_and_norm = [loss.item(), float(model.clip_grad_norm_(1.0))]
    assert loss_and_norm == plain[0]
    model.memory_report()  # drains
    assert held(model, IN_FLIGHT) == 0
    model.zero_grad()


def test_computing_is_blocks_ahead_of_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the 128 MiB that 16,384 tokens of an 8B model have, scaled down: of 50 ms of the link, and no fewer."""
    monkeypatch.setattr(working, "FLIGHTS", {tier: n * INPUT // 2**27 for tier, n in working.FLIGHTS.items()})
    gate, ahead, end = threading.Event(), list[int](), Flights._end_save

    def ended(flights: Flights, flight: Any) -> None:
        ahead.append(len(flights.saving))
        end(flights, flight)

    monkeypatch.setattr(Flights, "_end_save", ended)
    there = StandinDevice(gate=lambda stream: None if stream != "offload" else assert_(gate.wait(PATIENCE)))
    model = wrap(tmp_path, there, "cpu")
    loss = model(noise())
    assert len(world_of(model).activations.flights.saving) > LAYERS >= 4 and not ahead
    gate.set()
    loss.backward()
    model.zero_grad()


def assert_(condition: bool) -> None:
    assert condition


def test_backward_reads_ahead_in_the_order_of_its_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is in the file when backward begins. Two tensors at a time: the last block's first."""
    monkeypatch.setattr(working, "FLIGHTS", dict.fromkeys(Tier, 2 * INPUT))
    model = wrap(tmp_path)
    reads, workers = list[int](), list[str]()
    real = SpillFile.read

    def read(spill: SpillFile, into: torch.Tensor, offset: int) -> None:
        reads.append(offset)
        workers.append(worker_of_now())
        assert held(model, IN_FLIGHT) <= 2 * INPUT
        real(spill, into, offset)

    monkeypatch.setattr(SpillFile, "read", read)
    loss = model(noise())
    model.memory_report()  # drains
    assert held(model, IN_FLIGHT) == 0
    places = {o.place for o in world_of(model).activations._stored}
    loss.backward()
    assert len(places) == LAYERS + 1 and places == set(reads)
    assert set(workers) <= {"gemini-restore", "MainThread"} and workers.count("gemini-restore") > LAYERS
    inputs = [place for place in reads if reads.count(place) == 1]
    assert inputs == sorted(inputs, reverse=True)  # slots of a new file are in the order of saving
    assert not world_of(model).activation_workers._order  # backward has come to all of them
    model.zero_grad()


def test_the_first_of_two_graphs_is_read_ahead_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipeline, whose backwards come in the order of the forwards: what lies behind is not asked for."""
    monkeypatch.setattr(working, "FLIGHTS", dict.fromkeys(Tier, 2 * INPUT))
    monkeypatch.setattr(activation_flights, "_TOGETHER", 1)
    model, workers, real = wrap(tmp_path), list[str](), SpillFile.read

    def read(spill: SpillFile, into: torch.Tensor, offset: int) -> None:
        workers.append(worker_of_now())
        real(spill, into, offset)

    first, second = model(noise()), model(noise(1))
    world_of(model).settle()
    monkeypatch.setattr(SpillFile, "read", read)
    first.backward()
    assert workers.count("MainThread") <= 3
    second.backward()
    model.zero_grad()
    nothing_is_left(model)


# ---- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("device", "offload"), [("cpu", "nvme"), ("standin", "nvme"), ("standin", "cpu")])
def test_tight_budgets_are_kept_and_refuse_nothing_more(device: str, offload: str, tmp_path: Path) -> None:
    """What in turn fits fits, with the same tensors offloaded, and no tier ever holds more than its budget."""
    placement = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)
    tier = "cpu" if device == "cpu" else "gpu"

    def make(budget: int, *, overlap: bool = False) -> Any:
        return wrap(tmp_path, device, offload, overlap=overlap, placement=placement, **{tier: budget})

    low, flying = least(make, 4096), list[int]()
    for slack in (0, INPUT, 3 * INPUT, 12 * INPUT):
        results, offloaded, said = [], [], []
        for overlap in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = make(low + slack, overlap=overlap)
                optimizer = adam(model)
                results.append(train(model, optimizer))
                loss = model(noise(7))
                world_of(model).settle()
                offloaded.append(held(model, "activations"))
                loss.backward()
                said.append(sum("offload_activations" in str(w.message) for w in caught))
            for one in (Tier.GPU, Tier.CPU, Tier.NVME):
                if one in world_of(model).tiers:
                    assert world_of(model).peak(one) <= world_of(model).budget(one)
            lanes = world_of(model).activation_workers
            if lanes is not None:
                flying.append(lanes._needed)
        same(*results)
        assert offloaded[0] == offloaded[1] and said[0] == said[1]
    assert flying


@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_what_is_in_flight_gives_way(device: str, offload: str, tmp_path: Path) -> None:
    model = wrap(tmp_path, device, offload)
    world = world_of(model)
    loss = model(noise())
    world.activations.flights.begin_backward()  # reads ahead, of what has been written
    tier = world.device.tier
    free = world.free(tier) + world.held(tier, IN_FLIGHT)
    assert free > world.free(tier)
    assert world.make_room(free)
    assert world.free(tier) == free
    loss.backward()
    model.zero_grad()
    nothing_is_left(model)


@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_forwards_without_backward_give_everything_back(
    device: str, offload: str, tmp_path: Path, unruly: Callable[[int], None]
) -> None:
    model = wrap(tmp_path, device, offload)
    gc.collect()
    gc.disable()
    try:
        sizes = []
        for seed in range(6):
            unruly(seed)
            loss = model(noise(seed))
            assert held(model, "activations") == (LAYERS + 1) * INPUT
            del loss
            nothing_is_left(model)
            sizes.append(world_of(model).spill.num_bytes)
        assert sizes[0] == sizes[-1]
    finally:
        gc.enable()
    first, second = model(noise(0)), model(noise(1))
    first.backward()  # not the one that was last
    second.backward()
    model.zero_grad()
    del first, second
    nothing_is_left(model)


# ---- to be seen ------------------------------------------------------------------------------------------------------


def test_waits_and_ranges_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(tmp_path)
    optimizer = adam(model)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    threads: dict[str, set[int]] = {"gemini::offload_activation": set(), "gemini::fetch_activation": set()}
    for _ in range(10):  # on a busy machine all inputs of blocks may be there still when backward asks for them
        with torch.profiler.profile(activities=kinds, experimental_config=config) as profile:
            step_on(model(noise()), optimizer)
        assert model.memory_report()["stalls"]["activation"] > 0
        for name, found in threads.items():
            found.update(e.thread for e in profile.events() if e.name == name)
        if all(len(found) >= 2 for found in threads.values()):
            break
    assert all(len(found) >= 2 for found in threads.values()), threads
    with model.recording() as recording:
        for _ in range(2):
            step_on(model(noise()), optimizer)
    spans = [span for span in recording.timeline.spans if "activations" in span.name]
    assert {span.track.value for span in spans} == {"nvme read", "nvme write"}, {span.track.value for span in spans}
    assert recording.timeline.moved["cpu->nvme"] == (LAYERS + 1) * INPUT
