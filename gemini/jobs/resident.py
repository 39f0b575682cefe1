"""The process's own anonymous memory, read from the kernel while a job runs: a second opinion on the memory report.

The report counts what Gemini holds; this counts everything the process has, the interpreter, activations and
temporaries too. Pages of files (libraries, mapped weights) are not counted: the kernel may drop them at will.
"""

from __future__ import annotations

import threading

import psutil

from gemini.waiting import Latch


def resident_bytes() -> int | None:
    """Anonymous bytes in memory now; None where the kernel does not say (not Linux)."""
    now = psutil.Process().memory_info()
    return now.rss - now.shared if hasattr(now, "shared") else None


class ResidentPeak:
    """Watches ``resident_bytes()`` from a thread of its own within a ``with`` block."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self.peak: int | None = resident_bytes()
        self._interval_s = interval_s
        self._done = Latch()
        self._thread = threading.Thread(target=self._watch, name="resident-peak", daemon=True)

    def __enter__(self) -> ResidentPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def restart(self) -> None:
        """Forget the peak so far: what comes from now on is what is asked about."""
        self.peak = resident_bytes()

    def _watch(self) -> None:
        while not self._done.wait(self._interval_s):
            now = resident_bytes()
            if now is not None:
                self.peak = max(self.peak or 0, now)
