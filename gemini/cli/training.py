"""The commands that train, and the one that says what there is to train on: train, demo, doctor."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gemini.cli.app import OnceForAll, app, refusals
from gemini.jobs.options import from_yaml, options
from gemini.jobs.plan_settings import as_tiles
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
        bool, typer.Option("--measure", help="Measure the machine's speeds as well; with --nvme-path the drive's too.")
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

    return job(Console(), store=store, nvme_path=nvme_path, measure=measure, json=json)


def with_options(record: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command that takes ``**given`` the options of a record."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        params = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints: dict[str, Any] = {p.name: inspect.get_annotations(command, eval_str=True)[p.name] for p in params}
        for name, (declared, kind) in options(record).items():
            flag = kind is bool
            several = "tuple" in str(kind)
            inner = list[Path] if several and "Path" in str(kind) else list[str] if several else kind
            about = typer.Option(
                *([f"--{name.replace('_', '-')}"] if flag else []),
                help=declared.metadata["words"],
                rich_help_panel=declared.metadata["group"],
            )
            if kind == int | str | None:  # a number or a word
                inner = str | None
            default = None if several else declared.default
            hints[name] = Annotated[inner | None if default is None else inner, about]
            params.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            )
        command.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        command.__annotations__ = {**hints, "return": int}
        return command

    return decorate


def settings_of(given: dict[str, Any]) -> TrainSettings:
    """The record of what was given: a YAML file first, then what else was said.

    Raises:
        JobError: for a file that is no such thing.
    """
    given = dict(given)
    config = given.pop("config", None)
    said = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None and v != []}
    if said.get("tile_tokens") is not None:
        said["tile_tokens"] = as_tiles(str(said["tile_tokens"]))
    return TrainSettings(**({} if config is None else from_yaml(config, TrainSettings)) | said)


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
    source = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in given}
    said = {name: value for name, value in given.items() if source[name] != "DEFAULT"}
    settings = settings_of({"config": config, **said})
    settings.check()
    from gemini.jobs.train import train as job

    return job(settings, Console(), command=_again())


@app.command()
@refusals
def demo(
    full: Annotated[bool, typer.Option("--full", help="Four times the context and more steps.")] = False,
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

    return job(Console(), full=full, steps=steps, cpu_memory=cpu_memory, nvme_path=nvme_path, out=out, seed=seed)


def _again() -> str:
    """The command line that continues this run: the same one, resuming."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        if word == "--resume" and index + 1 < len(words):
            words = words[:index] + words[index + 2 :]
            break
        if word.startswith("--resume="):
            words = words[:index] + words[index + 1 :]
            break
    return launch.again(shlex.join([*words, "--resume", "auto"]))
