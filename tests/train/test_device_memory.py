"""What an engine asks of a device with memory of its own: host memory once, order without waiting, figures.

The stand-in is that device, with one promise of CUDA's less at a time, or with books like its allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Event
from gemini.tiers import Tier
from tests import invariants
from tests.standin_device import StandinDevice
from tests.train.helpers import batch, llama, manage, train
from tests.world import world_of


class Arranged(StandinDevice):
    """Planes that cross are named before, as on CUDA; its memory has an allocator's books."""

    def __init__(self) -> None:
        super().__init__()
        self.planes: list[tuple[str, int]] = []
        self.kept: list[int] = []
        self.for_windows: list[int] = []
        self.figures: dict[str, int] = {}
        self.lost = 0

    def reserve_host(self, planes: Sequence[tuple[str, int]]) -> None:
        self.planes += planes

    def make_kept_buffer(self, num_bytes: int) -> torch.Tensor:
        self.kept.append(num_bytes)
        return super().make_host_buffer(num_bytes)

    def reserve_windows(self, num_bytes: int) -> None:
        self.for_windows.append(num_bytes)

    def memory_figures(self) -> dict[str, int]:
        return self.figures

    def bytes_behind(self, tensors: Iterable[torch.Tensor]) -> int | None:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors) - self.lost


def wrap(device: StandinDevice, path: Path, gpu: str = "320KiB", **settings: Any) -> tuple[Any, gemini.HybridAdam]:
    homes = {"weights_on_gpu": 0.3, "optimizer_on_gpu": 0.2, "weights_on_nvme": 0.2, "optimizer_on_nvme": 0.2}
    model = manage(llama(), path, device, gpu=gpu, homes=homes, **{"max_chunk": 4096, **settings})
    return model, gemini.HybridAdam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("streamed", [False, True], ids=["updated on the host", "streamed"])
def test_only_what_crosses_the_bus_is_registered(streamed: bool, tmp_path: Path) -> None:
    """Of 14 bytes per param 4: weights and gradients; all where updates pass through the GPU."""
    device = Arranged()
    homes = {"updates_on_gpu": 1} if streamed else {}
    model = manage(llama(), tmp_path, device, gpu="8MiB", homes=homes, gradients="retain", max_chunk=4096)
    chunks = world_of(model).chunks
    kinds = {kind: sum(chunk.planes[kind].num_bytes for chunk in chunks) for kind in chunks[0].planes}
    named = {kind: [name for name, _ in device.planes if name.startswith(f"{kind} of")] for kind in kinds}
    crossing = [kind for kind in kinds if streamed or kind in ("weights", "grad")]
    assert {kind: len(names) for kind, names in named.items()} == {
        kind: len(chunks) if kind in crossing else 0 for kind in kinds
    }
    kept = sum(kinds[kind] for kind in kinds if kind not in crossing)
    assert kept <= sum(device.kept) <= 1.2 * kept, "in whole pages"
    made = [chunk.planes[kind].num_bytes for chunk in chunks for kind in chunk.planes if kind in crossing]
    assert sorted(size for _, size in device.planes) == sorted(made), "each has its place"


@pytest.mark.parametrize(
    ("precision", "gpu", "overlap"), [("bf16", "200KiB", True), ("bf16", "8MiB", False), ("fp16", "320KiB", True)]
)
def test_windows_have_what_planes_leave(tmp_path: Path, precision: str, gpu: str, overlap: bool) -> None:
    device = Arranged()
    model, optimizer = wrap(device, tmp_path, gpu, precision=precision, overlap=overlap)
    train(model, optimizer, range(3), clip=None)
    world = world_of(model)
    windows = sum(chunk.window.num_bytes for chunk in world.chunks if chunk.window is not None)
    planes = world.used(Tier.GPU) - sum(world.held(Tier.GPU, holder) for holder in ("windows", "pool"))
    problem, placement = world.problem, world.placement
    left = world.budget(Tier.GPU) - planes - problem.waiting_in(placement)
    left = max(left, problem.working_set)
    assert device.for_windows == [min(windows, left)] and (windows < left) == (gpu == "8MiB")


