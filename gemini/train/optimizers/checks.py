"""What ``HybridAdam`` accepts as a param group and as a state: looked at as a whole, before anything changes.

The rule for the keys of a group, at construction, in ``add_param_group``, in ``load_state_dict`` and before each step:

1. ``lr``, ``betas``, ``eps``, ``weight_decay``, ``decoupled`` are interpreted here, and their values must make sense.
2. What other Adams and optimizers of ``torch.optim`` interpret and this one does not (``amsgrad``, ``maximize``,
   ``momentum``, ``bias_correction``, ...) is refused, unless it has the value with which it does nothing. ``foreach``,
   ``fused`` and ``capturable`` choose among implementations of one result, and pass.
3. Every other key is a label: those of LR schedulers (``initial_lr``, ``max_lr``, ``swa_lr``), of frameworks (``name``,
   ``param_names``) and of users (``lr_mult``) are kept, saved and given back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gemini.planning.planes import shapes_of
from gemini.ranks.agree import Facts, checksum_text, plain
from gemini.ranks.agreement import Point
from gemini.rules import ADAM, LARGEST, RuleSpec, UpdateRule, is_decoupled, number_of, rule_of
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.owner import Owner, owner_of

Group = Mapping[str, Any]

IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable"})
"""Keys of torch that choose among implementations of one result."""
_DOES_NOTHING: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "centered": False,
    "lr_decay": 0,
    "initial_accumulator_value": 0,
    "lambd": 0,
    "bias_correction": True,
    "correct_bias": True,
}
"""What others interpret, with the value with which it does nothing."""
_OF_OTHERS = (
    "alpha",
    "beta2_decay",
    "d",
    "etas",
    "momentum_decay",
    "ns_coefficients",
    "ns_steps",
    "rho",
    "step_sizes",
    "t0",
)
"""What other optimizers of torch interpret, whatever its value."""
_OF_TORCH = frozenset({"foreach", "maximize", "capturable", "differentiable"})
"""Keys that groups of torch's optimizers have; those of its Adam and AdamW have ``amsgrad`` too."""


# ---- groups ----------------------------------------------------------------------------------------------------------

RESIDUAL_OF = "residual_of"
"""A state: the CRC-32 of the bf16 weights that "residual" completes, so that it completes these and no others."""


def check_group(group: Group, what: str) -> None:
    """Refuse hyperparameters that make no sense, or would be accepted and ignored; the rule is on top of this file.

    Raises:
        TypeError: for a value that is no number.
        ValueError: for one out of range or missing, and for a key of rule 2.
    """
    decoupled = is_decoupled(group)
    ADAM.check_group({**group, "decoupled": decoupled}, what)
    if len({isinstance(beta, torch.Tensor) for beta in group["betas"]}) > 1:
        raise ValueError(f"betas of {what} must be two floats or two tensors, as torch has them, got {group['betas']}")
    # torch's name for the same; without weight decay both ways are one.
    meant = group.get("decoupled_weight_decay", decoupled)
    if meant is not None and bool(meant) is not decoupled and float(group["weight_decay"]) != 0:
        raise ValueError(
            f"{what} has decoupled_weight_decay={meant!r} of torch.optim, and decoupled={decoupled} here: leave one of "
            "them out"
        )
    for key, neutral in _DOES_NOTHING.items():
        if group.get(key) is not None and not _is_same(group[key], neutral):
            raise ValueError(
                f"{what} has {key}={group[key]!r}, which HybridAdam does not have (but {key}={neutral}): leave it out"
            )
    for key in _OF_OTHERS:
        if key in group:
            raise ValueError(f"{what} has {key}={group[key]!r}, which HybridAdam does not have: leave it out")


def _is_same(value: Any, neutral: Any) -> bool:
    try:
        return bool(value == neutral)
    except (RuntimeError, TypeError, ValueError):  # a tensor of several elements, for example
        return False


# ---- a state that is loaded ------------------------------------------------------------------------------------------


