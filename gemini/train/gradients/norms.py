"""Norms of gradients that have landed, and whether all of them are finite: of this rank's own, and of what others have
of the same model (slices of its params, stages of a pipeline).
"""

from __future__ import annotations

import math

import torch

from gemini import kernels
from gemini.errors import NonFiniteGradient
from gemini.ranks.wire import Tag, Wire
from gemini.train.params.handle import ParamHandle
from gemini.train.slices.alike import whole_totals


class GradientNorms:
    """The norms of one model's gradients, which all ranks that have a part in them ask together. ``slices``: among the
    ranks with slices of the same params. ``stages``: among those with the other stages of a pipeline. ``copies``:
    params that another stage counts. ``knows_all``: whether the norm of the whole model can be known; a model that the
    caller has cut tells no one.
    """

    def __init__(
        self, handles: list[ParamHandle], slices: Wire, stages: Wire, *, copies: list[ParamHandle], knows_all: bool
    ):
        self._handles, self._slices, self._stages, self.knows_all = handles, slices, stages, knows_all
        self._copies = copies

    @property
    def knows_only_own(self) -> bool:
        """Whether no other rank has a part in norms."""
        return self._slices.size == self._stages.size == 1

    def total_sum(self, handles: list[ParamHandle]) -> float:
        """Sum of squares over all gradients: per-param sums in tile order, params in declaration order. On CUDA the
        host waits for those it has not seen yet, once for all of them. Where params are slices, sums are those of whole
        gradients, and all ranks with the others come here. Raises GeminiError if one of them is not whole.
        """
        counted = [(handle, total) for handle, total in self._totals(handles) if handle not in self._copies]
        # In one order on all ranks and placements: a sum in another order has other bits.
        own = kernels.total([total * handle.clip**2 for handle, total in counted])
        return own if self._stages.size == 1 else kernels.total(self._of_stages(own))

    def clip_factor(self, max_norm: float) -> kernels.ClipFactor | None:
        """The factor that clipping all gradients takes, left on the device that summed them; None where the host has a
        part in it. The same order as in :meth:`total_sum`, so the same bits. GeminiError if a gradient is not whole.
        """
        there = _whole(self._handles)
        if not self.knows_only_own or not there or any(handle.clip != 1.0 for handle in there):
            return None
        return kernels.clip_factor([handle.norm_sums or [] for handle in there], max_norm)

    def _totals(self, handles: list[ParamHandle]) -> list[tuple[ParamHandle, float]]:
        """The params that have a gradient, each with its sum of squares; refused as by :func:`_whole`."""
        there = _whole(handles)
        if self._slices.size == 1:
            return list(zip(there, kernels.totals([handle.norm_sums or [] for handle in there]), strict=True))
        # Of all of them, so that ranks say equally much.
        has = [handle for handle in self._handles if handle.has_grad]
        own = dict(zip(has, kernels.totals([handle.norm_sums or [] for handle in has]), strict=True))
        totals = whole_totals(self._slices, self._handles, [own.get(handle) for handle in self._handles])
        by_handle = dict(zip(self._handles, totals, strict=True))
        return [(handle, total) for handle in there if (total := by_handle[handle]) is not None]

    def _of_stages(self, own: float) -> list[float]:
        """The values that the stages of the pipeline say, in their order."""
        said = torch.tensor(own, dtype=torch.float64, device="cpu")
        return self._stages.swap(Tag.VALUES, said, "the gradient norm of a pipeline").tolist()  # type: ignore[no-any-return]

    def check_finite(self, handles: list[ParamHandle]) -> None:
        """Refuse inf and NaN; on CUDA a wait for sums that the host has not seen yet, as in :meth:`total_sum`. Raises
        NonFiniteGradient, naming the first param; nothing was touched; GeminiError if one of them is not whole.
        """
        bad = [handle for handle, total in self._totals(handles) if not math.isfinite(total)]
        if self._stages.size > 1:
            # Before anything is raised: a rank that raised first would leave the others waiting for it.
            counts = self._of_stages(float(len(bad)))
            if any(counts) and not bad:
                rank = next(rank for rank, count in zip(self._stages.global_ranks, counts, strict=True) if count)
                raise NonFiniteGradient(
                    f"a gradient on rank {rank}, which has another stage of this pipeline, holds inf or NaN. No weight "
                    "was changed: call optimizer.zero_grad() to drop this step and go on"
                )
        if bad:
            raise NonFiniteGradient(
                f"the gradient of {bad[0].name!r} holds inf or NaN (and {len(bad) - 1} more params). No weight was "
                "changed: call optimizer.zero_grad() to drop this step and go on, or look for the cause (learning "
                "rate, data, fp16)"
            )


def _whole(handles: list[ParamHandle]) -> list[ParamHandle]:
    """The params that have a gradient. Raises GeminiError if one of these is not whole."""
    for handle in handles:
        if handle.leftover:
            handle.refuse_incomplete_gradient()
    # Not `has_grad`: this is asked for every param in every step, and a property is a call.
    return [handle for handle in handles if handle.norm_sums is not None]
