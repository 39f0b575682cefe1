"""Pipelines: schedules over ranks, and breadth first in one process, against plain accumulation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gemini
from tests.ranks.parallel_cases import Found, config_for, hybrid_adam, llama, mesh_of, num_batches, train
from tests.ranks.pipeline_cases import (
    BESIDE,
    STEPS,
    TIED,
    Stack,
    accumulated,
    deep,
    half,
    ids_of,
    piped,
    run,
)
from tests.ranks.pool import Pools
from tests.ranks.test_slices import FAMILIES, small
from tests.train import helpers
from tests.world import world_of


def assert_close(found: list[Found], plain: Found) -> None:
    names: set[str] = set()
    for own in found:
        assert own.losses == pytest.approx(plain.losses, rel=1e-5)
        assert own.norms == pytest.approx(plain.norms, rel=1e-6) and own.norms == found[0].norms
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)
        assert 0 < len(own.state) < len(plain.state)
        names |= set(own.state)
    assert names == set(plain.state), "all of the model is somewhere, by its own names"


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "bfs"])
def test_schedules_compute_what_accumulation_does(
    schedule: str, size: int, micro_batches: int, where: str, pool_of: Pools, tmp_path: Any
) -> None:
    found = pool_of(size).run(piped, {"pp": size}, schedule, micro_batches, where, str(tmp_path))
    assert all(own.losses == found[0].losses for own in found), "the loss is the same on all ranks"
    assert_close(found, accumulated(1, micro_batches))


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "bfs"])
@pytest.mark.parametrize("where", ["ram", "disk", "serial"])
@pytest.mark.parametrize("sizes", BESIDE, ids=str)
def test_stages_and_shards(
    sizes: dict[str, int], where: str, schedule: str, checkpointing: bool, pool_of: Pools, tmp_path: Any
) -> None:
    do = partial(piped, checkpointing=checkpointing)
    found = pool_of(math.prod(sizes.values())).run(do, sizes, schedule, 4, where, str(tmp_path), half)
    plain = accumulated(num_batches(sizes), 4, half)
    means = [sum(own.losses[step] for own in found) / len(found) for step in range(STEPS)]
    assert means == pytest.approx(plain.losses, rel=1e-5)
    assert_close([own._replace(losses=plain.losses) for own in found], plain)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("schedule", ["1f1b", "bfs"])
@pytest.mark.parametrize("sizes", [{"pp": 2}, *BESIDE], ids=str)
def test_tied_embeddings_stay_the_same_on_both_ends(
    sizes: dict[str, int], schedule: str, pool_of: Pools, tmp_path: Any
) -> None:
    """Of an odd number of pages, so that it would be divided otherwise beside other params than alone."""
    num_ranks, make = math.prod(sizes.values()), partial(half, tie_word_embeddings=True, vocab_size=160)
    found = pool_of(num_ranks).run(piped, sizes, schedule, 4, "disk", str(tmp_path), make)
    plain = accumulated(num_batches(sizes), 4, make)
    assert_close([own._replace(losses=plain.losses) for own in found], plain)
    ends = [value for own in found for name, value in own.state.items() if name in TIED]
    assert len(ends) == num_ranks and all(helpers.same_bits(value, ends[0]) for value in ends)


# ---- one process -----------------------------------------------------------------------------------------------------


def alone(where: str, folder: str, make: Callable[[], Any] = deep, **settings: Any) -> tuple[Found, Found]:
    """A pipeline, and the ordinary loop with the same model, budget and micro-batches."""
    config = partial(config_for, where, folder, gradients="accumulate", **settings)
    pipe = gemini.Pipeline(make().train(), config(), micro_batches=4, schedule="bfs")
    first = run(pipe, lambda step: ids_of(step, 0))
    model: Any = gemini.GeminiDDP(make().train(), config())
    world, fetched = world_of(model), 0

    def compute(step: int) -> float:
        nonlocal fetched
        before, parts = world.num_gathers, []
        for part in ids_of(step, 0).chunk(4):
            loss = model(input_ids=part, labels=part).loss / 4
            loss.backward()
            parts.append(loss.detach())
        fetched = world.num_gathers - before
        return torch.stack(parts).sum().item()  # type: ignore[no-any-return]

    return first, train(model, hybrid_adam(model), compute, steps=STEPS)._replace(fetched=fetched)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_breadth_first_has_the_bits_of_accumulation(where: str, precision: str, tmp_path: Any) -> None:
    found, plain = alone(where, str(tmp_path), half, precision=precision)
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert all(helpers.same_bits(value, plain.state[name]) for name, value in found.state.items())
    assert found.state.keys() == plain.state.keys()


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_breadth_first_over_ranks_that_have_all_stages(
    sizes: dict[str, int], where: str, pool_of: Pools, tmp_path: Any
) -> None:
    found = pool_of(2).run(piped, sizes, "bfs", 4, where, str(tmp_path), half)
    plain = accumulated(num_batches(sizes), 4, half)
    assert [sum(losses) / 2 for losses in zip(*(own.losses for own in found), strict=True)] == pytest.approx(
        plain.losses, rel=1e-5
    )
    for own in found:
        assert own.norms == pytest.approx(plain.norms, rel=1e-6) and own.state.keys() == plain.state.keys()
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "make",
    [pytest.param(deep, marks=pytest.mark.slow), partial(llama, num_hidden_layers=8)],
    ids=["untied", "tied"],
)
def test_breadth_first_fetches_each_weight_twice(make: Callable[[], Any], tmp_path: Any) -> None:
    """In room for little more than a block: accumulation fetches it for each micro-batch, breadth first does not."""
    memory = gemini.MemoryBudget(cpu="800KiB", nvme="64MiB", nvme_path=tmp_path)
    found, plain = alone("disk", str(tmp_path), make, memory=memory, overlap=False)
    pipe = gemini.Pipeline(make(), config_for("disk", str(tmp_path), memory=memory), micro_batches=4, schedule="bfs")
    chunks = len(world_of(pipe.model).chunks)
    ends = 2 * (make is not deep)  # a tied embedding is read at both ends
    assert found.fetched <= 2 * chunks + ends < plain.fetched, (found.fetched, chunks, plain.fetched)


@pytest.mark.sweep(every=8)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "t5"])
def test_families_breadth_first(kind: str, tmp_path: Any) -> None:
    found, plain = alone("disk", str(tmp_path), partial(small, kind))
    assert found.losses == pytest.approx(plain.losses, rel=1e-6) and found.norms == pytest.approx(plain.norms, rel=1e-6)


def test_a_model_of_ones_own(tmp_path: Any) -> None:
    batch = {"x": torch.randn(8, 4), "labels": torch.randn(8, 4)}
    config = config_for("disk", str(tmp_path))
    pipe = gemini.Pipeline(Stack(), config, micro_batches=2, schedule="bfs", stages=3, example=batch)
    loss = pipe.step(**batch)
    plain = Stack()
    expected = plain(**batch)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(pipe.model.full_grad("up.weight"), plain.up.weight.grad)


def sent(sizes: dict[str, int], schedule: str, no_sync: bool, folder: str) -> tuple[list[float], list[float], int]:
    """Losses, norms, and the bytes of gradients that a rank sends in a step of four micro-batches."""
    mesh = mesh_of(sizes)
    pipe = gemini.Pipeline(
        half().train(), config_for("ram", folder), mesh=mesh, micro_batches=4, schedule=schedule, no_sync=no_sync
    )
    found = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank))
    return found.losses, found.norms, pipe.model.memory_report()["sent"]["reduce_scatter"]


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"pp": 2, "dp": 2}, "1f1b"),
        pytest.param({"pp": 2, "dp": 2}, "interleaved", marks=pytest.mark.slow),
        pytest.param({"dp": 2}, "bfs", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_divided_once_per_step(
    sizes: dict[str, int], schedule: str, pool_of: Pools, tmp_path: Any
) -> None:
    """A quarter of the bytes of four micro-batches, and the same sums but for their rounding."""
    pool = pool_of(math.prod(sizes.values()))
    each, once = (pool.run(sent, sizes, schedule, no_sync, str(tmp_path)) for no_sync in (False, True))
    for (losses, norms, num_bytes), (other_losses, other_norms, other_bytes) in zip(each, once, strict=True):
        assert num_bytes == 4 * other_bytes > 0
        assert other_losses == pytest.approx(losses, rel=1e-6) and other_norms == pytest.approx(norms, rel=1e-6)