def check_layout(own: list[dict[str, Any]], state_dict: Any) -> None:
    """Refuse what is no state dict, or one of other groups, or with states of params that are in none of them.

    Raises:
        ValueError: saying which.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            'a state is a dict with "state" and "param_groups" (what optimizer.state_dict() gives), got '
            + (f"{sorted(map(str, state_dict))[:4]}" if isinstance(state_dict, Mapping) else str(type(state_dict)))
        )
    saved, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(states, Mapping) or not isinstance(saved, (list, tuple)) or not all(map(_is_group, saved)):
        raise ValueError(
            '"state" must be a dict and "param_groups" a list of dicts, each with "params" (a list of numbers or '
            "names), as optimizer.state_dict() gives them"
        )
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group["params"]) for group in own]:
        raise ValueError(
            f"the loaded state has groups of {sizes} params, the optimizer has groups of "
            f"{[len(group['params']) for group in own]}: it was saved for another model or other groups"
        )
    keys = [key for group in saved for key in group["params"]]
    if not all(isinstance(key, (int, str)) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError("the groups of the loaded state do not name each param once, by a number or a name")
    strange = sorted(states.keys() - set(keys), key=str)
    if strange:
        raise ValueError(f"the loaded state has states of {strange[:3]}, which are in none of its groups")


def check_states(rule: UpdateRule, own: list[dict[str, Any]], state_dict: Any) -> None:
    """Refuse loaded states that are not of this rule (names, shapes, dtypes, step counts; of Adam values too), and
    those of params that are frozen here, and have nowhere to keep them.

    Raises:
        ValueError, TypeError: naming the param and the key.
    """
    for key, param, name in _params_of(own, state_dict["param_groups"]):
        state = state_dict["state"].get(key)
        if not isinstance(state, Mapping | None):
            raise ValueError(f"the loaded state of {name!r} is a {type(state).__name__}, wanted a dict")
        if state:  # else it has had no update
            handle = handle_of(param)
            # The model's may keep more than the optimizer knows of.
            kept = rule if handle is None else rule_of(owner_of(handle).config.optimizer)
            _check_state(kept, state, param, name)
            if kept.face == ADAM:
                _check_moments(state, name)
            if handle is not None and not handle.chunk.trained:
                raise ValueError(
                    f"the loaded state has states of {name!r}, which is frozen here: call requires_grad_(True) before "
                    "GeminiDDP(model), or leave its state out"
                )


def _check_state(rule: UpdateRule, state: Mapping[str, Any], param: nn.Parameter, name: str) -> None:
    """Refuse a loaded state of one param that is not of this rule. Raises ValueError, naming the param and the key."""
    _check_keys(rule.spec, state, param, name)
    _step_of(state, name)
    if RESIDUAL_OF in state:
        checksum = number_of(state[RESIDUAL_OF], f"{RESIDUAL_OF!r} of {name!r}")
        if not (0 <= checksum < 2**32 and checksum == int(checksum)):
            raise ValueError(f"{RESIDUAL_OF!r} of {name!r} is {checksum:g} in the loaded state: wanted a CRC-32")
    of_master = {"residual": (param.shape, torch.int16), "master": (param.shape, torch.float32)}
    for kind, (shape, dtype) in {**of_master, **shown_layout_of(rule, param)}.items():
        if kind in state:
            _check_tensor(state[kind], shape, dtype, f"{kind!r} of {name!r}")


def _check_keys(spec: RuleSpec, state: Mapping[str, Any], param: nn.Parameter, name: str) -> None:
    """Refuse a loaded state that lacks something of the rule, or has what is of another one."""
    wanted = ["step", *layout_of(spec, param)]
    missing = [key for key in wanted if key not in state]
    those = f"the rule {spec.name!r} has {', '.join(map(repr, wanted))}"
    if missing:
        names = " and no ".join(map(repr, missing))
        raise ValueError(f"the loaded state of {name!r} has no {names}, only {sorted(state)}: {those}")
    # What completes the weights may stand beside them.
    strange = [key for key in state if key not in {*wanted, "residual", RESIDUAL_OF, "master"}]
    if strange:
        raise ValueError(f"the loaded state of {name!r} has {strange[0]!r}, which {spec.name} does not have: {those}")


def layout_of(rule: RuleSpec, param: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of every state that a rule keeps of a param."""
    layout = {
        spec.kind: (
            param.shape if spec.block == 1 else torch.Size([spec.num_items(param.numel())]),
            getattr(torch, spec.dtype),
        )
        for spec in rule.planes
    }
    factors = shapes_of(rule.factors, param.shape)
    return layout | {name: (torch.Size(shape), torch.float32) for name, shape in factors.items()}


