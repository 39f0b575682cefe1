"""Safetensors files written and read range by range.

The safetensors library writes a file from tensors that are whole in memory, which a checkpoint of a model that does not
fit cannot be. The format is public and small (eight bytes of header length, a JSON header of dtypes, shapes and
offsets, then the bytes), so files are written here in pieces, in any order, and opened by any safetensors reader. The
CRC-32 of the header and of every piece is kept beside it by the checkpoint, so that damage is found before anything is
loaded.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import torch

from gemini.errors import StorageError, of_storage
from gemini.replacing import sync

_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | _INTEGERS | {"BOOL": torch.bool, "C64": torch.complex64}
STORED_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
"""Those that every reader of the format knows, by the names it has for them."""


class TensorSpec(NamedTuple):
    """A tensor in a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: str, shape: Sequence[int]) -> Self:
        """The tensor that a file describes so."""
        return cls(name, _DTYPES[dtype], tuple(shape))

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
        with of_storage(f"could not write {path}"):
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close() or abandon()
        self._put(memoryview(self._header), 0)

    def write(self, name: str, start: int, piece: torch.Tensor) -> int:
        """Write elements ``[start, ...)`` of a tensor; returns the CRC-32 of the piece."""
        view = bytes_of(piece)
        # Of memory, not of what the disk has: what it did to the bytes shows when they are read.
        checksum = zlib.crc32(view)
        self._put(view, len(self._header) + self._offsets[name] + start * piece.element_size())
        self._remaining -= len(view)
        return checksum

    def close(self) -> None:
        """Let the file reach the disk, when everything was written."""
        # Counted in bytes: a hole in the file would read as zeros.
        assert self._remaining == 0, (self.path, self._remaining)
        # On the disk before the manifest names its checksums.
        with of_storage(f"could not write {self.path}"):
            sync(self.path)
            self.abandon()

    def abandon(self) -> None:
        """Let go of a file, also of one that was not written to its end."""
        self._file.close()

    def _put(self, view: memoryview, position: int) -> None:
        with of_storage(f"could not write {self.path}"):
            while view:
                # The system may write less than it is asked to.
                done = os.pwrite(self._file.fileno(), view, position)
                view, position = view[done:], position + done


class TensorFile:
    """A safetensors file, read range by range. Behind a header with the right checksum stands what was written.

    Raises:
        StorageError: if it is missing or cut short, or its header is not what was written.
    """

    def __init__(self, path: Path, header_checksum: int):
        self.path = path
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            # Not more than there is: a damaged length could be larger than memory.
            text = file.read(min(int.from_bytes(start, "little"), size))
        if zlib.crc32(start + text) != header_checksum:
            raise StorageError(f"{path} is damaged: its header is not what was written. Use an older checkpoint")
        header = json.loads(text)
        del header["__metadata__"]
        self.specs = {name: TensorSpec.of(name, entry["dtype"], entry["shape"]) for name, entry in header.items()}
        self._offsets = {name: len(start + text) + entry["data_offsets"][0] for name, entry in header.items()}
        end = len(start + text) + sum(spec.num_bytes for spec in self.specs.values())
        if size != end:
            raise StorageError(
                f"{path} is damaged: it has {size} bytes, its header says {end}. Use an older checkpoint"
            )

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor from elements ``[start, ...)`` of a tensor."""
        with opened(self.path) as file:
            self._read(file, name, start, into)

    def check(self, name: str, piece: int, sums: Sequence[int]) -> None:
        """Compare the CRC-32 of each run of ``piece`` elements of a tensor. Raises StorageError if one is another."""
        spec = self.specs[name]
        buffer = torch.empty(min(piece, spec.numel), dtype=spec.dtype, device="cpu")
        with opened(self.path) as file:
            for start, wanted in zip(range(0, spec.numel, piece), sums, strict=True):
                part = buffer[: min(piece, spec.numel - start)]
                self._read(file, name, start, part)
                if zlib.crc32(bytes_of(part)) != wanted:
                    raise StorageError(
                        f"{self.path} is damaged: {name!r} is not what was written. Use an older checkpoint"
                    )

    def _read(self, file: BinaryIO, name: str, start: int, into: torch.Tensor) -> None:
        assert into.dtype == self.specs[name].dtype
        position = self._offsets[name] + start * into.element_size()
        read_all(file, self.path, position, bytes_of(into), f"ends in the middle of {name!r}")


def opened(path: Path) -> BinaryIO:
    """A file to read from.

    Raises:
        StorageError: if it cannot be.
    """
    with of_storage(f"cannot read {path}"):
        return open(path, "rb")


def read_all(file: BinaryIO, path: Path, position: int, view: memoryview, too_short: str) -> None:
    """Fill ``view`` from byte ``position`` of a file on, which one read need not do.

    Raises:
        StorageError: if the drive refuses; or with the words ``too_short``, if the file ends before.
    """
    while view:
        with of_storage(f"cannot read {path}"):
            done = os.preadv(file.fileno(), [view], position)
        if not done:
            raise StorageError(f"{path} {too_short}")
        view, position = view[done:], position + done


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory (torch exports no buffer of bf16, so by address); the tensor must outlive it."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
