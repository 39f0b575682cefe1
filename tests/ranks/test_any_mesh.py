"""Parts of sequences beside slices and stages: the loss, gradients and norm of one process on any mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from tests.ranks.context_cases import Case, Result, batch, differences, make
from tests.ranks.parallel_cases import config_for, mesh_of, num_batches
from tests.ranks.pool import Failure, Pool
from tests.ranks.schedules import delayed
from tests.world import world_of

Pools = Callable[[int], Pool]
MESHES: tuple[dict[str, int], ...] = (
    {"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cp": 2},
    {"pp": 2, "cp": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2, "tp": 2},
)  # fmt: skip


def trained(sizes: dict[str, int], case: Case, where: str, folder: str, seed: int) -> Result:
    """A step of a rank, while messages are late by chance (``seed``)."""
    mesh, model = mesh_of(sizes), make(case)
    config = config_for(where, folder, max_chunk=8000, context_attention=case.kind)
    whole = batch(case, gemini.data_rank(mesh).rank)
    with delayed(seed):
        if "pp" in sizes:
            pipe = gemini.Pipeline(model, config, mesh=mesh, micro_batches=2, schedule="1f1b")
            managed, loss = pipe.model, pipe.step(**whole)
        else:
            managed = gemini.GeminiDDP(model, config, mesh=mesh)
            loss = managed(**gemini.sequence_batch(whole, mesh)).loss
            loss.backward()
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, float(loss.detach()))
        found = Result(sum(losses) / len(losses))
        for handle in world_of(managed).handles:
            found.grads[handle.whole_name] = managed.full_grad(handle.name).clone()
        found.norm = float(managed.clip_grad_norm_(1e9))
        gemini.HybridAdam(managed.parameters()).step()
        world_of(managed).check()
    return found


def alone(sizes: dict[str, int], case: Case) -> Result:
    """One process of plain torch: the mean over the batches, and in a pipeline over micro-batches of one row each."""
    model, total = make(case), 0.0
    for which in range(num_batches(sizes)):
        rows = [slice(0, 1), slice(1, 2)] if "pp" in sizes else [slice(0, 2)]
        for row in rows:
            part = {name: value[row] for name, value in batch(case, which).items()}
            loss = model(**part).loss / len(rows) / num_batches(sizes)
            loss.backward()
            total += loss.item()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))
    return Result(total, grads, float(norm))


CASES = [
    *itertools.product(MESHES, ("llama", "gpt2"), ("ulysses", "gathered")),
    *((sizes, "odd_heads", "gathered") for sizes in MESHES if "tp" not in sizes),
]
"""Of those of eight ranks, stages are slow."""


@pytest.mark.sweep(every=8)
@pytest.mark.parametrize(("where", "checkpointing"), [("ram", False), ("disk", False), ("disk", True)])
@pytest.mark.parametrize(
    ("sizes", "family", "kind"),
    [pytest.param(*case, marks=[pytest.mark.slow] * ("pp" in case[0] and len(case[0]) > 2)) for case in CASES],
    ids=str,
)
def test_any_mesh_computes_what_one_process_does(
    sizes: dict[str, int], family: str, kind: str, where: str, checkpointing: bool, pool_of: Pools, tmp_path: Path
) -> None:
    case = Case(family, kind=kind, checkpointing=checkpointing)
    found = pool_of(math.prod(sizes.values())).run(trained, sizes, case, where, str(tmp_path), 1)
    wanted = alone(sizes, case)
    names: set[str] = set()
    for own in found:
        here = Result(wanted.loss, {name: wanted.grads[name] for name in own.grads}, wanted.norm)
        loss, grads = differences(own, here)
        assert loss <= 1e-6 and grads <= 1e-5, (loss, grads)
        assert own.norm == pytest.approx(wanted.norm, rel=1e-6)
        names |= own.grads.keys()
    assert names == wanted.grads.keys()


def other_batches(along: str, folder: str) -> None:
    mesh = mesh_of({"cp": 2, "tp": 2})
    model: Any = gemini.GeminiDDP(make(Case()), config_for("ram", folder), mesh=mesh)
    model(**gemini.sequence_batch(batch(Case(), mesh.get_local_rank(along)), mesh))


@pytest.mark.parametrize(("along", "says"), [("cp", "a part of another batch"), ("tp", "the first batch of rank")])
def test_ranks_that_read_other_samples_are_refused(along: str, says: str, pool_of: Pools, tmp_path: Path) -> None:
    for outcome in pool_of(4).outcomes(other_batches, along, str(tmp_path)):
        assert isinstance(outcome, Failure) and outcome.kind == "RankMismatch" and says in outcome.text, outcome
