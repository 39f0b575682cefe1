"""Saving and loading for ``GeminiAccelerator``: accelerate's folder, with Gemini's checkpoint inside.

What accelerate knows (schedulers, RNGs, samplers, registered objects) it writes itself; masters, states and step
counts of managed models are a Gemini checkpoint in the same folder. An identifier written into both tells whether they
belong together.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from gemini.errors import GeminiError, StorageError
from gemini.replacing import find, place_of
from gemini.train.checkpoint.format import read_manifest
from gemini.train.checkpoint.saving import load_checkpoint, save_checkpoint
from gemini.train.ddp import GeminiDDP
from gemini.train.optimizers.optimizer import HybridOptimizer

_STATE_ID = "gemini.json"
Pairs = list[tuple[str, Any, HybridOptimizer]]
"""Folder, model and optimizer of each model that is trained here."""
Around = tuple[Callable[..., None], Callable[..., None]]


class SavingAccelerator(Accelerator):
    """The half of ``GeminiAccelerator`` that saves and loads."""

    _models: list[Any]
    _optimizers: list[Any]
    scaler: Any

    def save_model(self, model: nn.Module, save_directory: Any, max_shard_size: Any = "10GB", **kwargs: Any) -> None:
        """As accelerate's; a managed transformers model is streamed from its tiers, with its config. All ranks call."""
        if isinstance(model, GeminiDDP) and hasattr(model, "config"):
            model.save_pretrained(save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, **kwargs)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Everything a resumed run needs to be the same run, bit for bit. All ranks call, between steps.

        Managed models and their optimizers go into ``output_dir/gemini`` (``gemini_1``, ...), the rest where accelerate
        puts it. Hooks of ``register_save_state_pre_hook`` are given models and weights as by accelerate; those of
        managed models are whole in memory for them. A state whose saving was interrupted is refused by
        :meth:`load_state`; give each a folder of its own.
        """
        token = uuid.uuid4().hex
        pairs = self._managed_pairs()
        with self._without(pairs, self._save_model_state_pre_hook, _around_saving(pairs)):
            location = Path(super().save_state(output_dir, safe_serialization, **kwargs))
        if pairs and self.is_main_process:
            (location / _STATE_ID).write_text(json.dumps({"id": token}))
        for folder, model, optimizer in pairs:
            save_checkpoint(location / folder, model, optimizer, extra={"id": token})
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """What :meth:`save_state` saved; with automatic naming and no ``input_dir`` the newest that is whole.

        Hooks of ``register_load_state_pre_hook`` are given the managed models when these are loaded. What a hook then
        loads into one stays, and where it is the weights that were saved no bit of their masters changes.

        Raises:
            StorageError: if it was not saved by this class, its saving was interrupted, or it is damaged.
            PlanMismatch: if it was saved for another model, precision or other groups. In both cases nothing was
                changed (of several models: but those that were loaded before).
        """
        pairs = self._managed_pairs()
        if pairs:
            input_dir = self._newest_whole(pairs) if input_dir is None else Path(input_dir).expanduser()
            _check_state(Path(input_dir), pairs)
        for folder, model, optimizer in pairs:  # before the rest: what it refuses leaves all as it was
            load_checkpoint(Path(input_dir) / folder, model, optimizer)
        with self._without(pairs, self._load_model_state_pre_hook, _around_loading(pairs)):
            super().load_state(None if input_dir is None else str(input_dir), load_kwargs, **kwargs)

    def _managed_pairs(self) -> Pairs:
        """Folder, model and optimizer of each model that is trained here."""
        pairs: Pairs = []
        for model in self._models:
            engine = model.__dict__.get("_gemini_engine")
            own = [o.optimizer for o in self._optimizers if engine is not None and engine_in(o) is engine]
            if len(own) > 1:
                raise ValueError("save_state: the model has several optimizers; make one HybridAdam with groups")
            if own:
                pairs.append((f"gemini_{len(pairs)}" if pairs else "gemini", model, own[0]))
        return pairs

    @contextmanager
    def _without(self, pairs: Pairs, hooks: MutableMapping[Any, Any], around: Around) -> Iterator[None]:
        """accelerate does not see what is saved by Gemini. Where users have ``hooks``, these do, as they do with
        accelerate alone: the first and the last of ``around`` are called before and after them.
        """
        models, optimizers, own = self._models, self._optimizers, dict(hooks)
        self._optimizers = [o for o in optimizers if not any(o.optimizer is mine for _, _, mine in pairs)]
        if own and pairs:
            hooks.clear()
            hooks.update({"first": around[0], **own, "last": around[1]})
        else:
            self._models = [model for model in models if not _is_in(pairs, model)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            hooks.clear()
            hooks.update(own)

    def _newest_whole(self, pairs: Pairs) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state(): no input_dir, and automatic checkpoint naming is off")
        folder = Path(self.project_dir) / "checkpoints"
        for path in sorted(folder.glob("checkpoint_*"), key=lambda p: int(p.name.rpartition("_")[2]), reverse=True):
            try:
                _check_state(path, pairs)
            except StorageError:
                continue
            return path
        raise StorageError(f"there is no whole state in {folder}")


def _is_in(pairs: Pairs, model: Any) -> bool:
    return any(model is own for _, own, _ in pairs)


def _around_saving(pairs: Pairs) -> Around:
    """Hooks before saving are given the weights of managed models too, and may take them out to save them themselves;
    what they leave is not saved twice.
    """
    shown: list[tuple[int, Any, dict[str, Any]]] = []

    def first(models: list[Any], weights: list[Any], folder: str) -> None:
        states = enumerate(zip(models, weights, strict=True))
        shown.extend((index, state, dict(state)) for index, (model, state) in states if _is_in(pairs, model))
        shown.append((len(weights), None, {}))

    def last(models: list[Any], weights: list[Any], folder: str) -> None:
        number = shown.pop()[0]
        for index, state, before in shown:
            replaced = len(weights) == number and weights[index] is not state
            changed = state.keys() != before.keys() or any(state[name] is not value for name, value in before.items())
            if replaced or (changed and any(one is state for one in weights)):
                raise GeminiError(
                    "a hook of register_save_state_pre_hook has changed the weights of a managed model, which are "
                    "saved from its tiers as they are: let the hook save what it wants and take them out, "
                    "weights.pop()"
                )
        weights[:] = [one for one in weights if not any(one is state for _, state, _ in shown)]

    return first, last


def _around_loading(pairs: Pairs) -> Around:
    """Hooks before loading are given the managed models too, which have been loaded already."""

    def last(models: list[Any], folder: str) -> None:
        models[:] = [model for model in models if not _is_in(pairs, model)]

    return (lambda models, folder: None), last


def engine_in(optimizer: Any) -> Any:
    inner = optimizer.optimizer
    return inner.owner() if isinstance(inner, HybridOptimizer) else None


def _check_state(location: Path, pairs: Pairs) -> None:
    """Refuse a folder whose parts do not belong together, before anything is changed."""
    try:
        token = json.loads((location / _STATE_ID).read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{location} was not saved by GeminiAccelerator.save_state, or its saving was interrupted: give another "
            "folder, or load its weights alone (model.load_state_dict) and start anew"
        ) from e
    for folder, _, _ in pairs:
        path = find(place_of(location / folder))
        if read_manifest(path).extra != {"id": token}:
            raise StorageError(f"{location} was being overwritten when its saving was interrupted: give an older one")
