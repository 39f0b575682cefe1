"""The planner: fits what fits, moves next to nothing more than it must, and says the same thing twice."""

import random
import re
from dataclasses import replace

import pytest
from traces import decoder_trace, llama_70b

from gemini.errors import BudgetExceeded, MissingFigure, PlanMismatch, parse_bytes
from gemini.planning.costs import Speeds
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.placement import Problem, StaticPlacement, bytes_per_tier, fill_fastest
from gemini.planning.plan import Plan, window_room
from gemini.planning.planner import Planner, budgets_of, plan, pose_problem
from gemini.planning.trace import MemoryTrace, Source
from gemini.planning.working import activation_bytes
from gemini.tiers import Boundary, MemoryBudget, Tier
from tests.planning.policies import check_plan

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME
SMALL = decoder_trace(hidden=64, layers=12, tokens=64)
STATE = 14 * SMALL.num_params  # 12 bytes per param and retained gradients
STAGING = 18 * 2**20


def budgets(gpu: float | None, cpu: float, nvme: float | None, trace: MemoryTrace = SMALL) -> dict[Tier, int]:
    """Fractions of the model's state, beside what a step needs in any case."""
    chunk = max(c.numel for c in trace.layout().chunks)
    found = {CPU: int(cpu * STATE) + min(STAGING, 18 * chunk) + 2 * chunk * 2}
    if gpu is not None:
        found[GPU] = int(gpu * STATE) + activation_bytes(trace, offloaded=False) + 2 * 2 * chunk
    if nvme is not None:
        found[NVME] = int(nvme * STATE)
    return found


def random_budgets(rng: random.Random) -> dict[Tier, int]:
    gpu = rng.choice((None, None, rng.random(), 0.2 * rng.random()))
    return budgets(gpu, rng.choice((rng.random(), 0.2 * rng.random(), 1.2)), rng.choice((None, 1.2, 1.2)))


def problem_of(there: dict[Tier, int]) -> Problem:
    return pose_problem(SMALL, there, precision="bf16")


def test_plans_that_fit_keep_every_budget_and_gather_what_is_needed() -> None:
    rng, fitting = random.Random(3), 0
    for _ in range(30):
        there, schedule = random_budgets(rng), rng.choice(("serial", "overlapped"))
        try:
            made = plan(SMALL, None, there, schedule=schedule)
        except BudgetExceeded:
            with pytest.raises(BudgetExceeded):
                fill_fastest(problem_of(there))
            continue
        fitting += 1
        check_plan(made)
        assert all(used <= there[tier] for tier, used in made.bytes_per_tier.items())
        assert Plan.from_json(made.to_json()) == made
        if fitting % 5 == 0:
            assert plan(SMALL, None, there, schedule=schedule) == made, "the same question has the same answer"
    assert 10 < fitting < 30


def test_a_plan_never_costs_more_than_the_fastest_tier_first() -> None:
    rng, better = random.Random(11), 0
    for _ in range(20):
        there = random_budgets(rng)
        planner = Planner(SMALL, Speeds.typical())
        problem = problem_of(there)
        try:
            plain = planner.with_moves(problem, fill_fastest(problem), None)
        except BudgetExceeded:
            continue
        best = planner.refined(planner.choose(problem, None, None))
        assert planner.cost(best) <= planner.cost(plain)
        better += planner.cost(best) < 0.99 * planner.cost(plain)
    assert better, "and somewhere it is better"


def test_everything_stays_on_the_computing_tier_if_it_fits() -> None:
    made = plan(SMALL, None, budgets(None, 1.2, 1.0))
    assert made.problem.gradients == "retain"
    assert plan(SMALL, None, budgets(None, 2, 1.0), accumulate=2).problem.gradients == "accumulate", "of several, sums"
    assert {tier for homes in made.placement.homes for tier in homes.values()} == {CPU}
    assert not made.traffic and not any(moves.fetch for moves in made.moves)
    roomy = plan(SMALL, None, budgets(1.2, 1.2, None))
    assert {tier for homes in roomy.placement.homes for tier in homes.values()} == {GPU}
    assert all(roomy.update_tier(i) is GPU for i in range(len(roomy.layout.chunks)))


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("layers", [8, 24, 80])
def test_weights_cross_to_the_gpu_hardly_more_often_than_they_must(share: float, layers: int) -> None:
    """n chunks, forward and backward, room for k of them beside the working slots: 2 n - k must cross."""
    trace = decoder_trace(hidden=256, layers=layers, tokens=32, vocab=2000)
    weights = 2 * trace.num_params
    there = {
        CPU: 20 * weights + STAGING,
        GPU: int(share * weights) + activation_bytes(trace, offloaded=False) + 4 * 2**20,
    }
    made = plan(trace, None, there, placement=StaticPlacement())
    chunks = [made.problem.window_bytes(i) for i in range(len(made.layout.chunks))]
    largest = max(chunks)
    slots = (window_room(made.problem, made.placement) - made.problem.working_set) // largest
    bound = max(2 * sum(chunks) - slots * largest, sum(chunks))
    assert made.traffic[Boundary(CPU, GPU)] <= 1.03 * bound
    assert made.traffic[Boundary(GPU, CPU)] == 2 * sum(c.payload for c in made.layout.chunks), "gradients, once"


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("layers", [8, 24])
def test_states_cross_to_the_drive_hardly_more_often_than_they_must(share: float, layers: int) -> None:
    """What host memory cannot hold, in whole chunks, is read and written once in a step, and nothing else."""
    trace = decoder_trace(hidden=256, layers=layers, tokens=32, vocab=2000)
    layout = trace.layout()
    state = 14 * layout.numel
    spoken_for = sum(pose_problem(trace, {CPU: 0}, precision="bf16").spoken_for().values())
    made = plan(trace, None, {CPU: int(share * state) + spoken_for, NVME: 2 * state})
    largest = 4 * max(chunk.numel for chunk in layout.chunks)
    room = int(share * state) // largest * largest
    bound = state - room
    assert made.traffic[Boundary(NVME, CPU)] <= 1.03 * bound
    assert made.traffic[Boundary(CPU, NVME)] <= 1.03 * bound


