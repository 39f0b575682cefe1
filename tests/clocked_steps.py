"""Steps of an 8B model by the clock of the stand-in and by the simulator, each side of everything 32 times smaller.

Widths, tokens and the vocabulary are a 32nd, so that weights, activations and budgets are a 1,024th of what they are,
and so are the speeds of copies and of the host. What a moment computes takes what the planner says of the real model.
The engine runs as it is, on the stand-in; each module's call, its repetition and its backward give the device what
their moments compute, and take the launching thread as long as a GPU of that machine would.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from gemini.pipeline.stages import Elsewhere, Passing
from gemini.planning import schedules, working
from gemini.planning.costs import Costs, Efficiency
from gemini.planning.hardware import Hardware, load_hardware
from gemini.planning.layout import DEFAULT_MAX_CHUNK
from gemini.planning.parallel import block_by_block
from gemini.planning.trace import AttentionWork, MemoryTrace, Moment, Phase
from gemini.planning.working import TILE
from gemini.tiers import Tier
from tests.virtual_time import Rates, TimedStandin, VirtualClock
from tests.world import world_of

SIDE = 32
SCALE = SIDE**2
SEQUENCE = 4096
BESIDE = 5 * 2**28
"""Of a GPU: its context, kernels, and what an allocator rounds up."""
ADAM_BYTES = 26
"""Read and written for each param by an update."""


class Case(NamedTuple):
    """A step, of ``batches`` micro-batches; ``how``: of its optimizer, and clipped where that is empty."""

    card: str
    gpu: int
    tokens: int
    batches: int = 1
    how: dict[str, bool] = {}
    offload: str | None = None
    resident: float = 0.0
    """The share of the weights that stay on the GPU."""
    layers: int = 32
    kept: int = 0
    """Blocks that are not computed again."""
    by_block: bool = False
    """By ``gemini.train_step``, with Liger's kernels, of which the plan knows."""

    def __str__(self) -> str:
        more = [*(["block by block"] if self.by_block else []), *self.how]
        more += ["activations on the host"] if self.offload else []
        more += ["weights on the GPU"] if self.resident else []
        more += [f"{self.kept} blocks kept"] if self.kept else []
        return f"{self.card}, {self.batches} x {self.tokens:,}, {', '.join(more) or 'clipped'}"

    @property
    def gradients(self) -> Any:
        return "retain" if self.batches == 1 or self.by_block else "accumulate"


class Told(NamedTuple):
    """Seconds of a step, and what came of it by the clock."""

    predicted: float
    clocked: float
    landed: float
    """Of the engine's bytes/s, those with which gradients left while there were any."""
    blocked: float
    """Seconds in which the launching thread waited between the first gradient and the end of a backward."""
    starved: float
    """Seconds in which nothing was queued."""
    link: float
    """Bytes/s of that engine, of the small machine."""
    timeline: Any

    @property
    def foreseen(self) -> float:
        """Seconds of a step for which the simulator has nothing to compute: its last gradients land, and what is read
        first is updated.
        """
        return sum(self.timeline.stalls.get(what, 0.0) for what in ("update", "gradient landing"))


INSIDE, GUESSED = {"step_in_backward": True}, {"step_in_backward": True, "speculate": True}
RTX4090, RTX5090, H100 = 24564 * 2**20, 32606 * 2**20, 81559 * 2**20
CASES = (
    Case("rtx4090", RTX4090, 4096),
    Case("rtx4090", RTX4090, 8192),
    Case("rtx4090", RTX4090, 8192, how=INSIDE),
    Case("rtx4090", RTX4090, 8192, batches=2),
    Case("rtx4090", RTX4090, 8192, batches=2, how=GUESSED),
    Case("rtx4090", RTX4090, 8192, offload="cpu"),
    Case("h100", H100, 4096),
    Case("h100", H100, 16384),
    Case("h100", H100, 16384, how=GUESSED),
    Case("h100", H100, 8192, batches=2),
    Case("h100", H100, 16384, resident=1.0),
    Case("h100", H100, 16384, offload="cpu", how=INSIDE),
    Case("rtx4090", RTX4090, 8192, offload="cpu", kept=8),
    Case("rtx5090", RTX5090, 8192, offload="cpu", kept=16),
    Case("h100", H100, 16384, batches=4),
    Case("rtx4090", RTX4090, 8192, batches=8, offload="cpu", by_block=True),
)
"""The last is what ``gemini plan --fastest`` chooses for 65,536 tokens, with host memory for all states."""


