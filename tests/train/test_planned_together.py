"""Plans of several models with one budget say what is run: homes, bytes of every tier, traffic to the byte."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import BudgetExceeded
from gemini.planning.plan import Plan
from gemini.planning.planner import pose_problem
from gemini.planning.together import Together, WindowMemory, evaluated, kept_bytes, needed_bytes
from gemini.planning.traffic import by_name
from gemini.tiers import Tier
from tests import models
from tests.planning.policies import check_plan
from tests.planning.traces import decoder_trace
from tests.world import world_of

MAX_CHUNK = 4096
TIGHT, PART, ALL = 0.0, 0.6, 3.0


def traces(*names: str) -> dict[str, Any]:
    """References and rewards of a policy, in the order in which they compute."""
    found = {}
    for name in names:
        kind = "gpt2" if name == "reward" else "llama"
        batch = models.make_batches(1, 1)[0][0]
        trace = gemini.trace(models.make_model(kind), batch, precision="bf16", target="cpu", checkpointing=None)
        found[name] = trace if name == "policy" else evaluated(trace)
    return found


def budgets(of: dict[str, Any], device: str, share: float) -> dict[Tier, int]:
    """What all models have to hold in any case, and of their windows the largest working set and this share."""
    compute = Tier.GPU if device == "standin" else Tier.CPU
    there = dict.fromkeys((compute, Tier.CPU, Tier.NVME), 2**40)
    posed = [pose_problem(trace, there, precision="bf16", max_chunk=MAX_CHUNK) for trace in of.values()]
    every = sum(p.window_bytes(i) for p in posed for i in range(len(p.layout.chunks)))
    windows = max(p.working_set for p in posed) + int(share * every)
    if device == "standin":
        waiting = max(p.activations for p in posed) + max(p.waiting for p in posed)
        return {Tier.GPU: windows + waiting, Tier.CPU: 2**24, Tier.NVME: 2**24}
    return {Tier.CPU: windows + sum(p.staging for p in posed), Tier.NVME: 2**24}


def said(of: dict[str, Any], device: str, share: float, **how: Any) -> Together:
    places = {"weights_on_nvme": 1.0, "optimizer_on_nvme": 1.0} if device == "cpu" else {"optimizer_on_nvme": 0.5}
    return gemini.plan_together(
        of, None, budgets(of, device, share), max_chunk=MAX_CHUNK, placement=gemini.StaticPlacement(**places), **how
    )


def run(together: Together, device: str, folder: Path, steps: int = 3, batches: int = 1) -> tuple[Any, Any, Any]:
    """The models as they are planned, what each moved in the last step, and the bits of the policy."""
    sizes = {tier.value: n for tier, n in together.budgets.items()}
    memory = gemini.SharedBudget(**sizes, nvme_path=folder)
    managed: dict[str, Any] = {}
    for name, plan in together.plans.items():
        model = models.make_model("gpt2" if name == "reward" else "llama")
        gradients = plan.problem.gradients
        placement = Plan.from_json(plan.to_json())
        config = gemini.GeminiConfig(
            memory=memory, device=device, placement=placement, max_chunk=MAX_CHUNK, gradients=gradients
        )
        managed[name] = gemini.GeminiDDP(model if name == "policy" else model.requires_grad_(False).eval(), config)
    policy, moved = managed["policy"], Counter[str]()
    optimizer = gemini.HybridAdam(policy.parameters(), lr=1e-3)
    data = iter(models.make_batches(steps * batches, 1))
    for _ in range(steps):
        before = {name: moves_of(model) for name, model in managed.items()}
        for _ in range(batches):
            batch = next(data)[0]
            with torch.no_grad():
                wanted = sum(model(**batch).loss for name, model in managed.items() if name != "policy")
            ((policy(**batch).loss - wanted) / batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = Counter(policy.memory_report()["moved"])
        for name, model in managed.items():
            if name != "policy":
                moved.update(moves_of(model) - before[name])
    return memory, managed, +moved


def moves_of(model: Any) -> Counter[str]:
    world_of(model).settle()
    return Counter(world_of(model).moved())


@pytest.mark.parametrize("share", [TIGHT, PART, ALL])
@pytest.mark.parametrize("device", ["cpu", "standin"])
@pytest.mark.parametrize("beside", [("ref",), ("ref", "reward")])
def test_what_moves_in_a_step_is_what_was_planned(
    beside: tuple[str, ...], device: str, share: float, tmp_path: Path
) -> None:
    of = traces(*beside, "policy")
    together = said(of, device, share)
    memory, managed, moved = run(together, device, tmp_path)
    report = memory.report()
    compute = together.plans["policy"].problem.compute
    for name, plan in together.plans.items():
        check_plan(plan)
        world = world_of(managed[name])
        assert world.placement == plan.placement
        for tier in world.tiers:
            assert world.ledger.kept(tier) == kept_bytes(plan).get(tier, 0), (name, tier)
        assert world.ledger.needs[compute] == needed_bytes(plan)
        world.check()
    assert all(report[tier.value]["peak"] <= n for tier, n in together.budgets.items())
    assert all(n <= together.budgets[tier] for tier, n in together.bytes_per_tier.items())
    planned = by_name(together.traffic)
    assert managed["policy"].memory_report()["moved"] == by_name(together.plans["policy"].traffic)
    if share == PART:  # windows of a frozen model that the others leave where they are
        assert planned.keys() == moved.keys() and all(moved[way] <= n for way, n in planned.items())
    else:
        assert moved == planned
    reads = sum(n for way, n in planned.items() if way.endswith(f"->{compute.value}"))
    assert reads > 0


@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_each_micro_batch_evaluates_the_others_again(device: str, tmp_path: Path) -> None:
    together = said(traces("ref", "policy"), device, TIGHT, accumulate=2)
    assert run(together, device, tmp_path, batches=2)[2] == by_name(together.traffic)


def test_a_frozen_model_has_two_bytes_per_param_on_the_tier_that_is_left() -> None:
    """Host memory if all models fit there, with all that they need: of a machine, whose ranks have a part of each."""
    step = decoder_trace(hidden=384, layers=16, vocab=2000)
    of = {"ref": evaluated(step), "policy": step}
    for cpu, ranks, home in ((2**30, 1, Tier.CPU), (2**30, 2, Tier.CPU), (2**28, 1, Tier.NVME)):
        plan = gemini.plan_together(of, None, {Tier.CPU: cpu, Tier.NVME: 2**30}, ranks=ranks).plans["ref"]
        numel = sum(chunk.numel for chunk in plan.layout.chunks)
        assert plan.held[home]["weights"] == 2 * numel // ranks and plan.bytes_per_param == 0.0
        assert "weights" not in plan.held[Tier.NVME if home is Tier.CPU else Tier.CPU]


def test_what_does_not_fit_is_said_of_the_model_that_does_not() -> None:
    of = traces("ref", "policy")
    fits = budgets(of, "cpu", TIGHT)
    assert gemini.plan_together(of, None, fits, max_chunk=MAX_CHUNK).bytes_per_tier[Tier.CPU] <= fits[Tier.CPU]
    staging = gemini.plan_together(of, None, fits, max_chunk=MAX_CHUNK).plans["ref"].problem.staging
    with pytest.raises(BudgetExceeded, match="policy, with what the other models leave of the budget"):
        gemini.plan_together(of, None, {**fits, Tier.CPU: staging + 16384}, max_chunk=MAX_CHUNK)
    with pytest.raises(BudgetExceeded, match="ref, with what the other models leave"):
        gemini.plan_together(of, None, {**fits, Tier.CPU: 4096}, max_chunk=MAX_CHUNK)


def test_an_evaluation_saves_nothing() -> None:
    whole = decoder_trace(hidden=192, layers=8, checkpointing=True)
    found = evaluated(whole)
    assert found.checkpoint_bytes == 0 < whole.checkpoint_bytes and found.peak_bytes < whole.peak_bytes
    assert not any(param.trainable for param in found.params) and 0 < found.flops < whole.flops / 2


def window_memory(room: int, **windows: int) -> WindowMemory:
    """Of models that were wrapped in this order."""
    memory = WindowMemory(windows, room)
    for name, wanted in windows.items():
        memory.take(name, wanted)
    return memory


def test_memory_that_is_handed_over_in_the_first_steps_alone_stays() -> None:
    """What the last one took is handed over in the first two steps; after them all have what they need."""
    needs = {"ref": 2, "reward": 3, "policy": 2}
    memory = window_memory(10, ref=8, reward=8, policy=8)
    first, second, third = (set[str]().union(*(memory.take(name, needs[name]) for name in needs)) for _ in range(3))
    assert first and second and not third
    stays, has = window_memory(10, ref=8, reward=8, policy=8).in_each_step(needs)
    assert all(stays.values()) and has == {"ref": 2, "reward": 3, "policy": 5}


@pytest.mark.parametrize("models", [2, 3, 5])
def test_what_stays_is_what_stays_in_every_step_after_the_first_ones(models: int) -> None:
    """Steps may come again in twos or more: what stays in one of them alone does not stay."""
    rng, names = random.Random(models), "abcde"[:models]
    for _ in range(300):
        windows = {name: rng.randint(2, 12) for name in names}
        needs = {name: rng.randint(1, wanted) for name, wanted in windows.items()}
        room = rng.randint(max(needs.values()), sum(windows.values()))
        stays, has = window_memory(room, **windows).in_each_step(needs)
        played, went, least = window_memory(room, **windows), set[str](), dict.fromkeys(names, room)
        for step in range(60):
            for name in names:
                changed = played.take(name, needs[name])
                assert sum(played.own.values()) <= room and played.own[name] >= needs[name]
                if step >= 30:
                    went |= changed
                    least[name] = min(least[name], played.own[name])
        assert {name for name in names if not stays[name]} == went and has == least


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"compute": Tier.GPU}, "compute='gpu' has no budget; there are cpu"),
        ({"ranks": 0}, "ranks=0: it is at least 1"),
        ({"precision": "bf17"}, "precision='bf17' is not known"),
    ],
)
def test_what_no_plan_can_be_made_with_is_refused_as_for_one_model(how: dict[str, Any], says: str) -> None:
    trace, budget = decoder_trace(), {Tier.CPU: 2**30}
    for make in (
        lambda: gemini.plan(trace, None, budget, **how),
        lambda: gemini.plan_together({"policy": trace}, None, budget, **how),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            make()
    with pytest.raises(ValueError, match="a trace of one model or more"):
        gemini.plan_together({}, None, budget)
    with pytest.raises(TypeError, match="unexpected keyword argument 'accumulated'"):
        gemini.plan_together({"reference": evaluated(trace)}, None, budget, accumulated=2)
    # Two slots of everything, which only the plan of the model whose store it is has.
    durable = gemini.MemoryBudget(cpu="1GiB", nvme="1GiB", nvme_path="/tmp", durable=True)
    with pytest.raises(ValueError, match=r"a durable store is of one model.*replace\(budget, durable=False\)"):
        gemini.plan_together({"policy": trace}, None, durable)
