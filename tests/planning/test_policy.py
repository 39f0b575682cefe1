"""Who goes when memory is short: the policy as a game on integers."""

from hypothesis import given
from hypothesis import strategies as st

from gemini.planning.policy import Candidate
from tests.planning.policies import DoneThenLeastRecent

choose = DoneThenLeastRecent().choose


def candidate(index: int, num_bytes: int = 10, last_use: int = 0, done: bool = False) -> Candidate:
    return Candidate(index, num_bytes, last_use, done)


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
