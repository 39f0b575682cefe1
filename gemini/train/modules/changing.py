"""What a program changes in a model: parts of it may be compiled, the model as a whole may not, and nothing be added.

No module inside compiled code can gather its weights when it is called, so a compiled module is read as a whole: all
that is under it is gathered when it begins and when the gradient of its output arrives, and has no hooks. Repeated
blocks are the natural parts; a whole model would be gathered at once, so that is refused, and so is a managed model
that is called from inside of compiled code, or has a ``torch.compile(module)`` in it, which renames params.

``module.compile()`` compiles what hooks hang on (``_call_impl``), ``module.forward = torch.compile(module.forward)``
does not; :func:`hook_around` keeps hooks outside of both.

Params that come into a model after it was wrapped are refused: nothing of it would reach them, and their gradients not
be clipped, not be averaged over ranks, not be counted and not be saved. torch tells of every param and module that is
registered anywhere, so looking costs nothing while nothing changes. PEFT is told no before it has changed anything.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from gemini.errors import GeminiError
from gemini.patches import register
from gemini.train.modules.reading import Structure, compiled_part
from gemini.train.params.guard import ManagedParameter
from gemini.train.params.handle import handle_of, handles_of
from gemini.train.step import StepState

_BLOCK = re.compile(r"(?:[^.\d][^.]*\.)*\d+")
"""The path of a repeated block: one number, at its end."""

BLOCKS_INSTEAD = (
    "Compile its blocks: model.compile() of the managed model does, and so does block.compile() for each repeated "
    "block (of a Llama for each of model.model.layers)"
)


# ---- what is compiled ------------------------------------------------------------------------------------------------


def wraps_compiled(module: Any) -> bool:
    """Whether this is what ``torch.compile(module)`` returns."""
    return type(module).__name__ == "OptimizedModule"


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compile each repeated block of ``model`` in place (``block.compile(**options)``); returns how many there are."""
    blocks = [module for path, module in model.named_modules() if _BLOCK.fullmatch(path) and _has_params(module)]
    if not blocks:
        raise GeminiError(
            f"{type(model).__name__} has no repeated blocks (numbered modules such as layers.0) to compile: call "
            "compile() of the parts that are to be compiled"
        )
    for block in blocks:
        block.compile(**options)
    return len(blocks)


def refuse_compiled_whole(structure: Structure) -> None:
    """Refuse what is compiled and cannot be served."""
    model = structure.model
    if wraps_compiled(model) or id(model) in structure.compiled:
        name = type(getattr(model, "_orig_mod", model)).__name__
        raise GeminiError(
            f"{name} is compiled as a whole, and its weights come and go between its modules, which compiled code has "
            f"no place for. {BLOCKS_INSTEAD}"
        )
    for path, module in structure.modules:
        # Before the look at compiled functions: such a wrapper has one, and another remedy.
        if wraps_compiled(module):
            raise GeminiError(
                f"{path!r} is what torch.compile(module) returned, which renames its params to '{path}._orig_mod...', "
                "in checkpoints too. Compile the module in place: module.compile()"
            )
        if id(module) in structure.compiled:
            # Of inductor; other backends tell nothing.
            ask = getattr(compiled_part(module), "get_compiler_config", None)
            found = ask() if callable(ask) else None
            if isinstance(found, dict) and found.get("triton.cudagraphs"):
                raise GeminiError(
                    f"{path!r} is compiled with CUDA graphs, which fix addresses, and its weights come and go. Leave "
                    'mode="reduce-overhead" out, or take mode="max-autotune-no-cudagraphs" for "max-autotune"'
                )
            inside = [(f"{path}.{name}", each) for name, each in module.named_modules() if name]
            if any(_BLOCK.fullmatch(name) and _has_params(each) for name, each in inside):
                raise GeminiError(
                    f"{path!r} is compiled with all the blocks in it, so that all of it would have to be gathered at "
                    f"once. {BLOCKS_INSTEAD}"
                )


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# ---- hooks outside of compiled code ----------------------------------------------------------------------------------


