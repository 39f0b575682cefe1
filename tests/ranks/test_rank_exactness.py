"""Ranks change no result: against one process within rounding, and bit for bit across placements.

In fp32 the gradients of a step over several ranks equal those of the same global batch in plain torch to rtol 1e-5, and
so do the weights after ten steps (Adam's eps at 1e-4: at 1e-8 the order of a sum alone changes weights whose gradient
is zero in theory). At a fixed number of ranks every bit is the same wherever the shards live, with budgets that just
hold them: weights, masters, states, step counts, losses and norms.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.cases import Job, Outcome, alone, run
from tests.ranks.pool import Pools

FAMILIES = ("llama", "gpt2", "mixtral", "t5", "tied", "frozen", "unused")
PLACES = ("ram", "disk", "mixed", "standin")


def assert_ranks_agree(outcomes: list[Outcome]) -> Outcome:
    """Every rank has the same norms, step counts and whole masters; the first rank's outcome."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.steps == first.steps and other.norms == first.norms
        assert all(torch.equal(other.masters[name], first.masters[name]) for name in first.masters)
    return first


def assert_same_bits(found: list[Outcome], wanted: list[Outcome], context: object) -> None:
    """Rank by rank: losses, norms, step counts, and every plane."""
    for mine, other in zip(found, wanted, strict=True):
        assert mine.losses == other.losses and mine.norms == other.norms, context
        assert mine.steps == other.steps and mine.state == other.state, context


def assert_close(name: str, found: torch.Tensor, wanted: torch.Tensor, *, atol: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=atol, msg=lambda text: f"{name}: {text}")


def assert_close_to_plain(outcome: Outcome, job: Job, ranks: int) -> None:
    grads, norms, weights = alone(job, ranks)
    assert outcome.grads.keys() == grads.keys(), "a param without gradient on every rank has none"
    for name, grad in grads.items():
        scale = float(grad.abs().max()) if grad.numel() else 0.0
        assert_close(name, outcome.grads[name], grad, atol=1e-6 * scale)
    torch.testing.assert_close(torch.tensor(outcome.norms), torch.tensor(norms), rtol=1e-5, atol=0.0)
    for name, weight in weights.items():
        assert_close(name, outcome.masters[name], weight, atol=2e-6)


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_process_computes(family: str, ranks: int, pool_of: Pools, tmp_path: Path) -> None:
    job = Job(family, num_steps=10, num_micro=1 if ranks == 4 else 2, path=str(tmp_path))
    outcome = assert_ranks_agree(pool_of(ranks).run(run, job))
    assert_close_to_plain(outcome, job, ranks)


@pytest.mark.parametrize(
    ("ranks", "precision", "micro", "clip"),
    [
        (2, "bf16", 1, 1.0),
        pytest.param(2, "fp16", 2, None, marks=pytest.mark.slow),
        pytest.param(4, "fp32", 2, 0.1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "family", ["unused", "mixed", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[:-1])]
)
def test_placement_changes_no_bit(
    family: str, ranks: int, precision: str, micro: int, clip: float | None, pool_of: Pools,
    tmp_path: Path, summary: Callable[[str], None],
) -> None:  # fmt: skip
    gradients = "accumulate" if precision == "fp32" else "retain"
    job = Job(family, precision, num_micro=micro, clip=clip, gradients=gradients, path=str(tmp_path), reads=False)
    wanted = pool_of(ranks).run(run, replace(job, tight=False))
    evictions = 0
    for where in PLACES:
        found = pool_of(ranks).run(run, replace(job, where=where))
        assert_same_bits(found, wanted, where)
        evictions += found[0].num_evictions
    assert evictions > 0 or (micro > 1 and gradients == "retain")  # sums were given room beside the tight budget
    summary(
        f"{ranks} ranks, {family}: {len(PLACES)} placements, {evictions} evictions in forward and backward on rank 0"
    )


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_streaming_updates_changes_no_bit(gradients: str, pool_of: Pools, tmp_path: Path) -> None:
    """Shards in host memory, each through the device of its rank."""
    job = Job("llama", num_steps=3, gradients=gradients, path=str(tmp_path), reads=False)
    found = pool_of(2).run(run, replace(job, where="streamed"))
    assert_same_bits(found, pool_of(2).run(run, replace(job, tight=False)), gradients)
    states = 12 * found[0].report["params"]
    for way in ("cpu->gpu", "gpu->cpu"):
        assert sum(outcome.report["moved"][way] for outcome in found) >= states, "every shard went up and came back"
    for outcome in found:
        assert outcome.report["gpu"]["holders"]["staging"] > 0
        assert outcome.report["gpu"]["peak"] <= outcome.report["gpu"]["budget"]


def run_with_guesses_on_the_first(job: Job) -> Outcome:
    """As where the others have no room for them, or have not waited for updates."""
    return run(replace(job, guesses=dist.get_rank() == 0))


@pytest.mark.parametrize(
    ("where", "precision"),
    [("ram", "bf16"), *(pytest.param(*own, marks=pytest.mark.slow) for own in (("mixed", "fp32"), ("disk", "fp16")))],
)
def test_guessed_updates_change_no_bit(where: str, precision: str, pool_of: Pools, tmp_path: Path) -> None:
    """Each rank guesses those of its own shards, in steps of which some clip."""
    job = Job("unused", precision, where, num_steps=5, clip=0.4, tight=False, path=str(tmp_path), update_threads=1)
    wanted = pool_of(2).run(run, job)
    assert min(wanted[0].norms) < 0.4 < max(wanted[0].norms)
    found = pool_of(2).run(run, replace(job, guesses=True))
    assert_same_bits(found, wanted, where)
    for outcome in found:
        assert all(outcome.report["speculation"].values()), outcome.report["speculation"]
    found = pool_of(2).run(run_with_guesses_on_the_first, job)
    assert_same_bits(found, wanted, "on the first rank")
    assert [any(outcome.report["speculation"].values()) for outcome in found] == [True, False]
