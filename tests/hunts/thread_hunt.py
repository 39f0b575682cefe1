"""Hunt for threads that disturb each other: one trains while others draw work of their own on the same model.

    python tests/hunts/thread_hunt.py --seeds 0:200

Training has to have the bits of a run without the others, and nobody may fail or stand still. What may be said of a
thread is torch's own word for a backward whose weights were updated meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from tests.train.helpers import ALL_PLACEMENTS, adam, make_config, noise, same_bits
from tests.world import world_of

WIDTH, DEPTH, STEPS = 32, 4, 6


class Net(nn.Module):
    """Blocks, if asked checkpointed, behind the gradient of an energy that is taken inside of the forward."""

    def __init__(self, forces: bool, checkpointed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.energy = nn.Linear(WIDTH, 1)
        self.forces, self.checkpointed = forces, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forces:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                energy = self.energy(self._block(0, at)).sum()
                x = x + torch.autograd.grad(energy, at, create_graph=self.training)[0]
        for number in range(DEPTH):
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(self._block, number, x, use_reentrant=False)
            else:
                x = self._block(number, x)
        return x

    def _block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[number](x))


def inputs(seed: int) -> torch.Tensor:
    return noise(3, WIDTH, seed=seed, dtype=torch.float32)


def evaluate(model: Any, rng: random.Random) -> None:
    with torch.no_grad():
        model(inputs(rng.randrange(5)))


def infer(model: Any, rng: random.Random) -> None:
    with contextlib.nullcontext() if model.forces else torch.inference_mode():  # forces need a graph
        model(inputs(rng.randrange(5)))


def drop_a_graph(model: Any, rng: random.Random) -> None:
    model(inputs(rng.randrange(5))).sum()


def grad_of_inputs(model: Any, rng: random.Random) -> None:
    x = inputs(rng.randrange(5)).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def call_a_block(model: Any, rng: random.Random) -> None:
    with torch.no_grad():
        model.layers[rng.randrange(DEPTH)](inputs(0))


def read_gathered(model: Any, rng: random.Random) -> None:
    layer = model.layers[rng.randrange(DEPTH)]
    with model.gathered(list(layer.parameters())):
        layer.weight.sum().item()


def evaluate_in_a_thread(model: Any, rng: random.Random) -> None:
    thread = threading.Thread(target=evaluate, args=(model, rng))
    thread.start()
    thread.join()


def functional_call(model: Any, rng: random.Random) -> None:
    with torch.no_grad():
        torch.func.functional_call(model, {}, (inputs(rng.randrange(5)),))


WORK: list[Callable[[Any, random.Random], Any]] = [
    evaluate,
    infer,
    drop_a_graph,
    grad_of_inputs,
    call_a_block,
    read_gathered,
    evaluate_in_a_thread,
    functional_call,
    lambda model, _: model.full_param("layers.1.weight"),
    lambda model, _: model.state_dict(),
    lambda model, _: model.layers[0].weight.detach().clone(),
    lambda model, _: model.memory_report(),
    lambda model, _: list(gemini.weights_for(model)),
    lambda model, _: gemini.EMA(model).full_param("layers.2.weight") if averages(model) else None,
]


def averages(model: Any) -> bool:
    return isinstance(world_of(model).config.optimizer, gemini.optim.AveragedRule)


@dataclass(frozen=True)
class Mix:
    """What is drawn for one seed."""

    where: str
    forces: bool
    checkpointed: bool
    saves: bool
    behind: bool
    others: tuple[int, ...]
    loop: str = "plain"
    averaged: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Mix:
        rng = random.Random(seed)
        others = tuple(rng.randrange(len(WORK)) for _ in range(rng.choice((1, 2, 3))))
        return cls(
            rng.choice(sorted(ALL_PLACEMENTS)),
            forces=rng.random() < 0.4,
            checkpointed=rng.random() < 0.3,
            saves=rng.random() < 0.4,
            behind=rng.random() < 0.4,
            others=others,
            loop=rng.choice(("plain", "micro_batch", "train_step")),
            averaged=rng.random() < 0.5,
        )


class Others:
    """Threads that repeat their work until the block ends; what one of them raises is kept in ``errors``."""

    def __init__(self, model: Any, works: tuple[int, ...], seed: int):
        self.errors: list[str] = []
        self._model, self._is_over = model, threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work, random.Random(seed * 10 + number)))
            for number, work in enumerate(works)
        ]

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: int, rng: random.Random) -> None:
        while not self._is_over.is_set():
            try:
                WORK[work](self._model, rng)
            except Exception as e:
                if "modified by an inplace operation" not in str(e):  # its weights were updated meanwhile
                    self.errors.append(f"work {work}: {traceback.format_exc()}")
                    return


def forward_and_backward(model: Any, number: int) -> float:
    loss = model(inputs(number)).square().mean()
    loss.backward()
    return loss.item()


def train(model: Any, mix: Mix, folder: Path) -> list[float]:
    optimizer, losses = adam(model), []
    for number in range(STEPS):
        if mix.loop == "train_step":
            parts = [{"x": inputs(number)}, {"x": inputs(number + 50)}]
            losses += gemini.train_step(model, parts, lambda output, part: output.square().mean() / 2).tolist()
        elif mix.loop == "micro_batch":
            losses.append(model.micro_batch(partial(forward_and_backward, model, number)))
        else:
            losses.append(forward_and_backward(model, number))
        optimizer.step()
        optimizer.zero_grad()
        if mix.saves and number % 2:
            gemini.save_checkpoint(folder / "saved", model, optimizer, wait=not mix.behind)
    return losses


def run(seed: int) -> str:
    """Train alone and beside the others: "right", or what went wrong."""
    mix = Mix.drawn(seed)
    found = []
    for others in ((), mix.others):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            net = Net(mix.forces, mix.checkpointed)
            config = make_config(net, mix.where, Path(folder), precision="fp32", slack=2**17)
            if mix.averaged:
                config = replace(config, optimizer=gemini.optim.AveragedRule(decay=0.5))
            model: Any = gemini.GeminiDDP(net, config)
            errors = []
            with Others(model, others, seed) as beside:
                try:
                    losses = train(model, mix, Path(folder))
                except Exception:
                    errors.append(f"training: {traceback.format_exc()}")
            errors += beside.errors
            if errors:
                return f"ERROR {seed} {mix}: {errors[0]}"
            found.append((losses, {name: model.full_param(name) for name, _ in model.named_parameters()}))
            world_of(model).check()
            world_of(model).close()
    (alone, weights), (together, others_weights) = found
    if alone != together or not all(same_bits(value, others_weights[name]) for name, value in weights.items()):
        return f"SILENT {seed} {mix}"
    return "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST (LAST is left out)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one seed; then every stack is written")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    counts = Counter[str]()
    for seed in range(*map(int, chosen.seeds.split(":"))):
        faulthandler.dump_traceback_later(chosen.limit, exit=True)
        print(f"\r{seed}", end="", flush=True, file=sys.stderr)
        told = run(seed)
        counts[told.split()[0]] += 1
        if told != "right":
            print(told, flush=True)
    print(dict(counts))
    return int(set(counts) != {"right"})


if __name__ == "__main__":
    sys.exit(main())
