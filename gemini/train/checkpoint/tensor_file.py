"""Safetensors files written and read range by range.

The safetensors library writes a file from tensors that are whole in memory, which a checkpoint of a model that does not
fit cannot be. The format is public and small (eight bytes of header length, a JSON header of dtypes, shapes and
offsets, then the bytes), so files are written here in pieces, in any order, and opened by any safetensors reader. The
CRC-32 of the header and of every piece is kept beside it by the checkpoint, so that damage is found before anything is
loaded.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from gemini.errors import StorageError
from gemini.replacing import sync

_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | _INTEGERS | {"BOOL": torch.bool, "C64": torch.complex64}
STORED_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
"""Those that every reader of the format knows, by the names it has for them."""


class Malformed(ValueError):
    """What was read is nothing that is ever written. It says what it is and where, and becomes a StorageError."""


class TensorSpec(NamedTuple):
    """A tensor in a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFileWriter:
    """A safetensors file under way. It is on the disk after ``close``.

    Raises:
        StorageError: from every method, if the disk is full or fails.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]):
        self.path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        for spec in specs:
            span = [offset, offset + spec.num_bytes]
            header[spec.name] = {"dtype": STORED_DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
            self._offsets[spec.name] = offset
            offset += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        # So that the tensors behind it begin at a multiple of 8 bytes, as in files of the library.
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.header_checksum = zlib.crc32(self._header)
        self._remaining = offset
        with self._writing():
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close() or abandon()
            self._put(memoryview(self._header), 0)

    def write(self, name: str, start: int, piece: torch.Tensor) -> int:
        """Write elements ``[start, ...)`` of a tensor; returns the CRC-32 of the piece."""
        view = bytes_of(piece)
        # Of memory, not of what the disk has: what it did to the bytes shows when they are read.
        checksum = zlib.crc32(view)
        with self._writing():
            self._put(view, len(self._header) + self._offsets[name] + start * piece.element_size())
        self._remaining -= len(view)
        return checksum

    def close(self) -> None:
        """Let the file reach the disk, when everything was written."""
        # Counted in bytes: a hole in the file would read as zeros.
        assert self._remaining == 0, (self.path, self._remaining)
        # On the disk before the manifest names its checksums.
        with self._writing():
            sync(self.path)
            self.abandon()

    def abandon(self) -> None:
        """Let go of a file, also of one that was not written to its end."""
        self._file.close()

    def _put(self, view: memoryview, position: int) -> None:
        while view:
            # The system may write less than it is asked to.
            done = os.pwrite(self._file.fileno(), view, position)
            view, position = view[done:], position + done

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the system says inside into our error."""
        try:
            yield
        except OSError as e:
            raise StorageError(f"could not write {self.path}: {e.strerror}") from e


