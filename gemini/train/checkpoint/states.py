"""What a checkpoint keeps besides masters and states: optimizer groups, plain params, buffers and extra state, RNG
states, schedulers.

A :class:`ModelPart` is what one stage of a model, or all of them together, has of it, and of params. A :class:`Rest` is
what was saved of it: it refuses what is of another model, optimizer or scheduler, and puts the rest back.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from gemini.errors import PlanMismatch, RankMismatch, warn
from gemini.interrupts import WHOLE
from gemini.planning.planes import RuleSpec
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.format import Manifest, SavedParam, decode
from gemini.train.checkpoint.read import check_rule
from gemini.train.engine import Engine
from gemini.train.modules.codes import scales_in
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.optimizers.states import BEFORE, check_decay, complete_master, loaded_group
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamSet, StageParam, handle_of, params_of, plain_params_of
from gemini.train.params.state_dict import beside_params, load_beside_params, undone_on_error


def groups_of(optimizer: HybridOptimizer) -> list[dict[str, Any]]:
    """The groups with params by name; params that are not managed by their number."""
    # A number counts all params of the optimizer, managed ones too, in the order of its groups.
    handles = map(handle_of, params_of(optimizer))
    names = iter([f"#{index}" if handle is None else handle.whole_name for index, handle in enumerate(handles)])
    return [{**group, "params": list(islice(names, len(group["params"])))} for group in optimizer.param_groups]


def plain_states(optimizer: HybridOptimizer) -> dict[str, Any]:
    """Params of the optimizer that are not managed, with their states, by number."""
    found = {}
    for number, param in plain_params_of(optimizer):
        state = dict(optimizer.state[param])
        if BEFORE in state:
            complete_master(param, state)  # of these weights, which are in the checkpoint too
        found[f"#{number}"] = {"param": param.detach(), "state": state}
    return found


def rng_states(*, of_gpus: bool = True) -> dict[str, Any]:
    """The random states of this process: Python's, torch's, NumPy's."""
    # A tensor in place of 625 numbers: it goes to the file of values.
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, torch.tensor(internal, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
    }
    if of_gpus and torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    of_numpy: Any = numpy.random.get_state()
    name, keys, *rest = of_numpy
    states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what :func:`rng_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    # With another number of GPUs it is unclear whose state is whose.
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:  # of a process that had loaded it
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


@contextlib.contextmanager
def generators_kept(*, of_gpus: bool = False) -> Iterator[None]:
    """Put the random generators back afterwards: what is drawn inside is drawn again."""
    before = rng_states(of_gpus=of_gpus)
    try:
        yield
    finally:
        set_rng_states(before)


def _try_rng_states(path: Path, states: dict[str, Any]) -> None:
    """Set random states for a moment: generators of other versions may not take them."""
    with generators_kept(of_gpus="cuda" in states):
        try:
            set_rng_states(states)
        except Exception as e:
            raise PlanMismatch(
                f"{path} has states of random generators that do not fit those of here ({e}): load it with the "
                "versions of torch and numpy that wrote it"
            ) from e


class NoScheduler:
    """In the place of a scheduler, of one without any."""

    def state_dict(self) -> None:
        """Say that there is none."""

    def load_state_dict(self, state: None) -> None:
        """Take that in."""


def scheduler_kind(scheduler: Any) -> str | None:
    """A name that tells schedulers apart whose states look alike; None without one."""
    return None if isinstance(scheduler, NoScheduler) else type(scheduler).__qualname__


class ModelPart(NamedTuple):
    """The part of a model that is here, by the names that its params have in the whole model."""

    params: dict[str, SavedParam]
    groups: list[dict[str, Any]]
    buffers: dict[str, Any]
    """All that the model's state has beside params, and the scales of codes, which are nothing without them."""
    factors: dict[str, dict[str, torch.Tensor]]
    exact: list[str]


def part_of(model: nn.Module, optimizer: HybridOptimizer, params: ParamSet, by_names: ByName) -> ModelPart:
    """Collect what this process has. Raises TypeError for params of the optimizer that are not managed, of a model in
    stages: there are no names for them.
    """
    handles = params.handles
    if params.of_stages and plain_params_of(optimizer):
        raise TypeError(
            "a checkpoint of a pipeline over ranks holds managed params alone, and this optimizer has others too: give "
            "those to an optimizer of their own"
        )
    described = {handle.whole_name: SavedParam.of(handle) for handle in handles}
    exact = [h.whole_name for h in handles if h.chunk.spec.exact]
    buffers = {**scales_in(model.named_parameters()), **beside_params(model, by_names)}
    # Copies: they are written when training may have gone on.
    factors = {h.whole_name: {name: v.clone() for name, v in h.factors.items()} for h in handles if h.factors}
    return ModelPart(described, groups_of(optimizer), buffers, factors, exact)


def joined(parts: Sequence[ModelPart], order: Mapping[str, StageParam]) -> ModelPart:
    """Put all stages together, in the whole model's order. RankMismatch if their numbers of param groups differ."""
    if len({len(part.groups) for part in parts}) > 1:
        raise RankMismatch(
            f"the stages of a pipeline have {sorted({len(part.groups) for part in parts})} param groups: make the same "
            "number on each of them (groups may be empty), so that one checkpoint can hold them"
        )
    groups = []
    for index, group in enumerate(parts[0].groups):
        names = {name for part in parts for name in part.groups[index]["params"]}
        groups.append({**group, "params": [name for name in order if name in names]})
    params = {name: value for part in parts for name, value in part.params.items()}
    exact = {name for part in parts for name in part.exact}
    # Where two stages have one name, the first stage's value is kept.
    buffers = {name: value for part in reversed(parts) for name, value in part.buffers.items()}
    factors = {name: value for part in parts for name, value in part.factors.items()}
    return ModelPart(
        {name: params[name] for name in order}, groups, buffers, factors, [name for name in order if name in exact]
    )


class Rest:
    """The rest of a checkpoint besides masters and states. What is of another model, optimizer or scheduler is refused
    in the making of it (PlanMismatch, saying what), which changes nothing, or by the model and the scheduler in
    ``load_own``; ``put_back`` has nothing left to object to.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        values: list[torch.Tensor],
        engine: Engine,
        model: nn.Module,
        optimizer: HybridOptimizer,
        scheduler: Any,
    ):
        params, handles = engine.params, engine.params.handles
        self._path, self._manifest, self._handles = path, manifest, handles
        self._model, self._optimizer, self._scheduler, self._by_names = model, optimizer, scheduler, engine.by_names
        _compare_params(path, manifest, params, engine.config.precision, engine.stepping.rule.spec)
        self._groups = _compared_groups(path, decode(manifest.groups, values), optimizer, params)
        self._plain, self._factors = decode(manifest.plain, values), decode(manifest.factors, values)
        self._own_plain = {f"#{number}": param for number, param in plain_params_of(optimizer)}
        for number, param in self._own_plain.items():
            saved = self._plain[number]["param"]
            if (saved.shape, saved.dtype) != (param.shape, param.dtype):
                raise PlanMismatch(
                    f"{path} was saved with a param {number} of the optimizer, not managed, of {saved.dtype} "
                    f"{list(saved.shape)}; here it is {param.dtype} {list(param.shape)}"
                )
        self._scales = scales_in(model.named_parameters())
        self._model_state = self._saved_beside_params(decode(manifest.buffers, values), is_stage=bool(params.of_stages))
        self.extra = decode(manifest.extra, values)
        # More ranks than wrote it: the others keep their own generators.
        self._rng = decode(manifest.rng, values)[engine.ranks.everyone.rank :][:1]
        for states in self._rng:
            _try_rng_states(path, states)
        self._state = decode(manifest.scheduler, values)
        self._compare_scheduler(manifest.scheduler_kind)

    def _saved_beside_params(self, saved: dict[str, Any], *, is_stage: bool) -> dict[str, Any]:
        """What was saved of a model's state beside params, by the names of here."""
        here = self._beside_params()
        if is_stage:  # of all stages: those that are here too
            saved = {name: value for name, value in saved.items() if name in here}
        if self._manifest.version >= 4:
            return saved
        # Before, a checkpoint had buffers alone, each by its first name.
        first = {id(here[name]): value for name, value in saved.items() if name in here}
        if unsaid := sorted(repr(name) for name, value in here.items() if id(value) not in first):
            path, names = self._path, ", ".join(unsaid)
            warn(f"{path} is of an older Gemini: {names} of model.state_dict() are not in it, and stay")
        return {name: first.get(id(value), value) for name, value in here.items()} | saved

    def _compare_scheduler(self, saved: str | None) -> None:
        """Raise PlanMismatch if the saved state is of another scheduler, by its kind or the names in it."""
        if (has_none := isinstance(self._scheduler, NoScheduler)) != (self._state is None):
            had = "with" if has_none else "without"
            raise PlanMismatch(f"{self._path} was saved {had} a scheduler: pass the same arguments to load_checkpoint")
        if saved not in (None, scheduler_kind(self._scheduler)):
            raise self._other_scheduler(f"it was a {saved}")
        here = None if has_none else self._scheduler.state_dict()
        if isinstance(here, dict) and isinstance(self._state, dict):
            names = {str(name) for name in here if name not in self._state}
            # Nothing tells the classes of those within it: they must have the very names.
            names |= {"_schedulers"} if _names_within(here) != _names_within(self._state) else set()
            if names:
                raise self._other_scheduler(f"their states differ in {min(names)!r}")

    def _other_scheduler(self, why: object) -> PlanMismatch:
        return PlanMismatch(
            f"{self._path} was saved with another scheduler than this {type(self._scheduler).__name__} ({why}): make "
            "the same one, with the same arguments"
        )

    def load_own(self, ranks: Handshake, writing: ExitStack) -> None:
        """Give the model what its state had beside params, and the scheduler its state, on all ranks or none: first of
        all, since they may refuse. Then Ctrl-C waits until ``writing`` ends. Raises PlanMismatch, naming what they do
        not take. They are as they were.
        """
        with undone_on_error(self._model, self._by_names), _taken_back_on_error(self._scheduler, self._optimizer):
            ranks.step(self._load_own, lambda _: None)
            writing.enter_context(WHOLE)

    def _load_own(self) -> None:
        now, refusal = self._beside_params(), None
        # Scales belong to codes, which are params: `put_back` copies them, not the model.
        own = {name: value for name, value in self._model_state.items() if name not in self._scales}
        try:
            load_beside_params(self._model, self._by_names, own)
            now = self._beside_params()
        except Exception as e:
            refusal = e
        saved, here = ({name: _form_of(v) for name, v in of.items()} for of in (self._model_state, now))
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        if different or refusal is not None:
            first = different[0] if different else ""
            which = (
                f"{len(different)} differ, the first is {first!r} (saved {saved.get(first)}, here {here.get(first)})"
            )
            why = [which] * bool(different) + [f"its load_state_dict says: {refusal}"] * (refusal is not None)
            raise PlanMismatch(
                f"{self._path} was saved for a model with other buffers or extra state: {'; '.join(why)}"
            ) from refusal
        try:
            self._scheduler.load_state_dict(self._state)
        except Exception as e:
            raise self._other_scheduler(e) from e

    def _beside_params(self) -> dict[str, Any]:
        return {**self._scales, **beside_params(self._model, self._by_names)}

    def put_back(self) -> None:
        """Masters and states are there: the rest, with the random states of this rank if they were saved."""
        for handle in self._handles:
            handle.num_steps = handle.restored = self._manifest.params[handle.whole_name].step
            handle.waiting = None
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        with torch.no_grad():
            for name, scale in self._scales.items():
                scale.copy_(self._model_state[name])
            for number, param in self._own_plain.items():
                param.copy_(self._plain[number]["param"])
                self._optimizer.state[param] = {
                    name: value if name == "step" else value.to(param.device)
                    for name, value in self._plain[number]["state"].items()
                }
        for handle in self._handles:
            saved_factors = (self._factors or {}).get(handle.whole_name)
            for name, value in handle.factors.items():
                # Those of params that were frozen begin anew.
                if saved_factors is None:
                    value.zero_()
                else:
                    value.copy_(saved_factors[name])
        for states in self._rng:
            set_rng_states(states)


def _compare_params(path: Path, manifest: Manifest, params: ParamSet, precision: str, rule: RuleSpec) -> None:
    """Raise PlanMismatch if the params of a checkpoint cannot become those of the model."""
    handles = params.handles
    if manifest.precision != precision:
        raise PlanMismatch(
            f"{path} was saved in {manifest.precision}, the model is in {precision}: wrap it with "
            f"GeminiConfig(precision={manifest.precision!r})"
        )
    check_rule(path, manifest.rule, rule)
    saved = {name: param.shape for name, param in manifest.params.items()}
    here = {name: param.shape for name, param in params.of_stages.items()}
    here = here or {handle.whole_name: handle.whole_shape for handle in handles}
    if saved != here:
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        raise PlanMismatch(
            f"{path} was saved for another model: {len(different)} params differ, the first is {different[0]!r} "
            f"(saved {saved.get(different[0])}, here {here.get(different[0])})"
        )
    for handle in handles:
        name, was, now = handle.whole_name, manifest.params[handle.whole_name], SavedParam.of(handle)
        # A scale of compact states is for a block of elements as they follow each other in one slice.
        if was.cut != now.cut and (manifest.rule.exact is not None or rule.exact is not None):
            there, of_now = (1 if of.cut is None else of.cut[2] for of in (was, now))
            raise PlanMismatch(
                f"{path} has {name!r} in slices of {there} ranks, and here are {of_now}: compact states have one scale "
                "for many elements of a slice, and slices of another size have others. Load it with the same tp and "
                'ep, or save and load with states="exact"'
            )
        if was.fp32 != now.fp32 and (was.cut != now.cut or not was.trained):
            raise PlanMismatch(
                f"{name!r} was saved in {'fp32' if was.fp32 else manifest.precision} in {path} and is in "
                f"{'fp32' if now.fp32 else precision} here, which only a trained param in the same slices can be read "
                "into: wrap the model with the same GeminiConfig(keep_fp32=)"
            )
        if was.trained and not now.trained:
            raise PlanMismatch(
                f"{name!r} was trained when {path} was saved and is frozen here: call requires_grad_(True) on it "
                "before the model is wrapped, or load the weights alone with load_state_dict"
            )
        if now.trained and not was.trained and manifest.precision == "fp16":
            raise PlanMismatch(
                f"{name!r} was frozen when {path} was saved, which has no fp32 master of it as fp16 training needs "
                "one: freeze it here too, or load its weights with load_state_dict"
            )


def _compared_groups(
    path: Path, saved: list[dict[str, Any]], optimizer: HybridOptimizer, params: ParamSet
) -> list[dict[str, Any]]:
    """Compare saved groups with the optimizer's, and return what of them is to be taken over. Raises PlanMismatch if
    they are of other params, or of Adam here and of AdamW there.
    """
    here, own = groups_of(optimizer), {handle.whole_name for handle in params.handles}
    for group in [*saved, *here] if params.of_stages else ():  # of all stages: what is here, in the model's order
        group["params"] = [name for name in params.of_stages if name in own and name in group["params"]]
    if [group["params"] for group in saved] != [group["params"] for group in here]:
        raise PlanMismatch(
            f"{path} was saved with param groups of {[len(g['params']) for g in saved]} params, the optimizer has "
            f"{[len(g['params']) for g in here]} (or others in them): make the groups as they were"
        )
    for i, (group, ours) in enumerate(zip(saved, here, strict=True) if isinstance(optimizer, HybridAdam) else ()):
        try:
            check_decay(group, ours, f"its group {i}")
        except ValueError as e:
            raise PlanMismatch(f"{path} was saved with the other kind of weight decay: {e}") from e
    return [loaded_group(group, ours) for group, ours in zip(saved, here, strict=True)]


def _form_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | str:
    """The form that two values must share, so that one can take the place of the other in a model's state."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else "plain values"


def _names_within(state: dict[str, Any]) -> list[Any]:
    """The names in the states of schedulers within one."""
    inner = [one for one in state.get("_schedulers", ()) if isinstance(one, dict)]
    return [(sorted(map(str, one)), _names_within(one)) for one in inner]


@contextlib.contextmanager
def _taken_back_on_error(scheduler: Any, optimizer: HybridOptimizer) -> Iterator[None]:
    """Give a scheduler the state that it has now if there is an error, and groups what they have."""
    before = copy.deepcopy(scheduler.state_dict())
    of_groups = [(group, dict(group)) for group in optimizer.param_groups]  # a scheduler may set learning rates
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # one that does not take what it gave cannot be helped
            scheduler.load_state_dict(before)
        for group, was in of_groups:
            group.update(was)
        raise
