"""Every optimizer: the classes that take params, and the rules that a model is wrapped for.

    config = gemini.GeminiConfig(optimizer=gemini.optim.LionRule(), ...)
    optimizer = gemini.optim.Lion(model.parameters(), lr=1e-4)

Names are imported when they are first used: the rules are below the training engine, the optimizers above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_WHERE = {
    "AdaLomo": "gemini.optim.optimizers",
    "AdaLomoRule": "gemini.optim.matrices",
    "SGD": "gemini.optim.optimizers",
    "Adan": "gemini.optim.optimizers",
    "AdamW": "gemini.optim.optimizers",
    "LOMO": "gemini.optim.optimizers",
    "Lion": "gemini.optim.optimizers",
    "Muon": "gemini.optim.optimizers",
    "SophiaG": "gemini.optim.sophia",
    "SophiaH": "gemini.optim.sophia",
    "AdamRule": "gemini.rules",
    "AdoptedRule": "gemini.optim.adopted",
    "AdanRule": "gemini.optim.elementwise",
    "LionRule": "gemini.optim.elementwise",
    "MuonRule": "gemini.optim.matrices",
    "PlainSGDRule": "gemini.optim.elementwise",
    "SGDRule": "gemini.optim.elementwise",
    "SophiaGRule": "gemini.optim.elementwise",
    "SophiaHRule": "gemini.optim.elementwise",
    "adopt": "gemini.optim.adopted",
    "muon_groups": "gemini.optim.optimizers",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from gemini.optim.adopted import AdoptedRule as AdoptedRule
    from gemini.optim.adopted import adopt as adopt
    from gemini.optim.elementwise import AdanRule as AdanRule
    from gemini.optim.elementwise import LionRule as LionRule
    from gemini.optim.elementwise import PlainSGDRule as PlainSGDRule
    from gemini.optim.elementwise import SGDRule as SGDRule
    from gemini.optim.elementwise import SophiaGRule as SophiaGRule
    from gemini.optim.elementwise import SophiaHRule as SophiaHRule
    from gemini.optim.matrices import AdaLomoRule as AdaLomoRule
    from gemini.optim.matrices import MuonRule as MuonRule
    from gemini.optim.optimizers import LOMO as LOMO
    from gemini.optim.optimizers import SGD as SGD
    from gemini.optim.optimizers import AdaLomo as AdaLomo
    from gemini.optim.optimizers import AdamW as AdamW
    from gemini.optim.optimizers import Adan as Adan
    from gemini.optim.optimizers import Lion as Lion
    from gemini.optim.optimizers import Muon as Muon
    from gemini.optim.optimizers import muon_groups as muon_groups
    from gemini.optim.sophia import SophiaG as SophiaG
    from gemini.optim.sophia import SophiaH as SophiaH
    from gemini.rules import AdamRule as AdamRule


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gemini.optim' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
