"""A ``GeminiTrainer`` whose states are durable (``MemoryBudget(durable=True)``): its steps are commits of the store.

A commit has all that a checkpoint of the Trainer has beside the model: the Trainer's state, the schedule, the scaler of
fp16, RNGs. To go on from one, its small files are written to ``OUT/.durable/checkpoint-N``, with the name of the store
in the place of masters and states, and the Trainer is given that folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer_callback import ExportableState

from gemini.config import GeminiConfig
from gemini.memory.durable.folder import has_commit, is_store
from gemini.tiers import DRIVE
from gemini.train.checkpoint.durable import committed_extra
from gemini.train.checkpoint.saving import save_checkpoint

_FOLDER = ".durable"
_NAME = "store.json"
TRAINER_STATE = "trainer_state.json"


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


# ---- committing --------------------------------------------------------------------------------------------------


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


# ---- going on ----------------------------------------------------------------------------------------------------


def committed(store: Path) -> Committed | None:
    """The last commit to a store; None if there is no store. One by another program has no run and no files."""
    if not is_store(store):
        return None
    extra = committed_extra(store)
    try:
        return Committed(int(extra["global_step"]), str(extra["run"]), dict(extra["files"]))
    except (TypeError, KeyError, ValueError):
        return Committed(-1, "", {})


def of_run(store: Path | None, run_dir: str | Path) -> Committed | None:
    """The last commit in ``store``, if there is one and it is of the run whose folder is ``run_dir``."""
    found = None if store is None or not has_commit(store) else committed(store)
    return found if found is not None and found.run == os.path.realpath(run_dir) else None


def as_checkpoint(store: Path, found: Committed, run_dir: str | Path) -> Path:
    """A folder with which a Trainer goes on from a commit. One process calls."""
    if not found.files:
        raise ValueError(
            f"what is in the durable store {store} was not committed by a Trainer: gemini.load_checkpoint() reads it"
        )
    folder = Path(run_dir) / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / f"checkpoint-{found.step}"
    states = checkpoint / "gemini"
    states.mkdir(parents=True)
    for name, text in found.files.items():
        (checkpoint / Path(name).name).write_text(text, encoding="utf-8")
    (states / _NAME).write_text(json.dumps({"store": os.path.realpath(store)}), encoding="utf-8")
    return checkpoint


def store_behind(checkpoint: str | Path) -> Path | None:
    """The store that a folder stands for; None for an ordinary checkpoint."""
    name = Path(checkpoint) / "gemini" / _NAME
    return Path(json.loads(name.read_text(encoding="utf-8"))["store"]) if name.is_file() else None
