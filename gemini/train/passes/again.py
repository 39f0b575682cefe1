"""Out of memory in the middle of a step: what gives way, and what is computed once more with the same bits.

A forward that runs out of memory is made once more, if all that it has changed can be put back: random numbers are, and
what a model keeps in buffers and attributes, what it was called with and what hooks of the program do must not have
changed. A backward has used up half of its graph by then, so it is made again only with its forward, by
:meth:`Again.micro_batch`; what has landed of it is not added a second time. Before that windows give up a part of
their memory for good, in the ledger too. With several ranks nothing is made again, for the others do not know of it.
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
from torch import nn
from torch.utils._pytree import tree_leaves

from gemini.errors import human_bytes, parse_bytes, warn
from gemini.interrupts import WHOLE
from gemini.ledger import OF_BUDGET
from gemini.memory.devices.pages import PAGE
from gemini.patches import patch
from gemini.tiers import Tier
from gemini.train.activations.store import ACTIVATIONS
from gemini.train.observers import innermost_transform
from gemini.train.params.guard import AT_REST
from gemini.train.passes.backward import BackwardPass, Recovery
from gemini.train.passes.forward import Parts
from gemini.train.step import run_alone

T = TypeVar("T")

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_CONTAINERS = (list, dict, set)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""What a forward cannot change where it is given it."""

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
        if self._there is not None and self._device is not None:
            torch.cuda.set_rng_state(self._there, self._device)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Beginning:
    """The state that a forward begins with, as far as it might change it. Made before each, so it copies nothing."""

    def __init__(self, model: nn.Module, batch: Any, draws: Draws, backward_number: int):
        self._modules, self.draws, self._backward_number = [*model.modules()], draws, backward_number
        self._given = tree_leaves(batch)
        self._versions = [*map(_version, self._given)]
        self._kept = marks_of(self._modules)

    def change(self, batch: Any, backward_number: int) -> str:
        """Say what is not as it was, or may not be; nothing if the forward can begin again."""
        now = tree_leaves(batch)
        if [*map(id, now)] != [*map(id, self._given)] or [*map(_version, now)] != self._versions:
            return "it has written to what it was called with"
        for leaf in now:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                return f"it was called with a {type(leaf).__name__}, which it may have changed"
        if backward_number != self._backward_number:
            return "a backward has run in it"
        ours = own_hooks(self._modules[0])
        for module, before, marks in zip(self._modules, self._kept, marks_of(self._modules), strict=True):
            name = type(module).__name__
            if marks != before:
                changed = [key for key in marks.keys() | before.keys() if marks.get(key) != before.get(key)]
                return f"it has changed {' and '.join(sorted(changed))} of a {name}"
            # torch counts no writes to it; nn.BatchNorm counts its batches itself.
            if module.training and "running_mean" in before and "num_batches_tracked" not in before:
                return f"a {name} has a running mean, which it may have changed"
            if any(isinstance(value, torch.Generator) for value in vars(module).values()):
                return f"a {name} has random numbers of its own"
            if not ours.issuperset((*module._forward_hooks, *module._forward_pre_hooks)):
                return f"the program has hooked a {name}"
        return ""


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def own_hooks(model: nn.Module) -> set[int]:
    """Identifiers of the hooks that a managed model has of Gemini's."""
    return {hook.id for hooks in vars(model)["_gemini_hooks"] for hook in hooks if hasattr(hook, "id")}


