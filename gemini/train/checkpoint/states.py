"""What a checkpoint keeps besides masters and states: optimizer groups, plain params, buffers and extra state, RNG
states, schedulers.

Each comes with what refuses saved ones that could not be put back, so that putting back cannot fail half way. A
scheduler, whose class may be anybody's, is given the saved state for a moment to see whether it takes it.

A :class:`ModelPart` is what one stage of a model, or all of them together, has of it, and of params.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.errors import PlanMismatch, RankMismatch, warn
from gemini.planning.planes import RuleSpec
from gemini.train.checkpoint.format import ALL_OF_MODEL
from gemini.train.checkpoint.plain_data import plain_form
from gemini.train.checkpoint.tensor_file import Malformed
from gemini.train.optimizers.checks import IMPLEMENTATIONS, check_decay, layout_of, loaded_group
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.optimizers.states import BEFORE, complete_master
from gemini.train.params.by_name import ByName
from gemini.train.params.codes import scales_in
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


def check_factors(saved: Any, handles: Iterable[ParamHandle]) -> dict[str, dict[str, torch.Tensor]]:
    """Check what :func:`factors_of` gave, and return it, if it is of these params; those frozen then have none in it.

    Raises:
        Malformed: if it holds what no rule can have left.
    """
    here = {h.whole_name: {name: value.shape for name, value in h.factors.items()} for h in handles if h.factors}
    if not isinstance(saved, dict) or not saved.keys() <= here.keys():
        raise Malformed("factors are not of the params that are trained")
    for name, own in saved.items():
        if not isinstance(own, dict) or own.keys() != here[name].keys():
            raise Malformed(f"factors.{name} are not those of the rule")
        for kind, value in own.items():
            alike = isinstance(value, torch.Tensor) and (value.dtype, value.shape) == (torch.float32, here[name][kind])
            if not alike:
                raise Malformed(f"factors.{name}.{kind} is not float32 {list(here[name][kind])}")
    return saved


def load_factors(handles: Iterable[ParamHandle], saved: dict[str, dict[str, torch.Tensor]]) -> None:
    """Put back what :func:`check_factors` found good; the factors of params that were frozen then begin at zero."""
    for handle in handles:
        for name, value in handle.factors.items():
            if handle.whole_name in saved:
                value.copy_(saved[handle.whole_name][name])
            else:
                # Frozen when it was saved, trained here: it begins anew.
                value.zero_()


def check_groups(path: Path, saved: Any, optimizer: HybridOptimizer, params: ParamSet) -> list[dict[str, Any]]:
    """Check that an optimizer can go on with saved groups, and return what is to be taken over.

    Raises:
        Malformed: if they hold what no optimizer can have.
        PlanMismatch: if they are of other params, or of Adam here and of AdamW there.
    """
    if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
        raise Malformed("groups is not a list of groups")
    for i, group in enumerate(saved):
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Malformed(f"groups[{i}].params is not a list of names")
    saved, here = own_groups(saved, params), own_groups(groups_of(optimizer), params)
    if [group["params"] for group in saved] != [group["params"] for group in here]:
        raise PlanMismatch(
            f"{path} was saved with param groups of {[len(g['params']) for g in saved]} params, the optimizer has "
            f"{[len(g['params']) for g in here]} (or others in them): make the groups as they were"
        )
    for i, (group, ours) in enumerate(zip(saved, here, strict=True)):
        try:
            optimizer.check_group(group, f"groups[{i}]")
            # As it would come back from a checkpoint: tuples, enums and subclasses of numbers have other types here.
            both = {k: plain_form(value) for k, value in ours.items() if k in group and k not in IMPLEMENTATIONS}
            check_alike(both, group, f"groups[{i}]", finite=True, fixed=False)
        except (TypeError, ValueError, KeyError, OverflowError) as e:
            raise Malformed(f"groups[{i}] is of no optimizer: {e}") from e
        try:
            if isinstance(optimizer, HybridAdam):
                check_decay(group, ours, f"its group {i}")
        except ValueError as e:
            raise PlanMismatch(f"{path} was saved with the other kind of weight decay: {e}") from e
    return [loaded_group(group, ours) for group, ours in zip(saved, here, strict=True)]


def check_alike(here: Any, saved: Any, where: str, *, finite: bool, fixed: bool) -> None:
    """Whether ``saved`` may take the place of ``here``: the same kind of value, with all that ``here`` has in it.

    Args:
        finite: numbers do not become infinite or NaN (but for the best of what a scheduler was shown).
        fixed: words and names are settings, which do not change.

    Raises:
        Malformed: naming the first place where it may not.
    """
    if here is None or saved is None:
        if (finite and here is not None) or (fixed and saved is not None):
            raise Malformed(f"{where} is {str(saved)[:80]} where it is {str(here)[:80]} now")
        return
    if _is_number(here) and _is_number(saved):
        # A larger one would overflow where torch computes with it, in some later step.
        if isinstance(saved, int) and saved.bit_length() > 63:
            raise Malformed(f"{where} is too large a number")
        if finite and math.isfinite(here) and not math.isfinite(saved) and not where.endswith("best"):
            raise Malformed(f"{where} is {float(saved)}")
        return
    if type(here) is not type(saved):
        raise Malformed(f"{where} is a {type(saved).__name__} where there is a {type(here).__name__} now")
    if isinstance(here, dict):
        names = here.keys() ^ saved.keys() if fixed else here.keys() - saved.keys()
        if any(isinstance(key, str) for key in names):
            raise Malformed(f"{where} has not the names it has now: {sorted(names, key=str)[0]!r}")
        for key in here.keys() & saved.keys():
            ours = fixed and key not in _OF_USERS
            check_alike(here[key], saved[key], f"{where}.{key}", finite=finite, fixed=ours)
    elif isinstance(here, (list, tuple)) and here:
        # Lists may grow as a schedule goes on, but not those with an entry per group.
        same_length = len(here) == len(saved)
        if not same_length and (where.endswith(("lrs", "_lr", "lambdas", "betas")) or isinstance(here[0], dict)):
            raise Malformed(f"{where} has {len(saved)} entries where there are {len(here)} now")
        for i, value in enumerate(saved):
            check_alike(here[i if same_length else 0], value, f"{where}[{i}]", finite=finite, fixed=fixed)
    elif isinstance(here, torch.Tensor) and (here.dtype, here.shape) != (saved.dtype, saved.shape):
        raise Malformed(f"{where} is a tensor of another dtype or shape")
    elif isinstance(here, str) and fixed and here != saved:
        raise Malformed(f"{where} is {saved[:80]!r} where it is {here!r} now")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype.is_floating_point
    )


_COUNTERS = ("last_epoch", "_step_count")
_OF_USERS = ("lr_lambdas", "_scale_fn_custom")
"""Parts of the states of torch's schedulers that are attributes of what users gave them."""
_MASTERS = {"residual": torch.int16, "master": torch.float32}
_STATES_OF = {torch.bfloat16: "residual", torch.float16: "master"}


