"""The commands that train, and the one that says what there is to train on: train, demo, doctor."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gemini.cli.app import OnceForAll, app, console, refusals, with_options
from gemini.jobs.options import from_yaml, record_of
from gemini.jobs.settings import TrainSettings
from gemini.ranks import launch


@app.command()
@refusals
def doctor(
    store: Annotated[
        Path | None, typer.Argument(help="A durable store, the nvme_path of a run: say what is in it, check all of it.")
    ] = None,
    nvme_path: Annotated[
        Path | None,
        typer.Option(help="Try this folder as the NVMe tier: direct I/O, room; and a durable store in it."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", metavar="", help="Measure the machine's speeds as well; with --nvme-path the drive's too."
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write what was measured to this file, for --machine of gemini plan.")
    ] = None,
) -> int:
    """Say what this machine offers: versions, processors, native kernels, memory, disks; --measure how fast it is.

    Or what is in a durable STORE, and whether it is whole.
    """
    if not launch.speaks():
        return 0
    from gemini.jobs.doctor import doctor as job

    return job(console(), store=store, nvme_path=nvme_path, measure=measure, json=json)


@app.command(cls=OnceForAll)
@refusals
@with_options(TrainSettings)
def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file of these options, as every run writes one into --out; others win over it."),
    ] = None,
    **given: Any,
) -> int:
    """Train a causal language model on text, prompts or chats, in the memory given. Ctrl-C saves a checkpoint.

    Several processes share the model and the work: torchrun --nproc-per-node 2 -m gemini train ...
    """
    # By its name: newer versions of typer have a click of their own.
    said = {k: v for k, v in given.items() if getattr(ctx.get_parameter_source(k), "name", "") != "DEFAULT"}
    said = ({} if config is None else from_yaml(config, TrainSettings)) | said
    if said.get("plan") is not None:
        said = _step_of(said["plan"]) | said
    settings = record_of(TrainSettings, said)
    settings.check()
    from gemini.jobs.train import train as job

    return job(settings, console(), command=_again())


@app.command()
@refusals
def demo(
    full: Annotated[bool, typer.Option("--full", metavar="", help="Four times the context and more steps.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    cpu_memory: Annotated[
        str | None, typer.Option(help="Budget in host memory. (Default: a fixed part of what the model needs.)")
    ] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="A folder for the rest. (Default: a new one in --out.)")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for the model.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Draws the weights, the order of the text and dropout.")] = 0,
) -> int:
    """Train a GPT-2-shaped model on Python's own library in less memory than it needs, and check the result."""
    from gemini.jobs.demo import demo as job

    return job(console(), full=full, steps=steps, cpu_memory=cpu_memory, nvme_path=nvme_path, out=out, seed=seed)


def _step_of(path: Path) -> dict[str, Any]:
    """Of a plan, the options that it brings."""
    from gemini.jobs.planned import step_of
    from gemini.planning import document
    from gemini.planning.plan import Plan

    return step_of(document.load(path, "--plan", Plan.from_json))


def _again() -> str:
    """The command line that continues this run: the same one, resuming."""
    words = sys.argv[1:]
    last = ["--resume", "auto"]  # of an option that is given twice, the last one counts
    return launch.again(shlex.join(words if words[-2:] == last else [*words, *last]))
