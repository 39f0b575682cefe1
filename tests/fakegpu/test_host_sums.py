"""Gradients that the host adds up in the order of streams: bits, order, and what goes wrong on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import kernels
from gemini.memory.devices.cuda import CudaDevice
from gemini.tiers import Tier
from gemini.train.gradients.store import HOLDER, _Flight
from tests.gpu import gpu_cases
from tests.train import helpers
from tests.train.helpers import adam, assert_same_snapshot, assert_same_state, llama, snapshot
from tests.world import world_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
NOT_HERE = type(kernels._isas["scalar"])(99)
"""Instructions that no processor has: a kernel that is asked for them fails."""

PIECE = kernels.NORM_TILE
"""Elements; of fp32 as many as an area has room for."""


def areas_of(device: CudaDevice, count: int = 2) -> list[torch.Tensor]:
    return [device.make_host_buffer(4 * PIECE) for _ in range(count)]


def plane(device: CudaDevice, values: torch.Tensor) -> torch.Tensor:
    return device.make_host_buffer(values.nbytes).view(values.dtype).copy_(values)


def waits() -> int:
    from tests.fakegpu import computing

    return computing.counts().get("waits of the host", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_sum_has_the_bits_of_the_kernels_and_nobody_waits(dtype: torch.dtype) -> None:
    """Five gradients through two areas, one behind the other: a copy that came before the host had used what was in its
    area would be added in that one's place.
    """
    device = CudaDevice(torch.device("cuda"))
    land = device.host_sums(areas_of(device))
    assert land is not None
    torch.manual_seed(0)
    n = 3 * PIECE + 4096 + 5
    first, wide = torch.randn(n).to(dtype), torch.randn(n)
    hi, lo = torch.randn(n).bfloat16(), torch.randint(-128, 128, (n,), dtype=torch.int8)
    wanted = [(first.clone(), None), (wide.clone(), None), (wide.clone(), None), (hi.clone(), lo.clone())]
    wanted += [(hi.clone(), lo.clone())]
    added = [False, False, True, False, True]
    grads = [torch.randn(n).to(dtype) for _ in wanted]
    planes = [(plane(device, into), None if lost is None else plane(device, lost)) for into, lost in wanted]
    there = [grad.cuda() for grad in grads]
    before = waits()
    piece = 4 * PIECE // dtype.itemsize
    told = [land(grad, *own, piece, is_added) for grad, own, is_added in zip(there, planes, added, strict=True)]
    assert waits() == before
    told[-1][0].wait()  # all copies are made as soon as they may be
    for (into, lost), (got, got_lost), grad, is_added, (left, landed, found_there) in zip(
        wanted, planes, grads, added, told, strict=True
    ):
        landed.wait()
        assert left.is_complete()
        if lost is not None:
            found = kernels.sum_grad24(into, lost, grad, adding=is_added)
            assert got_lost is not None and torch.equal(got_lost, lost)
        else:
            found = kernels.accumulate_grad(into, grad) if is_added else kernels.copy_grad(into, grad)
        assert torch.equal(got.view(torch.uint8), into.view(torch.uint8)) and found_there.sums() == found


def test_what_goes_wrong_on_the_host_is_told_and_nothing_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(torch.device("cuda"))
    through = kernels.host_sums(areas := areas_of(device))
    n = 3 * PIECE
    into, grad = plane(device, torch.zeros(n)), torch.ones(n, device="cuda")
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_isa", NOT_HERE)
        _, landed, sums = device._land_by_host(through, areas, grad, into, None, PIECE, True)
    _, after, others = device._land_by_host(through, areas, grad, into, None, PIECE, True)
    landed.wait()
    with pytest.raises(RuntimeError, match="cannot run"):
        sums.sums()
    after.wait()
    assert others.sums() == [1.0 * PIECE] * 3 and into[::PIECE].tolist() == [1, 1, 1]


def test_a_piece_has_to_fit_an_area_and_areas_are_registered_memory() -> None:
    device = CudaDevice(torch.device("cuda"))
    assert device.host_sums([torch.zeros(4 * PIECE, dtype=torch.uint8)]) is None
    land = device.host_sums(areas_of(device))
    assert land is not None
    with pytest.raises(RuntimeError, match="larger than an area"):
        land(torch.ones(8, device="cuda"), plane(device, torch.zeros(8)), None, 2 * PIECE, True)


def test_a_gradient_that_the_host_could_not_add_is_told_by_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name; nothing hangs, the bytes of all come back, and with other gradients training goes on."""
    land, calls, fails = kernels.land_by_host, [0], [0]

    def failing(through: Any, *how: Any) -> Any:
        calls[0] += 1
        with monkeypatch.context() as patched:
            if calls[0] == fails[0]:
                patched.setattr(kernels, "_isa", NOT_HERE)
            return land(through, *how)

    monkeypatch.setattr(kernels, "land_by_host", failing)
    plain, model = gpu_cases.plain(llama), gpu_cases.wrap(llama(), "all on the host", tmp_path, gradients="accumulate")
    optimizer, world = adam(model), world_of(model)
    gpu_cases.on_batch(model, 0).backward()
    assert calls[0] == len(list(model.parameters()))
    fails[0] = calls[0] + 3
    gpu_cases.on_batch(model, 1).backward()
    with pytest.raises(gemini.GeminiError, match="did not land: this CPU cannot run"):
        optimizer.step()
    optimizer.zero_grad()
    world.settle()
    assert world.held(Tier.GPU, HOLDER) == 0 and not world.gradients.landing
    losses = gpu_cases.train(model, optimizer, range(3))
    assert losses == helpers.train_plain(plain, range(3), gpu_cases.on_batch, clip=1.0)
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("where", "gradients"),
    [("all on the host", "accumulate"), ("all on the host", "accumulate_bf16"), ("mixed", "accumulate")],
)
def test_without_room_the_device_waits_and_the_bits_are_those_with_room(
    where: str, gradients: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early or late copies and the host come (``seed``). In "mixed" files have some gradients, which the worker
    lands: it and the calls of the host have the same staging.
    """
    from tests.fakegpu import computing

    gave_way, wait_on_device = [0], _Flight.give_way

    def give_way(flight: _Flight) -> None:
        gave_way[0] += 1
        wait_on_device(flight)

    def trained(where: str, less: int) -> Any:
        model: Any = llama()
        states: Any = "compact" if gradients == "accumulate_bf16" else "exact"
        config = gpu_cases.config(model, where, tmp_path, gradients=gradients, max_chunk=4096, states=states)
        gpu = config.memory.bytes_of(Tier.GPU)
        assert gpu is not None
        model = gemini.GeminiDDP(model, replace(config, memory=replace(config.memory, gpu=gpu - less)))
        optimizer = adam(model)
        for step in range(2):
            for micro in range(2):
                (gpu_cases.on_batch(model, 2 * step + micro) / 2).backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    wanted = trained("states on the host", 0)
    monkeypatch.setattr(_Flight, "give_way", give_way)
    computing.draw_from(seed)
    try:
        assert_same_snapshot(trained(where, 32768), wanted)
    finally:
        computing.draw_from(0)
    assert gave_way[0] or seed or where == "mixed"
