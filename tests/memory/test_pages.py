"""Host pages: aligned, moved under a fixed address with their content, alive as long as a tensor, absent in a child."""

from __future__ import annotations

import gc
import os

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cases import PAGE, run_python

from gemini.memory.devices import pages
from gemini.memory.devices.device import FramePool
from gemini.memory.devices.pages import HUGE_PAGE, Pages, can_move_pages, host_bytes
from tests.standins import Arena

MIB = 2**20
needs_moving = pytest.mark.skipif(not can_move_pages(), reason="this system cannot move pages (Linux before 5.7)")


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.parametrize("num_bytes", [PAGE, 3 * PAGE, HUGE_PAGE, HUGE_PAGE + PAGE, 5 * MIB])
def test_pages_are_aligned_zero_and_whole(num_bytes: int) -> None:
    memory = Pages(num_bytes)
    tensor = memory.tensor()
    assert memory.address % HUGE_PAGE == 0 and tensor.data_ptr() == memory.address
    assert tensor.numel() == num_bytes and tensor.dtype is torch.uint8
    assert int(tensor.count_nonzero()) == 0
    tensor.fill_(255)
    assert int(tensor.count_nonzero()) == num_bytes


@pytest.mark.parametrize("num_bytes", [0, -PAGE, 1, PAGE + 1])
def test_odd_sizes_are_a_bug_of_the_caller(num_bytes: int) -> None:
    with pytest.raises(AssertionError):
        Pages(num_bytes)


def test_memory_comes_with_the_first_touch_and_no_more_than_asked() -> None:
    gc.collect()
    before = anonymous()
    held = [Pages(33 * MIB + PAGE) for _ in range(4)]
    tensors = [p.tensor() for p in held]
    assert anonymous() - before < MIB
    for tensor in tensors:
        tensor.fill_(1)
    grown = anonymous() - before
    assert abs(grown - 4 * (33 * MIB + PAGE)) < MIB, f"{grown / MIB:.1f} MiB"


@needs_moving
@pytest.mark.parametrize("num_bytes", [PAGE, 3 * PAGE, 4 * MIB + PAGE])
def test_moving_keeps_content_and_both_addresses(num_bytes: int) -> None:
    here, there = Pages(num_bytes), Pages(num_bytes)
    a, b = here.tensor(), there.tensor()
    addresses = here.address, there.address
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    a.copy_(content)
    b.fill_(77)
    before = anonymous()
    here.move_to(there)
    assert torch.equal(b, content), "the content came along, what was there is gone"
    assert (here.address, there.address) == addresses == (a.data_ptr(), b.data_ptr())
    assert anonymous() <= before + MIB, "moved, not copied"
    assert int(a.count_nonzero()) == 0, "what was moved away reads as fresh zero pages"
    there.move_to(here)
    assert torch.equal(a, content)


