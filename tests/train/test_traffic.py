"""The closed forms of traffic against the mover: one step's bytes over every boundary, to the byte.

Models, precisions, gradients and placements are crossed; what was gathered is what the manager did gather, and every
other byte follows from homes and sizes alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gemini
from gemini.optim import LionRule
from gemini.planning import rules as spec_rules
from gemini.planning.placement import Placement, Problem
from gemini.planning.planes import ADAM, RuleSpec
from gemini.planning.trace import TracedParam
from gemini.planning.traffic import by_name, path, step_traffic, update_traffic
from gemini.tiers import Boundary, Tier
from tests import models
from tests.planning.stacks import stack_trace
from tests.scaling import backward, make_step
from tests.train.helpers import manage
from tests.world import world_of

ALL, HALF, NONE = 1.0, 0.5, 0.0
# weights and states on the GPU, weights and states on NVMe: as fractions.
HOMES = {
    "all on the host": (NONE, NONE, NONE, NONE),
    "all on nvme": (NONE, NONE, ALL, ALL),
    "weights on nvme": (NONE, NONE, ALL, NONE),
    "states on nvme": (NONE, NONE, NONE, ALL),
    "half on nvme": (NONE, NONE, HALF, HALF),
    "all on the gpu": (ALL, ALL, NONE, NONE),
    "weights on the gpu": (ALL, NONE, NONE, NONE),
    "weights on the gpu, states on nvme": (ALL, NONE, NONE, ALL),
    "states on the gpu, weights on nvme": (NONE, ALL, ALL, NONE),
    "everywhere": (0.3, 0.4, 0.3, 0.3),
}


def wrap(device: str, homes: str, folder: Path, **how: Any) -> Any:
    gpu, placement = "64MiB" if device == "standin" else None, gemini.StaticPlacement(*HOMES[homes])
    return manage(models.make_model("llama"), folder, device, gpu=gpu, placement=placement, max_chunk=16384, **how)


def posed(model: Any) -> tuple[Problem, Placement]:
    """The problem as the closed forms read it: layout, precision, gradients and the computing tier."""
    world = world_of(model)
    problem = Problem(
        world.layout,
        world.config.precision,
        world.config.gradients,
        {},
        world.device.tier,
        0,
        0,
        rule=world.problem.rule,
    )
    return problem, world.placement


def fetched_in(model: Any) -> list[tuple[int, bool]]:
    """The chunks that are gathered from here on, once for every time, and whether that is between two steps."""
    manager, mover, fetched = world_of(model).manager, world_of(model).mover, []
    gather = manager.source.gather

    def noted(chunk: Any) -> Any:
        working = mover._of_thread.working
        fetched.append((chunk.spec.index, working is not None and working.ahead))
        return gather(chunk)

    manager.source.gather = noted
    return fetched


def compare(device: str, homes: str, folder: Path, *, backwards: int = 1, **settings: Any) -> dict[str, int]:
    """Two steps; the second is compared."""
    model = wrap(device, homes, folder, **settings)
    optimizer = gemini.HybridAdam(
        model.parameters(), lr=1e-3, step_in_backward=settings.get("gradients") == "transient"
    )
    fetched = fetched_in(model)
    for _ in range(2):
        world_of(model).settle()
        ahead = [index for index, is_ahead in fetched if is_ahead]
        fetched.clear()
        for _ in range(backwards):
            backward(model, model(**models.make_batches(1, 1)[0][0]).loss)
        make_step(model, optimizer)
        optimizer.zero_grad()
    problem, placement = posed(model)
    for index, chunk in enumerate(world_of(model).chunks):
        for kind, home in placement.homes[index].items():
            assert chunk.planes[kind].tier is home
    moved = model.memory_report()["moved"]
    ahead += [index for index, is_ahead in fetched if not is_ahead]
    assert moved == by_name(step_traffic(problem, placement, ahead, backwards=backwards))
    return moved


ON_CPU = [name for name, (on_gpu, states_on_gpu, _, _) in HOMES.items() if not on_gpu and not states_on_gpu]


@pytest.mark.parametrize(
    ("device", "homes"), [*(("cpu", homes) for homes in ON_CPU), *(("standin", homes) for homes in HOMES)]
)
def test_the_forms_are_what_moved(device: str, homes: str, tmp_path: Path) -> None:
    """On a GPU nothing jumps over host memory."""
    moved, over_nvme = compare(device, homes, tmp_path), {"nvme->cpu", "cpu->nvme"}
    if device == "cpu":
        assert bool(moved) == ("nvme" in homes) and moved.keys() <= over_nvme
    assert moved.keys() <= {"cpu->gpu", "gpu->cpu", *over_nvme}


@pytest.mark.parametrize("device", ["cpu", "standin"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("homes", ["all on the host", "all on nvme", "everywhere"])
def test_masters_wider_than_what_is_gathered(device: str, homes: str, precision: str, tmp_path: Path) -> None:
    if device == "standin" or homes != "everywhere":
        compare(device, homes, tmp_path, precision=precision)


COMPACT = {"states": "compact"}
BF16_SUMS = {"gradients": "accumulate_bf16", **COMPACT}


@pytest.mark.parametrize(
    ("device", "homes", "backwards", "how"),
    [
        *(
            ("standin", homes, 1, {"gradients": "transient"})
            for homes in ("all on nvme", "all on the gpu", "everywhere")
        ),
        ("cpu", "all on nvme", 3, {"gradients": "accumulate"}),
        ("standin", "everywhere", 3, {"gradients": "accumulate"}),
        *(("cpu", "all on nvme", backwards, BF16_SUMS) for backwards in (1, 3)),
        *(("standin", "everywhere", backwards, BF16_SUMS) for backwards in (1, 3)),
        *(("cpu", "all on nvme", 1, {"gradients": kind, **COMPACT}) for kind in ("retain", "transient")),
    ],
)
def test_other_gradients_and_compact_states_are_what_moved(
    device: str, homes: str, backwards: int, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)
    compare(device, homes, tmp_path, backwards=backwards, **how)


@pytest.mark.parametrize(("rule", "most"), [(ADAM, 0.45), (LionRule().spec, 0.5)], ids=["Adam", "Lion"])
def test_a_compact_update_from_a_drive_moves_less_than_half(rule: RuleSpec, most: float) -> None:
    """Weight, residual and states both ways, but weights come out of their windows: exact Adam moves 22 bytes per param
    and compact 8; scales stay in memory.
    """
    numel, params = 5632 * 2048, (TracedParam(("up.weight",), (5632, 2048)),)
    trace = replace(stack_trace(1), params=params)
    moved = []
    for spec in (rule, spec_rules.compact(rule)):
        problem = Problem(trace.layout(rule=spec), "bf16", "transient", {}, Tier.CPU, 0, 0, rule=spec)
        (chunk,) = problem.layout.chunks
        homes = {kind: Tier.CPU if form.stays_in_memory else Tier.NVME for kind, form in problem.forms[0].items()}
        moved.append(sum(update_traffic(problem, homes, chunk.index).values()))
    states = len(rule.planes)
    assert moved == [(2 * (2 + 2 + 4 * states) - 2) * numel, (2 * (2 + 1 + states) - 2) * numel]
    assert moved[1] <= most * moved[0]


def test_what_crosses_host_memory_counts_on_both_boundaries() -> None:
    assert path(Tier.NVME, Tier.GPU) == (Boundary(Tier.NVME, Tier.CPU), Boundary(Tier.CPU, Tier.GPU))
    assert path(Tier.CPU, Tier.CPU) == ()
