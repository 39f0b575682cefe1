"""Which loss scale the gradients of a model carry.

A backward is *scaled* if its loss went through ``scale`` of a ``gemini.GradScaler``, which puts a node behind it that
tells when its backward begins; one that a node of a scaled one starts (reentrant checkpointing) is scaled with it.
Gradients lie in their planes as they come, multiplied, and the update takes the scale out. In fp16 a gradient of a
backward that is not scaled is refused before it lands: it would have lost bits, or all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from gemini.errors import GeminiError
from gemini.train.gradients.store import GradientStore
from gemini.train.params.handle import ParamHandle, ParamSet, optimizer_of, owners_of, stepping_in_backward
from gemini.train.step import StepState, at_end_of_backward

_graph_task = torch._C._current_graph_task_id

# ---- the scale of a backward -----------------------------------------------------------------------------------------


class Scale:
    """The loss scale between two of its changes. On a GPU the host waits for its value only when it is asked for."""

    def __init__(self, value: float | torch.Tensor):
        self._given = value

    @cached_property
    def value(self) -> float:
        """The number, for which the host waits, once, where it is on a GPU."""
        return float(self._given)

    def snapshot(self) -> None:
        """Keep the value: the tensor it is read from is about to change."""
        if "value" not in vars(self):
            self._given = torch.as_tensor(self._given).clone()


UNSCALED = Scale(1.0)  # that of gradients whose loss no scaler has scaled

scaler_steps: ContextVar[bool] = ContextVar("scaler_steps", default=False)
"""Whether a scaler that knows managed params is what asks an optimizer to step."""

are_any_scaled = False  # whether any loss of this process was ever scaled: else no backward need be asked for its scale


class ScaledBackward(NamedTuple):
    """A backward of a scaled loss, and the thread that it began on."""

    scale: Scale
    thread: int
    runs: Callable[[], object]


_running: dict[int, ScaledBackward] = {}
"""By backward, as autograd numbers them: the scaled ones that run, in the order in which they began, and those that
broke off since the last one began."""


class ScaleLoss(torch.autograd.Function):
    """Identity on a loss that was multiplied by a scaler's scale; in backward it tells so."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: Scale) -> torch.Tensor:  # type: ignore[override]
        # From the first scaled loss on every backward is asked; before, none need be.
        global are_any_scaled
        are_any_scaled = True
        ctx.scale = scale
        # A loss may be changed in place afterwards, which autograd forbids for views.
        return loss.clone() if loss.dim() == 0 else loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        task = _graph_task()
        if task not in _running:
            for other in [other for other, scaled in _running.items() if not scaled.runs()]:
                _forget(other)  # it broke off
            runs = at_end_of_backward(partial(_forget, task))
            _running[task] = ScaledBackward(ctx.scale, threading.get_ident(), runs)
        return grad, None


def _forget(task: int) -> None:
    _running.pop(task, None)


def _running_scale() -> Scale:
    """The scale of the backward that runs here."""
    own = _running.get(_graph_task())
    if own is not None:
        return own.scale
    around = [scaled for scaled in list(_running.values()) if scaled.runs()]
    # On a CPU a backward waits in the very thread that runs it, so what is scaled here is what this one is inside of.
    here = [scaled for scaled in around if scaled.thread == threading.get_ident()]
    # Nodes of a GPU run in a thread of autograd's own, those of a loss on the CPU elsewhere: only of a single scaled
    # backward is it known that this one is inside of it.
    if not here and len(around) == 1 and torch.cuda.is_initialized():
        here = around
    return here[-1].scale if here else UNSCALED


# ---- of one model ----------------------------------------------------------------------------------------------------


