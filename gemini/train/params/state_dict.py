"""``state_dict`` and ``load_state_dict`` of a managed model: torch's own walk, with the values taken from chunks.

torch walks the modules (prefixes, hooks, buffers, extra state, strictness stay its business). Reading asks it for the
params themselves and replaces each by a copy of its full weights, tied names sharing one; writing happens where torch
says ``param.copy_(value)``, which the guard turns into a write of the master.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gemini.interrupts import WHOLE
from gemini.ranks.agreement import Point
from gemini.ranks.facts import Facts, value_facts
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, handle_of


def model_state(
    original: Any, destination: Any, prefix: str, read: Callable[[ParamHandle], torch.Tensor]
) -> dict[str, Any]:
    """Names to full values. ``original`` is ``super()`` of the managed model, ``read`` gives those of a param."""
    before = set() if destination is None else set(destination)
    state = original.state_dict(destination=destination, prefix=prefix, keep_vars=True)
    copies: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if name in before:
            continue
        handle = handle_of(value)
        if handle is not None:
            if id(value) not in copies:
                copies[id(value)] = read(handle)
            state[name] = copies[id(value)]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().to("cpu", copy=True)
    return state


def load_model_state(model: nn.Module, by_names: ByName, state: Mapping[str, Any], strict: bool) -> Any:
    """Check everything first, so that a refused state changes nothing; then let torch's loader write.

    With several ranks each writes its part of every param, so all must load the same; a refusal on one is one on all.
    """
    expected: dict[str, Any] = {}
    refusal = None
    try:
        expected = _check(model, state, strict)
    except Exception as e:
        refusal = e

    def facts() -> Facts:
        return value_facts((name, value) for name, value in state.items() if handle_of(expected.get(name)) is not None)

    by_names.agree(Point.LOAD_MODEL, "load_state_dict", facts, refusal)
    with WHOLE, by_names.compared():  # Ctrl-C leaves no model that is half loaded
        return nn.Module.load_state_dict(model, _in_slices(state, expected), strict=strict)


def _in_slices(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of whole values what is here, where params are slices."""
    cuts = {name: handle.cut for name, param in expected.items() if (handle := handle_of(param)) is not None}
    if not any(cuts.values()):
        return state
    values = ((name, value, cuts.get(name)) for name, value in state.items())
    own = OrderedDict((name, value if cut is None else cut.of(value)) for name, value, cut in values)
    own._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return own


def _shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """Of a param that is a slice the shape of the whole."""
    handle = handle_of(value)
    return tuple(value.shape) if handle is None else handle.whole_shape


def _check(model: nn.Module, state: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """What the model has by the names of its state.

    Raises:
        TypeError: for what is no state, and for values that nothing can be copied out of.
        RuntimeError: as torch does it, for missing or unexpected keys and wrong shapes.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict takes a mapping of names to tensors, got {type(state).__name__}")
    expected = nn.Module.state_dict(model, keep_vars=True)
    for name, value in state.items():
        if not isinstance(expected.get(name), torch.Tensor):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"load_state_dict: the value of {name!r} is a {type(value).__name__}, not a tensor")
        if handle_of(expected[name]) is not None and _has_no_numbers(value):
            raise TypeError(
                f"load_state_dict: the value of {name!r} ({value.dtype}, {value.layout}, on {value.device}) is not a "
                "dense tensor with values: load the checkpoint on the CPU, and call .to_dense() or .dequantize()"
            )
    errors = [
        f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from the state, the shape in the "
        f"model is {_shape_of(expected[name])}."
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(expected.get(name), torch.Tensor)
        and tuple(value.shape) != _shape_of(expected[name])
    ]
    if strict:
        missing = [name for name in expected if name not in state]
        unexpected = [name for name in state if name not in expected]
        if missing:
            errors.append(f"Missing key(s): {', '.join(missing)}.")
        if unexpected:
            errors.append(f"Unexpected key(s): {', '.join(map(str, unexpected))}.")
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(errors))
    return expected


def _has_no_numbers(value: torch.Tensor) -> bool:
    """Whether nothing can be copied out of a tensor."""
    return value.is_meta or value.layout is not torch.strided or value.is_quantized or value.is_nested
