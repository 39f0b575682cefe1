"""``gemini simulate``: a saved plan, played on a machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import gemini
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import STEP_SCHEDULES, at_least, one_of
from gemini.jobs.step_files import check_files, say, write_all
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
    check_files(out, pictures)
    if machine is None:
        raise JobError(
            f"Say whose speeds to play the plan with: --machine NAME ({', '.join(machine_names())}), or --machine FILE "
            "of `gemini doctor --measure --json FILE`."
        )
    hardware = load_hardware(machine)
    plan = document.load(path, "", Plan.from_json)
    timeline = gemini.simulate(plan, hardware, schedule=schedule, gpus=gpus)
    if as_json:
        print(timeline.to_json())
    else:
        say(console, str(timeline).splitlines())
    write_all(out, timeline.to_json(), pictures, timeline, console=None if as_json else console)
    return 0
