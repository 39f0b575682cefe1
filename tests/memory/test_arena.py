"""The book of a stretch of memory: no range is anybody else's, nothing is lost, everything joins again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.memory.devices.arena import Arena

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
    furthest = 0
    for step in steps:
        if step > 0:
            free_before = arena.free
            offset, pages = arena.take(step), -(-step // PAGE) * PAGE
            if offset is None:
                assert all(size < pages for _, size in free_before), "there was room"
                continue
            taken[offset] = pages
            furthest = max(furthest, offset + pages)
            exact = [start for start, size in free_before if size == pages]
            fitting = [start for start, size in free_before if size >= pages]
            assert offset == (exact or fitting)[0]
        elif taken:
            offset = sorted(taken)[step % len(taken)]
            del taken[offset]
            arena.give_back(offset)
        assert all(offset % PAGE == 0 for offset in taken)
        assert arena.used == sum(taken.values()) and arena.fresh == furthest
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
