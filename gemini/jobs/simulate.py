"""``gemini simulate``: a saved plan, played on a machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import gemini
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import SimulateSettings
from gemini.jobs.step_files import check_files, say, write_all
from gemini.planning import document
from gemini.planning.hardware import load_hardware, machine_names
from gemini.planning.plan import Plan


def simulate(path: Path, settings: SimulateSettings, console: Console) -> int:
    """Play, write and say it; returns the exit code."""
    check_files(settings.out, settings.picture)
    if settings.machine is None:
        raise JobError(
            f"Say whose speeds to play the plan with: --machine NAME ({', '.join(machine_names())}), or --machine FILE "
            "of `gemini doctor --measure --json FILE`."
        )
    plan = document.load(path, "", Plan.from_json)
    hardware = load_hardware(settings.machine).with_gpus(settings.gpus or plan.layout.ranks)
    timeline = gemini.simulate(plan, hardware, schedule=settings.schedule, gpus=settings.gpus)
    if settings.json:
        print(timeline.to_json())
    else:
        say(console, str(timeline).splitlines())
    write_all(settings, timeline.to_json(), timeline, console)
    return 0
