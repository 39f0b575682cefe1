"""What a training job has beside its trainer: its rows, its checkpoints, its log, and the wish to stop. Checkpoints
(``OUT/checkpoint-500``) are ordinary ones of a Trainer with Gemini's states inside. A folder under its final name is
whole: :mod:`gemini.integrations.huggingface` writes under another name and renames.
"""

from __future__ import annotations

import copy
import fcntl
import json
import math
import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import datasets
import torch
import trl
from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gemini.errors import counted, human_bytes
from gemini.integrations.huggingface_save import (
    as_checkpoint,
    check_resumable,
    committed,
    last_whole,
    newest,
    store_behind,
)
from gemini.jobs import JobError, refusing
from gemini.memory.durable.folder import has_commit
from gemini.ranks.wire import Tag, Wire
from gemini.tiers import Tier

# ---- rows ------------------------------------------------------------------------------------------------------------

_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}


def is_text(name: str | None) -> bool:
    """Whether a name means plain text: a file or pattern of no kind of rows, or a folder of ``.txt`` files."""
    path = Path(name or "")
    if name and path.is_dir():
        return any(path.rglob("*.txt")) and not any(p.suffix.lower() in _KINDS for p in path.rglob("*"))
    return _is_of_files(path) and path.suffix.lower() not in _KINDS


def _is_of_files(path: Path) -> bool:
    return path.is_file() or any(char in str(path) for char in "*?[")


def open_data(script: Any, mixture: Any, args: Any) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on or None; ``--test_split_size`` splits what has no test split."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a broken file is in the error, too
    name, size = script.dataset_name, mixture.test_split_size
    with refusing(f"--dataset_name {name}" if not mixture.datasets else "datasets"):
        found = trl.get_dataset(mixture) if mixture.datasets else _open(name, script)
    found = dict(found) if isinstance(found, dict) else {"train": found}
    train, test = script.dataset_train_split, script.dataset_test_split
    if size is not None and test not in found and train in found:
        with refusing(f"--test_split_size {size:g} of {words_of(found[train])} (a file of text is one)"):
            parts = found[train].train_test_split(test_size=size if size < 1 else int(size), seed=args.seed)
            found |= {train: parts["train"], test: parts["test"]}
    evaluates = args.eval_on_start or args.eval_strategy != "no"
    for split in (train, test) if evaluates else (train,):
        if split not in found:
            remedy = " --test_split_size 0.05 takes one, --dataset_test_split names another." if split == test else ""
            raise JobError(f"--dataset_name {name}: there is no split {split!r}, but {', '.join(found)}.{remedy}")
    rows = found[train]
    if hasattr(rows, "__len__") and (not len(rows) or (is_text(name) and not any(rows["text"]))):
        raise JobError(f"--dataset_name {name}: there is nothing in it to learn.")
    return rows, found[test] if evaluates else None


def _open(name: str, script: Any) -> Any:
    path, how = Path(name), {"streaming": script.dataset_streaming}
    if is_text(name):
        how["sample_by"] = "document"
    if _is_of_files(path):
        return datasets.load_dataset(_KINDS.get(path.suffix.lower(), "text"), data_files=name, **how)
    if path.is_dir() and {"dataset_info.json", "dataset_dict.json"} & {p.name for p in path.iterdir()}:
        return datasets.load_from_disk(name)
    if not path.exists() and (path.suffix or name.count("/") > 1):
        raise JobError(f"--dataset_name {name}: there is no such file or folder.")
    return datasets.load_dataset(name, name=script.dataset_config, **how)


def words_of(rows: Any) -> str:
    """Rows before they become tokens, in words."""
    number = counted(len(rows), "row") if hasattr(rows, "__len__") else "a stream"
    return f"{number} of {', '.join(rows.column_names or '?')}"


class CountsRows:
    """Put before a trainer of TRL's that tokenizes rows: ``told`` says of each dataset what is cut or left out."""

    told: tuple[str, ...] = ()

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        prepare: Any = super()._prepare_dataset  # type: ignore[misc]
        kept = prepare(dataset, processing_class, args, *rest)
        most = getattr(args, "max_length", None)
        if most is None or not hasattr(dataset, "__len__") or "input_ids" in dataset.column_names:
            return kept
        uncut = copy.copy(args)
        uncut.max_length = None
        # SFT's comes with whether to pack and a function before the name: whole rows are not packed.
        packs = len(rest) == 3 and rest[0]
        whole = prepare(dataset, processing_class, uncut, *([False, *rest[1:]] if len(rest) == 3 else rest))
        lengths = lengths_of(whole)
        cut = 0 if packs and args.packing_strategy != "bfd" else sum(length > most for length in lengths)
        left_out = 0 if packs else len(whole) - len(kept)
        parts = [f"{'rows' if rest[-1] == 'train' else 'rows to evaluate on'}: {len(lengths):,}"]
        parts += [f"packed into {counted(len(kept), 'sequence')} of --max_length {most}"] if packs else []
        parts += [f"{cut:,} longer than --max_length {most}"] if cut or not packs else []
        parts += [f"{left_out:,} left out"] if left_out else []
        parts += [f"longest {max(lengths, default=0):,}, median {int(median(lengths or [0])):,} tokens"]
        hint = " (a larger --max_length cuts fewer, and takes more memory)" if cut or left_out else ""
        line = "; ".join(parts) + hint
        self.told = (*self.told, line)
        if not len(kept):
            raise JobError(f"--max_length {most} leaves nothing of any row to learn: give a larger one. {line}")
        return kept


