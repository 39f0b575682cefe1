"""What a model must be like for Gemini to manage it; any other is refused, with the remedy, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemini.interrupts import WHOLE
from gemini.train.modules.codes import WHAT_WORKS, is_coded, is_of_library
from gemini.train.modules.reading import Structure, own_buffers
from gemini.train.params.handle import handles_of


def refuse_unwrappable(structure: Structure, managed_class: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Refuse a model whose modules, params or buffers cannot be managed; nothing is changed. ``structure``: of a model
    that is not managed yet, with its values. ``managed_class``: the class that the model would get.
    """
    _check_listed_alike(structure.model)
    with WHOLE:  # hooks are tried, of which an interrupt must leave none
        for path, module in structure.modules:
            _check_module(path, module, has_params=id(module) in structure.holders)
    managed = {id(handle.param) for handle in handles_of([param for param, _ in structure.params])}
    for param, names in structure.params:
        if id(param) not in managed:  # one of another managed model is refused as that
            _check_param(names[0], param)
    for path, module in structure.modules:
        for name, buffer in own_buffers(module).items():
            _check_buffer(f"{path}.{name}" if path else name, buffer)
    # After the kinds of tensors: it asks for addresses, which not every kind has.
    _check_memory(structure)
    _check_class(structure.model, managed_class)


def _check_listed_alike(model: nn.Module) -> None:
    """Refuse params that are other objects whenever they are listed: nothing could be kept for one of them."""
    listed = list(model.named_parameters(remove_duplicate=False))
    for (name, param), (_, again) in zip(listed, model.named_parameters(remove_duplicate=False), strict=True):
        if param is not again:
            raise TypeError(
                f"param {name!r} is made anew whenever the params of the model are listed, as PEFT does around "
                "nn.MultiheadAttention, and GeminiDDP keeps weights and states for params that stay the same objects. "
                "Leave that layer out of the adapter's target_modules, or merge first (model.merge_and_unload())"
            )


