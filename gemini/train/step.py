"""Where in a training step a model is: one value, handed to all who must know; and which threads work in it."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.kernels import ClipFactor
from gemini.patches import register
from gemini.waiting import GIVE_UP_LOOKS, PROGRESS, is_running

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self")


class Occupancy:
    """Which threads work in one model: several in forwards, or one *alone*, in a backward, a step, or what reads or
    writes the model as a whole. A readers-writer lock, without a lock that an interrupt could leave held: each line
    that counts is one call in C, and threads look whether they may go on. A backward inside of a forward (forces)
    cannot wait until the forwards of others end, which may want the same: it waits until each is over or *parked*,
    before such a backward of its own.
    """

    def __init__(self) -> None:
        self.inside: dict[int, threading.Thread] = {}
        """Threads in a forward, or in ``gathered()``, by identifier: looked at in every call of a module."""
        self.parts: set[int] = set()
        """Those of them that called a module, and not the model: perhaps for a forward of another thread."""
        self._alone: dict[str, _Mark] = {}
        """Who is alone ("is"), and who will be when all forwards are over ("wants"), so that none begins meanwhile.
        ``setdefault`` lets one of several have a mark."""
        self._queue: set[object] = set()  # one for each wait to enter: who comes to be alone later comes after it
        self._parked: set[int] = set()
        """Threads that wait to be alone for a backward inside of a forward, and parts that wait to enter."""
        self.is_forked = False  # whether this is a copy of it in a forked child
        _of_process.add(self)

    def enter(self, *, is_part: bool = False) -> None:
        """Begin a forward, when nobody is alone any more; nothing inside of what this thread has begun already."""
        own = threading.get_ident()
        if own in self.inside or torch._C._current_graph_task_id() != -1 or (self._alone and self.is_own):
            return
        while True:
            if is_part:
                self.parts.add(own)
            # Before the look, as `begin_alone` looks behind its own mark: one of two that come at once sees the other.
            self.inside[own] = threading.current_thread()
            if not self._alone or not self._must_wait(is_part):
                return
            self.leave()
            place = object()
            try:
                self._queue.add(place)
                if is_part:
                    self._parked.add(own)  # whose forward waits for it meanwhile does not count
                self._wait(partial(self._must_wait, is_part))
            finally:
                self._parked.discard(own)
                self._queue.discard(place)

    def _must_wait(self, is_part: bool) -> bool:
        if self._is_taken("is"):
            mark = self._alone.get("is")
            # A backward that computes a forward again (checkpointing) may wait for this thread, which runs a part.
            ident = mark.thread.ident if is_part and mark is not None else None
            return ident is None or not (_stands_still(ident) and _is_in_module_call(sys._current_frames().get(ident)))
        # A forward that stands still may wait for this thread, and who wants to be alone waits for that forward.
        return self._is_taken("wants") and not any(map(_stands_still, self._others()))

    def leave(self) -> None:
        own = threading.get_ident()
        self.inside.pop(own, None)
        self.parts.discard(own)

    @property
    def is_part(self) -> bool:
        """Whether this thread calls a module, and not the model; also if an interrupt has ended that."""
        return bool(self.parts) and threading.get_ident() in self.parts

    @property
    def is_own(self) -> bool:
        mark = self._alone.get("is")
        return (
            mark is not None
            and mark.thread is threading.current_thread()
            and (mark.works is None or bool(mark.works()))
        )

    def begin_alone(self, works: Callable[[], Any] | None = None, inside: int | None = None) -> None:
        """Be alone, when the forwards of other threads have ended. Not called by who is. ``works``: says whether it is
        at work still, should nobody call :meth:`end_alone`; by default for as long as the thread lives. ``inside``: a
        thread in a forward that waits for this one meanwhile, if there is one.
        """
        mark = _Mark(threading.current_thread(), works)
        if not self.inside and not self._queue and self._alone.setdefault("is", mark) is mark:
            if not self.inside:
                return
            self.end_alone(works)
        own = threading.get_ident() if inside is None else inside
        if own in self.inside or _is_in_module_call(sys._getframe()):
            self._begin_inside(own, mark)
        else:
            self._begin_outside(mark)

    def _begin_inside(self, own: int, mark: _Mark) -> None:
        try:
            self._parked.add(own)
            self._take("is", mark)
            self._wait(lambda: self._are_computing(own))
        finally:
            self._parked.discard(own)

    def _begin_outside(self, mark: _Mark) -> None:
        before = self._queue.copy()
        try:
            self._wait(lambda: before & self._queue)
            self._take("wants", mark)
            while True:
                # Not alone yet: a forward that is to end may need to be, for a backward of its own.
                self._wait(self._others)
                self._take("is", mark)
                if not self._others():
                    return
                self.end_alone(mark.works)
        finally:
            if self._alone.get("wants") is mark:
                self._alone.pop("wants", None)

    def _take(self, key: str, mark: _Mark) -> None:
        while self._alone.setdefault(key, mark) is not mark:
            self._wait(lambda: self._is_taken(key))

    def end_alone(self, works: Callable[[], Any] | None = None) -> None:
        """Let others in again, if ``works`` is what :meth:`begin_alone` was given. From any thread: autograd may end a
        backward on another one.
        """
        mark = self._alone.get("is")
        # Without `works` only by the thread itself, which may not have come so far as to be alone.
        if mark is not None and mark.works is works and (works is not None or self.is_own):
            self._alone.pop("is", None)

    def if_alone(self, function: Callable[[], None]) -> None:
        """Run it alone, unless another thread is at work. Never waits: this thread may be inside a forward itself."""
        if self.is_own:
            function()
            return
        mark = _Mark(threading.current_thread(), None)
        if self._is_taken("is") or self._is_taken("wants"):
            return
        try:  # around the mark, too: one that an interrupt leaves would be this thread's for good
            if self._alone.setdefault("is", mark) is mark and not self._others():
                function()
        finally:
            self.end_alone()

    def _is_taken(self, key: str) -> bool:
        """Say whether another thread has a mark. One that an error or an interrupt has left behind goes."""
        mark = self._alone.get(key)
        if mark is None:
            return False
        if is_running(mark.thread) if mark.works is None else mark.works():
            return True
        if self._alone.get(key) is mark:
            self._alone.pop(key, None)
        return False

    def _others(self) -> set[int]:
        for ident, thread in list(self.inside.items()):
            if not is_running(thread):  # it has died inside
                self.inside.pop(ident, None)
        return self.inside.keys() - {threading.get_ident()}

    def _are_computing(self, own: int) -> bool:
        """Say whether another thread than ``own`` computes in a forward, and is not parked."""
        computing = self._others() - self._parked - {own}
        # Threads that run a part of another's forward, which waits for them where Python's threads do.
        num_parts = sum(ident in self.parts or ident not in self.inside for ident in self._parked.copy())
        return len(computing) > num_parts or not all(map(_stands_still, computing))

    def _wait(self, is_busy: Callable[[], object]) -> None:
        seen, since = PROGRESS.count, time.monotonic()
        while is_busy():
            time.sleep(_LOOK_SECONDS)
            if PROGRESS.count != seen:
                seen, since = PROGRESS.count, time.monotonic()
            elif time.monotonic() - since > GIVE_UP_LOOKS:
                there = {*self.inside.values(), *(mark.thread for mark in self._alone.values())}
                names = ", ".join(sorted(thread.name for thread in there - {threading.current_thread()}))
                raise GeminiError(
                    f"nothing has moved for {GIVE_UP_LOOKS} s while waiting for what another thread does with this "
                    f"model ({names}): forwards of several threads run at once, but a backward, a step, a save or a "
                    "load runs alone. Let no thread wait, inside of one, for another that needs the model"
                )


_of_process: weakref.WeakSet[Occupancy] = weakref.WeakSet()


@partial(register, "os.register_at_fork", argument="after_in_child")
def _refuse_in_child() -> None:
    """Let every way into a model of the parent raise, at no cost for those of the process that has it."""
    for occupancy in _of_process:
        vars(occupancy).update(is_forked=True, enter=_refuse, begin_alone=_refuse, inside={}, _alone={})


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise GeminiError(
        "a managed model is used in a process that was forked from the one that wrapped it, as DataLoader workers are. "
        "Use it where it was wrapped (DataLoader(num_workers=0)), or wrap another model in a process that was spawned"
    )


class _Mark(NamedTuple):
    """The thread that is alone, or wants to be. Marks are compared by identity."""

    thread: threading.Thread
    works: Callable[[], Any] | None  # says whether it is at work still; None for as long as its thread lives


_LOOK_SECONDS = 0.0005  # how often a thread looks whether it may go on

_WAITS = frozenset({"threading", "concurrent", "multiprocessing", "queue", "asyncio", "selectors"})
"""Packages of Python's in which a thread stands that waits for another."""


