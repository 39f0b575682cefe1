"""A durable store, read as the checkpoint that its last commit is: the same manifest, the same reader.

A store may have been damaged, or written by somebody else: what its records and layouts say is compared here with what
can be, and the rest where a checkpoint's is (:mod:`gemini.train.checkpoint.format`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini.errors import StorageError
from gemini.kernels import crc32
from gemini.memory.devices.pages import PAGE
from gemini.memory.durable.folder import Commit, check_runs, last_commit, read_layout, reading, slots_path
from gemini.memory.durable.slots import ZEROS, Runs
from gemini.train.checkpoint.format import VALUES, Manifest, as_damage, manifest_of
from gemini.train.checkpoint.plain_data import Decoder
from gemini.train.checkpoint.tensor_file import Malformed, TensorFile, TensorSpec, bytes_of, parse_spec

_AT_ONCE = 2**20
"""Bytes that are read at once to be summed."""


class Stored(NamedTuple):
    """The last commit of a store, opened."""

    commit: Commit
    manifest: Manifest
    opened: dict[str, SlotReader]
    values: list[torch.Tensor]


class _Run(NamedTuple):
    """So many pages of a plane from ``first`` on, in which slot they are, and their CRC-32."""

    first: int
    pages: int
    slot: int
    crc: int | None


class SlotReader(TensorFile):
    """The slots of one rank as a file of tensors.

    Raises:
        StorageError: if the file is missing or cut short, or the layout cannot be.
    """

    def __init__(self, path: Path, layout: Any, runs: Any):
        self.path = path
        self.header_checksum = 0
        sizes, tensors = _fields(layout, "sizes", "tensors")
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, tuple[str, int]] = {}
        """By tensor its plane, and where it is in it."""
        self._whole: set[tuple[str, int]] = set()
        """Runs that were compared, by plane and first page."""
        self.slots: dict[str, tuple[Runs, int, int]] = {}
        """By plane its runs, where its slots begin, and the bytes of one."""
        offset, slots = 0, self.slots
        for entry in sizes if isinstance(sizes, list) else [None]:
            if not isinstance(entry, list) or len(entry) != 2 or type(entry[1]) is not int or entry[1] % PAGE:
                raise Malformed("its layout does not list its slots")
            name, size = entry
            slots[str(name)] = check_runs(_fields(runs, str(name))[0], size, path), offset, size
            offset += 2 * size
        self.entries: dict[str, dict[str, Any]] = {}
        for name, entry in tensors.items() if isinstance(tensors, dict) else [("tensors", None)]:
            of, start, dtype, shape, pair, at = _fields(entry, "of", "start", "dtype", "shape", "slots", "at")
            spec = self.specs[name] = parse_spec(name, dtype, shape)
            if pair not in slots or type(at) is not int or not 0 <= at <= slots[pair][2] - spec.num_bytes:
                raise Malformed(f"its layout gives {name!r} no possible place")
            self._places[name] = pair, at
            self.entries[name] = {"of": of, "start": start, "sums": []}
        try:
            there = os.stat(path).st_size
        except OSError as e:
            raise StorageError(f"{path} cannot be read: {e.strerror}") from e
        if there < offset:
            raise StorageError(f"{path} is cut short: it has {there} bytes of {offset}. Use a checkpoint")

    def checksums(self, name: str, piece: int) -> Iterator[int]:
        """None: those of a record are compared here, once each. They are of what was written at once, of one tensor or
        several.

        Raises:
            StorageError: if something that the tensor lies in is not what was written.
        """
        plane, at = self._places[name]
        for run in self._runs(plane, at, at + self.specs[name].num_bytes):
            if (plane, run.first) not in self._whole:
                self._compare(plane, run)
                self._whole.add((plane, run.first))
        return iter(())

    def damage(self) -> Iterator[str]:
        """What of the committed slots is not as it was written, in words."""
        for plane, (_, _, size) in self.slots.items():
            for run in self._runs(plane, 0, size):
                try:
                    self._compare(plane, run)
                except StorageError as e:
                    yield str(e)

    def _runs(self, plane: str, start: int, stop: int) -> Iterator[_Run]:
        """Those that have any of the bytes ``[start, stop)`` of a plane."""
        page = 0
        for count, slot, crc in self.slots[plane][0]:
            if page * PAGE < stop and start < (page + count) * PAGE:
                yield _Run(page, count, slot, crc)
            page += count

    def _compare(self, plane: str, run: _Run) -> None:
        """Read a run, and compare its sum if it has one.

        Raises:
            StorageError: if it cannot be read, or is not what was written.
        """
        if run.slot == ZEROS:
            return
        _, offset, size = self.slots[plane]
        position, crc = offset + run.slot * size + run.first * PAGE, 0
        buffer = torch.empty(min(_AT_ONCE, run.pages * PAGE), dtype=torch.uint8, device="cpu")
        try:
            with self._opened() as file:
                for at in range(0, run.pages * PAGE, _AT_ONCE):
                    part = buffer[: run.pages * PAGE - at]
                    _read(file.fileno(), self.path, position + at, bytes_of(part))
                    crc = crc32(part, crc)
            if crc == run.crc or run.crc is None:
                return
            what = "they are not what was written"
        except StorageError as e:
            what = str(e)
        kind, _, chunk = plane.rpartition("/")
        span = run.first * PAGE, (run.first + run.pages) * PAGE
        held = [name for name, (of, at) in self._places.items() if of == plane and at < span[1]
                and span[0] < at + self.specs[name].num_bytes]  # fmt: skip
        params = f", of {held[0]}{f' and {len(held) - 1} more' if held[1:] else ''}" if held else ""
        raise StorageError(
            f"{self.path} is damaged in the {kind} of chunk {chunk}{params}, {run.pages} pages from byte {position}: "
            f"{what}. Check the drive; resume from a checkpoint, or start anew in another folder"
        )

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        plane, at = self._places[name]
        runs, offset, size = self.slots[plane]
        view = bytes_of(into)
        first = at + start * into.element_size()
        last, page = first + len(view), 0
        with self._opened() as file:
            for count, slot, _ in runs:
                begin, end = max(first, page * PAGE), min(last, (page + count) * PAGE)
                page += count
                if begin < end:
                    part = view[begin - first : end - first]
                    if slot == ZEROS:
                        part[:] = bytes(len(part))
                    else:
                        _read(file.fileno(), self.path, offset + slot * size + begin, part)


def _read(fd: int, path: Path, position: int, view: memoryview) -> None:
    while view:
        try:
            done = os.preadv(fd, [view], position)
        except OSError as e:
            raise StorageError(f"cannot read {path}: {e.strerror}") from e
        if not done:
            raise StorageError(f"{path} is cut short at byte {position}. Use a checkpoint")
        view, position = view[done:], position + done


def open_store(directory: Path) -> Stored:
    """The last commit that all ranks of the run have.

    Raises:
        StorageError: if there is none, or it is damaged.
    """
    commit = last_commit(directory)
    with as_damage(commit.folder):
        opened: dict[str, SlotReader] = {}
        files: dict[str, Any] = {VALUES: {"header": 0, "tensors": {}}}
        for rank, record in enumerate(commit.records):
            checksum, runs = _fields(record.text, "layout", "runs")
            layout = read_layout(commit.folder, rank, checksum)
            reader = SlotReader(slots_path(commit.folder, rank), layout, runs)
            name = f"slots-{rank:05d}.safetensors"
            opened[name] = reader
            files[name] = {"header": 0, "tensors": reader.entries}
        body, listed = _fields(commit.records[0].text, "manifest", "values")
        values = _values(listed, commit.records[0].tensors)
        if not isinstance(body, dict):
            raise Malformed("a commit record has no manifest")
        manifest = manifest_of({**body, "files": files}, opened)
    return Stored(commit, manifest, opened, values)


def committed_extra(directory: Path) -> Any:
    """The ``extra`` of the last commit, which nobody is writing at.

    Raises:
        StorageError: if there is none, it is damaged, or another run uses the store.
    """
    with reading(directory, None), as_damage(directory):
        stored = open_store(directory)
        return Decoder(stored.values).decode(stored.manifest.extra, "extra")


def _values(listed: Any, data: bytes) -> list[torch.Tensor]:
    values, at = [], 0
    for number, entry in enumerate(listed if isinstance(listed, list) else [None]):
        if not isinstance(entry, list) or len(entry) != 2:
            raise Malformed("a commit record does not list its tensors")
        spec = parse_spec(str(number), *entry)
        if at + spec.num_bytes > len(data):
            raise Malformed("a commit record is shorter than its tensors")
        value = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        bytes_of(value)[:] = data[at : at + spec.num_bytes]
        values.append(value)
        at += spec.num_bytes
    if at != len(data):
        raise Malformed("a commit record is longer than its tensors")
    return values


def _fields(value: Any, *names: str) -> list[Any]:
    if not isinstance(value, dict) or not set(names) <= value.keys():
        raise Malformed(f"{', '.join(names)} do not stand where they should")
    return [value[name] for name in names]
