"""What a checkpoint keeps besides masters and states: optimizer groups, plain params, buffers and extra state, RNG
states, schedulers.

Each comes with what refuses saved ones of another model, optimizer or scheduler, before anything is put back.

A :class:`ModelPart` is what one stage of a model, or all of them together, has of it, and of params.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.errors import PlanMismatch, RankMismatch, warn
from gemini.train.modules.codes import scales_in
from gemini.train.optimizers.checks import check_decay, loaded_group
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.optimizers.states import BEFORE, complete_master
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, ParamSet, StageParam, handle_of, params_of
from gemini.train.params.state_dict import beside_params


def groups_of(optimizer: HybridOptimizer) -> list[dict[str, Any]]:
    """The groups with params by name; params that are not managed by their number."""
    groups, index = [], 0
    for group in optimizer.param_groups:
        names = []
        for param in group["params"]:
            handle = handle_of(param)
            names.append(handle.whole_name if handle is not None else f"#{index}")
            # A number counts all params of the optimizer, managed ones too, in the order of its groups.
            index += 1
        groups.append({**group, "params": names})
    return groups


def plain_states(optimizer: HybridOptimizer) -> dict[str, Any]:
    """Params of the optimizer that are not managed, with their states, by number."""
    found = {}
    for number, param in enumerate(params_of(optimizer)):
        if handle_of(param) is None:
            state = dict(optimizer.state[param])
            if BEFORE in state:
                complete_master(param, state)  # of these weights, which are in the checkpoint too
            found[f"#{number}"] = {"param": param.detach(), "state": state}
    return found


def factors_of(handles: Iterable[ParamHandle]) -> dict[str, dict[str, torch.Tensor]]:
    """The factors of managed params, by name: copies."""
    # Copies: they are written when training may have gone on.
    return {h.whole_name: {name: value.clone() for name, value in h.factors.items()} for h in handles if h.factors}


def load_factors(handles: Iterable[ParamHandle], saved: dict[str, dict[str, torch.Tensor]]) -> None:
    """Put back what :func:`factors_of` gave; those of params that were frozen then begin anew, at zero."""
    for handle in handles:
        for name, value in handle.factors.items():
            if handle.whole_name in saved:
                value.copy_(saved[handle.whole_name][name])
            else:
                value.zero_()


def check_groups(
    path: Path, saved: list[dict[str, Any]], optimizer: HybridOptimizer, params: ParamSet
) -> list[dict[str, Any]]:
    """Compare saved groups with the optimizer's, and return what of them is to be taken over.

    Raises:
        PlanMismatch: if they are of other params, or of Adam here and of AdamW there.
    """
    saved, here = own_groups(saved, params), own_groups(groups_of(optimizer), params)
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


def check_plain_states(path: Path, optimizer: HybridOptimizer, states: dict[str, Any]) -> None:
    """Compare params of :func:`plain_states` with those that bear the same numbers here. Raises PlanMismatch."""
    for number, param in enumerate(params_of(optimizer)):
        saved = states[f"#{number}"]["param"] if handle_of(param) is None else param
        if (saved.shape, saved.dtype) != (param.shape, param.dtype):
            raise PlanMismatch(
                f"{path} was saved with a param {number} of the optimizer, not managed, of {saved.dtype} "
                f"{list(saved.shape)}; here it is {param.dtype} {list(param.shape)}"
            )


def load_plain_states(optimizer: HybridOptimizer, states: dict[str, Any]) -> None:
    """Put back what :func:`plain_states` gave."""
    params = params_of(optimizer)
    with torch.no_grad():
        for number, saved in states.items():
            param = params[int(number[1:])]
            param.copy_(saved["param"])
            optimizer.state[param] = {
                name: value if name == "step" else value.to(param.device) for name, value in saved["state"].items()
            }


def with_unsaid(path: Path, model: nn.Module, here: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Add to a saved model state what a checkpoint lacks that knew only buffers, each of them by its first name."""
    # A buffer under several names was saved under the first alone.
    first = {id(here[name]): name for name in saved if name in here}
    others = {name: saved[first[id(value)]] for name, value in here.items() if id(value) in first}
    buffers = {id(buffer) for buffer in model.buffers()}
    unsaid = {name: value for name, value in here.items() if id(value) not in buffers and name not in saved}
    if unsaid:
        warn(
            f"{path} is of an older Gemini, which kept nothing of a model but params and buffers: "
            f"{', '.join(map(repr, sorted(unsaid)[:3]))}{' and more' if len(unsaid) > 3 else ''} of model.state_dict() "
            "are not in it, and stay as they are"
        )
    return {**unsaid, **others, **saved}


