"""Windows of the CUDA device on a recorded runtime: every use of a block comes after all uses of its earlier owners.

The runtime knows what happens before what, and looks at each use of memory as it is given to a stream. So these tests
prove the order of what was asked for, however a GPU runs it; that a GPU does what it is asked for they cannot.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_runtime import Runtime, Tensor, bytes_of, make_window, on_card
from memory_cases import World

from gemini.memory.chunks.chunk import Use
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.cuda_windows import CudaWindow, LastUses
from gemini.memory.devices.device import Event
from gemini.memory.movement.foresight import Foresight, Schedule
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.planning.plan import Moves
from gemini.planning.trace import Access
from gemini.tiers import Tier
from tests.invariants import check_manager
from tests.standins import Arena

PAGE = 4096


def host(runtime: Runtime) -> Any:
    return Tensor(runtime, "host", "cpu")


def fetch(runtime: Runtime, device: CudaDevice, window: CudaWindow) -> Event:
    return device.copy(on_card(window), host(runtime), "fetch", behind_computing=False)


def compute(window: CudaWindow) -> int:
    return bytes_of(window).use(f"computing with {bytes_of(window).name}")


def in_thread(run: Callable[[], Any]) -> Any:
    """As a worker does it: its current stream is the default one."""
    got: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            got.append(run())
        except BaseException as e:  # seen on the test's thread
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return got[0]


def test_a_block_is_written_after_its_last_use_and_after_nothing_else(runtime: Runtime, device: CudaDevice) -> None:
    first, second, third = (make_window(runtime, device, name, 8 * PAGE) for name in "abc")
    for window in (first, second):
        window.populate()
        fetch(runtime, device, window).wait_on_device()
    used = compute(first)
    first.depopulate()
    later = [compute(second) for _ in range(3)]  # the host runs far ahead
    third.populate()
    assert bytes_of(third).data_ptr() == 2**20, "the first one's memory"
    in_thread(lambda: fetch(runtime, device, third))
    with runtime.stream(device._copying["fetch"].stream):
        assert runtime.is_behind(used) and not any(runtime.is_behind(number) for number in later)
    compute(second)
    with pytest.raises(AssertionError, match=r"computing with a: a has no memory"):
        compute(first)


def test_a_stream_that_reads_what_is_there_already_is_known(runtime: Runtime, device: CudaDevice) -> None:
    first, second = (make_window(runtime, device, name, 8 * PAGE) for name in "ab")
    first.populate()
    fetched = fetch(runtime, device, first)
    runtime.finished.add(runtime.events[-1])
    assert fetched.is_complete()
    with runtime.stream(runtime.Stream(name="the program's")):
        device.computes_here()
        compute(first)
    first.depopulate()
    second.populate()
    fetch(runtime, device, second)


def test_what_is_computed_beside_must_have_been_waited_for(runtime: Runtime, device: CudaDevice) -> None:
    first, second = (make_window(runtime, device, name, 8 * PAGE) for name in "ab")
    first.populate()
    with device.beside("adam"):
        fetch(runtime, device, first).wait_on_device()
        compute(first)
        over = device.mark()
    over.wait_on_device()
    first.depopulate()
    second.populate()
    fetch(runtime, device, second)


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_window_sees_another_s_bytes(runtime: Runtime, seed: int, backend: str) -> None:
    """Windows of three sizes come and go; some are read, some called back, some sent home; threads and streams mix.

    The runtime refuses any use of memory that is not behind all uses of it by others.
    """
    runtime.backend = backend
    rng, device = random.Random(seed), CudaDevice(torch.device("cuda", 1))
    streams = [runtime.current(), runtime.Stream(name="the program's")]
    idle = [make_window(runtime, device, f"window {n}", rng.choice((3, 7, 12)) * PAGE) for n in range(14)]
    there: dict[CudaWindow, Event | None] = {}
    last_uses: dict[tuple[int, int], int] = {}
    reused = 0
    for _ in range(600):
        with runtime.stream(rng.choice(streams)):
            what = rng.choice(("come", "come", "compute", "compute", "compute", "home", "go", "end of a copy"))
            if what == "come" and idle:
                window = idle.pop(rng.randrange(len(idle)))
                if any(size >= window.num_bytes for _, size in runtime.arena.free):
                    window.populate()
                    place = (bytes_of(window).data_ptr(), window.num_bytes)
                    reused += any(a < sum(place) and place[0] < a + n for a, n in last_uses)
                    last_uses[place] = 1
                    fetching = rng.random() < 0.8
                    begin = lambda window=window: fetch(runtime, device, window)  # noqa: E731
                    there[window] = (in_thread(begin) if rng.random() < 0.5 else begin()) if fetching else None
                else:
                    idle.append(window)
            elif there:
                window = rng.choice(list(there))
                if what == "compute":
                    fetched = there[window]
                    if fetched is not None:
                        fetched.wait_on_device()
                    compute(window)
                elif what == "home":
                    device.copy(host(runtime), on_card(window), rng.choice(("evict", "offload")))
                elif what == "go":
                    del there[window]
                    window.depopulate()
                    idle.append(window)
                elif runtime.events:
                    runtime.finished.add(rng.choice(runtime.events[-30:]))
    assert reused > 60 and len(runtime.uses) > 200
    assert len(runtime.pools) == (backend == "native"), "all of them in one pool of their own"


class Card(CudaDevice):
    """A device whose windows are the recorded runtime's."""

    def __init__(self, runtime: Runtime):
        super().__init__(torch.device("cuda", 1))
        self.runtime, self.num_windows = runtime, 0

    def make_window(self, num_bytes: int) -> CudaWindow:
        self.num_windows += 1
        return make_window(self.runtime, self, f"window {self.num_windows}", num_bytes)

    def reserve_windows(self, num_bytes: int) -> None:
        """They come out of the runtime's arena one by one."""


