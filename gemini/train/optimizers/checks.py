"""What an optimizer accepts as a loaded state: looked at as a whole, before anything changes.

Of a group only the hyperparameters are looked at, by the rule. Every other key is a label: those of LR schedulers
(``initial_lr``, ``swa_lr``), of frameworks (``param_names``) and of users are kept, saved and given back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.planning.planes import shapes_of
from gemini.ranks.agree import Facts, Point, checksum_text, plain
from gemini.rules import RuleSpec, UpdateRule, is_decoupled, number_of, rule_of
from gemini.train.params.by_name import Owner, owner_of
from gemini.train.params.handle import handle_of

Group = Mapping[str, Any]

RESIDUAL_OF = "residual_of"
"""A state: the CRC-32 of the bf16 weights that "residual" completes, so that it completes these and no others."""


def check_states(rule: UpdateRule, own: list[dict[str, Any]], state_dict: Any) -> None:
    """Refuse loaded states of other groups, those that are not of this rule (names, shapes, dtypes, step counts), and
    those of params that are frozen here, and have nowhere to keep them. Raises ValueError or TypeError, naming the
    param and the key.
    """
    sizes, mine = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], own))
    if sizes != mine:
        raise ValueError(
            f"the loaded state has groups of {sizes} params, the optimizer has groups of {mine}: it was saved for "
            "another model or other groups"
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in own for param in group["params"]]
    for index, (key, param) in enumerate(zip(keys, params, strict=True)):
        state, handle = state_dict["state"].get(key), handle_of(param)
        name = repr(f"param {index}" if handle is None else handle.name)
        if not state:  # it has had no update
            continue
        # The model's may keep more than the optimizer knows of.
        _check_state(rule if handle is None else rule_of(owner_of(handle).config.optimizer), state, param, name)
        if handle is not None and not handle.chunk.trained:
            raise ValueError(
                f"the loaded state has states of {name}, which is frozen here: call requires_grad_(True) before "
                "GeminiDDP(model), or leave its state out"
            )


def _check_state(rule: UpdateRule, state: Mapping[str, Any], param: nn.Parameter, name: str) -> None:
    wanted = ["step", *layout_of(rule.spec, param)]
    missing = [key for key in wanted if key not in state]
    # What completes the weights may stand beside them.
    strange = [key for key in state if key not in {*wanted, "residual", RESIDUAL_OF, "master"}]
    if missing or strange:
        wrong = f"has no {' and no '.join(map(repr, missing))}" if missing else f"has {strange[0]!r}"
        raise ValueError(
            f"the loaded state of {name} {wrong}, and the rule {rule.spec.name!r} has {', '.join(map(repr, wanted))}"
        )
    step = number_of(state["step"], f"'step' of {name}")
    if not (0 <= step < 2**53 and step == int(step)):
        raise ValueError(f"'step' of {name} is {step:g} in the loaded state: wanted a whole number, not negative")
    of_master = {"residual": (param.shape, torch.int16), "master": (param.shape, torch.float32)}
    for kind, (shape, dtype) in {**of_master, **shown_layout_of(rule, param)}.items():
        if kind in state:
            _check_tensor(state[kind], shape, dtype, f"{kind!r} of {name}")


def _check_tensor(value: Any, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    """Refuse what is no dense tensor of that shape and dtype; fp32 is made of any float dtype."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        raise ValueError(f"{what} is not a dense tensor with values in the loaded state: {type(value)}")
    any_float = dtype is torch.float32
    if value.shape != shape or not (value.is_floating_point() if any_float else value.dtype is dtype):
        raise ValueError(
            f"{what} is {value.dtype} of shape {tuple(value.shape)} in the loaded state, wanted "
            f"{'a float dtype' if any_float else dtype} of shape {tuple(shape)}"
        )


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


def check_decay(group: Group, mine: Group, what: str) -> None:
    """Refuse a group loaded into an Adam's that decays weights in the other one of both ways. Raises ValueError."""
    there = group.get("decoupled", group.get("decoupled_weight_decay"))
    here = is_decoupled(mine)
    if there is not None and bool(there) is not here and float(group.get("weight_decay", 0)) != 0:
        kinds = {True: "decoupled weight decay (AdamW)", False: "L2 weight decay (Adam)"}
        raise ValueError(
            f"{what} has {kinds[bool(there)]}, this optimizer has {kinds[here]}: make it with "
            f"HybridAdam(..., decoupled={bool(there)})"
        )


def loaded_group(saved: Group, mine: Group) -> dict[str, Any]:
    """Take from a saved group what goes into the optimizer's: neither params nor the kind of Adam (compared before)."""
    left = {"params", "decoupled", "decoupled_weight_decay"} if "decoupled" in mine else {"params", "decoupled"}
    kept = {k: v for k, v in saved.items() if k not in left}
    return copy.deepcopy(kept)  # a learning rate may be a tensor, which a scheduler fills, or a label a list


# ---- ranks -----------------------------------------------------------------------------------------------------------


def agree_on_state(optimizer: Any, owner: Owner, state: Mapping[str, Any], refusal: BaseException | None) -> None:
    """See that every rank is about to load the same state into managed params, and has nothing against it. Raises
    RankMismatch on every rank, naming what differs, and GeminiError if one refuses, there its ``refusal``.
    """

    def facts() -> Facts:
        values: dict[str, str] = {}
        for index, (group, loaded) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            handles = [handle_of(param) for param in group["params"]]
            if not any(handles):
                continue
            # Hyperparameters alone: labels may differ, and no update depends on them.
            for name in optimizer.defaults:
                values[f"{name} of param group {index}"] = repr(plain(loaded.get(name, "not given")))
            managed = [(key, handle) for key, handle in zip(loaded["params"], handles, strict=True) if handle]
            for key, handle in managed:
                # A param without states says nothing: a rank that has some differs in that they are there.
                for name, value in state["state"].get(key, {}).items():
                    # Whole tensors go as checksums, numbers as what they say, so that an error can name both.
                    is_values = isinstance(value, torch.Tensor) and value.dim() > 0
                    values[f"{name} of {handle.name!r}"] = checksum_text(value) if is_values else repr(plain(value))
        return Facts(values)

    owner.stepping.company.agree(Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts, refusal)