@needs_moving
def test_a_view_that_was_saved_sees_what_comes_back() -> None:
    window, shelf = Pages(MIB), Pages(MIB)
    view = window.tensor().view(torch.float32)[1000:2000].view(10, 100).t()
    window.tensor().view(torch.float32).copy_(torch.arange(MIB // 4))
    seen = view.clone()
    window.move_to(shelf)
    shelf.move_to(window)
    assert torch.equal(view, seen)


@needs_moving
def test_a_refused_move_leaves_both_as_they_were() -> None:
    here, there = Pages(MIB), Pages(MIB)
    here.tensor().fill_(1)
    there.tensor().fill_(2)
    address, there.address = there.address, there.address + 1  # not a page: the kernel refuses
    with pytest.raises(OSError, match="mremap"):
        here.move_to(there)
    there.address = address
    assert here.tensor().unique().tolist() == [1] and there.tensor().unique().tolist() == [2]


def test_a_tensor_outlives_its_pages() -> None:
    before = anonymous()
    tensor = Pages(8 * MIB).tensor()
    view = tensor.view(torch.float32)[100:200]
    tensor.fill_(0)
    view.fill_(3.5)
    del tensor
    gc.collect()
    others = [Pages(8 * MIB).tensor().fill_(9) for _ in range(4)]  # would land on a range that was unmapped too early
    assert view.unique().tolist() == [3.5]
    del view, others
    gc.collect()
    assert anonymous() - before < MIB, "with the last view the memory goes"


def test_discard_gives_memory_back_and_reads_as_zeros() -> None:
    memory = Pages(16 * MIB)
    tensor = memory.tensor().fill_(5)
    before = anonymous()
    memory.discard()
    assert before - anonymous() > 15 * MIB
    assert int(tensor.count_nonzero()) == 0


def test_host_bytes_where_pages_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.mmap, "PAGESIZE", 2**16)
    monkeypatch.setattr(pages, "can_move_pages", can_move_pages.__wrapped__)
    assert not pages.can_move_pages()
    assert int(host_bytes(3 * PAGE).count_nonzero()) == 0


def test_moving_is_refused_where_the_kernel_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Pages, other: Pages) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Pages, "move_to", refuse)
    assert can_move_pages.__wrapped__() is False


