"""Tells a rank that waits for long where the rank is that it waits for, if that one is in no call of the model.

A rank serves the others only while it is in a call of the model itself. One that stands in a collective of the program
(``torch.distributed.barrier()``) while another rank evaluates alone waits for that rank, which waits for it. Nobody
could tell from messages that do not come; so each rank has a thread that looks at the clock: on a rank that has been
outside of the model for some seconds it writes down where in the store of the process group, on a rank that waits it
reads that and warns. A note is good for one wait: it says after how many exchanges it was written. In the ordinary loop
nothing is ever written or read.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from torch.distributed import distributed_c10d as c10d

from gemini.errors import warn
from gemini.interrupts import WHOLE
from gemini.patches import register
from gemini.ranks.wire import Wire
from gemini.waiting import Latch

TICK_S = 1.0
OUTSIDE_S = 3.0
"""A rank that is outside for longer writes down where."""
WAIT_S = 5.0
"""A rank that waits for longer reads what the others have written."""

_OWN = ("gemini.train", "gemini.memory", "gemini.ranks", "gemini.kernels")

_running: weakref.WeakSet[RankWatch] = weakref.WeakSet()


class Waiting(Protocol):
    """The place of a rank, as its training thread notes it and the thread of the watch reads it, without a lock."""

    num_exchanges: int
    waiting_since: float | None
    waiting_in: str
    thread: int
    whereabouts: str


class _Note(NamedTuple):
    """Tell where a rank stands after so many exchanges; None if it is in a call of the model, or came out just now."""

    after: int
    place: str | None


_NOWHERE = _Note(-1, None)


class Watched(Protocol):
    """The state of a model."""

    @property
    def is_inside(self) -> bool:
        """Whether a call of it is under way."""


class RankWatch:
    """One per model and rank, which it does not keep alive."""

    def __init__(self, waiting: Waiting, wire: Wire, model: weakref.ref[Watched]):
        self._waiting, self._model = waiting, model
        self._rank, self._peers, self._global_ranks = wire.rank, wire.peers, wire.global_ranks
        assert wire.group is not None, "there are others"
        self._store = c10d._world.pg_map[wire.group][1]
        # After how many exchanges this rank was first seen outside of the model, and when.
        self._outside: tuple[int, float] | None = None
        # What the others find in the store.
        self._noted = _NOWHERE
        # Seconds of one wait after which this rank warns next.
        self._next = 0.0
        self._end = Latch()
        self._thread = threading.Thread(target=self._run, name="gemini-watch", daemon=True)
        # Ctrl-C waits: out of the middle of start() it would leave a thread that nobody stops.
        with WHOLE:
            self._thread.start()
        _running.add(self)

    def stop(self) -> None:
        """End the thread: the model, its groups or the process ends."""
        self._end.set()
        # The garbage collector may end the model on the thread of the watch, which cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and the others with it
            while not self._end.wait(TICK_S) and self._look():
                pass

    def _place(self) -> str | None:
        """Find where this rank stands; None if it is at work for the model, and will go on by itself."""
        # A wait for ranks of another model of this process: only those can end it.
        for other in list(_running):
            since = other._waiting.waiting_since
            long_ago = since is not None and time.monotonic() - since >= OUTSIDE_S
            if long_ago and other is not self and other._waiting.thread == self._waiting.thread:
                return f"{_line_of(self._waiting.thread)}, waiting in {other._waiting.waiting_in} of another model"
        return _line_of(self._waiting.thread, at_work=False)

    def _is_inside(self) -> bool | None:
        """Whether a call of the model is under way; None when there is no model any more."""
        model = self._model()
        return None if model is None else model.is_inside

    def _look(self) -> bool:
        """Write down or read where ranks stand, if it is time; False without a model. Runs on the watch's thread."""
        inside, waiting, now = self._is_inside(), self._waiting, time.monotonic()
        # Read once: the training thread goes on and changes them meanwhile.
        since, number = waiting.waiting_since, waiting.num_exchanges
        if inside is None:
            return False
        if since is not None:
            self._outside = None
            if now - since >= WAIT_S:
                self._read_notes(now - since, number)
            return True
        self._next = 0.0
        if inside:
            self._outside = None
        # An exchange in between: it was inside, and has come out again.
        elif self._outside is None or self._outside[0] != number:
            self._outside = number, now
        long_outside = self._outside is not None and now - self._outside[1] >= OUTSIDE_S
        self._note(_Note(number, self._place() if long_outside else None))
        return True

    def _note(self, note: _Note) -> None:
        """Tell the others, if this is news to them. A note of an earlier exchange is void by itself."""
        if note != self._noted and (note.place is not None or note.after == self._noted.after):
            self._store.set(f"gemini/outside/{self._rank}", json.dumps(note))
            self._noted = note

    def _read_notes(self, seconds: float, number: int) -> None:
        own, warns = self._global_ranks[self._rank], seconds >= self._next
        for peer in self._peers:
            key = f"gemini/outside/{peer}"
            note = _Note(*json.loads(self._store.get(key))) if self._store.check([key]) else _NOWHERE
            # Another number of exchanges: the note is of an earlier wait, and that rank has been inside since.
            if note.after != number or note.place is None:
                continue
            other = self._global_ranks[peer]
            # Read by the waiting thread if the wait ends in an error.
            self._waiting.whereabouts = f"rank {other} was in no call of this model, but at {note.place}"
            if not warns:
                return
            self._next = 2 * seconds  # once more if the wait goes on
            with contextlib.suppress(Warning):  # where warnings are errors, nobody would catch this one
                warn(
                    f"rank {own} has waited {seconds:.0f} s for rank {other} in {self._waiting.waiting_in}. "
                    f"Rank {other} is in no call of this model, but at {note.place}. It can serve rank {own} only "
                    "from a call of this model: other ranks must come to the next model call, optimizer step, "
                    "save_checkpoint or the like, not to a collective of the program such as dist.barrier(). Else "
                    "both wait for each other until the timeout of the process group"
                )
            return


def _line_of(thread: int, *, at_work: bool = True) -> str | None:
    """Describe where a thread stands in the program, and in which function of torch.distributed, if in one.

    None without ``at_work`` if it works for a model (it saves a checkpoint, say).
    """
    frame = sys._current_frames().get(thread)
    inside = ""
    while frame is not None:
        room, code = frame.f_globals.get("__name__", ""), frame.f_code
        # From the innermost frame outwards: the first one of the program is the place, and torch's function inside of
        # it the reason. Torch's functions stand in a wrapper of one name.
        if room.startswith("torch.distributed") and code.co_name != "wrapper":
            inside = f", in torch.distributed.{code.co_name}"
        elif room.startswith(_OWN):
            if not at_work:
                return None
        elif not room.startswith(("torch", "threading", "contextlib")):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}{inside}"
        frame = frame.f_back
    return "an unknown place"


@partial(register, "atexit.register")
def _stop_all() -> None:
    """End all before the interpreter does: a thread must not come back from the store into what is half gone."""
    for watch in list(_running):
        watch.stop()