@pytest.mark.parametrize("seed", range(3))
def test_a_manager_that_runs_ahead_of_a_card(runtime: Runtime, tmp_path: Path, seed: int) -> None:
    """Steps of a model in a third of the room that it needs: on and off their plan, from two streams, updates between.

    Whatever computes with weights comes after the copy of just those, and no use of memory may come before an earlier
    owner's. The host waits for nothing.
    """
    rng = random.Random(seed)
    sizes = [rng.choice((1, 1, 2, 4)) for _ in range(9)]
    runtime.arena = Arena(14 * PAGE * 2)
    world = World(sizes, Card(runtime), 8 * PAGE, Tier.CPU, tmp_path)
    order = [*range(9), *reversed(range(9))]
    accesses = [Access(moment, (index,)) for moment, index in enumerate(order)]
    schedule = Schedule(accesses, [Moves(fetch=(index,)) for index in order], frozenset(order))
    transfers = Transfers(world.mover, Lane)
    world.manager = manager = Manager(
        world.chunks, ledger=world.ledger, device=world.device, mover=world.mover, transfers=transfers,
        foresight=Foresight(schedule),
    )  # fmt: skip
    streams, ahead = [runtime.current(), runtime.Stream(name="the program's")], 0
    try:
        for _ in range(12):
            manager.foresight.begin()
            for index in order if rng.random() < 0.8 else rng.sample(order, 12):
                with runtime.stream(rng.choice(streams)):
                    chunk = world.chunks[index]
                    ahead += chunk.use is Use.FETCHING
                    manager.acquire(chunk)
                    manager.look_ahead()
                    bytes_of(chunk.window).use(f"computing with chunk {index}")
                    if rng.random() < 0.3:
                        with runtime.stream(rng.choice(streams)):
                            manager.acquire(chunk)
                            bytes_of(chunk.window).use(f"more computing with chunk {index}")
                            manager.release(chunk)
                    manager.release(chunk)
                    if rng.random() < 0.1:
                        manager.drop(rng.sample(world.chunks, 3))
                check_manager(manager)
            manager.foresight.end()
            manager.drop(world.chunks)  # an update
            if rng.random() < 0.5:
                manager.look_ahead()
    finally:
        transfers.close()
    world.device.close()
    assert manager.room.num_evictions > 100 and ahead > 20 and runtime.num_queries > 0
    assert not runtime.past_of_all, "nobody has seen the end of anything"


def test_the_pool_s_stream_is_behind_all_uses_too(runtime: Runtime, device: CudaDevice) -> None:
    """The allocator waits for it before it unmaps what was given back to it."""
    window = make_window(runtime, device, "a", 8 * PAGE)
    window.populate()
    fetched = fetch(runtime, device, window)
    fetched.wait_on_device()
    used = compute(window)
    window.depopulate()
    assert device._memory._stream is not None
    with runtime.stream(device._memory._stream):
        assert runtime.is_behind(used)


def test_the_allocator_is_told_to_let_go_where_the_pool_finds_no_room(runtime: Runtime, device: CudaDevice) -> None:
    window = make_window(runtime, device, "a", 8 * PAGE)
    runtime.refused_allocations = 1
    window.populate()
    assert runtime.emptied == 1 and bytes_of(window).data_ptr()
    window.depopulate()
    runtime.refused_allocations = 2
    with pytest.raises(torch.cuda.OutOfMemoryError):
        window.populate()
    window.depopulate()  # nothing was left behind
    window.populate()
    assert runtime.in_pool is None


def test_one_segment_is_got_beforehand(runtime: Runtime, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pool and freed at once, so that windows are cut out of it; unless the allocator would not cut it."""
    asked: list[tuple[int, bool]] = []

    def empty(num_bytes: int, **where: Any) -> None:
        asked.append((num_bytes, runtime.in_pool is not None))
        if num_bytes > 2**40:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    device.reserve_windows(2**30)
    device.reserve_windows(2**41)
    device.reserve_windows(0)
    runtime.max_split_size = 2**28
    device.reserve_windows(2**30)
    assert asked == [(2**30, True), (2**41, True)] and runtime.in_pool is None


def test_events_of_ranges() -> None:
    def event(name: str, complete: bool = False) -> Any:
        return type("Moment", (), {"name": name, "is_complete": lambda self: complete})()

    uses, a, b, over = LastUses(), event("a"), event("b"), event("c", complete=True)
    uses.note(0, 10, [a, over])
    uses.note(10, 20, [b])
    assert uses.take(20, 30) == []
    assert uses.take(8, 12) == [a, b], "what is over is nothing to wait for"
    assert uses.take(8, 12) == [], "it belongs to somebody"
    assert uses.take(0, 3) == [a] and uses.take(12, 14) == [b]
    uses.note(8, 12, [b])
    assert uses.take(0, 100) == [a, b]
    assert len(uses._ranges) == 0
    for number in range(1000):
        uses.note(number, number + 1, [over])
    assert len(uses._ranges) < 300
