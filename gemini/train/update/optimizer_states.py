"""Whose the states of managed params are, and how they are read and written.

A param belongs to the HybridAdam that was given it last. As in torch a new optimizer starts anew: its params begin with
no steps and moments of zero, whatever an optimizer before it has left in the planes. The master, in bf16 the residual
too, is the model's and stays. The optimizer of before has no states of these params any more, and says so.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.planning.planes import RESIDUAL, RuleSpec
from gemini.train.params.guard import ParamHandle, engine_of, handle_of, optimizer_of

if TYPE_CHECKING:
    from gemini.train.update.optimizer import HybridOptimizer


class States(defaultdict):  # type: ignore[type-arg]
    """``optimizer.state``: of plain params what it holds, of managed ones a look at their planes.

    Never false: torch.distributed.checkpoint makes a step of zeros where it finds no state. It also asks each param for
    the names of its states before it loads values for them.
    """

    def __init__(self, optimizer: HybridOptimizer, states: Mapping[Any, Any]):
        super().__init__(dict, states)
        self._optimizer = weakref.ref(optimizer)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))  # a copy of an optimizer has plain params only

    def __bool__(self) -> bool:
        return True

    def __missing__(self, param: Any) -> Any:
        handle = handle_of(param)
        if handle is None:
            return super().__missing__(param)
        optimizer = self._optimizer()
        if optimizer is not None:
            check_owned(optimizer, [handle])
        return _Planes(handle)


class _Planes(Mapping[str, torch.Tensor]):
    """The states of one managed param by name; each is read, whole and on the CPU, when it is asked for."""

    def __init__(self, handle: ParamHandle):
        self._handle = handle

    def __iter__(self) -> Iterator[str]:
        chunk = self._handle.chunk
        return iter(["step", *chunk.states] if chunk.trained else [])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in list(iter(self)):
            raise KeyError(f"{self._handle.name!r} has no state called {name!r}, only {', '.join(self)}")
        return read_state(self._handle, name)[name]


def own(optimizer: HybridOptimizer, params: Iterable[nn.Parameter]) -> None:
    """From now on the params are the optimizer's; managed ones that were not start anew.

    Raises:
        StorageError: if an update in flight, or a write to the spill file, fails.
    """
    params = list(params)
    taken = [h for p in params if (h := handle_of(p)) is not None and optimizer_of(p) is not optimizer]
    with WHOLE:
        start_anew(taken)
        for param in params:
            param._gemini_optimizer = weakref.ref(optimizer)  # type: ignore[attr-defined]


def start_anew(handles: Iterable[ParamHandle]) -> None:
    """No steps, and moments of zero. Where a param has had no update they are zero already, and nothing is written."""
    used = [handle for handle in handles if handle.num_steps]
    if not used:
        return
    engine = engine_of(used[0])
    if engine.lost is None:  # else a checkpoint is going to overwrite all of it, and nothing less helps
        engine.updates.drain()
    for handle in used:
        if engine.lost is None:
            write_state(handle, {})
        handle.num_steps = 0


def check_owned(optimizer: HybridOptimizer, handles: Iterable[ParamHandle]) -> None:
    """Refuse to go on with params that another optimizer has taken over.

    Raises:
        GeminiError: naming the first of them.
    """
    lost = [handle for handle in handles if optimizer_of(handle.param) is not optimizer]
    if lost:
        others = f" and {len(lost) - 1} more params" if len(lost) > 1 else ""
        raise GeminiError(
            f"{lost[0].name!r}{others} were given to another HybridAdam after this one, which began their moments and "
            "step counts anew: use the newer optimizer, and give every param to one of them only"
        )


def read_state(handle: ParamHandle, name: str | None = None) -> dict[str, torch.Tensor]:
    """The states of one managed param, on the CPU; beside the step count only the one called ``name``, if given."""
    by_names = engine_of(handle).by_names
    state = {"step": torch.tensor(float(handle.num_steps), device="cpu")}
    for kind in handle.chunk.states:
        value = by_names.read_plane(handle, kind) if name in (None, kind) else None
        if value is not None:
            state[kind] = value
    return state


def check_trained(handles: Iterable[tuple[ParamHandle, Any]]) -> None:
    """Refuse states for params that are frozen here, and have nowhere to keep them.

    Raises:
        ValueError: naming the param.
    """
    for handle, state in handles:
        if state and not handle.chunk.trained:
            raise ValueError(
                f"the loaded state has moments of {handle.name!r}, which is frozen here: call requires_grad_(True) "
                "before GeminiDDP(model), or leave its state out"
            )


def write_state(handle: ParamHandle, state: dict[str, Any]) -> None:
    """Overwrite the states of one managed param; without any it has had no update."""
    by_names = engine_of(handle).by_names
    for kind in handle.chunk.states:
        value, plane = state.get(kind), handle.chunk.planes[kind]
        if value is not None:
            by_names.write_plane(handle, kind, value)
        elif not state and kind != RESIDUAL:
            shape = handle.param.shape if plane.block == 1 else (plane.items(handle.param.numel()),)
            by_names.write_plane(handle, kind, torch.zeros((), device="cpu").expand(shape))
    if handle.chunk.trained:  # else it is frozen, and nothing was kept
        handle.num_steps = int(state.get("step", 0))


def empty_states(rule: RuleSpec, param: nn.Parameter) -> dict[str, torch.Tensor]:
    """The states of a plain param before its first update."""
    found = {}
    for spec in rule.planes:
        like = param if spec.block == 1 else torch.empty(spec.num_items(param.numel()), device=param.device)
        found[spec.kind] = torch.zeros_like(
            like, dtype=getattr(torch, spec.dtype), memory_format=torch.contiguous_format
        )
    return found


def plain_state(rule: RuleSpec, param: nn.Parameter, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A loaded state of a plain param, as :meth:`HybridOptimizer.step` has it: a copy."""
    dtypes = {spec.kind: getattr(torch, spec.dtype) for spec in rule.planes}
    if param.dtype is torch.bfloat16:
        dtypes["residual"] = torch.int16
    if param.dtype is torch.float16:
        dtypes["master"] = torch.float32
    found = {"step": torch.tensor(float(state["step"]), device="cpu")}
    for name, dtype in dtypes.items():
        if name in state:
            found[name] = state[name].detach().to(param.device, dtype, copy=True).contiguous()
    return found
