"""Checkpoints: everything that makes a resumed run the same run, bit for bit, under any budgets and number of ranks.

A checkpoint is a directory: ``manifest.json`` (what is there, step counts, optimizer groups, scheduler, loss scale,
RNGs, the caller's ``extra``) and safetensors files with masters and states by param name, in both halves for bf16. It
knows nothing of chunks, tiers or ranks. It is written beside its final name and renamed when it is whole on the disk;
it is read completely, and its checksums compared, before the first byte of the model changes. No pickle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.memory.durable.folder import StoreFolder, is_store, reading
from gemini.planning.planes import ADAM
from gemini.ranks.agree import Attempt, Handshake, Point
from gemini.replacing import find, place_of
from gemini.train.checkpoint.durable import StoreHome, open_store
from gemini.train.checkpoint.format import (
    FORMAT,
    MANIFEST,
    VERSION,
    TensorFile,
    check_target,
    encode,
    open_files,
    read_manifest,
)
from gemini.train.checkpoint.read import Reader
from gemini.train.checkpoint.states import (
    ModelPart,
    NoScheduler,
    Rest,
    joined,
    part_of,
    plain_states,
    rng_states,
    scheduler_kind,
)
from gemini.train.checkpoint.write import (
    CheckpointHome,
    Draft,
    FolderHome,
    PendingCheckpoint,
    pending_in,
    sources_of,
    write_now,
)
from gemini.train.engine import Engine
from gemini.train.modules.changing import refuse_injected
from gemini.train.observers import ChangedChunks
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import ParamSet
from gemini.train.step import run_alone


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: HybridOptimizer,
    scheduler: Any = None,
    extra: Any = None,
    *,
    wait: bool = True,
) -> PendingCheckpoint:
    """Save everything that is needed to continue training: masters, optimizer states, step counts, scheduler, loss
    scale, random number generators, ``extra``, and what ``model.state_dict()`` has beside params: buffers, the extra
    state of modules (``get_extra_state``), and what they add to it themselves.

    An existing checkpoint is replaced only when the new one is complete. Call it between steps. With several ranks,
    call it on all of them with the same directory, on a file system that they share. Each rank writes its own part.
    Buffers, extra state, scheduler and ``extra`` are those of the first rank; random number generators are saved for
    each rank.

    Args:
        directory: where to save; its parent must exist. The folder itself is replaced, so it cannot be the working
            folder or a mount point. A symbolic link is kept, and the data go where it points. With
            ``MemoryBudget(durable=True)`` it may be the ``nvme_path``: then only what training has not written there
            yet is saved.
        model: a GeminiDDP model.
        optimizer: the HybridAdam or HybridOptimizer of that model.
        scheduler: any object with a ``state_dict()`` of plain values.
        extra: plain values and dense tensors, for example the position in the data. :func:`load_checkpoint` returns
            them, on the CPU.
        wait: False saves in the background while training continues. What is saved is the state at this call: an update
            waits until the data that it changes are written. The model is not copied. Buffers for states on NVMe or a
            GPU are reserved as "checkpoint"; if the cpu budget has no room for them, the checkpoint is written before
            the call returns, with a warning.

    Returns:
        A handle. Its ``wait()`` blocks until the checkpoint is complete, and raises the error if saving failed. If you
        do not call it, the next ``save_checkpoint`` raises that error. The next save or load, and the end of the
        program, wait until the checkpoint is complete.

    Raises:
        GeminiError: between backward and step, since gradients are not saved.
        StorageError: if writing fails; on all ranks, with the rank where it failed. An existing checkpoint is
            unchanged.
        TypeError: if the scheduler, ``model.state_dict()`` or ``extra`` contains something else than plain values and
            dense tensors, by name. Nothing was written.
    """
    given = NoScheduler() if scheduler is None else scheduler
    return run_alone(_engine(model).state, _save, directory, model, optimizer, given, extra, wait=wait)


def _save(
    directory: Any, model: nn.Module, optimizer: HybridOptimizer, scheduler: Any, extra: Any, *, wait: bool
) -> PendingCheckpoint:
    engine = _engine(model)
    make_draft, ranks = partial(_draft, engine, optimizer, scheduler, extra), engine.ranks
    with Attempt() as attempt:
        final = place_of(directory)
        refuse_injected(engine.state, model, is_root=True)
        _check_optimizer(optimizer, engine.params)
        store = engine.store.durable
        commits = store is not None and final == store.directory
        # A commit of the store in the background takes updates in flight as they come out.
        if wait or not commits:
            engine.drain()
        for before in pending_in(engine.write_observers):
            before.end(engine.write_observers)
        if not commits:
            check_target(final, directory)
        _refuse_unsaved(engine, scheduler)
        own = part_of(model, optimizer, engine.params, engine.by_names)
        draft = make_draft(own)
    ranks.refuse_one_folder("save_checkpoint", os.path.abspath(directory))
    engine.shards.agree_on_folder(Point.SAVE_CHECKPOINT, "save_checkpoint", directory, attempt.refusal)
    if engine.params.of_stages:
        draft = make_draft(joined(ranks.waiting.exchange(own, "saving a checkpoint"), engine.params.of_stages))
    if ranks.parts.rank:
        draft = draft._replace(rng=[])
    home = _home_of(engine, final, store if commits else None, draft)
    together = Handshake(ranks.waiting.group, f"saving the checkpoint {home.place}")
    pending = PendingCheckpoint(home.place)
    if wait:
        write_now(home, together, engine.store)
    else:
        pending.start(home, together, engine.store, engine.write_observers)
    return pending


def _refuse_unsaved(engine: Engine, scheduler: Any) -> None:
    """Refuse a model in whose state there is more than what is saved, or less, and a scheduler that tells no state."""
    # Before it is asked for gradients: those of a backward that broke off do not count.
    engine.recovery.forget_interrupted()
    engine.state.check_whole()
    engine.state.check_masters("save_checkpoint")
    if engine.backward.sink.has_gradients:
        raise GeminiError("save_checkpoint between backward and step: gradients are not saved; call it after step()")
    if not hasattr(scheduler, "state_dict"):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__}, which has no state_dict(): what else is to be kept goes into "
            "extra="
        )


def _home_of(engine: Engine, folder: Path, store: StoreFolder | None, draft: Draft) -> CheckpointHome:
    """Make the home of this rank's part, the params that no other rank writes: the store, if there is one."""
    ranks, tile = engine.ranks, engine.store.mover.tile
    copies = engine.params.copies(ranks.stages.rank)
    handles = [handle for handle in engine.params.handles if handle not in copies]
    # Of slices that all have the params that are not cut, the first one writes them.
    if ranks.experts.rank != 0 or (ranks.parts.size > 1 and ranks.same_batch.rank != 0):
        handles = [handle for handle in handles if handle.cut is not None]
    sources = sources_of(handles) if ranks.copies.rank == 0 else []
    if store is None:
        return FolderHome(folder, draft, sources, tile)
    changed = next(one for one in engine.write_observers if isinstance(one, ChangedChunks))
    in_flight = {index: job for index, job in engine.updates.pending.items() if not job.is_complete()}
    return StoreHome(store, draft, engine.store.chunks, sources, tile, pending=in_flight, changed=changed)


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: HybridOptimizer, scheduler: Any = None
) -> Any:
    """Load a checkpoint into ``model``, ``optimizer`` and ``scheduler``. Returns the ``extra`` that was saved.

    Budgets, placement and the number of ranks may differ from those when it was saved. With several ranks, call it on
    all of them. Rank r restores the random number generators of the saved rank r; further ranks keep their own. Ctrl-C
    during loading takes effect when the model is complete.

    What the state of the model had beside params is loaded by the model itself, with its ``load_state_dict`` and those
    of its modules. Gradients that the model has are dropped, for it had none when it was saved.

    A checkpoint with exact states can be loaded into a model with compact ones, and the other way round. The former
    warns that precision was lost.

    Raises:
        StorageError: if the checkpoint is missing, damaged, or not one. Nothing was changed, on any rank.
        PlanMismatch: if it is of another model, precision, update rule, kind of scheduler, has other param groups, or
            if the model does not take the buffers and extra state that were saved. Nothing was changed.
    """
    with ExitStack() as using:
        given = NoScheduler() if scheduler is None else scheduler
        return run_alone(_engine(model).state, _load, directory, model, optimizer, given, using)


