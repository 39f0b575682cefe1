"""Counts what operations do: bytes they leave in memory, bytes they read and write, floating point operations.

A dispatch mode sees every operation below autograd, forward and backward alike, on fake tensors and on real ones.
Memory is counted in storages: one is there from the operation that makes it until nothing refers to it, however many
views it has. Weights, their gradients once complete, and buffers are no part of it.

Floating point operations are those of torch's own formulas (``torch.utils.flop_counter``: a multiplication and an
addition count as two; attention counts its products in full, whether or not the mask is causal), which has none for the
CPU's fused attention nor for grouped products.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gemini.patches import original, replaced_for_thread
from gemini.planning.layout import page_up
from gemini.planning.trace import AttentionWork, Product

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_DEVICE = torch.ops.prim.device.default
_NO_WORK = {
    torch.ops.prim.device.default,
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.lift_fresh.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten._local_scalar_dense.default,
    _aten.is_same_size.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.equal.default,
    _aten.resize_.default,
}


@dataclass
class Counts:
    """Counts of the operations between two calls of :meth:`Meter.take`."""

    flops: int = 0
    touched: int = 0
    """Bytes that they read and wrote."""
    num_ops: int = 0
    read: set[int] = field(default_factory=set)
    """Indices of the params that they read or wrote."""
    products: Counter[Product] = field(default_factory=Counter)
    """How often products of each shape and dtype ran."""
    attention: AttentionWork = AttentionWork()
    """Of the fused attention."""


class Meter(TorchDispatchMode):
    """Running totals; whoever cuts the step into moments reads ``live`` (bytes of counted storages that are there now)
    and takes ``peak``, the most of them since the last :meth:`take` with temporaries within operations, and ``counts``.
    ``begin_work`` is called before each operation that does work, and may cut there.
    """

    def __init__(self, target: Target, run: Callable[[Any, Any, Any], Any] | None = None):
        """``run`` runs an operation, if it is not simply called."""
        super().__init__()
        self._target = target
        self._run = run
        self.begin_work: Callable[[], None] = lambda: None
        self._sizes: dict[int, int] = {}
        self._guards: dict[int, weakref.ref[Any]] = {}
        self._param_of: dict[int, list[tuple[int, int, int]]] = {}  # by storage: first and last element, index
        self._left_out: set[int] = set()
        self._kinds: dict[Any, bool] = {}
        self._paused = 0
        self._resting = True
        self.live = self.peak = 0
        self.counts = Counts()

    # ---- what is not counted -----------------------------------------------------------------------------------------

    def know_param(self, index: int, param: torch.Tensor) -> None:
        """Know a param: what reads its storage reads it; it is no memory beside the model."""
        key = param.untyped_storage()._cdata
        start = int(param.storage_offset())
        self._param_of.setdefault(key, []).append((start, start + int(param.numel()), index))
        self._left_out.add(key)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """These (buffers) are counted elsewhere."""
        self._left_out.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def gone(self, tensor: torch.Tensor) -> None:
        """This tensor's storage is counted no longer: it has become somebody else's (a gradient in its place)."""
        for storage in (own.untyped_storage() for own in dense([tensor])):
            key = storage._cdata
            self._forget(key)
            self._left_out.add(key)
            self._guards[key] = weakref.ref(storage, lambda _, key=key: self._left_out.discard(key))  # type: ignore[misc]

    def is_param(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a param, or a view of one."""
        return tensor.untyped_storage()._cdata in self._param_of

    def rest(self) -> None:
        """The step is over: what is done until :meth:`reset` is not counted."""
        self._resting = True

    def reset(self) -> None:
        """A step begins, with nothing counted."""
        self._resting = False
        self._sizes.clear()
        self._guards.clear()
        self.live = self.peak = 0
        self.take()

    def arrived(self, tensor: torch.Tensor) -> None:
        """This tensor was made elsewhere (the batch) and is counted from now on."""
        for own in dense([tensor]):
            self._count(own)
        self.peak = max(self.peak, self.live)

    def leave_stack(self) -> None:
        """End counting: as a mode if it is the innermost one, else by looking away."""
        self._paused += 1
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not the model's."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def take(self) -> tuple[int, Counts]:
        """The peak, and what was counted since the last call; it starts again."""
        taken = self.peak, self.counts
        self.peak, self.counts = self.live, Counts()
        return taken

    # ---- counting ----------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against that costs as much as the counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others (torchao's): what it does with those is seen one by one
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self._paused or self._resting:
            return func(*args, **kwargs)
        works = self._kinds.get(func)
        if works is None:
            works = self._kinds[func] = not (getattr(func, "is_view", False) or func in _NO_WORK)
        if works:
            self.begin_work()
        out = func(*args, **kwargs) if self._run is None else self._run(func, args, kwargs)
        results = dense(tensors_in(out))
        for tensor in results:
            self._count(tensor)
        if works:
            self._work(func, args, kwargs, out, results)
        if self.live > self.peak:
            self.peak = self.live
        return out

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[torch.Tensor]) -> None:
        counts, touched = self.counts, 0
        for tensor in dense(tensors_in(args) + tensors_in(list(kwargs.values()))):
            storage = tensor.untyped_storage()
            params = self._param_of.get(storage._cdata)
            if params is not None:
                at = tensor.storage_offset()
                counts.read.update(index for start, stop, index in params if len(params) == 1 or start <= at < stop)
            touched += min(tensor.numel() * tensor.itemsize, storage.nbytes())
        counts.touched += touched + sum(tensor.numel() * tensor.itemsize for tensor in results)
        counts.num_ops += 1
        flops = flops_of(func, args, kwargs, out)
        if flops:
            counts.flops += flops
            shape = product_of(func, args)
            if shape is not None:
                in_float8 = any(tensor.dtype in _FLOAT8 for tensor in tensors_in(args))
                counts.products[Product(*shape, dtype="float8" if in_float8 else "")] += 1
            else:
                counts.attention += attention_of(func, args, kwargs, flops)
        temporary = self._target.temporary_bytes(func, args)
        if temporary and self.live + temporary > self.peak:
            self.peak = self.live + temporary

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._left_out:
            return
        size = self._target.allocated_bytes(storage.nbytes())
        known = self._sizes.get(key)
        if known is None:
            self._guards[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
            known = 0
        if size != known:  # new, or resized
            self._sizes[key] = size
            self.live += size - known

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._guards.pop(key, None)


def dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that lie in a storage. Of others, such as sparse matrices, the parts are counted as they are made."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or results of an operation, which nest lists only."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    if isinstance(tree, (tuple, list)):
        for value in tree:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list)):
                found += tensors_in(value)
    return found


