"""The registry of update rules: which there are, by the names that command lines take, with their planes.

Whatever offers rules by name reads it: ``gemini.optim``, ``gemini plan`` and ``gemini sft``, the bridges, compact
states and the documentation. What a rule computes, its hyperparameters with their defaults and what they mean, stand in
its class; its optimizer is made from that class, unless :mod:`gemini.optim.optimizers` has one of that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gemini.planning.planes import ADAM, FactorSpec, PlaneKind, PlaneSpec, RuleSpec

if TYPE_CHECKING:  # the names alone are there without torch
    from gemini.rules import UpdateRule


class RuleEntry(NamedTuple):
    """One rule."""

    spec: RuleSpec
    rule: str
    """Its class."""
    module: str
    """Where that is."""
    optimizer: str
    """The class of ``gemini.optim`` that takes params."""
    squares: tuple[PlaneKind, ...] | None = None
    """Which of its states are averages of squares, for compact states; None if it has no compact form."""
    in_transformers: str = ""
    """Its name in ``TrainingArguments(optim=)``, if that is not given by torch's class."""
    unattended: bool = True
    """Whether a loop that knows nothing of it can train with it."""


def _spec(name: str, *states: str, needs: str = "elements") -> RuleSpec:
    """A rule with states in fp32."""
    return RuleSpec(name, tuple(PlaneSpec(kind, "float32") for kind in states), needs)


_FACTORS = (FactorSpec("row_var", "rows"), FactorSpec("col_var", "columns"), FactorSpec("variance", "vector"))
_ELEMENTWISE, _MATRICES = "gemini.optim.elementwise", "gemini.optim.matrices"

RULES = {
    "adamw": RuleEntry(ADAM, "AdamRule", "gemini.rules", "AdamW", squares=("exp_avg_sq",)),
    "lion": RuleEntry(
        _spec("Lion", "exp_avg"), "LionRule", _ELEMENTWISE, "Lion", squares=(), in_transformers="lion_32bit"
    ),
    "sgd": RuleEntry(_spec("SGD", "momentum_buffer"), "SGDRule", _ELEMENTWISE, "SGD", squares=()),
    "plain-sgd": RuleEntry(
        _spec("SGD without momentum"), "PlainSGDRule", _ELEMENTWISE, "LOMO", squares=(), in_transformers="lomo"
    ),
    "adan": RuleEntry(
        _spec("Adan", "exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"), "AdanRule", _ELEMENTWISE, "Adan"
    ),
    "sophia": RuleEntry(
        _spec("Sophia-G", "exp_avg", "hessian"), "SophiaGRule", _ELEMENTWISE, "SophiaG", unattended=False
    ),
    "sophia-h": RuleEntry(
        _spec("Sophia-H", "exp_avg", "hessian"), "SophiaHRule", _ELEMENTWISE, "SophiaH", unattended=False
    ),
    "muon": RuleEntry(_spec("Muon", "exp_avg", "exp_avg_sq", needs="param"), "MuonRule", _MATRICES, "Muon"),
    "adalomo": RuleEntry(
        RuleSpec("AdaLomo", needs="param", factors=_FACTORS),
        "AdaLomoRule",
        _MATRICES,
        "AdaLomo",
        in_transformers="adalomo",
    ),
}


def rule_named(name: str) -> UpdateRule:
    """The rule with its usual settings.

    Raises:
        ValueError: for a name that none has, with those that there are.
    """
    if name not in RULES:
        raise ValueError(f"no rule is called {name!r}: there are {', '.join(RULES)}")
    return getattr(import_module(RULES[name].module), RULES[name].rule)()  # type: ignore[no-any-return]


def name_of(spec: RuleSpec) -> str:
    """The name on command lines of a rule, whichever way its states are kept; its own if it is not in the registry."""
    exact = spec.exact or spec
    return next((name for name, entry in RULES.items() if entry.spec == exact), exact.name)
