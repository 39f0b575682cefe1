"""Sums of squares of gradients as the kernels return them: numbers, or on a CUDA device until somebody asks for them.

There is one sum per norm tile, in order. What a CUDA kernel sums up is not there yet when its call returns, so one
:class:`DeviceSums` stands in the list for all its tiles. ``resolve`` brings those of any number of lists to the host in
one copy, and that is the one place where the host waits. Tiles are added up on the host, in their order, whoever
summed them: the bits are those of the CPU kernels. For gemini.kernels, whose face this is a part of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from gemini.kernels.reference import total

Fetch = Callable[[Sequence[Tensor]], list[float]]


class DeviceSums:
    """The sums of some tiles, which stand on a device or will when it comes to that, until :func:`resolve` brings them.

    Args:
        tiles: fp64, a sum per tile; freed when the numbers are here.
        stream: on which they are computed; None if the device has only one.
        fetch: copies such tensors of the device, one after the other, to the host, behind everything on its stream.
    """

    __slots__ = ("_fetch", "_found", "_stream", "_tiles")

    def __init__(self, tiles: Tensor, stream: torch.cuda.Stream | None, fetch: Fetch):
        self._tiles: Tensor | None = tiles
        self._stream, self._fetch = stream, fetch
        self._found: list[float] = []

    @property
    def is_here(self) -> bool:
        """Whether the numbers are on the host."""
        return self._tiles is None

    @property
    def device(self) -> torch.device:
        """Where they are, before they are here."""
        assert self._tiles is not None
        return self._tiles.device

    def on_device(self) -> Tensor:
        """The tiles, for what the current stream is given from now on."""
        assert self._tiles is not None, "brought to the host and freed"
        if self._stream is not None:
            current = torch.cuda.current_stream(self._tiles.device)
            if current != self._stream:
                current.wait_stream(self._stream)
        return self._tiles

    def note_over(self) -> None:
        """The kernel that makes them is over: who asks for them waits for nothing that its stream was given since."""
        self._stream = None


Sums = list["float | DeviceSums"]
"""Sums of squares of norm tiles, in order; what is on a device counts for all its tiles."""


def resolve(many: Sequence[Sums]) -> list[list[float]]:
    """The numbers of all of them; what was resolved once is known.

    For sums that are on a device the host waits, once, until it has done what it was given up to here. Those of CPU
    kernels are returned as they are.
    """
    if DeviceSums not in {type(part) for sums in many for part in sums}:  # as those of every kernel on the CPU
        return cast(list[list[float]], list(many))
    by_device: dict[torch.device, list[DeviceSums]] = {}
    for sums in _unresolved(many):
        by_device.setdefault(sums.device, []).append(sums)
    for several in by_device.values():
        tiles = [sums.on_device() for sums in several]
        values = iter(several[0]._fetch(tiles))
        for sums, own in zip(several, tiles, strict=True):
            sums._found = list(islice(values, own.numel()))
            sums._tiles = sums._stream = None
    return [
        [number for part in sums for number in (part._found if isinstance(part, DeviceSums) else (part,))]
        for sums in many
    ]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by; 1 for one that is not finite."""
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


class ClipFactor:
    """Clipping whose numbers are where the sums of squares are: nobody has waited for them.

    Args:
        sums: by gradient; kept, so that the host can find the same.

    Attributes:
        norm: fp64, of all gradients.
        factor: fp32, ``clip_coefficient`` of it.
        nonfinite: int32: not 0 if the norm is not finite. One element each.
    """

    def __init__(self, sums: Sequence[Sums], max_norm: float, norm: Tensor, factor: Tensor, nonfinite: Tensor):
        self.norm, self.factor, self.nonfinite = norm, factor, nonfinite
        self._sums, self._max_norm = sums, max_norm

    def coefficient(self) -> float:
        """The factor before it was rounded, found by the host, which waits for sums that it has not seen yet."""
        return clip_coefficient(math.sqrt(total([total(sums) for sums in resolve(self._sums)])), self._max_norm)

    def is_of(self, many: Sequence[Sums]) -> bool:
        """Whether these are its gradients' sums, all of them."""
        return [id(sums) for sums in self._sums] == [id(sums) for sums in many]


def nonfinite_flag(many: Sequence[Sums]) -> Tensor | None:
    """A flag (int32, one element: not 0 if some sum is not finite) where the sums are, computed there without a wait.

    None if all of them are numbers already: then it is for the host to look.
    """
    unresolved = _unresolved(many)
    if not unresolved:
        return None
    known = [[part for part in sums if not isinstance(part, DeviceSums) or part.is_here] for sums in many]
    tiles = torch.cat([sums.on_device() for sums in unresolved])
    flag = tiles.isfinite().all().logical_not().to(torch.int32).view(1)
    return flag if all(math.isfinite(total(numbers)) for numbers in resolve(known)) else flag.fill_(1)


def _unresolved(many: Iterable[Sums]) -> list[DeviceSums]:
    """Each once, in order."""
    found = {id(part): part for sums in many for part in sums if isinstance(part, DeviceSums) and not part.is_here}
    return list(found.values())