def _check_module(path: str, module: nn.Module, *, has_params: bool) -> None:
    where = f"{path!r}" if path else "the model"
    if isinstance(module, torch.jit.ScriptModule) and has_params:
        raise TypeError(
            f"{where} is a torch.jit module ({type(module).__name__}): its code takes no hooks, and its weights come "
            "and go around its forward. Give the plain module, without torch.jit.script or torch.jit.trace; "
            "model.compile() compiles the blocks of a managed model"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise TypeError(
            f"{where} is wrapped in FullyShardedDataParallel, whose place GeminiDDP takes: wrap the bare model"
        )
    if has_params:
        try:
            # Tried, since a class may refuse hooks in any way of its own.
            module.register_forward_pre_hook(lambda *_: None).remove()
            module.register_forward_hook(lambda *_: None).remove()
        except Exception as e:
            raise TypeError(
                f"{where} ({type(module).__name__}) takes no forward hooks ({e}): its weights come and go around its "
                "forward. Use an ordinary nn.Module in its place"
            ) from e


def _check_param(name: str, param: torch.Tensor) -> None:
    """Refuse a param that cannot be trained, or is of a class that does not compute as any other does."""
    if isinstance(param, UninitializedTensorMixin):
        raise ValueError(
            f"param {name!r} is not initialized yet (a lazy module): run one batch through the model before wrapping it"
        )
    kind = type(param)
    is_own = is_traceable_wrapper_subclass(param) or (kind is not nn.Parameter and is_of_library(kind, "Int8Params"))
    if is_own or not (_is_ordinary(kind) or is_coded(param)):
        raise TypeError(
            f"param {name!r} is a {type(param).__name__}, a tensor with a behaviour of its own, which it would lose: "
            "GeminiDDP manages ordinary params (nn.Parameter) and divides them. Turn it into one (dequantize it, "
            "wrap before fully_shard), or make it a buffer; " + WHAT_WORKS
        )
    if param.is_inference():
        raise ValueError(
            f"param {name!r} was made in torch.inference_mode(), and such tensors cannot be trained. Make or load the "
            "model outside of it (torch.no_grad() does no harm)"
        )
    if not param.is_leaf:
        raise ValueError(
            f"param {name!r} is the result of a computation ({param.grad_fn}), so that gradients do not end at it: "
            "register an nn.Parameter, param.detach().clone() for example"
        )
    grad = param.grad
    # Chunks begin without any. Zeros do no harm: zero_grad(set_to_none=False) leaves them.
    if grad is not None and not grad.is_meta and bool((grad._values() if grad.is_sparse else grad).any()):
        raise ValueError(
            f"param {name!r} has a gradient already, which the next backward would add to, and managed params begin "
            "without one. Call zero_grad() before GeminiDDP(model) if it has been used, else wrap before the backward "
            "that it is of"
        )


def _is_ordinary(kind: type) -> bool:
    """Whether nothing of how the params of a class compute is the class's own."""
    return all(
        getattr(getattr(kind, name), "__func__", getattr(kind, name))
        is getattr(getattr(base, name), "__func__", getattr(base, name))
        for name in ("__torch_function__", "__torch_dispatch__")
        for base in [nn.Parameter if issubclass(kind, nn.Parameter) else torch.Tensor]
    )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    if isinstance(buffer, UninitializedTensorMixin):
        raise ValueError(
            f"buffer {name!r} is not initialized yet (a lazy module): run a batch through the model before wrapping it"
        )
    if buffer.is_meta:
        raise ValueError(
            f"buffer {name!r} is on the meta device: it has no values. Load or initialize the model first, or let "
            "gemini.from_pretrained or gemini.from_config make it"
        )


class _Held(NamedTuple):
    """A tensor of the model and where it lies: bytes from ``start`` to ``stop``, as addresses."""

    start: int
    stop: int
    name: str
    tensor: torch.Tensor
    is_param: bool


def _check_memory(structure: Structure) -> None:
    """Refuse params whose memory somebody else has too: managed, each has memory of its own, and they would part."""
    # In the order of addresses: only those that are still open can overlap the next one.
    open_ones: list[_Held] = []
    for now in sorted(_tensors_of(structure), key=lambda found: found[:2]):
        open_ones = [before for before in open_ones if before.stop > now.start]
        for before in open_ones:
            if (now.is_param or before.is_param) and _share(before.tensor, now.tensor):
                first, second = (before, now) if before.is_param else (now, before)
                remedy = (
                    "Tie them by registering one nn.Parameter in both places"
                    if second.is_param
                    else "Compute it from the param where it is used"
                )
                raise ValueError(
                    f"param {first.name!r} and {second.name!r} share memory and are different tensors: a write to one "
                    f"would show in the other, and managed params have memory of their own. {remedy}, or give one of "
                    "them a copy (.clone())"
                )
        open_ones.append(now)


def _tensors_of(structure: Structure) -> Iterator[_Held]:
    params = {id(param) for param, _ in structure.params}
    seen: set[int] = set()
    for path, module in structure.modules:
        # Tensors in plain attributes, which may be views of a param as well, where what is kept there is not made anew
        # for each forward, as spectral_norm does.
        plain: dict[str, Any] = {} if module._forward_pre_hooks else vars(module)
        for name, tensor in {**plain, **module._parameters, **module._buffers}.items():
            if not isinstance(tensor, torch.Tensor) or id(tensor) in seen or tensor.layout is not torch.strided:
                continue
            seen.add(id(tensor))
            try:
                start = tensor.data_ptr()
            except RuntimeError:  # no memory that could be shared
                continue
            if tensor.is_meta or not tensor.numel():
                continue
            name = f"{path}.{name}" if path else name
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield _Held(start, start + (last + 1) * tensor.itemsize, name, tensor, id(tensor) in params)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose ranges meet have a byte in common: columns of one matrix have not."""
    return a.device == b.device and numpy.shares_memory(_outline(a), _outline(b))


def _outline(tensor: torch.Tensor) -> Any:
    """The place of a tensor, as NumPy sees it: of any dtype and on any device, for its memory is not touched."""
    size = tensor.itemsize
    form = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "typestr": f"|V{size}", "version": 3}
    strides = tuple(stride * size for stride in tensor.stride())
    return numpy.asarray(SimpleNamespace(__array_interface__={**form, "strides": strides}))


def _check_class(model: nn.Module, managed_class: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    original = type(model)
    try:
        # Tried on the model and undone: __slots__ or a metaclass may forbid it.
        with WHOLE:
            model.__class__ = managed_class(original)  # type: ignore[assignment]
            model.__class__ = original
    except Exception as e:
        raise TypeError(
            f"{original.__name__} cannot be the base of a managed class ({type(e).__name__}: {e}): put the model into "
            "a plain nn.Module that calls it, and wrap that"
        ) from e
