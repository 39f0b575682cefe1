"""Planes at every home, and the mover: what is stored comes back, through tiles of any size, and is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory_cases import MASTER, World

from gemini import kernels
from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, MemoryPlane, make_plane
from gemini.memory.devices.device import CpuDevice, Device
from gemini.memory.devices.pages import host_bytes
from gemini.memory.movement.mover import Mover, tiles
from gemini.memory.nvme import SpillFile
from gemini.memory.watching import Moved
from gemini.planning.layout import ALIGN, page_up
from gemini.planning.planes import ADAM, GRAD, WEIGHTS, PlaneSpec, plane_specs
from gemini.planning.working import TILE, staged_bytes, staging_bytes, tile_numel
from gemini.tiers import Tier
from tests.invariants import check_ledger
from tests.standin_device import StandinDevice

NUMEL = 9 * ALIGN
DTYPES = (torch.bfloat16, torch.int16, torch.float32)


@pytest.fixture(params=["cpu", "standin"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = CpuDevice() if request.param == "cpu" else StandinDevice()
    yield made
    made.close()


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    made = SpillFile(tmp_path, 8 * NUMEL)
    yield made
    made.close()


def homes(device: Device) -> list[Tier]:
    return [Tier.CPU, Tier.NVME] + ([Tier.GPU] if device.tier is Tier.GPU else [])


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, on a page of their own as transfers want them."""
    bits = torch.randint(-32768, 32767, (numel * dtype.itemsize // 2,), generator=torch.Generator().manual_seed(seed))
    return host_bytes(numel * dtype.itemsize).view(torch.int16).copy_(bits.to(torch.int16)).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_ranges_round_trip_on_every_tier(device: Device, spill: SpillFile, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for tier in homes(device):
        plane = make_plane(
            PlaneSpec(WEIGHTS, str(dtype).removeprefix("torch.")), NUMEL, tier, device, {Tier.NVME: spill}
        )
        assert plane.tier is tier and plane.num_bytes == NUMEL * dtype.itemsize
        truth = torch.zeros(NUMEL, dtype=dtype)
        back = host_bytes(NUMEL * dtype.itemsize).view(dtype)
        plane.load(0, NUMEL, back)
        assert torch.equal(bits(back), bits(truth)), "a new plane is zero"
        for turn in range(40):
            start, stop = sorted(rng.sample(range(10), 2))
            start, stop = start * ALIGN, stop * ALIGN
            data = numbers(stop - start, dtype, turn)
            plane.store(start, stop, data)
            truth[start:stop] = data
            start, stop = (n * ALIGN for n in sorted(rng.sample(range(10), 2)))
            into = host_bytes((stop - start) * dtype.itemsize).view(dtype)
            plane.load(start, stop, into)
            assert torch.equal(bits(into), bits(truth[start:stop])), (tier, turn)


def test_views_are_where_one_can_work(device: Device, spill: SpillFile) -> None:
    for tier in homes(device):
        plane = make_plane(MASTER, NUMEL, tier, device, {Tier.NVME: spill})
        host, there = plane.host_view(3, 7), plane.device_view(3, 7)
        assert (host is not None) == (tier is Tier.CPU)
        assert (there is not None) == (tier is device.tier)
        for view in (host, there):
            if view is not None:
                view.fill_(2)
                assert isinstance(plane, MemoryPlane) and plane.tensor[:9].tolist() == [0, 0, 0, 2, 2, 2, 2, 0, 0]


def test_a_tile_is_a_whole_norm_tile() -> None:
    assert TILE % kernels.NORM_TILE == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("gradients", ["transient", "retain", "accumulate"])
@pytest.mark.parametrize("trainable", [True, False])
def test_dtypes_have_the_sizes_that_are_reserved(precision: str, gradients: str, trainable: bool) -> None:
    """What the plan counts is what is allocated: 12 bytes per trained param, plus the gradient that was declared."""
    specs, staged = plane_specs(precision, gradients, trainable=trainable), staged_bytes(ALIGN, ADAM)
    sizes = {kind: spec.block_bytes for kind, spec in specs.items()}
    for kind, spec in specs.items():
        assert getattr(torch, spec.dtype).itemsize == sizes[kind]
        assert spec.num_bytes(ALIGN) <= staged[kind], "a staged tile has room for it"
    state = sum(size for kind, size in sizes.items() if kind != GRAD)
    assert state == (12 if trainable else COMPUTE_DTYPES[precision].itemsize)
    grad = {"transient": 0, "retain": COMPUTE_DTYPES[precision].itemsize, "accumulate": 4}[gradients]
    assert sizes.get(GRAD, 0) == (grad if trainable else 0)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start,stop,tile", [(0, 1, 4), (0, 8, 4), (3, 21, 5), (7, 7, 3), (10, 1000, 1)])
def test_tiles_cover_once_and_in_order(start: int, stop: int, tile: int) -> None:
    parts = list(tiles(start, stop, tile))
    assert [n for a, b in parts for n in range(a, b)] == list(range(start, stop))
    assert all(b - a == tile for a, b in parts[:-1]) and all(0 < b - a <= tile for a, b in parts)


def test_page_up_and_tile_sizes() -> None:
    for numel in (1, ALIGN - 1, ALIGN, ALIGN + 1, 10 * ALIGN):
        assert page_up(numel) % ALIGN == 0 and 0 <= page_up(numel) - numel < ALIGN
    assert page_up(0) == 0
    assert tile_numel(100) == 100 and tile_numel(10**9) == TILE
    assert staging_bytes(tile_numel(900_000_000)) == staging_bytes(tile_numel(2 * TILE)) == 18 * TILE


def test_staging_does_not_grow(device: Device) -> None:
    """One area per kind of plane, of one tile, whatever is asked of it and how often."""
    ledger = Ledger({Tier.CPU: 2**20})
    mover = Mover(device, 2 * ALIGN, ledger)
    assert ledger.used(Tier.CPU) == 0
    seen = {kind: mover.staging.own.staged(kind, torch.uint8, 1).data_ptr() for kind in ADAM.kinds}
    assert len(set(seen.values())) == len(ADAM.kinds)
    for _ in range(3):
        for kind in ADAM.kinds:
            part = mover.staging.own.staged(kind, torch.int16, 2 * ALIGN)
            assert part.data_ptr() == seen[kind] and part.data_ptr() % 4096 == 0 and part.numel() == 2 * ALIGN
    held = mover.staging.own._memory.get().numel()
    assert held == staging_bytes(2 * ALIGN) == ledger.used(Tier.CPU), "reserved, even where nobody did before"


@pytest.mark.parametrize("home", [Tier.CPU, Tier.NVME, Tier.GPU])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gathering_brings_every_element_and_counts_bytes(tmp_path: Path, home: Tier, precision: str) -> None:
    """Tiles that divide the chunk and tiles that do not; bytes are counted at the boundaries they cross."""
    device = StandinDevice()
    for size in (1, 2, 5, 8):
        world = World([size], device, 2**22, home, tmp_path, precision, beside=2**22)
        chunk = world.chunks[0]
        if precision == "fp16":  # the home is the wider fp32 master
            chunk.planes[WEIGHTS] = make_plane(MASTER, chunk.spec.numel, Tier.CPU, device, {})
        numel = chunk.spec.numel
        content = host_bytes(numel * 4).view(torch.float32).copy_(torch.arange(numel).float().remainder(251))
        plane = chunk.weights
        plane.store(0, numel, host_bytes(numel * plane.dtype.itemsize).view(plane.dtype).copy_(content))
        world.mover.watch.moved = Moved()
        world.manager.acquire(chunk)
        assert torch.equal(chunk.flat.float(), content)
        source = chunk.weights.tier
        # A wider master is cast on the host; what comes from the drive crosses host memory.
        crossed = {"cpu->gpu": chunk.spec.numel * chunk.flat.element_size(), "nvme->cpu": chunk.weights.num_bytes}
        through = {Tier.GPU: (), Tier.CPU: ("cpu->gpu",), Tier.NVME: ("nvme->cpu", "cpu->gpu")}[source]
        assert world.mover.watch.moved.counts() == {way: crossed[way] for way in through}
        world.manager.release(chunk)
        check_ledger(world.ledger)
    device.close()
