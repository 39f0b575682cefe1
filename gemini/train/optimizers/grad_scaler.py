"""``GradScaler``: torch's own, for optimizers over managed params as well.

    scaler = gemini.GradScaler()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)          # optional: clip_grad_norm_ sees unscaled gradients then
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()

Gradients of managed params lie scaled in their planes; "unscaling" them looks at their norm (inf or NaN?) and lets the
update multiply. Plain params of the same optimizer, and optimizers that own nothing managed, are torch's business.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gemini.errors import RankMismatch
from gemini.ranks.agree import Point
from gemini.ranks.wire import Tag
from gemini.train.gradients.scaling import Scale, ScaleLoss, Scaling, scaler_steps
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import handles_of, params_of, plain_params_of
from gemini.train.sharding.shards import Company


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for losses of managed models in fp16: the same methods and the same numbers.

    Args:
        device: the type of device that the losses are on. By default "cuda" if there is one, else "cpu".
        init_scale: the first loss scale.
        growth_factor: the scale is multiplied by this after ``growth_interval`` steps in a row without inf or NaN.
        backoff_factor: the scale is multiplied by this after a step with inf or NaN, which is skipped.
        growth_interval: the number of steps before the scale grows.
        enabled: if False, losses are not scaled and ``step`` is ``optimizer.step()``.

    One scaler can be used for several losses, models and optimizers. ``get_scale``, ``is_enabled``, ``state_dict`` and
    the other methods are those of torch. With several ranks a step is skipped on all of them or on none. A skipped step
    drops the gradients of managed params, as every step does. On a GPU the host waits once per step, in ``unscale_``
    (call it after the last backward of a step) or else in ``step``, for the check of the gradients. Both raise
    GeminiError for gradients of a managed model whose loss was not scaled, and RankMismatch if ranks have scaled their
    losses differently.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # The scale of the losses since the last update: gradients refer to it, and it is read before it changes.
        self._current: Scale | None = None

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss (or several, in lists or tuples) by the loss scale.

        Raises:
            ValueError: for something that is neither a tensor nor an iterable of tensors.
        """
        return self._tell(super().scale(outputs)) if self._enabled else outputs

    def _tell(self, scaled: Any) -> Any:
        """Let the backward of each scaled loss tell the models it meets."""
        if isinstance(scaled, torch.Tensor):
            if not scaled.requires_grad:
                return scaled
            if self._current is None:
                self._current = Scale(self._scale)  # type: ignore[arg-type]  # there since `scale` of torch
            return ScaleLoss.apply(scaled, self._current)
        if isinstance(scaled, (list, tuple)):
            return type(scaled)(self._tell(one) for one in scaled)
        return map(self._tell, scaled)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Called by torch's ``unscale_``: what was found, by device; nothing if there are no gradients."""
        handles = handles_of(params_of(optimizer))
        if not handles:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        stepping = owner_of(handles[0]).stepping
        # Sums of squares of all ranks first: inf or NaN is looked for in the whole gradient.
        stepping.settle()
        ready = [handle for handle in handles if handle.has_grad]
        is_bad = stepping.find_nonfinite(ready) if ready else False
        plain = [param for _, param in plain_params_of(optimizer)]
        # torch walks over groups: it is shown the plain params alone.
        view: Any = SimpleNamespace(param_groups=[{"params": plain}])
        found = super()._unscale_grads_(view, inv_scale, found_inf, allow_fp16)
        is_shared = stepping.company.ranks.shares_params
        # With other ranks a plain param's gradient is each rank's own, and all must skip or none.
        if not ready and not (is_shared and plain):
            return found
        if is_shared:
            is_bad = _agree(stepping.company, stepping.scaling, is_bad or any(flag.item() for flag in found.values()))
        stepping.scaling.mark_unscaled(ready)
        device = found_inf.device
        # In torch's own form: `step` skips where any device has found something.
        flag = torch.full_like(found_inf, float(is_bad))
        found[device] = found[device] + flag if device in found else flag
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``unscale_`` unless that was done, then ``optimizer.step()``, or nothing if a gradient holds inf or NaN.

        Raises:
            RuntimeError: for a second step before :meth:`update`.
            AssertionError: if the optimizer has no gradients.
            GeminiError: for gradients of a managed model whose loss was not scaled.
        """
        # Else the optimizer takes the call for one of torch's scaler, and refuses.
        token = scaler_steps.set(True)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            scaler_steps.reset(token)

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # A skipped step drops the gradients too: the next backward would add to inf.
        if isinstance(optimizer, HybridOptimizer) and any(
            found.item() for found in optimizer_state["found_inf_per_device"].values()
        ):
            return optimizer.skip_step()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last ``update`` have found, or set it."""
        self._forget_current()
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or that of a ``torch.amp.GradScaler``."""
        self._forget_current()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_current": None}

    def _forget_current(self) -> None:
        """Let gradients keep the scale that they have: its value is read before it changes."""
        if self._enabled and self._current is not None:
            self._current.snapshot()
            self._current = None


def _agree(company: Company, scaling: Scaling, is_bad: bool) -> bool:
    """Whether any rank has found inf or NaN. Raises RankMismatch if the ranks have scaled their losses differently."""
    # Ranks may stand elsewhere: they meet before a message that only this place sends.
    company.meet_all(Point.SYNC_GRADS)
    # Scales go with the flags: gradients of other scales were added up.
    own = torch.tensor([float(is_bad), scaling.held.value], dtype=torch.float64, device="cpu")
    rows = company.ranks.everyone.swap(Tag.AGREEMENT, own, "the loss scale")
    scales = rows[:, 1].tolist()
    if len(set(scales)) > 1:
        listed = ", ".join(f"{scale:g}" for scale in scales)
        raise RankMismatch(
            f"the losses of this step were scaled by {listed} on the ranks: give their GradScalers the same arguments "
            "and states"
        )
    return bool(rows[:, 0].any())
