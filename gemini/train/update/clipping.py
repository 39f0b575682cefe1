"""Clipping by the norm: of all gradients, or of those of one of several optimizers.

Nothing is scaled here. A coefficient is noted, for the whole model or beside each of the params, and the update applies
it as it reads the gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError
from gemini.train.params.guard import ParamHandle

if TYPE_CHECKING:
    from gemini.train.engine import Engine


def clip_grad_norm(
    engine: Engine, max_norm: float, handles: list[ParamHandle] | None, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Total 2-norm of the gradients of ``handles`` (None: of all), unscaled, as it was before.

    On CUDA this is where the host waits for the sums of squares, once; ``optimizer.step()`` then knows them already.

    Raises:
        GeminiError: for transient gradients, which are gone when the norm is known.
        NonFiniteGradient: with ``error_if_nonfinite``.
    """
    engine.recover_if_interrupted()
    if engine.config.gradients == "transient":
        raise GeminiError(
            'clipping needs every gradient before the first update: gradients="transient" cannot be clipped. '
            'Use GeminiConfig(gradients="retain")'
        )
    if engine.state.updated_in_backward:
        raise GeminiError(
            "clipping needs every gradient before the first update, and HybridAdam(step_in_backward=True) has used "
            "them: leave step_in_backward out"
        )
    engine.sync_grads()
    if engine.reduction is not None and max_norm != math.inf:  # without a limit, one rank may look at it alone
        engine.reduction.clippings.append(_called(float(max_norm), handles))
    chosen = engine.handles if handles is None else handles
    left = engine.scaling.left_scaled(chosen)
    used = [handle for handle in chosen if handle not in left] if left else chosen
    total = math.sqrt(engine.gradients.total_sum(used)) * engine.scaling.unscale_seen(chosen)
    if left:
        total = math.hypot(total, math.sqrt(engine.gradients.total_sum(left)))
    total *= engine.state.clip_coefficient
    if error_if_nonfinite:
        engine.gradients.check_finite(chosen)
    if math.isfinite(total):
        coefficient = min(1.0, float(max_norm) / (total + 1e-6))
        if handles is None:
            engine.state.clip(coefficient)
        else:
            engine.gradients.clip(handles, coefficient)
            engine.state.note_clipping()
    return torch.tensor(total, dtype=torch.float32, device="cpu")


def _called(max_norm: float, handles: list[ParamHandle] | None) -> str:
    """What the ranks compare, and the error says."""
    if handles is None:
        return f"max_norm {max_norm!r}"
    names = sorted(handle.name for handle in handles)
    others = f"and {len(names) - 1} more" if len(names) > 1 else "alone"
    return f"max_norm {max_norm!r} of {names[0]!r} {others}" if names else f"max_norm {max_norm!r} of no param"
