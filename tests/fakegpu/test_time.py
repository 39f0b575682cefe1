"""What a step takes, by the clock of the runtime: 8B shapes with tensors scaled down, and rates with them.

Times are virtual: bytes over given rates, kernels as long as they are said to take, and threads meet in the order of
their times. So the figures are the same on every machine, and nothing here depends on how fast this one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.gpu import gpu_cases
from tests.virtual_time import Rates, VirtualClock
from tests.world import world_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
HIDDEN, KV, FFN = 64, 16, 224
SCALE = (4096 // HIDDEN) ** 2
"""How many elements of Llama 3 8B each one stands for. So bytes/s and FLOP/s are those of a card over this."""
LAYERS = 8
"""Of the 32 that it has, where no figure depends on how many there are."""


@dataclass(frozen=True)
class Card:
    """A card and its host, as published: FLOP/s that products reach, bytes/s of its memory, the link and the host."""

    flops: float
    memory: float
    link: float
    host: float

    def rates(self) -> Rates:
        return Rates(h2d=self.link / SCALE, d2h=self.link / SCALE, latency=5e-6, host=self.host / SCALE)

    def seconds_of(self, tokens: int) -> Callable[[str, Sequence[int]], float]:
        """What a kernel takes: a product by its weights, of which each is used for every token, others by their bytes.
        A Llama layer of 8B is 218M weights: 0.0090 s forward at 8,192 tokens and 400 TFLOP/s.
        """

        def seconds(name: str, sizes: Sequence[int]) -> float:
            if name.startswith("aten.mm"):
                return 2 * tokens * (max(sizes) / 2 * SCALE) / self.flops
            return sum(sizes) * SCALE / self.memory

        return seconds


H100 = Card(flops=600e12, memory=3.35e12, link=50e9, host=300e9)
RTX4090 = Card(flops=140e12, memory=1.0e12, link=25e9, host=200e9)


class Block(nn.Module):
    """The products of a Llama block; what is between them takes no time worth mentioning."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))
        sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, KV), "v": (HIDDEN, KV), "o": (HIDDEN, HIDDEN)}
        sizes |= {"gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}
        self.of = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of, y = self.of, self.norms[0](x)
        x = x + of["o"](of["q"](y) + (of["k"](y) + of["v"](y)).repeat(1, HIDDEN // KV))
        y = self.norms[1](x)
        return x + of["down"](nn.functional.silu(of["gate"](y)) * of["up"](y))


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@dataclass
class Timed:
    """The last of some steps. Times in seconds from its begin."""

    clock: VirtualClock
    begin: float
    backwards: list[tuple[float, float]]
    end: float
    starved: float
    """Seconds of it in which the card was done with all that it had been given to compute."""

    def blocked_in_backward(self) -> float:
        """Seconds in which the launching thread waited, between the first gradient and the end of a backward."""
        spans = [span for since, until in self.backwards for span in self.clock.blocked(since, until)]
        return sum(stop - start for start, stop, _ in spans)

    def landed(self) -> float:
        """The share of the engine's bytes/s with which gradients left, while there were some that had been computed."""
        return self.clock.rate("d2h", self.backwards[0][0], least=2 * HIDDEN) / self.clock.rates.d2h


def timed(
    card: Card, tokens: int, folder: Path, gradients: str, micro_batches: int, *, layers: int = LAYERS, **how: Any
) -> Timed:
    """Steps of a model whose weights and states are on the host. The card has room for all that the launching thread is
    ahead of it with: nobody waits for memory.
    """
    from tests.fakegpu.timed import RuntimeClock

    clock = RuntimeClock(card.rates(), card.seconds_of(tokens))
    layer = sum(param.numel() for param in Block().parameters())
    room = gpu_cases.budget(2 * (micro_batches + 1) * layers * 2 * layer)
    memory = gemini.MemoryBudget(gpu=room, cpu="256MiB", nvme="1MiB", nvme_path=folder)
    config = gemini.GeminiConfig(
        memory=memory,
        placement=gemini.StaticPlacement(),
        max_chunk=2 * layer,
        gradients=gradients,  # type: ignore[arg-type]
    )
    with clock.running():
        model = gemini.GeminiDDP(Stack(layers), config)
        world = world_of(model)
        world.mover.tile = 2**20 // SCALE
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4, **how)
        x = torch.randn(4, HIDDEN, dtype=torch.bfloat16, device=model.device)
        for _ in range(3):
            backwards, begin, starved = [], clock.now, clock.starved
            for number in range(micro_batches):
                with model.no_sync() if number + 1 < micro_batches else contextlib.nullcontext():
                    loss = model(x)
                    since = clock.now
                    loss.backward()
                    backwards.append((since, clock.now))
            if not how:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            told = Timed(clock, begin, backwards, clock.now, clock.starved - starved)
        world.settle()
    assert clock.num_lost == 0, "a thread was waited for that nothing here knows of: the times are worth nothing"
    return told


INSIDE, GUESSED = {"step_in_backward": True}, {"step_in_backward": True, "speculate": True}
CASES = [
    (H100, 4096, "retain", 1, {}),
    (RTX4090, 4096, "retain", 1, {}),
    (H100, 4096, "accumulate", 2, {}),
    (RTX4090, 4096, "accumulate", 2, {}),
    (H100, 16384, "retain", 1, INSIDE),
    (H100, 16384, "retain", 1, GUESSED),
    (RTX4090, 16384, "retain", 1, GUESSED),
    (RTX4090, 8192, "accumulate", 2, GUESSED),
]


@pytest.mark.parametrize(("card", "tokens", "gradients", "micro_batches", "how"), CASES)
def test_gradients_leave_at_the_rate_of_the_link_and_nobody_waits_for_them(
    card: Card, tokens: int, gradients: str, micro_batches: int, how: Any, tmp_path: Path, summary: Any
) -> None:
    told = timed(card, tokens, tmp_path, gradients, micro_batches, **how)
    name = (
        f"{'H100' if card is H100 else '4090'}, {micro_batches} x {tokens}, {gradients}, {', '.join(how) or 'clipped'}"
    )
    seconds = told.end - told.begin
    summary(
        f"{name}: {seconds * 32 / LAYERS:.3f} s a step, gradients leave at {told.landed():.3f} of the link, the thread "
        f"that launches is blocked {told.blocked_in_backward():.3f} s in backward, nothing is queued for "
        f"{told.starved / seconds:.1%}"
    )
    assert told.blocked_in_backward() == 0
    assert told.landed() >= 0.9


def test_a_step_that_computes_for_longer_than_its_updates_take_is_always_queued(tmp_path: Path) -> None:
    """Up to the update of the block whose gradients come last, which is read first."""
    told = timed(RTX4090, 16384, tmp_path, "retain", 1, layers=32, **GUESSED)
    assert told.starved < 0.01 * (told.end - told.begin)


def test_the_same_step_takes_the_same_time(tmp_path: Path) -> None:
    def figures() -> list[float]:
        told = timed(H100, 2048, tmp_path, "accumulate", 2)
        return [told.end - told.begin, told.starved, told.landed(), *(b - a for a, b in told.backwards)]

    assert figures() == figures()
