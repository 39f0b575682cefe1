"""What ranks with slices of the same params tell each other outside of the forward: norms, steps, whole values.

All of them come to each of these calls, in the same order, as they come to the sums inside the forward. A param that is
not cut has the same gradient on all of them, to the bit; what the first one says of it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gemini.errors import RankMismatch
from gemini.ranks.agree import agree
from gemini.ranks.facts import Facts
from gemini.ranks.wire import Tag, Wire
from gemini.train.params.handle import ParamHandle

_NONE = -1.0
"""In place of the sum of squares of a gradient that is not there."""


class OtherSlices:
    """The ranks with slices of the same params, as one of them sees them.

    Args:
        wire: among them.
    """

    def __init__(self, wire: Wire):
        self._wire = wire

    def totals(self, handles: Sequence[ParamHandle], own: Sequence[float | None]) -> list[float | None]:
        """Sums of squares over whole gradients, in the order of slices; the same on all ranks. None for no gradient.

        Raises:
            RankMismatch: on every rank, if one has a gradient that another has not.
        """
        said = torch.tensor([_NONE if total is None else total for total in own], dtype=torch.float64, device="cpu")
        rows = self._wire.swap(Tag.VALUES, said, "the gradient norm of slices").T.tolist()
        totals: list[float | None] = []
        for handle, row in zip(handles, rows, strict=True):
            missing = [total == _NONE for total in row]
            if any(missing) and not all(missing):
                ranks = [[self._wire.global_ranks[i] for i, gone in enumerate(missing) if gone is which]
                         for which in (False, True)]  # fmt: skip
                raise RankMismatch(
                    f"{handle.name!r} has a gradient on ranks {ranks[0]} and none on ranks {ranks[1]}, which have "
                    "other slices of the model (tp, ep): all of them must run the same forward and backward. No weight "
                    "was changed"
                )
            is_sum = handle.cut is not None or not all(map(math.isfinite, row))
            totals.append(None if all(missing) else sum(row) if is_sum else row[0])
        return totals

    def compare(self, facts: Facts) -> None:
        """Ranks with slices of the same params are about to make a step of these facts.

        Raises:
            RankMismatch: on every rank, naming the first fact that differs; no weight was changed.
        """
        agree(self._wire, "optimizer.step()", lambda: facts, words="slices")

    def join(self, handle: ParamHandle, own: torch.Tensor) -> torch.Tensor:
        """The whole value of a param, of which ``own`` (in its shape, on the CPU) is this rank's slice."""
        assert handle.cut is not None
        return handle.cut.join(list(self._wire.swap(Tag.BY_NAME, own.contiguous(), f"reading {handle.name}")))
