"""The registry of update rules: which there are, by the names that command lines take, with their planes.

Whatever offers rules by name reads it: ``gemini.optim``, ``gemini plan`` and ``gemini sft``, the bridges, compact
states and the documentation. What a rule computes, its hyperparameters with their defaults and what they mean, stand in
its class; its optimizer is made from that class, unless :mod:`gemini.optim.optimizers` has one of that name.

Compact states are the planes of a rule whose states are kept in 8 bits and whose masters have 24.

Weights stay bf16 (2 bytes), the residual becomes the upper byte of the other half (1), each state a byte per element
and a byte of scale for each block of 64: 5.03 bytes per param for Adam, 4.02 for Lion and SGD with momentum, 3 for SGD
without. Blocks are counted from the first element of the param, so placement, chunks, tiles and ranks cut none: params
start at multiples of a page of the smallest plane, and ranks divide chunks at such multiples too.

Small params (norm gains, biases) keep exact states, in chunks of their own: a master of 24 bits moves in steps of 2^-15
near 1, and updates at lr 1e-5 would be lost in them. They are less than a thousandth of a model.
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
    """The rule with its usual settings. Raises ValueError for a name that none has, with those that there are."""
    if name not in RULES:
        raise ValueError(f"no rule is called {name!r}: there are {', '.join(RULES)}")
    return getattr(import_module(RULES[name].module), RULES[name].rule)()  # type: ignore[no-any-return]


def name_of(spec: RuleSpec) -> str:
    """The name on command lines of a rule, whichever way its states are kept; its own if it is not in the registry."""
    exact = spec.exact or spec
    return next((name for name, entry in RULES.items() if entry.spec == exact), exact.name)


BLOCK = 64
"""Elements that share a scale."""

SMALLEST = 65536
"""Elements of a param from which on its states are compact."""

CODES = 2
"""How values become codes (``gemini/kernels/reference.py``), as a number in files; 1 had smooth roots."""

STATES = ("exact", "compact")
"""What ``GeminiConfig(states=)`` may be."""


def scale_of(kind: PlaneKind) -> PlaneKind:
    """The plane of the scales of a state."""
    return f"{kind}_scale"


def compact(rule: RuleSpec) -> RuleSpec:
    """The rule with compact states. Raises ValueError for one that has no such form, naming those that do."""
    squares = next((entry.squares for entry in RULES.values() if entry.spec == rule), None)
    if squares is None:
        known = ", ".join(entry.spec.name for entry in RULES.values() if entry.squares is not None)
        raise ValueError(f'states="compact" is for the rules {known}, not for {rule.name!r}: use states="exact"')
    codes = [PlaneSpec(spec.kind, "uint8" if spec.kind in squares else "int8") for spec in rule.planes]
    scales = [PlaneSpec(scale_of(spec.kind), "uint8", BLOCK) for spec in rule.planes]
    name = f"{rule.name}, compact"
    return RuleSpec(name, (*codes, *scales), "place", residual="int8", exact=rule, smallest=SMALLEST, codes=CODES)


def spec_for(rule: RuleSpec, states: str, precision: str | None) -> RuleSpec:
    """The rule with its states kept so; ValueError for states that are unknown, or that it or the precision lacks."""
    if states not in STATES:
        raise ValueError(f"states={states!r} is not known; use one of {', '.join(map(repr, STATES))}")
    if states == "exact":
        return rule
    if precision not in (None, "bf16"):
        raise ValueError(
            f'states="compact" keeps a bf16 weight and 8 more bits of its master, and precision={precision!r} was '
            'asked for: use precision="bf16", or states="exact"'
        )
    return compact(rule)