def check_plain_states(path: Path, optimizer: HybridOptimizer, states: Any) -> dict[int, dict[str, Any]]:
    """Check what :func:`plain_states` gave, and return it by number, if it is of these params.

    Raises:
        Malformed: if it holds what no optimizer can have.
        PlanMismatch: if it is of other params.
    """
    here = {f"#{i}": (i, param) for i, param in enumerate(params_of(optimizer)) if handle_of(param) is None}
    if not isinstance(states, dict) or states.keys() != here.keys():
        raise Malformed("plain is not of the params that groups names")
    found = {}
    for key, (number, param) in here.items():
        entry = states[key]
        if not isinstance(entry, dict) or entry.keys() != {"param", "state"} or not isinstance(entry["state"], dict):
            raise Malformed(f"plain.{key} is not a param and its state")
        value, state = entry["param"], entry["state"]
        if not isinstance(value, torch.Tensor):
            raise Malformed(f"plain.{key}.param is not a tensor")
        if (value.shape, value.dtype) != (param.shape, param.dtype):
            raise PlanMismatch(
                f"{path} was saved with a param {number} of the optimizer, not managed, of {value.dtype} "
                f"{list(value.shape)}; here it is {param.dtype} {list(param.shape)}"
            )
        check_writable(param, value, f"param {number} of the optimizer")
        if state:
            _check_state(state, value, optimizer.rule.spec, f"plain.{key}.state")
        found[number] = entry
    return found


