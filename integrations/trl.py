"""TRL's trainers with the model managed by Gemini, ready made: ``GeminiSFTTrainer``, ``GeminiDPOTrainer``, ...

    from gemini.integrations.trl import GeminiDPOTrainer as DPOTrainer

Each takes ``gemini_config=`` besides its own arguments, as :class:`~gemini.integrations.huggingface.GeminiTrainerMixin`
says; put that mixin before any other trainer. A class is made, and its trainer imported, when it is first asked for.
"""

from __future__ import annotations

from typing import Any

try:
    import trl
except ImportError as e:
    raise ImportError(
        f"gemini.integrations.trl needs trl 1.0 or newer ({e}), the extra 'train' of Gemini: pip install 'trl>=1.0'",
        name="trl",
    ) from e

from .huggingface import GeminiTrainerMixin

__all__ = [f"Gemini{kind}Trainer" for kind in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")]


def __getattr__(name: str) -> type[Any]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(__all__)}")
    stock = getattr(trl, name.removeprefix("Gemini"))
    about = f"``trl.{stock.__name__}`` with the model managed by Gemini: takes ``gemini_config=`` besides its arguments."
    ready = type(name, (GeminiTrainerMixin, stock), {"__doc__": about, "__module__": __name__})
    return globals().setdefault(name, ready)
