"""What a job trains on: rows of JSON lines, Parquet or datasets, or plain text, and what of it is kept to evaluate on.

Plain text is cut into sequences here (:mod:`gemini.jobs.text`). Rows stay rows: TRL makes tokens of them, with the
chat template, the loss on completions, packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch.utils.data import Subset

from gemini.errors import counted, human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.settings import TrainSettings
from gemini.jobs.text import TextFile, TextSequences, find_text_files, fingerprint, only_text

_KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_NAMES = {"json": "JSON lines", "parquet": "Parquet", "arrow": "Arrow"}
_ROWS = (("messages",), ("prompt", "completion"), ("text",))
"""The columns that rows may have; the first that are there count. (ShareGPT's ``conversations`` is ``messages``.)"""


class JobData(NamedTuple):
    """What is trained on, and perhaps evaluated on.

    Attributes:
        rows: the columns of rows, () where it is sequences of text.
        identity: what a resumed run has to have the same of.
        words: a line for the beginning of the job.
    """

    train: Any
    evaluation: Any
    rows: tuple[str, ...]
    identity: dict[str, Any]
    words: list[str]


def open_data(settings: TrainSettings, tokenizer: Any) -> JobData:
    """Find and read the data of a job. ``tokenizer`` is None for text as bytes.

    Raises:
        JobError: if there is none, it is of no kind that can be trained on, or too little.
    """
    train, rows, files, words = _open(settings.data, settings, tokenizer)
    evaluation = None
    if settings.eval_data:
        try:
            evaluation, other, _, more = _open(settings.eval_data, settings, tokenizer)
        except JobError as e:
            raise JobError(f"{str(e).replace('--data', '--eval-data')}") from e
        words.append(f"to evaluate on: {more[0]}")
        if bool(other) != bool(rows):
            raise JobError("--eval-data and --data are text and rows: give data of one kind.")
    elif settings.validation:
        train, evaluation = _split(train, settings)
        words.append(f"{len(evaluation):,} of them are kept to evaluate on")
    identity = {
        "files": files,
        "rows": list(rows),
        "count": len(train),
        "seed": settings.seed,
        "seq_len": settings.seq_len,
    }
    return JobData(train, evaluation, rows, identity, words)


def _open(
    roots: Sequence[Path], settings: TrainSettings, tokenizer: Any
) -> tuple[Any, tuple[str, ...], str, list[str]]:
    rows = [] if settings.bytes else _row_files(settings, roots)
    if rows:
        dataset = _load(rows)
        columns = next((c for c in _ROWS if {*c} <= {*dataset.column_names}), None)
        if columns is None:
            raise JobError(
                f"--data {roots[0]}: its columns are {', '.join(dataset.column_names) or 'none'}. Rows have a text, "
                "a prompt and a completion, or messages (a list of role and content); rename them, or write text files."
            )
        if not len(dataset):
            raise JobError(f"--data {roots[0]}: there are no rows in it.")
        if "messages" in columns:
            _check_messages(dataset, roots[0])
        line = f"data: {counted(len(dataset), 'row')} of {' and '.join(columns)} in {counted(len(rows), 'file')}"
        sized = [TextFile(path, path.name, _size(path)) for path in rows]
        return dataset.select_columns(list(columns)), columns, fingerprint(sized), [line]
    files = find_text_files(roots, settings.glob, without_folders=settings.without_folders)
    words: list[str] = []
    if not settings.bytes:
        files, left_out = only_text(files, roots)
        if left_out:
            words.append(f"left out as no text: {left_out} (--bytes takes everything)")
    sequences = TextSequences(files, tokenizer, settings.seq_len, scratch=settings.out)
    size = human_bytes(sum(file.num_bytes for file in files))
    made = f"{counted(sequences.num_tokens, 'token')} in {counted(len(sequences), 'sequence')} of {settings.seq_len}"
    rest = sequences.num_tokens - len(sequences) * settings.seq_len
    made += f", the last {rest:,} left out" if rest else ""
    words.insert(0, f"text: {counted(len(files), 'file')}, {size}, {made}")
    return sequences, (), fingerprint(files), words


# ---- rows ------------------------------------------------------------------------------------------------------------


def _row_files(settings: TrainSettings, roots: Sequence[Path]) -> list[Path]:
    """The files of rows among what was given. A folder counts if datasets saved it, or if it has such files and no
    text.
    """
    found: list[Path] = []
    rest: list[Path] = []
    for root in map(Path, roots):
        inside = [root] if root.suffix.lower() in _KINDS and root.is_file() else []
        if root.is_dir() and {"dataset_info.json", "dataset_dict.json"} & {path.name for path in root.iterdir()}:
            inside = [root]
        elif root.is_dir() and not any(next(root.rglob(glob), None) for glob in settings.glob):
            inside = sorted(path for path in root.rglob("*") if path.suffix.lower() in _KINDS and path.is_file())
        found += inside
        rest += [] if inside else [root]
    if found and rest:
        raise JobError(f"--data: {found[0]} holds rows, and {rest[0]} does not: give data of one kind.")
    return found


def _load(files: Sequence[Path]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of a broken file is in the error, too
    kinds = {_KINDS.get(path.suffix.lower(), "folder") for path in files}
    if len(kinds) > 1:
        raise JobError(f"--data: files of {' and '.join(sorted(kinds))} together: give files of one kind.")
    kind = kinds.pop()
    for path in files:
        if path.is_file() and not path.stat().st_size:
            raise JobError(f"--data {path}: the file is empty.")
    try:
        if kind == "folder":
            return datasets.concatenate_datasets([_one_split(datasets.load_from_disk(str(path))) for path in files])
        return datasets.load_dataset(kind, data_files=[str(path) for path in files], split="train")
    except JobError:
        raise
    except Exception as e:
        cause: BaseException = e
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = _NAMES.get(kind, "a folder of datasets")
        raise JobError(f"--data {files[0]} cannot be read as {what}: {' '.join(str(cause).split())[:300]}") from e


def _check_messages(dataset: Any, root: Path) -> None:
    """Rows that are all alike have one type; of others each is looked at."""
    inside = getattr(dataset.features["messages"], "feature", None)
    if isinstance(inside, dict) and {"role", "content"} <= {*inside}:
        return
    for number, messages in enumerate(dataset["messages"]):
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and {"role", "content"} <= {*message} for message in messages
        ):
            raise JobError(
                f"--data {root}: the messages of row {number + 1} are {str(messages)[:80]!r}. They are a list of "
                'turns, each with a role and a content: [{"role": "user", "content": "..."}, ...].'
            )


def _one_split(loaded: Any) -> Any:
    if hasattr(loaded, "column_names") and not isinstance(loaded, dict):
        return loaded
    if "train" not in loaded:
        raise JobError(f"--data: a folder of datasets with the splits {', '.join(loaded)}: there has to be a 'train'.")
    return loaded["train"]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def what_is_cut(dataset: Any, settings: TrainSettings, *, option: str) -> str:
    """How long rows are that TRL has made whole ``input_ids`` and ``labels`` of, and what of them is not learned.

    Raises:
        JobError: if nothing is.
    """
    most, packing = settings.seq_len, settings.packing
    lengths, learned, kept = [], 0, 0
    for row in dataset.select_columns(["input_ids", "labels"]):
        lengths.append(len(row["input_ids"]))
        learned += any(label != -100 for label in row["labels"])
        kept += any(label != -100 for label in row["labels"][: None if packing == "wrapped" else most])
    cut = 0 if packing == "wrapped" else sum(length > most for length in lengths)
    longest, middle = max(lengths), int(median(lengths))
    words = [f"{cut:,} cut at --seq-len {most}"]
    if learned > kept and packing == "none":
        words[0] += f", {learned - kept:,} of them left out (nothing to learn remains)"
    elif learned > kept:
        words[0] += f", in {learned - kept:,} of them nothing to learn remains"
    if learned < len(lengths) and packing == "none":
        words.append(f"{len(lengths) - learned:,} without anything to learn left out")
    words.append(f"longest {longest:,}, median {middle:,} tokens")
    said = f"{'rows' if option == '--data' else 'rows to evaluate on'}: {len(lengths):,}; {'; '.join(words)}"
    if not kept:
        raise JobError(
            f"{option}: of no row is anything to be learned left within --seq-len {most}: prompts alone fill it. Give "
            f"a longer one. ({said})"
        )
    if cut:
        said += " (a larger --seq-len cuts fewer, and takes more memory)"
    return said


# ---- what is kept to evaluate on -------------------------------------------------------------------------------------


def _split(train: Any, settings: TrainSettings) -> tuple[Any, Any]:
    """Take sequences that lie evenly across the data."""
    total = len(train)
    count = int(settings.validation) if settings.validation >= 1 else max(1, round(settings.validation * total))
    if count >= total:
        raise JobError(
            f"--validation {settings.validation:g} keeps all of the {total} sequences. Keep less, give more."
        )
    kept = [index * total // count for index in range(count)]
    left = sorted({*range(total)} - {*kept})
    is_text = isinstance(train, TextSequences)
    take: Callable[[Any, list[int]], Any] = Subset if is_text else lambda data, at: data.select(at)
    return take(train, left), take(train, kept)
