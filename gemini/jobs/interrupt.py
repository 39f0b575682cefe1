"""Ctrl-C (and a polite kill) as a wish the training loop looks at between steps, so that it stops at a whole step."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class StopWish:
    """Within its ``with`` block the first SIGINT or SIGTERM sets ``wanted`` and is answered on stderr (if there is an
    ``answer``); the second one takes effect as ever.
    """

    def __init__(self, answer: str) -> None:
        self.wanted = False
        self._answer = answer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()
        # Straight to the descriptor: the signal may come in the middle of a print, whose buffer would be printed twice.
        if self._answer:
            os.write(_STDERR, f"\n{self._answer}\n".encode())

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
