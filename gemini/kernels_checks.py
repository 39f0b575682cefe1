"""What the kernels take: flat tensors of the right formats, equally long, apart in memory. For gemini.kernels.

Native code gets addresses and lengths and can check nothing: whatever is wrong has to be found here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gemini.kernels_reference import CompactSegment, Segment

FLOAT32 = (torch.float32,)
BFLOAT16 = (torch.bfloat16,)
INT16 = (torch.int16,)
INT8 = (torch.int8,)
CODES = (torch.int8, torch.uint8)
RESIDUAL = (torch.int16, torch.int8)
INT32 = (torch.int32,)
GRAD = (torch.float32, torch.bfloat16, torch.float16)

Args = tuple[tuple[str, Tensor, tuple[torch.dtype, ...]], ...]
"""Name, tensor and accepted formats of each argument."""


def check(op: str, args: Args) -> list[int]:
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


def update_args(weights: Tensor, residual: Tensor | None, states: Mapping[str, Tensor], grad: Tensor) -> Args:
    """The arrays of an update; with a residual the weights are the upper halves of split masters, and it comes last."""
    args: Args = (
        ("weights", weights, FLOAT32 if residual is None else BFLOAT16),
        *((name, state, FLOAT32) for name, state in states.items()),
        ("grad", grad, GRAD),
    )
    return args if residual is None else (*args, ("residual", residual, INT16))


def check_segments(op: str, segments: Sequence[Segment | CompactSegment], n: int) -> None:
    """Raises ValueError unless they ascend inside ``[0, n)`` without overlap."""
    end = 0
    for begin, stop, *_ in segments:
        if not end <= begin <= stop <= n:
            raise ValueError(
                f"{op}: segments ascend inside the {n} elements and do not overlap, and [{begin}, {stop}) was given "
                f"behind element {end}"
            )
        end = stop


def check_scales(op: str, scales: Mapping[str, Tensor], beside: Tensor, block: int) -> list[int]:
    """The addresses of scales, one uint8 for each ``block`` elements of ``beside``.

    Raises:
        ValueError: saying what was given.
    """
    wanted = -(-beside.numel() // block)
    for name, tensor in scales.items():
        fits = (tensor.dtype, tuple(tensor.shape), tensor.device) == (torch.uint8, (wanted,), beside.device)
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {wanted} contiguous uint8 on {beside.device}, and was given as "
                f"{_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
    return [tensor.data_ptr() for tensor in scales.values()]


def check_one(op: str, name: str, tensor: Tensor | None, dtype: torch.dtype, beside: Tensor) -> None:
    """Raises ValueError unless ``tensor`` is None, or one element of ``dtype`` on the device of ``beside``."""
    if tensor is not None and (tensor.numel() != 1 or tensor.dtype != dtype or tensor.device != beside.device):
        raise ValueError(
            f"{op}: {name} is one element of {_short(dtype)} on {beside.device}, and was given as "
            f"{_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(op: str, args: Args) -> str:
    lines = [f"{op} takes 1-D contiguous tensors of equal length on one device, and was given"]
    for name, tensor, accepted in args:
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        given = f"{_short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}{layout}"
        lines.append(f"  {name}: {given} (accepted: {', '.join(map(_short, accepted))})")
    return "\n".join(lines)