def rng_states(*, of_gpus: bool = True) -> dict[str, Any]:
    """The random states of this process: Python's, torch's, numpy's if it is loaded."""
    # A tensor in place of 625 numbers: it goes to the file of values.
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, torch.tensor(internal, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
    }
    if of_gpus and torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    # Not imported for this: a generator that nobody has loaded has no state.
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what :func:`rng_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    # With another number of GPUs it is unclear whose state is whose.
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states and importlib.util.find_spec("numpy") is not None:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))


# ---- schedulers ------------------------------------------------------------------------------------------------------


def scheduler_kind(scheduler: Any) -> str | None:
    """A name that tells schedulers apart whose states look alike; None without one."""
    return None if scheduler is None else type(scheduler).__qualname__


def check_scheduler(path: Path, scheduler: Any, saved: Any, kind: str | None) -> None:
    """Refuse the state of a scheduler, of one called ``kind``, that is of another class or has others within it.

    Raises:
        PlanMismatch: saying which.
    """
    why = f"it was a {kind}" if kind not in (None, scheduler_kind(scheduler)) else ""
    if not why and (missing := _missing(scheduler, saved)):
        why = f"its state has no {missing!r}"
    if why:
        raise PlanMismatch(
            f"{path} was saved with another scheduler than this {type(scheduler).__name__} ({why}): make the same one, "
            "with the same arguments"
        )


def _missing(scheduler: Any, saved: Any) -> str | None:
    """The first name that the state of a scheduler has, or of one within it, and the saved state has not."""
    here = scheduler.state_dict()
    if not (isinstance(here, dict) and isinstance(saved, dict)):
        return None
    inner = zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    missing = [*map(str, here.keys() - saved.keys()), *(name for one in inner if (name := _missing(*one)))]
    return min(missing, default=None)


@contextlib.contextmanager
def taken_back_on_error(scheduler: Any) -> Iterator[None]:
    """Give a scheduler, if there is one, the state that it has now if there is an error."""
    before = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        yield
    except BaseException:
        if scheduler is not None:
            with contextlib.suppress(Exception):  # one that does not take what it gave cannot be helped
                scheduler.load_state_dict(before)
        raise


class ModelPart(NamedTuple):
    """What is here of a model, by the names that its params have in the whole model."""

    params: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    buffers: dict[str, Any]
    """All that the model's state has beside params, and the scales of codes, which are nothing without them."""
    factors: dict[str, dict[str, torch.Tensor]]
    exact: list[str]


def part_of(model: nn.Module, optimizer: HybridOptimizer, params: ParamSet, by_names: ByName) -> ModelPart:
    """Collect what this process has.

    Raises:
        TypeError: for params of the optimizer that are not managed, of a model in stages: there are no names for them.
    """
    handles = params.handles
    if params.of_stages and any(handle_of(param) is None for param in params_of(optimizer)):
        raise TypeError(
            "a checkpoint of a pipeline over ranks holds managed params alone, and this optimizer has others too: give "
            "those to an optimizer of their own"
        )
    described = {
        h.whole_name: {"shape": list(h.whole_shape), "step": h.num_steps, "trained": h.chunk.trained}
        | ({} if h.cut is None else {"cut": [h.cut.dim, h.cut.groups, h.cut.size]})
        | ({"coded": True} if h.chunk.spec.coded else {})
        | ({"fp32": True} if h.chunk.spec.fp32 else {})
        for h in handles
    }
    exact = [h.whole_name for h in handles if h.chunk.spec.exact]
    buffers = {**scales_in(model.named_parameters()), **beside_params(model, by_names)}
    return ModelPart(described, groups_of(optimizer), buffers, factors_of(handles), exact)


def joined(parts: Sequence[ModelPart], order: Mapping[str, StageParam]) -> ModelPart:
    """Put all stages together, in the order of the whole model.

    Raises:
        RankMismatch: if they have other numbers of param groups.
    """
    first = parts[0]
    if len({len(part.groups) for part in parts}) > 1:
        raise RankMismatch(
            f"the stages of a pipeline have {sorted({len(part.groups) for part in parts})} param groups: make the same "
            "number on each of them (groups may be empty), so that one checkpoint can hold them"
        )
    groups = []
    for index, group in enumerate(first.groups):
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


def own_groups(groups: list[dict[str, Any]], params: ParamSet) -> list[dict[str, Any]]:
    """Pick from groups of all stages the params that are here, in the order of the whole model."""
    if not params.of_stages:
        return groups
    own = {handle.whole_name for handle in params.handles}
    return [
        {**group, "params": [name for name in params.of_stages if name in own and name in group["params"]]}
        for group in groups
    ]


def own_values(saved: dict[str, Any], params: ParamSet, own: Mapping[str, Any]) -> dict[str, Any]:
    """Pick from saved values of all stages, by name, those that are here too."""
    if not params.of_stages:
        return saved
    return {name: value for name, value in saved.items() if name in own}