def shown_layout_of(rule: UpdateRule, param: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The same as a state dict shows it: one number where a plane has it for every block."""
    layout = layout_of(rule.spec, param)
    return layout | {kind: (torch.Size(), layout[kind][1]) for kind in rule.uniform}


def _params_of(own: list[dict[str, Any]], saved: list[Any]) -> Iterator[tuple[Any, nn.Parameter, str]]:
    """The saved key, the param and the name of each."""
    keys = [key for group in saved for key in group["params"]]
    return zip(keys, [param for group in own for param in group["params"]], _names_of(own), strict=True)


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))


def check_loaded_group(group: Group, mine: Group, what: str) -> None:
    """Refuse a group that is not one of HybridAdam, ``torch.optim.AdamW`` or (with L2) ``torch.optim.Adam``.

    A state that was saved by a torch without ``decoupled_weight_decay`` in its groups (before 2.7) does not say which
    of the last two it is of; it is taken for what the optimizer is.

    Raises:
        ValueError, TypeError: naming what is wrong in it.
    """
    # torch's Adam and AdamW always have "amsgrad", other optimizers never.
    if "decoupled" not in group and "amsgrad" not in group and group.keys() & _OF_TORCH:
        raise ValueError(
            f"{what} is of another optimizer of torch: HybridAdam loads states of its own, of torch.optim.AdamW, and "
            "with decoupled=False of torch.optim.Adam"
        )
    here = is_decoupled(mine)
    # Hyperparameters first, as if decay were the same; the kind of decay has an error of its own.
    check_group({**mine, **group, "decoupled": here, "decoupled_weight_decay": here}, what)
    check_decay(group, mine, what)


def check_decay(group: Group, mine: Group, what: str) -> None:
    """Refuse a group loaded into an Adam's that decays weights in the other one of both ways.

    Raises:
        ValueError: saying how this optimizer is to be made.
    """
    there = group.get("decoupled", group.get("decoupled_weight_decay"))
    here = is_decoupled(mine)
    if there is not None and bool(there) is not here and float(group.get("weight_decay", 0)) != 0:
        kinds = {True: "decoupled weight decay (AdamW)", False: "L2 weight decay (Adam)"}
        raise ValueError(
            f"{what} has {kinds[bool(there)]}, this optimizer has {kinds[here]}: make it with "
            f"HybridAdam(..., decoupled={bool(there)})"
        )


def _check_moments(state: Mapping[str, Any], name: str) -> None:
    """Refuse values that no update by Adam can have left."""
    for key in ("exp_avg", "exp_avg_sq", "master"):
        if key not in state:
            continue
        lowest, highest = _range_of(state[key], f"{key!r} of {name!r}")
        if key == "exp_avg_sq" and lowest < 0:
            raise ValueError(f"'exp_avg_sq' of {name!r} is negative ({lowest:g}) in the loaded state: it is a square")
        if key != "master" and _step_of(state, name) == 0 and (lowest, highest) != (0, 0):
            raise ValueError(f"{key!r} of {name!r} is not 0 in the loaded state, and its 'step' is 0")


def _step_of(state: Mapping[str, Any], name: str) -> float:
    step = number_of(state["step"], f"'step' of {name!r}")
    if not (0 <= step < 2**53 and step == int(step)):
        raise ValueError(f"'step' of {name!r} is {step:g} in the loaded state: wanted a whole number, not negative")
    return step


def _range_of(value: torch.Tensor, what: str) -> tuple[float, float]:
    """The smallest and the largest element; 0 without any."""
    if value.numel() == 0:
        return 0.0, 0.0
    # One pass for range and finiteness: NaN makes both ends NaN, and no comparison with it holds.
    lowest, highest = (float(end) for end in torch.aminmax(value.detach().float()))
    if not (-LARGEST <= lowest and highest <= LARGEST):
        raise ValueError(f"{what} holds inf or NaN in the loaded state (or is no fp32 number)")
    return lowest, highest


def _check_tensor(value: Any, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    """Refuse what is no dense tensor of that shape and dtype; fp32 is made of any float dtype."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        raise ValueError(f"{what} is not a dense tensor with values in the loaded state: {type(value)}")
    if value.shape != shape:
        raise ValueError(f"{what} has shape {tuple(value.shape)} in the loaded state, wanted {tuple(shape)}")
    any_float = dtype is torch.float32
    if not value.is_floating_point() if any_float else value.dtype is not dtype:
        wanted = "a float dtype" if any_float else str(dtype).removeprefix("torch.")
        raise ValueError(f"{what} is {value.dtype} in the loaded state, wanted {wanted}")


def loaded_group(saved: Group, mine: Group) -> dict[str, Any]:
    """Take from a saved group what goes into the optimizer's: neither params nor the kind of Adam (compared before)."""
    left = {"params", "decoupled", "decoupled_weight_decay"} if "decoupled" in mine else {"params", "decoupled"}
    kept = {k: v for k, v in saved.items() if k not in left}
    return copy.deepcopy(kept)  # a learning rate may be a tensor, which a scheduler fills, or a label a list


def _names_of(groups: Iterable[Group]) -> list[str]:
    """The params by name, for messages: the managed one's, torch's ``param_names``, or a number."""
    names: list[str] = []
    for group in groups:
        given = group.get("param_names") or ()
        for index, param in enumerate(group["params"]):
            handle = handle_of(param)
            known = str(given[index]) if index < len(given) else f"param {len(names)}"
            names.append(known if handle is None else handle.name)
    return names


# ---- ranks -----------------------------------------------------------------------------------------------------------


def agree_on_state(optimizer: Any, owner: Owner, state: Mapping[str, Any], refusal: BaseException | None) -> None:
    """See that every rank is about to load the same state into managed params, and has nothing against it.

    Raises:
        RankMismatch: on every rank, naming what differs; nothing was changed.
        GeminiError: on every rank, if one refuses; there its ``refusal``.
    """

    def facts() -> Facts:
        values: dict[str, str] = {}
        for index, (group, loaded) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            if all(handle_of(param) is None for param in group["params"]):
                continue
            # Hyperparameters alone: labels may differ, and no update depends on them.
            for name in optimizer.defaults:
                values[f"{name} of param group {index}"] = repr(plain(loaded.get(name, "not given")))
            for key, param in zip(loaded["params"], group["params"], strict=True):
                handle = handle_of(param)
                if handle is not None:
                    values.update(_facts_of(handle, state["state"].get(key, {})))
        return Facts(values)

    owner.stepping.company.agree(Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts, refusal)


def _facts_of(handle: ParamHandle, state: Mapping[str, Any]) -> dict[str, str]:
    # A param without states says nothing: a rank that has some differs in that they are there.
    values = {}
    for name, value in state.items():
        # Whole tensors go as checksums, numbers as what they say, so that an error can name both.
        is_values = isinstance(value, torch.Tensor) and value.dim() > 0
        values[f"{name} of {handle.name!r}"] = checksum_text(value) if is_values else repr(plain(value))
    return values
