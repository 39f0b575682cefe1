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

_KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"
}  # fmt: skip
_TEXT = (".txt", ".md", ".py")
"""Suffixes of text in a folder."""


def text_files(name: str | None) -> list[str]:
    """The files of plain text that a name on the command line stands for: a file of none of the kinds of rows, a
    pattern with ``*``, or a folder that has text and no rows. Empty if it is something else.

    Raises:
        JobError: for a pattern that no file has.
    """
    if name is None:
        return []
    path = Path(name)
    if any(char in name for char in "*?["):
        found = sorted(p for p in Path(path.anchor or ".").glob(name.removeprefix(path.anchor)) if p.is_file())
        if not found:
            raise JobError(f"--dataset_name {name}: there is no such file.")
    elif path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        has_rows = any(p.suffix.lower() in _KINDS for p in inside)
        found = [] if has_rows else [p for p in inside if p.suffix.lower() in _TEXT]
    else:
        found = [path] if path.is_file() else []
    return [str(p) for p in found if p.suffix.lower() not in _KINDS]


def open_data(script: Any, mixture: Any, seed: int) -> dict[str, Any]:
    """The splits by name. ``--test_split_size`` makes a test split of whatever has none, drawn from ``seed``.

    Raises:
        JobError: if there is no such data, or no split of the name that was asked for.
    """
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a broken file is in the error, too
    name = script.dataset_name
    with refusing(f"--dataset_name {name}" if not mixture.datasets else "datasets", innermost=True):
        if mixture.datasets:
            found = trl.get_dataset(mixture)
        else:
            found = _open(name, script)
    found = dict(found) if isinstance(found, dict) else {"train": found}
    train, test = script.dataset_train_split, script.dataset_test_split
    if train not in found:
        raise JobError(f"--dataset_name {name}: there is no split {train!r}, but {', '.join(found)}.")
    if mixture.test_split_size is not None and test not in found:
        size = mixture.test_split_size
        if len(found[train]) < 2:
            raise JobError(
                f"--test_split_size {size:g}: one row cannot be split (a file of text is one). Give several files, or "
                "a folder with a train.txt and a test.txt."
            )
        with refusing(f"--test_split_size {size:g}"):
            parts = found[train].train_test_split(test_size=size if size < 1 else int(size), seed=seed)
            found |= {train: parts["train"], test: parts["test"]}
    if hasattr(found[train], "__len__") and not len(found[train]):
        raise JobError(f"--dataset_name {name}: there are no rows in it.")
    return found


def _open(name: str, script: Any) -> Any:
    path, streaming = Path(name), script.dataset_streaming
    if texts := text_files(name):
        if not any(Path(text).stat().st_size for text in texts):
            raise JobError(f"--dataset_name {name}: there is no text in it, only empty files ({len(texts)}).")
        test = [text for text in texts if Path(text).stem == script.dataset_test_split]
        train = [text for text in texts if text not in test]
        files = {script.dataset_train_split: train} | ({script.dataset_test_split: test} if test else {})
        return datasets.load_dataset("text", data_files=files, sample_by="document", streaming=streaming)
    if path.is_file():
        return datasets.load_dataset(_KINDS[path.suffix.lower()], data_files=[str(path)], streaming=streaming)
    if path.is_dir() and {"dataset_info.json", "dataset_dict.json"} & {p.name for p in path.iterdir()}:
        return datasets.load_from_disk(str(path))
    if not path.exists() and (path.suffix.lower() in (*_KINDS, *_TEXT) or name.count("/") > 1):
        raise JobError(f"--dataset_name {name}: there is no such file or folder.")
    return datasets.load_dataset(name, name=script.dataset_config, streaming=streaming)


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
        whole = prepare(dataset, processing_class, uncut, *([False, *rest[1:]] if len(rest) == 3 else rest))
        packs = len(rest) == 3 and rest[0]
        words = [f"packed into {counted(len(kept), 'sequence')} of --max_length {most}"] if packs else []
        self.told = (
            *self.told,
            what_is_cut(
                whole,
                most,
                words,
                0 if packs else len(whole) - len(kept),
                rest[-1],
                cuts=not packs or args.packing_strategy == "bfd",
            ),
        )
        if not len(kept):
            raise JobError(
                f"--max_length {most} leaves nothing of any row to learn: give a larger one. {self.told[-1]}"
            )
        return kept


def what_is_cut(whole: Any, most: int, words: list[str], left_out: int, name: str, *, cuts: bool) -> str:
    """How long rows of tokens are, and what becomes of those that are longer than ``most``.

    Args:
        words: what is said of all of them beside that.
        left_out: rows of which nothing is left.
        cuts: whether the end of a long row is lost.
    """
    lengths = []
    parts = [c for c in whole.column_names if c in ("input_ids", "prompt_ids", "completion_ids")]
    pair = [c for c in whole.column_names if c in ("chosen_ids", "rejected_ids")]
    for row in whole.select_columns(parts + pair):
        lengths.append(sum(len(row[c]) for c in parts) + max((len(row[c]) for c in pair), default=0))
    cut = sum(length > most for length in lengths) if cuts else 0
    said = [f"{'rows' if name == 'train' else 'rows to evaluate on'}: {len(lengths):,}", *words]
    said += [f"{cut:,} longer than --max_length {most}"] if cuts else []
    said += [f"{left_out:,} left out"] if left_out else []
    said.append(f"longest {max(lengths):,}, median {int(median(lengths)):,} tokens")
    hint = " (a larger --max_length cuts fewer, and takes more memory)" if cut or left_out else ""
    return "; ".join(said) + hint


def words_of(found: dict[str, Any], split: str) -> str:
    """A line about a split before it becomes tokens."""
    rows, (*columns, last) = found[split], found[split].column_names or ["?"]
    what = f"{', '.join(columns)} and {last}" if columns else last
    return f"{counted(len(rows), 'row') if hasattr(rows, '__len__') else 'a stream'} of {what}"
