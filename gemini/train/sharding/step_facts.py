"""What a step of several ranks depends on, as facts that they compare before any of them changes a weight."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gemini.ranks.facts import Facts, plain
from gemini.train.gradients.scaled_backward import Scaling
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.stepper import Stepper, optimizer_of
from gemini.train.step import StepState


def facts_of_gradients(handles: Sequence[ParamHandle]) -> Facts:
    """Which params have a gradient."""
    return Facts({"the gradient": array("b", [handle.has_grad for handle in handles])}, _names(handles))


def facts_of_step(
    handles: Sequence[ParamHandle], optimizers: Sequence[Stepper], scaling: Scaling, state: StepState, *,
    clippings: Sequence[str], num_backwards: int, num_dropped: int,
) -> Facts:  # fmt: skip
    """Everything that an update by these optimizers depends on, but the gradients themselves."""
    values = {
        "clip_grad_norm_": ", ".join(clippings) or "not called",
        "the number of backwards since the last step": str(num_backwards),
        "how often zero_grad() dropped gradients since the last step": str(num_dropped),
    }
    groups: dict[str, int] = {}
    number = 0
    for which, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            label = f"param group {index}" + (f" of optimizer {which}" if len(optimizers) > 1 else "")
            managed = [handle for param in group["params"] if (handle := handle_of(param)) is not None]
            for name in optimizer.defaults if managed else ():
                values[f"{name} of {label}"] = repr(plain(group.get(name, "not given")))
            for handle in managed:
                groups[handle.name] = number
            number += 1
    if scaling.loss_scale is not None:
        values["the loss scale"] = repr(float(scaling.loss_scale.scale))
    values["the factor that takes the loss scale out of gradients"] = repr(float(scaling.unscale))
    values["the coefficient of clip_grad_norm_"] = repr(float(state.clip_coefficient))
    return Facts(
        {
            **values,
            "the param group": array("q", [groups.get(handle.name, -1) for handle in handles]),
            "requires_grad": array("b", [handle.trained for handle in handles]),
            "what zero_grad(set_to_none=False) left": array("b", [h.takes_step and not h.has_grad for h in handles]),
            "the number of updates": array("q", [handle.num_steps for handle in handles]),
            "the clipping": array("d", [handle.clip for handle in handles]),
        },
        _names(handles),
    )


def _names(handles: Sequence[ParamHandle]) -> list[str]:
    return [handle.name for handle in handles]


def owners(handles: Sequence[ParamHandle]) -> list[Stepper]:
    """The optimizers of the params, in the order of the model."""
    found = {id(o): o for handle in handles if (o := optimizer_of(handle.param)) is not None}
    return list(found.values())
