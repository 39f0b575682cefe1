"""A small model that ranks train together while one of them does something else, and messages are slow by chance.

The same with and without overlap: what comes out must be the same bits, or the same error.
"""

import contextlib
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.errors import RankMismatch
from gemini.planning.placement import bytes_per_tier
from gemini.ranks import group
from gemini.ranks.process_groups import make_subgroup
from gemini.ranks.wire import Pending, Wire
from gemini.tiers import Tier
from gemini.train import engine
from gemini.train.params.by_name import read_range
from tests.world import world_of

NUM_BLOCKS = 5
KINDS = (
    "nothing", "skip", "extra", "evaluate", "forward alone", "raise in forward", "raise in backward", "two forwards",
    "data ends", "lacks a gradient",
)  # fmt: skip


class Event(NamedTuple):
    """On rank ``rank`` something else happens in a step, at block ``place``."""

    kind: str
    rank: int = 0
    step: int = 0
    place: int = 0


@dataclass(frozen=True)
class Play:
    """One training run. ``seed`` draws delays, none if it is negative."""

    events: tuple[Event, ...] = ()
    num_steps: int = 5
    overlap: bool = True
    seed: int = -1
    tight: bool = False
    precision: str = "fp32"
    num_micro: int = 1
    no_sync: bool = False
    checkpointing: bool = False
    nvme: str = ""
    replicas: int = 1
    gradients: str = ""
    launched: bool = False
    """Collectives are the library's, as among GPUs."""
    kill: tuple[int, int] = (-1, 0)
    """A rank, and before which message of its last step it is killed."""


class Outcome(NamedTuple):
    """``bits``: of the masters and states of this rank. ``scripted``: whether each step followed a script."""

    losses: list[float]
    norms: list[float]
    bits: int
    error: str
    scripted: list[bool]
    rounds: list[int]
    met: Sequence[tuple[str, tuple[int, ...]]] = ()
    """The library's collectives, in their order."""


def until_error(outcome: Outcome) -> tuple[Any, ...]:
    """What must be the same. A norm that is looked at on the way to an error is of gradients of different backwards."""
    if not outcome.error:
        return outcome[:4]
    num_steps = len(outcome.scripted)
    return outcome.error, num_steps, outcome.norms[:num_steps]


class Injected(Exception):
    """What an event raises."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Injected("in backward")


class _Linear(nn.Linear):
    """``lacks``: its bias gets no gradient, and that is all that is other."""

    lacks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias.detach() if self.lacks else self.bias)


class Blocks(nn.Module):
    """Blocks in turn, a module that is not used in most steps, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(_Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(5))
        self.extra = nn.Linear(32, 32)
        self.head = nn.Linear(32, 8)
        self.checkpointing = False
        self.event = Event("nothing")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, place = self.event.kind, self.event.place
        for number, block in enumerate(self.blocks):
            if number == place and kind == "raise in forward":
                raise Injected("in forward")
            if number == place and kind == "raise in backward":
                x = _Raise.apply(x)
            block[0].lacks = number == place and kind == "lacks a gradient"
            if number == place and kind == "extra":
                x = x + self.extra(x)
            if not (number == place and kind == "skip"):
                again = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
                x = x + again
        return self.head(x).float().square().mean()


