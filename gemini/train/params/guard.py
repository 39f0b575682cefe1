"""Managed params outside of forward and backward: served or refused, never garbage.

While a module computes, a managed param is an ordinary ``nn.Parameter`` and costs nothing. At rest its class is
:class:`ManagedParameter` (as torch's own ``UninitializedParameter`` becomes a ``Parameter``), whose
``__torch_function__`` sees every use. What would lose a gradient or share the memory of weights is refused with the
remedy. So a write can never leave a stale residual, and the same program behaves the same wherever its weights live.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gemini.errors import ParamAccessError, warn
from gemini.interrupts import WHOLE, call_without_grad
from gemini.train.observers import iter_tensors, unwrapped, without_transforms
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import ParamHandle


class _NotSwapped(list[str]):
    """Names of slots of a class, of which ``torch.utils.swap_tensors`` asks before it changes anything: refused."""

    def __iter__(self) -> Iterator[str]:
        raise ParamAccessError(
            "torch.utils.swap_tensors of a managed param would take it from its chunk. Write the values: "
            "param.data.copy_(value)"
        )


class ManagedParameter(nn.Parameter):
    """A managed param at rest. What an operation on it does, the first that applies:

    1. It has a handler of its own in :data:`AT_REST`: metadata, gradients, the entries of autograd.
    2. The model computes: it is a call of its own, for which the weights are gathered.
    3. Autograd records it (a loss that reads a weight): the same. A write is refused there, as torch does.
    4. It writes whole values (``param.data = value``, ``copy_``): they become the master.
    5. It detaches: the values are read later, at each use.
    6. Anything else computes on copies of the values, and what it has written to these becomes the master.
    """

    __slotnames__ = _NotSwapped()  # what `copyreg` keeps in a class; pickling, which reads it too, is refused below

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # One look in a table for what is asked often; what is not in it may read values.
        return AT_REST.get(func, _use_values)(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        Weights(self._gemini).refuse("other memory (set_)", write=True)  # type: ignore[attr-defined]  # torch asks nobody

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParamAccessError(
            f"managed param {self._gemini.name!r} cannot be pickled: use model.state_dict(), "  # type: ignore[attr-defined]
            "model.save_pretrained() or gemini.save_checkpoint()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        # `memo` has what is being copied around the param: a copy of a whole module would be a model without chunks.
        part = any(isinstance(whole, (nn.Module, torch.optim.Optimizer)) for whole in memo.values())
        if type(self) is ManagedParameter and not part:
            with torch.no_grad():  # the param alone, or a list of them: an ordinary one with its values of now
                return memo.setdefault(id(self), nn.Parameter(self.clone(), self.requires_grad))
        raise ParamAccessError(
            f"managed param {self._gemini.name!r} cannot be deep-copied: "  # type: ignore[attr-defined]
            "copy the model before it is wrapped, or read it with model.full_param(name)"
        )


@cache
def managed_kind(kind: type[nn.Parameter]) -> type[ManagedParameter]:
    """Make the class at rest of a param that is a ``kind`` while modules compute: PEFT goes by that one's name."""
    if kind is nn.Parameter:
        return ManagedParameter
    return type(
        kind.__name__, (ManagedParameter, kind), {"__module__": kind.__module__, "__slotnames__": _NotSwapped()}
    )


# ---- operations on a param at rest -----------------------------------------------------------------------------------


