"""What a step takes on the machine it is meant for that a run on fake CPU tensors does not show, item by item.

The CPU needs no corrections: what its kernels allocate inside is left out (packing buffers of bf16 products in oneDNN,
up to 2 MiB per thread, and the generator's state of 5 KB that checkpointing keeps per block).

CUDA, from its sources and not measured on a GPU:

1. Attention. ``scaled_dot_product_attention`` on a CPU has a fused kernel without dropout only, and none for a mask
   that needs a gradient; where it has none it makes S x S scores. CUDA has kernels for all of these, so the step is run
   with the operations that CUDA would choose (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): flash
   attention for half precision without a mask, memory-efficient attention for masks and fp32, scores only where
   neither applies.
2. Their workspaces. The backward of flash attention adds up dQ in fp32 over rows in blocks of 128 and columns in
   multiples of 32, keeps one fp32 number per row, and with grouped heads dK and dV for every query head
   (``flash_attn/flash_api.cpp``, ``mha_bwd``). That of memory-efficient attention keeps one fp32 number per row and in
   half precision adds up dK and dV in fp32 (``attention_backward.cu``).
3. Dropout is one fused kernel that keeps a mask of one byte per element; the CPU keeps a factor of the tensor's dtype.
4. cuBLAS: one workspace per thread and stream for the life of the process, of 8,320 KiB, or 32 MiB on Hopper and
   newer (``CUBLAS_WORKSPACE_CONFIG``, ``aten/src/ATen/cuda/CublasHandlePool.cpp``). Forward runs on the caller's
   thread and backward on autograd's, so there are two. The larger size is counted.
5. The caching allocator rounds sizes up to 512 bytes (``c10/cuda/CUDACachingAllocator.cpp``). What it keeps in reserve
   and loses to fragmentation is not in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from gemini.patches import replaced

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes of one cuBLAS workspace on Hopper and newer; 8,320 KiB on other GPUs."""

CUDA_ROUND = 512
"""Bytes that the caching allocator rounds up to."""


_CODED = "bitsandbytes::gemm_4bit"


def is_coded_product(packet: Any) -> bool:
    """Whether an operation is a product with 4-bit codes. By name: the library need not be installed."""
    return getattr(packet, "_qualified_op_name", "") == _CODED


class Target:
    """The CPU: an allocation is as large as its tensor, operations are those of a CPU."""

    name = "cpu"

    def allocated_bytes(self, num_bytes: int) -> int:
        """What the allocator takes for a storage."""
        return num_bytes

    def temporary_bytes(self, func: Any, args: Any) -> int:
        """What the kernel of one operation allocates and frees again before it returns.

        A product with 4-bit codes makes the weight in the dtype of its input first (bitsandbytes 0.50,
        ``backends/default/ops.py``; on CUDA from some hundred rows on, ``backends/cuda/ops.py``), and their fp32 scales
        where these are quantized again.
        """
        if is_coded_product(getattr(func, "_overloadpacket", None)):
            numel = args[2][0] * args[2][1]
            return numel * args[0].itemsize + 4 * -(-numel // args[4])
        return 0

    def standing_bytes(self) -> int:
        """What the first matrix product of a phase allocates for good."""
        return 0

    @contextmanager
    def operations(self) -> Iterator[None]:
        """Inside, fake CPU tensors take the operations of the target."""
        yield


class Cuda(Target):
    """A CUDA device."""

    name = "cuda"

    def allocated_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // CUDA_ROUND) * CUDA_ROUND

    def temporary_bytes(self, func: Any, args: Any) -> int:
        packet = getattr(func, "_overloadpacket", None)
        if packet is _aten._scaled_dot_product_flash_attention_backward:
            return _flash_backward_bytes(args[1], args[2])
        if packet is _aten._scaled_dot_product_efficient_attention_backward:
            return _efficient_backward_bytes(args[1], args[2])
        return super().temporary_bytes(func, args)

    def standing_bytes(self) -> int:
        return CUBLAS_WORKSPACE

    @contextmanager
    def operations(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(replaced(functional, "scaled_dot_product_attention", _attention))
            stack.enter_context(replaced(functional, "dropout", _dropout))
            yield


TARGETS: dict[str, type[Target]] = {"cpu": Target, "cuda": Cuda}


def make_target(name: str | None) -> Target:
    """By name; by default "cuda" if there is one.

    Raises:
        ValueError: for another name.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]()


def _flash_backward_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    batch, heads, rows, width = query.shape
    rows, columns = _up(rows, 128), _up(width, 32) if width <= 192 else 256
    sums = 4 * batch * heads * rows * (columns + 1)
    if key.shape[1] != heads:
        sums += 2 * batch * heads * key.shape[2] * _up(width, 8) * query.itemsize
    return sums


def _efficient_backward_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    batch, heads, rows, _ = query.shape
    per_row = 4 * batch * heads * _up(rows, 32)
    return per_row + (2 * 4 * key.numel() if query.dtype in _HALF else 0)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` with the kernels of CUDA, in the order in which torch tries them."""
    width = query.shape[-1]
    fits = query.dim() == 4 and key.shape[-1] == value.shape[-1] == width
    scale = width**-0.5 if scale is None else scale
    gap = -width % 8
    if fits and query.dtype in _HALF and attn_mask is None and width <= 256:
        query, key, value = (functional.pad(t, (0, gap)) if gap else t for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if gap else out
    grouped = key.shape[1] != query.shape[1] if fits else enable_gqa
    if fits and not grouped and query.dtype is not torch.float64 and not gap:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        keeps = torch.is_grad_enabled()
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as memory-efficient attention takes it: numbers, in rows that start at multiples of 16 elements."""
    if mask.dtype is torch.bool:
        numbers = torch.full(mask.shape, float("-inf"), dtype=query.dtype)
        mask = numbers.masked_fill_(mask, 0.0)
    columns = mask.shape[-1]
    if columns % 16 and columns > 1:
        mask = functional.pad(mask, (0, -columns % 16))[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


_plain_dropout = functional.dropout


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or inplace or not 0 < p < 1:
        return _plain_dropout(input, p, training, inplace)
    return _aten.native_dropout(input, p, True)[0]


def _up(number: int, to: int) -> int:
    return -(-number // to) * to
