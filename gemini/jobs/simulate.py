"""``gemini simulate``: a saved plan, played on a machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import gemini
from gemini.errors import PlanMismatch
from gemini.jobs.errors import JobError
from gemini.jobs.plan import draw
from gemini.jobs.plan_settings import STEP_SCHEDULES, at_least, one_of
from gemini.jobs.trace import say, write_file
from gemini.planning import document
from gemini.planning.machines import load_hardware, machine_names
from gemini.planning.plan import Plan


def simulate(
    path: Path,
    console: Console,
    *,
    machine: str | None,
    gpus: int | None,
    schedule: str,
    as_json: bool,
    out: Path | None,
    pictures: tuple[Path, ...],
) -> int:
    """Play, write and say it; returns the exit code."""
    one_of(STEP_SCHEDULES, "--schedule", schedule)
    at_least(1, "--gpus", gpus)
    if machine is None:
        raise JobError(
            f"Say whose speeds to play the plan with: --machine NAME ({', '.join(machine_names())}), or --machine FILE "
            "of `gemini doctor --measure --json FILE`."
        )
    hardware = load_hardware(machine)
    text = document.read_file(path, "the plan")
    try:
        plan = Plan.from_json(text)
    except PlanMismatch as e:
        raise PlanMismatch(f"{path}: {e}") from e
    timeline = gemini.simulate(plan, hardware, schedule=schedule, gpus=gpus)
    if out is not None:
        write_file(out, timeline.to_json())
    draw(pictures, timeline)
    if as_json:
        print(timeline.to_json())
        return 0
    say(console, str(timeline).splitlines())
    for written in (*((out,) if out is not None else ()), *pictures):
        say(console, [f"written to {written}"])
    return 0
