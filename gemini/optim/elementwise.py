"""Update rules that take one element after the other: SGD and Lion, beside Adam in gemini.rules.

``update`` of each defines its bits, in torch lines; the native kernels (csrc/rules.h, one text for CPU and CUDA) leave
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from gemini.planning.rules import RULES
from gemini.rules import ElementwiseRule, Hyper, States, Where, kernel_scalars

# ---- SGD -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SGDRule(ElementwiseRule):
    """SGD with momentum, as in ``torch.optim.SGD``: the buffer starts as the first gradient, without dampening."""

    spec = RULES["sgd"].spec
    hypers: ClassVar[Mapping[str, Hyper]] = {
        "lr": Hyper(1e-3, "learning rate."),
        "momentum": Hyper(0.0, "the momentum factor."),
        "dampening": Hyper(
            0.0,
            "gradients are multiplied by ``1 - dampening`` before they are added to the momentum buffer, except the "
            "first one.",
        ),
        "weight_decay": Hyper(0.0, "the L2 coefficient."),
        "nesterov": Hyper(False, "use Nesterov momentum."),
    }

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ValueError(f"nesterov of {what} needs a momentum, and no dampening")

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        momentum, nesterov = float(group["momentum"]), group["nesterov"]
        return kernel_scalars(
            "sgd",
            wd=float(group["weight_decay"]),
            momentum=momentum,
            fresh=1.0 if step == 1 else 1.0 - float(group["dampening"]),
            of_grad=1.0 if nesterov else 0.0,
            of_buffer=momentum if nesterov else 1.0,
            neg_lr=-float(group["lr"]),
            grad_scale=grad_scale,
        )

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        s, buffer = scalars, states["momentum_buffer"]
        g = grad.float() * s.grad_scale + master * s.wd
        buffer.mul_(s.momentum).add_(g * s.fresh)
        master.add_((g * s.of_grad + buffer * s.of_buffer) * s.neg_lr)


@dataclass(frozen=True)
class PlainSGDRule(ElementwiseRule):
    """SGD without momentum and without any state: 4 bytes per param. With ``step_in_backward`` and
    ``GeminiConfig(gradients="transient")`` it is LOMO (Lv et al., 2023, arXiv:2306.09782).
    """

    spec = RULES["plain-sgd"].spec
    hypers = SGDRule.hypers

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        for name in ("momentum", "nesterov"):
            if group[name]:
                raise ValueError(
                    f"{name} of {what} is {group[name]!r}, and {self.spec.name} keeps no state: wrap the model with "
                    "GeminiConfig(optimizer=gemini.optim.SGDRule()), and make the optimizer with momentum="
                )

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        wd, neg_lr = float(group["weight_decay"]), -float(group["lr"])
        return kernel_scalars("plain_sgd", wd=wd, neg_lr=neg_lr, grad_scale=grad_scale)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        g = grad.float() * scalars.grad_scale + master * scalars.wd
        master.add_(g * scalars.neg_lr)


# ---- Lion ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LionRule(ElementwiseRule):
    """Lion (Chen et al., 2023, arXiv:2302.06675): the step is the sign of an interpolation of momentum and gradient.
    Weight decay is decoupled. The authors advise a learning rate 3 to 10 times smaller than for AdamW, and a weight
    decay as many times larger.
    """

    spec = RULES["lion"].spec
    hypers: ClassVar[Mapping[str, Hyper]] = {
        "lr": Hyper(1e-4, "learning rate. Every element moves by it."),
        "betas": Hyper((0.9, 0.99), "the weights of the interpolation whose sign is the step, and of the momentum."),
        "weight_decay": Hyper(0.0, "decoupled weight decay."),
    }

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
        return kernel_scalars(
            "lion",
            beta1=beta1,
            c1=1.0 - beta1,
            beta2=beta2,
            c2=1.0 - beta2,
            decay=1.0 - lr * float(group["weight_decay"]),
            neg_lr=-lr,
            grad_scale=grad_scale,
        )

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        s, m = scalars, states["exp_avg"]
        g = grad.float() * s.grad_scale
        u = m * s.beta1 + g * s.c1
        sign = (u > 0).float() - (u < 0).float()
        master.mul_(s.decay).add_(sign * s.neg_lr)
        m.mul_(s.beta2).add_(g * s.c2)
