"""Every legal and every illegal step of the two state machines."""

from __future__ import annotations

from itertools import product

import pytest

from gemini.errors import GeminiError, IllegalTransition
from gemini.states import PHASE_TABLE, USE_TABLE, Event, Phase, Use, step

# Written out a second time on purpose: a change of the tables has to be meant.
LEGAL_USE = {
    (Use.FREE, Event.FETCH): Use.HOLD,
    (Use.HOLD, Event.ACQUIRE): Use.COMPUTE,
    (Use.HOLD, Event.GRADS): Use.GRAD_READY,
    (Use.HOLD, Event.EVICT): Use.FREE,
    (Use.COMPUTE, Event.RELEASE): Use.HOLD,
    (Use.GRAD_READY, Event.ACQUIRE): Use.COMPUTE,
    (Use.GRAD_READY, Event.EVICT): Use.FREE,
}
LEGAL_PHASE = {
    (Phase.STEADY, Event.BEGIN_FETCH): Phase.FETCHING,
    (Phase.STEADY, Event.BEGIN_EVICT): Phase.EVICTING,
    (Phase.FETCHING, Event.FINISH): Phase.STEADY,
    (Phase.EVICTING, Event.FINISH): Phase.STEADY,
}


@pytest.mark.parametrize(("state", "event"), list(product(Use, Event)))
def test_use(state: Use, event: Event) -> None:
    check(USE_TABLE, LEGAL_USE, state, event)


@pytest.mark.parametrize(("state", "event"), list(product(Phase, Event)))
def test_phase(state: Phase, event: Event) -> None:
    check(PHASE_TABLE, LEGAL_PHASE, state, event)


def check(table, legal, state, event) -> None:  # type: ignore[no-untyped-def]
    if (state, event) in legal:
        assert step(table, state, event, "chunk 3") is legal[state, event]
        return
    with pytest.raises(IllegalTransition) as error:
        step(table, state, event, "chunk 3")
    text = str(error.value)
    assert "chunk 3" in text and state.value in text and event.value in text
    for _, allowed in (key for key in legal if key[0] is state):
        assert allowed.value in text.split("only")[1], f"{text!r} does not name {allowed.value}"


def test_memory_in_use_is_never_taken() -> None:
    assert (Use.COMPUTE, Event.EVICT) not in USE_TABLE
    assert all(state is not Use.COMPUTE for state, event in USE_TABLE if event is Event.EVICT)


def test_every_state_can_be_reached_and_left() -> None:
    for table, states in ((USE_TABLE, Use), (PHASE_TABLE, Phase)):
        assert {state for state, _ in table} == set(states) == set(table.values())


def test_illegal_transition_is_one_of_ours() -> None:
    assert issubclass(IllegalTransition, GeminiError)
