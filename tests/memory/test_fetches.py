"""Fetches that the host does not wait for: who is put behind their copies, and who waits for them after all.

The device here is as late as a GPU may be: a copy is made when somebody waits for it on the host, or when the test says
so, and a wait on the device is only noted. So whoever goes on too early finds bytes that are not there yet, and staging
that is used again too early goes out with the wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cases import MASTER, World

from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Parts, Use, make_plane
from gemini.memory.devices.device import AllOf, Event
from gemini.memory.movement import mover
from gemini.memory.movement.foresight import Foresight, Schedule
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import StagingSet, Working, _Memory
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.planning.layout import ALIGN
from gemini.planning.plan import Moves
from gemini.planning.planes import WEIGHTS
from gemini.planning.trace import Access
from gemini.planning.working import staging_bytes
from gemini.tiers import Tier
from tests.invariants import check_manager
from tests.standin_device import StandinDevice

UNIT = 2 * ALIGN  # bytes of a window of size 1


class Late(Event):
    """A copy that is made when it must be."""

    def __init__(self, device: LateDevice, copy: Callable[[], Any]):
        super().__init__()
        self.on_device, self.on_host = 0, 0
        self._copy, self._device = copy, device

    def wait(self) -> None:
        self.on_host += 1
        self.happen()
        super().wait()

    def wait_on_device(self) -> None:
        self.on_device += 1

    def happen(self) -> None:
        while not self.is_complete():  # a worker is in order
            self._device.under_way.pop(0)._make()

    def _make(self) -> None:
        try:
            if self._device.refusals:
                raise self._device.refusals.pop()
            self._copy()
        except BaseException as e:
            self.finish(e)
        else:
            self.finish()


class LateDevice(StandinDevice):
    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Late] = []
        self.made: list[Late] = []
        self.refusals: list[BaseException] = []
        self.behind: list[bool] = []

    def copy(
        self, into: torch.Tensor, source: torch.Tensor, stream: str, after: Event | None = None, *,
        behind_computing: bool = True,
    ) -> Event:  # fmt: skip
        event = Late(self, lambda: into.copy_(source))
        self.under_way.append(event)
        self.made.append(event)
        self.behind.append(behind_computing)
        return event


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    closing: list[Transfers] = []

    def make(sizes: list[int], budget: int, *, home: Tier = Tier.CPU, precision: str = "bf16", ahead: bool = False):
        world = World(sizes, LateDevice(), budget * UNIT, home, tmp_path, precision)
        if ahead:  # one step reads them in turn
            accesses = [Access(number, (number,)) for number in range(len(sizes))]
            schedule = Schedule(accesses, [Moves(fetch=(n,)) for n in range(len(sizes))], frozenset(range(len(sizes))))
            closing.append(Transfers(world.mover, Lane))
            world.manager = Manager(
                world.chunks, ledger=world.ledger, device=world.device, mover=world.mover, transfers=closing[-1],
                foresight=Foresight(schedule),
            )  # fmt: skip
            world.manager.foresight.begin()
        return world

    yield make
    for transfers in closing:
        transfers.close()


def copies(world: World) -> list[Late]:
    assert isinstance(world.device, LateDevice)
    return world.device.made


def test_the_host_goes_on_and_the_device_waits(make_world: Callable[..., World]) -> None:
    world = make_world([2, 1], 3)
    chunk = world.chunks[0]
    world.manager.acquire(chunk)
    [copy] = copies(world)
    assert chunk.use is Use.COMPUTE and not copy.is_complete() and chunk.fetched is copy
    assert copy.on_host == 0 and copy.on_device > 0
    assert world.device.behind == [False], "the window itself knows what its memory waits for"
    before = copy.on_device
    world.manager.acquire(chunk)
    assert copy.on_device == before + 1, "another stream may read it this time"
    copy.happen()
    world.manager.acquire(chunk)
    assert copy.on_device == before + 1 and copy.on_host == 0
    assert chunk.flat.unique().tolist() == [1]
    check_manager(world.manager)


def test_who_writes_the_home_waits(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world([1], 1)
    [chunk] = world.chunks
    world.manager.acquire(chunk)
    world.manager.release(chunk)
    world.manager.drop([chunk])
    [copy] = copies(world)
    assert chunk.use is Use.FREE and copy.on_host == 0, "its memory goes, behind the copy"
    chunk.begin_write()
    assert copy.on_host == 1 and copy.is_complete()
    chunk.begin_write()
    world.device.refusals.append(OSError("the GPU fell off the bus"))
    world.manager.acquire(chunk)
    chunk.begin_write()  # how it ended is told to who reads it
    stuck = chunk.fetched = Event()
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.001)
    with pytest.raises(GeminiError, match="nothing has moved"), pytest.warns(UserWarning, match="nothing has moved"):
        stuck.wait_until_over()
    stuck.finish(OSError("failed"))
    chunk.begin_write()


def test_a_fetch_ahead_is_taken_while_its_copy_is_under_way(make_world: Callable[..., World]) -> None:
    world = make_world([1, 1, 1], 2, ahead=True)
    first, second, third = world.chunks
    world.manager.acquire(first)
    world.manager.look_ahead()
    assert second.use is Use.FETCHING and third.use is Use.FREE
    world.manager.ahead[1].wait()
    assert not second.fetched.is_complete(), "the worker is done with it nevertheless"
    world.manager.acquire(second)
    assert second.use is Use.COMPUTE and [copy.on_host for copy in copies(world)] == [0, 0]
    assert all(copy.on_device for copy in copies(world))
    check_manager(world.manager)
    world.manager.release(first)
    world.manager.look_ahead()
    assert third.use is Use.FETCHING and first.use is Use.FREE
    world.manager.drain()
    assert third.fetched.is_complete() and third.use is Use.FETCHING, "there, and nobody has asked for it"
    world.manager.acquire(third)
    assert third.flat.unique().tolist() == [3]


def test_a_fetch_that_is_called_back_gives_its_window_back_behind_the_copy(make_world: Callable[..., World]) -> None:
    world = make_world([1, 1, 2], 2, ahead=True)
    world.manager.acquire(world.chunks[0])
    world.manager.look_ahead()
    called_back = world.chunks[1]
    world.manager.ahead[called_back.spec.index].wait()
    world.manager.drop([called_back])
    copy = copies(world)[1]
    assert called_back.use is Use.FREE and copy.on_device == 1 and copy.on_host == 0
    check_manager(world.manager)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_whose_failure_is_seen_is_tried_again(make_world: Callable[..., World], ahead: bool) -> None:
    """On the stand-in, whose wait on the device waits; a GPU would say so in some later call."""
    world = make_world([1, 1], 2, ahead=ahead)
    chunk = world.chunks[1 if ahead else 0]
    if ahead:
        world.manager.acquire(world.chunks[0])
        copies(world)[0].happen()
        world.manager.look_ahead()
        world.manager.ahead[chunk.spec.index].wait()

    def seen(self: Late) -> None:
        self.wait()

    broken = OSError("the GPU fell off the bus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Late, "wait_on_device", seen)
        world.device.refusals += [broken, broken] if ahead else [broken]
        with pytest.raises(GeminiError, match="fell off the bus"):
            world.manager.acquire(chunk)
        assert chunk.use is Use.FREE and not chunk.pins
        check_manager(world.manager)
        if ahead:
            world.manager.look_ahead()
            world.device.refusals.append(broken)
        world.manager.acquire(chunk)
    assert chunk.flat.unique().tolist() == [chunk.spec.index + 1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_staging_is_used_again_when_its_copy_is_over(make_world: Callable[..., World], precision: str) -> None:
    """A spilled chunk of seven tiles: two are on their way while the next one is read. fp16: the masters are cast."""
    world = make_world([14, 4], 18, home=Tier.NVME, precision=precision)
    chunk, other = world.chunks
    if precision == "fp16":
        masters = make_plane(MASTER, chunk.spec.numel, Tier.NVME, world.device, world.files)
        chunk.planes[WEIGHTS] = masters
    tile = world.mover.tile
    content = torch.arange(chunk.weights.numel) // 1000 % 200
    for start in range(0, chunk.weights.numel, tile):
        staged = world.mover.scratch(0, chunk.weights.dtype, tile)
        world.mover.store([(chunk.weights, staged.copy_(content[start : start + tile]))], start, start + tile)
    world.manager.acquire(chunk)
    made = list(copies(world))
    assert len(made) == 7 and [copy.is_complete() for copy in made] == [True] * 5 + [False] * 2
    assert isinstance(chunk.fetched, AllOf) and not chunk.fetched.is_complete()
    world.manager.acquire(other)  # through the same staging
    assert all(copy.is_complete() for copy in made)
    assert torch.equal(chunk.flat.long(), content)
    other.fetched.wait()
    assert other.flat.unique().tolist() == [2]


def test_a_worker_reads_several_tiles_while_others_are_on_their_way(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world([14], 14, home=Tier.NVME)
    [chunk] = world.chunks
    most, limit = 0, 7

    class Read(Event):
        """Read when somebody waits for it."""

        def __init__(self, run: Callable[[], Any]):
            super().__init__()
            self._run = run

        def wait(self) -> None:
            if not self.is_complete():
                self._run()
                self.finish()

    reads = list[Read]()

    def begin_move(parts: Parts, start: int, stop: int, *, write: bool, urgent: bool) -> Event:
        nonlocal most
        [(plane, into)] = parts
        assert urgent and not write and plane is chunk.weights
        if len(reads) == limit:
            raise GeminiError("the disk is gone")
        reads.append(Read(lambda: into.fill_(start // world.mover.tile + 1)))
        most = max(most, sum(not read.is_complete() for read in reads))
        return reads[-1]

    monkeypatch.setattr(mover, "begin_move", begin_move)
    world.manager.room.populate(chunk.window, "windows", what="a test")
    own = StagingSet(_Memory(world.device, staging_bytes(world.mover.tile)), world.mover.tile)
    with world.mover.working(Working(world.mover.watch.moved, staging=own)):
        fetched = world.mover.gather(chunk)
    assert most == 3 and len(reads) == 7
    assert [copy.is_complete() for copy in copies(world)] == [True] * 3 + [False] * 4
    fetched.wait()
    tiles = chunk.flat.view(7, -1)
    assert tiles.min(1).values.tolist() == tiles.max(1).values.tolist() == [1, 2, 3, 4, 5, 6, 7]

    limit = 9  # the third one is refused while two are under way
    with (
        world.mover.working(Working(world.mover.watch.moved, staging=own)),
        pytest.raises(GeminiError, match="disk is gone"),
    ):
        world.mover.gather(chunk)
    assert len(reads) == 9 and all(read.is_complete() for read in reads), "nobody reads into staging any more"


def test_a_staged_fetch_that_fails_leaves_nothing_under_way(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world([14], 14, home=Tier.NVME)
    [chunk] = world.chunks
    begin, reads = mover.begin_move, list[Event]()

    def fails_late(*given: Any, **how: Any) -> Event:
        if len(reads) == 4:
            raise GeminiError("the disk is gone")
        reads.append(begin(*given, **how))
        return reads[-1]

    with monkeypatch.context() as patch:
        patch.setattr(mover, "begin_move", fails_late)
        with pytest.raises(GeminiError, match="the disk is gone"):
            world.manager.acquire(chunk)
    assert len(copies(world)) == 4 and all(event.is_complete() for event in [*reads, *copies(world)])
    check_manager(world.manager)
    world.device.refusals.append(OSError("the GPU fell off the bus"))
    with pytest.raises(GeminiError, match="fell off the bus"):  # in a tile whose staging was needed again
        world.manager.acquire(chunk)
    assert all(copy.is_complete() for copy in copies(world))
    world.manager.acquire(chunk)
    chunk.fetched.wait()
    assert chunk.flat.unique().tolist() == [1]


def test_several_events_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Event(), Event()
    both = AllOf([first, second])
    first.finish(OSError("lost"))
    assert not both.is_complete()
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.001)
    with pytest.raises(GeminiError, match="nothing has moved"), pytest.warns(UserWarning, match="nothing has moved"):
        both.wait()
    second.finish()
    assert both.is_complete()
    for wait in (both.wait, both.wait_on_device):
        with pytest.raises(GeminiError, match="lost"):
            wait()
    both.wait_until_over()
    AllOf([]).wait()
    assert AllOf([]).is_complete()
