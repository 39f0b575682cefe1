"""Transfers that run by themselves, and of which a recorder is told once their end is noticed."""

from __future__ import annotations

from collections.abc import Callable

from gemini.memory.devices.device import Event


class NotedEvent(Event):
    """``event``, which calls ``told`` the first time that somebody sees it complete, however it ended."""

    def __init__(self, event: Event, told: Callable[[], None]):
        super().__init__()
        self._event, self._told = event, told

    def is_complete(self) -> bool:
        complete = self._event.is_complete()
        if complete:
            self._note()
        return complete

    def wait(self, timeout: float | None = None) -> None:
        try:
            if timeout is None:
                self._event.wait()
            else:
                self._event.wait(timeout)
        finally:
            if self._event.is_complete():
                self._note()

    def wait_on_device(self) -> None:
        self._event.wait_on_device()
        self.is_complete()  # a device that computes on the calling thread has waited

    def _note(self) -> None:
        told, self._told = self._told, _nothing
        told()


def _nothing() -> None:
    """It was told already."""
