"""What flows where in a forward, seen by running it without values: what every operation reads, and in which part of
the model that was made.

A stage runs the whole forward with other modules in the place of those that it has not, so it computes the same only if
the blocks hand on nothing but hidden states. Whatever else an operation reads must have been made in its own part: not
only what carries gradients, since weights that are frozen, and values that were detached, count as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini.tracing.ahead import FakeRunner
from gemini.tracing.meter import flops_of


class Flow(TorchDispatchMode):
    """Runs the operations of a forward through ``model``, which is fake, and notes what makes it no chain of blocks.

    A *part* is a block, or an outermost module with params that runs before all blocks or after them. What is computed
    outside of parts runs in every stage.

    Attributes:
        order: names of the parts and of modules with params inside, in the order they began.
        flops: of each part, by the module that began last.
        is_random: whether an operation draws random numbers.
        reads_early: whether something of ``late`` is read before the last block has ended.
        gives: what each part gives.
        fault: what the forward does that stages cannot; the first that was found.
    """

    def __init__(self, runner: FakeRunner, model: nn.Module, blocks: Sequence[str], late: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._late, self.reads_early = {_key(tensor) for tensor in late}, False
        self.order, self.flops, self.gives = list[str](), Counter[str](), dict[str, Any]()
        self.is_random, self.fault = False, ""
        self._runner, self._blocks = runner, tuple(blocks)
        self._open: list[str] = []
        self._after: set[str] = set()
        self._num_begun = self._num_ended = 0
        self._made: dict[int, set[str]] = {}  # by storage: the parts whose work is in it
        self._alive: list[Any] = []  # those storages: no other may have the address of one
        self._owners: dict[int, set[str]] = {}  # by storage, of a param or buffer: the parts that it belongs to
        self._free_params = {_key(param): name for name, param in model.named_parameters()}
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        outermost = ""
        for name, module in model.named_modules():
            if name not in self._blocks:
                around_blocks = not name or is_in(self._blocks[0], [name])
                # One around others, without params of its own, is no part: those are, each for itself.
                is_bare = all(param is None for param in module._parameters.values())
                if around_blocks or is_bare or is_in(name, self._blocks):
                    continue
            inside = bool(outermost) and name.startswith(f"{outermost}.")
            outermost = outermost if inside else name
            for own in (*module.parameters(), *module.buffers()):
                self._owners.setdefault(_key(own), set()).add(outermost)
                self._free_params.pop(_key(own), None)
            module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            module.register_forward_hook(partial(self._end, name), always_call=True)

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.order.append(name)
        self._open.append(name)
        if name in self._blocks:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, torch.Tensor):
                self._found(f"{name} is not given hidden states")
            elif self._num_begun and hidden is not self._hidden_of(self._blocks[self._num_begun - 1]):
                self._found(f"{name} is given something else than what the block before it gives")
            else:
                self._made[_key(hidden)] = {name}  # now it is its own, and nobody else's
                self._alive.append(hidden.untyped_storage())
            self._num_begun += 1
        elif self._num_begun:
            self._after.add(name)

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop()
        self.gives[name] = output
        if name in self._blocks:
            self._num_ended += 1
            hidden = self._hidden_of(name)
            if hidden is None:
                self._found(f"{name} gives no hidden states")
            elif name not in self._made.get(_key(hidden), ()):  # it may come from another thread, or pass through
                self._found(f"{name} gives what it did not compute itself")
        elif not self._open and not isinstance(output, torch.Tensor):
            self._found(f"{name} gives more than one tensor")

    def _hidden_of(self, block: str) -> torch.Tensor | None:
        gives = self.gives.get(block)
        first = gives[0] if type(gives) is tuple and gives else gives
        return first if isinstance(first, torch.Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        here = self._open[0] if self._open else ""
        made = {here} if here else set[str]()
        read = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for key in read:
            made |= self._read(key, here)
        self.reads_early |= self._num_ended < len(self._blocks) and not read.isdisjoint(self._late)
        out = self._runner(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random |= _drops_something(func, args, kwargs)
        self.flops[self.order[-1] if self.order else ""] += flops_of(func, args, kwargs, out)
        for tensor in _written(func, args, kwargs):
            if not here and _key(tensor) not in self._made:
                self._found("it writes to what is there before it, outside of its blocks")
            self._note(tensor, made)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in read:  # a view has made nothing
                self._note(tensor, made)
        return out

    def _note(self, tensor: torch.Tensor, made: set[str]) -> None:
        key = _key(tensor)
        if key not in self._made:
            self._alive.append(tensor.untyped_storage())
            self._made[key] = set()
        if key not in self._owners:
            self._made[key] |= made

    def _read(self, key: int, here: str) -> set[str]:
        """What stands behind a tensor that is read ``here``."""
        owners = self._owners.get(key)
        if owners is not None:
            if here not in owners:
                self._found(f"something of {min(owners)} is read outside of it")
            return set()
        if key in self._free_params and self._num_begun:
            self._found(f"{self._free_params[key]} is read behind the first of the blocks")
        sources = self._made.get(key, set())
        for source in sources:
            if not self._may_read(source, here):
                self._found(f"what {source} is given or gives is read in {here or 'what comes after the blocks'}")
        return sources

    def _may_read(self, source: str, here: str) -> bool:
        if source == here:
            return True
        if here in self._blocks:
            return here == self._blocks[0] and source not in self._blocks
        if self._num_ended < len(self._blocks):
            return True  # before the blocks, or between them: nobody sees it unless a part reads it
        return source == self._blocks[-1] or source in self._after

    def is_of_last(self, tensor: torch.Tensor) -> bool:
        """Whether the last stage makes it, of what a forward has returned."""
        return all(self._may_read(source, "") for source in self._made.get(_key(tensor), ()))

    def _found(self, fault: str) -> None:
        self.fault = self.fault or fault


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or a param is inside of one of these modules, by their names."""
    return any(name.startswith(f"{module}.") for module in modules)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes to in place."""
    if not func._schema.is_mutable:
        return []
    given = zip(func._schema.arguments, args, strict=False)
    pairs = [*given, *((own, kwargs[own.name]) for own in func._schema.arguments if own.name in kwargs)]
    changed = [value for own, value in pairs if own.alias_info is not None and own.alias_info.is_write]
    return [tensor for tensor in tree_leaves(changed) if isinstance(tensor, torch.Tensor)]


def _drops_something(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: attention with a dropout of 0 does not."""
    given = {own.name: own.default_value for own in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", True))


def readable_in(output: Any, is_own: Callable[[torch.Tensor], bool]) -> frozenset[str] | None:
    """Names in what a forward returned whose values are all in tensors that ``is_own``; None if it has no names."""
    if not isinstance(output, dict):  # a ModelOutput is one
        return None
    plain = (int, float, str, type(None))
    return frozenset(
        name
        for name, value in output.items()
        if all(
            is_own(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, plain) for leaf in tree_leaves(value)
        )
    )
