"""Managed params outside of forward and backward: served or refused, never garbage.

While a module computes, a managed param is an ordinary ``nn.Parameter`` and costs nothing. At rest its class is
:class:`ManagedParameter` (as torch's own ``UninitializedParameter`` becomes a ``Parameter``), whose
``__torch_function__`` sees every use: its shape, dtype and the like are answered; inside a forward its chunk is
gathered and the call goes on (a fused op that reads another module's weight), and so it does for one elsewhere that
autograd records; other reads that yield new values are served from a copy, and what would alias the weights, write to
them, or lose a gradient is refused with the remedy. So a write can never leave a stale residual, and the same program
behaves the same wherever its weights happen to live.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import ParamAccessError
from gemini.grad_mode import call_without_grad
from gemini.kernels import Sums
from gemini.memory.chunks.chunk import Chunk
from gemini.planning.layout import Part, Slot
from gemini.train.params.grad_reads import note_grad_read

if TYPE_CHECKING:
    from gemini.train.engine import Engine
    from gemini.train.update.optimizer import HybridOptimizer


@dataclass(eq=False, slots=True)
class ParamHandle:
    """What the engine knows of one managed param. Reachable from the param as ``param._gemini``."""

    name: str
    names: tuple[str, ...]
    param: nn.Parameter
    chunk: Chunk
    slot: Slot
    """Its place in the gathered weights."""
    part: Part
    """Its place in the planes of this rank: all of the slot in one process."""
    engine: weakref.ref[Engine]
    hook: Any = None
    """The post-accumulate-grad hook, if the param is trained."""
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """The gathered weights of the param, in its shape. Only to be read while its chunk is gathered."""
    version: int = 0
    """torch's count of writes to the param when it became ordinary."""
    fingerprint: tuple[int, int] | None = None
    """Of the weights when ``param.data`` was asked for last, in a forward or backward."""
    siblings: tuple[ParamHandle, ...] = ()
    """Params with the same count of writes, this one too: views of one tensor that each was made a parameter."""
    num_writes: int = 0
    """How often Gemini has changed the weights: a graph from before must not be used after."""
    poisoned: bool = False
    """``param.data`` is NaN: its weights are not gathered."""
    trained: bool = False
    """``requires_grad`` as of the last look; flips at rest are noticed by the guard."""
    norm_sums: Sums | None = None
    """Sums of squares of the gradient's norm tiles, on a device still perhaps; None while there is no gradient."""
    num_steps: int = 0
    """Updates this param has had (Adam's bias correction); a skipped step leaves it."""
    in_backward: int = -1
    """The number of the backward in which the gradient arrived last."""
    optimizer: weakref.ref[HybridOptimizer] | None = None
    """The one that the param was given to, beside ``_owners``: every step asks for it."""
    clip: float = 1.0
    """What clipping of some params (one optimizer's of several) makes of the gradient; 1 while there is none."""
    clip_folded: float = 1.0
    """The part of ``clip`` that is of an earlier step, and so of the gradient itself to whoever reads it."""

    @property
    def has_grad(self) -> bool:
        return self.norm_sums is not None


def handle_of(param: Any) -> ParamHandle | None:
    """The handle of a managed param, else None."""
    return getattr(param, "_gemini", None)


stepping_in_backward: weakref.WeakSet[HybridOptimizer] = weakref.WeakSet()
"""The optimizers that do; where there is none, nobody looks for them in backward."""


_owners = WeakTensorKeyDictionary()
"""Params to weak references. Not an attribute of the param: with a weak reference in it, it could not be pickled."""


def optimizer_of(param: Any) -> HybridOptimizer | None:
    """The HybridAdam that was given ``param``, if it still lives."""
    handle = handle_of(param)
    reference = owner_of(param) if handle is None else handle.optimizer
    return None if reference is None else reference()


def owner_of(param: Any) -> weakref.ref[HybridOptimizer] | None:
    """Of a param that may be managed later, or was."""
    return _owners.get(param)


def give_to(optimizer: HybridOptimizer, params: Iterable[nn.Parameter]) -> None:
    """From now on :func:`optimizer_of` these params is this one."""
    reference = weakref.ref(optimizer)
    for param in params:
        _owners[param] = reference
        handle = handle_of(param)
        if handle is not None:
            handle.optimizer = reference


def engine_of(handle: ParamHandle) -> Engine:
    """The engine behind a handle.

    Raises:
        ParamAccessError: if its model was deleted.
    """
    engine = handle.engine()
    if engine is None:
        raise ParamAccessError(f"the model that managed {handle.name!r} was deleted; its params hold nothing any more")
    return engine