def _check_state(state: dict[str, Any], param: torch.Tensor, rule: RuleSpec, where: str) -> None:
    step, own = state.get("step"), _STATES_OF.get(param.dtype)
    if not isinstance(step, torch.Tensor) or step.dtype is not torch.float32 or step.dim():
        raise Malformed(f"{where}.step is not a number of updates")
    if not (0 <= step.item() < 2**53 and step.item() == int(step.item())):
        raise Malformed(f"{where}.step is {step.item()}, and no number of updates")
    layout = layout_of(rule, param)
    if not layout.keys() <= state.keys() or state.keys() & (set(_STATES_OF.values()) - {own}):
        raise Malformed(f"{where} has {sorted(state, key=str)}, which is no state of a {param.dtype} param")
    for name, value in state.items():
        shape, dtype = layout.get(name, (param.shape, _MASTERS.get(name, torch.float32)))
        alike = isinstance(value, torch.Tensor) and (value.dtype, value.shape) == (dtype, shape)
        if name != "step" and not alike:
            raise Malformed(f"{where}.{name} is not {dtype} in the shape of its param")


def load_plain_states(optimizer: HybridOptimizer, states: dict[int, dict[str, Any]]) -> None:
    """Put back what :func:`check_plain_states` found good."""
    params = params_of(optimizer)
    with torch.no_grad():
        for number, saved in states.items():
            param = params[number]
            param.copy_(saved["param"])
            optimizer.state[param] = {
                name: value if name == "step" else value.to(param.device) for name, value in saved["state"].items()
            }


def check_writable(target: torch.Tensor, value: torch.Tensor, what: str) -> None:
    """Whether ``value``, of the same dtype and shape, can be copied into ``target``.

    Raises:
        PlanMismatch: saying why it cannot.
    """
    why = None
    if target.is_inference() and not torch.is_inference_mode_enabled():
        why = "it was made in inference mode"
    elif torch._debug_has_internal_overlap(target) == 1:
        why = "several of its elements are one in memory"
    else:
        try:
            # Tried on memory of its own: a failure must come before the model has changed.
            torch.empty_like(target).copy_(value)
        except RuntimeError as e:
            why = str(e)
    if why is not None:
        raise PlanMismatch(f"{what} cannot be written to ({why}): give the model a copy of its own, value.clone()")


def check_model_state(path: Path, model: nn.Module, here: dict[str, Any], saved: Any, version: int) -> dict[str, Any]:
    """Check and return what the model, with ``here`` beside its params, is given of its saved state. Whether it takes
    that is its own matter, but for tensors that nothing can be written to.

    Raises:
        Malformed: if it is no such state.
        PlanMismatch: for such a tensor.
    """
    only_tensors = version < ALL_OF_MODEL
    if not isinstance(saved, dict) or not all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or not only_tensors) for name, value in saved.items()
    ):
        raise Malformed("buffers are not " + ("tensors" if only_tensors else "values") + " by name")
    if only_tensors:
        saved = _with_unsaid(path, model, here, saved)
    for name, value in saved.items():
        own = here.get(name)
        if isinstance(own, torch.Tensor) and form_of(own) == form_of(value):
            check_writable(own, value, f"buffer {name!r}")
    return saved


