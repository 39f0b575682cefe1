"""What does not go with a model in slices, said before anything of it changes."""

from __future__ import annotations

from gemini.config import GeminiConfig
from gemini.planning.plan import Plan
from gemini.planning.planes import RuleSpec
from gemini.planning.trace import Source
from gemini.ranks.group import Ranks


def refuse_unsuited(config: GeminiConfig, rule: RuleSpec, ranks: Ranks, *, in_stages: bool) -> None:
    """Refuse settings under which slices would not compute what the whole model does. ``in_stages``: the model is that
    of a :class:`gemini.Pipeline` over ranks.

    Raises:
        ValueError: naming the remedy.
    """
    dim = "tp" if ranks.experts is None else "ep"
    if config.gradients == "transient" and ranks.experts is None:
        raise ValueError(
            'gradients="transient" updates inside backward, when a slice of a model (tp) can only check its own '
            'part of each gradient for inf and NaN: use gradients="retain" or "accumulate"'
        )
    if rule.whole:
        raise ValueError(
            f"the optimizer {rule.name} looks at whole params, and a mesh with {dim} leaves slices of them on a rank: "
            f"use one that works element by element (AdamW, Lion, SGD, Adan, Sophia), or dp in place of {dim}"
        )
    if isinstance(config.tile_tokens, int) or (config.tile_tokens is not None and ranks.experts is not None):
        raise ValueError(
            f"tile_tokens={config.tile_tokens!r} with a model in slices ({dim}): layers that communicate with other "
            "ranks cannot be computed in tiles. Leave tile_tokens out"
        )
    trace = config.placement.trace if isinstance(config.placement, Plan) else config.trace
    if ranks.experts is not None and trace is not None and trace.source is Source.AHEAD:
        raise ValueError(
            "a trace (or plan) made with gemini.trace includes all experts, but with ep each rank has only some of "
            "them. Leave it out (trace=, placement=)"
        )
    if ranks.stages is not None and not in_stages:
        raise ValueError(
            "a mesh with pp and tp: GeminiDDP cuts matrices (tp), and gemini.Pipeline makes stages (pp) as well. Give "
            "the whole model to that, or use dp in place of pp"
        )
