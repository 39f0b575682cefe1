"""Which update rule an optimizer of a framework stands for, and how it becomes one of Gemini's.

The rule of a model is said where it is managed (``GeminiConfig(optimizer=rule)``), before any optimizer is there. An
optimizer that a program makes for it is converted in place if it is of that rule, and refused by name if it is not. Of
the names of ``TrainingArguments(optim=)`` those are known here whose rule Gemini has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemini.config import GeminiConfig
from gemini.optim.adopted import AdoptedRule, adopt, called
from gemini.optim.elementwise import PlainSGDRule, SGDRule
from gemini.planning.rules import RULES, rule_named
from gemini.rules import AdamRule, UpdateRule, rule_of
from gemini.train.optimizers.in_place import class_in_place_of, convert
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import ParamHandle, handle_of, handles_of, optimizer_of

_STOCK = ("sgd", "adagrad", "rmsprop")
"""transformers' names of classes of torch, beside Adam's."""
_OURS = {entry.in_transformers: name for name, entry in RULES.items() if entry.in_transformers}
BY_NAME = (*_STOCK, *_OURS)
"""Of transformers' names, those of other rules than Adam's."""
_POSSIBLE = "torch.optim.AdamW, torch.optim.Adam or gemini.HybridAdam"


def owns_managed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its params is managed."""
    return bool(_managed_of(optimizer))


def _managed_of(optimizer: torch.optim.Optimizer) -> list[ParamHandle]:
    return handles_of(param for group in optimizer.param_groups for param in group["params"])


def to_hybrid(optimizer: torch.optim.Optimizer) -> HybridOptimizer:
    """Make an optimizer of managed params one of Gemini's: the same object, with all that it had."""
    if isinstance(optimizer, HybridOptimizer):
        return optimizer
    config = next((owner_of(handle).config for handle in _managed_of(optimizer)), GeminiConfig())
    rule, kind = rule_of(config.optimizer).face, type(optimizer)
    if isinstance(rule, AdamRule):
        if kind not in (torch.optim.AdamW, torch.optim.Adam):
            raise ValueError(
                f"the optimizer {kind.__name__} cannot update a managed model, whose masters and states live in "
                f"chunks: use {_POSSIBLE}, or manage the model for it with "
                f"GeminiConfig(optimizer=gemini.optim.adopt({kind.__name__}))"
            )
    elif kind is torch.optim.SGD and isinstance(rule, (SGDRule, PlainSGDRule)):
        for option in ("maximize", "differentiable"):
            if any(group.get(option) for group in optimizer.param_groups):
                raise ValueError(f"the optimizer SGD has {option}=True, which gemini.optim.SGD has not: leave it out")
    elif not (isinstance(rule, AdoptedRule) and rule.kind is kind):
        raise ValueError(
            f"the optimizer {kind.__name__} is not of the rule that the model was managed for, {rule!r}: make it with "
            f"gemini.HybridOptimizer(params, rule), or say GeminiConfig(optimizer=gemini.optim.adopt({called(kind)}))"
        )
    return convert(optimizer, rule, step_in_backward=config.gradients == "transient")


def hybrids_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[HybridOptimizer]:
    """The optimizers of one run, converted. A new one starts without states and step counts, as one of torch's does,
    and so does one whose params another optimizer has taken over since.
    """
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if owner.setdefault(id(param), number) != number:
                name = getattr(handle_of(param), "name", "a param")
                raise ValueError(f"{name!r} is in two optimizers: its master and states belong to one of them")
    hybrids = [to_hybrid(optimizer) for optimizer in optimizers]
    for hybrid in hybrids:
        if any(optimizer_of(param) is not hybrid for group in hybrid.param_groups for param in group["params"]):
            hybrid.start_anew()
    return hybrids


def class_of(rule: UpdateRule) -> type[HybridOptimizer]:
    """The class of optimizers of a rule, under the name of the class that was adopted, if one was."""
    if not isinstance(rule, AdoptedRule):
        return HybridOptimizer
    kind: Any = rule.kind
    return class_in_place_of(kind, HybridOptimizer)  # type: ignore[no-any-return]


def rule_of_name(args: Any) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule of ``TrainingArguments(optim=)``, one of ``BY_NAME``, and hyperparameters as transformers has them."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in _STOCK:
        from transformers import Trainer

        kind, hypers = Trainer.get_optimizer_cls_and_kwargs(args)
        if kind is torch.optim.SGD:
            return SGDRule() if hypers.get("momentum") else PlainSGDRule(), hypers
        return adopt(kind, **hypers), hypers
    rule, hypers = rule_named(_OURS[name]), {"lr": args.learning_rate}
    if "betas" in rule.defaults:
        hypers["betas"] = (args.adam_beta1, args.adam_beta2)
    return rule, hypers
