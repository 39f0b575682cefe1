"""The plain training loop, which defines the bits: a managed model must equal it wherever its chunks live.

It knows nothing of chunks: an ordinary model on the CPU or a device, fp32 masters (for bf16 in two halves), gradients
added up in fp32, the norm over fp64 sums and the update by the torch lines of the rule (``gemini.rules``), param by
param. It uses no native kernel, so that comparing with it compares those too.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from gemini.kernels import reference
from gemini.rules import ADAM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def declared_fp32(model: nn.Module, precision: str) -> list[str]:
    """What transformers keeps in fp32 when it loads this model in ``precision``."""
    plan = model._get_dtype_plan(DTYPES[precision]) if hasattr(model, "_get_dtype_plan") else {}
    return [name for name, _ in model.named_parameters() if any(re.search(pattern, name) for pattern in plan)]


@torch.no_grad()
def adam_update(
    weights: torch.Tensor, residual: torch.Tensor | None, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    grad: torch.Tensor, step: int, grad_scale: float = 1.0, **hypers: Any,
) -> None:  # fmt: skip
    """One update of flat tensors in place, in torch lines alone."""
    assert hypers.keys() <= ADAM.defaults.keys()
    scalars = ADAM.scalars({**ADAM.defaults, **hypers}, step, grad_scale)
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if residual is None:
        ADAM.update(weights, grad, states, scalars, None)
        return
    master = torch.empty_like(exp_avg)
    reference.join_master(weights, residual, master)
    ADAM.update(master, grad, states, scalars, None)
    reference.split_master(master, weights, residual)


class Plain:
    """The loop that defines the bits. ``of`` may give a param, by its name, another lr or weight decay; those in
    ``fp32``, and those that a model of transformers loads so, are of no other dtype.
    """

    def __init__(
        self, model: nn.Module, precision: str = "bf16", *, lr: float = 1e-2, weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decoupled: bool = True,
        scale: float | None = None, fp32: Collection[str] = (),
    ):  # fmt: skip
        self.fp32 = {*fp32, *declared_fp32(model, precision)}
        self.model, self.precision, self.scale = model, precision, scale
        self.hyper: dict[str, Any] = {"betas": betas, "eps": eps, "decoupled": decoupled}
        self.lr, self.weight_decay = lr, weight_decay
        self.of: dict[str, dict[str, Any]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.coefficient = 1.0
        for name, param in model.named_parameters():
            given = param.detach() if param.requires_grad else param.detach().to(self._dtype_of(name))
            master = given.float().contiguous().view(-1).clone()  # of frozen params only the weights are kept
            state: dict[str, Any] = {"step": 0, "weights": master, "residual": None}
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            if self._dtype_of(name) is torch.bfloat16:
                state["weights"], state["residual"] = master.bfloat16(), torch.zeros_like(master, dtype=torch.int16)
                reference.split_master(master, state["weights"], state["residual"])
            self.states[name] = state
            self._show(name, param)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.fp32 else DTYPES[self.precision]

    def _show(self, name: str, param: nn.Parameter) -> None:
        param.data = self.states[name]["weights"].to(self._dtype_of(name), copy=True).view(param.shape)

    def backward(self, loss: torch.Tensor, share: float = 1.0, **kwargs: Any) -> None:
        """``share``: what the loss counts."""
        # A scaler multiplies what the program has divided: of a loss in fp16 its scale alone may overflow.
        of_all = ((self.scale or 1.0) * share, self.scale or 1.0)
        grad, scale = torch.tensor(of_all, dtype=torch.float64, device=loss.device).to(
            loss.dtype
        )  # CUDA refuses to fill a half with inf
        loss.backward(grad if scale.isfinite() else scale, **kwargs)
        self.collect()

    def collect(self) -> None:
        """Take what autograd left in ``.grad`` (for backwards that were started elsewhere)."""
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                grad = param.grad.float().contiguous().view(-1)
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad
                param.grad = None

    def clip(self, max_norm: float) -> float:
        sums = [reference.total(reference.sum_squares(self.grads[n])) for n in self.states if n in self.grads]
        norm = math.sqrt(reference.total(sums)) * (1.0 if self.scale is None else 1.0 / self.scale)
        self.coefficient = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self) -> None:
        if self.scale is not None and not all(grad.isfinite().all() for grad in self.grads.values()):
            self.grads, self.coefficient, self.scale = {}, 1.0, self.scale / 2  # fp16: the step is skipped
            return
        scale = self.coefficient * (1.0 if self.scale is None else 1.0 / self.scale)
        for name, param in self.model.named_parameters():
            if name not in self.grads:
                continue
            state, own = self.states[name], self.of.get(name, {})
            state["step"] += 1
            parts = (state["weights"], state["residual"], state["exp_avg"], state["exp_avg_sq"])
            adam_update(
                *parts, self.grads[name], state["step"], scale, lr=own.get("lr", self.lr),
                weight_decay=own.get("weight_decay", self.weight_decay), **self.hyper,
            )  # fmt: skip
            self._show(name, param)
        self.grads, self.coefficient = {}, 1.0

    def master(self, name: str) -> torch.Tensor:
        state = self.states[name]
        if state["residual"] is None:
            return state["weights"]
        out = torch.empty_like(state["exp_avg"])
        reference.join_master(state["weights"], state["residual"], out)
        return out
