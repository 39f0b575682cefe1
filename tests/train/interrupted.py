"""Operations that are interrupted at a :class:`~tests.train.moments.Moment`, and what must be so afterwards.

A :class:`World` is a small managed model in a state that is always the same. After an interrupt in an operation nothing
hangs and no lock is held, the state is that of before the operation or that of after it, in every bit (or a
GeminiError says what to do), and training goes on from there to the bits that it would have had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import call_without_grad
from gemini.waiting import on_worker
from tests.train.helpers import Blocks, Chain, adam, make_config, noise, same_bits, snapshot, squares, train
from tests.train.moments import Moment, held_locks, interrupt_at, locks_of, moments_of, no_hang
from tests.world import world_of

Snapshot = dict[str, dict[str, torch.Tensor]]


def same(a: Snapshot, b: Snapshot) -> bool:
    return all(same_bits(value, b[name][kind]) for name, planes in a.items() for kind, value in planes.items())


@contextlib.contextmanager
def slow_updates(seconds: float = 0.002) -> Iterator[None]:
    """Those of the worker: the training thread overtakes them, and waits."""
    real = kernels.update

    def update(*args: Any, **kwargs: Any) -> Any:
        if on_worker():
            time.sleep(seconds)
        return real(*args, **kwargs)

    kernels.update = update
    try:
        yield
    finally:
        kernels.update = real


class Checkpointed(Blocks):
    """What its blocks are given is recomputed from, and large enough to be offloaded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda given, layer=layer: torch.tanh(layer(given)), x, use_reentrant=False)
        return x


class World:
    """A model, its optimizer, and the state of it that every trial begins in.

    ``inside``: it updates in backward. ``offloads``: it has activations, which are offloaded. ``averaged``: its params
    have moving averages. ``chained``: its steps can be made block by block.
    """

    def __init__(
        self,
        where: str,
        path: Path,
        *,
        inside: bool = False,
        offloads: bool = False,
        averaged: bool = False,
        chained: bool = False,
    ):
        self.path, self.offloads = path, offloads
        make: type[Blocks] = Checkpointed if offloads else Chain if chained else Blocks
        how: dict[str, Any] = {"gradients": "transient"} if inside else {}
        config = dataclasses.replace(
            make_config(make(), where, path, slack=2**18 if offloads else 2**16, **how), update_threads=1
        )
        if averaged:
            config = dataclasses.replace(config, optimizer=gemini.optim.AveragedRule(decay=0.5))
        if offloads:
            memory = dataclasses.replace(config.memory, nvme="64MiB", nvme_path=path)
            config = dataclasses.replace(config, memory=memory, offload_activations="nvme")
        self.model: Any = gemini.GeminiDDP(make(), config)
        assert world_of(self.model).transfers.beside, "it overlaps"
        self.optimizer = adam(self.model, step_in_backward=inside)
        self.clip = None if inside else 1.0
        train(self.model, self.optimizer, [0], self.loss, clip=self.clip)
        gemini.save_checkpoint(path / "older", self.model, self.optimizer)
        train(self.model, self.optimizer, [1], self.loss, clip=self.clip)
        gemini.save_checkpoint(path / "start", self.model, self.optimizer)

    def loss(self, model: Any, seed: int) -> torch.Tensor:
        return model(noise(256, 32, seed=seed)).float().square().mean() if self.offloads else squares(model, seed)

    def load(self, name: str) -> None:
        gemini.load_checkpoint(self.path / name, self.model, self.optimizer)

    def reset(self) -> None:
        self.optimizer.zero_grad()
        self.load("start")

    def drain(self) -> None:
        world_of(self.model).settle()

    def snapshot(self) -> Snapshot:
        self.drain()
        return snapshot(self.model)

    def go_on(self) -> Snapshot:
        """One more step."""
        train(self.model, self.optimizer, [7], self.loss, clip=self.clip)
        return self.snapshot()


class Operation:
    """``prepare`` is not interrupted, ``run`` is; ``end`` ends what an interrupted one has left to the program."""

    inside = offloads = averaged = chained = False

    def prepare(self, world: World) -> None:
        world.reset()

    def run(self, world: World) -> None:
        raise NotImplementedError

    def end(self, world: World) -> None:
        world.optimizer.zero_grad()


