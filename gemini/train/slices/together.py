"""What ranks with slices of the same params tell each other outside of the forward: norms, what a step is, whole values.

All of them come to each of these calls, in the same order, as they come to the sums inside the forward. A param that is
not cut has the same gradient on all of them, to the bit; what the first one says of it counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from gemini.errors import RankMismatch
from gemini.ranks.facts import Facts, first_difference
from gemini.ranks.waiting import WaitingGroup
from gemini.ranks.wire import Tag, Wire
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle

_NONE = -1.0
"""In place of the sum of squares of a gradient that is not there."""


class SliceTotals:
    """Gradient norms of whole params, out of those of slices.

    Args:
        wire: among the ranks with slices of the same params.
    """

    def __init__(self, wire: Wire):
        self._wire = wire

    def of(self, handles: Sequence[ParamHandle], own: Sequence[float | None]) -> list[float | None]:
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
                    f"{handle.name!r} has a gradient on ranks {ranks[0]} and none on ranks {ranks[1]}, which have other "
                    "slices of it (tp): all of them must run the same forward and backward. No weight was changed"
                )
            is_sum = handle.cut is not None or not all(map(math.isfinite, row))
            totals.append(None if all(missing) else sum(row) if is_sum else row[0])
        return totals

    def compare(self, facts: Facts, handles: Sequence[ParamHandle]) -> None:
        """Ranks with slices of the same params are about to make a step of these facts.

        Raises:
            RankMismatch: on every rank, naming the first fact that differs; no weight was changed.
        """
        doing = "optimizer.step()"
        sums = self._wire.swap(Tag.VALUES, torch.tensor([facts.checksum], device="cpu"), doing).view(-1).tolist()
        if len(set(sums)) == 1:
            return
        heard = [json.loads(text) for text in self._wire.exchange_texts(facts.to_json(), doing)]
        names = [handle.name for handle in handles]
        for rank, other in zip(self._wire.global_ranks, heard, strict=True):
            found = first_difference(heard[0], other, names)
            if found is not None:
                what, first, second = found
                raise RankMismatch(
                    f"{doing}: ranks with slices of one model disagree about {what}: {first} on rank "
                    f"{self._wire.global_ranks[0]}, {second} on rank {rank}. No weight was changed. What is done on "
                    "one rank must be done on all of them, with the same values"
                )
        raise RankMismatch(f"{doing}: ranks with slices of one model disagree. No weight was changed")


class WholeParams:
    """Params by name as they are without slices. Reading one takes all ranks of the wire; each writes its own slice.

    It stands in for :class:`ByName` where a model is filled, saved and shown.

    Args:
        wire: among the ranks with slices of the same params.
        job: among all ranks of the mesh.
    """

    def __init__(self, by_names: ByName, wire: Wire, job: Wire):
        self._by_names, self.wire, self.job = by_names, wire, job
        self.waiting = WaitingGroup(job.global_ranks)
        self.handles, self.compute = by_names.handles, by_names.compute

    def __getitem__(self, name: str) -> ParamHandle:
        return self._by_names[name]

    def read(self, handle: ParamHandle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As :meth:`ByName.read`."""
        return self.joined(handle, self._by_names.read(handle, dtype))

    def write(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """As :meth:`ByName.write`, of a whole value.

        Raises:
            ValueError: if the shape is not that of the whole param.
        """
        if value.shape != handle.whole_shape:
            raise ValueError(f"{handle.name!r} has shape {handle.whole_shape}, was given {tuple(value.shape)}")
        self._by_names.write(handle, value if handle.cut is None else handle.cut.of(value))

    def joined(self, handle: ParamHandle, own: torch.Tensor) -> torch.Tensor:
        """The whole value of which ``own``, in the param's shape, is this rank's slice."""
        if handle.cut is None:
            return own
        own = own.contiguous()
        rows = self.wire.swap(Tag.BY_NAME, own, f"reading {handle.name}")
        return handle.cut.join(list(rows))


Homes = ByName | WholeParams
"""Where values of whole params are read and written."""
