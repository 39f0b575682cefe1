"""Observers of writes: nothing that a checkpoint keeps changes before it was announced or after it was called whole."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.planning.planes import GRAD
from tests import models
from tests.train.helpers import adam, wrap
from tests.world import world_of

BATCHES = [batch for batches in models.make_batches(4, 1) for batch in batches]


class Watching:
    """Compares what every chunk holds when a change begins with what it held when the one before was complete."""

    def __init__(self, world: Any):
        self._buffer = world.device.make_host_buffer(4 * max(chunk.spec.numel for chunk in world.chunks))
        self._whole = {chunk.spec.index: self._bits(chunk) for chunk in world.chunks}
        self._open = dict.fromkeys(self._whole, 0)
        self.changed: set[int] = set()
        self.unannounced: list[int] = []
        self.num_steps = 0
        self.closed = False

    def before_updates(self) -> None:
        """Said before the first change of a step."""

    def before_write(self, chunk: Any) -> None:
        index = chunk.spec.index
        if self._open[index] == 0 and self._bits(chunk) != self._whole[index]:
            self.unannounced.append(index)
        self._open[index] += 1

    def after_write(self, chunk: Any) -> None:
        index = chunk.spec.index
        self._open[index] -= 1
        if self._open[index] == 0:
            bits = self._bits(chunk)
            if bits != self._whole[index]:
                self.changed.add(index)
            self._whole[index] = bits

    def step_ended(self) -> None:
        self.num_steps += 1

    def close(self) -> None:
        self.closed = True

    def look(self, world: Any) -> set[int]:
        """The chunks that have changed since the last look."""
        world.settle()
        assert self.unannounced == [] and set(self._open.values()) == {0}
        for chunk in world.chunks:
            assert self._bits(chunk) == self._whole[chunk.spec.index], f"{chunk.name} has changed and nobody was told"
        found, self.changed = self.changed, set()
        return found

    def _bits(self, chunk: Any) -> list[int]:
        return [self._sum(plane) for kind, plane in chunk.planes.items() if kind != GRAD]

    def _sum(self, plane: Any) -> int:
        numel = plane.numel
        view = plane.host_view(0, numel)
        if view is None:
            view = plane.device_view(0, numel)
        if view is None:
            view = self._buffer[: numel * plane.dtype.itemsize].view(plane.dtype)
            plane.load(0, numel, view)
        return zlib.crc32(view.cpu().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("gradients", ["retain", "transient"])
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_change_is_announced_and_said_to_be_whole(
    where: str, gradients: str, overlap: bool, tmp_path: Path
) -> None:
    memory: Any = {"cpu": "64MiB", "gpu": "1MiB" if where == "standin" else None}
    if where != "ram":
        memory |= {"nvme": "64MiB", "nvme_path": tmp_path}
    config = gemini.GeminiConfig(
        memory=gemini.MemoryBudget(**memory), device="standin" if where == "standin" else "cpu", overlap=overlap,
        placement="auto" if where == "ram" else gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=1.0),
        gradients=gradients, max_chunk=4096,
    )  # fmt: skip
    model: Any = gemini.GeminiDDP(models.make_model("llama"), config)
    optimizer = adam(model, step_in_backward=gradients == "transient")
    world = world_of(model)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    watching = Watching(world)
    world.write_observers.append(watching)
    every = set(range(len(world.chunks)))

    def steps() -> None:
        for batch in BATCHES[:2]:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def by_name() -> None:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})

    def moments() -> None:
        state = optimizer.state_dict()
        for of_param in state["state"].values():
            of_param["exp_avg"] = of_param["exp_avg"] * 2
        optimizer.load_state_dict(state)

    def gathered() -> None:
        with model.gathered(write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)

    def load() -> None:
        gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)

    changes: list[Callable[[], None]] = [steps, by_name, moments, gathered, load]
    for change in changes:
        change()
        assert watching.look(world) == every, change.__name__
    model(**BATCHES[0])
    model.full_param("lm_head.weight")
    assert watching.look(world) == set() and watching.num_steps == 2
    world.close()
    assert watching.closed


def test_two_observers_are_told_and_one_may_go_while_it_is(tmp_path: Path) -> None:
    model = wrap(torch.nn.Linear(4, 4), "ram", tmp_path)
    observers, told = world_of(model).write_observers, []

    class Leaving:
        def __init__(self, name: str):
            self.name = name

        def before_updates(self) -> None: ...

        def before_write(self, chunk: Any) -> None:
            told.append(self.name)
            observers.remove(self)

        def after_write(self, chunk: Any) -> None:
            told.append(f"{self.name} after")

        def step_ended(self) -> None:
            pass

        def close(self) -> None:
            pass

    observers += [Leaving("one"), Leaving("two")]
    with observers.writing(world_of(model).chunks[0]):
        assert told == ["one", "two"]
    assert told == ["one", "two"] and not observers
