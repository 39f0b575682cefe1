"""What the kernels take: the arrays of an update, segments of them, and flat tensors in general, all checked here.

Native code gets addresses and lengths and can check nothing: whatever is wrong has to be found before it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.kernels.reference import dither_of
from gemini.planning.compact import BLOCK
from gemini.planning.planes import RuleSpec

FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
INT16 = (torch.int16,)
INT8 = (torch.int8,)
CODES = (torch.int8, torch.uint8)
RESIDUAL = (torch.int16, torch.int8)
GRAD = (torch.float32, torch.bfloat16, torch.float16)

Arg = tuple[str, Tensor, tuple[torch.dtype, ...]]
"""Name, tensor and accepted formats of an argument."""


class Where(NamedTuple):
    """Which elements an update is given: those from ``offset`` of the whole param ``name``, of ``shape``, on."""

    name: str
    offset: int
    shape: tuple[int, ...] = ()


class Arrays(NamedTuple):
    """Where the elements of an update are: flat, equally long (a plane by blocks has an item for each), on one device.

    ``weights`` and ``residual`` are a master, whole (then ``residual`` is None) or split; ``states`` has the planes of
    the rule by name, and its factors.
    """

    weights: Tensor
    residual: Tensor | None
    states: Mapping[str, Tensor]
    grad: Tensor


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of the arrays of an update, what they are updated with, and for rules that need their
    place, that.
    """

    begin: int
    end: int
    scalars: Any
    where: Where | None = None

    @property
    def dither(self) -> int:
        """Where the sequence begins by which compact states of these elements are rounded."""
        assert self.where is not None, "compact states are rounded by their place"
        return dither_of(self.where.name, self.where.offset, getattr(self.scalars, "step", 0))


def kernel_and_scalars(scalars: tuple[Any, ...]) -> tuple[str, tuple[float, ...]]:
    """The name of a rule in csrc/rules.h and the numbers of its struct, which stand before that name in ``scalars``."""
    number = next(number for number, value in enumerate(scalars) if isinstance(value, str))
    return scalars[number], scalars[:number]


def with_scale(segments: Sequence[Segment], grad_scale: Tensor | None) -> Sequence[Segment]:
    """The segments with the number in ``grad_scale``, for which the host waits, in place of that of their scalars."""
    if grad_scale is None:
        return segments
    scale = float(grad_scale)
    return [one._replace(scalars=one.scalars._replace(grad_scale=scale)) for one in segments]


class Addresses(NamedTuple):
    """Where the arrays of an update are; of compact states where codes and, else empty, scales are."""

    weights: int
    residual: int
    states: list[int]
    scales: list[int]
    grad: int


def check_update(
    arrays: Arrays, spec: RuleSpec, segments: Sequence[Segment], grad_scale: Tensor | None, stop: Tensor | None
) -> Addresses:
    """Look at all that an update is given, as the planes of its rule and its segments ask for it.

    Raises:
        ValueError: saying what was given and what is taken.
    """
    weights, residual, states, grad = arrays
    is_compact = spec.exact is not None
    accepted = CODES if is_compact else FLOAT32
    args: list[Arg] = [("weights", weights, FLOAT32 if residual is None and not is_compact else BFLOAT16)]
    args += [(plane.kind, states[plane.kind], accepted) for plane in spec.planes if plane.block == 1]
    args.append(("grad", grad, GRAD))
    if residual is not None:
        args.append(("residual", residual, INT8 if is_compact else INT16))
    addresses = check("update", args)
    of_residual = 0 if residual is None else addresses.pop()
    scales = {plane.kind: states[plane.kind] for plane in spec.planes if plane.block > 1} if is_compact else {}
    for kind, own in scales.items():
        check_small("update", kind, own, torch.uint8, weights, -(-weights.numel() // BLOCK))
    _check_segments(segments, weights.numel(), BLOCK if is_compact else 1)
    if grad_scale is not None:
        check_small("update", "grad_scale", grad_scale, torch.float32, weights)
    if stop is not None:
        check_small("update", "stop", stop, torch.int32, weights)
    return Addresses(
        addresses[0], of_residual, addresses[1:-1], [own.data_ptr() for own in scales.values()], addresses[-1]
    )


def check(op: str, args: Sequence[Arg]) -> list[int]:
    """Addresses of the tensors, which are flat, of the accepted dtypes, as long as the first, and apart in memory.

    Raises:
        ValueError: saying what was given and what is taken.
    """
    first = args[0][1]
    n, device = first.numel(), first.device
    addresses = []
    for _, tensor, accepted in args:
        if (
            tensor.dtype not in accepted
            or tensor.dim() != 1
            or tensor.numel() != n
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(_refusal(op, args))
        addresses.append(tensor.data_ptr())
    if n and len(args) > 1 and device.type != "meta":
        spans = sorted(
            [(begin, begin + n * arg[1].itemsize, arg[0]) for begin, arg in zip(addresses, args, strict=True)]
        )
        end, before = 0, ""
        for begin, stop, name in spans:
            if begin < end:
                raise ValueError(f"{op}: {before} and {name} overlap in memory; each needs its own")
            end, before = stop, name
    return addresses


def _check_segments(segments: Sequence[Segment], n: int, align: int) -> None:
    """Refuse segments that do not ascend inside ``[0, n)``, overlap, or begin where no block of ``align`` does.

    Raises:
        ValueError: naming the first of them.
    """
    end = 0
    for begin, stop, *_ in segments:
        if not end <= begin <= stop <= n:
            raise ValueError(
                f"update: segments ascend inside the {n} elements and do not overlap, and [{begin}, {stop}) was given "
                f"behind element {end}"
            )
        if begin % align:
            raise ValueError(f"update: segments begin at multiples of {align} elements, and one at {begin}")
        end = stop


def check_small(op: str, name: str, tensor: Tensor, dtype: torch.dtype, beside: Tensor, numel: int = 1) -> None:
    """Refuse a ``tensor`` that is not ``numel`` contiguous elements of ``dtype`` on the device of ``beside``.

    Raises:
        ValueError: saying what was given.
    """
    fits = (tensor.numel(), tensor.dtype, tensor.device) == (numel, dtype, beside.device)
    if not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} is {numel} contiguous {_short(dtype)} on {beside.device}, and was given as "
            f"{_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(op: str, args: Sequence[Arg]) -> str:
    lines = [f"{op} takes 1-D contiguous tensors of equal length on one device, and was given"]
    for name, tensor, accepted in args:
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        given = f"{_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}{layout}"
        lines.append(f"  {name}: {given} (accepted: {', '.join(map(_short, accepted))})")
    return "\n".join(lines)
