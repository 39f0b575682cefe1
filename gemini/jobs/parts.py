"""What a training job has beside its trainer: its rows and its folder. Checkpoints (``OUT/checkpoint-500``) are a
Trainer's with Gemini's states inside. A folder under its final name is whole: :mod:`gemini.integrations.huggingface`
writes under another name and renames.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import trl

from gemini.errors import counted
from gemini.integrations.huggingface_save import NEWEST, check_resumable, committed, last_whole
from gemini.jobs import JobError, refusing
from gemini.memory.durable.folder import has_commit

_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}

_COLUMNS = {
    "sft": ("messages", "conversations", "prompt completion", "input_ids"),
    "dpo": ("chosen rejected",),
    "reward": ("chosen rejected", "chosen_ids rejected_ids"),
    "kto": ("completion label", "chosen rejected"),
    "grpo": ("prompt",),
    "rloo": ("prompt",),
}
"""By kind of training the columns that TRL learns from, in one of several forms."""


def is_text(name: str | None) -> bool:
    """Whether a name means plain text: a file or pattern of no kind of rows, or a folder of ``.txt`` files."""
    path = Path(name or "")
    if name and path.is_dir():
        return any(path.rglob("*.txt")) and not any(p.suffix.lower() in _KINDS for p in path.rglob("*"))
    return _is_of_files(path) and path.suffix.lower() not in _KINDS


def _is_of_files(path: Path) -> bool:
    return path.is_file() or any(char in str(path) for char in "*?[")


def open_data(kind: str, script: Any, mixture: Any, args: Any) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on or None; ``--test_split_size`` splits what has no test split."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a broken file is in the error, too
    name, size = script.dataset_name, mixture.test_split_size
    asked = "datasets" if mixture.datasets else f"--dataset_name {name}"
    with refusing(asked):
        # Split below, by the job's seed: TRL would hold out other rows in every process, and when a run goes on.
        found = trl.get_dataset(replace(mixture, test_split_size=None)) if mixture.datasets else _open(name, script)
    found = dict(found) if isinstance(found, dict) else {"train": found}
    train, test = script.dataset_train_split, script.dataset_test_split
    if size is not None and test not in found and train in found:
        with refusing(f"--test_split_size {size:g} of {words_of(found[train])} (a file of text is one)"):
            parts = found[train].train_test_split(test_size=size if size < 1 else int(size), seed=args.seed)
            found |= {train: parts["train"], test: parts["test"]}
    evaluates = args.eval_on_start or args.eval_strategy != "no"
    forms = (*_COLUMNS.get(kind, ()), *([args.dataset_text_field] if kind == "sft" else []))
    for split in (train, test) if evaluates else (train,):
        if split not in found:
            remedy = " --test_split_size 0.05 takes one, --dataset_test_split names another." if split == test else ""
            raise JobError(f"{asked}: there is no split {split!r}, but {', '.join(found)}.{remedy}")
        rows, where = found[split], asked if split == train else f"{asked}, split {split!r}"
        if hasattr(rows, "__len__") and (not len(rows) or (is_text(name) and not any(rows["text"]))):
            raise JobError(f"{where}: there is nothing in it to {'learn' if split == train else 'evaluate on'}.")
        _check_columns(rows.column_names or (), forms, f"{where}: gemini {kind}")
    return found[train], found[test] if evaluates else None


def _check_columns(columns: Sequence[str], forms: Sequence[str], who: str) -> None:
    """Raise JobError if there are columns, and not those of one of the forms that are learned from."""
    if columns and forms and not any({*form.split()} <= {*columns} for form in forms):
        wanted = ", or ".join(form.replace(" ", " and ") for form in forms)
        raise JobError(
            f"{who} learns from the columns {wanted}, and there are {', '.join(columns)}. Rename them as TRL's "
            "dataset formats have it."
        )


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


def check_start(resume: str | None, out: Path, store: Path | None = None) -> str:
    """Words for where a run begins. Raises JobError if the checkpoint that ``resume`` names is not there, or
    starting anew would mix with what is in ``out`` or in the durable store ``store``.
    """
    is_newest = resume in NEWEST
    kept = None if store is None or not has_commit(store) else committed(store)
    is_own = kept is not None and kept.run == os.path.realpath(out)
    if kept is not None and not is_own and (resume is None or is_newest):
        raise JobError(
            f"--nvme_path {store} holds the durable store of {f'the run in {kept.run}' if kept.run else 'a program'}, "
            "which this run would replace. Give another folder, or go on from it with --resume_from_checkpoint and "
            "this folder."
        )
    if resume is not None and not is_newest:
        with refusing(f"--resume_from_checkpoint {resume}"):
            if committed(Path(resume)) is None:
                check_resumable(resume)
        return ""
    last = last_whole(str(out))
    is_there = last is not None or is_own
    if resume is None and is_there:
        where = f"in the durable store {store}" if last is None else Path(last).name
        raise JobError(
            f"--output_dir {out} holds checkpoints of an earlier run, the newest is {where}. Continue it with "
            "--resume_from_checkpoint auto, or start anew in another --output_dir."
        )
    if is_newest and resume != "auto" and not is_there:
        raise JobError(f"--resume_from_checkpoint {resume}: {out} has no checkpoint; auto would start anew.")
    return f"no checkpoint in {out}: starting anew" if is_newest and not is_there else ""


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