def test_a_forked_child_has_no_copy_and_unmaps_nothing() -> None:
    """The child gets none of the pages (it may touch, copy and collect what it likes), the parent keeps every bit."""
    done = run_python(
        """
import gc, os, signal
import torch
from gemini.memory.devices.pages import Pages
MIB = 2**20
def anon():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
held = [Pages(64 * MIB) for _ in range(4)]
tensors = [p.tensor().fill_(i + 1) for i, p in enumerate(held)]
full = anon()
child = os.fork()
if child == 0:
    ours = anon()
    del held, tensors
    gc.collect()            # finalizers of the parent's ranges: must do nothing here
    fresh = Pages(8 * MIB).tensor().fill_(7)
    ok = full - ours > 250 * MIB and int(fresh.sum()) == 7 * 8 * MIB
    os._exit(0 if ok else 3)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert all(int(t[0]) == int(t[-1]) == i + 1 for i, t in enumerate(tensors))
child = os.fork()
if child == 0:
    int(tensors[0][0])      # not there: a signal at once, not a hang and not somebody else's bytes
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["11"]


# ---- the frame pool --------------------------------------------------------------------------------------------------


@needs_moving
def test_frames_are_counted_reused_and_trimmed() -> None:
    pool = FramePool()
    small, large = Pages(2 * PAGE), Pages(MIB)
    small.tensor().fill_(1)
    large.tensor().fill_(2)
    assert not pool.has(MIB) and pool.parked_bytes == 0
    pool.park(small)
    pool.park(large)
    assert pool.parked_bytes == 2 * PAGE + MIB and pool.has(MIB) and pool.has(2 * PAGE) and not pool.has(PAGE)
    other = Pages(MIB)
    pool.take(other)
    assert pool.parked_bytes == 2 * PAGE and not pool.has(MIB)
    assert int(other.tensor()[0]) == 2, "the very pages that were parked"
    pool.park(other)
    before = anonymous()
    assert pool.trim() == 2 * PAGE + MIB and pool.parked_bytes == 0 and not pool.has(MIB)
    assert before - anonymous() >= MIB
    assert pool.trim() == 0


@needs_moving
def test_a_pool_of_one_frame_serves_many_windows_in_the_memory_of_one() -> None:
    pool = FramePool()
    windows = [Pages(16 * MIB) for _ in range(6)]
    before = anonymous()
    for turn in range(3):
        for number, window in enumerate(windows):
            pool.take(window)
            window.tensor().fill_(turn + number)
            assert anonymous() - before < 17 * MIB
            pool.park(window)
    assert pool.parked_bytes == 16 * MIB


@needs_moving
def test_a_failed_take_leaves_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, window = FramePool(), Pages(MIB)
    window.tensor().fill_(1)
    pool.park(window)

    def refuse(self: Pages, other: Pages) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "move_to", refuse)
        with pytest.raises(OSError):
            pool.take(window)
        assert pool.parked_bytes == MIB and pool.has(MIB), "the frame is still there, counted and to be had"
        with pytest.raises(OSError):
            pool.park(Pages(MIB))
    assert pool.parked_bytes == MIB
    pool.take(window)
    assert int(window.tensor()[0]) == 1


@needs_moving
def test_ranges_do_not_use_up_the_mappings_of_a_process() -> None:
    """The kernel allows 65,530 mappings: a chunk may cost a few, and gives them back."""
    process = psutil.Process(os.getpid())

    def mappings() -> int:
        return len(process.memory_maps(grouped=False))

    gc.collect()
    before = mappings()
    held = [Pages(MIB) for _ in range(100)]
    assert mappings() - before <= 300
    del held
    gc.collect()
    assert mappings() - before <= 5


# ---- the arena -------------------------------------------------------------------------------------------------------

# The book of a stretch of memory: no range is anybody else's, nothing is lost, everything joins again.

PAGE = 4096


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[int]]:
    """The pages of an arena, and what is done: a positive number takes so many bytes, another gives back."""
    num_pages = draw(st.integers(1, 40))
    few = draw(st.lists(st.integers(1, num_pages * PAGE + 1), min_size=1, max_size=3))
    sizes = st.one_of(st.sampled_from(few), st.integers(1, num_pages * PAGE + 1))
    return num_pages, draw(st.lists(st.one_of(sizes, sizes, st.integers(-50, 0)), max_size=60))


@settings(max_examples=150, deadline=None)
@given(histories())
def test_ranges_are_apart_and_nothing_is_lost(history: tuple[int, list[int]]) -> None:
    num_pages, steps = history
    arena = Arena(num_pages * PAGE)
    taken: dict[int, int] = {}
    for step in steps:
        if step > 0:
            free_before = arena.free
            offset, pages = arena.take(step), -(-step // PAGE) * PAGE
            if offset is None:
                assert all(size < pages for _, size in free_before), "there was room"
                continue
            taken[offset] = pages
            exact = [start for start, size in free_before if size == pages]
            fitting = [start for start, size in free_before if size >= pages]
            assert offset == (exact or fitting)[0]
        elif taken:
            offset = sorted(taken)[step % len(taken)]
            del taken[offset]
            arena.give_back(offset)
        assert all(offset % PAGE == 0 for offset in taken)
        assert arena.used == sum(taken.values())
        everything = sorted([*taken.items(), *arena.free])
        at = 0
        for start, size in everything:
            assert start == at and size > 0, "a gap, or two have the same bytes"
            at += size
        assert at == arena.size
        assert not {start + size for start, size in arena.free} & {start for start, _ in arena.free}, "not joined"
    for offset in taken:
        arena.give_back(offset)
    assert arena.free == ((0, arena.size),) and arena.used == 0


def test_those_of_a_size_follow_each_other_in_one_place() -> None:
    """A class that comes and goes cuts no larger range up, though one stands before it."""
    arena = Arena(20 * PAGE)
    first, small, wall = arena.take(8 * PAGE), arena.take(2 * PAGE), arena.take(PAGE)
    assert (first, small, wall) == (0, 8 * PAGE, 10 * PAGE)
    arena.give_back(0)
    held = arena.take(PAGE)  # no such size: into the first that is long enough
    assert held == 0
    hole = arena.take(7 * PAGE)
    assert hole == PAGE
    arena.give_back(PAGE)
    arena.give_back(8 * PAGE)
    assert arena.free == ((PAGE, 9 * PAGE), (11 * PAGE, 9 * PAGE)), "neighbours are one again"
    assert arena.take(9 * PAGE) == PAGE and arena.take(9 * PAGE) == 11 * PAGE
    assert arena.take(1) is None