class NotYet(Event):
    """A copy out of a chunk's home that the device has not made: what waits for it on the host is noted."""

    def __init__(self, chunk: Chunk):
        super().__init__()
        self._plane = chunk.weights
        self._before = self._content()
        self.untouched: bool | None = None

    def _content(self) -> torch.Tensor | None:
        view = self._plane.host_view(0, self._plane.numel)
        return None if view is None else view.clone()

    def wait(self, timeout: float = 1.0) -> None:
        if self.untouched is None:
            now = self._content()
            self.untouched = now is None or torch.equal(now, self._before)  # type: ignore[arg-type]
        self.finish()

    def wait_on_device(self) -> None:
        pass


def load(model: Any, optimizer: gemini.HybridAdam) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def load_states(model: Any, optimizer: gemini.HybridAdam) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def step(model: Any, optimizer: gemini.HybridAdam) -> None:
    optimizer.step()
    world_of(model).settle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("write", [step, load, load_states])
def test_who_changes_a_chunk_waits_for_the_copies_out_of_it(tmp_path: Path, write: Callable, overlap: bool) -> None:
    model, optimizer = wrap(StandinDevice(), tmp_path, overlap=overlap)
    train(model, optimizer, range(2), clip=None)
    model(**batch(5)).loss.backward()
    world = world_of(model)
    world.settle()
    moving = [chunk for chunk in world.chunks if not chunk.resident]
    for chunk in moving:
        chunk.fetched = NotYet(chunk)
    copies = [chunk.fetched for chunk in moving]
    write(model, optimizer)
    assert len(copies) > 3 and all(copy.untouched for copy in copies), [copy.untouched for copy in copies]


def test_what_was_written_to_gathered_weights_waits_too(tmp_path: Path) -> None:
    model, optimizer = wrap(StandinDevice(), tmp_path)
    train(model, optimizer, range(2), clip=None)
    world = world_of(model)
    chunk = next(c for c in world.chunks if not c.resident and c.weights.tier is Tier.CPU)
    param = world.by_chunk[chunk.spec.index][0].param
    with model.gathered([param], write=True), torch.no_grad():
        param.add_(1)
        copy = chunk.fetched = NotYet(chunk)
    assert copy.untouched


def test_the_report_shows_what_the_allocator_and_the_driver_say(tmp_path: Path) -> None:
    device = Arranged()
    model, optimizer = wrap(device, tmp_path)
    train(model, optimizer, range(1), clip=None)
    report = model.memory_report()
    assert "allocator" not in report and "says" not in str(report)
    used = report["gpu"]["used"]
    device.figures = {
        "allocated": used + 1000, "allocated_peak": used + 3000, "reserved": used + 5000, "reserved_peak": 2**20,
        "driver": used + 25000,
    }  # fmt: skip
    report = model.memory_report()
    assert report["allocator"] == device.figures | {"unmanaged": 1000, "cached": 4000, "elsewhere": 20000}
    lines = [line for line in str(report).splitlines() if "says" in line]
    assert len(lines) == 2 and "1000 B of it not managed here" in lines[0] and "(peak 1 MiB)" in lines[0]
    assert "says the driver" in lines[1] and "19.53 KiB of it not by torch" in lines[1]


def test_room_that_was_declared_for_activations_is_not_managed_memory(tmp_path: Path) -> None:
    device = Arranged()
    settings = {"gpu": "4MiB", "nvme": None, "activations": "1MiB", "max_chunk": 4096}
    model = manage(llama(), tmp_path, device, **settings)
    device.figures = dict.fromkeys(("allocated", "allocated_peak", "reserved", "reserved_peak", "driver"), 3 * 2**20)
    report = model.memory_report()
    assert report["allocator"]["unmanaged"] == 3 * 2**20 - (report["gpu"]["used"] - 2**20)


@pytest.mark.parametrize("what", ["windows", "planes"])
def test_books_that_differ_from_the_allocator_s_are_found(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Arranged()
    model, optimizer = wrap(device, tmp_path)
    train(model, optimizer, range(2), clip=None)
    world = world_of(model)
    world.check()
    assert world.held(Tier.GPU, "windows") and world.held(Tier.GPU, "weights")
    if what == "planes":
        monkeypatch.setattr(invariants, "check_manager", lambda manager: None)
    device.lost = 4096
    with pytest.raises(AssertionError, match=f"bytes of {what} are .* bytes of the allocator's"):
        world.check()
