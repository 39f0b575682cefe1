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

_EPSILON = 1e-9
"""Shares and fractions of a task below this are rounding."""


@dataclass(frozen=True)
class TaskTimes:
    """When each task ran, by number: seconds; and the task whose end let it start (-1: nothing held it up)."""

    start: list[float]
    stop: list[float]
    released_by: list[int]


class Fluid:
    """Tasks are added in an order in which every one comes after those it waits for; :meth:`run` plays them all."""

    def __init__(self, resources: Iterable[str]):
        self._resources = {name: number for number, name in enumerate(resources)}
        self._queues: dict[str, int] = {}
        self._queue: list[int] = []
        self._length: list[float] = []
        self._after: list[tuple[int, ...]] = []
        self._urgency: list[float] = []
        self._profile: list[int] = []
        self._profiles: dict[tuple[tuple[int, float], ...], int] = {}
        self._takes: list[int] = []
        self._gives: list[int] = []
        self._buffer = 0
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def __len__(self) -> int:
        return len(self._length)

    def set_buffer(self, num_bytes: int) -> None:
        """What tasks may have taken at once of the buffer that is there for those that ``take`` of it."""
        self._buffer = num_bytes

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
        number = len(self._length)
        after = tuple(after)
        assert length >= 0 and all(0 <= other < number for other in after), (queue, length, after)
        shares = ((self._resources[name], load) for name, load in (loads or {}).items() if load > 0)
        profile = tuple(sorted(shares))
        assert all(share <= 1 + _EPSILON for _, share in profile), (queue, loads)
        self._queue.append(self._queues.setdefault(queue, len(self._queues)))
        self._length.append(length)
        self._after.append(after)
        self._urgency.append(urgency)
        self._profile.append(self._profiles.setdefault(profile, len(self._profiles)))
        self._takes.append(takes)
        self._gives.append(gives)
        return number

    def run(self) -> TaskTimes:
        """Play until every task is over."""
        count = len(self)
        start, stop, released_by = [-1.0] * count, [-1.0] * count, [-1] * count
        missing = [len(set(after)) for after in self._after]
        followers: list[list[int]] = [[] for _ in range(count)]
        for number, after in enumerate(self._after):
            for other in set(after):
                followers[other].append(number)
        waiting: list[list[tuple[float, int]]] = [[] for _ in self._queues]
        last: list[int] = [-1] * len(self._queues)  # the task that a queue ran last
        busy = [False] * len(self._queues)
        free = self._buffer
        parked: list[int] = []  # ready, but the buffer is too full for them
        for number in range(count):
            if not missing[number]:
                heapq.heappush(waiting[self._queue[number]], (self._urgency[number], number))
        active: list[int] = []
        left: list[float] = []  # seconds at full speed that each active task has left
        now, done, changed = 0.0, 0, set(range(len(self._queues)))
        while done < count:
            for queue in sorted(changed):
                heap = waiting[queue]
                while heap and not busy[queue]:
                    number = heapq.heappop(heap)[1]
                    if self._takes[number] > free:
                        parked.append(number)
                        continue
                    free -= self._takes[number]
                    busy[queue] = True
                    start[number] = now
                    before = last[queue]
                    if before >= 0 and (released_by[number] < 0 or stop[before] > stop[released_by[number]]):
                        released_by[number] = before
                    active.append(number)
                    left.append(self._length[number])
            changed.clear()
            assert active, "tasks wait for each other, or for more than the whole buffer"
            speeds = self._speeds(active)
            ahead = min(seconds / speed for seconds, speed in zip(left, speeds, strict=True))
            now += ahead
            still: list[int] = []
            rest: list[float] = []
            for number, seconds, speed in zip(active, left, speeds, strict=True):
                seconds -= ahead * speed
                if seconds > _EPSILON * self._length[number]:
                    still.append(number)
                    rest.append(seconds)
                    continue
                stop[number] = now
                done += 1
                queue = self._queue[number]
                busy[queue], last[queue] = False, number
                changed.add(queue)
                if self._gives[number]:
                    free += self._gives[number]
                    for other in parked:
                        released_by[other] = number
                        heapq.heappush(waiting[self._queue[other]], (self._urgency[other], other))
                        changed.add(self._queue[other])
                    parked.clear()
                for other in followers[number]:
                    missing[other] -= 1
                    if not missing[other]:
                        released_by[other] = number
                        heapq.heappush(waiting[self._queue[other]], (self._urgency[other], other))
                        changed.add(self._queue[other])
            active, left = still, rest
        return TaskTimes(start, stop, released_by)

    def _speeds(self, active: list[int]) -> tuple[float, ...]:
        """Of each active task: 1 where nothing is short."""
        key = tuple([self._profile[number] for number in active])
        found = self._known.get(key)
        if found is None:
            by_number = list(self._profiles)
            found = self._known[key] = fair_speeds([by_number[profile] for profile in key])
        return found


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
