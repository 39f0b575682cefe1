"""How a forward runs through a model: which modules come before its blocks and which after them, and what flows where.
It is run once on tensors without values; what every operation reads is seen, and in which part of it that was made.

A stage runs the whole forward with other modules in the place of those that it has not, so it computes the same only if
the blocks hand on nothing but hidden states. Whatever else an operation reads must have been made in its own part: not
only what carries gradients, since weights that are frozen, and values that were detached, count as well.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini.errors import GeminiError
from gemini.tracing.ahead import FakeRunner, fake_copy, fake_input, loss_of, nothing_collected
from gemini.tracing.fused import with_kernels
from gemini.tracing.meter import flops_of
from gemini.train.checkpoint.states import generators_kept
from gemini.train.modules.reading import own_buffers, own_params
from gemini.train.passes.again import marks_of
from gemini.train.setup.problem import computes_with_liger


class Course(NamedTuple):
    """The way of a forward, by names of modules."""

    twin: nn.Module
    """The model on the meta device."""
    blocks: tuple[str, ...]
    before: tuple[str, ...]
    """The outermost modules with params of their own that run before the first block."""
    after: tuple[str, ...]
    num_given: tuple[int, ...]
    """Of each block, the length of the tuple, beginning with the hidden states, that it gives; 0 for these alone."""
    width: int
    """Of hidden states."""
    flops: tuple[int, ...]
    """Seconds of each block, and at last of what comes after them."""
    is_random: bool
    reads_labels: bool
    """Whether something before the end of the blocks reads labels."""
    readable: frozenset[str] | None
    """Names in what forward returns that are of what comes after the blocks; None if it has no names."""


OF_STAGES = ("blocks", "before", "after", "num_given", "reads_labels", "readable")
"""What is alike in all that the same stages run."""
LABELS = ("labels", "shift_labels")


def course_of(
    model: nn.Module, batch: Mapping[str, Any], loss_from: Callable[[Any], torch.Tensor] | None = None
) -> Course:
    """Run ``model`` on ``batch``, without values. ``loss_from`` makes a loss of what forward returns. Raises ValueError
    for a model whose blocks do not follow each other with nothing but hidden states between them, GeminiError if it
    cannot be copied.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its routers (output_router_logits=True), to which every block "
            "contributes and which pipeline stages do not pass on. Set it to False"
        )
    flow, blocks, readable = _flow_of(model, batch, loss_from)
    before, after = _around(type(model).__name__, flow.order, blocks)
    if flow.fault:
        raise ValueError(
            f"in {type(model).__name__} {flow.fault}, and pipeline stages pass on hidden states alone. Use dp or tp"
        )
    given = [flow.gives[block] for block in blocks]
    num_given = tuple(len(gives) if isinstance(gives, tuple) else 0 for gives in given)
    try:
        twin = copy.deepcopy(model, on_meta(model))
    except Exception as e:
        raise GeminiError(f"{type(model).__name__} cannot be copied: {type(e).__name__}: {e}") from e
    return Course(
        twin,
        blocks,
        before,
        after,
        num_given,
        width=(given[0][0] if num_given[0] else given[0]).shape[-1],
        flops=(*(flow.flops[name] for name in blocks), sum(flow.flops[name] for name in after)),
        is_random=flow.is_random,
        reads_labels=flow.reads_early,
        readable=readable,
    )


def _flow_of(
    model: nn.Module, batch: Mapping[str, Any], loss_from: Callable[[Any], torch.Tensor] | None
) -> tuple[Flow, tuple[str, ...], frozenset[str] | None]:
    """Run a fake copy, and look on: the flow, the blocks, and what is readable."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Labels are often the tensor of the inputs, and what reads that one reads no labels.
    batch = {n: v.clone() if n in LABELS and isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    with ExitStack() as stack, generators_kept(), nothing_collected(), mode:
        fake = fake_copy(model, mode).train()
        # Triton's kernels read values: what they keep and give is known without them.
        stack.enter_context(with_kernels(fake, "liger" if computes_with_liger(fake) else None))
        blocks = _blocks_in(fake)
        known: dict[int, torch.Tensor] = {}
        inputs = {name: fake_input(value, mode, known) for name, value in batch.items()}
        for module in fake.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
        kept = _kept_by(fake, blocks)
        late = [inputs[name] for name in LABELS if isinstance(inputs.get(name), torch.Tensor)]
        flow, drawn = Flow(FakeRunner(mode), fake, blocks, late), _numbers_to_come()
        try:
            with flow:
                output = fake(**inputs)
                readable = flow.readable_in(output)
                loss_of(fake, output, loss_from)
        except GeminiError:
            raise
        except Exception as e:
            raise ValueError(
                f"{type(model).__name__} could not be run without values to see how a forward runs through it "
                f"({type(e).__name__}: {e}). Give Pipeline an example= batch that it takes"
            ) from e
        # Those of Python and numpy; torch's operations draw nothing without values.
        flow.is_random |= _numbers_to_come() != drawn
        for name in [name for name, marks in _kept_by(fake, blocks).items() if marks != kept.get(name)]:
            flow.found(f"{name or 'it'} keeps something that a forward has made")
    return flow, blocks, readable


def _around(kind: str, order: list[str], blocks: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The outermost modules that ran before the blocks, and after them. Raises ValueError for those in between."""
    if [name for name in order if name in blocks] != list(blocks):
        raise ValueError(
            f"{kind} does not run each of its blocks {blocks[0]} to {blocks[-1]} once and in order, so they cannot be "
            "divided into pipeline stages. Use dp or tp"
        )
    # Those that are in none of the others, once each, in the order they ran in.
    ran_once = dict.fromkeys(name for name in order if name not in blocks)
    outermost = [name for name in ran_once if not is_in(name, filter(None, ran_once))]
    first, last = order.index(blocks[0]), order.index(blocks[-1])
    before = tuple(name for name in outermost if order.index(name) < first)
    after = tuple(name for name in outermost if order.index(name) > last)
    between = [name for name in outermost if name not in before and name not in after]
    again = [name for name in before if name in order[last:]]
    if between or again:
        raise ValueError(
            f"{kind} runs {(between or again)[0]} between its blocks, or both before and after them, so several stages "
            "would need it. Use dp or tp"
        )
    return before, after


