"""The folder of a durable store: who may use it, its files, and which commit all of its ranks have.

    LOCK-00000              held by the rank with that number of the run that uses the store; who that is
    store-0001/             one arrangement of planes in slots; another budget or number of ranks begins the next one
        slots-00000         the slots of a rank
        slots-00000-1       with several drives: a link to the next of its files, over which they are striped
        record-00000-0      its commit records, written in turn
        record-00000-1
        layout-00000-HEX    what lies where in its slots; HEX is the CRC-32 of the file, which a record names

    stripes-HEX/store-0001/ in the directory of each further drive: the files that those links are to; HEX is the CRC-32
        slots-00000-1       of the first directory's path

A store that is begun beside an older one takes its place with its first commit; until then the older one is what a
resumed run loads.

A *record* is the one place that says which slots of a store hold a whole step. A rank writes the one of its two files
that does not hold its last commit, after everything that the record names has reached the drive. A record is good if it
is whole, which its checksum tells; one that was torn by a power cut is none, and the other one is there.
``docs/reference/durable-format.md`` has a table of its bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from gemini import replacing
from gemini.errors import StorageError, of_storage
from gemini.memory.durable.slots import Runs, SlotFile
from gemini.memory.nvme import striped_bytes

_STORE = re.compile(r"store-\d{4,9}")
Smallest = Callable[[list[int]], list[int]]
"""The minimum over all ranks of each value; in one process the values."""


class Commit(NamedTuple):
    """The last step that all ranks have: the record of each."""

    folder: Path
    records: list[CommitRecord]

    @property
    def sequence(self) -> int:
        return self.records[0].sequence


def is_store(directory: Path) -> bool:
    """Whether a path is that of a folder that holds a store."""
    return directory.is_dir() and bool(stores(directory))


def has_commit(directory: Path) -> bool:
    """Whether a rank has ever begun a commit in a folder."""
    return any(record_path(store, 0, place).exists() for store in stores(directory) for place in (0, 1))


def store_bytes(directory: Path) -> int:
    """Bytes that the slots of stores in a folder take on the drive."""
    found = [path.stat() for store in stores(directory) for path in store.glob("slots-*")]
    # Blocks and not sizes: what the drive has given. They are of 512 bytes, whatever the file system's own are.
    return sum(stat.st_blocks * 512 for stat in found)


def last_commit(directory: Path) -> Commit:
    """The newest step that every rank has committed; StorageError if there is none, or files are missing or newer."""
    found = stores(directory)
    if not found:
        raise StorageError(f"{directory} holds no durable store: it has no folder store-0001")
    refusals = list[StorageError]()
    for store in reversed(found):
        try:
            # A newer store without a commit that all have is one that was just begun: the older one counts.
            return Commit(store, common_records(store))
        except StorageError as e:
            refusals.append(e)
    raise refusals[0]


def common_records(store: Path) -> list[CommitRecord]:
    """The record of every rank of the newest commit that all have; StorageError if there is none."""
    ranks = [{record.sequence: record for record in _records_of(store, 0).values()}]
    if not ranks[0]:
        raise StorageError(
            f"{store} has no commit: its run ended before the first one, or its records were damaged. Start anew, or "
            "load a checkpoint"
        )
    size = max(record.text["ranks"] for record in ranks[0].values())
    ranks += [{record.sequence: record for record in _records_of(store, rank).values()} for rank in range(1, size)]
    if missing := [rank for rank, found in enumerate(ranks) if not found]:
        raise StorageError(
            f"{store} is of {size} ranks, and there is no commit of rank {missing[0]} here: ranks on several machines "
            "need a folder that all of them share to be resumed from it"
        )
    # Ranks write their records one by one: a run that was killed between two of them leaves some a commit ahead.
    common = set.intersection(*(set(found) for found in ranks))
    if not common:
        raise StorageError(f"{store} is damaged: its {size} ranks have no commit in common")
    return [found[max(common)] for found in ranks]


def read_layout(store: Path, rank: int, checksum: int) -> dict[str, Any]:
    """The layout of a rank's slots, in the file that a record names; StorageError if it is missing or damaged."""
    path = layout_path(store, rank, checksum)
    with of_storage(f"{path} is missing or damaged"):
        data = path.read_bytes()
    if zlib.crc32(data) != checksum:
        raise StorageError(f"{path} is missing or damaged: it is not what was written")
    return json.loads(data)  # type: ignore[no-any-return]