def lengths_of(rows: Any) -> list[int]:
    """The tokens of each row: of a pair of answers those of the longer one."""
    parts = [c for c in rows.column_names if c in ("input_ids", "prompt_ids", "completion_ids")]
    pair = [c for c in rows.column_names if c in ("chosen_ids", "rejected_ids")]
    return [
        sum(len(row[c]) for c in parts) + max((len(row[c]) for c in pair), default=0)
        for row in rows.select_columns(parts + pair)
    ]


# ---- the folder of a run ---------------------------------------------------------------------------------------------


def choose(resume: str | None, out: Path, *, store: Path | None = None) -> Path | None:
    """The checkpoint to start from, or None to start anew. ``resume`` names its folder; "auto" and "True" are the
    newest one, which for "True" must be there. Raises JobError if the one named is not there, or starting anew would
    mix with what is in ``out`` or in the durable store ``store``.
    """
    is_newest = resume in ("auto", "True", "true")
    kept = None if store is None or not has_commit(store) else committed(store)
    is_own = kept is not None and kept.run == os.path.realpath(out)
    if kept is not None and not is_own and (resume is None or is_newest):
        raise JobError(
            f"--nvme_path {store} holds the durable store of {f'the run in {kept.run}' if kept.run else 'a program'}, "
            "which this run would replace. Give another folder, or go on from it with --resume_from_checkpoint and "
            "this folder."
        )
    if resume is None:
        last = last_whole(str(out))
        if last is not None or is_own:
            where = f"in the durable store {store}" if last is None else Path(last).name
            raise JobError(
                f"--output_dir {out} holds checkpoints of an earlier run, the newest is {where}. Continue it with "
                "--resume_from_checkpoint auto, or start anew in another --output_dir."
            )
        return None
    if is_newest:
        found = newest(str(out), store)
        if found is None and resume != "auto":
            raise JobError(f"--resume_from_checkpoint {resume}: {out} has no checkpoint; auto would start anew.")
        return None if found is None else Path(found)
    with refusing(f"--resume_from_checkpoint {resume}"):
        if (durable := committed(Path(resume))) is not None:
            return as_checkpoint(Path(resume), durable, out)
        check_resumable(resume)
    return Path(resume)


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


# ---- between the steps -----------------------------------------------------------------------------------------------


class Position(TrainerCallback, ExportableState):
    """Writes into each checkpoint (``trainer_state.json``) of which rows it is, and refuses another run's before the
    first step; one that says nothing is taken. ``begun_at``: the steps done when the run began, or None.
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
    **{f"{tier.value}_bytes": f"{tier.value} {{}}" for tier in Tier},
    "waits": "waits {}",
    "seconds_left": "{} left",
    "learning_rate": "lr {:.3g}",
}
"""What is shown of a row, in this order."""


def _figures(logs: dict[str, Any]) -> list[str]:
    """The figures of a row, those that a person looks at first."""
    shown = {name: value for name, value in logs.items() if name in _SHOWN and value is not None}
    shown |= {name: human_bytes(value) for name, value in shown.items() if name.endswith("_bytes")}
    if "loss" in shown:
        shown["loss"] = round(shown["loss"], 4) + 0.0  # -0.0 is none: that of GRPO is at first nothing but for rounding
    if "seconds_left" in shown:
        shown["seconds_left"] = timedelta(seconds=round(shown["seconds_left"]))
    waits = {key.removeprefix("waits_for_"): value for key, value in logs.items() if key.startswith("waits_for_")}
    cause, waited = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    share = waited / max(logs.get("step_seconds", 0.0), 1e-9)
    if share > 0.05:
        shown["waits"] = f"{min(1, share):.0%} for {cause.replace('_', ' ')}"
    return [form.format(shown[name]) for name, form in _SHOWN.items() if name in shown]


# ---- Ctrl-C, and a polite kill ---------------------------------------------------------------------------------------

_ANSWER = b"\nStopping after this step, then saving. Once more stops at once, and saves nothing.\n"


class Stop(TrainerCallback):
    """One wish to stop for all ranks: each tells the others after a step, and all save and end at the same one. In its
    ``with`` block the first SIGINT or SIGTERM is one (``wanted``), answered on stderr by the first rank; the second one
    takes effect as ever. ``heeded``: whether the run was ended by one.
    """

    def __init__(self, wire: Wire, console: Console) -> None:
        self._wire, self._console = wire, console
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
        if self._wire.rank == 0:
            os.write(2, _ANSWER)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wishes = self._wire.swap(Tag.VALUES, torch.tensor([float(self.wanted)], device="cpu"), "the wish to stop")
        if not wishes.any():
            return
        if not self.wanted:
            self._console.print("Another rank was asked to stop: stopping after this step, then saving.")
        self.heeded = control.should_training_stop = control.should_save = True
