"""What each rank holds and sends: arithmetic, term by term, and hybrid sharding over a 2-D mesh."""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini.planning.layout import Layout, ParamSpec, make_layout
from gemini.ranks.process_groups import make_subgroup
from gemini.train.sharding.reduction import Reduction
from gemini.train.sharding.replicas import Replicas
from tests.ranks.cases import Job, config_of, make_model, run
from tests.ranks.pool import Failure, Pools, failures
from tests.ranks.test_rank_exactness import assert_close_to_plain, assert_ranks_agree, assert_same_bits
from tests.world import world_of


def one_byte_too_little() -> None:
    job = Job()
    config = config_of(job, make_model(job.family))
    less = gemini.MemoryBudget(cpu=int(config.memory.cpu or 0) - dist.get_world_size())
    gemini.GeminiDDP(make_model(job.family), replace(config, memory=less))


def test_what_does_not_fit_is_refused_at_the_start(pool_of: Pools) -> None:
    """The budgets of the other tests here are the least: gathered weights, gradients in flight, pieces on the wire."""
    for text in failures(pool_of(2).outcomes(one_byte_too_little), "BudgetExceeded"):
        assert "does not fit" in text


def test_sums_over_replicas_that_were_dropped_are_forgotten_before_others_land() -> None:
    sync = object.__new__(Reduction)
    dropped = SimpleNamespace(has_grad=False)
    across = sync._replicas = object.__new__(Replicas)
    across._params, across.summed, sync.is_done = SimpleNamespace(by_chunk={0: [dropped]}), {0}, False  # type: ignore[assignment]
    sync.gradient_arrives()
    dropped.has_grad = True  # landed behind backward
    sync.gradient_arrives()


