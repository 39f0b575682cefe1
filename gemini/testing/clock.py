"""A seeded clock for the streams of a stand-in device, for tests and for hunting races.

A real GPU's copies end when they like. ``StandinDevice(gate=RandomClock(seed))`` makes a machine without one as unruly:
copies end late, those of different streams overtake each other, and the same seed draws the same delays again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

from gemini.interrupts import WHOLE

SHORT, LONG = 0.0002, 0.003
"""Seconds: the longest of the ordinary delays, and of the long ones (four in ten)."""


class RandomClock:
    """Delays each copy by a time drawn for its stream, or until copies of other streams have overtaken it.

    The n-th copy of a stream gets the same fate under the same seed, whatever the other streams do; how threads then
    meet is up to the system. Nothing is ever held for longer than ``longest``, and nothing at all once the clock is
    closed.

    Args:
        seed: what the fates are drawn from.
        longest: seconds that a copy can be held at most.
    """

    def __init__(self, seed: int, *, longest: float = LONG):
        self._seed, self._longest = seed, longest
        self._fates: dict[str, random.Random] = {}
        self._released: Counter[str] = Counter()
        self._change = threading.Condition()
        self._closed = False
        self.order: list[str] = []
        """The streams of the copies released so far, in the order of their release."""

    def __call__(self, stream: str) -> None:
        """Hold the calling thread, which is about to make a copy of ``stream``."""
        with self._change:
            held_for, overtaken_by = self.draw(stream)
            target = self._others(stream) + overtaken_by
            until = time.monotonic() + held_for
            while not self._closed and not (overtaken_by and self._others(stream) >= target):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._change.wait(left)
            self._released[stream] += 1
            self.order.append(stream)
            self._change.notify_all()

    def draw(self, stream: str) -> tuple[float, int]:
        """The fate of the stream's next copy: seconds to hold it at most, and how many others may end that sooner (0:
        no number of them).
        """
        fates = self._fates.setdefault(stream, random.Random(f"{self._seed}/{stream}"))
        kind, fraction = fates.random(), fates.random()
        if kind < 0.3:
            return 0.0, 0
        if kind < 0.6:
            return fraction * min(SHORT, self._longest), 0
        if kind < 0.88:
            return self._longest, 1 + int(3 * fraction)
        return fraction * self._longest, 0

    def close(self) -> None:
        """Release everything, now and from now on."""
        with WHOLE, self._change:  # copies stand there
            self._closed = True
            self._change.notify_all()

    def _others(self, stream: str) -> int:
        return self._released.total() - self._released[stream]
