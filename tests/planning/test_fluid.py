"""The fluid model: what tasks that share resources take, by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.planning.fluid import Fluid, fair_speeds


def test_a_task_alone_takes_its_length_and_a_queue_does_one_after_the_other() -> None:
    fluid = Fluid(["disk"])
    a = fluid.add("reader", 2.0, loads={"disk": 1.0})
    b = fluid.add("reader", 3.0, loads={"disk": 1.0})
    played = fluid.run()
    assert (played.start[a], played.stop[a], played.start[b], played.stop[b]) == (0.0, 2.0, 2.0, 5.0)
    assert played.released_by[b] == a


def test_a_task_waits_for_all_that_it_comes_after() -> None:
    fluid = Fluid([])
    a, b = fluid.add("x", 2.0), fluid.add("y", 5.0)
    c = fluid.add("z", 1.0, after=[a, b])
    played = fluid.run()
    assert played.start[c] == 5.0 and played.stop[c] == 6.0
    assert played.released_by[c] == b


def test_the_most_urgent_ready_task_of_a_queue_runs_first() -> None:
    fluid = Fluid([])
    first = fluid.add("q", 1.0, urgency=9)  # alone at the beginning: nothing is interrupted for others
    gate = fluid.add("other", 0.5)
    late, soon = fluid.add("q", 1.0, after=[gate], urgency=5), fluid.add("q", 1.0, after=[gate], urgency=2)
    played = fluid.run()
    assert played.start[first] == 0.0
    assert (played.start[soon], played.start[late]) == (1.0, 2.0)


def test_memory_that_adam_and_a_copy_share_slows_both() -> None:
    """Adam alone uses all of 100 GB/s, a copy over a 25 GB/s link a quarter of it: together they want 1.25 times what
    there is, so that both go at 0.8 until the copy of 2 s is over at 2.5 s, when Adam has 10 - 2 = 8 s left.
    """
    fluid = Fluid(["dram", "link"])
    adam = fluid.add("adam", 10.0, loads={"dram": 1.0})
    copy = fluid.add("copy", 2.0, loads={"link": 1.0, "dram": 0.25})
    played = fluid.run()
    assert played.stop[copy] == pytest.approx(2.5)
    assert played.stop[adam] == pytest.approx(10.5)


def test_who_does_not_use_what_is_short_is_not_slowed() -> None:
    """Two that share a, one of which also uses b; a third uses half of b, of which the second leaves it enough."""
    speeds = fair_speeds([((0, 1.0),), ((0, 1.0), (1, 0.5)), ((1, 0.5),)])
    assert speeds == pytest.approx((0.5, 0.5, 1.0))
    # And what the slowed one leaves of b is taken: three quarters by the third, which alone would want all of it.
    assert fair_speeds([((0, 1.0),), ((0, 1.0), (1, 0.5)), ((1, 1.0),)]) == pytest.approx((0.5, 0.5, 0.75))


def test_a_buffer_that_is_full_holds_up_only_those_that_need_it() -> None:
    fluid = Fluid([])
    fluid.buffer = 10
    read = fluid.add("read", 1.0, takes=10)
    write = fluid.add("write", 4.0, after=[read], gives=10)
    blocked = fluid.add("read", 1.0, takes=5, urgency=1)
    fluid.add("write", 1.0, after=[blocked], gives=5)
    small = fluid.add("read", 1.0, urgency=2)
    played = fluid.run()
    assert played.start[small] == 1.0
    assert played.start[blocked] == 5.0 and played.released_by[blocked] == write


def test_tasks_that_can_never_start_are_an_error() -> None:
    fluid = Fluid([])
    fluid.buffer = 1
    fluid.add("q", 1.0, takes=2)
    with pytest.raises(AssertionError, match="more than the whole buffer"):
        fluid.run()


_LOADS = st.lists(
    st.dictionaries(st.integers(0, 3), st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0])).map(lambda d: tuple(d.items())),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(_LOADS)
def test_speeds_are_max_min_fair(loads: list[tuple[tuple[int, float], ...]]) -> None:
    """Nobody gets more than there is, and who is slowed has a full resource on which nobody is faster than it."""
    speeds = fair_speeds(loads)
    used: dict[int, float] = {}
    for load, speed in zip(loads, speeds, strict=True):
        for resource, share in load:
            used[resource] = used.get(resource, 0.0) + share * speed
    assert all(total <= 1 + 1e-9 for total in used.values())
    for load, speed in zip(loads, speeds, strict=True):
        assert 0 < speed <= 1 + 1e-9
        if speed < 1 - 1e-6:
            full = [r for r, _ in load if used[r] >= 1 - 1e-6]
            fastest = {
                r: max(s for other, s in zip(loads, speeds, strict=True) if any(r == q for q, _ in other)) for r in full
            }
            assert any(fastest[r] <= speed + 1e-6 for r in full)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_work_is_conserved_and_every_run_is_the_same(seed: int) -> None:
    """With a task running at all times, speeds add up to 1 at least: never slower than one after the other, never
    faster than the longest chain or the busiest queue. Who is said to have let a task start ended just then, and is of
    its queue, or one that it comes after, or gave back what it takes.
    """
    rng = random.Random(seed)
    fluid, again = Fluid(["a", "b"]), Fluid(["a", "b"])
    fluid.buffer = again.buffer = 10
    lengths, queues, after, earliest, takes = [], [], [], [], []
    for number in range(rng.randint(1, 30)):
        lengths.append(rng.choice([0.0, 0.5, 1.0, 2.5]))
        queues.append(rng.choice("xyz"))
        after.append(rng.sample(range(number), min(number, rng.randint(0, 3))))
        loads = {name: rng.choice([0.0, 0.3, 1.0]) for name in "ab"}
        urgency = rng.randint(0, 3)
        takes.append(rng.choice([0, 0, 3, 6, 10]))
        for each in (fluid, again):
            how = {"takes": takes[-1], "gives": takes[-1]}
            each.add(queues[-1], lengths[-1], after=after[-1], loads=loads, urgency=urgency, **how)
        earliest.append(lengths[-1] + max((earliest[n] for n in after[-1]), default=0.0))
    played = fluid.run()
    end = max(played.stop)
    assert end <= sum(lengths) + 1e-6
    assert end >= max(earliest) - 1e-6
    for queue in set(queues):
        assert end >= sum(n for n, q in zip(lengths, queues, strict=True) if q == queue) - 1e-6
        ran = sorted((played.start[n], played.stop[n]) for n, q in enumerate(queues) if q == queue)
        assert all(a[1] <= b[0] + 1e-12 for a, b in zip(ran, ran[1:], strict=False))
    for number, others in enumerate(after):
        assert all(played.stop[other] <= played.start[number] for other in others)
        cause = played.released_by[number]
        assert played.start[number] == (played.stop[cause] if cause >= 0 else 0)
        assert cause < 0 or cause in others or queues[cause] == queues[number] or (takes[cause] and takes[number])
    assert again.run() == played
