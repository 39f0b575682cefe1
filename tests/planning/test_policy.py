"""Who goes when memory is short: the policy as a game on integers."""

from hypothesis import given
from hypothesis import strategies as st

from gemini.planning.policy import Candidate, LeastRecentlyUsed

choose = LeastRecentlyUsed().choose


def candidate(index: int, num_bytes: int = 10, last_use: int = 0, done: bool = False) -> Candidate:
    return Candidate(index, num_bytes, last_use, done)


def test_nothing_goes_when_nothing_is_missing() -> None:
    assert choose([candidate(0)], 0) == ()
    assert choose([], 0) == ()


def test_what_was_used_longest_ago_goes_first() -> None:
    assert choose([candidate(0, last_use=7), candidate(1, last_use=3), candidate(2, last_use=5)], 20) == (1, 2)


def test_chunks_whose_gradients_are_complete_go_before_all_others() -> None:
    assert choose([candidate(0, last_use=1), candidate(1, last_use=9, done=True)], 10) == (1,)


def test_no_more_go_than_are_needed() -> None:
    chunks = [candidate(i, num_bytes=10, last_use=i) for i in range(5)]
    assert choose(chunks, 1) == (0,)
    assert choose(chunks, 10) == (0,)
    assert choose(chunks, 11) == (0, 1)


def test_all_or_nothing() -> None:
    assert choose([candidate(0), candidate(1)], 21) is None
    assert choose([], 1) is None


candidates = st.lists(
    st.builds(candidate, st.integers(0, 99), st.integers(1, 50), st.integers(0, 9), st.booleans()),
    unique_by=lambda c: c.chunk,
)


@given(candidates, st.integers(0, 400))
def test_victims_are_enough_distinct_and_none_too_many(chunks: list[Candidate], missing: int) -> None:
    victims = choose(chunks, missing)
    sizes = {c.chunk: c.num_bytes for c in chunks}
    if victims is None:
        assert sum(sizes.values()) < missing
        return
    assert len(set(victims)) == len(victims) and set(victims) <= set(sizes)
    assert sum(sizes[v] for v in victims) >= missing
    assert not victims or sum(sizes[v] for v in victims[:-1]) < missing
    ranks = {c.chunk: (not c.done, c.last_use) for c in chunks}
    staying = [ranks[c.chunk] for c in chunks if c.chunk not in victims]
    assert all(ranks[v] <= other for v in victims for other in staying)


@given(candidates, st.integers(0, 400))
def test_the_same_question_has_the_same_answer(chunks: list[Candidate], missing: int) -> None:
    assert choose(chunks, missing) == choose(list(chunks), missing)
