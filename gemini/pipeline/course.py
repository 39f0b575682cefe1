"""How a forward runs through a model: which modules come before its blocks and which after them. It is run once on
tensors without values.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gemini.errors import GeminiError
from gemini.pipeline.flow import Flow, is_in, readable_in
from gemini.tracing.ahead import FakeRunner, fake_copy, fake_input, loss_of, nothing_collected
from gemini.train.loading.skeleton import generators_kept
from gemini.train.passes.again import marks_of


class Course(NamedTuple):
    """The way of a forward.

    Attributes:
        twin: the model on the meta device.
        blocks: names of the blocks, in their order.
        before, after: names of the outermost modules with params of their own that run before the first block, and
            after the last one.
        num_given: of each block, the length of the tuple, beginning with the hidden states, that it gives; 0 if it
            gives them alone.
        width: of hidden states.
        flops: of each block, and at last of what comes after them.
        is_random: whether a forward draws random numbers.
        reads_labels: whether something before the end of the blocks reads labels.
        readable: names in what forward returns that are of what comes after the blocks; None if it has no names.
    """

    twin: nn.Module
    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_given: tuple[int, ...]
    width: int
    flops: tuple[int, ...]
    is_random: bool
    reads_labels: bool
    readable: frozenset[str] | None


OF_STAGES = ("blocks", "before", "after", "num_given", "reads_labels", "readable")
"""What is alike in all that the same stages run."""
LABELS = ("labels", "shift_labels")


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
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with generators_kept(), nothing_collected(), mode:
        fake = fake_copy(model, mode).train()
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
                readable = readable_in(output, flow.is_of_last)
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
        changed = [name for name, marks in _kept_by(fake, blocks).items() if marks != kept.get(name)]
    ran = [name for name in flow.order if name in blocks]
    if ran != list(blocks):
        raise ValueError(
            f"{type(model).__name__} does not run each of its blocks {blocks[0]} to {blocks[-1]} once and in order, so "
            "they cannot be divided into pipeline stages. Use dp or tp"
        )
    # Those that are in none of the others, once each, in the order they ran in.
    ran_once = dict.fromkeys(name for name in flow.order if name not in blocks)
    outermost = [name for name in ran_once if not is_in(name, filter(None, ran_once))]
    first, last = flow.order.index(blocks[0]), flow.order.index(blocks[-1])
    before = tuple(name for name in outermost if flow.order.index(name) < first)
    after = tuple(name for name in outermost if flow.order.index(name) > last)
    between = [name for name in outermost if name not in before and name not in after]
    again = [name for name in before if name in flow.order[last:]]
    if between or again:
        raise ValueError(
            f"{type(model).__name__} runs {(between or again)[0]} between its blocks, or both before and after them, "
            "so several stages would need it. Use dp or tp"
        )
    fault = flow.fault
    if changed and not fault:
        fault = f"{changed[0] or 'it'} keeps something that a forward has made"
    if fault:
        raise ValueError(
            f"in {type(model).__name__} {fault}, and pipeline stages pass on hidden states alone. Use dp or tp"
        )
    given = [flow.gives[block] for block in blocks]
    num_given = tuple(len(gives) if isinstance(gives, tuple) else 0 for gives in given)
    width = (given[0][0] if num_given[0] else given[0]).shape[-1]
    weights = (*(flow.flops[name] for name in blocks), sum(flow.flops[name] for name in after))
    try:
        twin = copy.deepcopy(model, on_meta(model))
    except Exception as e:
        raise GeminiError(f"{type(model).__name__} cannot be copied: {type(e).__name__}: {e}") from e
    told = flow.is_random, flow.reads_early, readable
    return Course(twin, blocks, before, after, num_given, width, weights, *told)


def _numbers_to_come() -> Any:
    """The states of the generators of Python and, where it is loaded, numpy."""
    numpy = sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None
    return random.getstate(), str(numpy and (numpy["state"]["pos"], numpy["state"]["key"].tobytes()))


def _kept_by(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, Any]:
    """Tells whether modules keep something else than before. The buffers of a block are its own."""
    return {
        name: {
            key: mark
            for key, mark in marks_of(module).items()
            if not (key in module._buffers and is_in(f"{name}.", blocks))
        }
        for name, module in model.named_modules()
    }


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
