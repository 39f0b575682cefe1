"""The manager under tiny budgets: who is read stays, who is not goes, and no refusal and no failure changes anything.

The long random sequence is seeded: a failure names the operation and replays. After every operation the ledger's
equations hold, and every chunk that is in use shows the very content that its home has.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memory_cases import World

from gemini.errors import BudgetExceeded, IllegalTransition
from gemini.ledger import WELCOME, Ledger
from gemini.memory.chunks.chunk import USE_TABLE, Use, UseChange
from gemini.memory.devices import device as devices
from gemini.memory.devices.device import CpuDevice, Device
from gemini.planning.layout import ALIGN
from gemini.tiers import Tier
from tests.invariants import check_manager
from tests.standin_device import StandinDevice
from tests.standins import PieceDevice

UNIT = 2 * ALIGN  # bytes of a window of size 1

WORLDS = [
    "cpu over nvme", "cpu over nvme, resizing", "standin over cpu", "standin over nvme", "standin over cpu, resizing",
    "standin over cpu, in pieces",
]  # fmt: skip


@pytest.fixture(params=WORLDS)
def make_world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[int], int], World]]:
    """Worlds of chunks of the given sizes and a budget for windows, both in units."""
    where, _, how = request.param.partition(", ")
    if how == "resizing":
        monkeypatch.setattr(devices, "can_move_pages", lambda: False)
    name, home = where.split(" over ")
    made: list[Device] = []

    def make(sizes: list[int], budget: int) -> World:
        made.append(CpuDevice() if name == "cpu" else (PieceDevice if how == "in pieces" else StandinDevice)())
        return World(sizes, made[-1], budget * UNIT, Tier(home), tmp_path)

    yield make
    for device in made:
        device.close()


def check(world: World) -> None:
    check_manager(world.manager)
    if isinstance(world.device, PieceDevice):
        assert world.device.pieces.num_bytes == world.budget, "windows took what nobody gave them"
    for chunk in world.chunks:
        if chunk.pins:
            assert chunk.flat.min() == chunk.flat.max(), f"{chunk.name} shows a mixture"


def shown(world: World, index: int) -> float:
    return float(world.chunks[index].flat[-1])


def test_the_least_recently_used_goes_first(make_world: Callable[[list[int], int], World]) -> None:
    world = make_world([1, 1, 1, 1], 3)
    for index in (0, 1, 2, 0):
        world.manager.acquire(world.chunks[index])
        world.manager.release(world.chunks[index])
    world.manager.acquire(world.chunks[3])
    check(world)
    assert world.evicted == [1] and world.gathered() == [0, 2, 3]


def test_gradients_that_complete_while_the_chunk_is_read(make_world: Callable[[list[int], int], World]) -> None:
    """The last gradient of a chunk arrives inside the backward of its own module, which still holds the weights."""
    world = make_world([1, 1, 1], 2)
    for index in (0, 1):
        world.manager.acquire(world.chunks[index])
    world.manager.grads_complete(world.chunks[1])
    for index in (0, 1):
        world.manager.release(world.chunks[index])
    check(world)
    world.manager.acquire(world.chunks[2])
    assert world.evicted == [1], "complete: once released, it is the first to go"
    check(world)


def test_frames_of_other_sizes_are_given_back_for_room(make_world: Callable[[list[int], int], World]) -> None:
    """Small windows leave frames that no large window can use; together they may fill the budget."""
    world = make_world([1, 1, 1, 1, 4], 4)
    for index in range(4):
        world.manager.acquire(world.chunks[index])
        world.manager.release(world.chunks[index])
    world.manager.drop(world.chunks)
    check(world)
    world.manager.acquire(world.chunks[4])
    check(world)
    assert shown(world, 4) == 5 and world.ledger.peak(world.device.tier) <= world.ledger.budget(world.device.tier)
    world.manager.release(world.chunks[4])
    for index in range(4):
        world.manager.acquire(world.chunks[index])
        check(world)
        assert shown(world, index) == index + 1


def test_what_is_free_in_pieces_is_made_one() -> None:
    """Of eight units every second one is in use, and two are wanted in one piece."""
    device = PieceDevice()
    world = World([1] * 8 + [2], device, 8 * UNIT, Tier.CPU, Path())
    for chunk in world.chunks[:8]:
        world.manager.acquire(chunk)
    for chunk in world.chunks[:8:2]:
        world.manager.release(chunk)
    world.manager.acquire(world.chunks[8])
    check(world)
    assert [shown(world, index) for index in (1, 3, 5, 7, 8)] == [2, 4, 6, 8, 9]
    assert device.pieces.num_moves == 1
    device.close()


def test_what_nobody_reads_goes_before_what_is_read_is_moved() -> None:
    """Two free units on either side of one that stays for its next use: that one goes, and nothing is moved."""
    device = PieceDevice()
    world = World([1, 1, 1, 1, 2], device, 4 * UNIT, Tier.CPU, Path())
    for chunk in world.chunks[:4]:
        world.manager.acquire(chunk)
    for chunk in world.chunks[:3]:
        world.manager.release(chunk)
    world.manager.drop([world.chunks[0], world.chunks[2]])
    assert world.room() == 2 * UNIT and not device.has_place(2 * UNIT)
    world.manager.acquire(world.chunks[4])
    check(world)
    assert world.gathered() == [3, 4] and device.pieces.num_moves == 0
    device.close()


def test_what_is_the_windows_own_is_nobody_elses() -> None:
    """Neither who needs room nor who would like some gets it while any is read: it is all got anew or not at all."""
    device = PieceDevice()
    world = World([1, 1, 1], device, 2 * UNIT, Tier.CPU, Path())
    for chunk in world.chunks[:2]:
        world.manager.acquire(chunk)
    world.manager.release(world.chunks[0])
    before = world.snapshot()
    with pytest.raises(BudgetExceeded, match="a sum needs 4 KiB of gpu.*8 KiB are for gathered weights only"):
        world.ledger.reserve(Tier.GPU, UNIT, "sums", what="a sum")
    assert not world.ledger.make_room(Tier.GPU, UNIT, WELCOME)
    assert world.snapshot() == before and world.evicted == []
    check(world)
    world.manager.release(world.chunks[1])
    assert not world.ledger.make_room(Tier.GPU, UNIT, WELCOME) and world.evicted == [], (
        "what is welcome gets none in any case"
    )
    assert world.ledger.left_beside_windows(Tier.GPU, UNIT) == UNIT
    assert world.ledger.make_room(Tier.GPU, UNIT)
    assert world.evicted == [0, 1] and world.room() == world.ledger.free(Tier.GPU) == UNIT == device.pieces.num_bytes
    world.manager.acquire(world.chunks[2])
    assert shown(world, 2) == 3
    device.close()


def test_windows_get_more_for_good_only_where_nothing_else_helps() -> None:
    """More is read at once than was planned: what is free in the budget becomes theirs, and stays so."""
    device = PieceDevice()
    world = World([1, 1, 1, 2], device, 2 * UNIT, Tier.CPU, Path(), beside=2 * UNIT)
    for chunk in world.chunks[:2]:
        world.manager.acquire(chunk)
        world.manager.release(chunk)
    world.manager.acquire(world.chunks[2])
    assert world.evicted == [0] and world.ledger.free(Tier.GPU) == 2 * UNIT, "there was one to evict"
    world.manager.acquire(world.chunks[1])
    world.manager.acquire(world.chunks[3])
    assert [shown(world, index) for index in (1, 2, 3)] == [2, 3, 4]
    assert world.ledger.free(Tier.GPU) == 0 and device.pieces.num_bytes == 4 * UNIT
    for index in (1, 2, 3):
        world.manager.release(world.chunks[index])
    world.manager.drop(world.chunks)
    check_manager(world.manager)
    assert world.room() == 4 * UNIT and world.ledger.free(Tier.GPU) == 0
    device.close()


def test_illegal_steps_are_errors() -> None:
    from gemini.memory.chunks.chunk import step

    for use in Use:
        for event in UseChange:
            if (use, event) not in USE_TABLE:
                with pytest.raises(IllegalTransition, match=f"chunk 3.*{use.value}.*{event.value}.*only"):
                    step(use, event, "chunk 3")


@pytest.mark.parametrize("seed", range(2))
def test_two_thousand_random_operations(make_world: Callable[[list[int], int], World], seed: int, summary) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 1, 2, 3, 5)) for _ in range(12)]
    world = make_world(sizes, 9)
    manager, done = world.manager, Counter()
    truth = [float(index + 1) for index in range(len(sizes))]
    seen: dict[int, float] = {}  # what a reader began with
    for number in range(2000):
        chunk = rng.choice(world.chunks)
        index = chunk.spec.index
        what = rng.choice(("acquire",) * 5 + ("release",) * 5 + ("grads", "update", "room", "drop"))
        before = world.snapshot()
        try:
            if what == "acquire":
                manager.acquire(chunk)
                seen.setdefault(index, truth[index])
            elif what == "release":
                pinned = [c for c in world.chunks if c.pins]
                if pinned:
                    chunk = rng.choice(pinned)
                    manager.release(chunk)
                    if not chunk.pins:
                        del seen[chunk.spec.index]
            elif what == "grads":
                manager.grads_complete(chunk)
            elif what == "update":
                truth[index] = float(rng.randrange(1, 200))
                world.write(chunk, truth[index])
                manager.drop([chunk])
            elif what == "room":
                num_bytes = rng.randrange(1, 7) * UNIT
                world.make_room(num_bytes)
            else:
                manager.drop(rng.sample(world.chunks, 3))
        except BudgetExceeded:
            what += " refused"
            assert world.snapshot() == before, f"operation {number}: refused, and yet something changed"
            pinned_bytes = sum(world.window_bytes(c.spec.index) for c in world.chunks if c.pins)
            needs = world.window_bytes(index) if "acquire" in what else num_bytes
            assert pinned_bytes + needs > 9 * UNIT, f"operation {number}: refused though there was room"
        done[what] += 1
        check(world)
        for pinned, value in seen.items():
            assert shown(world, pinned) == value, f"operation {number} ({what}): chunk {pinned} lost its content"
    assert done["acquire"] > 200 and done["acquire refused"] > 20 and manager.room.num_evictions > 100
    summary(
        f"manager, seed {seed}, {type(world.device).__name__}: {dict(done)}, {manager.room.num_evictions} evictions"
    )
    for chunk in world.chunks:
        while chunk.pins:
            manager.release(chunk)
    manager.drop(world.chunks)
    world.make_room(9 * UNIT)
    check(world)


def test_every_ledger_call_may_fail(make_world: Callable[[list[int], int], World]) -> None:
    """The k-th reservation fails, for every k: the equations hold at once, and the next try works."""

    class Refusing(Ledger):
        left = -1

        def take(self, tier: Tier, num_bytes: int, holder: str) -> bool:
            if self.left == 0:
                self.left = -1
                raise BudgetExceeded("this one was chosen to fail")
            self.left -= self.left > 0
            return super().take(tier, num_bytes, holder)

    def play(world: World) -> None:
        for index in (0, 1, 2, 0, 3, 1):
            world.manager.acquire(world.chunks[index])
            assert shown(world, index) == index + 1
            world.manager.release(world.chunks[index])

    for number in range(1, 40):
        world = make_world([1, 1, 2, 2], 3)
        world.ledger.__class__ = Refusing
        world.ledger.left = number - 1
        try:
            play(world)
        except BudgetExceeded as error:
            assert "chosen to fail" in str(error)
        else:
            few = 0 if world.device.keeps_windows else 3  # there all of it was reserved once for all
            assert number > few, "fewer reservations than windows of different sizes"
            return
        check(world)
        play(world)
        check(world)
    raise AssertionError("it never came to an end")
