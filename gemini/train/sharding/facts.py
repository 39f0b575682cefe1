"""What ranks compare before they update: which gradients there are, and all that an update depends on besides."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from gemini.ranks.agree import Facts, plain
from gemini.train.gradients.scaling import Scaling
from gemini.train.params.handle import ParamHandle, Stepper, handles_of
from gemini.train.step import StepState


def facts_of_gradients(handles: Sequence[ParamHandle]) -> Facts:
    """State which params have a gradient."""
    names = [handle.name for handle in handles]
    return Facts({"the gradient": array("b", [handle.has_grad for handle in handles])}, names)


def facts_of_step(
    handles: Sequence[ParamHandle], optimizers: Sequence[Stepper], scaling: Scaling, state: StepState
) -> Facts:
    """State all that an update by these optimizers depends on, but the gradients and how they came."""
    values: dict[str, str] = {}
    groups: dict[str, int] = {}
    for which, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            label = f"param group {index}" + (f" of optimizer {which}" if len(optimizers) > 1 else "")
            managed = handles_of(group["params"])
            for name in optimizer.defaults if managed else ():
                values[f"{name} of {label}"] = repr(plain(group.get(name, "not given")))
            # Numbered through all optimizers.
            number = sum(len(other.param_groups) for other in optimizers[:which]) + index
            groups.update((handle.name, number) for handle in managed)
    values["the factor that takes the loss scale out of gradients"] = repr(float(scaling.unscale))
    values["the coefficient of clip_grad_norm_"] = repr(float(state.clipping.coefficient))
    return Facts(
        {
            **values,
            "the param group": array("q", [groups.get(handle.name, -1) for handle in handles]),
            "requires_grad": array("b", [handle.trained for handle in handles]),
            "what zero_grad(set_to_none=False) left": array("b", [h.takes_step and not h.has_grad for h in handles]),
            "the number of updates": array("q", [handle.num_steps for handle in handles]),
            "the clipping": array("d", [handle.clip for handle in handles]),
        },
        [handle.name for handle in handles],
    )
