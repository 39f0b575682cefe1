"""What a training job has beside its trainer: the folder of its checkpoints, the rows in which they stand, the lines of
what is logged, and the wish to stop.

Checkpoints (``OUT/checkpoint-500``) are ordinary ones of a Trainer with Gemini's states inside. A folder under its
final name is a whole one: :mod:`gemini.integrations.huggingface` writes under another name and renames.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gemini.errors import human_bytes
from gemini.integrations.huggingface_save import (
    as_checkpoint,
    check_resumable,
    committed,
    last_whole,
    newest,
    store_behind,
)
from gemini.jobs.errors import JobError, refusing
from gemini.jobs.team import Team
from gemini.memory.durable.folder import has_commit
from gemini.tiers import Tier

# ---- the folder of a run ---------------------------------------------------------------------------------------------

_NEWEST = ("auto", "True", "true")
"""Values of --resume_from_checkpoint that are no folder."""


def choose(resume: str | None, out: Path, *, store: Path | None = None) -> Path | None:
    """The checkpoint to start from, or None to start anew; a JobError if the one named is not there, or starting anew
    would mix with what is in ``out`` or ``store``.

    Args:
        resume: its folder; "auto" or "True" for the newest one, of which the latter must be there.
        store: the folder of the run's durable store.
    """
    kept = None if store is None or not has_commit(store) else committed(store)
    is_own = kept is not None and kept.run == os.path.realpath(out)
    if kept is not None and not is_own and resume in (None, *_NEWEST):
        raise JobError(
            f"--nvme_path {store} holds the durable store of {f'the run in {kept.run}' if kept.run else 'a program'}, "
            "which this run would replace. Give another folder, or go on from it with --resume_from_checkpoint and "
            "this folder."
        )
    if resume in _NEWEST:
        found = newest(str(out), store)
        if found is None and resume != "auto":
            raise JobError(
                f"--resume_from_checkpoint {resume}: {out} has no checkpoint; with auto it would start anew."
            )
        return None if found is None else Path(found)
    if resume is None:
        last = last_whole(str(out))
        if last is None and not is_own:
            return None
        where = f"in the durable store {store}" if last is None else Path(last).name
        raise JobError(
            f"--output_dir {out} holds checkpoints of an earlier run, the newest is {where}. Continue it with "
            "--resume_from_checkpoint auto, or start anew in another --output_dir."
        )
    path = Path(resume)
    with refusing(f"--resume_from_checkpoint {resume}"):
        if (durable := committed(path)) is not None:
            return as_checkpoint(path, durable, out)
        check_resumable(resume)
    return path


def prepare_out(out: Path) -> None:
    """Make the folder, and find out now, not after hours, whether it can be written to."""
    with refusing(f"--output_dir {out} cannot be written to"):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # nameless: several processes may try at once


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Around a run: no other one may write into its folder. The claim ends with the process, however that ends."""
    prepare_out(out)
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise JobError(f"--output_dir {out} is in use: another job writes into it. Give another one.") from e
        yield
    finally:
        os.close(folder)


def check_room(out: Path, params: int, trained: int, keep: int) -> None:
    """Refuse a run whose checkpoints the drive has no room for; one more than is kept exists while it is written."""
    checkpoint = 2 * params + 12 * trained  # weights as a model, and what training goes on from
    free, needed = shutil.disk_usage(out).free, checkpoint * (keep + 1)
    if needed > free:
        raise JobError(
            f"--output_dir {out} has {human_bytes(free)} free, and {keep + 1} checkpoints of {human_bytes(checkpoint)} "
            f"take {human_bytes(needed)}. Choose another drive, a smaller --save_total_limit, or --save_strategy no."
        )


# ---- between the steps -----------------------------------------------------------------------------------------------


class Position(TrainerCallback, ExportableState):
    """Writes into each checkpoint (``trainer_state.json``) of which rows it is, and refuses to go on from another run's
    before the first step. A checkpoint that says nothing is taken.

    Attributes:
        begun_at: the steps that were done when the run began; None before.
    """

    def __init__(self, identity: dict[str, Any]) -> None:
        self.identity = identity
        self.begun_at: int | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"identity": self.identity}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun_at = state.global_step
        before = state.stateful_callbacks.get("Position", self.state())["args"]["identity"]  # as the checkpoint has it
        for name, now in self.identity.items():
            if before.get(name) != now:
                raise JobError(
                    f"--resume_from_checkpoint: step {state.global_step} stands in the middle of other data: its "
                    f"{name} is {before.get(name)}, here it is {now}. Give what that run was given, or start anew in "
                    "another --output_dir."
                )


