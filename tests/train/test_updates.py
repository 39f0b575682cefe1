"""Updates in flight: their order, what they hold on to and where they wait. Errors are in ``test_update_faults.py``."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gemini
from benchmarks._progress import PATIENCE
from gemini import kernels
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Use
from gemini.memory.devices.device import Event
from gemini.planning.hardware import Figure, Hardware
from gemini.tiers import Tier
from gemini.train.update import worker as update_worker
from tests import models, scaling
from tests.train.helpers import least, manage, train
from tests.world import world_of

PLACES = ["ram", "nvme", "standin"]


def wrap(where: str, folder: Path, **how: Any) -> Any:
    there: dict[str, Any] = {
        "ram": {},
        "nvme": {"cpu": "1MiB", "homes": {"weights_on_nvme": 0.5, "optimizer_on_nvme": 1.0}},
        "standin": {"device": "standin", "gpu": "1MiB", "homes": {"weights_on_nvme": 0.5, "optimizer_on_nvme": 1.0}},
    }[where]
    return manage(models.make_model("llama"), folder, **{**there, "max_chunk": 4096, "update_threads": 1, **how})


def adam(model: Any, **how: Any) -> gemini.HybridAdam:
    return gemini.HybridAdam(model.parameters(), lr=1e-2, **how)


BATCHES = [batch for batches in models.make_batches(6, 1) for batch in batches]


def backward(model: Any, number: int) -> float:
    loss = model(**BATCHES[number]).loss
    scaling.backward(model, loss)
    return float(loss.detach())


def same(a: Any, b: Any) -> bool:
    first, second = a.state_dict(dtype=torch.float32), b.state_dict(dtype=torch.float32)
    return all(torch.equal(first[name], second[name]) for name in first)


class Held:
    """Holds every kernel call of the update worker until it is opened, and notes the order of weights."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.gate = threading.Event()
        self.threads: list[str] = []
        real = kernels.update

        def update(*args: Any) -> bool:
            self.threads.append(threading.current_thread().name)
            if self.threads[-1] == "gemini-update":
                assert self.gate.wait(PATIENCE), "nobody opened the gate"
            return real(*args)

        patch.setattr(kernels, "update", update)


