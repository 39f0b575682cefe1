"""The optimizers by name: each is :class:`gemini.HybridOptimizer` with its rule, for managed and plain params.

A model of managed params is wrapped for the rule: ``GeminiConfig(optimizer=gemini.optim.LionRule())``. Signature and
documentation of an optimizer are made of the hyperparameters of its rule; one that can do more has a class here.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from gemini.optim.elementwise import PlainSGDRule, SGDRule
from gemini.optim.matrices import MuonRule
from gemini.planning.rules import RULES, rule_named
from gemini.rules import Hyper, UpdateRule
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer

AdamW = HybridAdam


class RuleOptimizer(HybridOptimizer):
    """An optimizer of one rule, which takes that rule's hyperparameters: what its classes are made of."""

    _rule: ClassVar[UpdateRule]

    def __init_subclass__(cls, rule: UpdateRule | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if rule is None:
            return
        shown = {name: hyper for name, hyper in rule.hypers.items() if hyper.words}
        of_rule, num_bytes = type(rule), 4 + sum(spec.block_bytes for spec in rule.spec.planes)
        about = f"Its rule is :class:`~{of_rule.__module__}.{of_rule.__name__}`, of {num_bytes} bytes per param."
        words = {"params": "as in :class:`gemini.HybridOptimizer`.", **{name: h.words for name, h in shown.items()}}
        words["step_in_backward"] = "as in :class:`gemini.HybridOptimizer`."
        summary = cls.__doc__ or f"{inspect.cleandoc(of_rule.__doc__ or '')}\n\n{about}"
        arguments = "\n".join(
            textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, text in words.items()
        )
        cls.__doc__ = f"{inspect.cleandoc(summary)}\n\nArgs:\n{arguments}\n"
        cls.__init__, cls._rule = _init_with(shown, cls.__name__ == "LOMO"), rule  # type: ignore[method-assign]

    def _rule_for(self, hypers: Mapping[str, Any]) -> UpdateRule:
        """The rule for these hyperparameters."""
        return self._rule


def _init_with(hypers: Mapping[str, Hyper], in_backward: bool) -> Any:
    """A constructor whose signature has the hyperparameters; updates are inside backward by default, or not."""
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds("self", kinds.POSITIONAL_OR_KEYWORD),
            kinds("params", kinds.POSITIONAL_OR_KEYWORD, annotation=Any),
            *(kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=hyper.default) for name, hyper in hypers.items()),
            kinds("step_in_backward", kinds.KEYWORD_ONLY, default=in_backward, annotation=bool),
        ]
    )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{type(self).__name__}: {e}") from None
        bound.apply_defaults()
        given = {name: bound.arguments[name] for name in hypers}
        used = bound.arguments["step_in_backward"]
        HybridOptimizer.__init__(self, bound.arguments["params"], self._rule_for(given), step_in_backward=used, **given)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def optimizer_named(name: str) -> type[HybridOptimizer]:
    """The class of the registry that is called so: one of this module, or made of its rule."""
    if name not in globals():
        entry = next(key for key, entry in RULES.items() if entry.optimizer == name)
        globals()[name] = type(name, (RuleOptimizer,), {"__module__": "gemini.optim"}, rule=rule_named(entry))
    return globals()[name]  # type: ignore[no-any-return]


class SGD(RuleOptimizer, rule=SGDRule()):
    """SGD, as ``torch.optim.SGD``. With ``momentum`` it has :class:`~gemini.optim.elementwise.SGDRule` (8 bytes per
    param), without it :class:`~gemini.optim.elementwise.PlainSGDRule` (4 bytes).
    """

    def _rule_for(self, hypers: Mapping[str, Any]) -> UpdateRule:
        return SGDRule() if hypers["momentum"] else PlainSGDRule()


def muon_groups(model: nn.Module, **adamw: Any) -> list[dict[str, Any]]:
    """Two param groups for Muon, as its authors advise: the hidden matrices, which Muon updates, and the rest
    (embeddings, the head, vectors), which AdamW updates. Frozen params are in neither.

    Args:
        model: the model. Its head is what ``get_output_embeddings()`` returns, if it has this method.
        adamw: hyperparameters of the second group, such as ``lr=3e-4``.
    """
    groups = MuonRule().grouped(model, [{"params": [param for param in model.parameters() if param.requires_grad]}])
    return [{**group, **adamw} if group["adamw"] else group for group in groups]
