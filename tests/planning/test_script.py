"""The script of a step: a pure function of what moments need, what is let go, and where gradients are complete."""

from gemini.planning.script import Gather, Reduce, make_script

NEEDS = [{0}, {1}, {2}, {1}, {0}]
"""Three layers, forward and backward."""
STAYS = [set()] * 5
COMPLETED = {2: 2, 1: 3, 0: 4}


def test_what_stays_is_gathered_once_and_what_goes_again() -> None:
    script = make_script(NEEDS, STAYS, (), COMPLETED)
    assert script.gathers == (Gather(0, 0), Gather(1, 1), Gather(2, 2))
    assert script.reductions == (Reduce(2, 2), Reduce(3, 1), Reduce(4, 0))
    tight = make_script(NEEDS, [set(), {0}, {1}, {2}, {1}], (), COMPLETED)
    assert tight.gathers == (Gather(0, 0), Gather(1, 1), Gather(2, 2), Gather(3, 1), Gather(4, 0))
    assert tight.checksum != script.checksum


def test_what_is_there_is_gathered_only_after_it_was_let_go() -> None:
    assert make_script(NEEDS, STAYS, (0, 2), {}).gathers == (Gather(1, 1),)
    gone = make_script(NEEDS, [set(), {0}, set(), set(), set()], (0, 1, 2), {})
    assert gone.gathers == (Gather(4, 0),)
    assert make_script(NEEDS, STAYS, (0, 1, 2), {}) == make_script(NEEDS, STAYS, {2, 1, 0}, {})


def test_places_between_gathers_and_reductions() -> None:
    script = make_script(NEEDS, [set(), {0}, {1}, {2}, {1}], (), COMPLETED)  # one gather for each moment
    assert script.gathers_before == tuple(min(moment + 2, 5) for moment, _ in script.reductions)


def test_reductions_keep_their_order_and_no_place_goes_back() -> None:
    script = make_script(NEEDS, STAYS, (), {2: 3, 1: 2, 0: 4})
    assert script.reductions == (Reduce(3, 2), Reduce(3, 1), Reduce(4, 0))


def test_a_checksum_says_all_of_it_and_is_never_nothing() -> None:
    scripts = [make_script(NEEDS, STAYS, there, done) for there in ((), (0,)) for done in ({}, COMPLETED, {0: 4, 1: 3})]
    assert len({script.checksum for script in scripts}) == len(scripts)
    assert make_script([], [], (), {}).checksum > 0
