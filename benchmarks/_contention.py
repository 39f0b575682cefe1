"""Two kinds of work on one machine, measured alone and beside each other: forward and backward in one thread, Adam on
as many params in another. For benchmarks of overlap: what a perfect one would take.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from gemini import kernels
from gemini.memory.mover import tiles
from gemini.memory.pages import PAGE, host_bytes
from gemini.planning.working import TILE


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


class AdamLoop:
    """Updates of ``numel`` bf16 params with a split master, by the engine's kernel in its tiles, over planes of its own
    that lie in memory as the engine's do.
    """

    def __init__(self, numel: int, chunk: int):
        """``chunk``: elements that are updated one after the other, in tiles."""
        self._chunk = chunk
        self._numel = numel
        self._planes = []
        for dtype, value in (
            (torch.bfloat16, 1.0), (torch.int16, 0), (torch.float32, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1e-3),
        ):  # fmt: skip
            num_bytes = -(-numel * dtype.itemsize // PAGE) * PAGE
            self._planes.append(host_bytes(num_bytes).view(dtype)[:numel].fill_(value))
        self._hyper = kernels.AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)

    def once(self) -> None:
        for begin, end in tiles(0, self._numel, self._chunk):
            for start, stop in tiles(begin, end, TILE):
                weights, residual, exp_avg, exp_avg_sq, grad = (plane[start:stop] for plane in self._planes)
                kernels.adam_update(weights, residual, exp_avg, exp_avg_sq, grad, self._hyper)


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


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
