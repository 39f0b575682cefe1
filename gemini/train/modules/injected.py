"""Params that come into a model after it was wrapped: refused, never silently left out.

Nothing of a managed model reaches such a param: its gradient would not be clipped, not be averaged over ranks, not be
counted and not be saved. torch tells of every param and module that is registered anywhere, so looking costs nothing
while nothing changes. PEFT is told no before it has changed anything.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection, Iterable
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.nn.utils import stateless
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from gemini.errors import GeminiError
from gemini.patches import register
from gemini.train.modules.compiled import BLOCKS_INSTEAD, wraps_compiled
from gemini.train.params.guard import ManagedParameter
from gemini.train.params.handle import handle_of, handles_of
from gemini.train.step import StepState

num_registered = 0
"""Registrations of params in this process, and of modules in a managed model."""

_watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""The modules of managed models, and what was put into them since, by ``id``: not every module can be hashed."""


_COMPUTES_WEIGHTS = {
    ParametrizationList.__init__.__code__: "original",
    inspect.unwrap(WeightNorm.apply).__code__: "weight",
}
"""Functions of torch that put other params in the place of one, and what they call it."""


def _caller_among(codes: Collection[CodeType], most: int) -> FrameType | None:
    """Find the innermost of so many frames around a hook of torch that runs one of these functions."""
    frame = sys._getframe(2)
    for _ in range(most):
        if frame.f_code in codes:
            return frame
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _refuse_parametrization() -> None:
    """Refuse what computes a managed param from others, as the first of these is registered: nothing has changed."""
    frame = _caller_among(_COMPUTES_WEIGHTS, 6)
    if frame is None:
        return
    found = frame.f_locals
    param = found.get(_COMPUTES_WEIGHTS[frame.f_code])
    if not isinstance(param, ManagedParameter):
        return
    if "module" in found:  # the older weight norm has taken it out already
        others = dict(found["module"]._parameters)
        found["module"]._parameters.clear()
        found["module"]._parameters.update({found["name"]: param, **others})
    raise GeminiError(
        f"managed param {param._gemini.name!r} cannot be computed from other params (weight_norm, "  # type: ignore[attr-defined]
        "spectral_norm or another parametrization): nothing was changed. Register it before GeminiDDP(model), or wrap "
        "again: gemini.release(model), then the parametrization, then GeminiDDP(model, config)"
    )


def _count(module: nn.Module, name: str, param: Any) -> None:
    global num_registered
    _refuse_parametrization()
    num_registered += 1


def watch(modules: Iterable[nn.Module]) -> None:
    """Let :func:`refuse_injected` look at what is put anywhere into ``modules`` from now on."""
    _watched.update({id(module): module for module in modules})


def _holds_managed(module: nn.Module) -> bool:
    """Whether a managed param is in a module, without calling anything of it: it may be half made, and what PEFT puts
    around ``nn.MultiheadAttention`` changes params whenever they are listed.
    """
    # Half made it may have neither of the two dicts.
    own = vars(module)
    return bool(handles_of(own.get("_parameters", {}).values())) or any(
        _holds_managed(child) for child in own.get("_modules", {}).values() if child is not None
    )


def _look_at_new_parent(module: nn.Module, name: str, child: Any) -> None:
    global num_registered
    if type(module) is ParametrizationList:
        _refuse_parametrization()
    if id(module) in _watched and child is not None:  # else it is a list of some layers, made in every forward
        num_registered += 1
        watch(child.modules())
    # Raised while torch registers the child, so before the wrapper is made.
    if name == "_orig_mod" and wraps_compiled(module) and _holds_managed(child):
        raise GeminiError(
            f"torch.compile(module) puts another module around this {type(child).__name__}, which Gemini manages: "
            f"compile in place. {BLOCKS_INSTEAD}"
        )
    if (
        isinstance(child, nn.Module)
        and any(c.__module__.startswith("peft.") for c in type(module).__mro__)
        and _holds_managed(child)
        and not _holds_managed(module)
    ):
        raise GeminiError(
            f"{type(module).__name__} of PEFT was given a model that Gemini manages already: nothing was changed. "
            "Wrap after PEFT: GeminiDDP(get_peft_model(model, peft_config), config)"
        )


register("torch.nn.modules.module.register_module_parameter_registration_hook", _count)
register("torch.nn.modules.module.register_module_module_registration_hook", _look_at_new_parent)


def refuse_injected(state: StepState, module: nn.Module, *, is_root: bool) -> None:
    """Refuse params that are not managed, if anything was registered anywhere since the last look at the root."""
    # One comparison in each forward, as long as nobody registers anything.
    if state.num_looked_at == num_registered:
        return
    for name, param in module.named_parameters():
        if handle_of(param) is None:
            if _caller_among({stateless._functional_call.__code__}, sys.getrecursionlimit()):
                return  # other values for the time of a call: torch computes with them
            raise GeminiError(
                f"param {name!r} was added to the model after GeminiDDP(model): it is not managed, so it would be "
                "left out of clipping, of checkpoints and of what ranks share. Remove it, or add params (adapters, "
                "new heads) first and wrap after: a fresh model, then PEFT, then GeminiDDP(model)"
            )
    # A look at a part says nothing of the rest. Not noted in a functional_call, so that the next forward looks.
    if is_root:
        state.num_looked_at = num_registered
