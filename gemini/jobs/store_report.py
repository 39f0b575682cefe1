"""What is in a durable store: who uses it, which steps its commits are of, how large it is, and what is broken.

Nothing is written, and no lock is kept: a run may use the store meanwhile. What it overwrites while it is read here is
no damage, since its records then name a newer commit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from gemini.errors import StorageError, counted, human_bytes
from gemini.jobs.plan_screen import human_count
from gemini.memory.durable.folder import Record, holder, is_store, last_commit, read_record, stores
from gemini.train.checkpoint.durable import Stored, open_store
from gemini.train.checkpoint.format import as_damage
from gemini.train.checkpoint.plain_data import Decoder

Section = tuple[str, Iterable[str]]
PROBLEMS = "Problems"


class _File(NamedTuple):
    """A record file, with its record if it is whole, or why it cannot be read."""

    path: Path
    record: Record | None
    refusal: str = ""


def store_report(directory: Path) -> Iterator[Section]:
    """Titles and lines for people, as they are found; the last one is ``PROBLEMS`` if there are any."""
    if not is_store(directory):
        what = "has no folder store-0001" if directory.is_dir() else "is not a folder"
        yield PROBLEMS, [f"{directory} is no durable store: it {what}. Give the nvme_path of a run"]
        return
    problems: list[str] = []
    try:
        user = holder(directory)
        used = f"in use by {user}: this is what it has committed so far" if user else "in use by nobody"
        yield "Durable store", [f"{directory.resolve()}", used, *_older(directory)]
        files = [_read(path) for path in _record_files(directory)]
        yield "Commits", [*_commits(files)]
        problems += [file.refusal for file in files if file.refusal]
        stored = open_store(directory)
        yield "To be resumed", [*_resumed(stored)]
        yield "Slots", [*_slots(stored)]
        yield "Check", _check(directory, stored, files, problems)
    except (StorageError, OSError) as e:
        problems += [str(e)] if str(e) not in problems else []
    if problems:
        yield PROBLEMS, problems


def _record_files(directory: Path) -> list[Path]:
    """Of the newest store that has any."""
    found = [sorted(store.glob("record-*")) for store in stores(directory)]
    return next((paths for paths in reversed(found) if paths), [])


def _read(path: Path) -> _File:
    try:
        return _File(path, read_record(path))
    except StorageError as e:
        return _File(path, None, str(e))


def _older(directory: Path) -> Iterator[str]:
    *older, newest = (store.name for store in stores(directory))
    if older:
        yield (
            f"{', '.join(older)} beside {newest}: of other budgets, ranks or models, gone with the first commit to the "
            "newest"
        )


def _commits(files: list[_File]) -> Iterator[str]:
    """The commits of the first rank, the last one first."""
    own = [(file.record, file.path) for file in files if "record-00000-" in file.path.name and file.record is not None]
    own.sort(key=lambda found: -found[0].sequence)
    for what, (record, path) in zip(("last", "before"), own, strict=False):
        ago = timedelta(seconds=max(0, round(time.time() - path.stat().st_mtime)))
        yield (
            f"{what}: commit {record.sequence}, step {_step_of(record)}, {ago} ago, format version {record.version} "
            f"({path.name})"
        )
    if not own:
        yield "none"


def _step_of(record: Record) -> str:
    """The largest step count of a param; a record is not known to have any."""
    try:
        return str(max(param["step"] for param in record.text["manifest"]["params"].values()))
    except (TypeError, KeyError, ValueError, AttributeError):
        return "unknown"


def _resumed(stored: Stored) -> Iterator[str]:
    manifest, commit = stored.manifest, stored.commit
    ranks = counted(len(commit.records), "rank")
    yield f"commit {commit.sequence}, step {_step_of(commit.records[0])}, saved by {ranks}; by any number of ranks"
    numel = sum(math.prod(param.shape) for param in manifest.params.values())
    compact = "" if manifest.rule.exact is None else ", compact states"
    yield (
        f"{len(manifest.params)} params, {human_count(numel)} elements, {manifest.precision}, rule {manifest.rule.name}"
        f"{compact}, checkpoint version {_version(commit.records[0].text)}"
    )
    with as_damage(commit.folder):
        extra = Decoder(stored.values).decode(manifest.extra, "extra")
    is_of_trainer = isinstance(extra, dict) and {"global_step", "run"} <= extra.keys()
    if is_of_trainer:
        yield f"of a Trainer: step {extra['global_step']} of the run in {extra['run']}"
    store = commit.folder.parent
    yield f"by {f'gemini train --resume {store}' if is_of_trainer else f'gemini.load_checkpoint({str(store)!r}, ...)'}"


def _version(text: Any) -> Any:
    return text["manifest"].get("version", "unknown")


def _slots(stored: Stored) -> Iterator[str]:
    """Bytes by kind of plane, of one slot."""
    by_kind: dict[str, int] = {}
    for file in stored.opened.values():
        for name, (_, _, size) in file.slots.items():
            kind = name.rpartition("/")[0]
            by_kind[kind] = by_kind.get(kind, 0) + size
    for kind, size in by_kind.items():
        yield f"{kind:<12} {human_bytes(size):>10}"
    total = sum(by_kind.values())
    yield f"{'all':<12} {human_bytes(total):>10}, twice on the drive: {human_bytes(2 * total)}"


def _check(directory: Path, stored: Stored, files: list[_File], problems: list[str]) -> Iterator[str]:
    """Read everything that is committed, and say how that goes; what is damaged comes to the problems."""
    torn = [file.path.name for file in files if file.record is None and not file.refusal]
    yield f"records: {len(files) - len(torn)} of {len(files)} whole"
    for name in torn:
        yield f"{name} is not whole: it is being written, or a power cut came meanwhile. The other one counts"
    size = human_bytes(sum(size for file in stored.opened.values() for _, _, size in file.slots.values()))
    yield f"data: reading {size}"
    damaged = [words for file in stored.opened.values() for words in file.damage()]
    if not damaged:
        is_old = min(record.version for record in stored.commit.records) == 1
        yield f"data: {'can be read; version 1 has no checksums of it' if is_old else 'all of it is what was written'}"
        return
    now = last_commit(directory)
    if (now.folder, now.sequence) != (stored.commit.folder, stored.commit.sequence):
        yield "data: the run has overwritten it since. Ask again when the run has ended"
    else:
        yield f"data: {len(damaged)} damaged"
        problems += damaged
