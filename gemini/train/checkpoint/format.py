"""The folder of a checkpoint: its manifest, what stands in it, and the one reader of it, which believes its checksums.

``manifest.json`` says what there is: params, step counts, optimizer groups, scheduler, loss scale, RNGs, and for every
file the CRC-32 of its header and of each piece of each tensor; a CRC-32 of its own guards it. JSON and safetensors
only, no pickle.

What the checksums guard is what :func:`gemini.save_checkpoint` has written: nothing is looked at value by value.
What is not described here (groups, buffers, scheduler, RNGs, ``extra``) are plain values, decoded by ``plain_data.py``.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from gemini import schema
from gemini.errors import StorageError, of_storage
from gemini.planning.planes import ADAM, RuleSpec
from gemini.replacing import check_renamable, sync
from gemini.train.checkpoint.tensor_file import TensorFile
from gemini.train.params.tensor_slice import TensorSlice

FORMAT, VERSION = "gemini-checkpoint", 4
READABLE = (2, 3, 4)
"""Version 2 knows no slices, and both before 4 of the model's state only its buffers; they are otherwise the same."""
ALL_OF_MODEL = 4
"""The first version whose ``buffers`` are all that the model's ``state_dict()`` has beside params."""
MANIFEST = "manifest.json"
VALUES = "values.safetensors"
"""The file of tensors that are not masters or states: buffers, RNGs, what modules, scheduler and ``extra`` hold."""


class SavedParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A param: its whole shape, its updates, whether there are states of it, how it was cut into slices (dim, groups
    and size of :class:`TensorSlice`, or None), whether it is bytes of codes, and whether it stays in fp32.
    """

    shape: tuple[int, ...]
    step: int
    trained: bool
    cut: tuple[int, ...] | None = None
    coded: bool = False
    fp32: bool = False

    @property
    def first_slice(self) -> TensorSlice | None:
        """The slice that the first rank had; None for all of it."""
        return None if self.cut is None else TensorSlice(self.shape, self.cut[0], self.cut[1], 0, self.cut[2])


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file: elements ``[start, ...)`` of what is called ``of`` or of a slice of it, with the CRC-32 of
    each piece.
    """

    of: str
    start: int
    sums: tuple[int, ...]
    slice: int = 0


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: the CRC-32 of its header, and its tensors by their names in it."""

    header: int
    tensors: dict[str, SavedTensor]


class LossScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loss scale that a model kept itself, in versions that scaled backwards without a ``GradScaler``."""

    scale: float
    growth_interval: int
    num_good_steps: int
    largest: float


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole manifest. What is ``Any`` is encoded plain data, with tensors in ``VALUES``."""

    format: str = FORMAT
    version: int
    precision: Literal["bf16", "fp16", "fp32"]
    rule: RuleSpec = ADAM
    """Of the updates: Adam where a checkpoint does not say it."""
    exact: tuple[str, ...] = ()
    """Of a rule with compact states: the params whose states are exact."""
    piece: int
    """Elements of a checksum."""
    params: dict[str, SavedParam]
    files: dict[str, SavedFile]
    loss_scale: LossScale | None = None
    """None but in fp16 of versions before."""
    scheduler_kind: str | None = None
    """The name of its class; None without one, and in checkpoints that do not say it."""
    scheduler: Any
    groups: Any
    plain: Any
    buffers: Any
    extra: Any
    rng: Any
    factors: Any = None
    """None in checkpoints of rules without any."""


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_target(final: Path, asked: str | os.PathLike[str]) -> None:
    """Refuse to write over what is not a checkpoint, or where nothing can be written.

    Raises:
        StorageError: saying which.
    """
    with of_storage(f"cannot save a checkpoint as {final}"):
        check_renamable(final, asked)
        there = final.exists()
        if there and not (final.is_dir() and (not any(final.iterdir()) or (final / MANIFEST).exists())):
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
    """Read what stands in the manifest.

    Raises:
        StorageError: if it is missing, damaged, or of another format or version.
    """
    try:
        data = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as e:
        raise StorageError(f"{path} is not a checkpoint: it has no manifest.json") from e
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}/{MANIFEST} cannot be read: {e}") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StorageError(f"{path}/{MANIFEST} is not that of a Gemini checkpoint")
    if data.get("version") not in READABLE:
        readable = " and ".join(map(str, READABLE))
        raise StorageError(
            f"{path} has checkpoint version {str(data.get('version'))[:80]}, this Gemini reads versions {readable}: "
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
        return schema.read({**data, **rule}, Manifest)
    except (TypeError, ValueError) as e:
        raise StorageError(
            f"{path} has what this Gemini does not know ({e}): load it with the one that wrote it"
        ) from e


def open_files(path: Path, manifest: Manifest) -> dict[str, TensorFile]:
    """The files of a checkpoint. Raises StorageError if one is missing or cut short, or its header is damaged."""
    return {name: TensorFile(path / name, listed.header) for name, listed in manifest.files.items()}


def read_values(manifest: Manifest, opened: Mapping[str, TensorFile]) -> list[torch.Tensor]:
    """The tensors that plain values refer to, by number. Raises StorageError if one is not what was written."""
    file, listed = opened[VALUES], manifest.files[VALUES].tensors
    for name, entry in listed.items():
        # A value is one piece, however large.
        compare_sums(file, name, max(file.specs[name].numel, 1), entry)
    return [file.whole(str(i)) for i in range(len(listed))]


def compare_sums(file: TensorFile, name: str, piece: int, entry: SavedTensor) -> None:
    """Compare the checksums of a tensor. Raises StorageError if it is not what was written."""
    if tuple(file.checksums(name, piece)) != entry.sums:
        raise StorageError(f"{file.path} is damaged: {name!r} is not what was written. Use an older checkpoint")


def key_in_file(of: str, rank: int, size: int) -> str:
    """Name slice ``rank`` of ``size`` of a plane as files do; ``size`` is 1 for a whole one."""
    return of if size == 1 else f"{of}[slice {rank} of {size}]"


def whole_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Shape of a whole plane of a param: the param's, or flat where a plane has fewer items than the param elements."""
    return tuple(shape) if math.prod(shape) == numel else (numel,)


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form (names sorted, no blanks), however the file is laid out."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
