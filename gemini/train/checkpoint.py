"""Checkpoints: everything that makes a resumed run the same run, bit for bit, under any budgets and number of ranks.

A checkpoint is a directory: ``manifest.json`` (what is there, step counts, optimizer groups, scheduler, loss scale,
RNGs, the caller's ``extra``) and safetensors files with masters and moments by param name, in both halves for bf16. It
knows nothing of chunks, tiers or ranks. It is written beside its final name and renamed when it is whole on the disk;
it is read completely, and its checksums compared, before the first byte of the model changes. No pickle.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError, PlanMismatch, StorageError
from gemini.planning.planes import PlaneKind
from gemini.ranks.agreement import Point
from gemini.train import checkpoint_files as files
from gemini.train import checkpoint_ranks, checkpoint_read, checkpoint_write
from gemini.train.checkpoint_parts import SAVED, sources_of
from gemini.train.checkpoint_states import (
    groups_of,
    load_plain_states,
    persistent_buffers,
    plain_states,
    rng_states,
    set_rng_states,
)
from gemini.train.engine import Engine
from gemini.train.injected import refuse_injected
from gemini.train.optimizer import HybridAdam
from gemini.train.plain_data import decode, encode
from gemini.train.saver import PendingCheckpoint, Saver
from gemini.train.tensor_file import TensorFile
from gemini.train.together import agree, group_for


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: HybridAdam,
    scheduler: Any = None,
    extra: Any = None,
    *,
    wait: bool = True,
) -> PendingCheckpoint:
    """Write masters, moments, step counts, buffers, scheduler, loss scale, RNG states and ``extra`` to ``directory``.

    An existing checkpoint there is replaced only when the new one is complete. Call it between steps. With several
    ranks all of them call it with the same directory, which they must share; each writes what it keeps, RNG states are
    kept of every rank, and buffers, scheduler and ``extra`` are those of the first rank.

    Args:
        directory: its parent must exist.
        model: a GeminiDDP model.
        optimizer: the HybridAdam of that model.
        scheduler: anything with ``state_dict()`` of plain values.
        extra: plain values and tensors (the data position, for example), given back by :func:`load_checkpoint`.
        wait: False writes behind the training, which goes on: what is written is the state of this call, because an
            update waits until what it is about to change has been written. No copy of the model is made; the memory
            that states on NVMe or a GPU pass through is reserved as "checkpoint", and where the budget has no room for
            it the checkpoint is written at once, with a warning.

    Returns:
        A handle, whose ``wait()`` lets the checkpoint become whole, or raises what went wrong. A failure nobody has
        waited for is raised by the next ``save_checkpoint``. Another save or load waits for a pending one first, and so
        do the end of the model and of the program.

    Raises:
        GeminiError: between backward and step (gradients are not saved).
        StorageError: if it cannot be written, on every rank and naming the rank where it failed; an existing
            checkpoint is as it was.
        TypeError: if scheduler or extra hold values that are not plain.
    """
    engine, final = _engine(model), Path(directory)
    refusal: Exception | None = None
    try:
        refuse_injected(engine, model, is_root=True)
        _check_optimizer(engine, optimizer)
        engine.drain()
        if engine.saver is not None:
            engine.saver.join()
            engine.saver.raise_if_unseen()
        draft = _draft(engine, model, optimizer, scheduler, extra, final)
    except Exception as e:
        refusal = e
    agree(engine, Point.SAVE_CHECKPOINT, "save_checkpoint", refusal, directory=final.name)
    saver = Saver(engine, final, draft, group_for(engine))
    if wait:
        saver.run()
    else:
        saver.start()
    return PendingCheckpoint(saver)


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: HybridAdam, scheduler: Any = None
) -> Any:
    """Make ``model``, ``optimizer`` and ``scheduler`` what they were; returns ``extra``.

    Budgets, tiers and the number of ranks may be others than when it was saved. Rank r takes the RNG states of the
    saved rank r; ranks beyond the saved ones keep their own. With several ranks all of them call it.

    Raises:
        StorageError: if it is missing, damaged, or not a checkpoint; nothing was changed, on any rank.
        PlanMismatch: if it was saved for another model, precision or other groups; nothing was changed.
    """
    engine = _engine(model)
    refusal: Exception | None = None
    try:
        refuse_injected(engine, model, is_root=True)
        _check_optimizer(engine, optimizer)
        if engine.saver is not None:
            engine.saver.join()
        engine.recover_if_interrupted()
        engine.updates.forget()
        engine.manager.settle()
        path = files.find(Path(directory))
        manifest = files.read_manifest(path)
        opened = files.open_files(path, manifest)
        _check_model(engine, optimizer, manifest, opened, path)
        if (scheduler is None) != (manifest["scheduler"] is None):
            had = "with" if scheduler is None else "without"
            raise PlanMismatch(f"{path} was saved {had} a scheduler: pass the same arguments to load_checkpoint")
    except Exception as e:
        refusal = e
    agree(engine, Point.LOAD_CHECKPOINT, "load_checkpoint", refusal, directory=Path(directory).name)

    loading = _Loading(engine, model, path, manifest, opened)
    everyone = None if engine.shards is None else engine.shards.ranks.everyone
    share = (0, 1) if everyone is None else (everyone.rank, everyone.size)
    reader = checkpoint_read.Reader(path, manifest, opened, share, ready=loading.decode)
    planner = checkpoint_read.Planner(engine, sources_of(engine))
    try:
        group = group_for(engine)
        checkpoint_ranks.load(planner, reader, group, f"loading the checkpoint {path}")
    except BaseException as e:
        if planner.started:
            engine.mark_lost(e)
        raise
    loading.finish(optimizer, scheduler, share[0])
    return loading.extra


class _Loading:
    """What a checkpoint holds besides masters and moments: decoded before the first write, applied after the last, so
    that what cannot be decoded changes nothing.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, path: Path, manifest: dict[str, Any], opened: dict[str, TensorFile]
    ):
        self._engine, self._path, self._manifest = engine, path, manifest
        self._values = opened[files.VALUES]
        self._buffers = dict(persistent_buffers(model))

    def decode(self) -> None:
        """Called when the values are known not to be damaged."""
        manifest = self._manifest
        tensors = [self._values.whole(str(i)) for i in range(len(self._values.specs))]
        self._groups, self._plain = decode(manifest["groups"], tensors), decode(manifest["plain"], tensors)
        self._rng, self.extra = decode(manifest["rng"], tensors), decode(manifest["extra"], tensors)
        self._scheduler = decode(manifest["scheduler"], tensors)
        self._saved_buffers = decode(manifest["buffers"], tensors)
        saved = {name: tuple(value.shape) for name, value in self._saved_buffers.items()}
        if saved != {name: tuple(value.shape) for name, value in self._buffers.items()}:
            raise PlanMismatch(f"{self._path} was saved for a model with other buffers")

    def finish(self, optimizer: HybridAdam, scheduler: Any, rank: int) -> None:
        """Masters and moments are there: the rest."""
        engine = self._engine
        for handle in engine.handles:
            handle.num_steps = self._manifest["params"][handle.name]["step"]
        engine.discard_grads()
        engine.lost = engine.lost_because = None
        engine.updated_in_backward = False
        engine.manager.drop(engine.chunks)
        for name, value in self._saved_buffers.items():
            self._buffers[name].copy_(value)
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        load_plain_states(optimizer, self._plain)
        if scheduler is not None:
            scheduler.load_state_dict(self._scheduler)
        if engine.loss_scale is not None:
            vars(engine.loss_scale).update(self._manifest["loss_scale"])
        if rank < len(self._rng):
            set_rng_states(self._rng[rank])