def _is_in_module_call(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame is not None


def _stands_still(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WAITS


def at_end_of_backward(call: Callable[[], None]) -> Callable[[], object]:
    """Have ``call`` called when the whole graph that runs here is done, on the thread that ends it. Gives what says
    whether it runs still: autograd alone keeps the callback, and lets go of it where the graph breaks off too.
    """
    kept = partial(call)
    torch.autograd.Variable._execution_engine.queue_callback(kept)
    return weakref.ref(kept)


def run_alone(state: StepState, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args, **kwargs)``, while no other thread is at work in the model."""
    occupancy = state.occupancy
    if occupancy.is_own:
        return function(*args, **kwargs)
    # Inside `try`: whatever an interrupt cuts off from here on, what was begun is ended.
    try:
        occupancy.begin_alone()
        return function(*args, **kwargs)
    finally:
        occupancy.end_alone()


def alone(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Decorate a method, of a model or of a part of it with ``state``, that runs alone."""

    @wraps(method)
    def by_one_thread(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        owner: Any = self.__dict__.get("_gemini_engine", self)
        return run_alone(owner.state, method, self, *args, **kwargs)

    return by_one_thread


class Clipping:
    """By what the next update multiplies gradients: what ``clip_grad_norm_`` of the whole model has found."""

    def __init__(self) -> None:
        self.coefficient = 1.0  # as far as the host knows
        self.there: ClipFactor | None = None  # what the device alone knows yet
        self.was_asked = False
        """Whether ``clip_grad_norm_`` was called for the gradients that wait, of the whole model or of some params."""
        self.in_backward = 1.0
        """Factor by which a backward that updates multiplies gradients (``measuring_grad_norm``)."""

    def fetch(self) -> None:
        """Let the host learn the coefficient that the device has found; it waits for it if need be."""
        if self.there is not None:
            self.coefficient, self.there = self.there.coefficient(), None

    def multiply(self, coefficient: float) -> None:
        """Multiply gradients by ``coefficient`` in the update, beside what was asked for before."""
        # First what the device knows: the two are multiplied on the host.
        self.fetch()
        self.coefficient *= coefficient
        self.was_asked = True

    def take(self) -> float:
        """Return the coefficient, which from now on is 1."""
        self.fetch()
        coefficient, self.coefficient, self.was_asked = self.coefficient, 1.0, False
        return coefficient

    def forget(self) -> None:
        """Let the gradients to come be multiplied by 1. Unread, if the coefficient is on the device still."""
        self.coefficient, self.there, self.was_asked = 1.0, None, False


class StepState:
    """The state of one model's step, which everybody asks. Plain attributes, for hooks look at them in every call. What
    belongs to a pass is changed under the lock of the books, what belongs to the step by the training thread alone.
    """

    def __init__(self) -> None:
        self.occupancy = Occupancy()
        self.num_gathered = 0  # open ``gathered()`` blocks, and operations that read params outside of any module
        self.in_forward = False  # whether a forward runs, in any thread
        self.in_backward = False
        """Whether a backward runs. A forward may be inside of it (activation checkpointing recomputes one) or around it
        (forces are gradients of an energy): which of them waits for the other makes no difference here."""
        self.computing = False
        """Whether params are ordinary ones now: a forward, a backward or ``gathered()`` is under way."""
        self.backward_number = 0  # the number of the backward that runs, or ran last
        self.takes_gradients = False  # whether params have got gradients in the backward that runs
        self.accumulating = False
        """Gradient accumulation: inside ``no_sync()`` gradients are added up, and none is used yet."""
        self.updated_in_backward = False
        """Whether an update was made inside backward since the last ``optimizer.step()``."""
        self.clipping = Clipping()
        self.measuring = False  # whether gradients that arrive are measured and thrown away
        self.requires_grad_changed = False
        """Whether ``requires_grad`` of a param was flipped at rest and nobody has followed it yet."""
        self.num_looked_at = -1
        """Number of params and modules that had been registered anywhere when the whole model was looked at last
        (:mod:`gemini.train.modules.changing`)."""
        self.has_stepped = False  # whether an optimizer step is over
        self.num_open = 0
        """Number of things that have begun to compute and not ended in order; after an interrupt they never will."""
        self.num_unreduced = 0  # chunks whose gradients are whole on this rank and not reduced yet
        self.is_parked = False  # whether the model has left the device that computes: inside ``parked()``
        self.shows_averages = False
        """Whether averages are in the place of the masters, and these in the averages': inside ``swapped_in()``."""
        self.swapped_by = 0  # the thread that is inside of it, or was last
        self.corrupted_by: str | None = None
        """The error that broke an update, or a load, off: some weights and states are new and some are not."""
        self._unreported: BaseException | None = None

    # ---- what computes ----------------------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """Leave a forward: no module computes any more, in any thread. Under the books' lock, as the next ones."""
        self.in_forward = False
        self._look()

    def begin_backward(self) -> None:
        """Enter a backward: its first gradient arrives."""
        self.in_backward = self.computing = True
        self.backward_number += 1
        self.num_open = max(self.num_open, 1)  # one, with the forward that it belongs to

    def end_backward(self) -> None:
        """Leave a backward: the whole graph is done, or was abandoned."""
        self.in_backward = self.takes_gradients = False
        self._look()

    def _look(self) -> None:
        self.computing = self.in_forward or self.in_backward or self.num_gathered > 0

    def close(self) -> None:
        """Count one thing less that has begun and not ended in order."""
        # Not below zero: Recovery may have forgotten it already.
        self.num_open = max(self.num_open - 1, 0)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Count as computing while weights are shown, or read by an operation, outside of their modules."""
        self.num_gathered += 1
        self.computing = True
        try:
            yield
        finally:
            self.num_gathered -= 1
            # Not as it was before: a forward may have begun inside the block, and still run in another thread.
            self._look()

    # ---- an update that broke off -------------------------------------------------------------------------------

    def mark_corrupted(self, cause: BaseException, *, reported: bool = True) -> None:
        """Refuse everything but loading a checkpoint: an update, or a load, broke off. ``reported``: whether ``cause``
        is raised to the program as well. Called on the thread of the update, which may be a worker's.
        """
        # As text: an exception would keep the frames that it came through, and their tensors.
        self.corrupted_by = f"{type(cause).__name__}: {cause}"
        if not reported:
            self._unreported = cause

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change masters or states that belong together: what breaks off inside leaves some of them as they were."""
        try:
            yield
        except BaseException as e:
            self.mark_corrupted(e)
            raise

    def mark_restored(self) -> None:
        """Allow everything again: every master and state was written anew."""
        self.corrupted_by = self._unreported = None
        self.updated_in_backward = False

    def check_there(self) -> None:
        """Refuse to compute with a model that is parked."""
        if self.is_parked:
            raise GeminiError(
                "the model is parked (inside `with model.parked()`): it has given the memory back that it computes "
                "in. Leave the block first (if an error kept it from coming back: `with model.parked(): pass` tries "
                "again); read weights with gemini.weights_for(model), model.full_param(name) or model.state_dict()"
            )

    def check_masters(self, what: str) -> None:
        """Refuse ``what`` trains, saves or loads, with a GeminiError, inside of ``swapped_in()``."""
        if self.shows_averages:
            raise GeminiError(
                f"{what} inside `with ema.swapped_in()`, where averages are in the place of the weights: leave the "
                "block first. Inside of it the model is evaluated and exported (save_pretrained, state_dict)"
            )

    def check_whole(self) -> None:
        """Refuse to go on with a half-made update."""
        if self.corrupted_by:
            raise GeminiError(
                f"an update of this model, or a load, broke off ({self.corrupted_by}): some of its weights and states "
                "are old and some new. Load the last checkpoint (gemini.load_checkpoint) or make the model anew"
            ) from self._unreported
