"""Updates that begin inside backward as if the step were known: nothing clipped, every gradient finite.

Such a *guess* is right if ``optimizer.step()`` asks for just this update, bit for bit. Then it is kept, and was under
way all the time. Else it is undone, and the step makes its own from what was there before; so it is if anybody reads
the chunk before the step. The gradients are kept until then.

To be undone costs nothing where a plane has two slots (:mod:`gemini.memory.durable.slots`). What has none is copied
into host memory tile by tile before it is overwritten, if that has room right now; else the chunk is not guessed.
Weights that modules read in place are written beside, and come home when the step keeps them: a graph may look at them
until then. The copies are given back to whoever finds no room.

    handed over -> begun -> kept: an update like others
                        \\-> dropped: no tile of it begins any more -> undone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from gemini.ledger import NOBODY, Ledger
from gemini.memory.chunks.chunk import Chunk, DurablePlane, FilePlane, Plane
from gemini.memory.devices.pages import host_bytes
from gemini.memory.durable.slots import SlotPair
from gemini.planning.planes import GRADS, WEIGHTS, PlaneKind
from gemini.tiers import Tier

if TYPE_CHECKING:
    from gemini.train.update.tiles import ParamUpdate

HOLDER = "guesses"
_STEPS = 8  # steps that tell whether guessing pays

_LONGEST_PAUSE = 256  # steps after which guesses that were wrong again and again are tried once more


class Guess:
    """A guess of one chunk's update, between the thread that trains and the one that updates. ``asked``: the scalars of
    its params (:func:`_asked_for`). ``pairs``: the slots of what it writes to a durable store; ``planes``: what else it
    writes, by kind. ``ledger``: has the memory of its copies. ``in_sight``: whether modules read the weights in place.
    """

    def __init__(
        self,
        asked: Mapping[int, object],
        pairs: Sequence[SlotPair],
        planes: Mapping[PlaneKind, Plane],
        ledger: Ledger,
        *,
        in_sight: bool,
    ):
        self._asked, self._pairs, self._planes, self._ledger = asked, pairs, planes, ledger
        self._in_sight = in_sight
        self.num_bytes = sum(plane.num_bytes for plane in planes.values())  # of host memory that it holds
        self._lock = threading.Lock()
        self.is_kept = False  # whether it has become an update like others
        self.is_dropped = False  # whether it is not wanted any more
        self._is_over = False
        self._old: list[tuple[Plane, int, int, torch.Tensor]] = []  # plane, its range, and what was there
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights that are to come home, with their place there

    @staticmethod
    def of(chunk: Chunk, params: Sequence[ParamUpdate], ledger: Ledger) -> Guess | None:
        """A guess of such an update; None where it could not be undone. Reserves the memory of its copies."""
        # Factors are no planes and have no copy.
        if any(param.handle.factors for param in params):
            return None
        pairs = [p.pair for kind, p in chunk.planes.items() if kind not in GRADS and isinstance(p, DurablePlane)]
        planes = {kind: p for kind, p in chunk.updated if kind not in GRADS and not isinstance(p, DurablePlane)}
        if any(plane.tier is Tier.GPU for plane in planes.values()):
            return None
        guess = Guess(_asked_for(params), pairs, planes, ledger, in_sight=chunk.resident)
        # Out of what is free: asking would take it from other guesses.
        if guess.num_bytes and not ledger.reserve_if_room(Tier.CPU, guess.num_bytes, HOLDER, NOBODY):
            return None
        return guess

    def begin(self) -> bool:
        """Whether the update is to be made, asked when nothing of the chunk has changed. Not if its slots are taken: by
        what was committed, and by what has been trained since.
        """
        with self._lock:
            if not (self.is_kept or self.is_dropped):
                # Under the lock: `keep` and `drop` see either all slots tentative or none.
                self.is_dropped = not all(pair.can_be_tentative for pair in self._pairs)
                for pair in () if self.is_dropped else self._pairs:
                    pair.begin_tentative()
            return not self.is_dropped

    def place(self, kind: PlaneKind, view: torch.Tensor) -> torch.Tensor:
        """The tensor in which a tile updates what stands in memory at ``view``: itself, or a copy beside it."""
        # Read without the lock. One that is kept just now is copied for nothing, and brought home as the others.
        return view.clone() if kind == WEIGHTS and self._in_sight and not self.is_kept else view

    def save(self, kind: PlaneKind, start: int, stop: int, old: torch.Tensor) -> None:
        """A tile is about to overwrite ``[start, stop)`` of a plane."""
        plane = self._planes.get(kind)
        if plane is None or (kind == WEIGHTS and self._in_sight):
            return
        with self._lock:
            # Kept meanwhile: nobody will undo it, and its memory was given back.
            if not self.is_kept:
                # The spill file writes from aligned memory alone.
                in_file = isinstance(plane, FilePlane)
                copy = host_bytes(old.nbytes).view(old.dtype).copy_(old) if in_file else old.clone()
                self._old.append((plane, start, stop, copy))

    def bring_home(self, home: torch.Tensor, new: torch.Tensor) -> None:
        """A tile has written weights to their place beside ``home``."""
        with self._lock:
            # Under the lock: between this look and the copy `keep` would find the tile neither home nor waiting.
            if self.is_kept:
                home.copy_(new)
            else:
                self._new.append((home, new))

    def end(self) -> None:
        """Note that nothing of the update is under way any more."""
        with self._lock:
            self._is_over = True
            # The last tile of weights is home: what `keep` has left is free.
            if self.is_kept:
                self._release()

    def keep(self, params: Sequence[ParamUpdate]) -> bool:
        """The step asks for an update of these params. False if this is another one, or was not made: it is dropped.
        Else it counts: what it has written so far is there to be read.
        """
        with self._lock:
            self.is_dropped = self.is_dropped or _asked_for(params) != self._asked
            self.is_kept = not self.is_dropped
            if not self.is_kept:
                return False
            for pair in self._pairs:
                pair.keep()
            for home, new in self._new:
                home.copy_(new)
            self._new.clear()
            self._old.clear()
            # The copies are gone. What is beside weights in sight stays until `end`: a tile may be on its way home.
            beside = self._planes.get(WEIGHTS) if self._in_sight and not self._is_over else None
            self._release(0 if beside is None else beside.num_bytes)
            return True

    def drop(self) -> bool:
        """Note that it is not wanted, or has failed. False if it was kept before: then it stays. From either thread."""
        with self._lock:
            self.is_dropped = not self.is_kept
            return self.is_dropped

    def undo(self) -> None:
        """Make the chunk what it was. It was dropped, and nothing of it is under way any more. One undoing that was cut
        short is taken up again. Raises StorageError if the spill file cannot take back what it had: the chunk is torn.
        """
        for pair in self._pairs:
            pair.undo()
        # Weights beside were never seen: they only go.
        self._new.clear()
        try:
            while self._old:
                plane, start, stop, old = self._old[-1]
                plane.store(start, stop, old)
                # After its write: an interrupt before it writes the same bytes once more.
                self._old.pop()
        except Exception:
            self._old.clear()
            self._release()
            raise
        self._release()

    def _release(self, rest: int = 0) -> None:
        num_bytes, self.num_bytes = self.num_bytes - rest, rest
        if num_bytes:
            self._ledger.release(Tier.CPU, num_bytes, HOLDER)


CERTAIN = Guess({}, [], {}, Ledger({}), in_sight=False)
"""That of every update which the step has asked for: kept from the beginning, with nothing to undo."""
CERTAIN.is_kept = True


def _asked_for(params: Iterable[ParamUpdate]) -> dict[int, object]:
    """The scalars that are asked for, by param, whatever their order."""
    return {id(param.handle): param.scalars for param in params}


class GuessRecord:
    """How often guesses of one model were right. Called by the training thread alone."""

    def __init__(self) -> None:
        self.num_kept = 0  # updates that began inside backward and were those of the step
        self.num_undone = 0  # those that were not
        self._kept_before = self._undone_before = 0  # the counts when the last step ended
        self._steps: deque[bool] = deque(maxlen=_STEPS)
        self._pause, self._num_left_out = 1, 0  # steps: of the next pause, and still to come of this one

    @property
    def pays(self) -> bool:
        """Whether most of the last steps were such that guesses of them are right; none so far count as right ones."""
        return not self._num_left_out and 2 * sum(self._steps) >= len(self._steps)

    def note_step(self, *, is_plain: bool) -> None:
        """A step was made, or skipped. ``is_plain``: nothing was clipped, and all was finite."""
        was_kept, was_undone = self.num_kept > self._kept_before, self.num_undone > self._undone_before
        self._steps.append(is_plain and not was_undone)
        self._kept_before, self._undone_before = self.num_kept, self.num_undone
        self._num_left_out = max(self._num_left_out - 1, 0)
        if was_undone and (self._pause > 1 or not self.pays):  # where none is ever right, it is tried ever less
            self._num_left_out, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        elif was_kept:
            self._pause = 1
