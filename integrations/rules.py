"""Which update rule an optimizer of a framework stands for, and the optimizer of Gemini in its place.

The rule of a model is said where it is managed (``GeminiConfig(optimizer=rule)``), before any optimizer is there. An
optimizer that a program makes for it is converted if it is of that rule, and refused by name if it is not; the groups
are the very dicts of the old one. Of the names of ``TrainingArguments(optim=)`` those are known here whose rule Gemini
has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gemini.optim.adopted import AdoptedRule, adopt
from gemini.optim.elementwise import LionRule, PlainSGDRule, SGDRule
from gemini.optim.matrices import AdaLomoRule
from gemini.rules import AdamRule, UpdateRule, rule_of
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of
from gemini.train.params.owner import owner_of

from .adam import to_hybrid_adam

BY_NAME = ("sgd", "adagrad", "rmsprop", "lion_32bit", "lomo", "adalomo")
"""Of transformers' names, those of other rules than Adam's."""
_STOCK = ("sgd", "adagrad", "rmsprop")
_SWITCHES = ("maximize", "foreach", "differentiable", "fused")


def to_hybrid(optimizer: torch.optim.Optimizer, *, step_in_backward: bool = False) -> HybridOptimizer:
    """The optimizer of Gemini that takes the place of ``optimizer``, with its groups (the same dicts) and its states.

    Raises:
        ValueError: for an optimizer of another rule than its model was managed for, and for options it does not have.
    """
    if isinstance(optimizer, HybridOptimizer):
        return optimizer
    rule = _rule_of_model(optimizer)
    if isinstance(rule, AdamRule):
        return to_hybrid_adam(optimizer, step_in_backward=step_in_backward)
    kind, groups = type(optimizer), optimizer.param_groups
    if kind is torch.optim.SGD and isinstance(rule, (SGDRule, PlainSGDRule)):
        for option in ("maximize", "differentiable"):
            if any(group.get(option) for group in groups):
                raise ValueError(f"the optimizer SGD has {option}=True, which gemini.optim.SGD has not: leave it out")
    elif not (isinstance(rule, AdoptedRule) and rule.kind is kind):
        raise ValueError(
            f"the optimizer {kind.__name__} is not of the rule that the model was managed for, {rule!r}: make it with "
            f"gemini.HybridOptimizer(params, rule), or say GeminiConfig(optimizer={rule_in_words(kind)})"
        )
    states = optimizer.state_dict() if optimizer.state else None
    if isinstance(rule, (SGDRule, PlainSGDRule)):
        for group in groups:
            for option in _SWITCHES:
                group.pop(option, None)
    hybrid = HybridOptimizer(groups, rule, step_in_backward=step_in_backward)
    if states is not None:
        bare = [{"params": group["params"]} for group in states["param_groups"]]
        kept = {key: _counted(state) for key, state in states["state"].items()}
        hybrid.load_state_dict({"state": kept, "param_groups": bare})
    return hybrid


def _counted(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its count of steps: SGD keeps none, and its first step alone is unlike the others."""
    found = {name: value for name, value in state.items() if value is not None}
    return {"step": torch.tensor(1.0), **found} if found else found


def _rule_of_model(optimizer: torch.optim.Optimizer) -> UpdateRule:
    params: Iterable[Any] = (param for group in optimizer.param_groups for param in group["params"])
    handles = (handle for handle in map(handle_of, params) if handle is not None)
    return next((rule_of(owner_of(handle).config.optimizer) for handle in handles), rule_of(None))


def rule_in_words(kind: type) -> str:
    """How the rule of an optimizer class is written."""
    of_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"gemini.optim.adopt({'torch.optim.' if of_torch else ''}{kind.__name__})"


def rule_of_name(args: Any) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule of ``TrainingArguments(optim=)``, one of ``BY_NAME``, and hyperparameters as transformers has them."""
    name, lr = str(getattr(args.optim, "value", args.optim)), {"lr": args.learning_rate}
    if name in _STOCK:
        from transformers import Trainer

        kind, hypers = Trainer.get_optimizer_cls_and_kwargs(args)
        if kind is torch.optim.SGD:
            return SGDRule() if hypers.get("momentum") else PlainSGDRule(), hypers
        return adopt(kind, **hypers), hypers
    if name == "lion_32bit":
        return LionRule(), {**lr, "betas": (args.adam_beta1, args.adam_beta2)}
    return (PlainSGDRule() if name == "lomo" else AdaLomoRule()), lr
