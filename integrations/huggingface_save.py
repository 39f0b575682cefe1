"""Checkpoints of a ``GeminiTrainer``: ``checkpoint-N`` is an ordinary Trainer checkpoint with ``gemini/`` in it.

Weights, config, tokenizer, scheduler, the scaler of fp16, RNGs and the Trainer's state are the Trainer's own files;
``gemini/`` takes the place of ``optimizer.pt`` (masters, states, step counts). All of it is written to
``.saving/checkpoint-N`` and renamed when it is whole, because transformers' ``get_last_checkpoint`` judges by name
alone.

Where states are durable (``MemoryBudget(durable=True)``) steps are commits of the store. A commit has all that a
checkpoint of the Trainer has beside the model: the Trainer's state, the schedule, the scaler of fp16, RNGs. To go on
from one, its small files are written to ``OUT/.durable/checkpoint-N``, with the name of the store in the place of
masters and states, and the Trainer is given that folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from gemini import replacing
from gemini.config import GeminiConfig
from gemini.memory.durable.folder import StoreFolder, has_commit, is_store, reading
from gemini.tiers import DRIVE
from gemini.train.checkpoint.durable import open_store
from gemini.train.checkpoint.format import decode
from gemini.train.checkpoint.saving import load_checkpoint, save_checkpoint
from gemini.train.checkpoint.states import rng_states, set_rng_states

STATES = "gemini"
TRAINER_STATE = "trainer_state.json"
_STAGING, _DURABLE = ".saving", ".durable"
_STORE = "store.json"
_SCHEDULER, _OPTIMIZER = "scheduler.pt", "optimizer.pt"


# ---- saving ------------------------------------------------------------------------------------------------------


def staging_in(run_dir: str) -> Path:
    """Where checkpoints of a run are while they are written."""
    return Path(run_dir) / _STAGING


def clean_up(run_dir: str, accelerator: Any, *, begins: bool = False) -> None:
    """Remove what saves that were killed have left, and let a checkpoint that was being replaced stand again. All ranks
    call. ``begins``: another one is going to be written.
    """
    if accelerator.is_main_process:
        shutil.rmtree(staging_in(run_dir), ignore_errors=True)
        replacing.clean_up(Path(run_dir), lambda name: name.startswith("checkpoint-"))
        if begins:
            staging_in(run_dir).mkdir(parents=True)
    accelerator.wait_for_everyone()


def save_states(trainer: Any, output_dir: str) -> None:
    """Masters, moments and step counts, and the scheduler in the Trainer's own form. All ranks call."""
    if trainer.args.enable_jit_checkpoint and any(h.has_grad for h in trainer.model._gemini_engine.params.handles):
        trainer.model.zero_grad()  # asked to stop between backward and step: the checkpoint is that of the last step
        if trainer._gemini_random is not None:
            set_rng_states(trainer._gemini_random)
    save_checkpoint(
        Path(output_dir) / STATES,
        trainer.model,
        trainer.optimizer.optimizer,
        extra={"global_step": trainer.state.global_step},
    )
    if trainer.args.should_save:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)


def publish(run_dir: str, trainer: Any) -> None:
    """Give the checkpoint that was just written its own name, then remove those above ``save_total_limit``."""
    trainer.accelerator.wait_for_everyone()
    name = f"checkpoint-{trainer.state.global_step}"
    work, final = staging_in(run_dir) / name, Path(run_dir) / name
    best = trainer.state.best_model_checkpoint
    if best is not None and Path(best).parent == staging_in(run_dir):
        trainer.state.best_model_checkpoint = str(final)
    if trainer.args.should_save:
        trainer.state.save_to_json(str(work / TRAINER_STATE))
        for path in work.iterdir():
            if path.is_file():
                replacing.sync(path)
        replacing.swap(work, final)
        shutil.rmtree(staging_in(run_dir), ignore_errors=True)
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(final))
        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )
    trainer.accelerator.wait_for_everyone()


# ---- loading -----------------------------------------------------------------------------------------------------


NEWEST = (True, "True", "true", "auto")
"""What asks for the newest checkpoint; "auto" starts anew where there is none."""


def newest(run_dir: str, store: Path | None, own: Any = None) -> str | None:
    """The checkpoint that a run goes on from: the last commit of its durable store, if that is further. One process
    calls. ``own``: the store that the model holds, if it is managed already.
    """
    whole = last_whole(run_dir)
    step = -1 if whole is None else int(Path(whole).name.removeprefix("checkpoint-"))
    if store is not None and has_commit(store):
        durable = committed(store, own)
        if durable is not None and durable.run == os.path.realpath(run_dir) and durable.step > step:
            return str(as_checkpoint(store, durable, run_dir))
    return whole