class Step(Operation):
    def run(self, world: World) -> None:
        world.loss(world.model, 3).backward()
        if world.clip is not None:
            world.model.clip_grad_norm_(world.clip)
        world.optimizer.step()
        world.drain()
        world.optimizer.zero_grad()


class StepInside(Step):
    """One that has begun to update is made whole before it is interrupted; ``step`` then says that it is over."""

    inside = True

    def end(self, world: World) -> None:
        world.optimizer.step()
        super().end(world)


class StepOffloaded(Step):
    offloads = True


def half_of_squares(output: torch.Tensor, part: Any) -> torch.Tensor:
    return output.float().square().mean() / 2


class StepByBlocks(Operation):
    chained = True

    def run(self, world: World) -> None:
        parts = [{"x": noise(2, 5, 32, seed=seed)} for seed in (3, 4)]
        gemini.train_step(world.model, parts, half_of_squares)
        world.optimizer.step()
        world.drain()
        world.optimizer.zero_grad()


class SwappedIn(Operation):
    averaged = True

    def run(self, world: World) -> None:
        with gemini.EMA(world.model).swapped_in():
            world.model.full_param("layers.1.weight")


class Parked(Operation):
    def run(self, world: World) -> None:
        with world.model.parked():
            world.model.full_param("layers.1.weight")

    def end(self, world: World) -> None:
        with world.model.parked():
            pass  # one that was interrupted on its way back comes back
        super().end(world)


class Drain(Operation):
    def prepare(self, world: World) -> None:
        super().prepare(world)
        world.loss(world.model, 3).backward()
        world.optimizer.step()

    def run(self, world: World) -> None:
        world.drain()
        world.optimizer.zero_grad()


class ForwardBackward(Operation):
    def run(self, world: World) -> None:
        world.loss(world.model, 3).backward()
        world.optimizer.zero_grad()


class Save(Operation):
    """The folder holds the older checkpoint or the newer one, whole."""

    wait = True

    def prepare(self, world: World) -> None:
        super().prepare(world)
        for left in world.path.glob("saved*"):
            shutil.rmtree(left)
        shutil.copytree(world.path / "older", world.path / "saved")

    def run(self, world: World) -> None:
        pending = gemini.save_checkpoint(world.path / "saved", world.model, world.optimizer, wait=self.wait)
        if pending is not None:
            pending.wait()

    def end(self, world: World) -> None:
        super().end(world)
        world.snapshot()
        world.load("saved")


class SaveBehind(Save):
    wait = False


class Load(Operation):
    def prepare(self, world: World) -> None:
        world.optimizer.zero_grad()
        world.load("older")

    def run(self, world: World) -> None:
        world.load("start")


class LoadStates(Operation):
    def prepare(self, world: World) -> None:
        super().prepare(world)
        world.load("older")
        self.states = world.optimizer.state_dict()
        world.load("start")

    def run(self, world: World) -> None:
        world.optimizer.load_state_dict(self.states)


class LoadWeights(Operation):
    def prepare(self, world: World) -> None:
        super().prepare(world)
        self.weights = {name: value + 1 for name, value in world.model.state_dict().items()}

    def run(self, world: World) -> None:
        world.model.load_state_dict(self.weights)


class GatheredWrite(Operation):
    def run(self, world: World) -> None:
        with world.model.gathered(write=True):
            for param in world.model.parameters():  # torch.no_grad() is left on by an interrupt in itself
                call_without_grad(param.copy_, torch.full_like(param, 0.5))


OPERATIONS: dict[str, type[Operation]] = {
    "step": Step, "step inside": StepInside, "step offloaded": StepOffloaded, "drain": Drain,
    "forward and backward": ForwardBackward, "save": Save, "save behind": SaveBehind, "load": Load,
    "load states": LoadStates, "load weights": LoadWeights,
    "gathered write": GatheredWrite, "step by blocks": StepByBlocks, "swapped in": SwappedIn, "parked": Parked,
}  # fmt: skip


