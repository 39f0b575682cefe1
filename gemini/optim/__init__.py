"""Every optimizer: the classes that take params, and the rules that a model is wrapped for.

    config = gemini.GeminiConfig(optimizer=gemini.optim.LionRule(), ...)
    optimizer = gemini.optim.Lion(model.parameters(), lr=1e-4)

Which there are stands in the registry (:mod:`gemini.planning.rules`). Names are imported when they are first used: the
rules are below the training engine, the optimizers above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gemini.planning.rules import RULES

_OPTIMIZERS = {entry.optimizer for entry in RULES.values()}
_WHERE = {
    "AdoptedRule": "gemini.optim.adopted",
    "AveragedRule": "gemini.optim.around",
    "adopt": "gemini.optim.adopted",
    "muon_groups": "gemini.optim.optimizers",
    **{entry.rule: entry.module for entry in RULES.values()},
}

__all__ = sorted({*_WHERE, *_OPTIMIZERS})


def __getattr__(name: str) -> Any:
    if name in _OPTIMIZERS:
        value: Any = import_module("gemini.optim.optimizers").optimizer_named(name)
    elif name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module 'gemini.optim' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
