"""Which gathered chunk is needed again when: what the manager knows of the future when it has to make room.

The future is a schedule: the accesses of one step and the moves planned for them, from the plan the model was wrapped
with, or from the first step that was seen. A step that does something else costs time and never correctness: where the
schedule has lost its place the answer is "not known", and two such steps in a row have the next one recorded anew.

A step is a forward and its backward, so several micro-batches are that step several times. Inside of a *scope* they
are one step, with a schedule of stages that they pass through together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gemini.memory.chunks.chunk import Chunk
from gemini.planning.plan import Moves
from gemini.planning.policy import NEVER
from gemini.planning.script import Script, make_script
from gemini.planning.trace import Access

LOOK_AHEAD = 64
"""Moments that a chunk's access may be early or late by before the schedule counts as lost."""

Outlook = tuple[int | None, bool]


class Schedule:
    """One step's accesses with their moves, and a place in it. A *moment* is an index into the accesses."""

    def __init__(
        self, accesses: Sequence[Access], moves: Sequence[Moves], moving: frozenset[int], again: Sequence[Moves] = ()
    ):
        """``again``: the moves of a further micro-batch, where they are others: they say what stays until it begins."""
        # By moment: the chunks that are read and move. Residents are none of the manager's business.
        self._needs = [frozenset(access.chunks) & moving for access in accesses]
        # By moment, what the plan evicts there: for the script of several ranks.
        self._let_go = [frozenset(each.evict) for each in (again or moves)]
        # By chunk, ascending: the moments at which a stretch of reading it begins.
        self._starts: dict[int, list[int]] = {}
        # Chunks with the moment that they are fetched for: what is not in here the plan has kept until then.
        self._fetches: set[tuple[int, int]] = set()
        self.place: int | None = None
        """The moment that the step is in: None outside of it, -1 before the first one."""
        # Answers in this step: each is right until the moment that it names has come.
        self._known: dict[tuple[int, bool], tuple[int, bool]] = {}
        self.num_deviations = 0
        # In the order of moments, so that `upcoming` can search.
        self._planned: list[tuple[int, int]] = []
        before: frozenset[int] = frozenset()
        for moment, (needed, now, later) in enumerate(zip(self._needs, moves, again or moves, strict=True)):
            # Only where the moment before does not read it: a stretch has one beginning.
            for index in sorted(needed - before):
                self._starts.setdefault(index, []).append(moment)
            self._fetches.update((index, moment) for index in later.fetch)
            self._planned += [(moment, index) for index in now.fetch]
            before = needed

    def begin(self) -> None:
        """Begin a step."""
        self.place, self.num_deviations = -1, 0
        self._known.clear()

    def advance(self, index: int) -> None:
        """A chunk is read: move to the moment that says so."""
        # Several reads inside one moment do not move on.
        if self.place is None or (self.place >= 0 and index in self._needs[self.place]):
            return
        following = self.place + 1
        if following < len(self._needs) and index in self._needs[following]:  # as planned
            self.place = following
            return
        start = self._next_start(index, self.place)
        if start is None or start - self.place > LOOK_AHEAD:
            # The place stays: one strange read, and the next one may be as planned again.
            self.num_deviations += 1
        else:
            self.place = start

    def _outlook(self, index: int, done: bool, at: int) -> tuple[int, bool]:
        """The moment of the next use after ``at``, and whether it is kept until then. ``done``: all gradients came."""
        following = at + 1
        if not done and 0 < following < len(self._needs) and index in self._needs[at] & self._needs[following]:
            # Let go between two moments that both read it: the window stays for the next one.
            return following, True
        start = self._next_start(index, at)
        if start is not None:
            return start, (index, start) not in self._fetches
        if index not in self._starts:
            return NEVER, False
        # The next step, taken to be like this one.
        first = self._starts[index][0]
        return len(self._needs) + first, (index, first) not in self._fetches

    def outlooks(self, asked: Sequence[tuple[int, bool]], reader: int | None = None) -> Sequence[Outlook]:
        """As :meth:`Foresight.outlooks`."""
        at = self.place
        if at is None or not self._starts:
            return [(None, False)] * len(asked)
        if reader is not None and (at < 0 or reader not in self._needs[at]):
            start = self._next_start(reader, at)
            # As of the moment before the one that reads it: at its own moment everything in it would count as read now.
            at = at if start is None or start - at > LOOK_AHEAD else start - 1
        if reader is not None:
            return [self._outlook(index, done, at) for index, done in asked]
        for key in asked:
            known = self._known.get(key)
            if known is None or known[0] <= at:
                self._known[key] = self._outlook(*key, at)
        return [self._known[key] for key in asked]

    def upcoming(self) -> Sequence[tuple[int, int]]:
        """The fetches planned from here on: (moment, chunk). Between two steps: those of the next one."""
        # 2**62: above every chunk, so that the search ends behind the moment itself.
        return self._planned[bisect_right(self._planned, (-1 if self.place is None else self.place, 2**62)) :]

    def script(self, there: Collection[int], completed: Mapping[int, int]) -> Script:
        """The script of what ranks that make this step together gather and reduce."""
        return make_script(self._needs, self._let_go, there, completed)

    def _next_start(self, index: int, at: int) -> int | None:
        """The moment after ``at`` at which a stretch of reading a chunk begins, if it is read again in this step."""
        starts = self._starts.get(index, [])
        after = bisect_right(starts, at)
        return starts[after] if after < len(starts) else None


