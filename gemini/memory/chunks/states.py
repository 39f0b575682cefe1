"""The states of a chunk, as one small table and one ``step``.

*Use* says who needs the gathered weights of a chunk on the computing tier, and so whether memory may be taken from it.
An event that the table does not have is an error that names the chunk, the state, and what would have been legal:
nothing is ever skipped silently. ``docs/states.md`` shows it as a picture.
"""

from __future__ import annotations

from enum import Enum

from gemini.errors import IllegalTransition


class Use(Enum):
    """A state of the gathered weights of a chunk: who holds memory for them, and who reads them.

    FREE: nobody; the weights are only at home (if home is the computing tier, a chunk is never FREE).
    FETCHING: there is memory for them and they are on their way; nobody reads it, and it may be taken once they came.
    HOLD: they are gathered and nobody reads them now; their memory may be taken (weights are clean: dropped, not
        copied).
    COMPUTE: a module reads them in forward or backward; their memory may not be taken.
    GRAD_READY: gathered, and every gradient of the chunk has arrived, so that this step reads them no more: first to
        go.
    UPDATING: an update reads the old weights out of the gathered ones, in place of their home; nobody else reads them,
        and their memory goes when it is over.
    """

    FREE = "free"
    FETCHING = "fetching"
    HOLD = "hold"
    COMPUTE = "compute"
    GRAD_READY = "grad_ready"
    UPDATING = "updating"


class UseChange(Enum):
    """An event of a chunk. A fetch ends with ARRIVE, or with FAIL."""

    FETCH = "fetch"
    ARRIVE = "arrive"
    FAIL = "fail"
    ACQUIRE = "acquire"
    RELEASE = "release"
    GRADS = "grads"
    UPDATE = "update"
    EVICT = "evict"


USE_TABLE: dict[tuple[Use, UseChange], Use] = {
    (Use.FREE, UseChange.FETCH): Use.FETCHING,
    (Use.FETCHING, UseChange.ARRIVE): Use.HOLD,
    # Nothing is lost: the copy at home stays the authoritative one.
    (Use.FETCHING, UseChange.FAIL): Use.FREE,
    (Use.HOLD, UseChange.ACQUIRE): Use.COMPUTE,
    # A recomputation, or another backward of the same graph, reads it once more.
    (Use.GRAD_READY, UseChange.ACQUIRE): Use.COMPUTE,
    (Use.COMPUTE, UseChange.RELEASE): Use.HOLD,
    (Use.HOLD, UseChange.GRADS): Use.GRAD_READY,
    (Use.HOLD, UseChange.UPDATE): Use.UPDATING,
    (Use.GRAD_READY, UseChange.UPDATE): Use.UPDATING,
    (Use.HOLD, UseChange.EVICT): Use.FREE,
    (Use.GRAD_READY, UseChange.EVICT): Use.FREE,
    # The one way out: the window has the weights of before the update, which nobody may read afterwards.
    (Use.UPDATING, UseChange.EVICT): Use.FREE,
}


def step(state: Use, event: UseChange, who: str) -> Use:
    """The state after ``event``. No worker makes a transition: one that has filled a window ends its job, and whoever
    needs the chunk goes on from there.

    Raises:
        IllegalTransition: naming ``who``, the state, the event and the legal events.
    """
    after = USE_TABLE.get((state, event))
    if after is None:
        legal = sorted(e.value for s, e in USE_TABLE if s is state)
        raise IllegalTransition(f"{who} is {state.value}: {event.value} is not legal here, only {', '.join(legal)}")
    return after
