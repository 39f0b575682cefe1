"""What does not go with a model in slices, said before anything of it changes."""

from __future__ import annotations

from gemini.config import GeminiConfig
from gemini.planning.planes import RuleSpec
from gemini.ranks.group import Ranks


def refuse_unsuited(config: GeminiConfig, rule: RuleSpec, ranks: Ranks, *, in_stages: bool) -> None:
    """Refuse settings under which slices would not compute what the whole model does. ``in_stages``: the model is that
    of a :class:`gemini.Pipeline` over ranks.

    Raises:
        ValueError: naming the remedy.
    """
    if config.gradients == "transient":
        raise ValueError(
            'gradients="transient" updates inside backward, when a slice of a model (tp) knows of its own part of each '
            'gradient only whether it is finite: use gradients="retain" or "accumulate"'
        )
    if rule.whole:
        raise ValueError(
            f"the optimizer {rule.name} looks at whole params, and tensor parallel leaves a slice of each on a rank: "
            "use one that works element by element (AdamW, Lion, SGD, Adan, Sophia), or dp in place of tp"
        )
    if isinstance(config.tile_tokens, int):
        raise ValueError(
            f"tile_tokens={config.tile_tokens} with a model in slices (tp): its layers meet in sums over ranks, which "
            "are not computed in tiles. Leave tile_tokens out"
        )
    if ranks.stages is not None and not in_stages:
        raise ValueError(
            "a mesh with pp and tp: GeminiDDP cuts matrices (tp), and gemini.Pipeline makes stages (pp) as well. Give "
            "the whole model to that, or use dp in place of pp"
        )
