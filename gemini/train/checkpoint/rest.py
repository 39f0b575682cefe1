"""What a checkpoint holds besides masters and moments: compared with what it is for before the first write, put back
after the last one.

Everything that could be refused is refused in the making of a :class:`Rest`, which changes nothing; ``put_back`` has
nothing left to object to. A scheduler, whose class may be anybody's, is given the saved state for a moment to see
whether it takes it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import PlanMismatch
from gemini.train.checkpoint.manifest import Manifest
from gemini.train.checkpoint.plain_data import Decoder, plain_form
from gemini.train.checkpoint.states import (
    check_alike,
    check_groups,
    check_plain_states,
    check_rng,
    check_writable,
    groups_of,
    load_plain_states,
    persistent_buffers,
    set_rng_states,
)
from gemini.train.checkpoint.tensor_file import Malformed
from gemini.train.engine import Engine
from gemini.train.update.optimizer import HybridOptimizer

_COUNTERS = ("last_epoch", "_step_count")


class Rest:
    """Made of a manifest and the values in its file, which are not damaged.

    Raises:
        PlanMismatch: if the checkpoint was saved for another model, optimizer or scheduler.
        Malformed: naming the place, if it holds what no checkpoint does.
    """

    def __init__(
        self, path: Path, manifest: Manifest, values: list[torch.Tensor], engine: Engine, model: nn.Module,
        optimizer: HybridOptimizer, scheduler: Any,
    ):  # fmt: skip
        self._engine, self._optimizer, self._scheduler = engine, optimizer, scheduler
        self._manifest = manifest
        _compare_params(path, engine, manifest)
        decoder = Decoder(values)
        groups, plain = decoder.decode(manifest.groups, "groups"), decoder.decode(manifest.plain, "plain")
        saved_buffers = decoder.decode(manifest.buffers, "buffers")
        self._state = decoder.decode(manifest.scheduler, "scheduler")
        self._rng, self.extra = decoder.decode(manifest.rng, "rng"), decoder.decode(manifest.extra, "extra")
        decoder.end()
        self._groups = check_groups(path, groups, groups_of(optimizer), optimizer)
        self._plain = check_plain_states(path, optimizer, plain)
        self._buffers = _paired_buffers(path, dict(persistent_buffers(model)), saved_buffers)
        _compare_loss_scale(engine, manifest)
        if not isinstance(self._rng, list) or not self._rng:
            raise Malformed("rng is not a list of random states")
        for rank, states in enumerate(self._rng):
            check_rng(states, f"rng[{rank}]")
        if (scheduler is None) != (self._state is None):
            had = "with" if scheduler is None else "without"
            raise PlanMismatch(f"{path} was saved {had} a scheduler: pass the same arguments to load_checkpoint")
        if scheduler is not None:
            _compare_scheduler(path, scheduler, self._state, manifest.scheduler_kind)
            with _as_it_was(scheduler, optimizer):
                try:
                    scheduler.load_state_dict(copy.deepcopy(self._state))
                except Exception as e:
                    raise _other_scheduler(path, scheduler, f"{type(e).__name__}: {e}") from e

    def put_back(self, rank: int) -> None:
        """Masters and moments are there: the rest, with the random states of a rank if they were saved."""
        engine, optimizer = self._engine, self._optimizer
        for handle in engine.handles:
            handle.num_steps = self._manifest.params[handle.name].step
        engine.discard_grads()
        engine.lost = engine.lost_because = None
        engine.updated_in_backward = False
        engine.manager.drop(engine.chunks)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        load_plain_states(optimizer, self._plain)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._state)
        if engine.loss_scale is not None and self._manifest.loss_scale is not None:
            vars(engine.loss_scale).update(self._manifest.loss_scale)
        if rank < len(self._rng):
            set_rng_states(self._rng[rank])


def _compare_params(path: Path, engine: Engine, manifest: Manifest) -> None:
    if manifest.precision != engine.config.precision:
        raise PlanMismatch(
            f"{path} was saved in {manifest.precision}, the model is in {engine.config.precision}: wrap it with "
            f"GeminiConfig(precision={manifest.precision!r})"
        )
    if manifest.rule != engine.rule.spec:
        raise PlanMismatch(
            f"{path} was saved with states of the update rule {manifest.rule.name!r}, the model was wrapped for "
            f"{engine.rule.spec.name!r}: wrap it with GeminiConfig(optimizer=) of the same rule"
        )
    saved = {name: param.shape for name, param in manifest.params.items()}
    here = {handle.name: tuple(handle.param.shape) for handle in engine.handles}
    if saved != here:
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        raise PlanMismatch(
            f"{path} was saved for another model: {len(different)} params differ, the first is {different[0]!r} "
            f"(saved {saved.get(different[0])}, here {here.get(different[0])})"
        )
    for handle in engine.handles:
        was, now = manifest.params[handle.name].trained, handle.chunk.trained
        if was and not now:
            raise PlanMismatch(f"{handle.name!r} was trained when {path} was saved and is frozen here")
        if now and not was and manifest.precision == "fp16":
            raise PlanMismatch(
                f"{handle.name!r} was frozen when {path} was saved, which has no fp32 master of it as fp16 training "
                "needs one: freeze it here too, or load its weights with load_state_dict"
            )


def _paired_buffers(path: Path, here: dict[str, torch.Tensor], saved: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not isinstance(saved, dict) or not all(isinstance(value, torch.Tensor) for value in saved.values()):
        raise Malformed("buffers are not tensors by name")
    of = [{name: (tuple(b.shape), b.dtype) for name, b in buffers.items()} for buffers in (saved, here)]
    if of[0] != of[1]:
        different = sorted(name for name in of[0].keys() | of[1].keys() if of[0].get(name) != of[1].get(name))
        raise PlanMismatch(
            f"{path} was saved for a model with other buffers: {len(different)} differ, the first is {different[0]!r} "
            f"(saved {of[0].get(different[0])}, here {of[1].get(different[0])})"
        )
    for name, buffer in here.items():
        check_writable(buffer, saved[name], f"buffer {name!r}")
    return [(buffer, saved[name]) for name, buffer in here.items()]


def _compare_loss_scale(engine: Engine, manifest: Manifest) -> None:
    if engine.loss_scale is None or manifest.loss_scale is None:
        return
    here, saved = vars(engine.loss_scale), manifest.loss_scale
    kinds = [{key: type(value) for key, value in values.items()} for values in (here, saved)]
    if kinds[0] != kinds[1] or any(type(value) is float and not value for value in saved.values()):
        raise Malformed(f"loss_scale is {saved}, which is no loss scale")


# ---- schedulers ------------------------------------------------------------------------------------------------------


def scheduler_kind(scheduler: Any) -> str | None:
    """What tells schedulers whose states look alike."""
    return None if scheduler is None else type(scheduler).__qualname__


def _other_scheduler(path: Path, scheduler: Any, why: str) -> PlanMismatch:
    return PlanMismatch(
        f"{path} was saved with another scheduler than this {type(scheduler).__name__} ({why}): make the same one, "
        "with the same arguments"
    )


def _compare_scheduler(path: Path, scheduler: Any, saved: Any, kind: str | None) -> None:
    """Raise if ``saved`` is not a state of such a scheduler. Those within it are looked at each for itself."""
    if kind is not None and kind != scheduler_kind(scheduler):
        raise _other_scheduler(path, scheduler, f"it was a {kind}")
    here, strict = plain_form(scheduler.state_dict()), type(scheduler).__module__.startswith("torch.")
    if isinstance(here, dict) and isinstance(saved, dict):
        # Schedulers of torch have what they have from the beginning; others may come to have more as they go, but no
        # method, and nothing that they have without showing it.
        hidden = getattr(scheduler, "__dict__", ())
        strange = [
            key for key in saved.keys() - here.keys()
            if kind is None or strict or key in hidden or callable(getattr(scheduler, str(key), None))
        ]  # fmt: skip
        if strange:
            raise _other_scheduler(path, scheduler, f"which has no {min(strange, key=str)!r}")
        for name in _COUNTERS:
            if name in here and not (type(saved.get(name)) is int and -1 <= saved[name] < 2**53):
                raise _other_scheduler(path, scheduler, f"its {name} is {str(saved.get(name))[:80]}")
    inner, states = getattr(scheduler, "_schedulers", None), isinstance(saved, dict) and saved.get("_schedulers")
    if isinstance(inner, (list, tuple)) and isinstance(states, (list, tuple)) and len(inner) == len(states):
        for one, state in zip(inner, states, strict=True):
            _compare_scheduler(path, one, state, None)
    if isinstance(here, dict) and isinstance(saved, dict):
        # A function has no state (None), a partial one an empty one: which of them a schedule is made of may change.
        here, saved = ({**of, "lr_lambdas": _without_empty(of.get("lr_lambdas"))} for of in (here, saved))
    try:
        check_alike(here, saved, "its state", finite=strict, settled=strict)
    except Malformed as e:
        raise _other_scheduler(path, scheduler, str(e)) from e


def _without_empty(states: Any) -> Any:
    return [state or None for state in states] if isinstance(states, (list, tuple)) else states


@contextlib.contextmanager
def _as_it_was(scheduler: Any, optimizer: HybridOptimizer) -> Iterator[None]:
    """Whatever is done to a scheduler inside is undone."""
    state = copy.deepcopy(scheduler.state_dict())
    parts = [scheduler, *(getattr(scheduler, "_schedulers", None) or ()), *getattr(scheduler, "lr_lambdas", ())]
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    attributes += [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            scheduler.load_state_dict(state)
        for now, before in attributes:
            now.clear()
            now.update(before)
