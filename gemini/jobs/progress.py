"""What a run shows while it goes: a live bar on a terminal, a plain line now and then in a log.

Both say the same: step, loss, gradient norm, tokens per second, and the bytes each tier holds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from gemini.errors import human_bytes

# On narrower terminals the numbers are worth more than the bar.
_WIDTH_WITH_BAR = 110


@dataclass(frozen=True)
class StepReport:
    """One finished step, as the loop saw it."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    num_tokens: int
    used_bytes: Mapping[str, int]


class TrainProgress:
    """A ``with`` block around the loop; ``show`` each step. ``console.is_terminal`` decides between bar and lines."""

    def __init__(self, console: Console, *, num_steps: int, first_step: int, log_every: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._log_every = log_every
        self._tokens_since = 0
        self._since = time.perf_counter()
        self._rate = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("{task.completed}/{task.total}  {task.description}")]
            if console.width >= _WIDTH_WITH_BAR:
                columns += [BarColumn(bar_width=None), TimeRemainingColumn(compact=True)]
            self._bar = Progress(*columns, console=console, expand=True)
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> TrainProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, report: StepReport) -> None:
        """Account for one finished step, and show it if it is due."""
        self._tokens_since += report.num_tokens
        due = report.step % self._log_every == 0 or report.step == self._num_steps
        if self._bar is not None or due:
            now = time.perf_counter()
            # A bar is redrawn every step: take the rate over a second or more, or it flickers.
            if due or self._rate == 0 or now - self._since > 1:
                self._rate = self._tokens_since / max(now - self._since, 1e-9)
                self._tokens_since, self._since = 0, now
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=self._words(report))
        elif due:
            self.say(f"step {report.step}/{self._num_steps}  {self._words(report)}  lr {report.lr:.3g}")

    def _words(self, report: StepReport) -> str:
        norm = "" if report.grad_norm is None else f"  grad norm {report.grad_norm:.3g}"
        tiers = "".join(f"  {name} {human_bytes(used)}" for name, used in report.used_bytes.items())
        return f"loss {report.loss:.4f}{norm}  {self._rate:,.0f} tok/s{tiers}"