def _numbers_to_come() -> Any:
    """The states of the generators of Python and, where it is loaded, numpy."""
    numpy = sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None
    return random.getstate(), str(numpy and (numpy["state"]["pos"], numpy["state"]["key"].tobytes()))


def _kept_by(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Any]:
    """Tells whether modules keep something else than before. The buffers of a block are its own."""
    return {
        name: {
            key: mark
            for key, mark in marks_of([module])[0].items()
            if not (key in module._buffers and is_in(f"{name}.", blocks))
        }
        for name, module in model.named_modules()
    }


def on_meta(model: nn.Module) -> dict[int, Any]:
    """Stand-ins for params and buffers in a deep copy of a model that takes no memory: its ``memo``."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for param in own_params(module).values():
            memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        memo |= {id(own): torch.empty_like(own, device="meta") for own in own_buffers(module).values()}
    return memo


def _blocks_in(model: nn.Module) -> tuple[str, ...]:
    best: tuple[int, tuple[str, ...]] = (0, ())
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            numel = sum(param.numel() for param in module.parameters())
            best = max(best, (numel, tuple(f"{name}.{i}" if name else str(i) for i in range(len(module)))))
    if not best[1]:
        raise ValueError(f"{type(model).__name__} has no numbered blocks (nn.ModuleList) to make stages of")
    return best[1]


class Flow(TorchDispatchMode):
    """Runs the operations of a forward through ``model``, which is fake, and notes what makes it no chain of blocks. A
    *part* is a block, or an outermost module with params that runs before all blocks or after them. What is computed
    outside of parts runs in every stage.
    """

    def __init__(self, runner: FakeRunner, model: nn.Module, blocks: Sequence[str], late: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._late, self.reads_early = {_key(tensor) for tensor in late}, False
        """Whether something of ``late`` is read before the last block has ended."""
        self.order = list[str]()
        """The parts and modules with params inside, in the order they began."""
        self.flops, self.gives = Counter[str](), dict[str, Any]()
        self.is_random, self.fault = False, ""
        """What the forward does that stages cannot; the first that was found."""
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
            outermost = outermost if outermost and name.startswith(f"{outermost}.") else name
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
                self.found(f"{name} is not given hidden states")
            elif self._num_begun and hidden is not self._hidden_of(self._blocks[self._num_begun - 1]):
                self.found(f"{name} is given something else than what the block before it gives")
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
                self.found(f"{name} gives no hidden states")
            elif name not in self._made.get(_key(hidden), ()):  # it may come from another thread, or pass through
                self.found(f"{name} gives what it did not compute itself")
        elif not self._open and not isinstance(output, torch.Tensor):
            self.found(f"{name} gives more than one tensor")

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
                self.found("it writes to what is there before it, outside of its blocks")
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
        """The parts behind a tensor that is read ``here``."""
        owners = self._owners.get(key)
        if owners is not None:
            if not here and self._num_ended == len(self._blocks) and owners.isdisjoint(self.order):
                # A head whose weight is read by a fused loss, and which never runs itself.
                self.order += sorted(owners)
                self._after |= owners
            if here not in owners and (here or not owners <= self._after):
                self.found(f"something of {min(owners)} is read outside of it")
            return set()
        if key in self._free_params and self._num_begun:
            self.found(f"{self._free_params[key]} is read behind the first of the blocks")
        sources = self._made.get(key, set())
        for source in sources:
            if not self._may_read(source, here):
                self.found(f"what {source} is given or gives is read in {here or 'what comes after the blocks'}")
        return sources

    def _may_read(self, source: str, here: str) -> bool:
        if source == here:
            return True
        if here in self._blocks:
            return here == self._blocks[0] and source not in self._blocks
        if self._num_ended < len(self._blocks):
            return True  # before the blocks, or between them: nobody sees it unless a part reads it
        return source == self._blocks[-1] or source in self._after

    def readable_in(self, output: Any) -> frozenset[str] | None:
        """Names in what a forward returned whose values the last stage makes; None if it has no names."""

        def is_own(leaf: Any) -> bool:
            if isinstance(leaf, torch.Tensor):
                return all(self._may_read(source, "") for source in self._made.get(_key(leaf), ()))
            return leaf is None or isinstance(leaf, (int, float, str))

        if not isinstance(output, dict):  # a ModelOutput is one
            return None
        return frozenset(name for name, value in output.items() if all(map(is_own, tree_leaves(value))))

    def found(self, fault: str) -> None:
        self.fault = self.fault or fault


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or a param is inside of one of these modules, by their names."""
    return any(name.startswith(f"{module}.") for module in modules)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
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
