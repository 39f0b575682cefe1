"""Safetensors files written and read tile by tile.

The safetensors library writes a file from tensors that are whole in memory, which a checkpoint of a model that does not
fit cannot be. The format is public and small (eight bytes of header length, a JSON header of dtypes, shapes and
offsets, then the bytes), so files are written here as a stream and opened by any safetensors reader. Every tensor's
CRC-32 is kept beside it by the checkpoint, so that damage is found before anything is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gemini.errors import StorageError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


def write_tensor_file(
    path: Path, specs: Sequence[TensorSpec], content: Callable[[str], Iterator[torch.Tensor]]
) -> dict[str, int]:
    """Write ``specs`` in order; ``content(name)`` gives a tensor's flat parts. Returns the CRC-32 of each.

    The file is on the disk when this returns.

    Raises:
        StorageError: if the disk is full or fails.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        span = [offset, offset + spec.num_bytes]
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums: dict[str, int] = {}
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in specs:
                checksum = written = 0
                for part in content(spec.name):
                    view = _bytes_of(part)
                    checksum = zlib.crc32(view, checksum)
                    written += file.write(view)
                assert written == spec.num_bytes, (spec, written)
                checksums[spec.name] = checksum
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise StorageError(f"could not write {path}: {e.strerror}") from e
    return checksums


class TensorFile:
    """A safetensors file, read part by part.

    Raises:
        StorageError: if it is missing, cut short, or not a safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError("its header length is not possible")
                header = json.loads(file.read(length))
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

    def read(self, name: str, part_bytes: int = 4 * 2**20) -> Iterator[torch.Tensor]:
        """The flat parts of a tensor, in order, each of at most ``part_bytes``. A part is overwritten by the next
        one.
        """
        spec = self.specs[name]
        remaining = spec.num_bytes
        buffer = torch.empty(min(part_bytes, remaining), dtype=torch.uint8, device="cpu")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._start + self._offsets[name])
            while remaining:
                part = buffer[: min(remaining, len(buffer))]
                view = memoryview(_bytes_of(part))
                done = 0
                while done < len(part):
                    got = file.readinto(view[done:])
                    if not got:
                        raise StorageError(f"{self.path} ends in the middle of {name!r}")
                    done += got
                remaining -= len(part)
                yield part.view(spec.dtype)

    def checksum(self, name: str) -> int:
        """The CRC-32 of a tensor's bytes."""
        checksum = 0
        for part in self.read(name):
            checksum = zlib.crc32(_bytes_of(part), checksum)
        return checksum

    def whole(self, name: str) -> torch.Tensor:
        """A small tensor at once."""
        spec = self.specs[name]
        parts = [part.clone() for part in self.read(name)]
        return (torch.cat(parts) if parts else torch.empty(0, dtype=spec.dtype, device="cpu")).view(spec.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory (torch exports no buffer of bf16, so by address)."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
