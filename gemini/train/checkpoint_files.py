"""The folder of a checkpoint: its manifest, and how a new one takes the place of the old one.

``manifest.json`` says what there is: params, step counts, optimizer groups, scheduler, loss scale, RNGs, and for every
file the CRC-32 of its header and of each piece of each tensor; a CRC-32 of its own guards it. A checkpoint is written
beside its final name and renamed when it is whole on the disk: at every moment a complete one stands under a name that
loading finds. JSON and safetensors only, no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from gemini.errors import StorageError
from gemini.train.tensor_file import TensorFile

FORMAT, VERSION = "gemini-checkpoint", 2
VALUES = "values.safetensors"
"""The file of tensors that are not masters or moments: buffers, RNGs, what the scheduler and ``extra`` hold."""


def check_target(final: Path) -> None:
    """Refuse to write over what is not a checkpoint, or where nothing can be written.

    Raises:
        StorageError: saying which.
    """
    if final.exists() and not (final.is_dir() and (not any(final.iterdir()) or (final / "manifest.json").exists())):
        raise StorageError(
            f"{final} exists and is not a checkpoint: it will not be overwritten; give another directory"
        )
    if not final.parent.is_dir():
        raise StorageError(f"cannot save a checkpoint in {final.parent}: no such directory")


def work_name(final: Path) -> str:
    """The name, beside ``final``, under which this process writes a new one."""
    return f".{final.name}.new-{os.getpid()}"


def swap(work: Path, final: Path) -> None:
    """Put ``work`` in the place of ``final``: at every moment one of them is complete under a name that load finds."""
    old = _old_name(final)
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(work, final)
    for directory in (final, final.parent):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(final: Path) -> None:
    """What saves that were killed had written so far (not what another living process is writing)."""
    for leftover in final.parent.glob(f".{final.name}.new-*"):
        pid = int(leftover.name.rpartition("-")[2]) if leftover.name.rpartition("-")[2].isdigit() else 0
        try:
            os.kill(pid, 0)
            alive = pid not in (0, os.getpid())
        except ProcessLookupError:
            alive = False
        except PermissionError:
            alive = True
        if not alive and leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        elif not alive:
            leftover.unlink(missing_ok=True)


def find(path: Path) -> Path:
    """Where the checkpoint called ``path`` stands.

    Raises:
        StorageError: if there is none.
    """
    if path.is_dir():
        return path
    if _old_name(path).is_dir():  # death struck between the two renames
        return _old_name(path)
    raise StorageError(f"there is no checkpoint at {path}")


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """The last file to be written; on the disk when this returns."""
    with open(directory / "manifest.json", "w") as file:
        json.dump({"checksum": _checksum(manifest), **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """What stands in the manifest.

    Raises:
        StorageError: if it is missing, damaged, or of another format or version.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except FileNotFoundError as e:
        raise StorageError(f"{path} is not a checkpoint: it has no manifest.json") from e
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}/manifest.json cannot be read: {e}") from e
    checksum = manifest.pop("checksum", None) if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StorageError(f"{path}/manifest.json is not that of a Gemini checkpoint")
    if manifest.get("version") != VERSION:
        raise StorageError(
            f"{path} has checkpoint version {manifest.get('version')}, this Gemini reads version {VERSION}: load it "
            "with the Gemini that wrote it, and carry the weights over with model.save_pretrained"
        )
    if checksum != _checksum(manifest):
        raise StorageError(f"{path}/manifest.json is damaged: it is not what was written. Use an older checkpoint")
    return manifest


def open_files(path: Path, manifest: dict[str, Any]) -> dict[str, TensorFile]:
    """The files of a checkpoint, their headers compared with the manifest.

    Raises:
        StorageError: if one is missing or its header is not what was written.
    """
    files = {name: TensorFile(path / name) for name in manifest["files"]}
    for name, entry in manifest["files"].items():
        if files[name].header_checksum != entry["header"]:
            raise StorageError(f"{path / name} is damaged: its header is not what was written. Use an older checkpoint")
    return files


def _old_name(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
