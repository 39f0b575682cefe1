"""What the planner says is what the engine does: the same homes, the same bytes over every boundary, the same bits."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import PlanMismatch
from gemini.planning import rules as spec_rules
from gemini.planning.parallel import block_by_block
from gemini.planning.plan import Plan
from gemini.planning.planner import plan as make_plan
from gemini.planning.planner import pose_problem
from gemini.planning.trace import MemoryTrace, Source
from gemini.planning.traffic import by_name
from gemini.tiers import Tier
from tests import models
from tests.planning.policies import check_plan
from tests.train.helpers import manage, step_on
from tests.world import world_of

MAX_CHUNK = 4096


def known_trace(model: Any, precision: str = "bf16") -> MemoryTrace:
    """Ahead of time, on the batch of the first step."""
    return gemini.trace(model, models.make_batches(1, 1)[0][0], precision=precision, target="cpu")


def budgets(model: Any, share: float, device: str) -> dict[Tier, int]:
    """What a step needs in any case, and this share of everything else on the computing tier and the host."""
    trace = known_trace(model)
    compute = Tier.GPU if device == "standin" else Tier.CPU
    there = dict.fromkeys((compute, Tier.CPU, Tier.NVME), 2**40)
    problem = pose_problem(trace, there, precision="bf16", max_chunk=MAX_CHUNK)
    state = sum(sum(sizes.values()) for sizes in problem.sizes)
    taken = problem.spoken_for()
    return {
        **{tier: taken.get(tier, 0) + int(share * state) for tier in (compute, Tier.CPU)},
        Tier.NVME: 2 * state + 2**20,
    }


def wrap(there: dict[Tier, int], device: str, folder: Path, **settings: Any) -> tuple[Any, Any]:
    budget = {tier.value: num_bytes for tier, num_bytes in there.items()}
    model = manage(models.make_model("llama"), folder, device, **budget, max_chunk=MAX_CHUNK, **settings)
    return model, gemini.HybridAdam(model.parameters(), lr=1e-3)


def steps(model: Any, optimizer: Any, num: int) -> list[dict[str, int]]:
    moved = []
    for step in range(num):
        step_on(model(**models.make_batches(8, 1)[step][0]).loss, optimizer)
        moved.append(model.memory_report()["moved"])
    return moved


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("device", ["cpu", "standin"])
@pytest.mark.parametrize("share", [0.02, 0.15, 0.4, 0.8, 1.1])
def test_auto_does_what_plan_says(share: float, device: str, tmp_path: Path) -> None:
    model = models.make_model("llama")
    trace, there = known_trace(model), budgets(model, share, device)
    said = gemini.plan(trace, None, there, max_chunk=MAX_CHUNK)
    model, optimizer = wrap(there, device, tmp_path, trace=trace)
    world = world_of(model)
    assert world.plan == said and world.placement == said.placement
    assert {tier: n for tier, n in said.bytes_per_tier.items() if n} == {
        tier: world.used(tier)
        - (world.held(tier, "pool") if world.device.keeps_windows else 0)
        + (said.problem.working_set if tier is said.problem.compute and any(moves.fetch for moves in said.moves) else 0)
        for tier in world.tiers
        if world.used(tier)
    }
    for moved in steps(model, optimizer, 3):
        assert moved == by_name(said.traffic), "byte for byte, in the first step as in the third"
    world.check()


def room_for(model: Any, device: str, windows: float, host: int, **how: Any) -> dict[Tier, int]:
    """Budgets that hold all weights below the computing tier, and so much of all windows beside what a step needs."""
    trace, compute = known_trace(model), Tier.GPU if device == "standin" else Tier.CPU
    there = dict.fromkeys((compute, Tier.CPU, Tier.NVME), 2**40)
    posed = pose_problem(trace, there, precision="bf16", max_chunk=MAX_CHUNK, **how)
    taken, chunks = posed.spoken_for(), range(len(posed.layout.chunks))
    every = sum(posed.window_bytes(i) for i in chunks) - posed.working_set
    return {Tier.CPU: host, Tier.NVME: 2**21, compute: taken[compute] + posed.waiting + int(windows * every)}


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("windows", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize("device, kind, host", [("cpu", "gpt2", 2**20), ("standin", "llama", 2**20)])
def test_accumulation_moves_what_is_planned(
    device: str, kind: str, host: int, accumulate: int, windows: float, tmp_path: Path
) -> None:
    """A further micro-batch begins with what the one before left gathered, the first one with no trained weights."""
    model = models.make_model(kind)
    how: dict[str, Any] = {"gradients": "accumulate" if accumulate > 1 else "retain", "max_chunk": MAX_CHUNK}
    there = room_for(model, device, windows, host, gradients=how["gradients"])
    placement = gemini.StaticPlacement(weights_on_nvme=1.0 if device == "cpu" else 0.4, optimizer_on_nvme=1.0)
    trace = known_trace(model)
    said = gemini.plan(trace, None, there, accumulate=accumulate, placement=placement, **how)
    said = Plan.from_json(said.to_json())
    check_plan(said)
    assert sum(len(moves.fetch) for moves in said.moves), "there is something to foretell"
    if accumulate > 1:
        first, further = (sum(len(moves.fetch) for moves in said.moves_of(batch)) for batch in (0, 1))
        assert further < first or not windows
        assert further == 0 or windows < 1
    memory = gemini.MemoryBudget(
        gpu=there.get(Tier.GPU), cpu=there[Tier.CPU], nvme=there[Tier.NVME], nvme_path=tmp_path
    )  # fmt: skip
    config = gemini.GeminiConfig(memory=memory, device=device, placement=said, **how)
    managed: Any = gemini.GeminiDDP(model, config)
    optimizer = gemini.HybridAdam(managed.parameters(), lr=1e-3)
    batches = models.make_batches(2 * accumulate, 1)
    for step in range(2):
        for batch in range(accumulate):
            (managed(**batches[step * accumulate + batch][0]).loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert managed.memory_report()["moved"] == by_name(said.traffic), step
    world_of(managed).check()


@pytest.mark.parametrize("windows", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("number, kept", [(2, 0), (4, 0), (4, 2)])
@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_block_by_block_moves_what_is_planned(
    device: str, number: int, kept: int, windows: float, tmp_path: Path
) -> None:
    """Weights twice and gradients once, whatever the number of micro-batches; the sums of a stage within the budget."""
    model = models.make_model("llama")
    model.activation_checkpointing_enable()
    batch = models.make_batches(1, 1)[0][0]
    trace = gemini.trace(model, batch, precision="bf16", target="cpu", kept_blocks=kept)
    trace = block_by_block(trace, number)
    compute = Tier.GPU if device == "standin" else Tier.CPU
    posed = pose_problem(trace, dict.fromkeys((compute, Tier.CPU, Tier.NVME), 2**40), precision="bf16", max_chunk=4096)
    every = sum(posed.window_bytes(i) for i in range(len(posed.layout.chunks))) - posed.working_set
    taken = posed.spoken_for()[compute] + posed.waiting + int(windows * every)
    there = {Tier.CPU: 2**21, Tier.NVME: 2**21, compute: taken}
    placement = gemini.StaticPlacement(weights_on_nvme=1.0 if device == "cpu" else 0.4, optimizer_on_nvme=1.0)
    said = gemini.plan(trace, None, there, placement=placement, max_chunk=MAX_CHUNK)
    said = Plan.from_json(said.to_json())
    check_plan(said)
    assert said.problem.gradients == "retain" and said.trace.micro_batches == number
    assert max(Counter(index for moves in said.moves for index in moves.fetch).values()) <= 2
    memory = gemini.MemoryBudget(
        gpu=there.get(Tier.GPU), cpu=there[Tier.CPU], nvme=there[Tier.NVME], nvme_path=tmp_path
    )  # fmt: skip
    config = gemini.GeminiConfig(memory=memory, device=device, placement=said, max_chunk=MAX_CHUNK)
    managed: Any = gemini.GeminiDDP(model, config)
    optimizer = gemini.HybridAdam(managed.parameters(), lr=1e-3)
    batches = models.make_batches(3 * number, 1)
    for step in range(3):
        gemini.train_step(managed, [inputs for inputs, *_ in batches[step * number : (step + 1) * number]])
        optimizer.step()
        optimizer.zero_grad()
        assert managed.memory_report()["moved"] == by_name(said.traffic), step
    world_of(managed).check()


@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_a_plan_from_a_file_runs(device: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)
    model = models.make_model("llama")
    there = budgets(model, 0.2, device)
    made = make_plan(known_trace(model), None, there, max_chunk=MAX_CHUNK, states=states)
    said = Plan.from_json(made.to_json())
    model, optimizer = wrap(there, device, tmp_path, placement=said, states=states)
    assert world_of(model).placement == said.placement
    assert steps(model, optimizer, 2)[-1] == by_name(said.traffic)
    other = "compact" if states == "exact" else "exact"
    with pytest.raises(PlanMismatch, match="the plan was made for rule='Adam"):
        wrap(there, device, tmp_path, placement=said, states=other)


def test_the_first_step_is_the_trace_where_none_is_given(tmp_path: Path) -> None:
    """From the second step on the moves are those that cost least in these homes for what the first one did."""
    model = models.make_model("llama")
    there, trace = budgets(model, 0.05, "standin"), known_trace(model)
    model, optimizer = wrap(there, "standin", tmp_path)
    world = world_of(model)
    how = {"activations": 0, "max_chunk": MAX_CHUNK, "placement": world.placement}
    best = by_name(gemini.plan(trace, None, there, **how).traffic)
    assert world.plan.trace.source is Source.STRUCTURE and world.schedule is None
    moved = steps(model, optimizer, 3)
    assert world.schedule is not None
    assert moved[1] == moved[2] == best
    assert sum(moved[0].values()) >= sum(best.values())


def test_a_step_that_does_something_else_costs_time_only(tmp_path: Path) -> None:
    """Planned for a wrong order: the same bits, and after two strange steps the real order is known."""
    plain, plain_optimizer = wrap({Tier.CPU: 2**30, Tier.NVME: 2**20}, "cpu", tmp_path)
    steps(plain, plain_optimizer, 4)
    model = models.make_model("llama")
    there, trace = budgets(model, 0.05, "standin"), known_trace(model)
    half = len(trace.moments) // 2
    wrong = replace(trace, moments=(*trace.moments[half:], *trace.moments[:half]))
    model, optimizer = wrap(there, "standin", tmp_path, trace=wrong)
    schedule = world_of(model).schedule
    steps(model, optimizer, 4)
    assert world_of(model).schedule is not schedule, "recorded anew"
    for (name, a), b in zip(plain.state_dict(dtype=torch.float32).items(),
                            model.state_dict(dtype=torch.float32).values(), strict=True):  # fmt: skip
        assert torch.equal(a, b), name


def test_evaluation_between_steps_is_no_step(tmp_path: Path) -> None:
    model = models.make_model("llama")
    trace, there = known_trace(model), budgets(model, 0.05, "standin")
    model, optimizer = wrap(there, "standin", tmp_path, trace=trace)
    best = steps(model, optimizer, 2)[-1]
    with torch.no_grad():
        for _ in range(3):
            model(**models.make_batches(1, 1)[0][0])
    model.memory_report()
    models_moved = steps(model, optimizer, 2)
    assert models_moved[-1] == best and not world_of(model).foresight._num_strange


def test_plans_and_traces_of_something_else_are_refused(tmp_path: Path) -> None:
    model = models.make_model("llama")
    there, trace = budgets(model, 0.5, "cpu"), known_trace(model)
    said = make_plan(trace, None, there, max_chunk=MAX_CHUNK)
    other = known_trace(models.make_model("gpt2"))
    with pytest.raises(PlanMismatch, match="the trace is of another model"):
        wrap(there, "cpu", tmp_path, trace=other)
    for settings, words in (
        ({"precision": "fp32"}, "precision='bf16', and here it is 'fp32'"),
        ({"gradients": "accumulate"}, "gradients='retain', and here it is 'accumulate'"),
    ):
        with pytest.raises(PlanMismatch, match=words):
            wrap(there, "cpu", tmp_path, placement=said, **settings)
    with pytest.raises(PlanMismatch, match="offload_activations=None, and the config says 'nvme'"):
        wrap(there, "cpu", tmp_path, placement=said, offload_activations="nvme")
    with pytest.raises(gemini.BudgetExceeded):
        wrap({**there, Tier.CPU: there[Tier.CPU] // 4}, "cpu", tmp_path, placement=said)
    with pytest.raises(TypeError, match=r"trace= is a gemini.MemoryTrace, got str"):
        gemini.GeminiConfig(trace="trace.json")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a gemini.StaticPlacement or a gemini.Plan, got {}"):
        gemini.GeminiConfig(placement={})  # type: ignore[arg-type]
