"""``gemini.GradScaler`` over ranks: a step is skipped on all of them or on none, and the scales stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from tests.ranks.pool import Failure, Pool
from tests.train import helpers
from tests.world import world_of

Pools = Callable[[int], Pool]


def wrap(precision: str = "fp16", **how: object) -> gemini.GeminiDDP:
    config = gemini.GeminiConfig(precision=precision, device="cpu", memory=gemini.MemoryBudget(cpu="256MiB"))
    return gemini.GeminiDDP(helpers.llama(layers=1), config, **how)


def steps_with_inf(replicated: bool) -> list[tuple[int, float, float, float]]:
    """By step: updates made, the scale after it, the norm, and a plain param. One rank alone sees inf, in some steps.

    In step 1 in a gradient of the model, in step 2 in that of a plain param, which no rank shares.
    """
    model = wrap(**({"mesh": dist.init_device_mesh("cpu", (2, 1))} if replicated else {}))
    plain = nn.Parameter(torch.ones(()))
    optimizer = gemini.HybridAdam([*model.parameters(), plain], lr=1e-2)
    scaler, seen = gemini.GradScaler("cpu", init_scale=2.0**10), []
    for number in range(4):
        alone = dist.get_rank() == dist.get_world_size() - 1
        loss = model(**helpers.batch(number + 10 * dist.get_rank())).loss
        loss = loss * (float("inf") if number == 1 and alone else 1.0)
        loss = loss + plain * (float("inf") if number == 2 and alone else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((world_of(model).handles[0].num_steps, scaler.get_scale(), float(norm), float(plain)))
    return seen


@pytest.mark.parametrize("replicated", [False, True])
def test_all_ranks_skip_a_step_or_none(replicated: bool, pool_of: Pools) -> None:
    first, *others = pool_of(2).run(steps_with_inf, replicated)
    assert [row[:2] for row in first] == [(1, 2.0**10), (1, 2.0**9), (1, 2.0**8), (2, 2.0**8)]
    assert [math.isfinite(row[2]) for row in first] == [True, False, True, True]
    assert all(repr(other) == repr(first) for other in others)


def scaled_differently() -> None:
    model = wrap("bf16")
    optimizer = helpers.adam(model)
    scaler = gemini.GradScaler("cpu", init_scale=2.0 ** (10 + dist.get_rank()))
    scaler.scale(model(**helpers.batch()).loss).backward()
    scaler.step(optimizer)


def test_scales_that_differ_are_refused_on_every_rank(pool_of: Pools) -> None:
    for outcome in pool_of(2).outcomes(scaled_differently):
        assert isinstance(outcome, Failure) and outcome.kind == "RankMismatch"
        assert "scaled by 1024, 2048 on the ranks" in outcome.text
