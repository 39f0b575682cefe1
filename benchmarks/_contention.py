"""Two kinds of work on one machine, measured alone and beside each other: forward and backward in one thread, Adam on
as many params in another. For benchmarks of overlap: what a perfect one would take.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks._rounds import seconds_of
from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.movement.mover import tiles
from gemini.memory.nvme import SpillFile
from gemini.planning.working import TILE
from gemini.rules import ADAM, Arrays, Segment


class Busy(NamedTuple):
    """Seconds of one step's forward and backward, and of one update of every param."""

    forward: float
    backward: float
    update: float

    @property
    def computing(self) -> float:
        return self.forward + self.backward


def together(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Seconds until two pieces of work are done that begin at once; each is (seconds alone, seconds beside the other).

    Whichever is left when the other one is over goes on at its own speed.
    """
    (alone, beside), (_, other) = (a, b) if a[1] >= b[1] else (b, a)
    return other + max(0.0, 1 - other / beside) * alone


_SCALARS = ADAM.scalars({**ADAM.defaults, "lr": 1e-4}, 1, 1.0)
_STATES = (torch.int16, torch.float32, torch.float32)
"""Residual and states, which may be on the drive."""


def _plane(numel: int, dtype: torch.dtype, value: float = 0.0) -> torch.Tensor:
    num_bytes = -(-numel * dtype.itemsize // PAGE) * PAGE
    return host_bytes(num_bytes).view(dtype)[:numel].fill_(value)


class AdamLoop:
    """Updates of ``numel`` bf16 params with a split master, by the engine's kernel in its tiles, over planes of its own
    that lie in memory as the engine's do.
    """

    def __init__(self, numel: int, chunk: int):
        """``chunk``: elements that are updated one after the other, in tiles."""
        self._tiles = [
            part for begin, end in tiles(0, numel, chunk) for part in tiles(begin, min(end, numel), min(TILE, chunk))
        ]
        self._weights, self._grad = _plane(numel, torch.bfloat16, 1.0), _plane(numel, torch.bfloat16, 1e-3)
        self._states = self._make_states(numel)

    def _make_states(self, numel: int) -> list[torch.Tensor]:
        return [_plane(numel, dtype) for dtype in _STATES]

    def once(self) -> None:
        """Update every param once."""
        for start, stop in self._tiles:
            self._update(start, stop, [plane[start:stop] for plane in self._states])

    def _update(self, start: int, stop: int, states: list[torch.Tensor]) -> None:
        residual, exp_avg, exp_avg_sq = states
        of = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        arrays = Arrays(self._weights[start:stop], residual, of, self._grad[start:stop])
        ADAM.run(arrays, [Segment(0, stop - start, _SCALARS)])

    def close(self) -> None:
        """Give everything back."""
        self._states.clear()


class DriveLoop(AdamLoop):
    """The same with residuals and states in a spill file: some threads each read a tile, update it and write it back;
    one at a time updates, so that all of them together keep one core busy.
    """

    DEPTH = 4

    def __init__(self, numel: int, chunk: int, directory: Path):
        tile = min(TILE, chunk)
        assert numel % tile == 0 or numel % chunk == 0, "whole pages"
        self._spill = SpillFile(directory, sum(-(-numel * dtype.itemsize // PAGE) * PAGE for dtype in _STATES))
        self._at = [self._spill.allocate(numel * dtype.itemsize) for dtype in _STATES]
        self._staging = [[_plane(tile, dtype) for dtype in _STATES] for _ in range(self.DEPTH)]
        self._updating = threading.Lock()
        self._pool = ThreadPoolExecutor(self.DEPTH, "streams")
        super().__init__(numel, chunk)
        self._each(update=False)  # the first write of a block costs more, and training pays for it once

    def _make_states(self, numel: int) -> list[torch.Tensor]:
        return []

    def once(self) -> None:
        self._each(update=True)

    def _each(self, *, update: bool) -> None:
        todo = iter(self._tiles)

        def stream(staging: list[torch.Tensor]) -> None:
            while True:
                with self._updating:
                    part = next(todo, None)
                if part is None:
                    return
                start, stop = part
                states = [buffer[: stop - start] for buffer in staging]
                places = [at + start * dtype.itemsize for at, dtype in zip(self._at, _STATES, strict=True)]
                if update:
                    for state, place in zip(states, places, strict=True):
                        self._spill.read(state, place)
                    with self._updating:
                        self._update(start, stop, states)
                for state, place in zip(states, places, strict=True):
                    self._spill.write(state, place)

        for done in [self._pool.submit(stream, staging) for staging in self._staging]:
            done.result()

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        self._spill.close()


def measure_alone(compute: Callable[[], tuple[float, float]], update: Callable[[], object], repeats: int) -> Busy:
    """Medians of ``repeats``. ``compute``: forward and backward of one step, which says the seconds of each."""
    compute()
    update()
    parts = [compute() for _ in range(repeats)]
    updates = [seconds_of(update) for _ in range(repeats)]
    return Busy(*(statistics.median(seconds) for seconds in zip(*parts, strict=True)), statistics.median(updates))


def measure_beside(compute: Callable[[], tuple[float, float]], update: Callable[[], object], repeats: int) -> Busy:
    """The same while the other one runs all the time: at least ``repeats`` of each."""
    updates: list[float] = []
    failed: list[BaseException] = []
    begun, over = threading.Event(), threading.Event()

    def loop() -> None:
        try:
            update()
            begun.set()
            while not over.is_set():
                seconds = seconds_of(update)
                if not over.is_set():  # else its end ran alone
                    updates.append(seconds)
        except BaseException as e:
            failed.append(e)
            begun.set()

    thread = threading.Thread(target=loop, name="updates")
    thread.start()
    parts: list[tuple[float, float]] = []
    try:
        compute()
        begun.wait()
        while (len(parts) < repeats or len(updates) < repeats) and not failed:
            parts.append(compute())
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]
    return Busy(*(statistics.median(seconds) for seconds in zip(*parts, strict=True)), statistics.median(updates))