def make_trials(where: str, name: str, path: Path) -> Trials:
    """Of the operation of that name, in a world of its own."""
    operation = OPERATIONS[name]()
    how = {of: getattr(operation, of) for of in ("inside", "offloads", "averaged", "chained")}
    return Trials(World(where, path, **how), operation)


class Trials:
    """Of one operation in one world.

    ``outcomes`` counts them: "before", "after", "error" (a GeminiError, and loading a checkpoint was the way on),
    "unsent" (the moment did not come this time), and "lost", of those before, where Python dropped the interrupt
    because it came inside a finalizer.
    """

    def __init__(self, world: World, operation: Operation):
        self.world, self.operation = world, operation
        self.outcomes = dict.fromkeys(("before", "after", "error", "unsent", "lost"), 0)
        self._is_lost = False
        self.taken = traceback.StackSummary()
        """Where the last interrupt took effect."""
        operation.prepare(world)
        operation.end(world)
        self.before = self._with_next()
        for _ in range(2):  # the first one does what is done once
            operation.prepare(world)
            operation.run(world)
        operation.end(world)
        self.after = self._with_next()
        self.locks = locks_of(world_of(world.model).root)
        world.reset()
        world.go_on()
        self.held = self.held_bytes()

    def _with_next(self) -> tuple[Snapshot, Snapshot]:
        now = self.world.snapshot()
        return now, self.world.go_on()

    def held_bytes(self) -> dict[Any, dict[str, int]]:
        """What the ledger says that holders have who do not come and go within a step."""
        world_of(self.world.model).backward.gradients.drain()  # what has landed gives its bytes back with the next look
        ledger, passing = world_of(self.world.model).ledger, ("windows", "pool")
        return {
            tier: {holder: held for holder, held in ledger.holders(tier).items() if holder not in passing}
            for tier in ledger.tiers
        }

    def moments(self, *, silent: bool = False) -> list[Moment]:
        with slow_updates():
            self.operation.prepare(self.world)
            return moments_of(lambda: self.operation.run(self.world), silent=silent)

    def at(self, moment: Moment) -> None:
        """One trial.

        Raises:
            AssertionError: for what must not be.
        """
        world, operation = self.world, self.operation
        sent = interrupted = False
        self.taken = traceback.StackSummary()
        handler = signal.getsignal(signal.SIGINT)
        with no_hang(), self._notes_lost(), slow_updates():
            operation.prepare(world)
            try:
                sent = interrupt_at(moment, lambda: operation.run(world))
            except KeyboardInterrupt as e:
                sent = interrupted = True
                self.taken = traceback.extract_tb(e.__traceback__)
            assert signal.getsignal(signal.SIGINT) is handler, "the handler of SIGINT is another one"
            assert torch.is_grad_enabled(), "autograd is off"
            try:
                operation.end(world)
                now = world.snapshot()
                held = held_locks(self.locks)
                assert not held, f"held: {held}"
                world_of(world.model).check()
            except GeminiError:
                self.outcomes["error"] += 1
                world.reset()
                assert same(self.world.snapshot(), snapshot(world.model))
                return
            which = "before" if interrupted and same(self.before[0], now) else "after"
            begun, following = self.before if which == "before" else self.after
            assert same(begun, now), "the state is neither that of before nor that of after"
            assert same(following, world.go_on()), "training goes on to other bits"
            assert (held := self.held_bytes()) == self.held, (
                f"the ledger says that others hold something: {held}, not {self.held}"
            )
        self.outcomes[which if sent else "unsent"] += 1
        self.outcomes["lost"] += sent and not interrupted and self._is_lost

    @contextlib.contextmanager
    def _notes_lost(self) -> Iterator[None]:
        """Python says of an exception in a finalizer that it ignores it, and does."""
        self._is_lost, before = False, sys.unraisablehook

        def note(raised: Any) -> None:
            if isinstance(raised.exc_value, KeyboardInterrupt):
                self._is_lost = True
            else:
                before(raised)

        sys.unraisablehook = note
        try:
            yield
        finally:
            sys.unraisablehook = before
