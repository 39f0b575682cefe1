"""The commands that answer before anything is run: trace, plan, simulate, machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gemini.cli.app import OnceForAll, app, console, refusals, with_options
from gemini.jobs.options import record_of
from gemini.jobs.plan_settings import PlanSettings, SimulateSettings, TraceSettings

_NAMES = "A Hugging Face config.json, a model folder (its weights are not read), or a preset: gpt2-small."


@app.command(cls=OnceForAll)
@refusals
@with_options(TraceSettings)
def trace(config: Annotated[str, typer.Argument(help=_NAMES, show_default=False)], **given: Any) -> int:
    """Trace a step of a model ahead of time: its memory beside params and its work. Needs no weights and no GPU."""
    settings = record_of(TraceSettings, {"config": config, **given})
    settings.check()
    from gemini.jobs.trace import trace as job

    return job(settings, console())


@app.command(cls=OnceForAll)
@refusals
@with_options(PlanSettings)
def plan(
    config: Annotated[
        str | None, typer.Argument(help=f"{_NAMES} With --trace it may be left out.", show_default=False)
    ] = None,
    **given: Any,
) -> int:
    """Does it fit, how fast will it be, what should be changed? From a config alone.

    Exit code 2 if it does not fit, 3 if it fits in more memory than the machine has that was named.

    For example: gemini plan config.json --gpu 24GiB --cpu 64GiB --nvme 1TB --machine rtx4090
    """
    settings = record_of(PlanSettings, {"config": config, **given})
    settings.check()
    from gemini.jobs.plan import plan as job

    return job(settings, console())


@app.command()
@refusals
def machines() -> int:
    """List the machines that --machine knows by name; their figures are data sheets' peaks, each with its source."""
    from gemini.errors import human_bytes
    from gemini.planning.hardware import machine, machine_names
    from gemini.tiers import Tier

    for name in machine_names():
        known = machine(name)
        sizes = (f"{tier.value} {human_bytes(known.capacity(tier) or 0)}" for tier in Tier)
        typer.echo(f"{name:<14}{known.figures['num_gpus'].value:>3.0f} x {',  '.join(sizes)}")
    return 0


@app.command(cls=OnceForAll)
@refusals
@with_options(SimulateSettings)
def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan: a JSON file of `plan --out`.", show_default=False)],
    **given: Any,
) -> int:
    """Play a plan on a machine: how long a step takes, what waits for what, what moves and what every tier holds."""
    settings = record_of(SimulateSettings, given)
    settings.check()
    from gemini.jobs.simulate import simulate as job

    return job(plan, settings, console())
