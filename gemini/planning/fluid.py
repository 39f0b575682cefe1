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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import truediv
from typing import NamedTuple

_EPSILON = 1e-9
"""Shares and fractions of a task below this are rounding."""

NOTHING = -1
"""In place of a task: nothing held this one up, or nothing ran there yet."""


class TaskTimes(NamedTuple):
    """When each task ran, by number: seconds; and the task whose end let it start, or ``NOTHING``."""

    start: list[float]
    stop: list[float]
    released_by: list[int]


class _Task(NamedTuple):
    queue: int
    length: float
    urgency: float
    loads: tuple[tuple[int, float], ...]
    takes: int
    gives: int


class Fluid:
    """Tasks are added in an order in which each comes after those it waits for; :meth:`run` plays them all, once."""

    def __init__(self, resources: Iterable[str]):
        self.buffer = 0  # bytes that tasks may have taken at once
        self._resources = {name: number for number, name in enumerate(resources)}
        self._speeds = cache(fair_speeds)
        # By task; also those that it still waits for, counted, and those that wait for it.
        self._tasks: list[_Task] = []
        self._times = TaskTimes([], [], [])
        self._missing: list[int] = []
        self._followers: list[list[int]] = []
        # By queue: heaps of its ready tasks, by the bytes that they take, the last one, and whether one of them runs.
        self._queues: dict[str, int] = {}
        self._ready: defaultdict[int, dict[int, list[tuple[float, int]]]] = defaultdict(dict)
        self._last: dict[int, int] = {}
        self._busy: set[int] = set()
        # Queues that may begin a task: one has ended there, or become ready; and tasks that would begin there if the
        # buffer had more.
        self._changed: set[int] = set()
        self._short: set[int] = set()
        # The tasks that run, and the seconds at full speed that each has left.
        self._active: list[int] = []
        self._left: list[float] = []
        self._now = 0.0

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
        """A task; its number. ``length``: seconds that it takes with all its resources to itself. ``loads``: share of
        each resource, between 0 and 1, that it uses at full speed. Of the ready tasks of a queue the one with the
        smallest ``urgency`` runs first. It ``takes`` bytes of the buffer to start, and ``gives`` bytes back at its end.
        """
        number, before = len(self._tasks), set(after)
        assert length >= 0 and max(before, default=NOTHING) < number, (queue, length, before)
        shares = sorted((self._resources[name], load) for name, load in (loads or {}).items() if load > 0)
        assert all(share <= 1 + _EPSILON for _, share in shares), (queue, loads)
        at = self._queues.setdefault(queue, len(self._queues))
        self._tasks.append(_Task(at, length, urgency, tuple(shares), takes, gives))
        self._missing.append(len(before))
        self._followers.append([])
        for other in before:
            self._followers[other].append(number)
        return number

    def run(self) -> TaskTimes:
        """Play until every task is over."""
        count = len(self._tasks)
        self._times = TaskTimes([0.0] * count, [0.0] * count, [NOTHING] * count)
        for number, missing in enumerate(self._missing):
            if not missing:
                self._make_ready(number)
        self._begin_ready()
        while self._active:
            self._advance()
            self._begin_ready()
        assert not self._short and not any(self._missing), (
            "tasks wait for each other, or for more than the whole buffer"
        )
        return self._times

    def _make_ready(self, number: int) -> None:
        task = self._tasks[number]
        heapq.heappush(self._ready[task.queue].setdefault(task.takes, []), (task.urgency, number))
        self._changed.add(task.queue)

    def _begin_ready(self) -> None:
        """Begin what can: of each idle queue the most urgent task that the buffer has room for."""
        # In the order of queues: those that come first get the buffer.
        for queue in sorted(self._changed):
            while queue not in self._busy:
                heaps = [(heap[0], takes) for takes, heap in self._ready[queue].items() if heap]
                self._short.update(first[1] for first, takes in heaps if takes > self.buffer)
                fitting = [each for each in heaps if each[1] <= self.buffer]
                if not fitting:
                    break
                (_, number), takes = min(fitting)
                heapq.heappop(self._ready[queue][takes])
                self._begin(queue, number)
        self._changed.clear()

    def _begin(self, queue: int, number: int) -> None:
        self.buffer -= self._tasks[number].takes
        self._busy.add(queue)
        self._times.start[number] = self._now
        self._active.append(number)
        self._left.append(self._tasks[number].length)
        # Held up by its queue, if that was at work for longer than what made the task ready.
        before, released_by, stop = self._last.get(queue, NOTHING), self._times.released_by, self._times.stop
        if before != NOTHING and (released_by[number] == NOTHING or stop[before] > stop[released_by[number]]):
            released_by[number] = before

    def _advance(self) -> None:
        """Let time pass until the first of the running tasks is over."""
        running, left, tasks = self._active, self._left, self._tasks
        speeds = self._speeds(tuple([tasks[number].loads for number in running]))
        ahead = min(map(truediv, left, speeds))
        self._now += ahead
        self._active, self._left = [], []
        for number, seconds, speed in zip(running, left, speeds, strict=True):
            rest = seconds - ahead * speed
            if rest > _EPSILON * tasks[number].length:
                self._active.append(number)
                self._left.append(rest)
            else:
                self._end(number)

    def _end(self, number: int) -> None:
        """Note that a task is over, and what it has held up."""
        queue, given_back = self._tasks[number].queue, self._tasks[number].gives
        self._times.stop[number] = self._now
        self._busy.remove(queue)
        self._last[queue] = number
        self._changed.add(queue)
        if given_back:
            self.buffer += given_back
            for other in self._short:
                self._times.released_by[other] = number
                self._changed.add(self._tasks[other].queue)
            self._short.clear()
        for other in self._followers[number]:
            self._missing[other] -= 1
            if not self._missing[other]:
                self._times.released_by[other] = number
                self._make_ready(other)


def fair_speeds(loads: Sequence[tuple[tuple[int, float], ...]]) -> tuple[float, ...]:
    """Progressive filling: all speeds grow from 0 together, each until it is 1 or one of its resources is used up."""
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