def last_whole(run_dir: str) -> str | None:
    """The newest checkpoint in ``run_dir`` that a run can go on from, or None."""
    if not Path(run_dir).is_dir():
        return None
    found = [path for path in Path(run_dir).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    whole = [path for path in found if _missing(path) is None]
    return str(max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")))) if whole else None


def _missing(path: Path) -> str | None:
    """What an exact resume needs and ``path`` has not."""
    if store_behind(path) is not None:
        return None if (path / TRAINER_STATE).is_file() else TRAINER_STATE
    if not (path / STATES / "manifest.json").is_file() and not (path / _OPTIMIZER).is_file():
        return f"{STATES}/ (masters and optimizer states)"
    return next((name for name in (_SCHEDULER, TRAINER_STATE) if not (path / name).is_file()), None)


def check_resumable(checkpoint: str) -> None:
    """Refuse a checkpoint the Trainer would take while silently starting the optimizer or the schedule anew."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(f"resume_from_checkpoint: there is no checkpoint at {checkpoint}")
    missing = _missing(path)
    if missing is not None:
        other = last_whole(str(path.parent))
        raise ValueError(
            f"{checkpoint} has no {missing}: its saving was interrupted, or save_only_model=True left them out. "
            + (f"Resume from {other}" if other else "No other checkpoint beside it is whole: start anew")
            + ", or start a new run from its weights with from_pretrained"
        )


def load_states(trainer: Any, checkpoint: str) -> None:
    """The counterpart of :func:`save_states`."""
    store = store_behind(checkpoint)
    if store is None:
        extra = load_checkpoint(Path(checkpoint) / STATES, trainer.model, trainer.optimizer.optimizer)
    else:
        extra = load_checkpoint(store, trainer.model, trainer.optimizer.optimizer, trainer.lr_scheduler)
        trainer._gemini_random = rng_states()
        scaler = trainer.accelerator.scaler
        if scaler is not None and extra.get("scaler"):  # a store of before has none
            scaler.load_state_dict(extra["scaler"])
    if extra["global_step"] != trainer.state.global_step:
        raise ValueError(
            f"{checkpoint} holds the states of step {extra['global_step']} and a trainer_state.json of step "
            f"{trainer.state.global_step}: its files were mixed up; resume from another checkpoint"
        )
    if store is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


class Committed(NamedTuple):
    """What the last commit of a store says of its run."""

    step: int
    run: str
    """The folder of the run."""
    files: dict[str, str]
    """Small files of a checkpoint, by name."""


def store_of(config: GeminiConfig | None) -> Path | None:
    """Where a run with this config has its store, if it has one."""
    return Path(config.memory.paths_of(DRIVE)[0]) if config is not None and config.memory.durable else None


# ---- commits of a durable store ----------------------------------------------------------------------------------


def commit(trainer: Any) -> None:
    """Make the step that has just ended durable, behind the training. All ranks call; nothing without a store."""
    store = trainer.model._gemini_engine.store.durable
    if store is None or trainer.state.global_step % trainer.durable_every:
        return
    trainer.store_flos()
    scaler = trainer.accelerator.scaler
    extra = {
        "global_step": trainer.state.global_step,
        "run": os.path.realpath(trainer.args.output_dir),
        "files": {TRAINER_STATE: state_text(trainer)},
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    optimizer, schedule = trainer.optimizer.optimizer, trainer.lr_scheduler
    save_checkpoint(store.directory, trainer.model, optimizer, schedule, extra, wait=False)


def state_text(trainer: Any) -> str:
    """``trainer_state.json`` as the Trainer would write it now."""
    states = dict(trainer.state.stateful_callbacks)
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            states[type(callback).__name__] = callback.state()
    shown = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
    return json.dumps({**shown, "stateful_callbacks": states}, sort_keys=True)


# ---- going on from a commit --------------------------------------------------------------------------------------


def committed_extra(directory: Path, own: StoreFolder | None = None) -> Any:
    """The ``extra`` of the last commit, which nobody is writing at; ``own``: the store of this process. Raises
    StorageError if there is none, it is damaged, or another run uses the store.
    """
    with reading(directory, own):
        stored = open_store(directory)
        return decode(stored.manifest.extra, stored.values)


def committed(store: Path, own: Any = None) -> Committed | None:
    """The last commit to a store; None if there is no store. One by another program has no run and no files."""
    if not is_store(store):
        return None
    extra = committed_extra(store, own)
    try:
        return Committed(int(extra["global_step"]), str(extra["run"]), dict(extra["files"]))
    except (TypeError, KeyError, ValueError):
        return Committed(-1, "", {})


def as_checkpoint(store: Path, found: Committed, run_dir: str | Path) -> Path:
    """A folder with which a Trainer goes on from a commit. One process calls."""
    if not found.files:
        raise ValueError(
            f"what is in the durable store {store} was not committed by a Trainer: gemini.load_checkpoint() reads it"
        )
    folder = Path(run_dir) / _DURABLE
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / f"checkpoint-{found.step}"
    states = checkpoint / "gemini"
    states.mkdir(parents=True)
    for name, text in found.files.items():
        (checkpoint / Path(name).name).write_text(text, encoding="utf-8")
    (states / _STORE).write_text(json.dumps({"store": os.path.realpath(store)}), encoding="utf-8")
    return checkpoint


def store_behind(checkpoint: str | Path) -> Path | None:
    """The store that a folder stands for; None for an ordinary checkpoint."""
    name = Path(checkpoint) / "gemini" / _STORE
    return Path(json.loads(name.read_text(encoding="utf-8"))["store"]) if name.is_file() else None
