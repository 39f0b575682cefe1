"""``gemini plan --fastest`` against every way there is: as quick as the best of them, which none of its bounds is above,
not slower on a better machine; and what it says runs.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from traces import decoder_trace

import gemini
from gemini.errors import BudgetExceeded
from gemini.jobs import planner
from gemini.jobs.fastest import choose
from gemini.jobs.planner import Traces, Way
from gemini.jobs.settings import PlanSettings, TraceSettings
from gemini.jobs.train_options import Parser, options_of
from gemini.planning.fastest import resized
from gemini.planning.hardware import load_hardware
from gemini.planning.trace import MemoryTrace
from tests.cli.commands import FOUR_BLOCKS, Command, flat, llama_config, refused

CLOSE = 1.03
SPEEDS = ("gpu_flops_bf16", "h2d", "d2h", "dram_bandwidth", "nvme_read", "nvme_write", "nvme_write_sustained")


class Case(NamedTuple):
    """A step to choose for."""

    settings: PlanSettings
    shape: dict[str, Any]
    """Of the model, as ``decoder_trace`` takes it."""


def draw(number: int, folder: Path) -> Case:
    """The case of that number: a model, a machine that is another one's, faster here and slower there, budgets from
    hardly enough on, and tokens of a step.
    """
    rng = random.Random(number)
    shape = {"hidden": rng.choice([256, 512, 1024]), "layers": rng.randint(2, 5), "vocab": rng.choice([500, 8000])}
    length = rng.choice([64, 256])
    config = llama_config(folder / "config.json", **{**FOUR_BLOCKS, "max_position_embeddings": 4096})
    hardware = load_hardware(rng.choice(["rtx4090", "rtx5090", "h100", "rtx3090"]))
    speeds = {key: hardware.figures[key].value * 10 ** rng.uniform(-2, 1) for key in SPEEDS if hardware.has(key)}
    speeds["update_cpu"] = hardware.figures["update_cpu"].value * 10 ** rng.uniform(-1, 1)
    (folder / "machine.json").write_text(hardware.with_figures("drawn", **speeds).to_json())
    params = decoder_trace(**shape, tokens=length).num_params
    gpu = int(params * rng.choice([0.5, 2, 6, 20])) + (40 << 20) + (1280 << 20)
    settings = PlanSettings(
        config=str(config),
        machine=str(folder / "machine.json"),
        seq_len=length,
        fastest=True,
        tokens_per_step=length * rng.choice([1, 4, 6, 12, 16]),
        gpu=f"{gpu}B",
        cpu=f"{int(params * rng.choice([4, 12, 17, 40])) + (100 << 20)}B",
        nvme="100GiB",
        schedule=rng.choice(["overlapped"] * 3 + ["serial"]),
    )
    settings.check()
    return Case(settings, shape)


def stand_in(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """Traces by arithmetic in the place of those of a model."""

    def take(settings: TraceSettings) -> MemoryTrace:
        length = settings.seq_len or 0
        tokens = settings.batch_size * length
        made = decoder_trace(**shape, tokens=tokens, checkpointing=settings.gradient_checkpointing)
        return replace(made, batch={"input_ids": (settings.batch_size, length)}, target="cuda")

    monkeypatch.setattr(planner, "take_trace", take)


def every_way(settings: PlanSettings) -> Iterator[tuple[Way, float]]:
    """All there are that fit, each planned and played as a whole, with its seconds."""
    sequences = (settings.tokens_per_step or 0) // (settings.seq_len or 1)
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    asked = replace(settings, fastest=False, tokens_per_step=None)
    for size, checkpointing, where in product(sizes, (False, True), ("no", "cpu")):
        if where == "cpu" and not checkpointing:
            continue
        changes = {"gradient_checkpointing": checkpointing, "offload_activations": where}
        way = Way(replace(asked, batch_size=size, accumulate=sequences // size, **changes))
        try:
            plan = way.plan()
        except BudgetExceeded:
            continue
        yield way, way.play(plan).step_seconds


def chosen_seconds(settings: PlanSettings) -> float | None:
    with Console(stderr=True, quiet=True).status("") as status:
        way, choice = choose(Way(settings), status)
    return way.play(way.plan()).step_seconds if choice.found else None


def check(case: Case) -> str:
    """Compare with the whole list; says what was found."""
    ways = list(every_way(case.settings))
    mine = chosen_seconds(case.settings)
    if mine is None:
        assert not ways
        return "nothing fits"
    best = min(seconds for _, seconds in ways)
    assert mine <= CLOSE * best, f"{mine} s chosen, {best} s is the best of {len(ways)}"
    for way, seconds in ways:
        assert way.least() <= seconds * (1 + 1e-6), f"{way.least()} s at least, and {seconds} s as played"
    return (
        f"{len(ways)} ways, {mine / best - 1:.2%} above the best, {max(s for _, s in ways) / best:.2f} times the worst"
    )


@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 200))])
def test_no_way_is_much_quicker(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(number, tmp_path)
    stand_in(monkeypatch, case.shape)
    print(number, check(case))