def _load(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: HybridOptimizer, scheduler: Any, using: ExitStack
) -> Any:
    """Load a checkpoint. What is entered in ``using`` is held until the caller leaves it."""
    engine = _engine(model)
    opened: Mapping[str, TensorFile]
    with Attempt() as attempt:
        refuse_injected(engine.state, model, is_root=True)
        _check_optimizer(optimizer, engine.params)
        engine.state.check_masters("load_checkpoint")
        for pending in pending_in(engine.write_observers):
            pending.join()
        path = find(place_of(directory))
        if is_store(path) and not (path / MANIFEST).exists():
            using.enter_context(reading(path, engine.store.durable))
            _, manifest, opened, values = open_store(path)
        else:
            manifest = read_manifest(path)
            opened, values = open_files(path, manifest)
        rest = Rest(path, manifest, values, engine, model, optimizer, scheduler)
        engine.recovery.forget_interrupted()
        # An update that broke off is no matter any more: all it would have written is overwritten.
        engine.updates.forget()
        engine.store.manager.drain()
    engine.shards.agree_on_folder(Point.LOAD_CHECKPOINT, "load_checkpoint", directory, attempt.refusal)

    # Another group than those of training: one rank may wait long for the disk of another.
    ranks = Handshake(engine.ranks.waiting.group, f"loading the checkpoint {path}")
    rule = engine.stepping.rule.spec
    reader = Reader(manifest, opened, sources_of(engine.params.handles), engine.store.mover, rule)
    # Every checksum is compared by some rank, and all wait for that, before any of them changes anything.
    ranks.step(lambda: reader.check(ranks.rank, ranks.size), lambda _: None)
    with ExitStack() as writing:
        try:
            # Model and scheduler first, since they may refuse; masters and states next; what cannot fail comes last.
            rest.load_own(ranks, writing)
            ranks.step(lambda: reader.read(engine.write_observers), lambda _: None)
            engine.stepping.restored()
            rest.put_back()
        except BaseException as e:
            # Until then nothing has been overwritten, and the model goes on as it was.
            if reader.started:
                engine.state.mark_corrupted(e)
            raise
    reader.tell_loss(path)
    return rest.extra


