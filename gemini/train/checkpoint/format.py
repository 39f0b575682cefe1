"""The folder of a checkpoint: its manifest, its safetensors files, and the one reader of both.

``manifest.json`` says what there is: params, step counts, optimizer groups, scheduler, RNGs, and for every file the
CRC-32 of its header and of each piece of each tensor; a CRC-32 of its own guards it. What the checksums guard is what
:func:`gemini.save_checkpoint` has written: nothing is looked at value by value. No pickle. The safetensors library
writes a file from tensors that are whole in memory, which a checkpoint of a model that does not fit cannot be. The
format is public and small (eight bytes of header length, a JSON header of dtypes, shapes and offsets, then the bytes),
so files are written here in pieces, in any order, and opened by any safetensors reader.

Groups, buffers, scheduler, RNGs and ``extra`` are *plain values*, made to JSON and back with tensors apart: numbers,
strings, bytes, booleans, None, lists, tuples, dicts with any plain keys, and tensors of every dtype that is so many
bytes per element.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gemini.errors import GeminiError, StorageError, of_storage
from gemini.planning import document
from gemini.planning.planes import ADAM, RuleSpec
from gemini.replacing import check_renamable, sync
from gemini.train.params.handle import ParamHandle

FORMAT, VERSION = "gemini-checkpoint", 4
READABLE = (2, 3, VERSION)  # before 3 there are no slices, and before 4 of the model's state only buffers
MANIFEST = "manifest.json"
VALUES = "values.safetensors"
"""The file of tensors that are not masters or states: buffers, RNGs, what modules, scheduler and ``extra`` hold."""

_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | _INTEGERS | {"BOOL": torch.bool, "C64": torch.complex64}
STORED_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
"""Those that every reader of the format knows, by the names it has for them."""

_TUPLE, _ITEMS, _TENSOR, _BYTES = "__tuple__", "__items__", "__tensor__", "__bytes__"
_DTYPE, _SHAPE = "dtype", "shape"
_MAX_DEPTH = 64
"""Values within values; in JSON up to three times as many. They are read by recursion, of which there is not much."""
_MAX_BITS = 10_000
"""Of an int: Python reads no number of more than 4,300 digits."""


class SavedParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A param: its whole shape, its updates, whether there are states of it, how it was cut into slices (dim, groups
    and size of :class:`TensorSlice`, or None), whether it is bytes of codes, and whether it stays in fp32.
    """

    shape: tuple[int, ...]
    step: int
    trained: bool
    cut: tuple[int, int, int] | None = None
    coded: bool = False
    fp32: bool = False

    @classmethod
    def of(cls, handle: ParamHandle) -> SavedParam:
        """A param as it is now."""
        spec, cut = handle.chunk.spec, handle.cut and (handle.cut.dim, handle.cut.groups, handle.cut.size)
        return cls(tuple(handle.whole_shape), handle.num_steps, handle.chunk.trained, cut, spec.coded, spec.fp32)


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file: elements ``[start, ...)`` of ``of`` or of a slice of it, with the CRC-32 of each piece."""

    of: str
    start: int
    sums: tuple[int, ...]
    slice: int = 0


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: the CRC-32 of its header, and its tensors by their names in it."""

    header: int
    tensors: dict[str, SavedTensor]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole manifest. What is ``Any`` is encoded plain data, with tensors in ``VALUES``."""

    format: str = FORMAT
    version: int
    precision: Literal["bf16", "fp16", "fp32"]
    rule: RuleSpec = ADAM  # of the updates: Adam where a checkpoint does not say it
    exact: tuple[str, ...] = ()  # of a rule with compact states: the params whose states are exact
    piece: int  # elements of a checksum
    params: dict[str, SavedParam]
    files: dict[str, SavedFile]
    loss_scale: Any = None  # of versions that scaled backwards without a ``GradScaler``
    scheduler_kind: str | None = None  # the name of its class; None without one, and in checkpoints that do not say it
    scheduler: Any
    groups: Any
    plain: Any
    buffers: Any
    extra: Any
    rng: Any
    factors: Any = None  # None in checkpoints of rules without any


# ---- files of tensors ------------------------------------------------------------------------------------------------


class TensorSpec(NamedTuple):
    """A tensor in a file: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """The tensor that a file describes so."""
        return cls(name, _DTYPES[dtype], tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorFileWriter:
    """A safetensors file, on the disk after ``close``. All methods raise StorageError if the disk is full or fails."""

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
    """A safetensors file, read range by range. Behind a header with the right checksum stands what was written. Raises
    StorageError if it is missing or cut short, or its header is not what was written.
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
    """A file to read from. Raises StorageError if it cannot be."""
    with of_storage(f"cannot read {path}"):
        return open(path, "rb")


def read_all(file: BinaryIO, path: Path, position: int, view: memoryview, too_short: str) -> None:
    """Fill ``view`` from byte ``position`` of a file on, which one read need not do. Raises StorageError if the drive
    refuses; or with the words ``too_short``, if the file ends before.
    """
    while view:
        with of_storage(f"cannot read {path}"):
            done = os.preadv(file.fileno(), [view], position)
        if not done:
            raise StorageError(f"{path} {too_short}")
        view, position = view[done:], position + done


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as this does."""
    # As bytes: NumPy knows no bf16.
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_target(final: Path, asked: str | os.PathLike[str]) -> None:
    """Refuse to write over what is no checkpoint, or where nothing can be written: StorageError says which."""
    with of_storage(f"cannot save a checkpoint as {final}"):
        check_renamable(final, asked)
        if final.exists() and not (final.is_dir() and (not any(final.iterdir()) or (final / MANIFEST).exists())):
            raise StorageError(
                f"{final} exists and is not a checkpoint: it will not be overwritten; give another directory"
            )
        if not final.parent.is_dir():
            raise StorageError(f"cannot save a checkpoint in {final.parent}: no such directory; create it")


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """The last file to be written; on the disk when this returns."""
    with open(directory / MANIFEST, "w") as file:
        json.dump({"checksum": _checksum(manifest), **manifest}, file, indent=1)
    sync(directory / MANIFEST)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest. Raises StorageError if it is missing, damaged, or of another format or version."""
    try:
        data = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as e:
        raise StorageError(f"{path} is not a checkpoint: it has no manifest.json") from e
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}/{MANIFEST} cannot be read: {e}") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StorageError(f"{path}/{MANIFEST} is not that of a Gemini checkpoint")
    if data.get("version") not in READABLE:
        raise StorageError(
            f"{path} has checkpoint version {str(data.get('version'))[:80]}, this Gemini reads 2 to {VERSION}: "
            "load it with the Gemini that wrote it, and carry the weights over with model.save_pretrained"
        )
    # It is over everything else in the manifest.
    if data.pop("checksum", None) != _checksum(data):
        raise StorageError(f"{path / MANIFEST} is damaged: it is not what was written. Use an older checkpoint")
    return manifest_of(data, path)


def manifest_of(data: dict[str, Any], path: Path) -> Manifest:
    """The manifest that ``data``, as JSON has it, stands for. Raises StorageError for one that a later Gemini wrote."""
    try:
        rule = {"rule": RuleSpec.from_body(data["rule"])} if "rule" in data else {}
        return document.read({**data, **rule}, Manifest)
    except (TypeError, ValueError) as e:
        raise StorageError(
            f"{path} has what this Gemini does not know ({e}): load it with the one that wrote it"
        ) from e


def open_files(path: Path, manifest: Manifest) -> tuple[dict[str, TensorFile], list[torch.Tensor]]:
    """The files of a checkpoint by name, and the tensors that plain values refer to, by number. Raises StorageError if
    a file is missing or cut short, or its header or one of these tensors is damaged.
    """
    opened = {name: TensorFile(path / name, listed.header) for name, listed in manifest.files.items()}
    file, listed = opened[VALUES], manifest.files[VALUES].tensors
    values = []
    for number in map(str, range(len(listed))):
        spec = file.specs[number]
        # A value is one piece, however large.
        file.check(number, max(spec.numel, 1), listed[number].sums)
        value = torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        file.read_into(number, 0, value)
        values.append(value.view(spec.shape))
    return opened, values


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form (names sorted, no blanks), however the file is laid out."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


# ---- plain values ----------------------------------------------------------------------------------------------------


def encode(value: Any, tensors: list[torch.Tensor], where: str, depth: int = 0) -> Any:
    """``value`` as JSON data; tensors are appended to ``tensors`` and referred to by number. Raises TypeError, naming
    the place of a value that is none of the above.
    """
    if depth > _MAX_DEPTH:
        raise TypeError(
            f"{where[:80]}... is nested {_MAX_DEPTH} deep or holds itself, which a checkpoint cannot keep: make it flat"
        )
    # bool before int, which it is a subclass of.
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):  # an enum or a subclass: its number
        if value.bit_length() > _MAX_BITS:
            raise TypeError(f"{where} is an int of {value.bit_length()} bits, which a checkpoint cannot keep")
        return int(value)
    if isinstance(value, float):  # numpy's float64 is one
        return float(value)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, where)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, (tuple, list)):
        items = [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        # A user's dict with one of our tags as a key would come back as something else: it goes as items.
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS, _TENSOR, _BYTES} & set(value):
            return {key: encode(v, tensors, f"{where}.{key}", depth + 1) for key, v in value.items()}
        pairs = []
        for key, v in value.items():
            name = f"{where}.{key}" if isinstance(key, (str, int)) else f"{where}[...]"
            if isinstance(key, torch.Tensor):
                raise TypeError(f"{where} has a tensor as a key, which a checkpoint cannot keep")
            pairs.append([encode(key, tensors, where, depth + 1), encode(v, tensors, name, depth + 1)])
        return {_ITEMS: pairs}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep: use numbers, strings, bytes, lists, "
        "tuples, dicts and tensors (checkpoints hold no pickles)"
    )


def _encode_tensor(value: torch.Tensor, tensors: list[torch.Tensor], where: str) -> dict[str, Any]:
    """The numbers that a reader of ``value`` sees, as a plain tensor; a dtype that files cannot name as bytes."""
    try:
        empty_shell = isinstance(value, FakeTensor) or hasattr(value, "__tensor_flatten__")  # a DTensor, say
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or empty_shell:
            raise TypeError
        # The bits that a reader sees: lazily conjugated or negated views have others in memory.
        plain = value.detach().as_subclass(torch.Tensor).to("cpu").resolve_conj().resolve_neg().contiguous()
        if plain.numel() and not plain.untyped_storage().data_ptr():  # it only looks like a tensor
            raise TypeError
        has_name = plain.dtype in STORED_DTYPES
        tensors.append(plain if has_name else plain.view(-1).view(torch.uint8))
    except GeminiError:  # a managed param: it says how it can be read
        raise
    except (TypeError, RuntimeError) as e:
        what = str(value.layout) if value.layout is not torch.strided else f"{value.dtype} on {value.device}"
        kind = type(value).__name__ + (" that is nested" if value.is_nested else "")
        raise TypeError(
            f"{where} is a {kind} ({what.removeprefix('torch.')}), which a checkpoint cannot keep: use an ordinary "
            "dense tensor, .to_dense() or .dequantize() for example"
        ) from e
    beside = {} if has_name else {_DTYPE: str(plain.dtype).removeprefix("torch."), _SHAPE: list(plain.shape)}
    return {_TENSOR: len(tensors) - 1, **beside}


def decode(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Turn back what :func:`encode` was given, which has put these ``tensors`` aside."""
    if isinstance(data, list):
        return [decode(value, tensors) for value in data]
    if not isinstance(data, dict):
        return data
    if _TENSOR in data:
        found = tensors[data[_TENSOR]]
        return found if _DTYPE not in data else found.view(getattr(torch, data[_DTYPE])).view(data[_SHAPE])
    if _BYTES in data:
        return base64.b64decode(data[_BYTES])
    if _TUPLE in data:
        return tuple(decode(data[_TUPLE], tensors))
    if _ITEMS in data:
        return dict(decode(data[_ITEMS], tensors))
    return {key: decode(value, tensors) for key, value in data.items()}
