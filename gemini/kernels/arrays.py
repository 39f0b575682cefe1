"""What the kernels take, checked here: native code gets addresses and lengths and can check nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.kernels.reference import dither_of
from gemini.planning.planes import RuleSpec
from gemini.planning.rules import BLOCK

FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
CODES = (torch.int8, torch.uint8)
RESIDUAL = (torch.int16, torch.int8)
GRAD = (torch.float32, torch.bfloat16, torch.float16)

Arg = tuple[str, Tensor, tuple[torch.dtype, ...]]  # name, tensor and accepted formats of an argument


class Where(NamedTuple):
    """Which elements an update is given: those from ``offset`` of the whole param ``name``, of ``shape``, on."""

    name: str
    offset: int
    shape: tuple[int, ...] = ()


class Arrays(NamedTuple):
    """The elements of an update: flat, equally long (a plane by blocks has an item for each), on one device.
    ``weights`` and ``residual`` are a master, whole (then ``residual`` is None) or split; ``states``: planes, factors.
    """

    weights: Tensor
    residual: Tensor | None
    states: Mapping[str, Tensor]
    grad: Tensor


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of the arrays of an update, what they are updated with, and where that matters."""

    begin: int
    end: int
    scalars: Any
    where: Where | None = None

    @property
    def dither(self) -> int:
        """The beginning of the sequence by which compact states of these elements are rounded."""
        assert self.where is not None, "compact states are rounded by their place"
        return dither_of(self.where.name, self.where.offset, self.scalars.step)


def kernel_and_scalars(scalars: tuple[Any, ...]) -> tuple[str, tuple[float, ...]]:
    """The name of a rule in csrc/rules.h and the numbers of its struct, which stand before that name in ``scalars``."""
    number = next(number for number, value in enumerate(scalars) if isinstance(value, str))
    return scalars[number], scalars[:number]


def with_scale(segments: Sequence[Segment], grad_scale: Tensor) -> Sequence[Segment]:
    """The segments with the number in ``grad_scale``, for which the host waits, in place of that of their scalars."""
    scale = float(grad_scale)
    return [one._replace(scalars=one.scalars._replace(grad_scale=scale)) for one in segments]


class Addresses(NamedTuple):
    """The addresses of the arrays of an update; of compact states those of codes and, else empty, of scales."""

    weights: int
    residual: int
    states: list[int]
    scales: list[int]
    grad: int


def check_update(
    arrays: Arrays, spec: RuleSpec, segments: Sequence[Segment], grad_scale: Tensor | None, stop: Tensor | None
) -> Addresses:
    """Look at all that an update is given. Raises ValueError, saying what was given and what is taken."""
    weights, residual, states, grad = arrays
    is_compact, n = spec.exact is not None, weights.numel()
    block = BLOCK if is_compact else 1
    args: list[Arg] = [("weights", weights, FLOAT32 if residual is None and not is_compact else BFLOAT16)]
    args += [(p.kind, states[p.kind], CODES if is_compact else FLOAT32) for p in spec.planes if p.block == 1]
    args.append(("grad", grad, GRAD))
    if residual is not None:
        args.append(("residual", residual, (torch.int8 if is_compact else torch.int16,)))
    addresses = check("update", args)
    of_residual = 0 if residual is None else addresses.pop()
    of_blocks = [plane.kind for plane in spec.planes if is_compact and plane.block > 1]
    of_scales = [(kind, states[kind], (torch.uint8,)) for kind in of_blocks]
    scales = check("update", of_scales, -(-n // BLOCK), weights.device)
    end = 0
    for begin, stop_at, *_ in segments:
        if not end <= begin <= stop_at <= n or begin % block:
            raise ValueError(
                f"update: segments ascend inside the {n} elements and begin at multiples of {block}; "
                f"[{begin}, {stop_at}) was given behind element {end}"
            )
        end = stop_at
    if grad_scale is not None:
        check("update", [("grad_scale", grad_scale, FLOAT32)], 1, weights.device)
    if stop is not None:
        check("update", [("stop", stop, (torch.int32,))], 1, weights.device)
    return Addresses(addresses[0], of_residual, addresses[1:-1], scales, addresses[-1])


def check(op: str, args: Sequence[Arg], numel: int | None = None, device: torch.device | None = None) -> list[int]:
    """Addresses of flat tensors of accepted dtypes, on one device and of one length (``numel``); else ValueError."""
    n = args[0][1].numel() if numel is None else numel
    device = args[0][1].device if device is None else device
    addresses = []
    for name, tensor, accepted in args:  # every gradient of every step comes through here
        if (
            tensor.dtype not in accepted
            or tensor.dim() != 1
            or tensor.numel() != n
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            layout = "" if tensor.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"{op}: {name}: {_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}{layout} "
                f"(accepted: {', '.join(map(_short, accepted))}; 1-D, contiguous, {n} elements on {device})"
            )
        addresses.append(tensor.data_ptr())
    return addresses


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