class TensorFile:
    """A safetensors file, read range by range.

    Raises:
        StorageError: if it is missing, cut short, or not a safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = int.from_bytes(start, "little")
                # Before it is read: a damaged length could be larger than memory.
                if not 2 <= length <= size - 8:
                    raise Malformed("its header length is not possible")
                text = file.read(length)
            self.header_checksum = zlib.crc32(start + text)
            header = parse_json(text)
            if not isinstance(header, dict):
                raise Malformed("its header is not a JSON object")
            header.pop("__metadata__", None)
            self._start = 8 + length
            self.specs, self._offsets = {}, {}
            for name, entry in header.items():
                self.specs[name], self._offsets[name] = _parsed(name, entry)
        except OSError as e:
            raise StorageError(f"cannot read {path}: {e.strerror}") from e
        except ValueError as e:
            raise StorageError(f"{path} is not a safetensors file, or is damaged: {e}") from e
        # The tensors must fill the file without a gap or an overlap. Empty ones come first where several begin at one
        # place.
        end = 0
        for name in sorted(self.specs, key=lambda n: (self._offsets[n], self.specs[n].num_bytes)):
            if self._offsets[name] != end:
                raise StorageError(f"{path} is damaged: {name!r} does not begin where the tensor before it ends")
            end += self.specs[name].num_bytes
        if size != self._start + end:
            raise StorageError(f"{path} is damaged: it has {size} bytes, its header says {self._start + end}")

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor from elements ``[start, ...)`` of a tensor."""
        with self._opened() as file:
            self._read(file, name, start, into)

    def checksums(self, name: str, piece: int) -> Iterator[int]:
        """The CRC-32 of each run of ``piece`` elements of a tensor."""
        spec = self.specs[name]
        buffer = torch.empty(min(piece, spec.numel), dtype=spec.dtype, device="cpu")
        with self._opened() as file:
            for start in range(0, spec.numel, piece):
                part = buffer[: min(piece, spec.numel - start)]
                self._read(file, name, start, part)
                yield zlib.crc32(bytes_of(part))

    def whole(self, name: str) -> torch.Tensor:
        """A small tensor at once."""
        spec = self.specs[name]
        out = torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        self.read_into(name, 0, out)
        return out.view(spec.shape)

    def _opened(self) -> BinaryIO:
        return opened(self.path)

    def _read(self, file: BinaryIO, name: str, start: int, into: torch.Tensor) -> None:
        assert into.dtype == self.specs[name].dtype
        position = self._start + self._offsets[name] + start * into.element_size()
        read_all(file, self.path, position, bytes_of(into), f"ends in the middle of {name!r}")


def opened(path: Path) -> BinaryIO:
    """A file to read from.

    Raises:
        StorageError: if it cannot be.
    """
    try:
        return open_regular(path)
    except OSError as e:
        raise StorageError(f"cannot read {path}: {e.strerror}") from e


def read_all(file: BinaryIO, path: Path, position: int, view: memoryview, too_short: str) -> None:
    """Fill ``view`` from byte ``position`` of a file on, which one read need not do.

    Raises:
        StorageError: if the drive refuses; or with the words ``too_short``, if the file ends before.
    """
    while view:
        try:
            done = os.preadv(file.fileno(), [view], position)
        except OSError as e:
            raise StorageError(f"cannot read {path}: {e.strerror}") from e
        if not done:
            raise StorageError(f"{path} {too_short}")
        view, position = view[done:], position + done


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; what is none (a pipe has no end, and may have no beginning) is not waited for.

    Raises:
        OSError: as ``open`` does, and if it is not a regular file.
    """
    # O_NONBLOCK: opening a pipe would wait for somebody to write into it.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def parse_json(text: bytes) -> Any:
    """A JSON document in which no name stands twice. Raises Malformed if it is none."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        # Which of two is meant would be up to the reader.
        if len(found) != len(pairs):
            raise Malformed("a name stands in it twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as e:
        raise Malformed("it is nested too deep") from e


def _parsed(name: str, entry: Any) -> tuple[TensorSpec, int]:
    """Read from a header what a tensor is and where it begins, in bytes behind the header.

    Raises:
        Malformed: if that is not possible.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"its header does not describe {name!r}")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    ends = span if isinstance(span, list) else [None]
    if not all(type(end) is int and 0 <= end < 2**62 for end in ends) or len(ends) != 2:
        raise Malformed(f"its header gives {name!r} no possible place")
    spec = parse_spec(name, dtype, shape)
    if span[1] - span[0] != spec.num_bytes:
        raise Malformed(f"its header gives {name!r} another size than its dtype and shape do")
    return spec, span[0]


def parse_spec(name: str, dtype: Any, shape: Any) -> TensorSpec:
    """A tensor as JSON describes it. Raises Malformed if there is no such dtype or shape."""
    sizes = shape if isinstance(shape, list) else [None]
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes) or len(sizes) > 64:
        raise Malformed(f"its header gives {name!r} no possible place")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Malformed(f"its header gives {name!r} an unknown dtype")
    return TensorSpec(name, _DTYPES[dtype], tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory (torch exports no buffer of bf16, so by address); the tensor must outlive it."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