def _answer(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Answer what is known without values."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return func(*args, **kwargs)


def _answer_of_memory(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Answer with the place in the chunk, not that of the NaN which stands in for weights that are not gathered."""
    handle: ParamHandle = args[0]._gemini
    caller = _caller()
    # safetensors reads at the address: weights may be elsewhere, or be updated now. To others it says which they are.
    if (
        func is torch.Tensor.data_ptr
        and caller.f_globals.get("__name__") == "safetensors.torch"
        and caller.f_code.co_name in ("_to_ndarray", "_tobytes")
    ):
        raise ParamAccessError(
            f"safetensors.torch reads the memory of managed param {handle.name!r}, whose values live in a chunk. Give "
            "it those of model.state_dict(), or use model.save_pretrained()"
        )
    return _answer(func, (handle.view, *args[1:]) if handle.poisoned else args, kwargs)


def _set_grad(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    handle: ParamHandle = args[0]._gemini
    if isinstance(args[1], torch.Tensor):
        raise ParamAccessError(
            f"a gradient cannot be assigned to managed param {handle.name!r}: gradients live in chunks. Let "
            "loss.backward() compute it"
        )
    # Asked first, so that a loop over params that sets p.grad = None costs nothing for those without one.
    if handle.has_grad or handle.leftover:  # p.grad = None drops it, as in torch
        owner_of(handle).stepping.discard([handle])
    return _answer(func, args, kwargs)


def _flip(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # Only noted: what a trained param needs (planes, a hook) is made when the next forward begins.
    owner_of(args[0]._gemini).state.requires_grad_changed = True
    return _answer(func, args, kwargs)


def _hook_gradient(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Register a hook of the program before our own, which takes ``param.grad`` away that it would look at."""
    hook = _answer(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        hooks, own = args[0]._post_accumulate_grad_hooks, args[0]._gemini.hook
    if own and own.id in hooks:
        # Hooks run in the order of this dict: ours goes to its end.
        hooks[own.id] = hooks.pop(own.id)
    return hook


def _run_backward(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a backward of which only these gradients are wanted (``inputs=params``): as edges, where they accumulate."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        args, kwargs = tree_map_only(ManagedParameter, torch.autograd.graph.get_gradient_edge, (args, kwargs))
    return func(*args, **kwargs)


def _refuse_autograd_grad(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise ParamAccessError(
        "torch.autograd.grad with respect to managed params: their gradients go into chunks. Use loss.backward() and "
        "model.full_grad(name)"
    )


def _use_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Go through steps 2 to 6 of :class:`ManagedParameter`: their order is what decides."""
    params = [tensor for tensor in iter_tensors((args, kwargs)) if isinstance(tensor, ManagedParameter)]
    handles: list[ParamHandle] = [param._gemini for param in params]  # type: ignore[attr-defined]
    if not handles:  # another thread has begun a forward since torch came here: they are ordinary ones
        return func(*args, **kwargs)
    for owner in map(owner_of, handles):
        # Whichever thread computes: another one that reads meanwhile has its weights gathered as well.
        if owner.state.computing:  # params of another model are met again in the call that follows
            return owner.forward.in_call(func, args, kwargs, [h for h in handles if h.owner() is owner])
    if _is_recorded(func, args, kwargs):
        # torch would refuse it too, but for an in-place write to a leaf, and in words that name no param.
        if (written := _written_param(func, args, kwargs)) is not None:
            raise ParamAccessError(
                f"{func.__name__} writes to managed param {written._gemini.name!r} while autograd is on, which "
                "torch allows to no param that requires gradients, or is given what does. Write inside "
                "torch.no_grad(), or inside model.gathered([param], write=True)"
            )
        return owner_of(handles[0]).forward.outside(func, args, kwargs, handles)
    # Who asks decides from here on, since torch's own helpers do with `param.data` what a program must not.
    caller = _caller()
    if func == _SET_DATA:
        return _set_data(handles[0], args[1], caller.f_code)
    if _copies(func, args):
        return args[0]
    if caller.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
        raise ParamAccessError(
            f"fully_shard cannot divide managed param {handles[0].name!r}: Gemini divides models among ranks itself"
        )
    # A state dict of a part of the model is given values: they may be kept for long, and pickled.
    if func in _DETACHES and caller.f_code is not nn.Module._save_to_state_dict.__code__:
        return ReadLater.make(Weights(handles[0]), handles[0].param)
    shown = {id(handle.param): Shown(Weights(handle)) for handle in handles}
    return _read_copies(func, args, kwargs, shown, partial(call_without_grad, func))


def _caller() -> FrameType:
    """Find the frame of the program, or of torch, that has called into this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals is globals():
        frame = frame.f_back
    assert frame
    return frame


# ---- detached --------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A place in a contiguous param, as torch describes views: in elements of ``dtype``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, base: torch.Tensor) -> View:
        # torch counts a storage offset in elements of the view's own dtype, and the base may have another.
        offset = tensor.storage_offset() - base.storage_offset() * base.dtype.itemsize // tensor.dtype.itemsize
        return cls(tuple(tensor.shape), tensor.stride(), int(offset), tensor.dtype)

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """Make this view of ``base``: torch counts writes to both together."""
        flat = base.view(-1).view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


class Weights(NamedTuple):
    """Values of a param outside of forward, as operations on them are given them and give them back. States of
    optimizers (:mod:`gemini.train.optimizers.states`) are served by the same few methods.
    """

    handle: ParamHandle

    @property
    def device(self) -> torch.device:
        """The device where the values seem to be: what else takes part in an operation is there as well."""
        return owner_of(self.handle).store.device.torch_device

    @property
    def label(self) -> str:
        return f"managed param {self.handle.name!r}"

    def read(self) -> torch.Tensor:
        return owner_of(self.handle).by_names.read(self.handle)

    def write(self, values: torch.Tensor) -> None:
        """Take over what a program has made of :meth:`read`."""
        owner_of(self.handle).by_names.rewrite(self.handle, values)

    def refuse(self, what: str, *, write: bool) -> NoReturn:
        remedy = (
            "with model.gathered([param], write=True)" if write else "model.full_param(name) or model.gathered([param])"
        )
        raise ParamAccessError(
            f"{what} is not possible outside of forward: the weights of {self.handle.name!r} live in a chunk (and in "
            f"half precision the other half of its fp32 master beside it). Use {remedy}"
        )


class Shown(NamedTuple):
    """Values, or a view of them, that stand in the place of an argument."""

    of: Any
    """:class:`Weights`, or what has its methods."""
    view: View | None = None  # None for all of it

    def among(self, values: torch.Tensor) -> torch.Tensor:
        """Return what is meant of ``values``, which are all."""
        return self.view.of(values) if self.view else values


class ReadLater(torch.Tensor):
    """``param.detach()`` and ``param.data`` of a managed param outside of forward, states of optimizers, and views of
    these: values that are read at each use. In torch they share memory with the param or the state: what is read later
    is what that is then, and so it is here.
    """

    _shown: Shown

    @staticmethod
    def make(of: Any, whole: torch.Tensor, view: View | None = None) -> ReadLater:
        """Make what stands for values, or a view of them, with the shape and dtype of ``whole``."""
        shape, stride, offset, dtype = (whole.shape, None, None, whole.dtype) if view is None else view
        # A tensor made in inference mode stays one, and could not be written to afterwards.
        with torch.inference_mode(False):
            made: ReadLater = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                ReadLater, shape, stride, offset, dtype=dtype, device=of.device
            )
        # It has no memory: C++ that asks for its address (torch.utils.dlpack.to_dlpack) gets an error, and not 0.
        torch._C._set_throw_on_mutable_data_ptr(made)  # type: ignore[attr-defined]
        made._shown = Shown(of, view)
        return made

    @property
    def _gemini(self) -> ParamHandle | None:
        """The param whose weights it shows, if it does."""
        return self._shown.of.handle if isinstance(self._shown.of, Weights) else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute what torch does not ask of ``__torch_function__``: inside of the transforms of ``torch.func``."""
        if func is torch.ops.aten.detach.default:
            return cls.make(args[0]._shown.of, args[0], args[0]._shown.view)
        for written in _shown_in(_written_by(func, args, kwargs or {})).values():  # torch counts no writes down here
            written.of.refuse(f"writing ({func})", write=True)
        return _read_copies(func, args, kwargs or {}, _shown_in((args, kwargs)), func)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DETACHES:
            return args[0]
        if func in OF_MEMORY and (handle := args[0]._gemini) and (func in _ADDRESSES or not args[0]._shown.view):
            # The param gives the place in the chunk, which is the same whether it is gathered or not.
            first = func(handle.param, *args[1:], **kwargs)
            is_address = func is torch.Tensor.data_ptr
            return first + args[0].storage_offset() * args[0].itemsize if is_address else first
        if func in METADATA and func not in _FLIPS and func not in _ADDRESSES:
            return _answer(func, args, kwargs)
        shown = _shown_in((args, kwargs))
        if func in _FLIPS:
            next(iter(shown.values())).of.refuse("a gradient (requires_grad_ of what was detached)", write=False)
        weights = {key: each for key, each in shown.items() if isinstance(each.of, Weights)}
        for owner in [owner_of(each.of.handle) for each in weights.values()]:
            if owner.state.computing:
                # Those of another model stay as they are, and come here again in the call that follows.
                own = {key: each for key, each in weights.items() if each.of.handle.owner() is owner}
                handles = [each.of.handle for each in own.values()]
                return owner.forward.in_call(partial(_on_exposed, func, args, kwargs, own), (), {}, handles)
        return args[0] if _copies(func, args) else _read_copies(func, args, kwargs, shown, func)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _shown_in(tree: Any) -> dict[int, Shown]:
    return {id(tensor): tensor._shown for tensor in iter_tensors(tree) if isinstance(tensor, ReadLater)}


def _written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Find the arguments that an operator of torch writes to, by its schema."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    return [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]


def _on_exposed(func: Callable[..., Any], args: Any, kwargs: Any, shown: dict[int, Shown]) -> Any:
    """Run ``func`` while the params of ``shown`` are ordinary ones."""
    values = {key: each.among(each.of.handle.param.detach()) for key, each in shown.items()}
    args, kwargs = substituted((args, kwargs), values)
    return func(*args, **kwargs)


@cache
def nan_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make the one value that stands for weights that are not there. Bytes have no NaN: all bits are set."""
    # It is kept for good by `cache`, so it must not be a tensor of inference mode.
    with torch.inference_mode(False):
        if not dtype.is_floating_point:
            return torch.full((), torch.iinfo(dtype).max, dtype=dtype, device=device)
        return torch.full((), float("nan"), dtype=dtype, device=device)


def _set_data(handle: ParamHandle, value: torch.Tensor, caller: CodeType) -> None:
    """Serve ``param.data = value`` at rest: ``param.data += 1`` ends so, and so torch copies a vector into params."""
    is_alike = isinstance(value, ReadLater) and value.dtype is handle.param.dtype
    if is_alike and _place_of(value) == _place_of(handle.param):  # what it is already
        return
    if caller is not nn.utils.vector_to_parameters.__code__:
        raise ParamAccessError(
            f"param.data = ..., which module.to() does too, would let managed param {handle.name!r} share the memory "
            "of that tensor, and its weights live in a chunk. Write the values: param.data.copy_(value)"
        )
    owner_of(handle).by_names.overwrite(handle, value)


def _copies(func: Callable[..., Any], args: Any) -> bool:
    """Serve ``copy_`` into whole params, which is how ``nn.Module.load_state_dict`` writes: all of the value becomes
    the master, what a half precision cannot show too.
    """
    if func is torch._foreach_copy_:
        # Each by itself: every one comes here again, and is told to the ranks in the same order.
        for target, value in zip(args[0], args[1], strict=True):
            target.copy_(value)
        return True
    # Into one at rest: a param that is an ordinary one now (inside gathered(), say) is written to as such.
    if func is not torch.Tensor.copy_ or len(args) < 2 or not isinstance(args[0], (ManagedParameter, ReadLater)):
        return False
    handle: ParamHandle | None = args[0]._gemini  # type: ignore[union-attr]
    # A part of a param has no plane of its own: it is written through a copy of the whole. So are states, and numbers.
    is_part = isinstance(args[0], ReadLater) and args[0]._shown.view
    if not handle or is_part or not isinstance(args[1], torch.Tensor):
        return False
    value = args[1].detach()
    if isinstance(value, ReadLater):
        if value._shown == Shown(Weights(handle)):
            return True  # what is shown of a master is not all of it
        value = value.clone()  # perhaps of a part of the same param, which is written piece by piece
    # `copy_` broadcasts; the master is given every value.
    owner_of(handle).by_names.overwrite(handle, value.expand(args[0].shape))
    return True


def _read_copies(
    func: Callable[..., Any], args: Any, kwargs: Any, shown: dict[int, Shown], call: Callable[..., Any]
) -> Any:
    """Run an operation outside of forward on copies; refuse what a copy would silently falsify. A copy is a tensor of
    its own, so an update that begins meanwhile on a worker changes nothing of it. ``shown``: what stands in the place
    of which argument (by ``id``). ``call`` runs ``func``. What is written to a copy is written to what it is of.
    """
    first = next(iter(shown.values())).of
    name = getattr(func, "__name__", str(func))
    what = f"{name} of {first.label}"
    if name == "__set__":
        first.refuse("replacing the content", write=True)
    if func is torch.Tensor.__dlpack__:
        first.refuse(f"a view ({what})", write=False)
    with torch.inference_mode(False):  # writes to tensors of inference mode could not be told
        copies = {of: of.read() for of in dict.fromkeys(each.of for each in shown.values())}
        if func is torch.Tensor.detach:
            return copies[first]  # the state dict of a part of the model: values, whoever has them
        with without_transforms():
            if func is not torch.Tensor.cpu:  # which would only bring them back
                copies = {of: copy.to(of.device) for of, copy in copies.items()}
            # One copy of each, of which all its views in the arguments are made: they share memory, as in torch.
            values = {key: each.among(copies[each.of]) for key, each in shown.items()}
    # Writes are told by torch's count of the copies, which writes through views of them raise as well.
    versions = {of: copy._version for of, copy in copies.items()}
    places = {key: _place_of(value) for key, value in values.items()}
    given = {id(values[id(tensor)]): tensor for tensor in iter_tensors((args, kwargs)) if id(tensor) in values}
    args, kwargs = substituted((args, kwargs), values)
    result = call(*args, **kwargs)
    written = {of: copy for of, copy in copies.items() if copy._version != versions[of]}
    for key, value in values.items():
        if _place_of(value) != places[key]:  # resize_, t_, set_
            of = shown[key].of
            of.refuse(f"another shape or memory ({name} of {of.label})", write=True)
    # After the operation as a whole: one that raised has written nothing to a master, and Ctrl-C finds all of them
    # written or none, as in torch.
    with WHOLE:
        for of, copy in written.items():
            of.write(copy)
    if name in ("numpy", "__array__"):
        result.setflags(write=False)  # values of now: what is written to them would be lost
    return _put_off(result, copies, given if written else {}, name, what)


def _put_off(result: Any, copies: dict[Any, torch.Tensor], given: dict[int, torch.Tensor], name: str, what: str) -> Any:
    """A result whose tensors share memory with copies: they would share it with the originals in torch, so they become
    reads put off. ``given``: what was written to, and is returned as it was given.
    """
    storages = {copy.untyped_storage()._cdata: of for of, copy in copies.items()}
    views: dict[int, torch.Tensor] = {}
    for tensor in iter_tensors(result):
        if id(tensor) in given:
            views[id(tensor)] = given[id(tensor)]
            continue
        of = storages.get(unwrapped(tensor).untyped_storage()._cdata)
        if of is None or of.device.type != tensor.device.type:
            continue  # p.cpu() of a param on a GPU is a copy in torch too
        if _WRITES.fullmatch(name):  # share_memory_ and the like
            of.refuse(f"writing ({what})", write=True)
        if unwrapped(tensor) is not tensor or tensor.is_conj() or tensor.is_neg():
            of.refuse(f"a view ({what})", write=False)
        views[id(tensor)] = ReadLater.make(of, copies[of], View.from_tensor(tensor, copies[of]))
    return substituted(result, views) if views else result


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr()


def _is_recorded(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether autograd records this operation, so that a gradient would be lost with a copy."""
    if not torch.is_grad_enabled() or getattr(func, "__name__", "") in _VALUES_ONLY:
        return False
    if getattr(func, "__module__", None) == "torch.nn.init":  # they turn autograd off themselves
        return False
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return any(tensor.requires_grad for tensor in iter_tensors((args, kwargs)))


def _written_param(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Find the first managed param that an operation writes to, by its name and torch's conventions."""
    first = next(iter((*args, *kwargs.values())), None)
    target = kwargs.get("out", first if _WRITES.fullmatch(getattr(func, "__name__", "")) else None)
    return next((tensor for tensor in iter_tensors(target) if isinstance(tensor, ManagedParameter)), None)


# torch's convention: in place is what ends in one underscore, or is an augmented assignment.
_WRITES = re.compile(r"\w*[^\W_]_|__i[a-z]+__|__setitem__")

_VALUES_ONLY = frozenset("detach __repr__ __str__ __format__ tolist item numpy __array__ __set__".split())


def substituted(tree: Any, copies: dict[int, torch.Tensor]) -> Any:
    def replaced(leaf: Any) -> Any:
        # A class of somebody's own for lists is a leaf to pytree, and torch takes it for a list.
        is_tensor = isinstance(leaf, torch.Tensor)
        return copies.get(id(leaf), leaf) if is_tensor else [substituted(each, copies) for each in leaf]

    return tree_map_only((torch.Tensor, list), replaced, tree)


_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_DETACHES: set[Any] = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_FLIPS: set[Any] = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]

OF_MEMORY: set[Any] = {
    getattr(torch.Tensor, name) for name in "stride storage_offset is_contiguous data_ptr untyped_storage".split()
}

_ADDRESSES: set[Any] = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage}

_NAMES = (
    "shape dtype device ndim layout requires_grad grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_mkldnn is_mps is_xpu is_nested output_nr _version names itemsize nbytes _backward_hooks retains_grad is_ipu "
    "_post_accumulate_grad_hooks is_maia is_mtia is_vulkan is_xla is_sparse_csr volatile "
    "size dim numel nelement stride storage_offset is_contiguous element_size is_floating_point is_complex "
    "requires_grad_ __len__ __hash__ data_ptr untyped_storage register_hook get_device is_pinned is_shared "
    "register_post_accumulate_grad_hook retain_grad new_empty new_zeros new_ones new_full new_tensor "
    "is_inference is_same_size ndimension is_signed is_coalesced has_names __dir__ is_conj is_neg sparse_dim"
).split()
_OF_TENSORS = [getattr(torch.Tensor, name) for name in _NAMES if hasattr(torch.Tensor, name)]

METADATA: set[Any] = {
    # What torch hands over of an attribute is its getter.
    *(found.__get__ if inspect.isdatadescriptor(found) else found for found in _OF_TENSORS),  # type: ignore[union-attr]
    _SET_GRAD,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    # They read a shape and no values; the random ones draw from the generator as for an ordinary param.
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_inference),
    *(torch.promote_types, torch.result_type),
}


# ---- ``p.grad``: None to the outside, for gradients live in chunks ---------------------------------------------------


# Functions that read p.grad, find None and go on: they would do nothing, and nobody would know. By code object, for a
# function may be bound, wrapped or renamed by the time that it is met on the stack.
_BLIND = {
    inspect.unwrap(function).__code__: (
        f"torch.nn.utils.{name} would see no gradient of {{name!r}} and clip nothing: gradients of a managed model "
        "live in chunks. Use model.clip_grad_norm_(max_norm)"
    )
    for name, function in vars(nn.utils).items()
    if name.startswith("clip_") and name.endswith("_")
}
_ZERO_GRAD = nn.Module.zero_grad.__code__
# Models of which it was said already, weakly: they go when nobody else has them.
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_in(function: Callable[..., Any], message: str) -> None:
    """Let ``p.grad`` of managed params raise ``message`` (with ``{name!r}``) where ``function`` looks at it."""
    _BLIND[inspect.unwrap(function).__code__] = message


def _get_grad(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Look who reads ``p.grad``: functions that would do nothing, silently, are refused. ``zero_grad()`` of a part of
    the model would find nothing to forget: what is in the chunk is forgotten for it.
    """
    grad = _answer(func, args, kwargs)
    handle: ParamHandle = args[0]._gemini
    owner, frame = handle.owner(), _caller()
    for _ in range(3):  # the getter, perhaps a comprehension, torch's function
        if frame.f_code in _BLIND:
            raise ParamAccessError(_BLIND[frame.f_code].format(name=handle.name))
        if frame.f_code is _ZERO_GRAD and owner:
            owner.stepping.discard([handle], to_zero=not frame.f_locals.get("set_to_none", True))
            return grad
        frame = frame.f_back or frame
    if not owner or owner in _warned or torch._C._current_graph_task_id() != -1:
        return grad  # inside a backward it is our own hook that looks
    if not (handle.has_grad or owner.state.num_unreduced or owner.state.updated_in_backward):
        return grad
    _warned.add(owner)
    warn(
        f"p.grad of managed param {handle.name!r} was read after a backward: it is always None, since gradients live "
        "in chunks, and what is done with it does nothing. Read them with model.full_grad(name), clip them with "
        "model.clip_grad_norm_(max_norm). This is said once per model"
    )
    return grad


AT_REST: dict[Any, Callable[[Callable[..., Any], Any, Any], Any]] = {
    **dict.fromkeys(METADATA, _answer),
    **dict.fromkeys(OF_MEMORY, _answer_of_memory),
    **dict.fromkeys(_FLIPS, _flip),
    torch.Tensor.grad.__get__: _get_grad,  # type: ignore[union-attr]
    _SET_GRAD: _set_grad,
    torch.Tensor.register_post_accumulate_grad_hook: _hook_gradient,
    torch.autograd.backward: _run_backward,
    torch.autograd.grad: _refuse_autograd_grad,
}
"""Handlers that answer on a param at rest by themselves, whatever else is going on."""