def _config(side: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256 // side, hidden_size=4096 // side, intermediate_size=14336 // side, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128 // side, use_cache=False, tie_word_embeddings=False,
        max_position_embeddings=2**20,
    )  # fmt: skip


@cache
def _trace(side: int, layers: int, tokens: int, kept: int, kernels: str | None) -> MemoryTrace:
    length = min(tokens, SEQUENCE) // side
    ids = torch.empty(tokens // SEQUENCE or 1, length, dtype=torch.int64, device="meta")
    return gemini.trace(
        _config(side, layers), {"input_ids": ids, "labels": ids}, target="cuda" if side == 1 else "cpu",
        checkpointing="non-reentrant", kept_blocks=kept, kernels=kernels,
    )  # fmt: skip


SMALL_TILE = 16 * TILE // SCALE
"""Elements of staging: what has four slots of whole pages, and of which many are a chunk, as of the large model."""
FLOPS = 1e12
"""Of the small GPU: a moment has as many as it takes seconds of these."""


def _timed_trace(case: Case) -> MemoryTrace:
    """The small step, whose moments take as long as those of the large one."""
    kernels = "liger" if case.by_block else None
    large, small = (_trace(side, case.layers, case.tokens, case.kept, kernels) for side in (1, SIDE))
    costs = Costs(load_hardware(case.card), Efficiency(), compute=Tier.GPU, precision="bf16", local_ranks=1)
    assert [(m.phase, m.module) for m in large.moments] == [(m.phase, m.module) for m in small.moments]

    def timed(moment: Moment, like: Moment) -> Moment:
        seconds = costs.compute(replace(like, num_ops=0), measured=False).seconds
        return replace(
            moment, flops=round(seconds * FLOPS), products=(), attention=AttentionWork(), touched_bytes=0,
            num_ops=like.num_ops,
        )  # fmt: skip

    # Nothing real is computed here, with these kernels or without.
    return replace(small, kernels=None, moments=tuple(map(timed, small.moments, large.moments)))


def _hardware(case: Case) -> Hardware:
    """What the small machine does, as if it had been measured."""
    real, shares = load_hardware(case.card), Efficiency()

    def reached(key: str) -> float:
        return real.get(key, needed_for="a step") * shares.of(real, key)

    return Hardware(real.name, {}).with_figures(
        "measured: scaled", num_gpus=1, gpu_bytes=case.gpu, cpu_bytes=2**40, gpu_flops_bf16=FLOPS, gpu_flops_fp32=FLOPS,
        gpu_bandwidth=1e18, dram_bandwidth=1e18, h2d=reached("h2d") / SCALE, d2h=reached("d2h") / SCALE,
        update_cpu=ADAM_BYTES * SCALE / reached("dram_bandwidth"), land_cpu=4 * SCALE / reached("dram_bandwidth"),
        **{key: real.figures[key].value for key in ("gpu_op_seconds", "copy_seconds", "hook_seconds") if real.has(key)},
    )  # fmt: skip


class _Charge(torch.autograd.Function):
    """Nothing, but what its module computes is given to the device: now, and when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[], None]) -> torch.Tensor:
        ctx.charge = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.charge()
        return grads[0], None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _charge(model: nn.Module, trace: MemoryTrace, clock: VirtualClock, hardware: Hardware, hook: float) -> None:
    work: dict[tuple[Phase, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for moment in trace.moments:
        of = work[moment.phase, moment.module]
        of[0] += moment.flops / FLOPS
        of[1] += moment.num_ops * hardware.figures["gpu_op_seconds"].value
        of[1] += hook * (len(moment.params) + len(moment.gradients))

    def give(phase: Phase, path: str) -> None:
        seconds, launching = work.get((phase, path), (0.0, 0.0))
        if launching:
            clock.spend(launching)
        if seconds:
            clock.kernel(seconds)

    def charge(path: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
            if first is None or first.is_meta or isinstance(module, Passing):
                return None  # another stage computes it
            if not path and "loss" not in output:
                return None
            give(Phase.RECOMPUTE if _in_backward() else Phase.FORWARD, path)
            if (Phase.BACKWARD, path) not in work or not torch.is_grad_enabled() or isinstance(first, Elsewhere):
                return None

            def charged(tensor: torch.Tensor) -> torch.Tensor:
                return _Charge.apply(tensor, lambda: give(Phase.BACKWARD, path))  # type: ignore[no-any-return]

            if isinstance(output, torch.Tensor):
                return charged(output)
            if isinstance(output, tuple):
                return (charged(output[0]), *output[1:])
            key = "loss" if "loss" in output else "last_hidden_state"
            output[key] = charged(output[key])
            return output

        after.__name__ = "output_capturing_hook"  # which may be there block by block
        return after

    for path, module in model.named_modules():
        module.register_forward_hook(charge(path))


@patch.object(schedules, "TILE", SMALL_TILE)
@patch.object(working, "TILE", SMALL_TILE)
@patch.object(working, "FLIGHTS", {tier: num_bytes // SCALE for tier, num_bytes in working.FLIGHTS.items()})
def clocked(case: Case, folder: Path, *, num_steps: int = 3) -> Told:
    """The last of some steps."""
    trace, hardware = _timed_trace(case), _hardware(case)
    placement = gemini.StaticPlacement(weights_on_gpu=case.resident)
    budgets = {Tier.GPU: (case.gpu - BESIDE) // SCALE, Tier.CPU: 2**30}
    plan = gemini.plan(
        block_by_block(trace, case.batches) if case.by_block else trace, hardware, budgets, gradients=case.gradients,
        placement=placement, offload_activations=case.offload, accumulate=1 if case.by_block else case.batches,
        max_chunk=DEFAULT_MAX_CHUNK // SCALE,
    )  # fmt: skip
    timeline = gemini.simulate(plan, hardware, clipping=not case.how)
    figures = {key: figure.value for key, figure in hardware.figures.items()}
    clock = VirtualClock(
        Rates(
            h2d=figures["h2d"], d2h=figures["d2h"], latency=figures.get("copy_seconds", 0.0),
            call=figures["gpu_op_seconds"], host=ADAM_BYTES / figures["update_cpu"],
        )
    )  # fmt: skip
    torch.manual_seed(0)
    small = LlamaForCausalLM(_config(SIDE, case.layers)).bfloat16()
    small.gradient_checkpointing_enable({"use_reentrant": False})
    _charge(small, trace, clock, hardware, 0.0 if case.resident else figures.get("hook_seconds", 0.0))
    memory = gemini.MemoryBudget(gpu=budgets[Tier.GPU], cpu=budgets[Tier.CPU])
    with clock.running():
        config = gemini.GeminiConfig(
            memory=memory, placement=plan, gradients=case.gradients, device=TimedStandin(clock),
            max_chunk=DEFAULT_MAX_CHUNK // SCALE,
        )  # fmt: skip
        model: Any = gemini.GeminiDDP(small, config)
        model.train()
        world = world_of(model)
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4, **case.how)
        ids = torch.randint(0, 128256 // SIDE, tuple(trace.batch["input_ids"]))
        for _ in range(num_steps):
            begin, starved, backwards = clock.now, clock.starved, []
            if case.by_block:
                gemini.train_step(model, [{"input_ids": ids, "labels": ids}] * case.batches)
                backwards.append((begin, clock.now))
            for number in range(0 if case.by_block else case.batches):
                with model.no_sync() if number + 1 < case.batches else contextlib.nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                    since = clock.now
                    loss.backward()
                    backwards.append((since, clock.now))
            if not case.how:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            end = clock.now
        world.settle()
    assert clock.num_lost == 0, "a thread was waited for that nothing here knows of: the times are worth nothing"
    blocked = sum(stop - start for span in backwards for start, stop, _ in clock.blocked(*span))
    landed = clock.rate("d2h", backwards[0][0]) / clock.rates.d2h
    return Told(timeline.step_seconds, end - begin, landed, blocked, clock.starved - starved, clock.rates.d2h, timeline)
