"""The command line ``gemini``: words in, jobs out, and how a refused request ends.

A command is a function of a record of ``gemini.jobs.settings``, whose docstring says what it is for, and whose fields
are its options. The commands that train have TRL's options instead, read by TRL's own parser. Nothing heavy is imported
before a command needs it.
A refused request is one paragraph on stderr and exit code 2; 1 means that a check of the job's own failed or another
process of it was lost, 130 that it was stopped by Ctrl-C. A traceback is always a bug. Of several processes the first
one of each machine says why it ends, and torchrun's report has the words of the one that ended first.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from gemini.errors import GeminiError, RankLost
from gemini.jobs import BROKEN, REFUSED, JobError, settings
from gemini.ranks import launch
from gemini.version import __version__

PATIENCE_S = 5
"""How long another process than the first waits for its words."""
_SPINS = "1000"
"""How often torch's threads look for work before they sleep (docs/decisions/2026-11-24-threads-that-wait.md)."""

RECORDS = {"trace": settings.TraceSettings, "plan": settings.PlanSettings, "doctor": settings.DoctorSettings}
"""The options of a command, if they are not TRL's. Its job is the function of its name in the module of its name."""
_TRAINERS = {
    "train": "Finetune or pretrain on text, prompts or chats: `gemini sft`, for short.",
    "sft": "Finetune or pretrain a language model on text, prompts or chats.",
    "dpo": "Train on pairs of a better and a worse answer.",
    "kto": "Train on answers that are good or bad.",
    "reward": "Train a model that says which of two answers is better.",
    "grpo": "Train on what a reward says of groups of the model's own answers.",
    "rloo": "The same with a baseline of the other answers of a group.",
    "distillation": "Train on what a teacher says of each token of the model's own answers.",
}
_DEMO = (
    "Train a GPT-2-shaped model on Python's own library in less memory than it needs, and check the result. "
    "Its options are those of gemini sft."
)
_TRL = "TRL's trainer, options and YAML (--config) in the memory given. Ctrl-C saves a checkpoint."
COMMANDS = {
    **{name: " ".join(str(record.__doc__).split()) for name, record in RECORDS.items()},
    "demo": _DEMO,
    **{name: f"{about} {_TRL}" for name, about in _TRAINERS.items()},
}
"""What each command is for."""


def main() -> int:
    """The console script; returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # libgomp reads it once, when torch is imported
    return app()


def app(words: Sequence[str] | None = None) -> int:
    """Run the command of ``words`` (of the process's own, if None), say what it refuses, and return its exit code."""
    name, *rest = (sys.argv[1:] if words is None else words) or [""]
    try:
        return _run(name, rest)
    except GeminiError as e:
        return _say(str(e), e, BROKEN if isinstance(e, RankLost) else REFUSED)
    except ImportError as e:
        if e.name not in ("transformers", "accelerate", "datasets", "trl", "yaml"):
            raise
        needed = f"this command needs {e.name}, an optional package: pip install '.[train]' in Gemini's folder"
        return _say(needed, e, REFUSED)
    except SystemExit as e:  # argparse's, behind --help, or that of a function of the program's own
        return _say(e.code, e, 1) if isinstance(e.code, str) else e.code or 0
    except KeyboardInterrupt as e:
        return _say("stopped; what was not saved is gone", e, 130)


def _run(name: str, words: list[str]) -> int:
    if name == "--version":
        print(f"gemini {__version__}")
        return 0
    if name in ("", "-h", "--help"):
        print("Usage: gemini COMMAND [OPTIONS]\n")
        print("Train models that do not fit: params and optimizer states in chunks on GPU, CPU and NVMe.\n")
        for known, about in COMMANDS.items():
            print(f"  {known:<14}{about.partition('. ')[0].rstrip('.')}")
        print("\n`gemini COMMAND --help` lists its options; `gemini --version` says the version.")
        return 0 if name else REFUSED
    if name not in COMMANDS:
        raise JobError(f"No such command: {name}. There are {', '.join(COMMANDS)}.")
    about, record = COMMANDS[name], RECORDS.get(name)
    console = Console(markup=False, highlight=False, soft_wrap=True)  # text as it is, colours on a terminal alone
    if record is None:
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: bars are for those who look on
        from gemini.jobs.train import demo, train

        if name == "demo":
            return demo(words, console, about)
        return train("sft" if name == "train" else name, words, console, about)
    asked = settings.RecordParser(name, about, record).read(words)
    return int(getattr(importlib.import_module(f"gemini.jobs.{name}"), name)(asked, console))


def _say(words: str, cause: BaseException, code: int) -> int:
    """Say why it ends: the first process of a machine itself, another one in torchrun's report, if there is one, unless
    the first one has said the same within ``PATIENCE_S``, which stands beside their reports.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    said = None if report is None else Path(report).parents[1] / "said"
    if launch.speaks():
        print(f"gemini: {words}", file=sys.stderr, flush=True)
        if said is not None:
            with suppress(OSError):
                said.write_text(words)
        return code
    if said is None:
        print(f"gemini: rank {launch.rank()}: {words}", file=sys.stderr)
        return code
    until = time.monotonic() + (PATIENCE_S if code == REFUSED else 0)
    while not (same := said.is_file() and said.read_text() == words) and time.monotonic() < until:
        time.sleep(0.05)
    if not same:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(cause)
    return code
