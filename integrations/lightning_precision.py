"""Precision under the Lightning strategy: Lightning's flags in our words, and our plugin in the place of its own.

Trainer makes a plugin from ``precision=...`` that would add autocast and torch's GradScaler, and clip gradients that
are not there. Ours casts inputs, clips through the managed model, and keeps what a checkpoint needs to go on. In fp16
it scales losses and steps through a ``gemini.GradScaler``, where Lightning's "16-mixed" uses torch's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from gemini.config import GeminiConfig
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.train.checkpoint.states import rng_states, set_rng_states
from gemini.train.ddp import GeminiDDP
from gemini.train.modules.mixed import TARGETS, cast_floats
from gemini.train.optimizers.grad_scaler import GradScaler

from .settings import check_precision

if TYPE_CHECKING:
    from .lightning import GeminiStrategy

_PRECISIONS = {"32-true": "no", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
"""In accelerate's words: "32-true" is also what Lightning says when its user said nothing."""
_FLAGS = {"fp32": "32-true", "bf16": "bf16-true", "fp16": "16-true"}


def precision_of(plugin: Precision, config: GeminiConfig | None) -> str:
    """What Trainer's plugin means, where ``config`` may have said it already."""
    if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in _PRECISIONS:
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not possible with strategy='gemini': "
            f"use one of {', '.join(map(repr, _PRECISIONS))}"
        )
    return check_precision(_PRECISIONS[plugin.precision], config, f"Trainer(precision={plugin.precision!r})")


class GeminiPrecision(Precision):
    """What the strategy puts in the place of Lightning's precision plugin: inputs, clipping, scaler, RNG states."""

    def __init__(self, strategy: GeminiStrategy, precision: str, scaler: torch.amp.GradScaler | None = None):
        """``scaler``: the one of the plugin that this one replaces; in fp16 it is gone on from."""
        self.precision = _FLAGS[precision]
        self.compute = precision
        self.scaler = GradScaler() if precision == "fp16" else None
        if self.scaler is not None and scaler is not None and scaler.is_enabled():
            self.scaler.load_state_dict(scaler.state_dict())
        self._strategy = strategy
        self._norm: torch.Tensor | None = None
        self._clipped: list[Any] = []
        """Optimizers whose gradients were clipped since their last step."""
        self._before_step: Any = None
        """The optimizer whose gradients are whole, and which has not used them yet."""

    def convert_input(self, data: Any) -> Any:
        """A batch in the compute dtype, for steps too that call parts of the model and not its forward."""
        return data if self.compute == "fp32" else cast_floats(data, COMPUTE_DTYPES[self.compute], but=TARGETS)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:  # type: ignore[override]
        """The loss, scaled in fp16; also of ``manual_backward``."""
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """In fp16: gradients are unscaled before hooks and clipping see them, and a step with inf or NaN is skipped."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        loss = closure()
        if loss is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return loss  # the step was left out, and there was no backward
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """As Lightning's, whose hooks may ask for :attr:`grad_norm` of the gradients they stand before."""
        if all(optimizer is not clipped for clipped in self._clipped):
            self._norm = None  # of the step before
        self._before_step = optimizer
        try:
            super()._after_closure(model, optimizer)
        finally:
            self._before_step = None
            self._clipped = [clipped for clipped in self._clipped if clipped is not optimizer]

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Of the last gradients that were clipped, or that somebody asked for before their step."""
        transient = self._before_step is None or self._strategy.engine.config.gradients == "transient"
        if self._norm is None and not transient:
            self._norm = self._clip(self._before_step, math.inf)
        return self._norm

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of one optimizer's params; ``strategy.grad_norm`` is their norm before."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        self._norm = self._clip(optimizer, clip_val)
        self._clipped.append(optimizer)

    def _clip(self, optimizer: Any, clip_val: float) -> torch.Tensor:
        alone = len(self._strategy.optimizers) == 1
        params = None if alone else [p for group in optimizer.param_groups for p in group["params"]]
        return self._strategy.managed.clip_grad_norm_(clip_val, params=params)  # type: ignore[no-any-return]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Refused."""
        raise GeminiError(
            'gradient_clip_algorithm="value": managed gradients are clipped by their norm only. Use '
            'gradient_clip_algorithm="norm"'
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides Lightning's own: the scaler of fp16, and the RNG states of every rank."""
        if not isinstance(self._strategy.model, GeminiDDP):
            return {}
        states: list[Any] = [rng_states()]
        if self._strategy.world_size > 1:
            states = [None] * self._strategy.world_size
            torch.distributed.all_gather_object(states, rng_states())
        return {"rng": states, "scaler": None if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave; ranks beyond the saved ones keep their RNG states."""
        if self.scaler is not None and state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])
        if self._strategy.global_rank < len(state_dict["rng"]):
            set_rng_states(state_dict["rng"][self._strategy.global_rank])