# ---- formulas --------------------------------------------------------------------------------------------------------


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of one call of ``func``; 0 for what is no product, convolution or attention."""
    shape = product_of(func, args)
    if shape is not None:
        return 2 * math.prod(shape)
    packet: Any = getattr(func, "_overloadpacket", None)
    ours, formula = _OURS.get(packet), flop_registry.get(packet)
    if ours is None and formula is None:
        return 0
    if "_scaled_dot_product" in str(packet):
        args = _with_all_heads(func, args)
    return ours(args) if ours is not None else int(formula(*args, **kwargs, out_val=out))  # type: ignore[misc]


def product_of(func: Any, args: Any) -> tuple[int, int, int, int] | None:
    """Batch, m, n and k of a call that multiplies matrices of m x k and k x n; None for what is no such product. Of one
    with a weight of 4-bit codes (bitsandbytes) the third argument is the weight's own shape.
    """
    packet: Any = getattr(func, "_overloadpacket", None)
    if is_coded_product(packet):
        rows, columns = args[2]
        return 1, args[0].numel() // columns, rows, columns
    at = _PRODUCTS.get(packet)
    if at is None:
        return None
    first, second = args[at].shape, args[at + 1].shape
    return (int(first[0]) if len(first) == 3 else 1), int(first[-2]), int(second[-1]), int(first[-1])


def attention_of(func: Any, args: Any, kwargs: Any, flops: int) -> AttentionWork:
    """Fused attention in a call with so many FLOP: all of them or none."""
    names = [argument.name for argument in func._schema.arguments]
    if "query" not in names:
        return AttentionWork()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    causal = given.get("is_causal") and given["query"].shape[-2] == given["key"].shape[-2]
    done = flops // 2 if causal else flops
    return AttentionWork(flops, backward=done) if "grad_out" in names[0] else AttentionWork(flops, forward=done)


def _with_all_heads(func: Any, args: Any) -> list[Any]:
    """Arguments of an attention with the shapes of its tensors (batch, heads, length, width): keys and values have the
    heads of the query. Formulas of torch before 2.12 refuse a query of more heads (grouped attention).
    """
    at = [argument.name for argument in func._schema.arguments].index("query")
    query, *others = (tensor.shape for tensor in args[at : at + 3])
    return [
        *(getattr(a, "shape", a) for a in args[:at]),
        query,
        *((b, query[1], *to) for b, _, *to in others),
        *args[at + 3 :],
    ]


def _grouped(args: Any) -> int:
    """Rows of one operand times the other's: each row belongs to one group, whichever operand is cut into groups."""
    first, second = args[0], args[1]
    if first.dim() == 3 and second.dim() == 2:
        first = first[0]
    return 2 * first.numel() * second.shape[-1]


