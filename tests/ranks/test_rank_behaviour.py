"""What users do with several ranks, and what must happen: served, right, or refused with the remedy on every rank."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from tests.models import SomeUnused
from tests.ranks.cases import Job, alone, run
from tests.ranks.pool import Pools, failures
from tests.ranks.test_rank_exactness import assert_close_to_plain, assert_ranks_agree, assert_same_bits
from tests.train import helpers
from tests.world import world_of

MIB = 2**20


def wrap(model: Any = None, **how: Any) -> Any:
    settings = {"precision": "fp32", "device": "cpu", "memory": gemini.MemoryBudget(cpu="256MiB"), **how}
    return gemini.GeminiDDP(helpers.llama() if model is None else model, gemini.GeminiConfig(**settings))


def step(model: Any, optimizer: Any, seed: int = 0) -> float:
    loss = model(**helpers.batch(seed + 1000 * dist.get_rank())).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
def test_no_sync_gives_the_same_gradients_and_sends_less(gradients: str, pool_of: Pools, tmp_path: Path) -> None:
    job = Job(num_micro=3, gradients=gradients, tight=False, num_steps=10, path=str(tmp_path))
    often = assert_ranks_agree(pool_of(2).run(run, job))
    seldom = assert_ranks_agree(pool_of(2).run(run, replace(job, no_sync=True)))
    assert_close_to_plain(seldom, job, 2)
    assert often.sent[0]["reduce_scatter"] == 3 * seldom.sent[0]["reduce_scatter"]


def no_sync_without_room() -> None:
    # Room for the shards and what is in flight, not for whole gradients of 2 x 200k params in fp32.
    model = wrap(helpers.llama(layers=24), memory=gemini.MemoryBudget(cpu=int(2 * 7.4 * MIB)), max_chunk=4000)
    with model.no_sync():
        model(**helpers.batch()).loss.backward()


def step_inside_no_sync() -> None:
    model = wrap()
    optimizer = helpers.adam(model)
    with model.no_sync():
        model(**helpers.batch()).loss.backward()
    optimizer.step()


def test_gradients_in_backward(pool_of: Pools, tmp_path: Path) -> None:
    """``step_in_backward`` over ranks: every update from the sum of all ranks, whatever the placement."""
    job = Job("gpt2", gradients="transient", clip=None, num_steps=10, path=str(tmp_path))
    outcomes = pool_of(2).run(run, job)
    assert_same_bits(pool_of(2).run(run, replace(job, where="mixed")), outcomes, "mixed")
    first = assert_ranks_agree(outcomes)
    _, _, weights = alone(job, 2)
    for name, weight in weights.items():
        torch.testing.assert_close(first.masters[name], weight, rtol=1e-5, atol=2e-6)


def large_half_gradients() -> float:
    """Every rank's gradient is near the largest fp16: their sum would be inf, their mean is not."""
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.zeros_(model.weight)
    managed = wrap(model, precision="fp16")
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, 0] = 40000.0
    gemini.GradScaler("cpu", init_scale=1.0).scale(managed(x).sum()).backward()
    grad = managed.full_grad("weight")
    return float(grad.abs().max())


