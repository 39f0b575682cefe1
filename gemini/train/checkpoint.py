"""Checkpoints: everything that makes a resumed run the same run, bit for bit, under any budgets.

A checkpoint is a directory: ``manifest.json`` (what is there, step counts, optimizer groups, scheduler, loss scale,
RNGs, the caller's ``extra``) and safetensors files with masters and moments by param name, in both halves for bf16. It
knows nothing of chunks or tiers. It is written beside its final name and renamed when it is whole on the disk; it is
read completely, and its checksums compared, before the first byte of the model changes. No pickle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError, PlanMismatch, StorageError
from gemini.plan.planes import OPTIMIZER_PLANES, PlaneKind
from gemini.train.engine import Engine
from gemini.train.guard import ParamHandle, handle_of
from gemini.train.optimizer import HybridAdam
from gemini.train.plain_data import decode, encode
from gemini.train.tensor_file import TensorFile, TensorSpec, write_tensor_file

FORMAT, VERSION = "gemini-checkpoint", 1
_SAVED = (PlaneKind.WEIGHTS, *OPTIMIZER_PLANES)
_FILE_BYTES = 2 * 2**30


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: HybridAdam,
    scheduler: Any = None,
    extra: Any = None,
) -> None:
    """Write masters, moments, step counts, buffers, scheduler, loss scale, RNG states and ``extra`` to ``directory``.

    An existing checkpoint there is replaced only when the new one is complete. Call it between steps.

    Args:
        directory: its parent must exist.
        model: a GeminiDDP model.
        optimizer: the HybridAdam of that model.
        scheduler: anything with ``state_dict()`` of plain values.
        extra: plain values and tensors (the data position, for example), given back by :func:`load_checkpoint`.

    Raises:
        GeminiError: between backward and step (gradients are not saved).
        StorageError: if it cannot be written; an existing checkpoint is as it was.
        TypeError: if scheduler or extra hold values that are not plain.
    """
    engine = _engine(model, optimizer)
    engine.recover_if_interrupted()
    engine.check_whole()
    if any(handle.has_grad for handle in engine.handles):
        raise GeminiError("save_checkpoint between backward and step: gradients are not saved; call it after step()")
    final = Path(directory)
    if final.exists() and not (final.is_dir() and (not any(final.iterdir()) or (final / "manifest.json").exists())):
        raise StorageError(
            f"{final} exists and is not a checkpoint: it will not be overwritten; give another directory"
        )
    if not final.parent.is_dir():
        raise StorageError(f"cannot save a checkpoint in {final.parent}: no such directory")
    tensors: list[torch.Tensor] = []
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "precision": engine.config.precision,
        "params": {
            h.name: {"shape": list(h.param.shape), "step": h.num_steps, "trained": PlaneKind.EXP_AVG in h.chunk.planes}
            for h in engine.handles
        },
        "groups": encode(_groups(optimizer), tensors, "optimizer.param_groups"),
        "plain": encode(_plain_states(optimizer), tensors, "optimizer.state"),
        "buffers": encode(dict(_persistent_buffers(model)), tensors, "buffers"),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict(), tensors, "scheduler"),
        "loss_scale": None if engine.loss_scale is None else vars(engine.loss_scale).copy(),
        "rng": encode(_rng_states(), tensors, "rng"),
        "extra": encode(extra, tensors, "extra"),
    }
    work = final.parent / f".{final.name}.new-{os.getpid()}"
    _remove_leftovers(final)
    try:
        work.mkdir()
        manifest["files"] = _write_params(engine, work)
        specs = [TensorSpec(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
        sums = write_tensor_file(work / "values.safetensors", specs, lambda name: iter([tensors[int(name)].view(-1)]))
        manifest["files"]["values.safetensors"] = sums
        with open(work / "manifest.json", "w") as file:
            json.dump({"checksum": _checksum(manifest), **manifest}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _swap(work, final)
    except OSError as e:
        raise StorageError(f"could not save the checkpoint {final}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: HybridAdam, scheduler: Any = None
) -> Any:
    """Make ``model``, ``optimizer`` and ``scheduler`` what they were; returns ``extra``. Budgets may be others.

    Raises:
        StorageError: if it is missing, damaged, or not a checkpoint; nothing was changed.
        PlanMismatch: if it was saved for another model, precision or other groups; nothing was changed.
    """
    engine = _engine(model, optimizer)
    engine.recover_if_interrupted()
    path = _find(Path(directory))
    manifest = _read_manifest(path)
    files = {name: TensorFile(path / name) for name in manifest["files"]}
    _check_model(engine, optimizer, manifest, files, path)
    if (scheduler is None) != (manifest["scheduler"] is None):
        had = "with" if scheduler is None else "without"
        raise PlanMismatch(f"{path} was saved {had} a scheduler: pass the same arguments to load_checkpoint")
    for name, sums in manifest["files"].items():
        for tensor, checksum in sums.items():
            if tensor not in files[name].specs or files[name].checksum(tensor) != checksum:
                raise StorageError(
                    f"{path / name} is damaged: {tensor!r} is not what was written. Use an older checkpoint"
                )

    # Everything is decoded before the first write, so that what cannot be decoded changes nothing.
    values = files["values.safetensors"]
    tensors = [values.whole(str(i)) for i in range(len(values.specs))]
    groups, plain = decode(manifest["groups"], tensors), decode(manifest["plain"], tensors)
    rng, extra = decode(manifest["rng"], tensors), decode(manifest["extra"], tensors)
    saved_buffers, buffers = decode(manifest["buffers"], tensors), dict(_persistent_buffers(model))
    if {n: tuple(b.shape) for n, b in saved_buffers.items()} != {n: tuple(b.shape) for n, b in buffers.items()}:
        raise PlanMismatch(f"{path} was saved for a model with other buffers")
    where = {tensor: file for name, file in files.items() if name != "values.safetensors" for tensor in file.specs}
    for handle in engine.handles:
        for kind in _SAVED:
            key = f"{kind.value}/{handle.name}"
            if key in where and kind in handle.chunk.planes:
                engine.by_names.write_parts(handle, kind, where[key].read(key))
        handle.num_steps = manifest["params"][handle.name]["step"]
    engine.discard_grads()
    engine.lost = None
    engine.manager.drop(engine.chunks)
    for name, value in saved_buffers.items():
        buffers[name].copy_(value)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    _load_plain_states(optimizer, plain)
    if scheduler is not None:
        scheduler.load_state_dict(decode(manifest["scheduler"], tensors))
    if engine.loss_scale is not None:
        vars(engine.loss_scale).update(manifest["loss_scale"])
    _set_rng_states(rng)
    return extra


def _engine(model: nn.Module, optimizer: Any) -> Engine:
    engine = model.__dict__.get("_gemini_engine")
    if not isinstance(engine, Engine):
        raise TypeError(
            "checkpoints are of GeminiDDP models: wrap the model first, or use torch.save(model.state_dict())"
        )
    if not isinstance(optimizer, HybridAdam):
        raise TypeError(f"checkpoints keep the states of gemini.HybridAdam, got {type(optimizer).__name__}")
    if optimizer.engine() not in (engine, None):
        raise ValueError(
            "the optimizer does not own params of this model: pass the HybridAdam made from its parameters()"
        )
    return engine


def _write_params(engine: Engine, work: Path) -> dict[str, dict[str, int]]:
    """Masters and moments in files of about ``_FILE_BYTES``, streamed: the checksums by file and tensor."""
    files: list[list[tuple[TensorSpec, ParamHandle, PlaneKind]]] = [[]]
    filled = 0
    for handle in engine.handles:
        for kind in _SAVED:
            plane = handle.chunk.planes.get(kind)
            if plane is None:
                continue
            spec = TensorSpec(f"{kind.value}/{handle.name}", plane.dtype, tuple(handle.param.shape))
            if filled and filled + spec.num_bytes > _FILE_BYTES:
                files.append([])
                filled = 0
            files[-1].append((spec, handle, kind))
            filled += spec.num_bytes
    sums: dict[str, dict[str, int]] = {}
    for i, entries in enumerate(files):
        by_key = {spec.name: (handle, kind) for spec, handle, kind in entries}

        def content(name: str, by_key: dict[str, tuple[ParamHandle, PlaneKind]] = by_key) -> Iterator[torch.Tensor]:
            return engine.by_names.read_parts(*by_key[name])

        name = f"params-{i:05d}.safetensors"
        sums[name] = write_tensor_file(work / name, [spec for spec, _, _ in entries], content)
    return sums


def _swap(work: Path, final: Path) -> None:
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


def _remove_leftovers(final: Path) -> None:
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
        if not alive:
            shutil.rmtree(leftover, ignore_errors=True)


def _old_name(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _find(path: Path) -> Path:
    if path.is_dir():
        return path
    if _old_name(path).is_dir():  # death struck between the two renames
        return _old_name(path)
    raise StorageError(f"there is no checkpoint at {path}")


def _read_manifest(path: Path) -> dict[str, Any]:
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
            f"{path} has checkpoint version {manifest.get('version')}, this Gemini reads version {VERSION}"
        )
    if checksum != _checksum(manifest):
        raise StorageError(f"{path}/manifest.json is damaged: it is not what was written. Use an older checkpoint")
    return manifest


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def _check_model(
    engine: Engine, optimizer: HybridAdam, manifest: dict[str, Any], files: dict[str, TensorFile], path: Path
) -> None:
    if manifest["precision"] != engine.config.precision:
        raise PlanMismatch(
            f"{path} was saved in {manifest['precision']}, the model is in {engine.config.precision}: wrap it with "
            f"GeminiConfig(precision={manifest['precision']!r})"
        )
    saved = {name: tuple(entry["shape"]) for name, entry in manifest["params"].items()}
    here = {handle.name: tuple(handle.param.shape) for handle in engine.handles}
    if saved != here:
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        raise PlanMismatch(
            f"{path} was saved for another model: {len(different)} params differ, the first is {different[0]!r} "
            f"(saved {saved.get(different[0])}, here {here.get(different[0])})"
        )
    present = {tensor for file in files.values() for tensor in file.specs}
    for handle in engine.handles:
        trained = manifest["params"][handle.name]["trained"]
        if trained and PlaneKind.EXP_AVG not in handle.chunk.planes:
            raise PlanMismatch(f"{handle.name!r} was trained when {path} was saved and is frozen here")
        if f"{PlaneKind.WEIGHTS.value}/{handle.name}" not in present:
            raise StorageError(f"{path} is damaged: the weights of {handle.name!r} are missing")
    groups = [group["params"] for group in manifest["groups"]]
    here_groups = [group["params"] for group in _groups(optimizer)]
    if groups != here_groups:
        raise PlanMismatch(
            f"{path} was saved with param groups of {[len(g) for g in groups]} params, the optimizer has "
            f"{[len(g) for g in here_groups]} (or others in them): make the groups as they were"
        )


def _groups(optimizer: HybridAdam) -> list[dict[str, Any]]:
    """The groups with params by name; params that are not managed by their number."""
    groups, index = [], 0
    for group in optimizer.param_groups:
        names = []
        for param in group["params"]:
            handle = handle_of(param)
            names.append(handle.name if handle is not None else f"#{index}")
            index += 1
        groups.append({**group, "params": names})
    return groups


def _plain_states(optimizer: HybridAdam) -> dict[str, Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"#{i}": {"param": p.detach(), "state": dict(optimizer.state[p])}
        for i, p in enumerate(params)
        if handle_of(p) is None
    }


def _load_plain_states(optimizer: HybridAdam, states: dict[str, Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        for key, saved in states.items():
            param = params[int(key[1:])]
            param.copy_(saved["param"])
            optimizer.state[param] = saved["state"]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _rng_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return states


def _set_rng_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