def layout_path(store: Path, rank: int, checksum: int) -> Path:
    """The name of a layout file."""
    return store / f"layout-{rank:05d}-{checksum:08x}"


def slots_path(store: Path, rank: int, drive: int = 0) -> Path:
    """The name of the slots of a rank; of those on a further drive the name of the link to them."""
    return store / (f"slots-{rank:05d}" if drive == 0 else f"slots-{rank:05d}-{drive}")


def slots_paths(store: Path, rank: int) -> list[Path]:
    """The files that the slots of a rank are striped over; one where there is one drive."""
    links = (slots_path(store, rank, drive) for drive in count(1))
    return [slots_path(store, rank), *takewhile(os.path.islink, links)]


def remove_store(store: Path) -> None:
    """Remove a store, with what of it is on other drives. What cannot be removed stays."""
    for link in store.glob("slots-*-*"):
        with contextlib.suppress(OSError):
            target = Path(os.readlink(link))
            target.unlink()
            # With the last file in it. Not the one above: another rank may be about to make the next store there.
            target.parent.rmdir()
    shutil.rmtree(store, ignore_errors=True)


def record_path(store: Path, rank: int, place: int) -> Path:
    """The name of one of the two record files of a rank."""
    return store / f"record-{rank:05d}-{place}"


class StoreFolder:
    """A store in use by one rank of a run: its lock, its slots (in the first directory, and striped over the others;
    ``sizes``: whole pages by plane), and the records that this rank writes. StorageError if another run uses it, it
    cannot be written, or the disk is full. ``smallest``: over the ranks of this run, which share the store.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        sizes: Mapping[str, int],
        *,
        rank: int = 0,
        ranks: int = 1,
        smallest: Smallest = lambda values: values,
    ):
        self.directory, *self._others = (Path(os.path.realpath(directory)) for directory in directories)
        self.rank, self.ranks = rank, ranks
        self._lock = _locked(self.directory, rank)
        try:
            # Behind the lock: what is read here must not change meanwhile.
            self._open(sizes, smallest)
        except BaseException:
            os.close(self._lock)
            self._lock = -1
            raise

    def _open(self, sizes: Mapping[str, int], smallest: Smallest) -> None:
        """Go on from the newest commit that all ranks have, or begin a store beside what is there."""
        found = stores(self.directory)
        last = _number(found[-1]) if found else 0
        own = self._own_records(found[-1], sizes) if found else {}
        # The newest commit that all ranks have: the last one of whoever has least.
        newest = max((record.sequence for record in own.values()), default=-1)
        # One message for all of it. The smallest of `last` and of `-last` are equal only if all ranks see the same.
        least, minus_most, alike, common = smallest([last, -last, int(bool(own)), newest])
        if least != -minus_most:
            raise StorageError(
                f"{self.directory}: the ranks see different stores in it: give all of them the same folder"
            )
        taken = next((place for place in own if alike and own[place].sequence == common), None)
        whole = smallest([0 if taken is None else 1])[0]  # on all ranks or on none
        self.folder = self.directory / f"store-{last if alike else last + 1:04d}"
        if self.rank == 0 and not alike:
            for store in found:  # left by runs that ended before their first commit
                if not any(record_path(store, 0, place).exists() for place in (0, 1)):
                    remove_store(store)
        # Above every record that is there, also of commits that are given up: a number must never say two things.
        self.highest = max(newest, 0)
        with of_storage(f"{self.folder} cannot be made"):
            self.folder.mkdir(exist_ok=True)
            # A record in a folder whose name is not on the drive would be lost with it.
            replacing.sync(self.directory)
        self.slots = SlotFile(self._link(), sizes)
        self._place = 0
        """Which of the two record files is written next."""
        if taken is not None and whole:
            # The other file: this record is the commit to come back to.
            self._place = 1 - taken
            for name, pair in self.slots.pairs.items():
                pair.take_committed(own[taken].text["runs"][name])

    def _paths(self, store: Path) -> list[Path]:
        """The files of this rank's slots in a store, on each drive one."""
        name = f"stripes-{zlib.crc32(os.fsencode(self.directory)):08x}"
        others = enumerate(self._others, 1)
        return [
            slots_path(store, self.rank),
            *(slots_path(other / name / store.name, self.rank, drive) for drive, other in others),
        ]

    def _link(self) -> list[Path]:
        """Make the folders of those files, and in the store the links to them, for good."""
        paths = self._paths(self.folder)
        # Of a run that used more drives: the store is begun anew, and says so by having no such link.
        for link in slots_paths(self.folder, self.rank)[len(paths) :]:
            link.unlink()
        for drive, path in enumerate(paths[1:], 1):
            link = slots_path(self.folder, self.rank, drive)
            with of_storage(f"{path} cannot be made"):
                path.parent.mkdir(parents=True, exist_ok=True)
                for folder in (path.parents[1], path.parents[2]):
                    replacing.sync(folder)
                if not link.is_symlink() or os.readlink(link) != str(path):
                    link.unlink(missing_ok=True)
                    link.symlink_to(path)
        return paths

    def _own_records(self, store: Path, sizes: Mapping[str, int]) -> dict[int, CommitRecord]:
        """The records of this rank in a store, by the place of their files; none if its slots are not as wanted."""
        found = _records_of(store, self.rank)
        paths, there = self._paths(store), slots_paths(store, self.rank)
        if not found or [os.path.realpath(path) for path in there] != [os.path.realpath(path) for path in paths]:
            return {}
        for drive, path in enumerate(paths):
            num_bytes = striped_bytes(2 * sum(sizes.values()), drive, len(paths))
            if not (path.is_file() and path.stat().st_size == num_bytes):
                return {}
        said = max(found.values()).text
        try:
            layout = read_layout(store, self.rank, said["layout"])
        except StorageError:
            return {}
        alike = said["ranks"] == self.ranks and layout["sizes"] == [[*item] for item in sizes.items()]
        return found if alike else {}

    def write_layout(self, layout: Any) -> int:
        """Write what lies where in the slots to the drive; returns its checksum, which the next records name."""
        data = json.dumps(layout, separators=(",", ":")).encode()
        checksum = zlib.crc32(data)
        path = layout_path(self.folder, self.rank, checksum)
        if not path.exists() or path.read_bytes() != data:
            with of_storage(f"could not write {path}"):
                path.write_bytes(data)
                replacing.sync(path)
        return checksum

    def commit(self, record: CommitRecord) -> None:
        """Write a record of what :meth:`SlotFile.sync` has brought to the drive, on all ranks before
        :meth:`committed_by_all`. After a StorageError it may be there or not: this commit and the one before must stay.
        """
        write_record(record_path(self.folder, self.rank, self._place), record)
        # The first record makes its file: its name must be on the drive as well, and those of slots.
        with of_storage(f"could not write {self.folder}"):
            for folder in {self.folder, *(path.parent for path in self._paths(self.folder))}:
                replacing.sync(folder)
        self.highest = record.sequence

    def committed_by_all(self, runs: Mapping[str, Runs]) -> None:
        """Every rank has written its record: the slots of the commit before are free, and older stores are gone."""
        # Now and not in `commit`: while some rank has not written its record, the commit before is the one that all
        # have, and its file must not be the next one to be written.
        self._place = 1 - self._place
        for name, pair in self.slots.pairs.items():
            pair.commit(runs[name])
        if self.rank == 0:
            for store in stores(self.directory):
                if store != self.folder:
                    # Only now: until every rank has a commit in this store, the older one is what a resumed run loads.
                    remove_store(store)

    def close(self) -> None:
        """Let others use it."""
        # Before the lock: the next run opens the same file.
        self.slots.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Of a wrap that broke off later: the lock is a number, which nobody else would close.
        if not _ending() and getattr(self, "_lock", -1) >= 0:
            self.close()