def test_the_mean_does_not_overflow_in_half_precision(pool_of: Pools) -> None:
    assert pool_of(2).run(large_half_gradients) == [40000.0, 40000.0]


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(("precision", "reduce_dtype"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp32")])
def test_reduction_dtype(precision: str, reduce_dtype: str, pool_of: Pools, tmp_path: Path) -> None:
    job = Job(precision=precision, tight=False, path=str(tmp_path))
    own = assert_ranks_agree(pool_of(2).run(run, job))
    other = assert_ranks_agree(pool_of(2).run(run, replace(job, reduce_dtype=reduce_dtype)))
    ratio = other.sent[0]["reduce_scatter"] / own.sent[0]["reduce_scatter"]
    assert ratio == (2.0 if reduce_dtype == "fp32" else 0.5)
    for name, grad in own.grads.items():
        assert (other.grads[name] - grad).norm() <= 0.02 * grad.norm() + 1e-8


# ---- ranks on different paths ----------------------------------------------------------------------------------------


def generate_differently() -> tuple[list[int], list[int]]:
    model, plain = wrap(helpers.llama()), helpers.llama()
    ids = helpers.batch(dist.get_rank(), rows=1)["input_ids"]
    kwargs = {"max_new_tokens": 3 + 4 * dist.get_rank(), "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **kwargs)[0].tolist()
    step(model, helpers.adam(model))  # whoever is done first serves the other from here
    return found, plain.generate(ids, **kwargs)[0].tolist()


def test_generate_of_different_lengths(pool_of: Pools) -> None:
    for found, wanted in pool_of(2).run(generate_differently):
        assert found == wanted


def end_early(how: str) -> None:
    model = wrap()
    optimizer = helpers.adam(model)
    for seed in range(3 - dist.get_rank()):
        step(model, optimizer, seed)
    if how == "reads":
        model.state_dict()  # all ranks that read are served, those in a step too; then rank 1 waits at the next point
    gemini.save_checkpoint("/nowhere/at/all", model, optimizer)


@pytest.mark.parametrize("how", ["saves", "reads"])
def test_data_that_ends_early_is_a_clear_error_on_every_rank(how: str, pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(end_early, how), "RankMismatch"):
        assert "were asked to do different things" in text and "rank 1 is at save_checkpoint after 2 steps" in text
        assert "DistributedSampler(drop_last=True)" in text


def frozen_and_flipped() -> dict[str, int]:
    model = wrap()
    optimizer = helpers.adam(model)
    world = world_of(model)
    for name, param in model.named_parameters():
        if "layers.0" in name:
            param.requires_grad_(False)
    step(model, optimizer)
    for param in model.parameters():
        param.requires_grad_(True)
    step(model, optimizer, 1)
    return {handle.name: handle.num_steps for handle in world.handles}


def test_params_may_be_frozen_and_thawed(pool_of: Pools) -> None:
    outcomes = pool_of(2).run(frozen_and_flipped)
    assert outcomes[0] == outcomes[1]
    assert {count for name, count in outcomes[0].items() if "layers.0" in name} == {1}
    assert {count for name, count in outcomes[0].items() if "layers.0" not in name} == {2}


def unused_counts() -> dict[str, int]:
    model = wrap(SomeUnused())
    optimizer = helpers.adam(model)
    for path in ((0, 1), (2, 1)):  # rank 0 takes the first, rank 1 the second: block 3 is never taken
        model.paths = (path,) * 3 if dist.get_rank() == 0 else ((1, 1),) * 3
        ids = torch.arange(6).view(1, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {handle.name: handle.num_steps for handle in world_of(model).handles if "weight" in handle.name}


def test_a_param_without_gradient_on_every_rank_is_skipped(pool_of: Pools) -> None:
    counts = pool_of(2).run(unused_counts)
    blocks = {"layers.0": 1, "layers.1": 2, "layers.2": 1, "layers.3": 0}
    wanted = {f"{name}.always.weight": count for name, count in blocks.items()}
    unused = {f"{name}.sometimes.weight": 0 for name in blocks}
    assert counts[0] == counts[1] == {"embed.weight": 2, "head.weight": 2, **wanted, **unused}


# ---- the start -------------------------------------------------------------------------------------------------------


def start_with(change: str) -> None:
    second = dist.get_rank() == 1
    how: dict[str, Any] = {}
    model = helpers.llama(layers=2 if second and change == "model" else 3)
    if second and change == "config":
        how["gradients"] = "accumulate"
    if second and change == "budget":
        how["memory"] = gemini.MemoryBudget(cpu="128MiB")
    if second and change == "frozen":
        model.lm_head.weight.requires_grad_(False)
    if second and change == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
    if change == "optimizer":
        optimizer = gemini.HybridAdam(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
        model(**helpers.batch(dist.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if second and change == "version":
        from gemini.train.setup import problem

        problem.__version__ = "0.0.9"
    try:
        wrap(model, **how)
    finally:
        if change == "version":
            problem = __import__("gemini.train.setup.problem", fromlist=["problem"])
            problem.__version__ = gemini.__version__


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model", "another set of params than rank 0: 9 differ, the first is 'model.layers.2"),
        ("config", "another config than rank 0: 1 differ, the first is 'gradients': 'accumulate' against 'retain'"),
        ("budget", "another memory budget than rank 0: 1 differ, the first is 'cpu': '128MiB' against '256MiB'"),
        ("frozen", "'lm_head.weight': (96, 32) torch.float32 frozen against (96, 32) torch.float32"),
        ("tied", "another set of tied params than rank 0"),
        ("optimizer", "another state of the optimizer than rank 0: 60 differ, the first is 'exp_avg of"),
        ("version", "another version of gemini than rank 0: '0.0.9' against"),
    ],
)
def test_a_mismatch_is_found_at_the_start(change: str, said: str, pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(start_with, change), "RankMismatch"):
        assert said.replace("'", "") in text.replace("'", "").replace('"', ""), text
        assert "rank 1 was started with" in text


def start_without_values() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
    wrap(model)


def start_with_max_norm() -> None:
    wrap(torch.nn.Sequential(torch.nn.Embedding(8, 8, max_norm=1.0)))


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (no_sync_without_room, "BudgetExceeded", ["Inside no_sync() whole gradients are kept on every rank"]),
        (step_inside_no_sync, "GeminiError", ["the last backward of a step must be outside of no_sync()"]),
        (start_without_values, "ValueError", ["is on the meta device"]),
        (start_with_max_norm, "ValueError", ["'0' (Embedding) has max_norm=1.0", "gathered([weight]"]),
    ],
)
def test_what_is_refused_is_refused_on_all_ranks_with_the_remedy(
    function: Callable[[], None], kind: str, said: list[str], pool_of: Pools
) -> None:
    for text in failures(pool_of(2).outcomes(function), kind):
        assert all(words in text for words in said), text


def weights_of_other_seeds() -> bool:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model[1].running_mean.fill_(dist.get_rank() + 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = wrap(model).state_dict()
    return all(torch.equal(after[name], before[name]) for name in before)


def test_all_start_from_the_weights_and_buffers_of_rank_0(pool_of: Pools) -> None:
    assert pool_of(2).run(weights_of_other_seeds) == [True, False]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_at_rest() -> list[bool]:
    """Whether each way of writing between steps leaves what it leaves of an ordinary tensor."""
    model, found = wrap(), []
    param = model.lm_head.weight
    value = torch.randn(param.shape, generator=torch.Generator().manual_seed(0)).to(param.dtype)
    expected = model.full_param("lm_head.weight")
    for write in (
        lambda p: p.data.mul_(2), lambda p: p.data[3:5].zero_(), lambda p: p.data.copy_(value),
        lambda p: torch._foreach_lerp_([p.data], [value.flip(0)], 0.3), lambda p: p.data.clamp_(-0.5, 0.5),
    ):  # fmt: skip
        write(param)
        write(expected)
        found.append(torch.equal(model.full_param("lm_head.weight"), expected))
    return found


def test_writes_at_rest(pool_of: Pools) -> None:
    assert pool_of(2).run(write_at_rest) == [[True] * 5] * 2


# ---- the end ---------------------------------------------------------------------------------------------------------


def die_in_step(rank: int) -> float:
    model = wrap()
    optimizer = helpers.adam(model)
    step(model, optimizer)
    started = time.monotonic()
    if dist.get_rank() == rank:
        os._exit(9)
    try:
        step(model, optimizer, 1)
    except gemini.RankLost as e:
        assert f"rank {rank} did not answer during a forward or backward" in str(e), str(e)
        assert "start again from the last checkpoint" in str(e)
        return time.monotonic() - started
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_the_others_with_the_reason(rank: int, pool_of: Pools) -> None:
    outcomes = pool_of(2).outcomes(die_in_step, rank)
    assert outcomes[rank].kind == "Died"
    assert isinstance(outcomes[1 - rank], float) and outcomes[1 - rank] < 55, outcomes  # the group waits for 60


def hang_in_step() -> float:
    model = wrap()
    optimizer = helpers.adam(model)
    step(model, optimizer)
    if dist.get_rank() == 1:
        time.sleep(8)
        return 0.0
    started = time.monotonic()
    try:
        step(model, optimizer, 1)
    except gemini.RankLost:
        return time.monotonic() - started
    raise AssertionError("waited for ever")


@pytest.mark.slow
def test_a_hanging_rank_is_given_up_after_the_groups_timeout(pool_of: Pools) -> None:
    pool = pool_of(2)
    pool.renew(timeout=3)
    waited = pool.outcomes(hang_in_step)[0]
    assert isinstance(waited, float) and 2 < waited < 8, waited