@pytest.mark.parametrize("where", PLACES)
def test_step_returns_with_updates_in_flight(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = wrap(where, tmp_path), wrap("ram", tmp_path, overlap=False)
    optimizer, other = adam(model), adam(plain)
    held = Held(monkeypatch)
    backward(model, 0)
    optimizer.step()
    updates = world_of(model).updates
    assert updates.pending and set(held.threads) <= {"gemini-update"}
    optimizer.param_groups[0]["lr"] = 1e9  # of the next step
    optimizer.zero_grad()
    held.gate.set()
    assert model.memory_report()["cpu"]["used"] > 0 and not updates.pending, "a report is of a finished world"
    backward(plain, 0)
    other.step()
    assert same(model, plain)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_written_by_hand_after_their_update(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they were before is what the update made of them: else all that it changed would count as written."""
    model, plain = wrap("ram", tmp_path), wrap("ram", tmp_path, overlap=False)
    optimizers = adam(model), adam(plain)
    held = Held(monkeypatch)
    for managed, optimizer in zip((model, plain), optimizers, strict=True):
        backward(managed, 0)
        optimizer.step()
        if managed is model:
            assert world_of(managed).updates_in_flight
            threading.Timer(0.1, held.gate.set).start()
        param = dict(managed.named_parameters())["lm_head.weight"]
        with contextlib.suppress(ZeroDivisionError), managed.gathered([param], write=True), torch.no_grad():
            param[0, 0] = 1.0
            assert not fails or 1 / 0
    assert same(model, plain)


def test_what_is_needed_first_is_updated_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap("ram", tmp_path)
    optimizer, held = adam(model), Held(monkeypatch)
    order: list[int] = []
    worker = world_of(model).update_worker
    run = worker._update
    monkeypatch.setattr(worker, "_update", lambda job, tile: (order.append(job.chunk.spec.index), run(job, tile)))
    backward(model, 0)
    optimizer.step()
    held.gate.set()
    world_of(model).settle()
    first_use = world_of(model).first_use
    assert len(order) > 4 and order[1:] == sorted(order[1:], key=lambda index: first_use[index])


def test_a_forward_waits_for_the_chunk_that_it_reads_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate opens when the first block begins: had the forward waited for everything, it would stay shut."""
    model = wrap("ram", tmp_path)
    optimizer = adam(model)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    world_of(model).settle()
    worker, passed, gate = world_of(model).update_worker, threading.Event(), threading.Event()
    last = len(world_of(model).chunks) - 1
    run = worker._update

    def update(job: Any, tile: Any) -> None:
        if job.chunk.spec.index == last:
            assert gate.wait(PATIENCE), "the forward waited for what it does not read yet"
        run(job, tile)

    monkeypatch.setattr(worker, "_update", update)
    model.model.layers[0].register_forward_pre_hook(lambda *_: (passed.set(), gate.set()) and None)
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 2)
    assert passed.is_set()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("gradients", ["retain", "accumulate", "transient"])
def test_steps_inside_backward_are_the_bits_of_steps_after_it(where: str, gradients: str, tmp_path: Path) -> None:
    inside = wrap(where, tmp_path, gradients=gradients)
    after = wrap("ram", tmp_path, overlap=False)
    first, second = adam(inside, step_in_backward=True), adam(after)
    for number in range(4):
        assert backward(inside, number) == backward(after, number)
        first.step()
        second.step()
        second.zero_grad()
    assert same(inside, after)


@pytest.mark.parametrize("where", PLACES)
def test_the_backward_outside_no_sync_is_the_one_that_updates(where: str, tmp_path: Path) -> None:
    inside = wrap(where, tmp_path, gradients="accumulate")
    after = wrap("ram", tmp_path, gradients="accumulate", overlap=False)
    first, second = adam(inside, step_in_backward=True), adam(after)
    for number in range(0, 4, 2):
        with inside.no_sync():
            backward(inside, number)
        assert world_of(inside).has_gradients and not world_of(inside).state.updated_in_backward
        backward(inside, number + 1)
        first.step()
        backward(after, number)
        backward(after, number + 1)
        second.step()
        second.zero_grad()
    assert same(inside, after)


def test_a_second_backward_that_would_update_again_is_refused(tmp_path: Path) -> None:
    model = wrap("ram", tmp_path)
    optimizer = adam(model, step_in_backward=True)
    backward(model, 0)
    with pytest.raises(GeminiError, match=r"optimizer\.step\(\).*no_sync"):
        backward(model, 1)
    optimizer.step()
    with pytest.raises(GeminiError, match="leave step_in_backward out"):
        backward(model, 1)
        model.clip_grad_norm_(1.0)


def test_gradients_that_wait_are_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap("ram", tmp_path, gradients="transient")
    optimizer, held = adam(model, step_in_backward=True), Held(monkeypatch)
    backward(model, 0)
    ledger = world_of(model).ledger
    waiting = ledger.held(Tier.CPU, "gradients in flight")
    params = sum(p.numel() for p in model.parameters())
    assert 0 < waiting <= 2 * params
    held.gate.set()
    optimizer.step()
    world_of(model).settle()
    assert ledger.held(Tier.CPU, "gradients in flight") == 0


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
def test_a_gradient_that_has_landed_is_let_go_before_backward_ends(gradients: str, tmp_path: Path) -> None:
    """With its bytes in the ledger: as the next one arrives, whoever copies it."""
    model = wrap("standin", tmp_path, gradients=gradients)
    adam(model)
    world = world_of(model)
    store, alive, found = world.gradients, list[tuple[int, Any]](), list[tuple[int, int]]()
    land = store.land

    def landing(handle: Any, grad: torch.Tensor, num_to_come: int = 0) -> None:
        for earlier in store.landing.values():
            assert earlier.outcome() is None
        alive.append((grad.nbytes, weakref.ref(grad.untyped_storage())))
        land(handle, grad, num_to_come)
        there = sum(num_bytes for num_bytes, reference in alive[:-1] if reference() is not None)
        found.append((there, world.held(Tier.GPU, "gradients in flight") - grad.nbytes))

    store.land = landing
    backward(model, 0)
    assert len(alive) > 10 and all(there <= 0 and held <= 0 for there, held in found), found
    world.settle()
    assert world.held(Tier.GPU, "gradients in flight") == 0


class Recomputed(torch.nn.Module):
    """``shared`` is called in two checkpointed parts; the first part also looks at the weights of ``last``."""

    def __init__(self, reentrant: bool):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.last.weight.abs().sum()
        return torch.tanh(self.shared(x)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.last(x)


def recomputed(folder: Path, reentrant: bool, overlap: bool) -> tuple[Any, Callable[[], None]]:
    how: dict[str, Any] = {"precision": "fp32", "max_chunk": 4096, "update_threads": 1}
    model = manage(Recomputed(reentrant), folder, overlap=overlap, **how)
    optimizer = adam(model, step_in_backward=True)

    def step() -> None:
        model(torch.ones(2, 32, requires_grad=True)).square().mean().backward()
        optimizer.step()

    return model, step


def test_a_recomputation_reads_no_weights_that_are_being_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last layer are in place, and their update began inside this backward."""
    (model, step), (plain, plain_step) = (recomputed(tmp_path, False, overlap) for overlap in (True, False))
    held = Held(monkeypatch)
    threading.Timer(0.2, held.gate.set).start()
    step()
    plain_step()
    assert "gemini-update" in held.threads and same(model, plain)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_in_two_parts_is_no_two_steps(overlap: bool, tmp_path: Path) -> None:
    model, step = recomputed(tmp_path, True, overlap)
    with pytest.raises(GeminiError, match="'shared.* in two parts .*leave step_in_backward out"):
        step()
    assert all(handle.num_steps <= 1 for handle in world_of(model).handles)


def test_gradients_that_the_device_still_computes_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap("standin", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    marks, early = list[Event](), list[bool]()

    def mark() -> Event:
        marks.append(Event())
        threading.Timer(0.05, marks[-1].finish).start()
        return marks[-1]

    def looked(segments: Any) -> None:
        early.append(not any(event.is_complete() for event in marks))

    monkeypatch.setattr(world_of(model).device, "mark", mark)
    monkeypatch.setattr(update_worker, "check_finite", looked)
    backward(model, 0)
    optimizer.step()
    world_of(model).settle()
    assert early and not any(early)


def test_without_room_for_a_lane_everything_is_done_in_turn(tmp_path: Path) -> None:
    """The staging of one thread is all that fits: no error, the same bits."""

    def make(cpu: int) -> Any:
        return wrap("nvme", tmp_path, cpu=cpu, homes={"weights_on_nvme": 1.0, "optimizer_on_nvme": 1.0})

    tight = make(least(make, 2**16))
    assert world_of(tight).update_worker.slot_tile == 0
    plain = wrap("ram", tmp_path, overlap=False)
    first, second = adam(tight), adam(plain)
    for number in range(3):
        assert backward(tight, number) == backward(plain, number)
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()
    assert same(tight, plain)


def test_what_the_device_computes_is_left_to_the_thread_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 masters on the device are cast there: on a worker's stream nothing would order it before the reading."""
    memory = gemini.MemoryBudget(gpu="700KiB", cpu="64MiB")
    placement = gemini.StaticPlacement(weights_on_gpu=1.0)
    config = gemini.GeminiConfig(memory=memory, device="standin", precision="fp16", max_chunk=4096, placement=placement)
    model = gemini.GeminiDDP(models.make_model("llama"), config)
    optimizer, threads = adam(model), set[threading.Thread]()
    mover = world_of(model).mover
    cast = mover._send_tiles

    def noted(*given: Any) -> Any:
        threads.add(threading.current_thread())
        return cast(*given)

    monkeypatch.setattr(mover, "_send_tiles", noted)
    for number in range(3):
        backward(model, number)
        scaling.make_step(model, optimizer)
        optimizer.zero_grad()
    assert threads == {threading.current_thread()}


def test_a_step_inside_gathered_shows_no_weights_that_are_being_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = wrap("ram", tmp_path), wrap("ram", tmp_path, overlap=False)
    held, seen = Held(monkeypatch), list[torch.Tensor]()
    threading.Timer(0.2, held.gate.set).start()
    for managed in (model, plain):
        optimizer = adam(managed)
        backward(managed, 0)
        param = dict(managed.named_parameters())["lm_head.weight"]
        with managed.gathered([param]), torch.no_grad():
            optimizer.step()
            seen.append(param * 1)
    assert "gemini-update" in held.threads and torch.equal(*seen)


# ---- updates inside backward that read the weights in their windows --------------------------------------------------

# Until they are over, nobody else has that memory.

ON_NVME = {"homes": {"weights_on_nvme": 1.0, "optimizer_on_nvme": 1.0}, "gradients": "transient"}


def wrap_on_nvme(folder: Path, cpu: str = "1MiB") -> Any:
    return manage(models.make_model("llama"), folder, cpu=cpu, max_chunk=4096, update_threads=1, **ON_NVME)


def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
    return train(model, optimizer, numbers, lambda model, number: model(**BATCHES[number]).loss, clip=None)


def reference(folder: Path) -> tuple[Any, Any]:
    model = wrap("ram", folder, overlap=False)
    return model, adam(model)


@pytest.mark.parametrize("cpu", ["1MiB", "0.4MiB"], ids=["room", "no room"])
def test_windows_stay_until_their_updates_are_over(cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update waits until somebody waits for one: who needs the room, or the weights, or the next step."""
    model, (other, its) = wrap_on_nvme(tmp_path, cpu), reference(tmp_path)
    optimizer, held = adam(model, step_in_backward=True), Held(monkeypatch)
    world, most = world_of(model), [0]
    updates, manager = world.updates, world.manager
    await_one, begin = updates._await, manager.begin_update

    def await_now(job: Any) -> None:
        most[0] = max(most[0], sum(chunk.use is Use.UPDATING for chunk in world.chunks))
        held.gate.set()
        await_one(job)
        held.gate.clear()

    def began(chunk: Any) -> None:
        begin(chunk)
        world.check_windows()

    monkeypatch.setattr(updates, "_await", await_now)
    monkeypatch.setattr(manager, "begin_update", began)
    assert steps(model, optimizer, range(4)) == steps(other, its, range(4))
    assert same(model, other)
    assert most[0] > (3 if cpu == "1MiB" else 0), "no window was read by an update"
    world.check_windows()
    assert not any(chunk.use is Use.UPDATING for chunk in world.chunks)


def test_a_window_that_somebody_looks_into_stays_theirs(tmp_path: Path) -> None:
    """A view taken in forward sees the old weights until the step, and the new ones after it, as in torch."""
    model, (other, its) = wrap_on_nvme(tmp_path), reference(tmp_path)
    optimizer, views = adam(model, step_in_backward=True), list[torch.Tensor]()
    block = model.model.layers[1].mlp

    def look(module: Any, args: Any) -> None:
        views.append(module.weight.view(-1)[5:9])

    handle = block.up_proj.register_forward_pre_hook(look)
    steps(model, optimizer, range(1))
    handle.remove()
    steps(other, its, range(1))
    name = "model.layers.1.mlp.up_proj.weight"
    now = other.state_dict(dtype=torch.bfloat16)[name].view(-1)[5:9]
    assert torch.equal(views[0].detach(), now)
    assert steps(model, optimizer, range(1, 3)) == steps(other, its, range(1, 3))
    assert same(model, other)


def asked(threads: int | None, hardware: Hardware | None = None) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="1GiB"), update_threads=threads, hardware=hardware)


def test_a_gpu_leaves_two_cores_to_the_threads_that_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_num_threads", lambda: 32)  # processors, two for each core
    for cores, threads in ((16, 14), (3, 1), (2, 1), (64, 32)):
        monkeypatch.setattr(update_worker, "num_cores", lambda cores=cores: cores)
        assert update_worker.update_threads(asked(None), Tier.GPU) == threads
        assert update_worker.update_threads(asked(5), Tier.GPU) == 5


@pytest.mark.parametrize(("one", "threads"), [(8e-9, 10), (0.8e-9, 1), (80e-9, 14), (None, 14)])
def test_no_more_threads_update_than_make_it_faster(
    one: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread takes eight times as long as all: ten have a quarter to spare, and the other four leave memory alone."""
    monkeypatch.setattr(kernels, "get_num_threads", lambda: 32)
    monkeypatch.setattr(update_worker, "num_cores", lambda: 16)
    figures = {"update_cpu": Figure(1e-9, "measured")} | ({"update_cpu_one": Figure(one, "measured")} if one else {})
    hardware = Hardware("a server", figures)
    assert update_worker.update_threads(asked(None, hardware), Tier.GPU) == threads
    assert update_worker.update_threads(asked(14, hardware), Tier.GPU) == 14, "who says a number has it"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert update_worker.update_threads(asked(None, hardware), Tier.CPU) == (threads if threads < 14 else 24)
