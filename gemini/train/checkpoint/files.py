"""The folder of a checkpoint: its manifest and its files.

``manifest.json`` says what there is: params, step counts, optimizer groups, scheduler, loss scale, RNGs, and for every
file the CRC-32 of its header and of each piece of each tensor; a CRC-32 of its own guards it. JSON and safetensors
only, no pickle. How a new folder takes the place of an old one is in ``replacing.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gemini.errors import StorageError
from gemini.train.checkpoint import manifest as checkpoint_manifest
from gemini.train.checkpoint.manifest import FORMAT, VALUES, VERSION, Manifest, SavedTensor
from gemini.train.checkpoint.replacing import check_renamable
from gemini.train.checkpoint.tensor_file import Malformed, TensorFile, open_regular, parse_json

MANIFEST = "manifest.json"


def check_target(final: Path, asked: str | os.PathLike[str]) -> None:
    """Refuse to write over what is not a checkpoint, or where nothing can be written.

    Raises:
        StorageError: saying which.
    """
    try:
        check_renamable(final, asked)
        there = final.exists()
        if there and not (final.is_dir() and (not any(final.iterdir()) or (final / MANIFEST).exists())):
            raise StorageError(
                f"{final} exists and is not a checkpoint: it will not be overwritten; give another directory"
            )
        if not final.parent.is_dir():
            raise StorageError(f"cannot save a checkpoint in {final.parent}: no such directory")
    except OSError as e:
        raise StorageError(f"cannot save a checkpoint as {final}: {e.strerror or e}") from e


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """The last file to be written; on the disk when this returns."""
    with open(directory / MANIFEST, "w") as file:
        json.dump({"checksum": _checksum(manifest), **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """What stands in the manifest.

    Raises:
        StorageError: if it is missing, damaged, of another format or version, or no checkpoint has it.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            data = parse_json(file.read())
    except FileNotFoundError as e:
        raise StorageError(f"{path} is not a checkpoint: it has no manifest.json") from e
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}/{MANIFEST} cannot be read: {e}") from e
    checksum = data.pop("checksum", None) if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StorageError(f"{path}/{MANIFEST} is not that of a Gemini checkpoint")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise StorageError(
            f"{path} has checkpoint version {str(data.get('version'))[:80]}, this Gemini reads version {VERSION}: load "
            "it with the Gemini that wrote it, and carry the weights over with model.save_pretrained"
        )
    with as_damage(path / MANIFEST):
        if checksum != _checksum(data):
            raise Malformed("it is not what was written")
        return checkpoint_manifest.read(data)


def open_files(path: Path, manifest: Manifest) -> dict[str, TensorFile]:
    """The files of a checkpoint, with the headers that the manifest wants.

    Raises:
        StorageError: if one is missing or holds other tensors than the manifest says and the params need.
    """
    opened = {name: TensorFile(path / name) for name in manifest.files}
    for name, file in opened.items():
        if file.header_checksum != manifest.files[name].header:
            raise StorageError(f"{path / name} is damaged: its header is not what was written. Use an older checkpoint")
    with as_damage(path / MANIFEST):
        checkpoint_manifest.compare(manifest, opened)
    return opened


def read_values(path: Path, manifest: Manifest, opened: dict[str, TensorFile]) -> list[torch.Tensor]:
    """The tensors that plain values refer to, by number.

    Raises:
        StorageError: if one is not what was written.
    """
    file, listed = opened[VALUES], manifest.files[VALUES].tensors
    for name, entry in listed.items():
        compare_sums(file, name, max(file.specs[name].numel, 1), entry)
    return [file.whole(str(i)) for i in range(len(listed))]


def compare_sums(file: TensorFile, name: str, piece: int, entry: SavedTensor) -> None:
    """Compare the checksums of a tensor.

    Raises:
        StorageError: if it is not what was written.
    """
    if tuple(file.checksums(name, piece)) != entry.sums:
        raise StorageError(f"{file.path} is damaged: {name!r} is not what was written. Use an older checkpoint")


@contextlib.contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """What cannot be, as the error that a user gets.

    Raises:
        StorageError: for a Malformed inside.
    """
    try:
        yield
    except (Malformed, RecursionError) as e:
        raise StorageError(f"{path} is damaged: {e}. Use an older checkpoint") from e


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
