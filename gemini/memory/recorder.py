"""Records a real step: which lane worked when and on what, what computing waited for, what every tier held.

Everything runs in turn today, so at any instant exactly one *activity* is under way: the innermost one. An activity
that begins inside another interrupts it: a module that computes while its weights are read from NVMe is two spans of
computing with a span of reading between them. So spans never overlap, computing has no waiting in it, and all time of
activities that are not computing is a stall by its cause. The ledger tells every change of what is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemini.planning.timeline import Lane, Sample, Span, Timeline
from gemini.tiers import Tier

NOTHING: AbstractContextManager[None] = nullcontext()
"""What stands in for an activity where nobody records."""

_LANES = {
    (Tier.NVME, Tier.CPU): Lane.NVME_READ,
    (Tier.CPU, Tier.NVME): Lane.NVME_WRITE,
    (Tier.CPU, Tier.GPU): Lane.H2D,
    (Tier.GPU, Tier.CPU): Lane.D2H,
}

Held = Mapping[Tier, Mapping[str, int]]


class _Change(NamedTuple):
    """What some holders of a tier hold from ``seconds`` on."""

    seconds: float
    moment: int
    tier: Tier
    held: Mapping[str, int]


@dataclass
class Step:
    """One whole step as it was recorded; ``stop``: the end of its update, ``next_start``: where the next one begins."""

    start: float
    at_start: Held
    spans: list[Span]
    stalls: dict[str, float]
    changes: list[_Change]
    moments: list[str]
    stop: float = 0.0
    next_start: float | None = None

    def samples(self) -> tuple[Sample, ...]:
        """What is held, from the beginning and after every change."""
        held: dict[Tier, Mapping[str, int]] = {tier: dict(holders) for tier, holders in self.at_start.items()}
        found = [Sample(0.0, 0 if self.moments else -1, dict(held))]
        for change in self.changes:
            merged = {**held.get(change.tier, {}), **change.held}
            held[change.tier] = {holder: num_bytes for holder, num_bytes in merged.items() if num_bytes}
            found.append(Sample(change.seconds, change.moment, dict(held)))
        return tuple(found)

    def timeline(
        self, *, title: str, tokens: int, flops: int, moved: Mapping[str, int], budgets: Mapping[Tier, int]
    ) -> Timeline:
        """The step as a value."""
        return Timeline(
            source="measured",
            title=title,
            step_seconds=(self.stop if self.next_start is None else self.next_start) - self.start,
            tokens=tokens,
            flops=flops,
            spans=tuple(self.spans),
            stalls=dict(sorted(self.stalls.items(), key=lambda item: -item[1])),
            moved=dict(moved),
            samples=self.samples(),
            budgets=dict(budgets),
            moments=tuple(self.moments),
        )


class Activity:
    """What is done between entering and leaving; ``lane`` None: it waits, or prepares, and keeps no lane busy."""

    __slots__ = ("cause", "chunk", "lane", "moment", "name", "num_bytes", "recorder")

    def __init__(self, recorder: Recorder, lane: Lane | None, name: str, cause: str, chunk: int, num_bytes: int):
        self.recorder, self.lane, self.name, self.cause = recorder, lane, name, cause
        self.chunk, self.num_bytes, self.moment = chunk, num_bytes, -1

    def __enter__(self) -> None:
        self.recorder._begin(self)

    def __exit__(self, *exc: Any) -> None:
        self.recorder._end(self)


class Recorder:
    """Collects the spans and samples of one step after another. Activities begin and end on one thread at a time.

    Args:
        synchronize: makes the device finish what it was given, so that a clock read afterwards tells the truth.
        clock: seconds, for tests.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        self._synchronize, self._clock = synchronize, clock
        self._stack: list[Activity] = []
        self._computing: Activity | None = None
        self._since = 0.0
        self._step: Step | None = None

    # ---- activities ---------------------------------------------------------------------------------------------

    def computing(self, name: str | None) -> None:
        """From here on the time that nothing else takes is computing of that name; None: it is nobody's."""
        self._cut()
        self._computing = None if name is None else Activity(self, Lane.COMPUTE, name, "", -1, 0)

    def span(
        self,
        lane: Lane,
        name: str | None = None,
        chunk: int | None = None,
        num_bytes: int = 0,
        *,
        cause: str | None = None,
    ) -> AbstractContextManager[None]:
        """``lane`` is at work; name, chunk and cause are by default those of what is under way."""
        around = self._stack[-1] if self._stack else None
        if name is None:
            name = lane.value if around is None else around.name
        if chunk is None:
            chunk = -1 if around is None else around.chunk
        if cause is None:
            cause = "other" if around is None else around.cause
        return Activity(self, lane, name, cause, chunk, num_bytes)

    def about(self, cause: str, name: str, chunk: int = -1) -> AbstractContextManager[None]:
        """What happens inside is done for ``name``, and computing waits for it because of ``cause``."""
        return Activity(self, None, name, cause, chunk, 0)

    def move(self, source: Tier, target: Tier, num_bytes: int) -> AbstractContextManager[None]:
        """A copy between two neighbouring tiers, or within one: that keeps no lane busy."""
        lane = _LANES.get((source, target))
        return NOTHING if lane is None else self.span(lane, num_bytes=num_bytes)

    def held(self, tier: Tier, holders: Mapping[str, int]) -> None:
        """What some holders hold from now on: a ledger's ``on_change``."""
        if self._step is not None:
            self._step.changes.append(_Change(self._clock() - self._step.start, self._moment(), tier, holders))

    # ---- steps --------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def begin_step(self, held: Held) -> float:
        """A step begins now; ``held`` is what is held. Returns the time of the clock."""
        self._cut()
        self._step = Step(self._since, held, [], {}, [], [])
        return self._since

    def end_step(self) -> Step:
        """The step is over: all of it."""
        self._cut()
        step, self._step, self._computing = self._step, None, None
        assert step is not None
        step.stop = self._since
        return step

    def abandon_step(self) -> None:
        """What was recorded since :meth:`begin_step` became no step."""
        self._step = self._computing = None

    # ---- inside -------------------------------------------------------------------------------------------------

    def _begin(self, activity: Activity) -> None:
        self._cut()
        self._stack.append(activity)

    def _end(self, activity: Activity) -> None:
        self._cut()
        popped = self._stack.pop()
        assert popped is activity, (popped.name, activity.name)

    def _cut(self) -> None:
        """Write down what was under way since the last cut."""
        if self._synchronize is not None:
            self._synchronize()
        now, step = self._clock(), self._step
        current = self._stack[-1] if self._stack else self._computing
        if step is not None and current is not None and now > self._since:
            if current.lane is not None:
                start, stop, moment = self._since - step.start, now - step.start, self._moment()
                step.spans.append(
                    Span(current.lane, start, stop, current.name, moment, current.chunk, current.num_bytes)
                )
                current.num_bytes = 0  # what is interrupted has moved its bytes once
            if current.lane is not Lane.COMPUTE:
                step.stalls[current.cause] = step.stalls.get(current.cause, 0.0) + now - self._since
        self._since = now

    def _moment(self) -> int:
        """The number of the stretch of computing that is under way, or interrupted; -1 outside of them."""
        if self._step is None or self._computing is None:
            return -1
        if self._computing.moment < 0:
            self._computing.moment = len(self._step.moments)
            self._step.moments.append(self._computing.name)
        return self._computing.moment
