"""What a drive may hold after a power cut: a log of writes and barriers of a durable store, and images made from it.

Of several ranks the logs are merged by the clock, which they share: a power cut is one moment for all of them.
A write that was over before the last barrier of its file is there. Of every other one there may be all, nothing, or any
sectors. Writes are logged as they are handed to the I/O queue, and are over when their event says so.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from gemini.memory.durable.slots import SlotFile
from gemini.memory.nvme import Extent, SpillFile, stripes
from gemini.train.checkpoint.durable import open_store
from gemini.train.checkpoint.format import bytes_of

SECTOR = 512


class Write(NamedTuple):
    path: str
    offset: int
    data: bytes
    event: Any
    """None: it is over."""
    time: int


class Barrier(NamedTuple):
    path: str
    over: frozenset[int]
    """Writes, by place in the log, that are on the drive from now on."""
    time: int


class Log:
    """What has been written to stores below ``root`` since :meth:`recording` began; marks are places in it."""

    def __init__(self, root: Path):
        self.root, self.entries = root.resolve(), list[Write | Barrier]()
        self._start = self._files()

    def _files(self) -> dict[str, bytes]:
        found = (p for p in self.root.rglob("*") if p.is_file() and not p.is_symlink())
        return {str(p.relative_to(self.root)): p.read_bytes() for p in found}

    def _name(self, fd: int) -> str | None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        begin_write, pwrite, sync = SpillFile.begin_write, os.pwrite, os.fdatasync

        def slot_write(file: Any, extents: Any) -> Any:
            if not isinstance(file, SlotFile):
                return begin_write(file, extents)
            names = [str(path.resolve().relative_to(self.root)) for path in file.paths]
            written: list[tuple[str, int, bytes]] = []

            def noted() -> Iterator[Extent]:
                for source, offset in extents:
                    data = bytes(bytes_of(source.detach().contiguous().view(-1)))
                    for drive, at, start, size in stripes(offset, len(data), len(names)):
                        written.append((names[drive], at, data[start : start + size]))
                    yield Extent(source, offset)

            event = begin_write(file, noted())
            self.entries += [Write(name, at, data, event, time.monotonic_ns()) for name, at, data in written]
            return event

        def record_write(fd: int, data: Any, offset: int) -> int:
            done = pwrite(fd, data, offset)
            if (name := self._name(fd)) is not None:
                self.entries.append(Write(name, offset, bytes(data[:done]), None, time.monotonic_ns()))
            return done

        def barrier(fd: int) -> None:
            name = self._name(fd)
            over = frozenset(
                at
                for at, e in enumerate(self.entries)
                if isinstance(e, Write) and e.path == name and (e.event is None or e.event.is_complete())
            )
            sync(fd)
            if name is not None:
                self.entries.append(Barrier(name, over, time.monotonic_ns()))

        with (
            mock.patch.object(SpillFile, "begin_write", slot_write),
            mock.patch.object(os, "pwrite", record_write),
            mock.patch.object(os, "fdatasync", barrier),
        ):
            yield

    def over(self) -> Log:
        """The same log, of writes that are all over: it may be given to another process."""
        self.entries = [entry._replace(event=None) if isinstance(entry, Write) else entry for entry in self.entries]
        return self

    @staticmethod
    def merged(logs: Sequence[Log]) -> Log:
        """One log of several ranks that write below one root; they began before any of them wrote."""
        order = sorted((entry.time, rank, at) for rank, log in enumerate(logs) for at, entry in enumerate(log.entries))
        place = {(rank, at): number for number, (_, rank, at) in enumerate(order)}
        for _, rank, at in order:
            entry = logs[rank].entries[at]
            if isinstance(entry, Barrier):
                logs[rank].entries[at] = entry._replace(over=frozenset(place[rank, number] for number in entry.over))
        logs[0].entries = [logs[rank].entries[at] for _, rank, at in order]
        return logs[0]

    def image(self, directory: Path, stop: int, rng: random.Random) -> None:
        """The store as a power cut after ``stop`` entries may leave it. Layouts are synced where they are written."""
        files = {name: bytearray(data) for name, data in self._start.items()}
        for name, data in self._files().items():
            if "layout" in name:
                files[name] = bytearray(data)
            elif "slots" in name:
                files.setdefault(name, bytearray(len(data)))
        entries = self.entries[:stop]
        safe = frozenset[int]().union(*(e.over for e in entries if isinstance(e, Barrier)))
        share = rng.choice([0.0, 0.3, 0.7, 1.0])
        for at, entry in enumerate(entries):
            if isinstance(entry, Barrier):
                continue
            into = files.setdefault(entry.path, bytearray())
            torn = at not in safe
            for first in range(0, len(entry.data), SECTOR):
                part = entry.data[first : first + SECTOR]
                if torn and rng.random() >= share:
                    continue
                begin = entry.offset + first
                into.extend(bytes(max(0, begin + len(part) - len(into))))
                into[begin : begin + len(part)] = part
        for name, data in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        # Of slots on several drives: made before the first commit, and on the drive with it.
        for link in (p for p in self.root.rglob("*") if p.is_symlink()):
            target = directory / Path(os.readlink(link)).relative_to(self.root)
            (directory / link.relative_to(self.root)).symlink_to(target)


def content(directory: Path) -> tuple[int, str]:
    """The number of the last commit of a store, and a digest of every bit that it holds."""
    commit, manifest, opened, values = open_store(directory)
    digest = hashlib.sha256()
    for file in opened.values():
        assert not [*file.damage()]
        for name in sorted(file.specs):
            spec = file.specs[name]
            tensor = torch.empty(spec.numel, dtype=spec.dtype)  # held: the view of its bytes does not
            file.read_into(name, 0, tensor)
            digest.update(name.encode() + bytes(bytes_of(tensor)))
    for value in values:
        digest.update(bytes(bytes_of(value)))
    digest.update(repr(sorted(commit.records[0].text["manifest"].items())).encode())
    assert manifest.params
    return commit.sequence, digest.hexdigest()


class Judge:
    """Images of one log against the digests of its commits, in a folder ``store`` of it."""

    def __init__(self, log: Log, store: str = "."):
        self.log, self._store, self._commits = log, store, list[tuple[int, int, str]]()

    def committed(self, directory: Path) -> None:
        """A commit is over: what it holds must stay until the next one is."""
        self.has_committed(len(self.log.entries), *content(directory))

    def has_committed(self, entries: int, number: int, bits: str) -> None:
        """The same of a commit that was over behind so many entries."""
        self._commits.append((entries, number, bits))

    def failure(self, directory: Path, rng: random.Random) -> str | None:
        """Make one image in an empty folder, and say what is wrong with it."""
        stop = rng.randint(self._commits[0][0], len(self.log.entries))
        self.log.image(directory, stop, rng)
        last = max(i for i, (at, _, _) in enumerate(self._commits) if at <= stop)
        allowed = [(number, bits) for _, number, bits in self._commits[last : last + 2]]
        try:
            found = content(directory / self._store)
        except Exception as e:
            return f"after {stop} entries: {type(e).__name__}: {e}"
        if found in allowed:
            return None
        return f"after {stop} entries: commit {found[0]}, allowed {[number for number, _ in allowed]}, or other bits"