def test_slow_links_move_adam_to_the_gpu() -> None:
    """Of two machines with the same budgets the one whose host is slow updates more chunks on the GPU."""

    def updated_on_gpu(update_cpu: float) -> int:
        figures = {
            "h2d": 25e9, "d2h": 25e9, "gpu_bandwidth": 1e12, "update_cpu": update_cpu, "gpu_flops_bf16": 1e14,
            "cpu_bytes": 2**40, "gpu_bytes": 2**40,
        }  # fmt: skip
        machine = Hardware("machine", {key: Figure(value, "made up for a test") for key, value in figures.items()})
        made = plan(SMALL, machine, budgets(0.4, 1.2, None))
        return sum(made.update_tier(i) is GPU for i in range(len(made.layout.chunks)))

    assert updated_on_gpu(5e-9) > updated_on_gpu(1e-13)


def test_checkpointed_activations_go_to_host_memory_when_that_pays_or_is_needed() -> None:
    trace = decoder_trace(hidden=256, layers=40, tokens=4096, checkpointing=True)
    without = activation_bytes(trace, offloaded=False)
    less = activation_bytes(trace, offloaded=True)
    assert less < without - 0.9 * trace.checkpoint_bytes
    roomy = {CPU: 40 * trace.num_params + 2**28, GPU: 20 * trace.num_params + 2 * without}
    assert plan(trace, None, roomy, offload_activations="auto").offload_activations is None
    tight = {**roomy, GPU: less + 4 * 2**20}
    with pytest.raises(BudgetExceeded):
        plan(trace, None, tight)
    made = plan(trace, None, tight, offload_activations="auto")
    assert made.offload_activations == "cpu" and made.problem.offloaded == trace.checkpoint_bytes
    assert made.bytes_per_tier[CPU] >= trace.checkpoint_bytes
    assert Plan.from_json(made.to_json()) == made


def test_ranks_share_host_memory_and_drives() -> None:
    there = {GPU: 2**30, CPU: 2**30, NVME: 2**30}
    assert budgets_of(there, None, 4) == {GPU: 2**30, CPU: 2**28, NVME: 2**28}
    made = plan(decoder_trace(hidden=256), None, there, ranks=4)
    assert made.layout.ranks == 4 and made.problem.budgets[CPU] == 2**28
    assert made.bytes_per_param == pytest.approx(12, rel=0.01)
    shard, beside = 14 * made.trace.num_params / 4, made.problem.staging + 2**26
    assert sum(made.bytes_per_tier.values()) < shard + beside, "each holds its shard"


def test_what_a_budget_leaves_out_is_the_machines_with_a_margin() -> None:
    machine = Hardware("box", {"cpu_bytes": Figure(1000, "a test"), "gpu_bytes": Figure(500, "a test")})
    assert budgets_of(MemoryBudget(), machine) == {GPU: 400, CPU: 800}
    assert budgets_of(MemoryBudget(gpu=0, cpu=7), machine) == {CPU: 7}
    with pytest.raises(ValueError, match="needs a budget of host memory"):
        budgets_of({GPU: 1}, None)
    with pytest.raises(ValueError, match="a budget of 'cpu', which is no gemini.Tier: give gemini.MemoryBudget"):
        budgets_of({"cpu": "4GiB"}, None)  # type: ignore[dict-item]