class Foresight:
    """The schedule of one model, which it was wrapped with or is recorded. Called by the training thread alone."""

    def __init__(self, schedule: Schedule | None = None):
        self.schedule = schedule
        """Of the step that is under way, or may follow; None until one is recorded."""
        self._num_strange = 0  # steps in a row that did something else
        self.is_scoped = False  # whether micro-batches pass through stages together
        self._held: dict[int, None] = {}  # chunks that are read now, in the order of their acquires
        self._seen: list[Access] | None = None  # accesses so far; None where nothing is recorded
        self.in_step = False
        """Whether a step is under way: from its first forward to the end of its backward, or of the scope."""

    def plan(self, steps: tuple[Access, ...]) -> Sequence[Moves]:
        """Make the moves for recorded accesses: here none."""
        return [Moves()] * len(steps)

    def of_stages(self, stages: Sequence[Sequence[Chunk]]) -> Schedule:
        """The schedule of a step whose micro-batches pass through stages together, which read these chunks."""
        read = [tuple(sorted(chunk.spec.index for chunk in chunks if not chunk.resident)) for chunks in stages]
        # Two moments each: what both read stays for all micro-batches.
        way = [chunks for stage in (*read, *reversed(read[:-1])) for chunks in (stage, stage)]
        steps = tuple(Access(number, chunks) for number, chunks in enumerate(way))
        return Schedule(steps, self.plan(steps), frozenset(index for chunks in read for index in chunks))

    @contextmanager
    def scope(self, schedule: Schedule) -> Iterator[None]:
        """All forwards and backwards inside are one step, of this schedule."""
        self.interrupt()
        usual = self.schedule, self._num_strange
        self.schedule, self._num_strange, self.is_scoped = schedule, 0, True
        try:
            yield
        finally:
            self.is_scoped = False
            self.interrupt()
            self.schedule, self._num_strange = usual

    def begin(self) -> None:
        """A forward that a backward may follow begins."""
        # Further micro-batches of a scope: the step goes on.
        if self.in_step and self.is_scoped:
            return
        self.in_step = True
        # One strange step (an odd batch at the end of an epoch) is no reason to record anew, two in a row are.
        if self.schedule is not None and self._num_strange < 2:
            self.schedule.begin()
        else:
            self._seen = []

    def end(self) -> None:
        """End the step: its backward is over, and what was recorded becomes the schedule. Inside a scope it goes on."""
        if self.is_scoped:
            return
        if self._seen:
            chunks = frozenset(index for access in self._seen for index in access.chunks)
            steps = tuple(self._seen)
            self.schedule, self._num_strange = Schedule(steps, self.plan(steps), chunks), 0
        elif self.schedule is not None and self.in_step:
            self._num_strange = self._num_strange + 1 if self.schedule.num_deviations else 0
        self.interrupt()

    def interrupt(self) -> None:
        """Forget the step under way: what runs now, or failed, is no such step. That of a scope ends with the scope."""
        self._held.clear()
        if self.is_scoped:  # each of its forwards asks what an interrupt has left
            return
        self.in_step, self._seen = False, None
        if self.schedule is not None:
            self.schedule.place = None

    @property
    def place(self) -> int | None:
        """The moment that the step is in, of its schedule or of what is being recorded; None where it is not known."""
        if self._seen is not None:
            return len(self._seen) - 1
        return None if self.schedule is None else self.schedule.place

    def script(self, there: Collection[int], completed: Mapping[int, int]) -> Script | None:
        """The script of the step that begins; None while its schedule is still to be recorded."""
        return None if self.schedule is None or self._seen is not None else self.schedule.script(there, completed)

    def acquired(self, index: int) -> None:
        self._held[index] = None
        if self._seen is not None:
            # All that is held with it: they are read at the same time, so the plan must have room for all of them.
            self._seen.append(Access(len(self._seen), tuple(sorted(self._held))))
        elif self.schedule is not None:
            self.schedule.advance(index)

    def released(self, index: int) -> None:
        self._held.pop(index, None)

    def upcoming(self) -> Sequence[tuple[int, int]]:
        """The fetches that the schedule plans from here on, (moment, chunk): all of them where no step is under way."""
        return () if self.schedule is None else self.schedule.upcoming()

    def outlooks(self, asked: Sequence[tuple[int, bool]], reader: int | None = None) -> Sequence[Outlook]:
        """When chunks, given as (index, whether all its gradients have arrived), are needed next, None if that is not
        known, and whether the plan keeps them until then. ``reader``: the chunk that is about to be read.
        """
        return [(None, False)] * len(asked) if self.schedule is None else self.schedule.outlooks(asked, reader)
