"""Sophia: momentum divided by an estimate of the diagonal of the Hessian, which is made every few steps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemini.errors import GeminiError
from gemini.optim.elementwise import SophiaGRule, SophiaHRule
from gemini.train.gradients.hutchinson import HessianProbe
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of


class _Sophia(HybridOptimizer):
    @contextmanager
    def _estimating(self, call: str) -> Iterator[None]:
        """What is updated in here are estimates; when it ends there are no gradients.

        Raises:
            GeminiError: where gradients of a training step are still there.
        """
        for param in self._params():
            handle = handle_of(param)
            if param.grad is not None if handle is None else handle.has_grad:
                raise GeminiError(
                    f"{call}() begins while gradients of a training step are there, which would go into the "
                    "estimate: call step() and zero_grad() before it"
                )
        for group in self.param_groups:
            group["estimates_hessian"] = True
        try:
            yield
            self.step()
        finally:
            for group in self.param_groups:
                group["estimates_hessian"] = False
            self.zero_grad()


class SophiaG(_Sophia):
    """Sophia-G: :class:`SophiaGRule`, 12 bytes per param.

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
        lr: learning rate, the most that an element moves in a step.
        betas: decay rates of the average of gradients, and of the average of Hessian estimates.
        rho: the step is divided by ``rho`` times the Hessian. With a smaller ``rho`` more elements are clipped.
        weight_decay: decoupled weight decay.
        bs: the number of tokens of the batch from which the Hessian is estimated.
        step_in_backward: as in :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = SophiaGRule.defaults["lr"],
        betas: tuple[float, float] = SophiaGRule.defaults["betas"],
        rho: float = SophiaGRule.defaults["rho"],
        weight_decay: float = SophiaGRule.defaults["weight_decay"],
        bs: float = SophiaGRule.defaults["bs"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            SophiaGRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            betas=betas,
            rho=rho,
            weight_decay=weight_decay,
            bs=bs,
        )

    @contextmanager
    def estimating_hessian(self) -> Iterator[None]:
        """Gradients of this block go into the estimate of the Hessian, at its end; weights and momentum stay.

        To be used about every tenth step, between steps, with the loss on labels that the model draws itself::

            logits = model(input_ids=ids).logits.float()
            labels = torch.distributions.Categorical(logits=logits).sample()
            with optimizer.estimating_hessian():
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

        An estimate counts as an update of its params: "step" in their states is of both. Gradients are gone afterwards.

        Raises:
            GeminiError: where gradients of a training step are still there; and what :meth:`step` raises.
        """
        with self._estimating("estimating_hessian"):
            yield


class SophiaH(_Sophia):
    """:class:`SophiaHRule`: 12 bytes per param.

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate: no element moves by more.
        betas: of the average of gradients, and of that of estimates.
        rho: how much of the Hessian divides the step (gamma in the paper); smaller clips more elements.
        eps: the least divisor, also where the estimate is negative.
        weight_decay: decoupled decay.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = SophiaHRule.defaults["lr"],
        betas: tuple[float, float] = SophiaHRule.defaults["betas"],
        rho: float = SophiaHRule.defaults["rho"],
        eps: float = SophiaHRule.defaults["eps"],
        weight_decay: float = SophiaHRule.defaults["weight_decay"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            SophiaHRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            betas=betas,
            rho=rho,
            eps=eps,
            weight_decay=weight_decay,
        )

    def estimate_hessian(self, loss: torch.Tensor) -> None:
        """Make an estimate of the Hessian of ``loss`` (a scalar) and average it in; weights and momentum stay.

        To be called about every tenth step, between steps, with the loss of a batch, or of a part of one: it is
        differentiated twice, which needs the room of another graph beside that of a step, and operations that torch
        can differentiate twice (not its fast attention kernels: ``attn_implementation="eager"``)::

            optimizer.estimate_hessian(model(input_ids=ids, labels=ids).loss)

        An estimate counts as an update of its params: "step" in their states is of both. Params whose gradient depends
        on no param keep theirs.

        Raises:
            GeminiError: where gradients of a training step are still there, in fp16, and for a loss that cannot be
                differentiated twice (with context parallel, attention over gathered keys and values cannot); and what
                :meth:`step` raises.
        """
        params = self._params()
        owner = self.owner()
        if owner is not None and owner.config.precision == "fp16":
            raise GeminiError(
                "estimate_hessian() differentiates twice, and no scale of fp16 fits both: use bf16 or fp32"
            )
        with self._estimating("estimate_hessian"):
            probe = HessianProbe(self._num_updates(), params)
            if owner is not None:
                owner.backward.probe = probe
            try:
                self._differentiate_twice(loss, probe, [param for param in params if handle_of(param) is None])
            finally:
                if owner is not None:
                    owner.backward.probe = None

    def _differentiate_twice(self, loss: torch.Tensor, probe: HessianProbe, plain: list[torch.nn.Parameter]) -> None:
        try:
            with warnings.catch_warnings():  # of a cycle between params and gradients, which is not kept
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
                torch.autograd.backward(loss, create_graph=True)
            self._probe_plain(probe, plain)
            probe.product().backward()
            self._probe_plain(probe, plain)
        except RuntimeError as e:
            if isinstance(e, GeminiError) or not re.search("derivative|differentiate twice", str(e)):
                raise
            raise GeminiError(
                "estimate_hessian() differentiates the loss twice, which an operation of the model does not allow: "
                "load the model with attn_implementation='eager', or write that operation with others. torch says: "
                f"{e}"
            ) from e

    @staticmethod
    def _probe_plain(probe: HessianProbe, plain: list[torch.nn.Parameter]) -> None:
        for param in plain:
            if param.grad is not None:
                param.grad = probe.take(param, param.grad)

    def _num_updates(self) -> int:
        """The number of updates that params have had: in their states, so that it goes on from a checkpoint."""
        return max(
            (
                int(self.state[param].get("step", 0)) if handle is None else handle.num_steps
                for param, handle in ((param, handle_of(param)) for param in self._params())
            ),
            default=0,
        )
