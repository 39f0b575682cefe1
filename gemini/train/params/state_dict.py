"""``state_dict`` and ``load_state_dict`` of a managed model: torch's own walk, with the values taken from chunks.

torch walks the modules (prefixes, hooks, buffers, extra state, strictness stay its business). Reading asks it for the
params themselves and replaces each by a copy of its full weights, tied names sharing one; writing happens where torch
says ``param.copy_(value)``, which the guard turns into a write of the master. Both go through the model's own methods,
so that a model which saves or loads more, or otherwise, does so here.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gemini.interrupts import WHOLE
from gemini.ranks.agree import Attempt, Facts, Point, value_facts
from gemini.train.params.by_name import ByName, refuse_codes
from gemini.train.params.handle import ParamHandle, handle_of, original_class


def model_state(
    original: Any, destination: Any, prefix: str, read: Callable[[ParamHandle], torch.Tensor]
) -> dict[str, Any]:
    """Map names to full values. ``original`` is ``super()`` of the managed model, ``read`` gives those of a param. On
    every rank alike: reading takes all of them, in the order of this walk.
    """
    before = set(destination or ())
    state = original.state_dict(destination=destination, prefix=prefix, keep_vars=True)
    # By param: tied names share one copy, as torch.save expects them to.
    copies: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        # A caller's own entries: they may be another model's.
        if name in before:
            continue
        handle = handle_of(value)
        if handle:
            if id(value) not in copies:
                copies[id(value)] = read(handle)
            state[name] = copies[id(value)]
        elif isinstance(value, torch.Tensor):
            # A copy, as of params: the next forward of a norm changes its statistics in place.
            state[name] = value.detach().to("cpu", copy=True)
    return state


def beside_params(model: nn.Module, by_names: ByName) -> dict[str, Any]:
    """Find what the model's own ``state_dict`` has beside managed params: buffers, extra state of modules, whatever
    they add to it. The values themselves, no copies. Scales of codes are not in it, which belong to their params.
    """
    of_codes = tuple(f"{own}." for handle in by_names.handles if handle.chunk.spec.coded for own in handle.names)
    return {
        name: value
        for name, value in own_state(model).items()  # by name too: a hook may have made a copy of a param
        if not handle_of(value) and name not in by_names and not name.startswith(of_codes)
    }


def load_beside_params(model: nn.Module, by_names: ByName, values: Mapping[str, Any]) -> None:
    """Let the model take what :func:`beside_params` gave, in its own way. Managed params stay as they are."""
    state = own_state(model)
    for name in [name for name, value in state.items() if not handle_of(value) and name not in by_names]:
        del state[name]
    state.update(values)
    with by_names.deferred(), WHOLE:  # and never written: the params are those of before
        original_class(model).load_state_dict(model, state)


@contextlib.contextmanager
def undone_on_error(model: nn.Module, by_names: ByName) -> Iterator[None]:
    """Take back what is loaded inside beside params, if there is an error."""
    before = {}
    for name, value in beside_params(model, by_names).items():
        try:
            before[name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        except Exception:  # what it is only the module knows
            before[name] = value
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # a module that does not take what it gave cannot be helped
            load_beside_params(model, by_names, before)
        raise


def own_state(model: nn.Module) -> dict[str, Any]:
    """Call the model's own ``state_dict``: values themselves, managed params as they are at rest."""
    return original_class(model).state_dict(model, keep_vars=True)  # type: ignore[no-any-return]


def load_model_state(model: nn.Module, by_names: ByName, state: Mapping[str, Any], strict: bool) -> Any:
    """Let the model's own loader write, and torch's in it: buffers at once, params when it has nothing against them. So
    a refused state changes nothing. With several ranks each writes its part of every param, so all must load the same;
    a refusal on one is one on all.
    """
    expected: dict[str, Any] = {}
    result: Any = None
    attempt = Attempt()

    def facts() -> Facts:
        return value_facts((name, value) for name, value in state.items() if handle_of(expected.get(name)))

    with contextlib.ExitStack() as writing:
        with undone_on_error(model, by_names):
            # Buffers are written here, params only listed: everything that can refuse does so before the first master.
            with by_names.deferred() as writes, attempt:
                expected = _check(model, state)
                how = {} if strict else {"strict": False}  # a loader of the model's own may not know the word
                own = _in_slices(state, expected)
                with WHOLE:  # torch's no_grad in it would be left on
                    result = original_class(model).load_state_dict(model, own, **how)
            # A collective: a rank whose state was refused comes here too, with its refusal.
            by_names.agree(Point.LOAD_MODEL, "load_state_dict", facts, attempt.refusal)
            writing.enter_context(WHOLE)  # Ctrl-C leaves no model that is half loaded
        with by_names.state.changing():
            for handle, value in writes:
                by_names.write(handle, value)
    return result


def _in_slices(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cut out of whole values what is here, where params are slices."""
    cuts = {name: handle.cut for name, param in expected.items() if (handle := handle_of(param))}
    if not any(cuts.values()):
        return state
    own = OrderedDict((name, cut.of(value) if (cut := cuts.get(name)) else value) for name, value in state.items())
    # torch's loaders look there for versions of modules.
    own._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return own


def _check(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Check values of params, and return what the model has by the names of its state. The rest is its loader's."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes a mapping of names to tensors, got {type(state).__name__}")
    expected = own_state(model)
    errors = []
    for name, value in state.items():
        if not (handle := handle_of(expected.get(name))):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"load_state_dict: the value of {name!r} is a {type(value).__name__}, not a tensor")
        if value.is_meta or value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise TypeError(
                f"load_state_dict: the value of {name!r} ({value.dtype}, {value.layout}, on {value.device}) is not a "
                "dense tensor with values: load the checkpoint on the CPU, and call .to_dense() or .dequantize()"
            )
        refuse_codes(handle, value)
        if handle.cut and tuple(value.shape) != handle.whole_shape:
            errors.append(
                f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from the state, the shape "
                f"in the model is {handle.whole_shape}."
            )
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(errors))
    return expected
