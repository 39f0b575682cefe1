"""The commands: options in, jobs out, and how a refused request ends.

A command is a function of a record of ``gemini.jobs.settings``; its options are the fields of that record, its help is
its docstring. A refused request is one paragraph on stderr and exit code 2; 1 means that a check of the job's own
failed or another process of it was lost, 130 that it was stopped by Ctrl-C. A traceback is always a bug. Of several
processes (torchrun) one says what all of them have to say.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from gemini.errors import GeminiError
from gemini.jobs.errors import REFUSED, JobError, SaidByRanks, exit_code_of
from gemini.jobs.options import ELSEWHERE, TILES, options, record_of, spelled
from gemini.jobs.settings import (
    DemoSettings,
    DoctorSettings,
    PlanSettings,
    SimulateSettings,
    TraceSettings,
)
from gemini.ranks import launch
from gemini.version import __version__

app = typer.Typer(
    name="gemini",
    help="Train models that do not fit: params and optimizer states in chunks on GPU, CPU and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

P = ParamSpec("P")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gemini {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Say the version and leave.")
    ] = False,
) -> None:
    """Train models that do not fit: params and optimizer states in chunks on GPU, CPU and NVMe."""


# ---- how a command is made, and how it ends --------------------------------------------------------------------------


def refusals(command: Callable[P, int]) -> Callable[P, None]:
    """Run a job, print what it refuses in plain words, and leave with its exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except (JobError, GeminiError) as e:
            _say(str(e), e, exit_code_of(e))
        except ImportError as e:
            if e.name not in ("transformers", "accelerate", "datasets", "trl", "yaml"):
                raise
            needed = f"this command needs {e.name}, an optional package: pip install '.[train]' in Gemini's folder"
            _say(needed, e, REFUSED)
        except KeyboardInterrupt as e:
            _say("stopped; what was not saved is gone", e, 130)
        raise typer.Exit(code)

    return run


def _say(words: str, cause: BaseException, code: int) -> NoReturn:
    """Leave with ``code``, and with ``words`` unless another process says them."""
    if words and (launch.speaks() or isinstance(cause, SaidByRanks)):
        typer.echo(f"gemini: {words}", err=True)
    raise typer.Exit(code) from cause


# Newer versions of typer bring a click of their own: its UsageError is reached through what typer itself exports.
_UsageError: Any = typer.BadParameter.__base__


class OnceForAll(TyperCommand):
    """A command whose several processes complain about their options once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as e:
            ours = ELSEWHERE.get(str(getattr(e, "option_name", "")).replace("_", "-"))
            if ours is not None and any(ours in param.opts for param in self.params):
                e.message += f". Here it is {ours}."
            if launch.speaks():
                raise
            raise typer.Exit(REFUSED) from e


def command(record: type) -> Callable[[Callable[[Any], int]], Any]:
    """Make a command of a function of a ``record``: the options of the command line are the fields of it."""

    def decorate(job: Callable[[Any], int]) -> Any:
        def run(ctx: typer.Context, **given: Any) -> int:
            # By its name: newer versions of typer have a click of their own.
            said = {k: v for k, v in given.items() if getattr(ctx.get_parameter_source(k), "name", "") != "DEFAULT"}
            settings = record_of(record, said)
            settings.check()
            return job(settings)

        params = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        params += [_param(name, declared, kind) for name, (declared, kind) in options(record).items()]
        run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        run.__annotations__ = {param.name: param.annotation for param in params} | {"return": int}
        return app.command(job.__name__, cls=OnceForAll, help=inspect.getdoc(job))(refusals(run))

    return decorate


def _param(name: str, declared: Any, kind: Any) -> inspect.Parameter:
    """A field of a record as typer knows a parameter."""
    about, default, several = declared.metadata, declared.default, "tuple" in str(kind)
    if several:
        kind, default = list[Path] if "Path" in str(kind) else list[str], None
    kind = str | None if kind == TILES else kind if default is not None else kind | None
    if "argument" in about:
        default = inspect.Parameter.empty if about["required"] else default
        made: Any = typer.Argument(help=about["words"], show_default=False)
    else:
        made = typer.Option(
            *([spelled(name)] if kind is bool else []),  # or there would be a --no-... too
            help=escape(about["words"]),
            metavar="" if kind is bool else None,  # typer would say <bool>, as if a value had to follow
            rich_help_panel=about["group"],
        )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def console() -> Console:
    """What jobs print on: text as it is, colours on a terminal alone."""
    return Console(markup=False, highlight=False, soft_wrap=True)


# ---- the commands: what each does is imported when it is asked for, since torch takes seconds ------------------------


@command(TraceSettings)
def trace(settings: TraceSettings) -> int:
    """Trace a step of a model ahead of time: its memory beside params and its work. Needs no weights and no GPU."""
    from gemini.jobs.trace import trace as job

    return job(settings, console())


@command(PlanSettings)
def plan(settings: PlanSettings) -> int:
    """Does it fit, how fast will it be, what should be changed? From a config alone.

    Exit code 2 if it does not fit, 3 if it fits in more memory than the machine has that was named.

    For example: gemini plan config.json --gpu 24GiB --cpu 64GiB --nvme 1TB --machine rtx4090
    """
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


@command(SimulateSettings)
def simulate(settings: SimulateSettings) -> int:
    """Play a plan on a machine: how long a step takes, what waits for what, what moves and what every tier holds."""
    from gemini.jobs.trace import simulate as job

    return job(settings, console())


@command(DoctorSettings)
def doctor(settings: DoctorSettings) -> int:
    """Say what this machine offers: versions, processors, native kernels, memory, disks; --measure how fast it is.

    Or what is in a durable STORE, and whether it is whole.
    """
    if not launch.speaks():
        return 0
    from gemini.jobs.doctor import doctor as job

    return job(console(), **vars(settings))


_TRAINERS = {
    "train": "Finetune or pretrain on text, prompts or chats: what `gemini sft` is called for short.",
    "sft": "Finetune or pretrain a language model on text, prompts or chats.",
    "dpo": "Train on pairs of a better and a worse answer.",
    "kto": "Train on answers that are good or bad.",
    "reward": "Train a model that says which of two answers is better.",
    "grpo": "Train on what a reward says of groups of the model's own answers.",
    "rloo": "The same with a baseline of the other answers of a group.",
}


def _trainer(name: str, words: str) -> None:
    """A command whose options are TRL's: its own parser reads them."""

    def run(ctx: typer.Context) -> int:
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: bars are for those who look on
        from gemini.jobs.train import train as job

        return job("sft" if name == "train" else name, ctx.args, console())

    about = f"{words} TRL's trainer, options and YAML (--config) in the memory given. Ctrl-C saves a checkpoint."
    how = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=about, add_help_option=False, context_settings=how)(refusals(run))


for _name, _words in _TRAINERS.items():
    _trainer(_name, _words)


@command(DemoSettings)
def demo(settings: DemoSettings) -> int:
    """Train a GPT-2-shaped model on Python's own library in less memory than it needs, and check the result."""
    from gemini.jobs.demo import demo as job

    return job(settings, console())
