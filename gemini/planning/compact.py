"""Compact states: the planes of a rule whose states are kept in 8 bits and whose masters have 24.

Weights stay bf16 (2 bytes), the residual becomes the upper byte of the other half (1), each state a byte per element
and a byte of scale for each block of 64: 5.03 bytes per param for Adam, 4.02 for Lion and SGD with momentum, 3 for SGD
without. Blocks are counted from the first element of the param, so placement, chunks, tiles and ranks cut none: params
start at multiples of a page of the smallest plane, and ranks divide chunks at such multiples too.

Small params (norm gains, biases) keep exact states, in chunks of their own: a master of 24 bits moves in steps of 2^-15
near 1, and updates at lr 1e-5 would be lost in them. They are less than a thousandth of a model.
"""

from __future__ import annotations

from functools import lru_cache

from gemini.planning.planes import PlaneKind, PlaneSpec, RuleSpec
from gemini.planning.rules import RULES

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
    """The rule with compact states.

    Raises:
        ValueError: for one that has no such form, naming those that do.
    """
    return _compact(rule, SMALLEST)


@lru_cache(maxsize=64)
def _compact(rule: RuleSpec, smallest: int) -> RuleSpec:
    squares = next((entry.squares for entry in RULES.values() if entry.spec == rule), None)
    if squares is None:
        known = ", ".join(entry.spec.name for entry in RULES.values() if entry.squares is not None)
        raise ValueError(f'states="compact" is for the rules {known}, not for {rule.name!r}: use states="exact"')
    codes = [PlaneSpec(spec.kind, "uint8" if spec.kind in squares else "int8") for spec in rule.planes]
    scales = [PlaneSpec(scale_of(spec.kind), "uint8", BLOCK) for spec in rule.planes]
    name = f"{rule.name}, compact"
    return RuleSpec(name, (*codes, *scales), "place", residual="int8", exact=rule, smallest=smallest, codes=CODES)


def spec_for(rule: RuleSpec, states: str, precision: str | None) -> RuleSpec:
    """The rule as its states are to be kept.

    Raises:
        ValueError: for states that are unknown, or that the rule or the precision does not have.
    """
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