def _draft(
    engine: Engine, model: nn.Module, optimizer: HybridAdam, scheduler: Any, extra: Any, final: Path
) -> checkpoint_write.Draft:
    """Everything but masters and moments as it is now.

    Raises:
        GeminiError, StorageError, TypeError: what :func:`save_checkpoint` says.
    """
    engine.recover_if_interrupted()
    engine.check_whole()
    unreduced = engine.reduction is not None and engine.reduction.has_unreduced
    if unreduced or any(handle.has_grad for handle in engine.handles):
        raise GeminiError("save_checkpoint between backward and step: gradients are not saved; call it after step()")
    files.check_target(final)
    tensors: list[torch.Tensor] = []
    manifest = {
        "format": files.FORMAT,
        "version": files.VERSION,
        "precision": engine.config.precision,
        "piece": engine.mover.tile,
        "params": {
            h.name: {"shape": list(h.param.shape), "step": h.num_steps, "trained": PlaneKind.EXP_AVG in h.chunk.planes}
            for h in engine.handles
        },
        "groups": encode(groups_of(optimizer), tensors, "optimizer.param_groups"),
        "plain": encode(plain_states(optimizer), tensors, "optimizer.state"),
        "buffers": encode(dict(persistent_buffers(model)), tensors, "buffers"),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict(), tensors, "scheduler"),
        "loss_scale": None if engine.loss_scale is None else vars(engine.loss_scale).copy(),
        "extra": encode(extra, tensors, "extra"),
    }
    return checkpoint_write.Draft(manifest, tensors, rng_states())


def _engine(model: nn.Module) -> Engine:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the folder comes first, then the model: save_checkpoint(directory, model, optimizer, ...), and so for "
            f"load_checkpoint. Got {type(model).__name__} for the model"
        )
    engine = model.__dict__.get("_gemini_engine")
    if not isinstance(engine, Engine):
        raise TypeError(
            "checkpoints are of GeminiDDP models: wrap the model first, or use torch.save(model.state_dict())"
        )
    return engine


def _check_optimizer(engine: Engine, optimizer: Any) -> None:
    if not isinstance(optimizer, HybridAdam):
        raise TypeError(f"checkpoints keep the states of gemini.HybridAdam, got {type(optimizer).__name__}")
    if optimizer.engine() not in (engine, None):
        raise ValueError(
            "the optimizer does not own params of this model: pass the HybridAdam made from its parameters()"
        )


def _check_model(
    engine: Engine, optimizer: HybridAdam, manifest: dict[str, Any], opened: dict[str, TensorFile], path: Path
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
    present = {entry["of"] for listed in manifest["files"].values() for entry in listed["tensors"].values()}
    for handle in engine.handles:
        trained = manifest["params"][handle.name]["trained"]
        if trained and PlaneKind.EXP_AVG not in handle.chunk.planes:
            raise PlanMismatch(f"{handle.name!r} was trained when {path} was saved and is frozen here")
        for kind in SAVED if trained else (PlaneKind.WEIGHTS,):
            if kind in handle.chunk.planes and f"{kind.value}/{handle.name}" not in present:
                raise StorageError(f"{path} is damaged: {kind.value} of {handle.name!r} is missing")
    groups = [group["params"] for group in manifest["groups"]]
    here_groups = [group["params"] for group in groups_of(optimizer)]
    if groups != here_groups:
        raise PlanMismatch(
            f"{path} was saved with param groups of {[len(g) for g in groups]} params, the optimizer has "
            f"{[len(g) for g in here_groups]} (or others in them): make the groups as they were"
        )