def hook_around(
    module: nn.Module, pre: Callable[..., None], post: Callable[..., Any], *, with_kwargs: bool = False
) -> list[Any]:
    """Call ``pre`` before all other hooks and ``post`` after them, on exceptions too; returns handles to remove them.
    ``pre(module, args)``, with ``with_kwargs`` ``pre(module, args, kwargs)``; ``post(module, args, output)``, output
    None after an exception. What ``post`` returns, if anything, takes the place of the output.
    """
    # `module.forward = torch.compile(module.forward)` leaves torch's hooks outside of what is compiled.
    if module.__dict__.get("_compiled_call_impl") is None:
        return [
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=with_kwargs),
            module.register_forward_hook(post, always_call=True),
        ]
    return [_Outside(module, pre, post, with_kwargs)]


class _Outside:
    """A call in the place of a compiled one, with hooks around it: torch's own would be compiled with it."""

    def __init__(self, module: nn.Module, pre: Any, post: Any, with_kwargs: bool):
        self._inner: Any = module._compiled_call_impl
        self._pre, self._post, self._with_kwargs = pre, post, with_kwargs
        # Weakly: this hangs on the module, and a cycle would keep weights until the garbage collector comes.
        self._module = weakref.ref(module)
        self._is_active = True
        # What is compiled, however many of these are around it.
        self._gemini_inner = getattr(self._inner, "_gemini_inner", self._inner)
        module._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # It was removed while somebody else had wrapped it again, and so could not be taken out.
        if not self._is_active:
            return self._inner(*args, **kwargs)
        module = self._module()
        self._pre(module, args, kwargs) if self._with_kwargs else self._pre(module, args)
        try:
            output = self._inner(*args, **kwargs)
        # Not on KeyboardInterrupt: as with torch's hooks, Recovery ends what that leaves open.
        except Exception:
            self._post(module, args, None)
            raise
        replaced = self._post(module, args, output)
        return output if replaced is None else replaced

    def remove(self) -> None:
        self._is_active = False
        module = self._module()
        # Only if it is still the outermost: what somebody has put over it is not ours to remove.
        if module is not None and module.__dict__.get("_compiled_call_impl") is self:
            module._compiled_call_impl = self._inner


# ---- compiled after wrapping -----------------------------------------------------------------------------------------


class CompiledParts:
    """The compiled parts of a managed model as it was hooked, to tell whether they have changed since."""

    def __init__(self, structure: Structure):
        # Not the root's own: whoever hangs on the root holds this, and a model goes when nobody refers to it.
        self._places = [(module.__dict__, weakref.ref(module)) for _, module in structure.modules[1:]]
        self._seen = self._now(structure.model)

    def have_changed(self, model: nn.Module) -> bool:
        """Look at every module for what was compiled since; called only where somebody has imported the compiler."""
        _leave_our_code_alone()
        now = self._now(model)
        return len(now) != len(self._seen) or any(a is not b for a, b in zip(now, self._seen, strict=True))

    def note(self, model: nn.Module) -> None:
        """Note that the hooks are as the model is now."""
        self._seen = self._now(model)

    def _now(self, model: nn.Module) -> list[Any]:
        found = [compiled_part(model)]
        for place, ref in self._places:
            # A look into a dict for each module in each forward: anything more would be felt by a model of many.
            if "_compiled_call_impl" in place or "forward" in place:
                module = ref()
                if module is not None and (part := compiled_part(module)) is not None:
                    found.append(part)
        return found


def refuse_inside_compiled() -> None:
    """Refuse a call of the model from compiled code, and to export it; asked where the compiler was imported."""
    if torch.compiler.is_compiling():
        raise GeminiError(
            "torch.export does not take a managed model, whose weights come and go: load model.state_dict() into a "
            "plain model, and export that"
        )
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        raise GeminiError(
            "a managed model was called inside of a function that torch.compile compiles: its weights come and go "
            f"between its modules, which compiled code has no place for. {BLOCKS_INSTEAD}"
        )


@cache
def _leave_our_code_alone() -> None:
    """Let hooks run as they are where code compiled by others (a function inside a model) calls modules of ours."""
    # Once for the process, and not at import: that would import the compiler.
    register("torch._dynamo.trace_rules.add", "gemini")


# ---- params and modules that are put into a managed model ------------------------------------------------------------


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
    frame: FrameType | None = sys._getframe(2)
    for _ in range(most):
        if frame is None or frame.f_code in codes:
            return frame
        frame = frame.f_back
    return None


def _refuse_parametrization() -> None:
    """Refuse what computes a managed param from others, as the first of these is registered: nothing has changed."""
    frame = _caller_among(_COMPUTES_WEIGHTS, 6)
    if not frame:
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
        if not handle_of(param):
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
