"""How a forward runs through a model: which modules come before its blocks and which after them. It is run once on
tensors without values.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.errors import GeminiError
from gemini.tracing.ahead import FakeRunner, fake_copy, fake_input, loss_of, nothing_collected
from gemini.tracing.formulas import flops_of
from gemini.train.loading.skeleton import generators_kept


class Course(NamedTuple):
    """The way of a forward.

    Attributes:
        twin: the model on the meta device.
        blocks: names of the blocks, in their order.
        before, after: names of the outermost modules with params of their own that run before the first block, and
            after the last one.
        gives_tuple: whether a block gives a tuple that begins with the hidden states.
        width: of hidden states.
        flops: of each block, and at last of what comes after them.
        is_random: whether a forward draws random numbers.
    """

    twin: nn.Module
    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    gives_tuple: bool
    width: int
    flops: tuple[int, ...]
    is_random: bool


def course_of(
    model: nn.Module, batch: Mapping[str, Any], loss_from: Callable[[Any], torch.Tensor] | None = None
) -> Course:
    """Run ``model`` on ``batch``, without values.

    Args:
        loss_from: makes a loss of what forward returns, where that has none.

    Raises:
        ValueError: for a model whose blocks do not follow each other with nothing but hidden states between them.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: every block of its decoder reads the output of the "
            "encoder, which pipeline stages do not pass on. Use dp or tp"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds a loss of its routers (output_router_logits=True), to which every block "
            "contributes and which pipeline stages do not pass on. Set it to False"
        )
    order, given, flops = list[str](), dict[str, Any](), Counter[str]()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with generators_kept(), nothing_collected(), mode:
        fake = fake_copy(model, mode).train()
        blocks = _blocks_in(fake)
        known: dict[int, torch.Tensor] = {}
        inputs = {name: fake_input(value, mode, known) for name, value in batch.items()}
        for name, module in fake.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]
            if name in blocks or (any(True for _ in module._parameters.values()) and not _inside(name, blocks)):
                module.register_forward_pre_hook(_noting(name, order, given), with_kwargs=True)
            if name in blocks:
                module.register_forward_hook(_keeping(name, given))
        try:
            with _Counting(FakeRunner(mode), flops, order) as counting:
                loss = loss_of(fake, fake(**inputs), loss_from)
        except GeminiError:
            raise
        except Exception as e:
            raise ValueError(
                f"{type(model).__name__} could not be run without values to see how a forward runs through it "
                f"({type(e).__name__}: {e}). Give Pipeline an example= batch that it takes"
            ) from e
    ran = [name for name in order if name in blocks]
    if ran != list(blocks):
        raise ValueError(
            f"{type(model).__name__} does not run each of its blocks {blocks[0]} to {blocks[-1]} once and in order, so "
            "they cannot be divided into pipeline stages. Use dp or tp"
        )
    _check_crossings(fake, blocks, given, loss)
    first, last = order.index(blocks[0]), order.index(blocks[-1])
    outermost = _outermost(name for name in order if name not in blocks)
    before = tuple(name for name in outermost if order.index(name) < first)
    after = tuple(name for name in outermost if order.index(name) > last)
    between = [name for name in outermost if name not in before and name not in after]
    again = [name for name in before if name in order[last:]]
    if between or again:
        raise ValueError(
            f"{type(model).__name__} runs {(between or again)[0]} between its blocks, or both before and after them, "
            "so several stages would need it. Use dp or tp"
        )
    gives = given[f"{blocks[0]} gives"]
    width = (gives[0] if isinstance(gives, tuple) else gives).shape[-1]
    weights = (*(flops[name] for name in blocks), sum(flops[name] for name in after))
    return Course(_twin_of(model), blocks, before, after, isinstance(gives, tuple), width, weights, counting.is_random)


class _Counting(TorchDispatchMode):
    """Runs operations without values, and counts what they take by the module that began last."""

    def __init__(self, runner: FakeRunner, flops: Counter[str], order: list[str]):
        super().__init__()
        self._runner, self._flops, self._order = runner, flops, order
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._runner(func, args, kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random |= _drops_something(func, args, kwargs or {})
        self._flops[self._order[-1] if self._order else ""] += flops_of(func, args, kwargs or {}, out)
        return out


def _drops_something(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: attention with a dropout of 0 does not."""
    given = {own.name: own.default_value for own in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", True))


def _noting(name: str, order: list[str], given: dict[str, Any]) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        order.append(name)
        given[name] = (args, kwargs)

    return note


def _keeping(name: str, given: dict[str, Any]) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        given[f"{name} gives"] = output

    return keep


def _check_crossings(model: nn.Module, blocks: tuple[str, ...], given: Mapping[str, Any], loss: torch.Tensor) -> None:
    """Nothing but hidden states carries gradients from block to block: between those that a block is given and those
    that it gives stand its own params alone.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    ends: list[torch.Tensor] = []
    for name in blocks:
        args, kwargs = given[name]
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor):
            raise ValueError(f"{name} of {type(model).__name__} is not given hidden states: it cannot be a stage")
        ends.append(hidden)
    segments = list(zip(blocks, ends, [*ends[1:], loss], strict=True))
    for name, start, end in segments:
        for param in _leaves_between(start, end):
            found = names.get(id(param), "an input")
            is_last = name == blocks[-1]
            own = found.startswith(f"{name}.") or (is_last and not _inside(found, blocks))
            if not own:
                raise ValueError(
                    f"{type(model).__name__} passes something with gradients ({found}) across {name} besides the "
                    "hidden states, and pipeline stages pass on hidden states alone. Use dp or tp"
                )


def _leaves_between(start: torch.Tensor, end: torch.Tensor) -> Iterator[torch.Tensor]:
    """Leaves that ``end`` was made of, other than through ``start``."""
    stop = start.grad_fn
    seen, open_ = {stop}, [end.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        open_ += [following for following, _ in node.next_functions]


def on_meta(model: nn.Module) -> dict[int, Any]:
    """What stands for its params and buffers in a deep copy of a model that takes no memory: its ``memo``."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return memo


def _twin_of(model: nn.Module) -> nn.Module:
    """A copy on the meta device, which takes no memory."""
    memo = on_meta(model)
    try:
        return copy.deepcopy(model, memo)
    except Exception as e:
        raise GeminiError(f"{type(model).__name__} cannot be copied: {type(e).__name__}: {e}") from e


def _blocks_in(model: nn.Module) -> tuple[str, ...]:
    """The numbered modules with the most params.

    Raises:
        ValueError: if there are none.
    """
    best: tuple[int, tuple[str, ...]] = (0, ())
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            numel = sum(param.numel() for param in module.parameters())
            best = max(best, (numel, tuple(f"{name}.{i}" if name else str(i) for i in range(len(module)))))
    if not best[1]:
        raise ValueError(f"{type(model).__name__} has no numbered blocks (nn.ModuleList) to make stages of")
    return best[1]


def _inside(name: str, blocks: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _outermost(names: Iterable[str]) -> list[str]:
    """Choose the modules that are in none of the others, once each, in the order they ran in."""
    seen = dict.fromkeys(names)
    return [name for name in seen if not any(other and name.startswith(f"{other}.") for other in seen)]
