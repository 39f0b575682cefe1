"""A write to an ordinary param that its master does not know of is refused, and leaves nothing behind.

Wherever weights are gathered copies, the refusal also undoes the write: the copy is dropped, nobody stays pinned.
"""

import gc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.planning.planes import GRAD
from tests import models
from tests.train.helpers import Blocks, adam, compare, llama, noise, on_batch, same_bits, squares, step_on, wrap
from tests.world import world_of


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_writes_in_gathered_without_write(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path, slack=2**20)
    before = {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}
    loss = on_batch(model, 0).item()
    params = [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight]
    with pytest.raises(gemini.ParamAccessError, match="written"), torch.no_grad():
        with model.gathered(params):
            for param in params:
                param.zero_()
    world_of(model).check()
    assert on_batch(model, 0).item() == loss, "the written copies were dropped"
    assert all(torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())


def halve(module: torch.nn.Module, *_: object) -> None:
    module.weight.data.mul_(0.5)


class Writes(Blocks):
    """Writes to its middle layer in one of the ways that torch's own count of versions does not see, or sees late."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        if way == "in a backward hook":
            self.layers[1].register_full_backward_hook(halve)
        elif way == "inside of its own call":
            self.layers[1].register_forward_pre_hook(halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[1].weight
        if self.way == "data in place":
            weight.data.clamp_(-0.01, 0.01)
        elif self.way == "other data":  # how momentum encoders are written
            weight.data = weight.data * 0.5
        elif self.way == "view":
            with torch.no_grad():
                weight[0].mul_(0.5)
        elif self.way == "after the call":
            x = super().forward(x)
            self.layers[1].weight.detach().mul_(0.5)
            return x
        return super().forward(x)


WAYS = (
    "data in place", "other data", "view", "inside of its own call", "after the call", "in a backward hook",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["ram", "disk", "standin", "serial"])
def test_writes_that_no_version_tells(way: str, where: str, tmp_path: Path) -> None:
    """The guard is up when some of these are made: they are noticed when the params are looked at next."""
    model = wrap(Writes(way), where, tmp_path, slack=2**17)
    before = model.full_param("layers.1.weight")
    with pytest.raises(gemini.ParamAccessError, match=r"'layers\.1\.weight' were written to inside"):
        optimizer = adam(model)
        squares(model, 0).backward()
        optimizer.step()
    if where != "ram":  # what stays in place was changed in place
        assert same_bits(model.full_param("layers.1.weight"), before)


@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_a_view_written_to_between_steps(where: str, tmp_path: Path) -> None:
    """A view that a program has kept is no param: the next that is done with the weights tells."""
    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    optimizer, kept = adam(model), []
    model.layers[1].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    squares(model, 0).backward()
    kept[0].zero_()
    with pytest.raises(gemini.ParamAccessError, match=r"'layers\.1\.weight' were written to"):
        optimizer.step()


@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_data_may_be_read_and_set_to_what_it_is(where: str, tmp_path: Path) -> None:
    class Reads(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                layer.weight.data = layer.weight.data.clone()  # as cuDNN does to make weights contiguous
                x = x / layer.weight.data.abs().max()
            return super().forward(x)

    compare(Reads, where, tmp_path, squares, slack=2**17)


def test_an_error_of_the_program_is_not_hidden_by_its_write(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path, slack=2**17)
    before = model.full_param("layers.1.weight")
    weight = model.layers[1].weight
    with pytest.raises(KeyError), model.gathered([weight], write=True):
        weight.data = torch.zeros_like(weight)
        raise KeyError
    assert same_bits(model.full_param("layers.1.weight"), before)
    model(noise(2, 5, 32))
    world_of(model).check()


def test_a_graph_does_not_keep_the_engine(tmp_path: Path) -> None:
    """Hooks on the results of operations that read another module's weights refer to the engine weakly."""

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.part.weight

    model = wrap(Reader(), "disk", tmp_path, slack=2**20)
    out = model(torch.ones(2, 8, dtype=torch.bfloat16))
    manager = world_of(model).reference()
    del model
    gc.collect()
    assert manager() is None and out.grad_fn is not None


