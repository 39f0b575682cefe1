"""Whether two sides of a program saw the same, bit for bit, and what is the first that differs."""

from typing import Any

import torch


def same_bits(a: Any, b: Any) -> bool:
    """Equal in dtype, shape and every bit; NaN equals NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return True
    if not a.is_floating_point():
        return False
    whole = a.isnan() & b.isnan()
    return torch.equal(a[~whole].view(torch.uint8), b[~whole].view(torch.uint8)) and bool(whole.any())


def first_difference(plain: list[tuple[str, Any]], managed: list[tuple[str, Any]]) -> str | None:
    """What the managed side saw otherwise, in one line; None if all it saw is right (it may have seen less)."""
    for (label, wanted), (other, found) in zip(plain, managed, strict=False):
        if label != other:
            return f"saw {other!r} where the plain loop saw {label!r}"
        if not same_bits(wanted, found):
            return f"{label}: {_difference(wanted, found)}"
    return f"saw {managed[len(plain)][0]!r} after the end" if len(managed) > len(plain) else None


def _difference(wanted: Any, found: Any) -> str:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return f"{_told(found)} instead of {_told(wanted)}"
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        return f"{found.dtype} {tuple(found.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    a, b = wanted.double(), found.double()
    return f"norm {float(b.norm()):.6g} instead of {float(a.norm()):.6g}, off by {float((a - b).abs().max()):.3g}"


def _told(value: Any) -> str:
    return f"a tensor of norm {float(value.double().norm()):.6g}" if isinstance(value, torch.Tensor) else repr(value)