def wrap(play: Play) -> Any:
    """The managed model; in the least budget if it is to be ``tight``."""
    settings: dict[str, Any] = {
        "precision": play.precision, "device": "cpu", "max_chunk": 2000, "overlap": play.overlap,
        "gradients": play.gradients or ("accumulate" if play.num_micro > 1 and play.replicas == 1 else "retain"),
    }  # fmt: skip
    homes: dict[str, Any] = {"cpu": "64MiB"}
    if play.nvme:
        homes |= {"nvme": "64MiB", "nvme_path": play.nvme}
        settings["placement"] = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)
    world, mesh = dist.get_world_size(), None
    if play.replicas > 1:
        mesh = init_device_mesh("cpu", (play.replicas, world // play.replicas))
    for _ in range(2 if play.tight else 1):
        torch.manual_seed(0)
        model = Blocks()
        model.checkpointing = play.checkpointing
        managed: Any = gemini.GeminiDDP(
            model, gemini.GeminiConfig(memory=gemini.MemoryBudget(**homes), **settings), mesh=mesh
        )
        decision = world_of(managed).decision
        needed = bytes_per_tier(decision.problem, decision.placement)[Tier.CPU]
        homes["cpu"] = (needed + 4096) * world
    return managed


@contextlib.contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Messages begin, and waits for them, after a while that ``seed`` draws."""
    rng = random.Random(1000 * seed + dist.get_rank())
    start, wait = Wire.start, Pending.wait

    def late() -> None:
        if rng.random() < 0.3:
            time.sleep(rng.choice((0.0, 0.0003, 0.002, 0.006)))

    def slow_start(self: Wire, *args: Any) -> Pending:
        late()
        return start(self, *args)

    def slow_wait(self: Pending) -> None:
        late()
        wait(self)

    if seed >= 0:
        Wire.start, Pending.wait = slow_start, slow_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Wire.start, Pending.wait = start, wait  # type: ignore[method-assign]


@contextlib.contextmanager
def library(seed: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Collectives of the library on tensors of the CPU, which play NCCL's part; each begins after a while that ``seed``
    draws. What they were, in their order.
    """
    rng, met = random.Random(1000 * seed + 500 + dist.get_rank()), list[tuple[str, tuple[int, ...]]]()
    before = engine.join, group._collective, Wire.all_gather_by_library, Wire.reduce_scatter_by_library

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def call_late(wire: Wire, tag: Any, into: torch.Tensor, own: torch.Tensor, what: str) -> None:
            if seed >= 0 and rng.random() < 0.3:
                time.sleep(rng.choice((0.0, 0.0003, 0.002, 0.006)))
            met.append((name, tuple(into.shape)))
            call(wire, tag, into, own, what)

        return call_late

    engine.join = partial(_join, before[0])
    group._collective = lambda ranks: make_subgroup(ranks, "gloo")
    Wire.all_gather_by_library, Wire.reduce_scatter_by_library = (  # type: ignore[method-assign]
        noted("gather", before[2]),
        noted("reduce", before[3]),
    )
    try:
        yield met
    finally:
        engine.join, group._collective, Wire.all_gather_by_library, Wire.reduce_scatter_by_library = before  # type: ignore[method-assign]


def _join(join: Callable[..., Any], *args: Any, cuda: bool, **kwargs: Any) -> Any:
    return join(*args, cuda=True, **kwargs)


@contextlib.contextmanager
def killed_before(message: int) -> Iterator[None]:
    """This process ends before it sends that message."""
    start, left = Wire.start, [message]

    def count(self: Wire, *args: Any) -> Pending:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return start(self, *args)

    Wire.start = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        Wire.start = start  # type: ignore[method-assign]


def run(play: Play) -> Outcome:
    """Train, and tell what came out."""
    with delayed(play.seed), library(play.seed) if play.launched else contextlib.nullcontext() as met:
        return _run(play)._replace(met=[] if met is None else met)


def _run(play: Play) -> Outcome:
    rank = dist.get_rank()
    managed = wrap(play)
    shards = world_of(managed).shards
    optimizer = gemini.HybridAdam(managed.parameters(), lr=1e-2, eps=1e-3)
    out = Outcome([], [], 0, "", [], [])
    try:
        for step in range(play.num_steps):
            events = [event for event in play.events if event.step == step and event.rank == rank]
            event = events[0] if events else Event("nothing")
            before = shards.num_scripted, shards.num_exchanges
            is_last = step == play.num_steps - 1
            with killed_before(play.kill[1]) if is_last and rank == play.kill[0] else contextlib.nullcontext():
                _step(managed, optimizer, play, event, step, out)
            out.scripted.append(shards.num_scripted > before[0])
            out.rounds.append(shards.num_exchanges - before[1])
        world_of(managed).check()
    except RankMismatch as e:
        return out._replace(error=type(e).__name__)
    return out._replace(bits=_bits(managed))


def _step(managed: Any, optimizer: Any, play: Play, event: Event, step: int, out: Outcome) -> None:
    if event.kind == "evaluate":
        with torch.no_grad():
            managed(_batch(play, step, 7))
    if event.kind == "forward alone":
        managed(_batch(play, step, 8))
    if event.kind == "data ends":
        managed.clip_grad_norm_(1.0)
    if event.kind == "two forwards":
        losses = [managed(_batch(play, step, number)) for number in range(2)]
        for loss in losses:
            (loss / 2).backward()
    else:
        for number in range(play.num_micro):
            last = number == play.num_micro - 1
            with managed.no_sync() if play.no_sync and not last else contextlib.nullcontext():
                _forward_and_backward(managed, play, event, step, number, out)
    out.norms.append(float(managed.clip_grad_norm_(0.5)))
    optimizer.step()
    optimizer.zero_grad()


def _forward_and_backward(managed: Any, play: Play, event: Event, step: int, number: int, out: Outcome) -> None:
    managed.event = event
    try:
        loss = managed(_batch(play, step, number))
        loss.backward()
    except Injected:
        if event.kind == "raise in backward":
            optimizer_less_zero_grad(managed)
        managed.event = Event("nothing")
        loss = managed(_batch(play, step, number))
        loss.backward()
    managed.event = Event("nothing")
    out.losses.append(float(loss.detach()))


def optimizer_less_zero_grad(managed: Any) -> None:
    """What a program does that catches an error of its backward."""
    managed.zero_grad()


def _batch(play: Play, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + number)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[play.precision]
    return torch.randn(4, 32, generator=generator).to(dtype)


def _bits(managed: Any) -> int:
    world, found = world_of(managed), 0
    world.settle()
    for handle in world.handles:
        for kind, plane in handle.chunk.planes.items():
            if kind in ("weights", "residual", "exp_avg", "exp_avg_sq"):
                part = read_range(world.mover, plane, handle)
                found = zlib.crc32(part.view(torch.uint8).numpy().tobytes(), found)
    return found
