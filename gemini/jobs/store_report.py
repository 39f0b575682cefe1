"""What is in a durable store: who uses it, which steps its commits are of, how large it is, and what is broken.

Nothing is written, and no lock is kept: a run may use the store meanwhile. What it overwrites while it is read here is
no damage, since its records then name a newer commit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gemini.errors import StorageError, human_bytes
from gemini.jobs.plan_screen import human_count
from gemini.memory.durable import records
from gemini.memory.durable.folder import holder, is_store, last_commit, stores
from gemini.memory.durable.records import Record
from gemini.train.checkpoint.format import as_damage
from gemini.train.checkpoint.plain_data import Decoder
from gemini.train.checkpoint.stored import Stored, open_store

Section = tuple[str, list[str]]


class _File(NamedTuple):
    """A record file, with its record if it is whole, or why it cannot be read."""

    path: Path
    record: Record | None
    refusal: str = ""


def store_report(directory: Path) -> tuple[list[Section], bool]:
    """Titles and lines for people, and whether the store can be resumed and nothing in it is broken."""
    if not is_store(directory):
        what = "has no folder store-0001" if directory.is_dir() else "is not a folder"
        return [("Durable store", [f"{directory} is none: it {what}. Give the nvme_path of the run"])], False
    sections: list[Section] = []
    problems: list[str] = []
    try:
        user = holder(directory)
        used = f"in use by {user}: this is what it has committed so far" if user else "in use by nobody"
        sections.append(("Durable store", [f"{directory.resolve()}", used, *_older(directory)]))
        files = [_read(path) for path in _record_files(directory)]
        commits = [*_commits(files)]
        sections.append(("Commits", commits))
        problems += [file.refusal for file in files if file.refusal]
        stored = open_store(directory)
        commits.append(_resumed(stored))
        sections += [("Model", [*_model(stored)]), ("Slots", [*_slots(stored)])]
        checked, damaged = _checked(directory, stored)
        sections.append(("Check", [*_torn(files), checked]))
        problems += damaged
    except StorageError as e:
        problems += [str(e)] if str(e) not in problems else []
    if problems:
        sections.append(("Problems", problems))
    return sections, not problems


def _record_files(directory: Path) -> list[Path]:
    """Of the newest store that has any."""
    found = [sorted(store.glob("record-*")) for store in stores(directory)]
    return next((paths for paths in reversed(found) if paths), [])


def _read(path: Path) -> _File:
    try:
        return _File(path, records.read(path))
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
        ago = _ago(time.time() - path.stat().st_mtime)
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


def _model(stored: Stored) -> Iterator[str]:
    manifest, commit = stored.manifest, stored.commit
    numel = sum(math.prod(param.shape) for param in manifest.params.values())
    exact = "" if manifest.rule.exact is None else ", compact states"
    yield (
        f"{len(manifest.params)} params, {human_count(numel)} elements, {manifest.precision}, rule {manifest.rule.name}"
        f"{exact}, checkpoint version {_version(commit.records[0].text)}"
    )
    with as_damage(commit.folder):
        extra = Decoder(stored.values).decode(manifest.extra, "extra")
    if isinstance(extra, dict) and {"global_step", "run"} <= extra.keys():
        yield f"of a Trainer: step {extra['global_step']} of the run in {extra['run']}"


def _resumed(stored: Stored) -> str:
    commit = stored.commit
    return (
        f"to be resumed: commit {commit.sequence}, step {_step_of(commit.records[0])}, saved by {len(commit.records)} "
        f"rank{'s' * (len(commit.records) > 1)}: gemini.load_checkpoint({str(commit.folder.parent)!r}, ...)"
    )


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


def _checked(directory: Path, stored: Stored) -> tuple[str, list[str]]:
    """Read everything that is committed: how that went, and what is damaged."""
    damaged = [words for file in stored.opened.values() for words in file.damage()]
    if damaged and last_commit(directory).sequence != stored.commit.sequence:
        return "data: overwritten by the run while it was read. Ask again when the run has ended", []
    kept = sum(spec.num_bytes for file in stored.opened.values() for spec in file.specs.values())
    return f"data: {human_bytes(kept)} of weights and states {'damaged' if damaged else 'whole'}", damaged


def _torn(files: list[_File]) -> Iterator[str]:
    torn = [file.path.name for file in files if file.record is None and not file.refusal]
    yield f"records: {len(files) - len(torn)} of {len(files)} whole"
    for name in torn:
        yield f"{name} is not whole, as after a power cut while it was written: the other one counts, all is well"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