class ManagedParameter(nn.Parameter):
    """A managed param at rest."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            if func == _GET_GRAD:  # a new wrapper each time: equal, not identical
                note_grad_read(args[0])
            elif func in _FLIPS:
                engine_of(args[0]._gemini).state.note_flip()
            elif func == _SET_GRAD and args[1] is None:
                handle = args[0]._gemini
                if handle.has_grad:  # p.grad = None drops it, as in torch
                    engine_of(handle).discard_grads([handle])
            elif func == _SET_GRAD:
                raise ParamAccessError(
                    f"a gradient cannot be assigned to managed param {args[0]._gemini.name!r}: gradients live in "
                    "chunks. Let loss.backward() compute it"
                )
            elif func in OF_MEMORY and args[0]._gemini.poisoned:
                args = (args[0]._gemini.view, *args[1:])
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if func == torch.Tensor.register_post_accumulate_grad_hook:
                    _come_last(args[0])
                return result
        params = [p for p in tensors_in((args, kwargs)) if isinstance(p, ManagedParameter)]
        if func is torch.autograd.backward:  # inputs=params: their gradients are wanted, nobody else's
            return func(*_edges_of(args), **_edges_of(kwargs))
        if func is torch.autograd.grad:
            raise ParamAccessError(
                f"torch.{func.__module__.removeprefix('torch.')}.{func.__name__} with respect to managed params: their "
                "gradients go into chunks. Use loss.backward() and model.full_grad(name)"
            )
        handles = [param._gemini for param in params]  # type: ignore[attr-defined]
        for engine in map(engine_of, handles):
            if engine.state.computing:  # params of another model are met again in the call that follows
                return engine.read_in_call(func, args, kwargs, [h for h in handles if h.engine() is engine])
        if func is torch.Tensor.copy_ and args[0] is handles[0].param and not torch.is_grad_enabled():
            value = args[1].expand(args[0].shape)
            engine_of(handles[0]).by_names.overwrite(handles[0], value)  # how nn.Module.load_state_dict writes
            return args[0]
        return _read_copies(func, args, kwargs, handles)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParamAccessError(
            f"managed param {self._gemini.name!r} cannot be pickled: use model.state_dict(), "  # type: ignore[attr-defined]
            "model.save_pretrained() or gemini.save_checkpoint()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise ParamAccessError(
            f"managed param {self._gemini.name!r} cannot be deep-copied: "  # type: ignore[attr-defined]
            "copy the model before it is wrapped, or read it with model.full_param(name)"
        )


def _come_last(param: Any) -> None:
    """Our own hook takes the gradient away: those of the program look at ``param.grad`` before it."""
    hooks, own = param._post_accumulate_grad_hooks, param._gemini.hook
    if own is not None and own.id in hooks:
        hooks[own.id] = hooks.pop(own.id)


def _edges_of(tree: Any) -> Any:
    """``tree`` with the place in the graph where a managed param accumulates, instead of the param."""
    if isinstance(tree, ManagedParameter):
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            return torch.autograd.graph.get_gradient_edge(tree)
    if isinstance(tree, dict):
        return {key: _edges_of(value) for key, value in tree.items()}
    return [_edges_of(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def expose(handles: list[ParamHandle]) -> None:
    """Make params of gathered chunks ordinary parameters."""
    for handle in handles:
        param = handle.param
        param.__class__ = nn.Parameter
        if handle.poisoned:
            param.data = handle.view
            handle.poisoned = False
        handle.version = param._version


class Hidden(NamedTuple):
    """What :func:`hide` found."""

    written: list[ParamHandle]
    """Params that were written to while they were ordinary ones."""
    cast: list[ParamHandle]
    """Params that were given the same values in other memory, which they keep until the model is at rest."""


def hide(handles: list[ParamHandle]) -> Hidden:
    """Guard params: nobody computes with them now."""
    written, cast = list[ParamHandle](), list[ParamHandle]()
    for handle in handles:
        param = handle.param
        if param._version != handle.version and _notes_a_write(handle):
            written.append(handle)
        handle.fingerprint = None
        if not handle.poisoned and param.data_ptr() != handle.view.data_ptr():
            if _is_cast(handle):
                cast.append(handle)
            else:
                param.data = handle.view
                handle.version = param._version
                written.append(handle)
        param.__class__ = ManagedParameter
    return Hidden(written, cast)


def written_to(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Those that were written to since the last look, by torch's count: as params, or through views of them."""
    written = []
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        for handle in handles:
            if handle.param._version != handle.version and _notes_a_write(handle):
                written.append(handle)
    return written


def _notes_a_write(handle: ParamHandle) -> bool:
    """torch has counted one. It may have changed nothing: Gemma 3n clamps ``weight.data`` in each of its forwards."""
    handle.version = handle.param._version
    known = handle.fingerprint is not None and not handle.poisoned and handle.chunk.gathered
    return not known or _fingerprint_of(handle) != handle.fingerprint


