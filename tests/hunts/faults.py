"""Faults of fault_hunt: one call of a kind (a write, a read, an update, a hook, a wait) fails, once."""

import contextlib
import errno
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

from gemini import kernels
from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PageWindow
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.transfers import Job
from gemini.train.observers import WriteObservers
from gemini.train.passes.backward import BackwardPass
from gemini.train.passes.forward import ForwardPass
from gemini.train.passes.stepping import Stepping

KINDS = ("write: disk full", "read: i/o error", "adam: raises", "interrupt")
BESIDE = "beside the books: interrupt"
"""After a move of memory or an entry in the ledger, before what belongs to it. Not among the others: a model that was
interrupted there trains on in a new one only (its own ledger no longer holds)."""
ALARM = "interrupt at a moment"
"""As Ctrl-C comes: between any two bytecodes of the training thread. The number of the fault draws the moment."""
ALARM_S = 0.15


class Injected(Exception):
    """What "adam: raises" raises."""


class Faults:
    """Counts the calls of one kind; the ``chosen`` one (from 1) fails, once. ``phase`` is the training thread's."""

    def __init__(self, kind: str):
        self.kind = kind
        self.phase = ""
        self.calls = 0
        self.chosen = 0
        self.fired: tuple[str, str] | None = None
        """The phase in which it fired, and whether on the training thread or another."""
        self._lock = threading.Lock()
        self._doomed: dict[int, BaseException] = {}
        self._inside = threading.local()

    def arm(self, chosen: int) -> None:
        self.calls, self.chosen, self.fired = 0, chosen, None

    def hit(self) -> bool:
        """Count a call; whether it is the one."""
        if self.phase == "" or getattr(self._inside, "call", False):
            return False
        if "interrupt" in self.kind and threading.current_thread() is not threading.main_thread():
            return False
        with self._lock:
            self.calls += 1
            if self.calls != self.chosen:
                return False
            here = "training thread" if threading.current_thread() is threading.main_thread() else "worker"
            self.fired = (self.phase, here)
            return True

    def error(self) -> BaseException:
        return {
            "write: disk full": lambda: OSError(errno.ENOSPC, "No space left on device"),
            "read: i/o error": lambda: OSError(errno.EIO, "Input/output error"),
            "adam: raises": lambda: Injected("the kernel was made to fail"),
            "interrupt": lambda: KeyboardInterrupt("made by the test"),
            BESIDE: lambda: KeyboardInterrupt("made by the test"),
            ALARM: lambda: KeyboardInterrupt("made by the test"),
        }[self.kind]()

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """Patch what fails."""
        with contextlib.ExitStack() as undo:
            if self.kind == "adam: raises":
                self._patch(undo, kernels, "update")
            elif self.kind == BESIDE:
                for name in ("reserve", "release", "pass_on"):
                    self._patch_after(undo, Ledger, name)
                for name in ("populate", "depopulate"):
                    self._patch_after(undo, PageWindow, name)
                self._patch_after(undo, Chunk, "step")
            elif self.kind == ALARM:
                undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._alarm))
                undo.callback(signal.setitimer, signal.ITIMER_REAL, 0)
                signal.setitimer(signal.ITIMER_REAL, random.Random(self.chosen).uniform(0, ALARM_S) or ALARM_S)
            elif self.kind == "interrupt":
                for owner, names in (
                    (ForwardPass, ("begin_call", "end_call")), (BackwardPass, ("begin", "end", "take_grad")),
                    (Manager, ("acquire", "release")), (WriteObservers, ("before_write",)), (Stepping, ("end_step",)),
                ):  # fmt: skip
                    for name in names:
                        self._patch(undo, owner, name)
                self._patch(undo, Event, "wait")
                self._patch(undo, Job, "wait")
            else:
                self._patch_tickets(undo, self.kind.partition(":")[0])
            yield

    def _alarm(self, *_: Any) -> None:
        if self.phase:
            self.fired = (self.phase, "training thread")
            raise self.error()

    def _patch(self, undo: contextlib.ExitStack, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.hit():
                raise self.error()
            inside, self._inside.call = getattr(self._inside, "call", False), self.kind != "interrupt"
            try:
                return real(*args, **kwargs)
            finally:
                self._inside.call = inside

        undo.callback(setattr, owner, name, real)
        setattr(owner, name, call)

    def _patch_after(self, undo: contextlib.ExitStack, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if self.hit():
                raise self.error()
            return result

        undo.callback(setattr, owner, name, real)
        setattr(owner, name, call)

    def _patch_tickets(self, undo: contextlib.ExitStack, word: str) -> None:
        """A request that was submitted fails where somebody waits for it, as on a disk."""
        submit, wait, owner = getattr(kernels.IoQueue, f"submit_{word}"), kernels.IoQueue.wait, kernels.IoQueue

        def submitting(queue: Any, *args: Any, **kwargs: Any) -> int:
            hit = self.hit()
            ticket = submit(queue, *args, **kwargs)
            if hit:
                self._doomed[ticket] = self.error()
            return ticket

        def waiting(queue: Any, ticket: int) -> None:
            wait(queue, ticket)
            error = self._doomed.pop(ticket, None)
            if error is not None:
                raise error

        for name, replacement in ((f"submit_{word}", submitting), ("wait", waiting)):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