@contextlib.contextmanager
def reading(directory: Path, own: StoreFolder | None):  # type: ignore[no-untyped-def]
    """Around reading a store, which nobody else may be writing (StorageError); ``own``: that of this process."""
    if own is not None and own.directory == Path(os.path.realpath(directory)):
        yield
        return
    lock = _locked(directory, 0, shared=True)
    try:
        yield
    finally:
        os.close(lock)


def _locked(directory: Path, rank: int, *, shared: bool = False) -> int:
    """A descriptor that holds the lock of a rank. The system lets go of it when the process ends, in whatever way."""
    with of_storage(f"the durable store in {directory} cannot be used"):
        fd = os.open(directory / f"LOCK-{rank:05d}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as e:
        who = _name_in(fd)
        os.close(fd)
        raise StorageError(
            f"the durable store in {directory} is in use by another run, or by another model of this one ({who}): wait "
            "for it to end, or give another nvme_path="
        ) from e
    if not shared:
        with contextlib.suppress(OSError):  # for people only
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd


def holder(directory: Path) -> str | None:
    """The user of the store in a folder, as people say it; None for nobody. Nothing is written."""
    for path in sorted(directory.glob("LOCK-*")):
        with of_storage(f"{path} cannot be read"):
            fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _name_in(fd)
        finally:
            os.close(fd)
    return None


def _name_in(lock: int) -> str:
    """The text of a lock: who wrote that it held it. A process that loads a store writes none."""
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "a process that is not known"


def _records_of(store: Path, rank: int) -> dict[int, CommitRecord]:
    """The records of a rank that are whole, by the places of its two files."""
    found = {place: read_record(record_path(store, rank, place)) for place in (0, 1)}
    return {place: record for place, record in found.items() if record is not None}


def stores(directory: Path) -> list[Path]:
    """The stores in a folder, the newest last."""
    with of_storage(f"nvme_path {directory} cannot be read"):
        found = [path for path in directory.iterdir() if _STORE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number)


def _number(store: Path) -> int:
    return int(store.name.removeprefix("store-"))


MAGIC, VERSION = b"GEMINI\x00C", 2
_HEAD = struct.Struct("<8sIIQQQ")
_SUMMED = 16
"""Where that begins of which there is a checksum."""


class CommitRecord(NamedTuple):
    """One commit of one rank."""

    sequence: int
    text: Any
    """What JSON has."""
    tensors: bytes


def write_record(path: Path, record: CommitRecord) -> None:
    """Put a record into its file; it is on the drive when this returns. After a StorageError it may be there too."""
    # Level 1: a commit waits for it.
    text = zlib.compress(json.dumps(record.text, separators=(",", ":")).encode(), 1)
    rest = struct.pack("<QQQ", record.sequence, len(text), len(record.tensors)) + text + record.tensors
    data = MAGIC + struct.pack("<II", VERSION, zlib.crc32(rest)) + rest
    with of_storage(f"could not write the commit record {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            done = 0
            # `pwrite` may write less than it is given.
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.fdatasync(fd)
        finally:
            os.close(fd)


def read_record(path: Path) -> CommitRecord | None:
    """The record in a file; None if none there is whole. StorageError for one of another format, or not to be read."""
    if not path.exists():
        return None
    with of_storage(f"the commit record {path} cannot be read"):
        data = path.read_bytes()
    if len(data) < _HEAD.size:
        return None
    magic, version, checksum, sequence, text, tensors = _HEAD.unpack_from(data)
    if magic != MAGIC:
        return None
    if version != VERSION:
        raise StorageError(
            f"{path} has version {version} of the format, this Gemini reads version {VERSION}: load the store with the "
            "Gemini that wrote it"
        )
    end = _HEAD.size + text + tensors
    # What follows `end` is left by a longer record and not summed.
    if len(data) < end or zlib.crc32(memoryview(data)[_SUMMED:end]) != checksum:
        return None
    begin = _HEAD.size + text
    return CommitRecord(sequence, json.loads(zlib.decompress(data[_HEAD.size : begin])), data[begin:end])
