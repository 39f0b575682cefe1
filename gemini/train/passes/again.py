"""Out of memory in the middle of a step: what gives way, and what is computed once more with the same bits.

A backward has used up half of its graph by then, so it is made again with its forward, by :meth:`Again.micro_batch`;
what has landed of it is not added a second time. Before that windows give up a part of their memory for good, in the
ledger too. With several ranks nothing is made again, for the others do not know of it.
"""

from __future__ import annotations

import functools
import gc
import random
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gemini.errors import human_bytes, parse_bytes, warn
from gemini.ledger import OF_BUDGET
from gemini.memory.devices.pages import PAGE
from gemini.patches import patch
from gemini.planning.working import CUDA_WORKSPACES
from gemini.tiers import Tier
from gemini.train.activations.store import ACTIVATIONS
from gemini.train.params.guard import AT_REST
from gemini.train.passes.backward import BackwardPass, Recovery
from gemini.train.passes.parts import Parts
from gemini.train.step import run_alone

T = TypeVar("T")

_ADVICE = "Wrap forward and backward in model.micro_batch(), or make the micro-batch smaller"

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")


class Draws:
    """The random numbers that come next: of torch on the host and on one device, of Python, and of numpy."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._there = None if self._device is None else torch.cuda.get_rng_state(self._device)
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def put_back(self) -> None:
        """Let them come again."""
        if self._there is not None and self._device is not None:
            torch.cuda.set_rng_state(self._there, self._device)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Again:
    """What one model does when its device runs out of memory. Called by the training thread alone.

    Args:
        parts: of which what gives way belongs to.
    """

    def __init__(self, parts: Parts, backward: BackwardPass, recovery: Recovery):
        self._store, self._state = parts.store, parts.state
        self._backward, self._recovery = backward, recovery
        self._is_ours = parts.store.device.tier is Tier.GPU and parts.company.ranks.are_alone
        self._in_micro_batch = False
        self.may_learn = self._is_ours
        """Whether the first step is still to tell what the allocator takes (:meth:`learn`)."""
        if self._is_ours:
            _models.add(self)

    def micro_batch(self, call: Callable[[], T]) -> T:
        """Run a forward and its backward, and once more if they run out of memory: see ``GeminiDDP.micro_batch``."""
        if not self._is_ours or self._in_micro_batch:
            return call()
        draws, self._in_micro_batch = Draws(self._store.device.torch_device), True
        try:
            try:
                return call()
            except torch.OutOfMemoryError as e:
                if (why := self._recovery.why_not_again()) is not None:
                    self._give_up(e, why)
                    raise
                said = str(e)
            # Out of the block: with the error its frames go, and what they hold.
            self._recovery.break_off(again=True)
            warn(
                f"a micro-batch ran out of memory ({said.partition('. ')[0]}) and is made once more with the same "
                f"random numbers; {self._make_way(said)}. A larger activations= leaves it room from the beginning"
            )
            # Last: nothing of ours draws in between.
            draws.put_back()
            try:
                return call()
            except BaseException as e:  # of its gradients some were added already
                self._give_up(e, "it was made twice")
                raise
        finally:
            self._in_micro_batch = False
            self._backward.landed_before.clear()

    def fail(self, error: torch.OutOfMemoryError) -> None:
        """Make the best of a forward or backward that has run out of memory, in a loop of the program's own."""
        # Inside another backward the outer one is the one that breaks off.
        if torch._C._current_graph_task_id() != -1:
            return
        if self._is_ours and not self._in_micro_batch and self._state.num_open:
            self._give_up(error, "it is not in model.micro_batch()")
            _tell(error, f"{self._make_way(str(error)).capitalize()}. {_ADVICE}")

    def _give_up(self, error: BaseException, why: str) -> None:
        became = self._recovery.break_off(again=False)
        if isinstance(error, torch.OutOfMemoryError):
            _tell(error, f"Gemini does not make this micro-batch again: {why}. {became}")

    def learn(self) -> None:
        """Set more aside from the second step on, where the allocator has taken more than was left to it."""
        if self._state.computing or self._state.is_parked or torch._C._current_graph_task_id() != -1:
            return
        self.may_learn = False
        ledger, device, tier = self._store.ledger, self._store.device, self._store.device.tier
        aside = ledger.held(tier, ACTIVATIONS)
        more = device.reserved_beyond(ledger.used(tier) - aside - ledger.held(tier, "context")) - aside
        if more > CUDA_WORKSPACES:
            free = min(ledger.free(tier), more)
            ledger.reserve(tier, free, ACTIVATIONS)
            gave = self.take(more - free) if more > free else "it was free"
            warn(
                f"in the first step torch's allocator took {human_bytes(more)} of {device.name} more than was set "
                f"aside for it; {gave}. Give activations={human_bytes(aside + more)!r}, which leaves it room"
            )

    def _make_way(self, said: str) -> str:
        """End what has broken off, wait for what moves, and let windows give up memory for good: in words.

        Args:
            said: by the error, which must be gone: its frames hold what the forward has made.
        """
        run_alone(self._state, self._recovery.forget_interrupted)
        gc.collect()
        ledger, room, tier = self._store.ledger, self._store.manager.room, self._store.device.tier
        ledger.reclaim_all(tier, OF_BUDGET)
        asked = _ASKED.search(said)
        return self.take(max(room.spare(self._store.working_set) // 2, 2 * parse_bytes(asked[1]) if asked else 0))

    def take(self, num_bytes: int) -> str:
        """Let activations have so many bytes of the windows for good, as far as a step can do without: in words."""
        store, tier = self._store, self._store.device.tier
        num_bytes = min(num_bytes, store.manager.room.spare(store.working_set)) // PAGE * PAGE
        if num_bytes <= 0 or not store.manager.room.shrink(num_bytes):
            return "gathered weights had nothing to give"
        store.ledger.reserve(tier, num_bytes, ACTIVATIONS)
        return f"gathered weights have {human_bytes(num_bytes)} less from now on"


def _tell(error: torch.OutOfMemoryError, text: str) -> None:
    """Add to what an error says. It stays torch's own, which loops that try smaller batches look for."""
    error.args = (f"{error.args[0] if error.args else ''}\n{text}".lstrip(),)


_models: weakref.WeakSet[Again] = weakref.WeakSet()
"""Of all models that can do something about it."""

_backward = torch.autograd.backward


def _backward_that_tells(*args: Any, **kwargs: Any) -> None:
    try:
        _backward(*args, **kwargs)
    except torch.OutOfMemoryError as e:
        for model in list(_models):
            model.fail(e)
        raise


patch("torch.autograd.backward", functools.wraps(_backward)(_backward_that_tells))
# torch hands itself to the handler of a managed param, and is this one from now on.
AT_REST[torch.autograd.backward] = AT_REST.pop(_backward)
