"""The rules of ``gemini.optim`` by the names that command lines take."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names alone are there without torch
    from gemini.rules import UpdateRule

RULES = {
    "adamw": "AdamRule", "lion": "LionRule", "sgd": "SGDRule", "plain-sgd": "PlainSGDRule", "adan": "AdanRule",
    "sophia": "SophiaGRule", "sophia-h": "SophiaHRule", "muon": "MuonRule", "adalomo": "AdaLomoRule",
}  # fmt: skip
"""Classes of ``gemini.optim``. ``plain-sgd`` is SGD without momentum: LOMO's rule."""


def rule_named(name: str) -> UpdateRule:
    """The rule with its usual settings.

    Raises:
        ValueError: for a name that none has, with those that there are.
    """
    if name not in RULES:
        raise ValueError(f"no rule is called {name!r}: there are {', '.join(RULES)}")
    return getattr(import_module("gemini.optim"), RULES[name])()  # type: ignore[no-any-return]