class Scaling:
    """The loss scale of one model's gradients. Called by the training thread, or by the one that runs its backward.
    ``is_needed``: whether gradients that are not scaled are refused: in fp16.
    """

    def __init__(self, params: ParamSet, state: StepState, gradients: GradientStore, *, is_needed: bool):
        self._params, self._state, self._gradients = params, state, gradients
        self.is_needed = is_needed
        self.held = UNSCALED  # of the gradients that wait for the update
        self.is_scaled = False  # whether that is a scaler's: else nobody need ask for it
        # By name: params that `unscale_` was called for since the last backward.
        self._unscaled: set[str] = set()
        self._entered = -1  # the backward that was looked at last, as autograd numbers them

    # ---- backward -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A gradient is about to land: find, once for each backward, which scale it has. Not when a backward reaches
        the model: ``torch.autograd.grad`` with respect to inputs keeps nothing of a param, and needs no scale. Raises
        GeminiError in fp16 if it has none, and where gradients of different scales would be added up. None has landed
        of this backward.
        """
        # By number, not by phase: a backward that broke off leaves its phase to the next one.
        task = _graph_task()
        if task == self._entered:
            return
        scale = _running_scale()
        if scale is not UNSCALED:
            self._refuse_updates_inside()
        elif self.is_needed:
            raise GeminiError(
                "in fp16 the loss of this backward was not scaled, or not by a gemini.GradScaler (torch's own, and one "
                "with enabled=False, are none): its gradients would underflow, and none of them was kept. Use "
                "gemini.GradScaler as torch.amp.GradScaler: scaler.scale(loss).backward(); scaler.step(optimizer); "
                'scaler.update(). precision="bf16" needs no scaler'
            )
        self._hold(scale)
        # Last: what was refused is looked at again when its next gradient comes.
        self._entered = task

    def _hold(self, scale: Scale) -> None:
        """Note that the gradients that are about to land have this scale. Raises GeminiError if those that are there
        have another one, or are unscaled already. Those that nobody will use any more are dropped if they have.
        """
        if scale is self.held is UNSCALED:
            return  # nothing there is a scaler's: no gradient need be looked at
        waiting = _to_be_used(self._params.handles)
        if not waiting and not self._state.num_unreduced:
            left = [handle for handle in self._params.handles if handle.has_grad]
            if left and self._is_other(scale):
                self._gradients.discard(left)
            self.held, self.is_scaled, self._unscaled = scale, scale is not UNSCALED, set()
            return
        if any(handle.name in self._unscaled for handle in waiting):
            raise GeminiError(
                "a backward after GradScaler.unscale_(): its gradients would be added to unscaled ones. Call unscale_ "
                "after the last backward of a step, and optimizer.zero_grad() after the step"
            )
        self._unscaled = set()
        if self._is_other(scale):
            raise GeminiError(
                f"gradients of an earlier backward are {_said(self.held)}, those of this one {_said(scale)}: they "
                "cannot be added up. Scale every loss of a step by the same GradScaler, call its update() once at the "
                "end of a step, and optimizer.zero_grad() where gradients are to be dropped"
            )

    def _is_other(self, scale: Scale) -> bool:
        """Whether gradients of ``scale`` cannot be added to those that are there."""
        # By value only where it is another object: comparing values waits for the device.
        return scale is not self.held and (UNSCALED in (scale, self.held) or scale.value != self.held.value)

    def _refuse_updates_inside(self) -> None:
        """Whether a scaled step is skipped is known only when all gradients are there."""
        if not stepping_in_backward:
            return
        # A guess is undone where the step is skipped.
        if any(o.step_in_backward and not o.speculate for o in owners_of(self._params.handles)):
            raise GeminiError(
                "GradScaler with HybridAdam(step_in_backward=True): whether a step is skipped is known only when all "
                "gradients are there. Leave step_in_backward out, or the scaler (only fp16 needs one)"
            )

    # ---- the step -----------------------------------------------------------------------------------------------

    @property
    def unscale(self) -> float:
        """The factor by which gradients in the planes are multiplied to be those of the loss."""
        return 1.0 / self.held.value

    def left_scaled(self, handles: Iterable[ParamHandle]) -> list[ParamHandle]:
        """Params whose gradients no optimizer uses, so no scaler unscales: norms see them as they are, in torch."""
        handles = list(handles)
        if not self.is_scaled:
            return []
        used = {id(handle) for handle in _to_be_used(handles)}
        return [h for h in handles if h.has_grad and id(h) not in used and h.name not in self._unscaled]

    def unscale_seen(self, handles: Iterable[ParamHandle]) -> float:
        """The factor of :attr:`unscale` for who looks at gradients now: 1 until ``GradScaler.unscale_``, as in torch.
        Raises GeminiError if some are unscaled and some are not.
        """
        done = {handle.name in self._unscaled for handle in _to_be_used(handles)} if self.is_scaled else set()
        if len(done) > 1:
            raise GeminiError(
                "clip_grad_norm_ over gradients of which some are unscaled and some are not: call "
                "scaler.unscale_(optimizer) for each of the optimizers first, or clip each one's params"
            )
        return self.unscale if done == {True} else 1.0

    def mark_unscaled(self, handles: Iterable[ParamHandle]) -> None:
        """Note ``GradScaler.unscale_``: nothing is computed, the update multiplies."""
        self._unscaled.update(handle.name for handle in handles)

    def check_unscaled(self, handles: Iterable[ParamHandle]) -> None:
        """Refuse an update with gradients that a scaler has scaled and not unscaled."""
        if self.is_scaled and any(handle.name not in self._unscaled for handle in handles):
            raise GeminiError(
                "optimizer.step() on gradients that GradScaler has scaled: call scaler.step(optimizer), which unscales "
                "them and skips steps with inf or NaN"
            )


def _to_be_used(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Params whose gradient waits for an update: of those that belong to an optimizer, or of all if none does."""
    handles = list(handles)
    owned = [handle for handle in handles if optimizer_of(handle.param) is not None]
    return [handle for handle in owned or handles if handle.has_grad]


def _said(scale: Scale) -> str:
    """The scale in words, for errors."""
    return "not scaled by a GradScaler" if scale is UNSCALED else f"scaled by {scale.value:g} (GradScaler)"
