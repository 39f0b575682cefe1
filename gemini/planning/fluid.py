"""Tasks that share resources, played forward in time: the model of a machine that the simulator runs on.

A *task* has a length (the seconds it takes alone), tasks that must be over before it starts, and loads: the share of
each resource that it uses while it runs at full speed. Tasks of one *queue* run one after the other, the most urgent
ready one first. Tasks of different queues run at once; where they want more of a resource than there is, all of them
slow down alike, which is max-min fairness of progress: progressive filling over speeds (on each task's scarcest
resource this is dominant resource fairness; Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Integers and
floats in one fixed order: the same tasks give the same times, bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import truediv

_EPSILON = 1e-9
"""Shares and fractions of a task below this are rounding."""


NOTHING = -1
"""In place of a task: nothing held this one up, or nothing ran there yet."""


@dataclass(frozen=True)
class TaskTimes:
    """When each task ran, by number: seconds; and the task whose end let it start, or ``NOTHING``."""

    start: list[float]
    stop: list[float]
    released_by: list[int]


class Fluid:
    """Tasks are added in an order in which every one comes after those it waits for; :meth:`run` plays them all."""

    def __init__(self, resources: Iterable[str]):
        self._resources = {name: number for number, name in enumerate(resources)}
        self.queues: dict[str, int] = {}
        self.queue: list[int] = []
        self.length: list[float] = []
        self.after: list[tuple[int, ...]] = []
        self.urgency: list[float] = []
        self._profile: list[int] = []
        # By identity of the loads: many tasks have few.
        self._profile_of: dict[int, tuple[Mapping[str, float] | None, int]] = {}
        self._profiles: dict[tuple[tuple[int, float], ...], int] = {}
        self.takes: list[int] = []
        self.gives: list[int] = []
        self.buffer = 0  # bytes that tasks may have taken at once
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def __len__(self) -> int:
        return len(self.length)

    def add(
        self,
        queue: str,
        length: float,
        *,
        after: Iterable[int] = (),
        loads: Mapping[str, float] | None = None,
        urgency: float = 0.0,
        takes: int = 0,
        gives: int = 0,
    ) -> int:
        """A task; its number.

        Args:
            queue: where it waits its turn.
            length: seconds that it takes with all its resources to itself.
            after: tasks that must be over first.
            loads: share of each resource, between 0 and 1, that it uses at full speed.
            urgency: of the ready tasks of a queue the one with the smallest runs first.
            takes: bytes of the buffer that it needs to start; another task gives them back.
            gives: bytes that it gives back at its end.
        """
        number = len(self.length)
        after = tuple(after)
        assert length >= 0 and max(after, default=NOTHING) < number, (queue, length, after)
        profile = self._profile_of.get(id(loads))
        if profile is None or profile[0] is not loads:
            shares = ((self._resources[name], load) for name, load in (loads or {}).items() if load > 0)
            sizes = tuple(sorted(shares))
            assert all(share <= 1 + _EPSILON for _, share in sizes), (queue, loads)
            profile = self._profile_of[id(loads)] = (loads, self._profiles.setdefault(sizes, len(self._profiles)))
        self.queue.append(self.queues.setdefault(queue, len(self.queues)))
        self.length.append(length)
        self.after.append(after)
        self.urgency.append(urgency)
        self._profile.append(profile[1])
        self.takes.append(takes)
        self.gives.append(gives)
        return number

    def run(self) -> TaskTimes:
        """Play until every task is over."""
        return _Play(self).run()

    def speeds(self, active: list[int]) -> tuple[float, ...]:
        """Of each active task: 1 where nothing is short."""
        key = tuple([self._profile[number] for number in active])
        found = self._known.get(key)
        if found is None:
            by_number = list(self._profiles)
            found = self._known[key] = fair_speeds([by_number[profile] for profile in key])
        return found


class _Play:
    """One play of all tasks: which run, which are ready and wait for their queue, and what time it is."""

    def __init__(self, tasks: Fluid):
        count = len(tasks)
        self._tasks = tasks
        self._times = TaskTimes([0.0] * count, [0.0] * count, [NOTHING] * count)
        self._now = 0.0
        self._num_over = 0
        # The tasks that each one still waits for, counted, and those that wait for it.
        self._missing = [len(set(after)) for after in tasks.after]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        for number, after in enumerate(tasks.after):
            for other in set(after):
                self._followers[other].append(number)
        # By queue: a heap of its ready tasks, whether one of them runs, and the last one that did.
        self._ready: list[list[tuple[float, int]]] = [[] for _ in tasks.queues]
        self._busy = [False] * len(tasks.queues)
        self._last = [NOTHING] * len(tasks.queues)
        # Queues that may begin a task: one has ended there, or become ready.
        self._changed: set[int] = set()
        # Bytes that are left of the buffer, and tasks that are ready and need more.
        self._free = tasks.buffer
        self._parked: list[int] = []
        # The tasks that run, and the seconds at full speed that each has left.
        self._active: list[int] = []
        self._left: list[float] = []
        for number, missing in enumerate(self._missing):
            if not missing:
                self._make_ready(number)

    def run(self) -> TaskTimes:
        while self._num_over < len(self._tasks):
            self._begin_ready()
            self._advance()
        return self._times

    def _make_ready(self, number: int) -> None:
        queue = self._tasks.queue[number]
        heapq.heappush(self._ready[queue], (self._tasks.urgency[number], number))
        self._changed.add(queue)

    def _begin_ready(self) -> None:
        """Begin what can: of each idle queue the most urgent task that the buffer has room for."""
        takes = self._tasks.takes
        # In the order of queues: those that come first get the buffer.
        for queue in sorted(self._changed):
            heap = self._ready[queue]
            while heap and not self._busy[queue]:
                number = heapq.heappop(heap)[1]
                if takes[number] > self._free:
                    self._parked.append(number)
                else:
                    self._begin(queue, number)
        self._changed.clear()
        assert self._active, "tasks wait for each other, or for more than the whole buffer"

    def _begin(self, queue: int, number: int) -> None:
        self._free -= self._tasks.takes[number]
        self._busy[queue] = True
        self._times.start[number] = self._now
        self._active.append(number)
        self._left.append(self._tasks.length[number])
        # Held up by its queue, if that was at work for longer than what made the task ready.
        before, released_by, stop = self._last[queue], self._times.released_by, self._times.stop
        if before != NOTHING and (released_by[number] == NOTHING or stop[before] > stop[released_by[number]]):
            released_by[number] = before

    def _advance(self) -> None:
        """Let time pass until the first of the running tasks is over."""
        running, left = self._active, self._left
        speeds = self._tasks.speeds(running)
        ahead = min(map(truediv, left, speeds))
        self._now += ahead
        length = self._tasks.length
        active: list[int] = []
        self._active = active
        self._left = []
        for number, seconds, speed in zip(running, left, speeds, strict=True):
            rest = seconds - ahead * speed
            if rest > _EPSILON * length[number]:
                active.append(number)
                self._left.append(rest)
            else:
                self._end(number)

    def _end(self, number: int) -> None:
        """Note that a task is over, and what it has held up."""
        queue = self._tasks.queue[number]
        self._times.stop[number] = self._now
        self._num_over += 1
        self._busy[queue] = False
        self._last[queue] = number
        self._changed.add(queue)
        given_back = self._tasks.gives[number]
        if given_back:
            self._free += given_back
            for other in self._parked:
                self._release(other, number)
            self._parked.clear()
        missing = self._missing
        for other in self._followers[number]:
            missing[other] -= 1
            if not missing[other]:
                self._release(other, number)

    def _release(self, number: int, by: int) -> None:
        self._times.released_by[number] = by
        self._make_ready(number)


def fair_speeds(loads: list[tuple[tuple[int, float], ...]]) -> tuple[float, ...]:
    """Progressive filling: all speeds grow from 0 together, each until it is 1 or one of its resources is used up.

    ``loads``: per task, (resource, share of it used at speed 1).
    """
    speeds = [0.0] * len(loads)
    growing = set(range(len(loads)))
    left: dict[int, float] = {resource: 1.0 for load in loads for resource, _ in load}
    level = 0.0
    while growing:
        slope: dict[int, float] = {}
        for number in sorted(growing):
            for resource, share in loads[number]:
                slope[resource] = slope.get(resource, 0.0) + share
        room = min([left[resource] / total for resource, total in slope.items()], default=1.0)
        step = min(room, 1.0 - level)
        level += step
        for resource, total in slope.items():
            left[resource] -= step * total
        full = {resource for resource in slope if left[resource] <= _EPSILON}
        for number in sorted(growing):
            if level >= 1.0 - _EPSILON or any(resource in full for resource, _ in loads[number]):
                speeds[number] = level
                growing.discard(number)
    return tuple(speeds)
