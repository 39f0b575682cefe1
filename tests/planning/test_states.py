"""Every legal and every illegal step of the state machine."""

from itertools import product

import pytest

from gemini.errors import GeminiError, IllegalTransition
from gemini.memory.chunks.chunk import USE_TABLE, Use, UseChange, step

# Written out a second time on purpose: a change of the tables has to be meant.
LEGAL_USE = {
    (Use.FREE, UseChange.FETCH): Use.FETCHING,
    (Use.FETCHING, UseChange.ARRIVE): Use.HOLD,
    (Use.FETCHING, UseChange.FAIL): Use.FREE,
    (Use.HOLD, UseChange.ACQUIRE): Use.COMPUTE,
    (Use.HOLD, UseChange.GRADS): Use.GRAD_READY,
    (Use.HOLD, UseChange.UPDATE): Use.UPDATING,
    (Use.HOLD, UseChange.EVICT): Use.FREE,
    (Use.COMPUTE, UseChange.RELEASE): Use.HOLD,
    (Use.GRAD_READY, UseChange.ACQUIRE): Use.COMPUTE,
    (Use.GRAD_READY, UseChange.UPDATE): Use.UPDATING,
    (Use.GRAD_READY, UseChange.EVICT): Use.FREE,
    (Use.UPDATING, UseChange.EVICT): Use.FREE,
}


@pytest.mark.parametrize(("state", "event"), list(product(Use, UseChange)))
def test_use(state: Use, event: UseChange) -> None:
    if (state, event) in LEGAL_USE:
        assert step(state, event, "chunk 3") is LEGAL_USE[state, event]
        return
    with pytest.raises(IllegalTransition) as error:
        step(state, event, "chunk 3")
    text = str(error.value)
    assert "chunk 3" in text and state.value in text and event.value in text
    for _, allowed in (key for key in LEGAL_USE if key[0] is state):
        assert allowed.value in text.split("only")[1], f"{text!r} does not name {allowed.value}"


def test_memory_in_use_is_never_taken() -> None:
    assert (Use.COMPUTE, UseChange.EVICT) not in USE_TABLE
    assert all(state not in (Use.COMPUTE, Use.FETCHING) for state, event in USE_TABLE if event is UseChange.EVICT)


def test_every_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in USE_TABLE} == set(Use) == set(USE_TABLE.values())


def test_illegal_transition_is_one_of_ours() -> None:
    assert issubclass(IllegalTransition, GeminiError)