def _with_unsaid(path: Path, model: nn.Module, here: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Add what a checkpoint lacks that knew only buffers, each of them by its first name."""
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


def form_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | str:
    """The form that two values must share, so that one can take the place of the other in a model's state."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else "plain values"


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


def check_rng(states: Any, where: str) -> None:
    """Whether :func:`set_rng_states` can put ``states`` back: tried on generators that nobody draws from.

    Raises:
        Malformed: if it cannot.
    """
    if not isinstance(states, dict) or not {"python", "torch"} <= states.keys() <= {"python", "torch", "cuda", "numpy"}:
        raise Malformed(f"{where} is not the random states of a rank")
    try:
        version, internal, gauss = states["python"]
        if type(version) is not int or version != 3 or not (gauss is None or type(gauss) is float):
            raise Malformed("Python's is of another version")
        random.Random().setstate((version, tuple(internal.tolist()), gauss))
        torch.Generator(device="cpu").set_state(states["torch"])
        for state in _list(states.get("cuda", [])):
            if state.dtype is not torch.uint8 or state.dim() != 1:
                raise Malformed("CUDA's is no state")
            if torch.cuda.is_available():
                torch.Generator(device="cuda").set_state(state)
        if "numpy" in states:
            name, keys, position, has_gauss, cached = _list(states["numpy"])
            small = type(position) is int and 0 <= position <= 624 and type(has_gauss) is int and has_gauss in (0, 1)
            if name != "MT19937" or not small or type(cached) is not float:
                raise Malformed("NumPy's is no state")
            if keys.dtype is not torch.int64 or keys.shape != (624,) or not 0 <= keys.min() <= keys.max() < 2**32:
                raise Malformed("NumPy's is no state")
    except Exception as e:
        raise Malformed(f"{where} is not the state of random generators: {e}") from e


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed("it is no list")
    return value


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


def check_scheduler(path: Path, scheduler: Any, optimizer: HybridOptimizer, saved: Any, kind: str | None) -> None:
    """Whether ``scheduler`` can go on from ``saved``, the state of one called ``kind``: given it for a moment.

    Raises:
        PlanMismatch: saying why it cannot; the scheduler is as it was.
    """
    # Compared first: most classes take any dict into their attributes.
    _compare_scheduler(path, scheduler, saved, kind)
    with _as_it_was(scheduler, optimizer):
        try:
            # A copy: the scheduler may keep or change what it is given.
            scheduler.load_state_dict(copy.deepcopy(saved))
        except Exception as e:
            raise _other_scheduler(path, scheduler, f"{type(e).__name__}: {e}") from e


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
            key
            for key in saved.keys() - here.keys()
            if kind is None or strict or key in hidden or callable(getattr(scheduler, str(key), None))
        ]
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
        check_alike(here, saved, "its state", finite=strict, fixed=strict)
    except Malformed as e:
        raise _other_scheduler(path, scheduler, str(e)) from e


def _without_empty(states: Any) -> Any:
    return [state or None for state in states] if isinstance(states, (list, tuple)) else states


@contextlib.contextmanager
def _as_it_was(scheduler: Any, optimizer: HybridOptimizer) -> Iterator[None]:
    """Undo whatever is done to a scheduler inside."""
    state = copy.deepcopy(scheduler.state_dict())
    parts = [scheduler, *(getattr(scheduler, "_schedulers", None) or ()), *getattr(scheduler, "lr_lambdas", ())]
    # A scheduler may set learning rates while it loads: the optimizer's groups are put back too.
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    attributes += [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
    finally:
        # By its own method first, for what it keeps elsewhere; then its attributes, whatever that has done.
        with contextlib.suppress(Exception):
            scheduler.load_state_dict(state)
        for now, before in attributes:
            now.clear()
            now.update(before)


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


def own_values(saved: Any, params: ParamSet, own: Mapping[str, Any]) -> Any:
    """Pick from saved values of all stages, by name, those that are here too."""
    if not params.of_stages or not isinstance(saved, dict):
        return saved
    return {name: value for name, value in saved.items() if name in own}