def _draft(engine: Engine, optimizer: HybridOptimizer, scheduler: Any, extra: Any, part: ModelPart) -> Draft:
    """Note all but masters and states as it is now. Raises TypeError, as :func:`save_checkpoint` says."""
    tensors: list[torch.Tensor] = []
    rule = engine.stepping.rule.spec
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "precision": engine.config.precision,
        "piece": engine.store.mover.tile,
        "params": msgspec.to_builtins(part.params),
        "groups": encode(part.groups, tensors, "optimizer.param_groups"),
        "plain": encode(plain_states(optimizer), tensors, "optimizer.state"),
        "buffers": encode(part.buffers, tensors, "state_dict()"),
        "scheduler_kind": scheduler_kind(scheduler),
        "scheduler": encode(scheduler.state_dict(), tensors, "scheduler"),
        "extra": encode(extra, tensors, "extra"),
    }
    if rule.factors:
        manifest["factors"] = encode(part.factors, tensors, "factors")
    if rule != ADAM:
        manifest["rule"] = rule.to_body()
    if rule.exact is not None:
        manifest["exact"] = part.exact
    return Draft(manifest, tensors, [rng_states()])


def _engine(model: nn.Module) -> Engine:
    engine = getattr(model, "__dict__", {}).get("_gemini_engine")
    if not isinstance(engine, Engine):
        raise TypeError(
            f"checkpoints are of GeminiDDP models, not of a {type(model).__name__} (the folder comes first, then the "
            "model): wrap the model first, or use torch.save(model.state_dict())"
        )
    return engine


def _check_optimizer(optimizer: Any, params: ParamSet) -> None:
    """Refuse one that has not the params of this model."""
    if not isinstance(optimizer, HybridOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"checkpoints keep the states of gemini.HybridAdam and HybridOptimizer, got {kind}")
    owner = optimizer.owner()
    if owner is not None and owner.params is not params:
        raise ValueError(
            "the optimizer does not own params of this model: pass the HybridAdam made from its parameters()"
        )
