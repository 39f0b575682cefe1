"""What all commands share: the app they belong to, and how a refused request ends.

A refused request is one paragraph on stderr and exit code 2; 1 means that a check of the job's own failed or another
process of it was lost, 130 that it was stopped by Ctrl-C. A traceback is always a bug. Of several processes (torchrun)
one says what all of them have to say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from gemini.errors import GeminiError
from gemini.jobs.errors import REFUSED, JobError, SaidByRanks, exit_code_of
from gemini.jobs.options import ELSEWHERE, TILES, options, spelled
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


def with_options(record: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command that takes ``**given`` the options of a record, after its own."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        params = [p for p in own if p.kind is not p.VAR_KEYWORD]
        hints: dict[str, Any] = {p.name: p.annotation for p in params}
        for name, (declared, kind) in options(record).items():
            several, default = "tuple" in str(kind), declared.default
            if several:
                kind, default = list[Path] if "Path" in str(kind) else list[str], None
            kind = str | None if kind == TILES else kind if default is not None else kind | None
            about = typer.Option(
                *([spelled(name)] if kind is bool else []),  # or there would be a --no-... too
                help=escape(declared.metadata["words"]),
                metavar="" if kind is bool else None,  # typer would say <bool>, as if a value had to follow
                rich_help_panel=declared.metadata["group"],
            )
            hints[name] = Annotated[kind, about]
            params.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            )
        command.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        command.__annotations__ = {**hints, "return": int}
        return command

    return decorate


def console() -> Console:
    """What jobs print on: text as it is, colours on a terminal alone."""
    return Console(markup=False, highlight=False, soft_wrap=True)
