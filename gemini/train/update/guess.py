"""Updates that begin inside backward as if the step were known: nothing clipped, every gradient finite.

Such an update is a *guess*. It is right if ``optimizer.step()`` asks for just this update: of the same params, with the
same step count, hyperparameters and factor, bit for bit. Then it is kept, and was under way all the time. Else it is
undone, and the step makes its own from what was there before; so it is if anybody reads the chunk before the step. The
gradients are kept until then.

To be undone costs nothing where a plane has two slots (:mod:`gemini.memory.durable.slots`). What has none is copied
into memory, if that has room right now (:mod:`gemini.train.update.undo`); else the chunk is not guessed.

    handed over -> begun -> kept: an update like others
                        \\-> dropped: no tile of it begins any more -> undone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from gemini.memory.chunks.chunk import Chunk, DurablePlane
from gemini.memory.durable.slots import SlotPair
from gemini.planning.planes import GRADS
from gemini.tiers import Ledger
from gemini.train.update.tiles import ParamUpdate
from gemini.train.update.undo import Undo

_STEPS = 8
"""Steps that tell whether guessing pays."""

_LONGEST_PAUSE = 256
"""Steps after which guesses that were wrong again and again are tried once more."""

_WAITING = 0.1
"""Of a step's time: so much must be waiting for updates before an optimizer begins to guess by itself."""


class Guess:
    """A guess of one chunk's update, between the thread that trains and the one that updates."""

    def __init__(self, params: Sequence[ParamUpdate], pairs: Sequence[SlotPair], undo: Undo):
        self._asked = _asked_for(params)
        self._pairs, self.in_memory = pairs, undo
        self._lock = threading.Lock()
        self.is_kept = False
        """Whether it has become an update like others."""
        self.is_dropped = False
        """Whether it is not wanted any more."""

    @staticmethod
    def of(chunk: Chunk, params: Sequence[ParamUpdate], ledger: Ledger) -> Guess | None:
        """None where it could not be undone."""
        if any(param.handle.factors for param in params):
            return None
        undo = Undo.of(chunk, ledger)
        if undo is None:
            return None
        planes = [plane for kind, plane in chunk.planes.items() if kind not in GRADS]
        return Guess(params, [plane.pair for plane in planes if isinstance(plane, DurablePlane)], undo)

    @property
    def holds_memory(self) -> bool:
        """Whether its end gives back host memory."""
        return self.in_memory.num_bytes > 0

    def begin(self) -> bool:
        """On the thread that updates, when nothing of the chunk has changed: whether the update is to be made.

        Not if its slots are taken: by what was committed, and by what has been trained since.
        """
        with self._lock:
            if not (self.is_kept or self.is_dropped):
                self.is_dropped = not all(pair.can_be_tentative for pair in self._pairs)
                for pair in () if self.is_dropped else self._pairs:
                    pair.begin_tentative()
            return not self.is_dropped

    def keep(self, params: Sequence[ParamUpdate]) -> bool:
        """The step asks for an update of these params. False if this is another one, or was not made: it is dropped."""
        with self._lock:
            self.is_dropped = self.is_dropped or _asked_for(params) != self._asked
            self.is_kept = not self.is_dropped
            for pair in self._pairs if self.is_kept else ():
                pair.keep()
            if self.is_kept:
                self.in_memory.keep()
            return self.is_kept

    def drop(self) -> bool:
        """It is not wanted, or has failed. False if it was kept before."""
        with self._lock:
            self.is_dropped = not self.is_kept
            return self.is_dropped

    def undo(self) -> None:
        """It was dropped, and nothing of it is under way any more: the chunk is what it was.

        Raises:
            StorageError: if what was in the spill file cannot be written there again.
        """
        for pair in self._pairs:
            pair.undo()
        self.in_memory.undo()


class GuessRecord:
    """How often guesses of one model were right."""

    def __init__(self) -> None:
        self.num_kept = 0
        """Updates that began inside backward and were those of the step."""
        self.num_undone = 0
        """Those that were not."""
        self._kept_before = self._undone_before = 0
        self._steps: deque[bool] = deque(maxlen=_STEPS)
        self._waits: deque[bool] = deque(maxlen=_STEPS)
        self._pause, self._num_left_out = 1, 0

    @property
    def pays(self) -> bool:
        """Whether most of the last steps were such that guesses of them are right; none so far count as right ones."""
        return not self._num_left_out and 2 * sum(self._steps) >= len(self._steps)

    @property
    def would_pay(self) -> bool:
        """The same where nobody has asked for guesses: of steps enough, most of which have waited for updates."""
        return len(self._steps) == _STEPS and self.pays and 2 * sum(self._waits) > _STEPS

    def note_step(self, *, is_plain: bool, waiting: float = 0.0) -> None:
        """A step was made, or skipped.

        Args:
            is_plain: nothing was clipped, and all was finite.
            waiting: which part of its time was waiting for updates.
        """
        was_kept, was_undone = self.num_kept > self._kept_before, self.num_undone > self._undone_before
        self._steps.append(is_plain and not was_undone)
        self._waits.append(waiting > _WAITING)
        self._kept_before, self._undone_before = self.num_kept, self.num_undone
        self._num_left_out = max(self._num_left_out - 1, 0)
        if was_undone and (self._pause > 1 or not self.pays):  # where none is ever right, it is tried ever less
            self._num_left_out, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        elif was_kept:
            self._pause = 1


def _asked_for(params: Sequence[ParamUpdate]) -> dict[int, object]:
    """By param, whatever their order."""
    return {id(param.handle): param.scalars for param in params}
