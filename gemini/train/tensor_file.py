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
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from gemini.errors import StorageError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor in a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFileWriter:
    """A safetensors file under way. It is made with the first write, and is on the disk after ``close``.

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
            header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
            self._offsets[spec.name] = offset
            offset += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.header_checksum = zlib.crc32(self._header)
        self._remaining = offset
        self._file: BinaryIO | None = None
        self._closed = False

    def write(self, name: str, start: int, piece: torch.Tensor) -> int:
        """Write elements ``[start, ...)`` of a tensor; returns the CRC-32 of the piece."""
        view = _bytes_of(piece)
        checksum = zlib.crc32(view)
        try:
            if self._file is None:
                self._open()
            self._put(view, len(self._header) + self._offsets[name] + start * piece.element_size())
        except OSError as e:
            raise StorageError(f"could not write {self.path}: {e.strerror}") from e
        self._remaining -= len(view)
        return checksum

    def close(self) -> None:
        """Everything was written: let it reach the disk. Idempotent."""
        assert self._remaining == 0, (self.path, self._remaining)
        if self._closed:
            return
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            with self._file as file:
                os.fsync(file.fileno())
        except OSError as e:
            raise StorageError(f"could not write {self.path}: {e.strerror}") from e
        self._closed = True

    def abandon(self) -> None:
        """Let go of a file that was not written to its end."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - closed by close() or abandon()
        self._put(memoryview(self._header), 0)

    def _put(self, view: memoryview, position: int) -> None:
        assert self._file is not None
        while view:
            done = os.pwrite(self._file.fileno(), view, position)
            view, position = view[done:], position + done


class TensorFile:
    """A safetensors file, read range by range.

    Raises:
        StorageError: if it is missing, cut short, or not a safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = int.from_bytes(start, "little")
                if not 2 <= length <= size - 8:
                    raise ValueError("its header length is not possible")
                text = file.read(length)
            header = json.loads(text)
            self.header_checksum = zlib.crc32(start + text)
            header.pop("__metadata__", None)
            self._start = 8 + length
            self.specs = {
                name: TensorSpec(name, _DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()
            }
            self._offsets = {name: entry["data_offsets"][0] for name, entry in header.items()}
        except OSError as e:
            raise StorageError(f"cannot read {path}: {e.strerror}") from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise StorageError(f"{path} is not a safetensors file, or is damaged: {e}") from e
        end = self._start + max((self._offsets[n] + s.num_bytes for n, s in self.specs.items()), default=0)
        if size != end:
            raise StorageError(f"{path} is damaged: it has {size} bytes, its header says {end}")

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
                yield zlib.crc32(_bytes_of(part))

    def whole(self, name: str) -> torch.Tensor:
        """A small tensor at once."""
        spec = self.specs[name]
        out = torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        self.read_into(name, 0, out)
        return out.view(spec.shape)

    def _opened(self) -> BinaryIO:
        try:
            return open(self.path, "rb", buffering=0)
        except OSError as e:
            raise StorageError(f"cannot read {self.path}: {e.strerror}") from e

    def _read(self, file: BinaryIO, name: str, start: int, into: torch.Tensor) -> None:
        assert into.dtype == self.specs[name].dtype
        view = _bytes_of(into)
        position = self._start + self._offsets[name] + start * into.element_size()
        while view:
            try:
                done = os.preadv(file.fileno(), [view], position)
            except OSError as e:
                raise StorageError(f"cannot read {self.path}: {e.strerror}") from e
            if not done:
                raise StorageError(f"{self.path} ends in the middle of {name!r}")
            view, position = view[done:], position + done


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory (torch exports no buffer of bf16, so by address)."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