def test_what_a_refusal_says_is_enough() -> None:
    """Of host memory and drives for all ranks of a machine, as budgets are given."""
    rng, refused = random.Random(7), 0
    for _ in range(20):
        there, ranks = {tier: n // 2 for tier, n in random_budgets(rng).items()}, rng.choice((1, 2))
        try:
            plan(SMALL, None, there, ranks=ranks)
        except BudgetExceeded as e:
            change, refused = str(e).partition("Cheapest change: ")[2].partition(", or ")[0], refused + 1
            said = re.findall(r"(cpu|gpu|nvme) budget to (?:at least )?([0-9.]+ \w+)|(nvme)=([0-9.]+ \w+)", change)
            assert said, change
            more = {Tier(one or drive): parse_bytes(of_one or of_drive) for one, of_one, drive, of_drive in said}
            plan(SMALL, None, there | more, ranks=ranks)
    assert refused > 8


def test_a_refusal_names_each_budget_once() -> None:
    """Scales of compact states stay in host memory, which computes here: one figure has them and the rest."""
    trace = decoder_trace(hidden=128, layers=4, tokens=64)
    for there in ({CPU: 1000}, {CPU: 1000, NVME: 2**40}):
        with pytest.raises(BudgetExceeded) as refused:
            plan(trace, None, there, states="compact")
        said = re.findall(r"cpu budget to (?:at least )?([0-9.]+ \w+)|nvme=([0-9.]+ \w+)", str(refused.value))
        assert [bool(of_cpu) for of_cpu, _ in said] == [True, *([] if NVME in there else [False])], refused.value
        plan(trace, None, {NVME: parse_bytes(said[-1][1] or "1TiB"), CPU: parse_bytes(said[0][0])}, states="compact")


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(BudgetExceeded, match="Cheapest change: raise the cpu budget to at least"):
        plan(SMALL, None, {CPU: 1000, NVME: 2**40})
    with pytest.raises(BudgetExceeded, match="give nvme_path= and nvme="):
        plan(SMALL, None, budgets(None, 0.5, None))
    with pytest.raises(MissingFigure, match="'h2d'.*gemini doctor --measure"):
        plan(SMALL, Hardware("bare", {}), budgets(0.1, 1.2, None))
    with pytest.raises(ValueError, match="local_ranks=0: it is at least 1"):
        plan(SMALL, None, budgets(None, 1.2, None), local_ranks=0)
    with pytest.raises(ValueError, match="schedule='fast' is not known"):
        plan(SMALL, None, budgets(None, 1.2, None), schedule="fast")
    with pytest.raises(PlanMismatch, match="has no moments"):
        plan(replace(SMALL, moments=()), None, budgets(None, 1.2, None))
    with pytest.raises(ValueError, match="compute='gpu' has no budget"):
        plan(SMALL, None, budgets(None, 1.2, None), compute=GPU)
    with pytest.raises(ValueError, match="activations= must be finite and not negative, got -1"):
        plan(SMALL, None, budgets(0.1, 1.2, None), activations=-1)
    with pytest.raises(ValueError, match=r"ranks=2\.0: it is at least 1, and a whole number"):
        plan(SMALL, None, budgets(None, 1.2, None), ranks=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"transient" has one backward per update, accumulate=2 several'):
        plan(SMALL, None, budgets(None, 1.2, None), gradients="transient", accumulate=2)
    with pytest.raises(TypeError, match=r"placement= is a gemini.StaticPlacement, or homes \(plan.placement\)"):
        plan(SMALL, None, budgets(None, 1.2, None), placement=plan(SMALL, None, budgets(None, 1.2, None)))  # type: ignore[arg-type]


def test_a_plan_of_another_model_or_other_settings_is_refused() -> None:
    made = plan(SMALL, None, budgets(None, 1.2, None))
    with pytest.raises(PlanMismatch, match=r"'model.layers.12.input_layernorm.weight' is absent there"):
        decoder_trace(hidden=64, layers=13, tokens=64).check_same_model(made.trace, what="the plan")
    with pytest.raises(PlanMismatch, match="precision='bf16', and here it is 'fp32'"):
        made.check_settings(precision="fp32")
    with pytest.raises(PlanMismatch, match="written in version 99"):
        Plan.from_json(made.to_json().replace('"version":1', '"version":99', 1))
    with pytest.raises(
        PlanMismatch, match="a plan is needed, and this is a trace: `gemini plan --out FILE` writes one"
    ):
        Plan.from_json(SMALL.to_json())


def test_check_plan_sees_what_is_not_gathered_and_what_is_too_much() -> None:
    trace = decoder_trace(hidden=64, layers=12, tokens=64)
    made = plan(trace, None, budgets(0.02, 1.2, None), placement=StaticPlacement())
    fetches = [i for i, moves in enumerate(made.moves) if moves.fetch]
    lazy = [moves._replace(fetch=()) if i == fetches[-1] else moves for i, moves in enumerate(made.moves)]
    with pytest.raises(PlanMismatch, match="does not gather"):
        check_plan(replace(made, moves=tuple(lazy)))
    hoarding = tuple(moves._replace(evict=()) for moves in made.moves)
    with pytest.raises(PlanMismatch, match="where there is room for"):
        check_plan(replace(made, moves=hoarding))


def test_a_70b_model_is_planned_in_its_budgets() -> None:
    gib = 2**30
    made = plan(llama_70b(), None, {GPU: 24 * gib, CPU: 256 * gib, NVME: 2000 * gib})
    check_plan(made)
    assert made.bytes_per_param == pytest.approx(12, rel=1e-3)
    assert bytes_per_tier(made.problem, made.placement)[GPU] <= 24 * gib
    states = [made.placement.homes[i]["exp_avg"] for i in range(len(made.layout.chunks))]
    assert NVME in states
    assert made.trace.source is Source.AHEAD and "12.00 bytes each" in str(made)