def _fingerprint_of(handle: ParamHandle) -> tuple[int, int]:
    """Two sums over the bytes of the weights, of these themselves and times where they stand: tile by tile, so that it
    takes some MiB beside them and not many times their size.
    """
    flat = handle.view.detach().reshape(-1).view(torch.uint8)
    plain, placed = 0, 0
    for start in range(0, flat.numel(), _FINGERPRINT_TILE):
        bits = flat[start : start + _FINGERPRINT_TILE].to(torch.int64)
        tile = int(bits.sum())
        plain += tile
        placed += start * tile + int(bits.mul_(torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
    return plain, placed


_FINGERPRINT_TILE = 2**18
"""Bytes of weights at a time, each of which takes 16 for the moment."""


def undo_writes(handle: ParamHandle) -> None:
    """An ordinary param is a view of its window again, and what was written until now is no write."""
    handle.param.data = handle.view
    handle.version = handle.param._version


def bring_back(handles: Iterable[ParamHandle]) -> None:
    """What was cast inside a forward is a view of its window again."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        for handle in handles:
            if not handle.poisoned and handle.param.data_ptr() != handle.view.data_ptr():
                _SET_DATA(handle.param, handle.view)


def _is_cast(handle: ParamHandle) -> bool:
    """Whether a param that was given other memory has the same values there: from ``module.to(dtype)``, or cuDNN, which
    makes weights contiguous.
    """
    given, view = handle.param.detach(), handle.view
    return given.shape == view.shape and given.device == view.device and torch.equal(given, view.to(given.dtype))


def note_writes(handles: Iterable[ParamHandle]) -> None:
    """The weights of these params change now. For autograd that is a write in place, as an update is in torch: a
    backward of a forward from before that reads them is refused.
    """
    handles = list(handles)
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version([handle.param for handle in handles])
        for handle in handles:
            for sibling in handle.siblings:
                sibling.version += 1
            handle.num_writes += 1
        for handle in handles:
            handle.version = handle.param._version


def find_siblings(handles: list[ParamHandle]) -> None:
    """torch counts writes by the tensor that a parameter was made of: ``nn.Parameter(w[:8])`` and
    ``nn.Parameter(w[8:])`` have one count. It has no name for it, so count one write to all: what has more than one
    since is such a param.
    """
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]

        def counted(once: list[ParamHandle]) -> list[int]:
            before = [handle.param._version for handle in handles]
            torch.autograd.graph.increment_version([handle.param for handle in once])
            return [handle.param._version - old for handle, old in zip(handles, before, strict=True)]

        shared = [handle for handle, number in zip(handles, counted(handles), strict=True) if number > 1]
        for handle in shared:
            if not handle.siblings:
                family = tuple(h for h, number in zip(handles, counted([handle]), strict=True) if number)
                for sibling in family:
                    sibling.siblings = family
        for handle in handles:
            handle.version = handle.param._version


def refuse_written(written: list[ParamHandle]) -> None:
    """A param was written to while it was an ordinary parameter: its master does not know, so say so."""
    if written:
        raise ParamAccessError(
            f"the weights of {written[0].name!r} were written to inside a forward, a backward or gathered(): its fp32 "
            "master does not know of it. Write with model.gathered([param], write=True), outside of forward"
        )


@cache
def nan_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=dtype, device=device)


def poison(handles: list[ParamHandle]) -> None:
    """Guard params whose weights are not gathered. What reads past the guard (``torch.tensor(p)``) finds NaN."""
    for handle in handles:
        param = handle.param
        param.__class__ = nn.Parameter  # the guard would refuse the next line
        param.data = nan_of(param.dtype, param.device).expand(param.shape)
        param.__class__ = ManagedParameter
        handle.poisoned = True


def _read_copies(func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
    """Run a read outside of forward on copies of the params; refuse what a copy would silently falsify.

    What autograd follows (a loss that reads ``lm_head.weight`` itself) is run on the params themselves.
    """
    if _is_differentiated(func, args, kwargs):
        return engine_of(handles[0]).read_outside(func, args, kwargs, handles)
    what = f"{getattr(func, '__name__', func)} of managed param {handles[0].name!r}"
    if getattr(func, "__name__", "") == "__set__":
        raise ParamAccessError(_refusal("replacing the content", handles[0], write=True))
    with torch.inference_mode(False):  # writes to tensors of inference mode could not be told
        copies = {id(h.param): engine_of(h).by_names.read(h) for h in handles}
    if func is torch.Tensor.detach and sys._getframe(2).f_code is nn.Module._save_to_state_dict.__code__:
        return copies[id(handles[0].param)]  # the state dict of a part of the model: values, whoever has them
    if func is not torch.Tensor.cpu:  # which would only bring them back
        copies = {key: _where_computed(copy, handles[0]) for key, copy in copies.items()}
    versions = {key: copy._version for key, copy in copies.items()}
    args, kwargs = _replace((args, kwargs), copies)
    result = call_without_grad(func, *args, **kwargs)
    if any(copy._version != versions[key] for key, copy in copies.items()):
        raise ParamAccessError(_refusal(f"writing ({what})", handles[0], write=True))
    converted = getattr(func, "__name__", "") in _CONVERSIONS  # p.float() of an fp32 param is p itself: here a copy
    storages = {copy.untyped_storage()._cdata for copy in copies.values()}
    for tensor in tensors_in(result):
        if tensor.untyped_storage()._cdata in storages and not converted:
            raise ParamAccessError(_refusal(f"a view ({what})", handles[0], write=False))
    return result


def _where_computed(values: torch.Tensor, handle: ParamHandle) -> torch.Tensor:
    """Where ``param.device`` says they are, as what else takes part in an operation will be."""
    with torch.inference_mode(False):
        return values.to(engine_of(handle).device.torch_device)


def _is_differentiated(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether autograd records this operation, so that a gradient would be lost with a copy."""
    name = getattr(func, "__name__", "")
    if not torch.is_grad_enabled() or name in _VALUES_ONLY:
        return False
    first = next(iter((*args, *kwargs.values())), None)
    target = kwargs.get("out", first if _WRITES.fullmatch(name) else None)
    if any(isinstance(tensor, ManagedParameter) for tensor in tensors_in(target)):
        return False  # a write
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


_WRITES = re.compile(r"[a-z_]*[a-z]_|__i[a-z]+__|__setitem__|_foreach_.*")
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _data_of(param: nn.Parameter) -> torch.Tensor:
    handle = handle_of(param)
    if handle is None:
        return _GET_DATA(param)
    view = param.detach()
    if not handle.poisoned and handle.chunk.gathered and param._version == handle.version:
        handle.fingerprint = _fingerprint_of(handle)
    return view


# torch counts no writes to param.data, and would hide them from us. Those to param.detach() are counted with the
# param's, and the two are the same otherwise. There is no other way to see ``param.data`` of an ordinary nn.Parameter.
nn.Parameter.data = property(_data_of, _SET_DATA, doc=torch.Tensor.data.__doc__)  # type: ignore[assignment]

_VALUES_ONLY = frozenset("detach __repr__ __str__ __format__ tolist item numpy __array__ __set__".split())
_CONVERSIONS = frozenset("to float double half bfloat16 cpu contiguous type".split())


def _refusal(what: str, handle: ParamHandle, *, write: bool) -> str:
    remedy = (
        "with model.gathered([param], write=True)" if write else "model.full_param(name) or model.gathered([param])"
    )
    return (
        f"{what} is not possible outside of forward: the weights of {handle.name!r} live in a chunk (and in half "
        f"precision the other half of its fp32 master beside it). Use {remedy}"
    )


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_in(value)


def _replace(tree: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return copies.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: _replace(value, copies) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replace(value, copies) for value in tree]
    if isinstance(tree, tuple):
        values = [_replace(value, copies) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree


def _getters() -> set[Any]:
    names = (
        "shape dtype device ndim layout requires_grad grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
        "is_quantized is_mkldnn is_mps is_xpu is_nested output_nr _version names itemsize nbytes _backward_hooks "
        "_post_accumulate_grad_hooks retains_grad is_ipu is_maia is_mtia is_vulkan is_xla is_sparse_csr volatile"
    ).split()
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]

_FLIPS: set[Any] = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]

# Answered by the place in the chunk, not by the NaN that stands in for weights that are not gathered.
OF_MEMORY: set[Any] = {
    getattr(torch.Tensor, name) for name in "stride storage_offset is_contiguous data_ptr untyped_storage".split()
}

METADATA: set[Any] = _getters() | {
    _SET_GRAD,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(
        getattr(torch.Tensor, name)
        for name in (
            "size dim numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex "
            "requires_grad_ __len__ __hash__ data_ptr untyped_storage register_hook get_device is_pinned is_shared "
            "register_post_accumulate_grad_hook retain_grad new_empty new_zeros new_ones new_full new_tensor "
            "is_inference is_same_size ndimension is_signed is_coalesced has_names __dir__ is_conj is_neg sparse_dim"
        ).split()
        if hasattr(torch.Tensor, name)
    ),
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_inference,
    torch.promote_types, torch.result_type,
}  # fmt: skip
