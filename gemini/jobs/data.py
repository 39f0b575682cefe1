"""What a job trains on: what ``datasets`` loads, from files at hand without a word about their kind; and how much of it
is cut.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import trl

from gemini.errors import counted
from gemini.jobs.errors import JobError, refusing

_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}


def is_text(name: str | None) -> bool:
    """Whether a name on the command line stands for plain text: a file or a pattern of none of the kinds of rows, or a
    folder of ``.txt`` files.
    """
    path = Path(name or "")
    if name and path.is_dir():
        return any(path.rglob("*.txt")) and not any(p.suffix.lower() in _KINDS for p in path.rglob("*"))
    return _is_of_files(path) and path.suffix.lower() not in _KINDS


def _is_of_files(path: Path) -> bool:
    return path.is_file() or any(char in str(path) for char in "*?[")


def open_data(script: Any, mixture: Any, args: Any) -> dict[str, Any]:
    """The splits by name. ``--test_split_size`` makes a test split of whatever has none, drawn from the seed."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a broken file is in the error, too
    name, size = script.dataset_name, mixture.test_split_size
    with refusing(f"--dataset_name {name}" if not mixture.datasets else "datasets"):
        found = trl.get_dataset(mixture) if mixture.datasets else _open(name, script)
    found = dict(found) if isinstance(found, dict) else {"train": found}
    train, test = script.dataset_train_split, script.dataset_test_split
    if size is not None and test not in found and train in found:
        with refusing(f"--test_split_size {size:g} of {words_of(found, train)} (a file of text is one)"):
            parts = found[train].train_test_split(test_size=size if size < 1 else int(size), seed=args.seed)
            found |= {train: parts["train"], test: parts["test"]}
    for split in (train, test) if evaluates(args) else (train,):
        if split not in found:
            remedy = " --test_split_size 0.05 takes one, --dataset_test_split names another." if split == test else ""
            raise JobError(f"--dataset_name {name}: there is no split {split!r}, but {', '.join(found)}.{remedy}")
    rows = found[train]
    if hasattr(rows, "__len__") and (not len(rows) or (is_text(name) and not any(rows["text"]))):
        raise JobError(f"--dataset_name {name}: there is nothing in it to learn.")
    return found


def evaluates(args: Any) -> bool:
    """Whether a trainer's arguments ask for a split to evaluate on."""
    return bool(args.eval_on_start or args.eval_strategy != "no")


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


class CountsRows:
    """Put before a trainer of TRL's that makes tokens of rows beforehand: says what it cuts and leaves out.

    Attributes:
        told: a line for each dataset.
    """

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


def words_of(found: dict[str, Any], split: str) -> str:
    """A split before it becomes tokens, in words."""
    rows, columns = found[split], found[split].column_names or ["?"]
    return f"{counted(len(rows), 'row') if hasattr(rows, '__len__') else 'a stream'} of {', '.join(columns)}"