def identity_of(dataset: Any, seed: int, length: int | None) -> dict[str, Any]:
    """What a resumed run has to have the same of: the number of rows, three of them, and what cuts and orders them."""
    if not hasattr(dataset, "__len__"):  # a stream
        return {"seed": seed, "max_length": length}
    some = [dataset[index] for index in sorted({0, len(dataset) // 2, len(dataset) - 1})]
    checksum = zlib.crc32(json.dumps(some, sort_keys=True, default=str).encode())
    return {"number of rows": len(dataset), "content of rows": f"{checksum:08x}", "seed": seed, "max_length": length}


class Shown(TrainerCallback):
    """A line for each row that is logged. ``resume``: the checkpoint that the run goes on from."""

    def __init__(self, console: Console, resume: str | None = None) -> None:
        self._console, self._resume = console, resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._resume is not None:
            store = store_behind(self._resume)
            where = self._resume if store is None else f"the store in {store}"
            self._console.print(f"resuming from {where} after step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "eval_loss" in logs:
            of_eval = {name.removeprefix("eval_"): value for name, value in logs.items()}
            of_eval["perplexity"] = math.exp(min(logs["eval_loss"], 700.0))
            self._console.print(f"evaluation after step {state.global_step}: {', '.join(_figures(of_eval))}")
        elif "loss" in logs:
            self._console.print("  ".join((f"step {state.global_step}/{state.max_steps}", *_figures(logs))))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._console.print(f"saved {Path(args.output_dir, f'checkpoint-{state.global_step}')}")


_SHOWN = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "reward": "reward {:.4g}",
    "rewards/accuracies": "accuracy {:.4g}",
    "accuracy": "accuracy {:.4g}",
    "grad_norm": "grad norm {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
}
"""What is shown of a row, in this order."""


def _figures(logs: dict[str, Any]) -> list[str]:
    """The figures of a row, those that a person looks at first."""
    words = [form.format(logs[name]) for name, form in _SHOWN.items() if logs.get(name) is not None]
    words[0] = words[0].replace("-0.0000", "0.0000")  # the loss of GRPO is at first nothing but for rounding
    words += [f"{t.value} {human_bytes(logs[f'{t.value}_bytes'])}" for t in Tier if f"{t.value}_bytes" in logs]
    waits = {key.removeprefix("waits_for_"): value for key, value in logs.items() if key.startswith("waits_for_")}
    cause, waited = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    share = waited / max(logs.get("step_seconds", 0.0), 1e-9)
    words += [f"waits {min(1, share):.0%} for {cause.replace('_', ' ')}"] if share > 0.05 else []
    words += [f"{timedelta(seconds=round(logs['seconds_left']))} left"] if "seconds_left" in logs else []
    return words + ([f"lr {logs['learning_rate']:.3g}"] if "learning_rate" in logs else [])


# ---- Ctrl-C, and a polite kill ---------------------------------------------------------------------------------------

_ANSWER = b"\nStopping after this step, then saving. Once more stops at once, and saves nothing.\n"


class Stop(TrainerCallback):
    """One wish to stop for all ranks: each tells the others after a step, and all save and end at the same one.

    Within its ``with`` block the first SIGINT or SIGTERM is such a wish (``wanted``), and is answered on stderr by the
    first rank; the second one takes effect as ever. ``heeded``: whether the run was ended by one.
    """

    def __init__(self, team: Team, console: Console) -> None:
        self._team, self._console = team, console
        self.wanted = self.heeded = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True
        self.__exit__()
        # Straight to the descriptor: the signal may come in the middle of a print, whose buffer would be printed twice.
        if self._team.is_first:
            os.write(2, _ANSWER)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._team.any(self.wanted, "the wish to stop"):
            return
        if not self.wanted:
            self._console.print("Another rank was asked to stop: stopping after this step, then saving.")
        self.heeded = control.should_training_stop = control.should_save = True
