"""The states of a chunk, as two small tables and one ``step``.

*Use* says who needs the gathered weights of a chunk on the computing tier, and so whether memory may be taken from it.
*Phase* says what a plane is doing in its tier. An event that the table does not have is an error that names the chunk,
the state, and what would have been legal: nothing is ever skipped silently. ``docs/states.md`` shows both as pictures.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from gemini.errors import IllegalTransition


class Use(Enum):
    """Who holds memory for the gathered weights of a chunk.

    FREE: nobody; the weights are only at home (if home is the computing tier, a chunk is never FREE).
    HOLD: they are gathered and nobody reads them now; their memory may be taken (weights are clean: dropped, not
        copied).
    COMPUTE: a module reads them in forward or backward; their memory may not be taken.
    GRAD_READY: gathered, and every gradient of the chunk has arrived, so that this step reads them no more: first to
        go.
    """

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    GRAD_READY = "grad_ready"


class Phase(Enum):
    """What a plane does in its tier: nothing, arriving as a copy, or leaving. The source stays authoritative."""

    STEADY = "steady"
    FETCHING = "fetching"
    EVICTING = "evicting"


class Event(Enum):
    """What can happen to a chunk (FETCH, ACQUIRE, RELEASE, GRADS, EVICT) and to a move (BEGIN_*, FINISH)."""

    FETCH = "fetch"
    ACQUIRE = "acquire"
    RELEASE = "release"
    GRADS = "grads"
    EVICT = "evict"
    BEGIN_FETCH = "begin_fetch"
    BEGIN_EVICT = "begin_evict"
    FINISH = "finish"


USE_TABLE: dict[tuple[Use, Event], Use] = {
    (Use.FREE, Event.FETCH): Use.HOLD,
    (Use.HOLD, Event.ACQUIRE): Use.COMPUTE,
    (Use.GRAD_READY, Event.ACQUIRE): Use.COMPUTE,
    (Use.COMPUTE, Event.RELEASE): Use.HOLD,
    (Use.HOLD, Event.GRADS): Use.GRAD_READY,
    (Use.HOLD, Event.EVICT): Use.FREE,
    (Use.GRAD_READY, Event.EVICT): Use.FREE,
}

PHASE_TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.STEADY, Event.BEGIN_FETCH): Phase.FETCHING,
    (Phase.STEADY, Event.BEGIN_EVICT): Phase.EVICTING,
    (Phase.FETCHING, Event.FINISH): Phase.STEADY,
    (Phase.EVICTING, Event.FINISH): Phase.STEADY,
}

State = TypeVar("State", Use, Phase)


def step(table: dict[tuple[State, Event], State], state: State, event: Event, who: str) -> State:
    """The state after ``event``.

    Raises:
        IllegalTransition: naming ``who``, the state, the event and the legal events.
    """
    after = table.get((state, event))
    if after is None:
        legal = sorted(e.value for s, e in table if s is state)
        raise IllegalTransition(f"{who} is {state.value}: {event.value} is not legal here, only {', '.join(legal)}")
    return after