class OfOneTensor(torch.nn.Module):
    """Params that are parts of one tensor, as projections cut out of a fused one are: torch counts writes to both of
    them together.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = map(torch.nn.Parameter, torch.randn(128, 64).div(8).chunk(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.query) @ self.key).square().mean()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("where", ["memory", "optimizer", "all"])
def test_a_write_of_ours_is_no_write_to_a_param_of_the_same_tensor(
    where: str, in_backward: bool, tmp_path: Path
) -> None:
    parts = {"memory": (0.0, 0.0), "optimizer": (0.0, 1.0), "all": (1.0, 1.0)}[where]
    config = gemini.GeminiConfig(
        precision="fp32",
        memory=gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path),
        placement=gemini.StaticPlacement(weights_on_nvme=parts[0], optimizer_on_nvme=parts[1]),
        max_chunk=4096,
    )
    plain, model = OfOneTensor(), gemini.GeminiDDP(OfOneTensor(), config)
    ours = gemini.HybridAdam(model.parameters(), lr=0.01, step_in_backward=in_backward)
    theirs = gemini.HybridAdam(plain.parameters(), lr=0.01)
    for step in range(3):
        for side, optimizer in ((plain, theirs), (model, ours)):
            side(noise(4, 64, seed=step, dtype=torch.float32)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert same_bits(model.full_param(name), param.detach()), name
    with (
        pytest.raises(gemini.ParamAccessError, match=r"weights of '(query|key)' were written"),
        model.gathered([model.query]),
    ):
        model.query.detach().zero_()


def test_a_model_that_was_never_whole_has_a_count_of_writes_for_each_param(tmp_path: Path) -> None:
    model = gemini.from_config(llama().config, gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB")))
    assert not any(handle.siblings for handle in world_of(model).handles)


class Clamps(Blocks):
    """As Gemma 3n does it: in every forward, to a part of its own, before that computes; mostly nothing changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.weight.data.clamp_(-120.0, 120.0)
        return super().forward(x)


@pytest.mark.parametrize("where", ["ram", "disk", "standin", "serial"])
def test_a_write_that_changes_nothing_is_none(where: str, tmp_path: Path) -> None:
    compare(Clamps, where, tmp_path, squares, slack=2**17)


# ---- observers of writes ---------------------------------------------------------------------------------------------

# Nothing that a checkpoint keeps changes before it was announced.

BATCHES = [batch for batches in models.make_batches(4, 1) for batch in batches]


class Watching:
    """Compares what every chunk holds when a change of it is first announced with what it held at the last look."""

    def __init__(self, world: Any):
        self._buffer = world.device.make_host_buffer(4 * max(chunk.spec.numel for chunk in world.chunks))
        self._whole = {chunk.spec.index: self._bits(chunk) for chunk in world.chunks}
        self._announced: set[int] = set()
        self.unannounced: list[int] = []
        self.closed = False

    def before_updates(self) -> None:
        """Said before the first change of a step."""

    def before_write(self, chunk: Any) -> None:
        index = chunk.spec.index
        if index not in self._announced and self._bits(chunk) != self._whole[index]:
            self.unannounced.append(index)
        self._announced.add(index)

    def close(self) -> None:
        self.closed = True

    def look(self, world: Any) -> set[int]:
        """The chunks that have changed since the last look."""
        world.settle()
        assert self.unannounced == []
        now = {chunk.spec.index: self._bits(chunk) for chunk in world.chunks}
        changed = {index for index, bits in now.items() if bits != self._whole[index]}
        assert changed <= self._announced, "chunks have changed and nobody was told"
        self._whole, self._announced = now, set()
        return changed

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
def test_every_change_is_announced(where: str, gradients: str, overlap: bool, tmp_path: Path) -> None:
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
            step_on(model(**batch).loss, optimizer)

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
    assert watching.look(world) == set()
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

        def close(self) -> None:
            pass

    observers += [Leaving("one"), Leaving("two")]
    observers.before_write(world_of(model).chunks[0])
    assert told == ["one", "two"] and not observers
