"""Checkpoints: everything that makes a resumed run the same run, bit for bit, under any budgets and number of ranks.

A checkpoint is a directory: ``manifest.json`` (what is there, step counts, optimizer groups, scheduler, loss scale,
RNGs, the caller's ``extra``) and safetensors files with masters and moments by param name, in both halves for bf16. It
knows nothing of chunks, tiers or ranks. It is written beside its final name and renamed when it is whole on the disk;
it is read completely, and its checksums compared, before the first byte of the model changes. No pickle.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.planning.planes import ADAM
from gemini.ranks.agreement import Point
from gemini.train.checkpoint import files
from gemini.train.checkpoint import ranks as checkpoint_ranks
from gemini.train.checkpoint import read as checkpoint_read
from gemini.train.checkpoint import write as checkpoint_write
from gemini.train.checkpoint.manifest import FORMAT, VERSION
from gemini.train.checkpoint.parts import sources_of
from gemini.train.checkpoint.plain_data import encode
from gemini.train.checkpoint.replacing import find, place_of
from gemini.train.checkpoint.rest import Rest, scheduler_kind
from gemini.train.checkpoint.saver import PendingCheckpoint, Saver
from gemini.train.checkpoint.states import groups_of, persistent_buffers, plain_states, rng_states
from gemini.train.engine import Engine
from gemini.train.modules.injected import refuse_injected
from gemini.train.sharding.consensus import agree, group_for
from gemini.train.update.optimizer import HybridOptimizer


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: HybridOptimizer,
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
        directory: its parent must exist. Taken as it is at the call: a relative path is made absolute, a symbolic link
            stays one and the data land where it points. The folder itself is renamed, so it cannot be the working
            folder or a mount point.
        model: a GeminiDDP model.
        optimizer: the HybridAdam of that model.
        scheduler: anything with ``state_dict()`` of plain values.
        extra: plain values and dense tensors of any dtype (the data position, for example), given back by
            :func:`load_checkpoint` on the CPU.
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
        TypeError: if scheduler, buffers or extra hold what is not plain; nothing was written.
    """
    engine = _engine(model)
    refusal: Exception | None = None
    try:
        final = place_of(directory)
        refuse_injected(engine, model, is_root=True)
        _check_optimizer(engine, optimizer)
        engine.drain()
        if engine.saver is not None:
            engine.saver.join()
            engine.saver.raise_if_unseen()
        files.check_target(final, directory)
        draft = _draft(engine, model, optimizer, scheduler, extra)
    except Exception as e:
        refusal = e
    agree(engine, Point.SAVE_CHECKPOINT, "save_checkpoint", refusal, directory=Path(directory).name)
    saver = Saver(engine, final, draft, group_for(engine))
    if wait:
        saver.run()
    else:
        saver.start()
    return PendingCheckpoint(saver)


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: HybridOptimizer, scheduler: Any = None
) -> Any:
    """Make ``model``, ``optimizer`` and ``scheduler`` what they were; returns ``extra``.

    Budgets, tiers and the number of ranks may be others than when it was saved. Rank r takes the RNG states of the
    saved rank r; ranks beyond the saved ones keep their own. With several ranks all of them call it. Ctrl-C while the
    model is overwritten takes effect when all of it is.

    Raises:
        StorageError: if it is missing, damaged, or holds what :func:`save_checkpoint` does not write; nothing was
            changed, on any rank.
        PlanMismatch: if it was saved for another model or precision, other groups or buffers, or another kind of
            scheduler; nothing was changed.
    """
    engine = _engine(model)
    refusal: Exception | None = None
    try:
        refuse_injected(engine, model, is_root=True)
        _check_optimizer(engine, optimizer)
        if engine.saver is not None:
            engine.saver.join()
        path = find(place_of(directory))
        manifest = files.read_manifest(path)
        opened = files.open_files(path, manifest)
        values = files.read_values(path, manifest, opened)
        with files.as_damage(path):
            rest = Rest(path, manifest, values, engine, model, optimizer, scheduler)
        engine.recover_if_interrupted()
        engine.updates.forget()
        engine.manager.settle()
    except Exception as e:
        refusal = e
    agree(engine, Point.LOAD_CHECKPOINT, "load_checkpoint", refusal, directory=Path(directory).name)

    everyone = None if engine.shards is None else engine.shards.ranks.everyone
    share = (0, 1) if everyone is None else (everyone.rank, everyone.size)
    reader = checkpoint_read.Reader(manifest, opened, share)
    with ExitStack() as writing:
        planner = checkpoint_read.Planner(engine, sources_of(engine), lambda: writing.enter_context(WHOLE))
        try:
            group = group_for(engine)
            checkpoint_ranks.load(planner, reader, group, f"loading the checkpoint {path}")
            rest.put_back(share[0])
        except BaseException as e:
            if planner.started:
                engine.mark_lost(e)
            raise
    return rest.extra


def _draft(
    engine: Engine, model: nn.Module, optimizer: HybridOptimizer, scheduler: Any, extra: Any
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
    tensors: list[torch.Tensor] = []
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "precision": engine.config.precision,
        "piece": engine.mover.tile,
        "params": {
            h.name: {"shape": list(h.param.shape), "step": h.num_steps, "trained": h.chunk.trained}
            for h in engine.handles
        },
        "groups": encode(groups_of(optimizer), tensors, "optimizer.param_groups"),
        "plain": encode(plain_states(optimizer), tensors, "optimizer.state"),
        "buffers": encode(dict(persistent_buffers(model)), tensors, "buffers"),
        "scheduler_kind": scheduler_kind(scheduler),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict(), tensors, "scheduler"),
        "loss_scale": None if engine.loss_scale is None else vars(engine.loss_scale).copy(),
        "extra": encode(extra, tensors, "extra"),
    }
    if engine.rule.spec != ADAM:
        manifest["rule"] = engine.rule.spec.to_body()
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
    if not isinstance(optimizer, HybridOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"checkpoints keep the states of gemini.HybridAdam and HybridOptimizer, got {kind}")
    if optimizer.engine() not in (engine, None):
        raise ValueError(
            "the optimizer does not own params of this model: pass the HybridAdam made from its parameters()"
        )
