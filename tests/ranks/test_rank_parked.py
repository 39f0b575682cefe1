"""Ranks that park together, and weights that each of them hands to an engine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini.errors import BudgetExceeded, GeminiError, RankMismatch
from gemini.tiers import Tier
from tests import models
from tests.ranks.cases import Job, batches, config_of, make_model
from tests.ranks.pool import Pools
from tests.train import helpers
from tests.world import world_of

JOB = Job(where="standin", precision="bf16", num_steps=4, num_micro=2, gradients="accumulate", tight=False)


def without_ties(model: Any) -> dict[str, torch.Tensor]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict().items():
        found.setdefault(value.data_ptr(), (name, value))
    return dict(found.values())


def train(job: Job, parks: bool, path: Path) -> Any:
    """Losses and masters; parked between micro-batches and behind the step, while the next gathers are under way."""
    job = Job(**{**vars(job), "path": str(path)})
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = make_model(job.family)
    model = gemini.GeminiDDP(model, config_of(job, model))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    inner, losses = world_of(model), list[float]()
    for micro in batches(job, rank, world):
        for data in micro:
            loss = model(**data).loss
            loss.backward()
            losses.append(float(loss.detach()))
            del loss
            if parks:
                with model.parked():
                    assert inner.used(Tier.GPU) == 0
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if parks:
            with model.parked():
                assert inner.used(Tier.GPU) == 0
                found = {name: value.clone() for name, value in gemini.weights_for(model)}
            wanted = without_ties(model)
            assert found.keys() == wanted.keys()
            assert all(helpers.same_bits(value, wanted[name]) for name, value in found.items())
        inner.check()
    return losses, model.state_dict(dtype=torch.float32)


def test_ranks_park_together(pool_of: Pools, tmp_path: Path) -> None:
    pool = pool_of(2)
    wanted = pool.run(train, JOB, False, tmp_path)
    found = pool.run(train, JOB, True, tmp_path)
    for (losses, state), (other_losses, other) in zip(found, wanted, strict=True):
        assert losses == other_losses
        assert all(helpers.same_bits(state[name], value) for name, value in other.items())


def park_apart(path: Path) -> list[str]:
    """One rank has no room, sums that wait, and one that does something else."""
    rank, told = dist.get_rank(), list[str]()
    job = Job(**{**vars(JOB), "path": str(path)})
    model: Any = make_model(job.family)
    model = gemini.GeminiDDP(model, config_of(job, model))
    inner = world_of(model)
    (micro, *_) = batches(job, rank, 2)
    taken = inner.free(Tier.CPU), inner.free(Tier.NVME)
    if rank == 1:
        for tier, size in zip((Tier.CPU, Tier.NVME), taken, strict=True):
            inner.ledger.reserve(tier, size, "others")
    try:
        with model.parked():
            raise AssertionError("inside")
    except GeminiError as e:
        told.append(f"{type(e).__name__}: {e}")
    if rank == 1:
        for tier, size in zip((Tier.CPU, Tier.NVME), taken, strict=True):
            inner.ledger.release(tier, size, "others")
    with model.no_sync():
        model(**micro[0]).loss.backward()
    try:
        with model.parked():
            raise AssertionError("inside")
    except GeminiError as e:
        told.append(str(e))
    model(**micro[1]).loss.backward()
    with model.parked():
        pass
    inner.check()
    try:
        if rank == 0:
            with model.parked():
                raise AssertionError("inside")
        else:
            model.state_dict()
            gemini.HybridAdam(model.parameters(), lr=1e-2).step()
    except RankMismatch as e:
        told.append(str(e))
    return told


def test_all_park_or_none(pool_of: Pools, tmp_path: Path) -> None:
    found = pool_of(2).run(park_apart, tmp_path)
    for rank, (no_room, waiting, apart) in enumerate(found):
        assert no_room.startswith(BudgetExceeded.__name__) and "have no room there" in no_room, (rank, no_room)
        assert "gradients in flight that ranks have yet to add up" in waiting
        assert "parked()" in apart and "optimizer.step()" in apart


def sliced(path: Path) -> Any:
    """A model in slices of two ranks: whole weights on both."""
    model: Any = models.make_model("llama")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    memory = gemini.MemoryBudget(gpu="16MiB", cpu="64MiB")
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, device="standin"), mesh=mesh)
    with model.parked():
        found = {
            name: value.clone() for pairs in gemini.weights_for(model, bucket_bytes="64KiB") for name, value in pairs
        }
    return found, without_ties(model)


def test_slices_are_merged(pool_of: Pools, tmp_path: Path) -> None:
    plain = models.make_model("llama").state_dict()
    for found, wanted in pool_of(2).run(sliced, tmp_path):
        assert found.keys() == wanted.keys()
        assert all(helpers.same_bits(value, wanted[name]) for name, value in found.items())
        assert all(value.shape == plain[name].shape for name, value in found.items())