_PRODUCTS: dict[Any, int] = {
    _aten.mm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.bmm: 0,
    _aten.baddbmm: 1,
    _aten._scaled_mm: 0,
}
"""At which argument the two matrices of a product begin."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_OURS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda args: sdpa_flop_count(*args[:3]),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: sdpa_backward_flop_count(*args[:4]),
    _aten._grouped_mm: _grouped,
}


# ---- targets ---------------------------------------------------------------------------------------------------------

CUDA_ROUND = 512
"""Bytes that the caching allocator rounds up to."""

_CODED = "bitsandbytes::gemm_4bit"


def is_coded_product(packet: Any) -> bool:
    """Whether an operation is a product with 4-bit codes. By name: the library need not be installed."""
    return getattr(packet, "_qualified_op_name", "") == _CODED


class Target:
    """A machine: what a step takes there that a run on fake CPU tensors does not show; here of a CPU, without
    corrections: what its kernels allocate inside is left out (packing buffers of bf16 products in oneDNN, up to 2 MiB
    per thread, and the generator's state of 5 KB that checkpointing keeps per block).
    """

    name = "cpu"

    def allocated_bytes(self, num_bytes: int) -> int:
        """Bytes that the allocator takes for a storage."""
        return num_bytes

    def temporary_bytes(self, func: Any, args: Any) -> int:
        """Bytes that a kernel allocates and frees again before it returns. A product with 4-bit codes
        makes the weight in the dtype of its input first (bitsandbytes 0.50, ``backends/default/ops.py``; on CUDA from
        some hundred rows on, ``backends/cuda/ops.py``), and their fp32 scales where these are quantized again.
        """
        if is_coded_product(getattr(func, "_overloadpacket", None)):
            numel = args[2][0] * args[2][1]
            return numel * args[0].itemsize + 4 * -(-numel // args[4])
        return 0

    @contextmanager
    def operations(self) -> Iterator[None]:
        """Inside, fake CPU tensors take the operations of the target."""
        yield


class Cuda(Target):
    """A CUDA device, from its sources and not measured on a GPU.

    1. Attention. ``scaled_dot_product_attention`` on a CPU has a fused kernel without dropout only, and none for a mask
       that needs a gradient; where it has none it makes S x S scores. CUDA has kernels for all of these, so the step is
       run with the operations that CUDA would choose (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): flash
       attention for half precision without a mask, memory-efficient attention for masks and fp32, scores only where
       neither applies.
    2. Their workspaces. The backward of flash attention adds up dQ in fp32 over rows in blocks of 128 and columns in
       multiples of 32, keeps one fp32 number per row, and with grouped heads dK and dV for every query head
       (``flash_attn/flash_api.cpp``, ``mha_bwd``). That of memory-efficient attention keeps one fp32 number per row and
       in half precision adds up dK and dV in fp32 (``attention_backward.cu``).
    3. Dropout is one fused kernel that keeps a mask of one byte per element; the CPU keeps a factor of the tensor's
       dtype.
    4. The caching allocator rounds sizes up to 512 bytes (``c10/cuda/CUDACachingAllocator.cpp``). What it keeps in
       reserve, loses to fragmentation and gives cuBLAS for good is not in here (:mod:`gemini.planning.working`).
    """

    name = "cuda"

    def allocated_bytes(self, num_bytes: int) -> int:
        return page_up(num_bytes, CUDA_ROUND)

    def temporary_bytes(self, func: Any, args: Any) -> int:
        packet = getattr(func, "_overloadpacket", None)
        if packet is _aten._scaled_dot_product_flash_attention_backward:
            (batch, heads, rows, width), key = args[1].shape, args[2]
            rows, columns = page_up(rows, 128), page_up(width, 32) if width <= 192 else 256
            sums = 4 * batch * heads * rows * (columns + 1)
            of_all = 2 * batch * heads * key.shape[2] * page_up(width, 8) * key.itemsize
            return sums + of_all * (key.shape[1] != heads)  # type: ignore[no-any-return]
        if packet is _aten._scaled_dot_product_efficient_attention_backward:
            (batch, heads, rows, _), key, value = args[1].shape, args[2], args[3]
            per_row = 4 * batch * heads * page_up(rows, 32)
            return per_row + (4 * (key.numel() + value.numel()) if args[1].dtype in _HALF else 0)
        return super().temporary_bytes(func, args)

    @contextmanager
    def operations(self) -> Iterator[None]:
        with (
            replaced_for_thread(functional, "scaled_dot_product_attention", _attention_on_cuda),
            replaced_for_thread(functional, "dropout", _dropout),
        ):
            yield


TARGETS: dict[str, type[Target]] = {"cpu": Target, "cuda": Cuda}


def make_target(name: str | None) -> Target:
    """The target of that name, by default "cuda" if there is one; ValueError for another name."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]()


def _attention_on_cuda(
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
    width, of_values = query.shape[-1], value.shape[-1]
    fits = query.dim() == 4 and key.shape[-1] == width
    scale = width**-0.5 if scale is None else scale
    gap = -width % 8
    if fits and of_values == width and query.dtype in _HALF and attn_mask is None and width <= 256:
        query, key, value = (functional.pad(t, (0, gap)) if gap else t for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if gap else out
    # Of values that are narrower than keys too (DeepSeek's), which flash attention does not take.
    fits = fits and key.shape[1] == query.shape[1] and not (gap or of_values % 8)
    if fits and query.dtype is not torch.float64:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as memory-efficient attention takes it: numbers, in rows that start at multiples of 16 elements."""
    if mask.dtype is torch.bool:
        mask = torch.full(mask.shape, float("-inf"), dtype=query.dtype).masked_fill_(mask, 0.0)
    columns = mask.shape[-1]
    if columns % 16 and columns > 1:
        mask = functional.pad(mask, (0, -columns % 16))[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or inplace or not 0 < p < 1:
        return original(functional, "dropout")(input, p, training, inplace)
    return _aten.native_dropout(input, p, True)[0]