def marks_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Marks of modules' attributes and buffers, to tell other ones. References would keep activations alive that they
    keep themselves, so their identities do.
    """
    marks: list[dict[str, Any]] = []
    for module in modules:
        found, own = dict[str, Any](), vars(module)
        for name in own.keys() - _OF_TORCH:  # in C: this is for every module, before every forward
            value = own[name]
            found[name] = id(value), len(value) if isinstance(value, _CONTAINERS) else 0
        for name, buffer in own["_buffers"].items():
            found[name] = id(buffer), _version(buffer)
        marks.append(found)
    return marks


class Again:
    """Sees one model through when its device runs out of memory. Called by the training thread alone."""

    def __init__(self, parts: Parts, backward: BackwardPass, recovery: Recovery):
        self._store, self._state, self._calls = parts.store, parts.state, parts.calls
        self._backward, self._recovery = backward, recovery
        self._is_ours = parts.store.device.tier is Tier.GPU and parts.company.ranks.are_alone
        self._in_micro_batch = self._has_learned = False
        if self._is_ours:
            _models.add(self)

    def begin(self, model: nn.Module, batch: Any) -> Beginning | None:
        """Note what a forward begins with, if it is one that might be made again."""
        state = self._state
        if not self._is_ours or self._in_micro_batch or state.computing or state.is_parked:
            return None
        if self._calls.running or torch._C._current_graph_task_id() != -1 or innermost_transform() is not None:
            return None
        if state.has_stepped and not self._has_learned:
            self._learn()
        return Beginning(model, batch, Draws(self._store.device.torch_device), state.backward_number)

    def if_unchanged(self, beginning: Beginning | None, batch: Any, error: torch.OutOfMemoryError) -> Beginning | None:
        """Return the beginning of a forward that has failed, if it can begin again; else ``error`` says why not."""
        change = "" if beginning is None else beginning.change(batch, self._state.backward_number)
        if not change:
            return beginning
        _tell(error, f"Gemini has not run the forward again: {change}. {_ADVICE}")
        return None

    def repeat(self, beginning: Beginning, said: str) -> None:
        """Make ready for a forward to be run again, which has failed with an error that ``said`` that."""
        self._say("a forward", said, self.make_way(said))
        # Last: nothing of ours draws in between.
        beginning.draws.put_back()

    def _say(self, what: str, said: str, gave: str) -> None:
        warn(
            f"{what} ran out of memory ({said.partition('. ')[0]}) and is made once more with the same random numbers; "
            f"{gave}. A larger activations= leaves it room from the beginning"
        )

    def micro_batch(self, call: Callable[[], T]) -> T:
        """Run a forward and its backward, and once more if they run out of memory: see ``GeminiDDP.micro_batch``."""
        if not self._is_ours or self._in_micro_batch:
            return call()
        draws, self._in_micro_batch = Draws(self._store.device.torch_device), True
        try:
            try:
                return call()
            except torch.OutOfMemoryError as e:
                if why := self._recovery.why_not_again():
                    self._give_up(e, why)
                    raise
                said = str(e)
            # Out of the block: with the error its frames go, and what they hold.
            self._recovery.break_off(again=True)
            self._say("a micro-batch", said, self.make_way(said))
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
        """Make the best of a backward that has run out of memory, in a loop of the program's own."""
        if not self._in_micro_batch and self._state.num_open:
            self._give_up(error, "its forward is the program's")
            _tell(error, f"{self.make_way(str(error)).capitalize()}. {_ADVICE}")

    def _give_up(self, error: BaseException, why: str) -> None:
        became = self._recovery.break_off(again=False)
        if isinstance(error, torch.OutOfMemoryError):
            _tell(error, f"Gemini does not make this micro-batch again: {why}. {became}")

    def _learn(self) -> None:
        """Set more aside from the second step on, where the allocator has taken more than was left to it."""
        self._has_learned = True
        ledger, device, tier = self._store.ledger, self._store.device, self._store.device.tier
        aside = ledger.held(tier, ACTIVATIONS)
        more = device.reserved_beyond(ledger.used(tier) - aside - ledger.held(tier, "context")) - aside
        if more > 0:
            free = min(ledger.free(tier), more)
            ledger.reserve(tier, free, ACTIVATIONS)
            gave = self.take(more - free) if more > free else "it was free"
            warn(
                f"in the first step torch's allocator took {human_bytes(more)} of {device.name} more than was set "
                f"aside for it; {gave}. Give activations={human_bytes(aside + more)!r}, which leaves it room"
            )

    def make_way(self, said: str) -> str:
        """End what has broken off, wait for what moves, and let windows give up memory for good: in words. ``said``: by
        the error, which must be gone: its frames hold what the forward has made.
        """
        run_alone(self._state, self._recovery.forget_interrupted)
        gc.collect()
        ledger, room, tier = self._store.ledger, self._store.manager.room, self._store.device.tier
        ledger.reclaim_all(tier, OF_BUDGET)
        torch.cuda.empty_cache()
        asked = _ASKED.search(said)
        return self.take(max(room.spare(self._store.working_set) // 2, 2 * parse_bytes(asked[1]) if asked else 0))

    def take(self, num_bytes: int) -> str:
        """Let activations have so many bytes of the windows for good, as far as a step can do without: in words."""
        store, tier = self._store, self._store.device.tier
        num_bytes = min(num_bytes, store.manager.room.spare(store.working_set)) // PAGE * PAGE
        with WHOLE:
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
        # Inside another backward the outer one is the one that breaks off.
        if torch._C._current_graph_task_id() == -1:
            for model in list(_models):
                model.fail(e)
        raise


patch("torch.autograd.backward", functools.wraps(_backward)(_backward_that_tells))
# torch hands itself to the handler of a managed param, and is this one from now on.
AT_REST[torch.autograd.backward] = AT_REST.pop(_backward)