def layout_of(family: str, ranks: int) -> Layout:
    model = make_model(family)
    specs = [ParamSpec(name, p.numel(), p.requires_grad) for name, p in model.named_parameters()]
    return make_layout(specs, ranks=ranks, max_chunk=8000)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rank_holds_its_share_and_sends_the_least(
    ranks: int, precision: str, pool_of: Pools, tmp_path: Path, summary: Callable[[str], None]
) -> None:
    layout = layout_of("llama", ranks)
    itemsize = 2 if precision == "bf16" else 4
    weights = itemsize * layout.numel
    shard = layout.numel // ranks
    job = Job(precision=precision, tight=False, path=str(tmp_path))
    for outcome in pool_of(ranks).run(run, job):
        held = outcome.report["cpu"]["holders"]
        planes = sum(held.get(kind, 0) for kind in ("weights", "residual", "exp_avg", "exp_avg_sq"))
        assert planes == 12 * shard, "12 bytes per param over all ranks"
        assert held["grad"] == itemsize * shard
        assert outcome.report["bytes_per_param"] == pytest.approx(12.0 * layout.numel / layout.payload)
        assert held.get("gradients in flight", 0) == 0
        for sent in outcome.sent:  # the budget lets gathered weights stay from forward to backward
            assert sent["all_gather"] == (ranks - 1) * weights // ranks
            assert sent["reduce_scatter"] == (ranks - 1) * weights // ranks
    for outcome in pool_of(ranks).run(run, replace(job, tight=True)):
        held = outcome.report["cpu"]["holders"]
        fixed = ("weights", "residual", "exp_avg", "exp_avg_sq", "grad", "staging", "exchange")
        room = outcome.report["cpu"]["budget"] - sum(held.get(holder, 0) for holder in fixed)
        twice = 2 * (ranks - 1) * weights // ranks
        first, *others = outcome.sent
        # What forward used last is still there as far as there is room, the rest comes again.
        assert twice - (ranks - 1) * room // ranks <= first["all_gather"] < twice
        planned = (ranks - 1) * itemsize * sum(outcome.gathers) // ranks
        assert [sent["all_gather"] for sent in others] == [planned] * 2, "what the script gathers, there or not"
        assert all(sent["reduce_scatter"] == twice // 2 for sent in outcome.sent)
        assert outcome.report["cpu"]["peak"] <= outcome.report["cpu"]["budget"]
        sent = others[-1]
    times = sent["all_gather"] / (twice / 2)
    summary(f"{ranks} ranks, {precision}: all-gather {times:.2f} x the weights in little room, once in enough")


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("family", ["llama", "unused"])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
def test_hybrid_sharding(family: str, mesh: tuple[int, int], pool_of: Pools, tmp_path: Path) -> None:
    job = Job(family, num_steps=5, num_micro=2, mesh=mesh, gradients="accumulate", path=str(tmp_path))
    outcome = assert_ranks_agree(pool_of(4).run(run, job))
    assert_close_to_plain(outcome, job, 4)
    short = replace(job, num_steps=3, reads=False)
    elsewhere = pool_of(4).run(run, replace(short, where="mixed"))
    assert_same_bits(elsewhere, pool_of(4).run(run, replace(short, where="standin")), mesh)
    if family == "llama":
        replicas, shards = mesh
        grads = 4 * layout_of("llama", shards).numel // shards
        for sent in outcome.sent:  # once per step, whatever is accumulated
            assert sent.get("all_reduce", 0) == 2 * (replicas - 1) * grads // replicas


def small(**how: Any) -> Any:
    config = gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
    return gemini.GeminiDDP(make_model("llama"), config, **how)


def a_group_of_some() -> int:
    """Ranks 1 and 2 share a model; the others have one each, alone."""
    ranks = ([0], [1, 2], [3])[(dist.get_rank() + 1) // 2]
    groups = [dist.new_group(r) for r in ([0], [1, 2], [3])]
    model = small(process_group=next(g for g in groups if dist.get_rank() in dist.get_process_group_ranks(g)))
    world = world_of(model)
    assert world.ranks.shares_params == (len(ranks) > 1)
    return world.layout.ranks


def test_a_process_group_may_be_given(pool_of: Pools) -> None:
    assert pool_of(4).run(a_group_of_some) == [1, 2, 2, 1]


def uneven_numbers_of_groups(folder: Path) -> list[int]:
    """Each rank has another number of torch's groups, when all share a model and when two do; checkpoints as well."""
    rank = dist.get_rank()
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    counts = []
    for name, mesh in (("all", None), ("replicated", (2, 2))):
        model = small(mesh=None if mesh is None else init_device_mesh("cpu", mesh))
        gemini.save_checkpoint(folder / name, model, gemini.HybridAdam(model.parameters()))
        counts.append(world_of(model).layout.ranks)
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        model = small(process_group=pair)
        gemini.save_checkpoint(folder / "pair", model, gemini.HybridAdam(model.parameters()))
        counts.append(world_of(model).layout.ranks)
    return counts


def test_ranks_may_have_made_other_groups_before(pool_of: Pools, tmp_path: Path) -> None:
    found = pool_of(4).run(uneven_numbers_of_groups, tmp_path)
    assert found == [[4, 2], [4, 2, 2], [4, 2], [4, 2, 2]]


def models_come_and_go(folder: Path) -> list[int]:
    """Threads of this process after each of some models that were trained with, saved and deleted."""
    counts, mesh = [], init_device_mesh("cpu", (2, 2))
    for number in range(4):
        model = small(mesh=mesh)
        gemini.save_checkpoint(folder / str(number), model, gemini.HybridAdam(model.parameters()))
        del model
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_groups_end_with_their_model(pool_of: Pools, tmp_path: Path) -> None:
    for counts in pool_of(4).run(models_come_and_go, tmp_path):
        assert len(set(counts)) == 1


def make_a_pair(by: list[int], seconds: float) -> None:
    if dist.get_rank() in by:
        dist.barrier(make_subgroup([0, 1], "gloo", timedelta(seconds=seconds)))


def test_a_rank_that_does_not_come_is_named(pool_of: Pools) -> None:
    outcomes = pool_of(4).outcomes(make_a_pair, [0], 0.5)
    assert isinstance(outcomes[0], Failure) and outcomes[0].kind == "RankLost"
    assert "rank 1 did not come" in outcomes[0].text
    assert outcomes[1:] == [None, None, None]
    pool_of(4).run(make_a_pair, [0, 1], 60)


def transient_replicas() -> None:
    config = gemini.GeminiConfig(precision="fp32", device="cpu", gradients="transient")
    gemini.GeminiDDP(make_model("llama"), config, mesh=init_device_mesh("cpu", (2, 1)))


def test_updates_inside_backward_are_refused_with_replicas(pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(transient_replicas), "ValueError"):
        assert 'gradients="transient" updates inside backward' in text


def bad_mesh(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 1) if how == "cube" else (2,))
    small(mesh=mesh, process_group=dist.group.WORLD if how == "both" else None)


@pytest.mark.parametrize(("how", "said"), [("cube", "mesh has 3 dimensions"), ("both", "process_group or a mesh")])
def test_a_bad_mesh_is_refused(how: str, said: str, pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(bad_mesh, how), "ValueError"):
        assert said in text
