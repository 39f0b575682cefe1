"""Operations whose fake version in torch refuses what the real one takes."""

from __future__ import annotations

from typing import Any

import torch

_grouped_mm = getattr(torch.ops.aten, "_grouped_mm", None)


def run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on fake tensors."""
    if _grouped_mm is not None and func is _grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_mm_of_any_dtype(func, args, kwargs)
    return func(*args, **kwargs)


def _grouped_mm_of_any_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The shape check in torch knows bf16 only; CPUs, and CUDA since torch 2.10, take fp32 and fp16 as well."""
    first, second, *rest = args
    dtype = kwargs.pop("out_dtype", None) or first.dtype
    out = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **kwargs)
    return out.to(dtype)
