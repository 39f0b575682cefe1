"""Lightning's ``WeightAveraging`` and ``EMAWeightAveraging`` under ``GeminiStrategy``: the model keeps the averages.

Lightning's callback copies the module before the strategy has it, and averages and exchanges params one by one. Here
the update rule of the model averages in the pass of each update, on the tier of the states, and :class:`gemini.EMA` has
the averages. The callback stays the user's own object, with what its class says of *when* to average, and gets the
hooks of :class:`KeptByModel` in the place of Lightning's. What is no param, a buffer, is averaged as Lightning does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from gemini.errors import GeminiError
from gemini.planning.planes import EMA as PLANE
from gemini.train.averages import EMA
from gemini.train.params.handle import params_of

_EPOCHS = (
    "an average at the end of an epoch is not possible with strategy='gemini', whose averages are made in the pass of "
    "an optimizer step. Leave update_starting_at_epoch out, or let should_update(step_idx=) say when"
)


class Decay:
    """What is kept of the average in the update of that number of a param, as a callback says it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._kept: list[float] = []  # of the updates up to now
        self._averaged = 0  # how many of them counted
        for number in (1, 2, 100):
            kept, taken, both = (self._average(*pair, number) for pair in ((1.0, 0.0), (0.0, 1.0), (3.0, 2.0)))
            if not 0 <= kept <= 1 or max(abs(kept + taken - 1), abs(3 * kept + 2 * taken - both)) > 1e-6:
                raise GeminiError(
                    f"{type(callback).__name__}(avg_fn=, multi_avg_fn=) is no moving average: what it gives must be "
                    "kept * average + (1 - kept) * weight, element by element, with a number from 0 to 1"
                )

    def __call__(self, step: int) -> float:
        while len(self._kept) < step:
            counts = self._callback.should_update(step_idx=len(self._kept))
            # The first one copies, as in AveragedModel.
            self._kept.append(1.0 if not counts else self._average(1.0, 0.0, self._averaged) if self._averaged else 0.0)
            self._averaged += bool(counts)
        return self._kept[step - 1]

    def _average(self, average: float, weight: float, number: int) -> float:
        """A number by the callback's own function."""
        how = self._callback._kwargs
        kept, new, count = (torch.tensor(value, dtype=torch.float64) for value in (average, weight, number))
        if (many := how.get("multi_avg_fn")) is not None:
            many([kept], [new], count)
            return float(kept)
        return float((how.get("avg_fn") or get_swa_avg_fn())(kept, new, count))


class _AveragedBuffers(AveragedModel):
    """The buffers of a module, as they were when it was made, and their averages from then on."""

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(_buffers_of(model))


class KeptByModel(WeightAveraging):
    """The hooks of a callback whose averages the model keeps."""

    decay: Decay
    _inside: AbstractContextManager[None] | None = None
    """While averages and weights have changed places."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """No copy of the module."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        EMA(pl_module)  # or its words on a model that was wrapped by hand, and keeps none
        if self.should_update(epoch_idx=2**31):
            raise GeminiError(f"{type(self).__name__}: {_EPOCHS}")
        self._average_model = _AveragedBuffers(_buffers_of(pl_module), use_buffers=self._use_buffers, **self._kwargs)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.should_update(epoch_idx=trainer.current_epoch):
            raise GeminiError(f"{type(self).__name__}: {_EPOCHS}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._inside is not None:
            with suppress(GeminiError):  # the first error is the one to be told
                self._swap_models(pl_module)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)
        else:
            inside = EMA(pl_module).swapped_in()
            inside.__enter__()
            self._inside = inside
        super()._swap_models(_buffers_of(pl_module))  # type: ignore[arg-type]

    @torch.no_grad()
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        averages = EMA(pl_module)
        for name, param in pl_module.named_parameters():
            if param.requires_grad:
                param.copy_(averages.full_param(name))
        super()._copy_average_to_current(_buffers_of(pl_module))  # type: ignore[arg-type]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning's format: the averages are the ``state_dict``."""
        own = self._average_model
        if own is None:
            return super().on_save_checkpoint(trainer, pl_module, checkpoint)
        current = checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["averaging_state"] = {"n_averaged": own.n_averaged}
        averages: dict[str, Any] = dict(zip(dict(pl_module.named_buffers()), own.module.buffers(), strict=True))
        averages |= {name: state[PLANE] for name, state in _states(trainer, pl_module, checkpoint) if PLANE in state}
        checkpoint["state_dict"] = {name: averages.get(name, value) for name, value in current.items()}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning's own checkpoints too, whose optimizer has no averages, and those of a run that had none."""
        own = self._average_model
        if own is None:
            return super().on_load_checkpoint(trainer, pl_module, checkpoint)
        averages = checkpoint["state_dict"]
        for name, state in _states(trainer, pl_module, checkpoint):
            state.setdefault(PLANE, averages[name])
        for name, buffer in zip(dict(pl_module.named_buffers()), own.module.buffers(), strict=True):
            if name in averages:
                buffer.copy_(averages[name])
        if "averaging_state" in checkpoint:
            own.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
            pl_module.load_state_dict(checkpoint["current_model_state"])


def keep_averages(callbacks: Iterable[Callback]) -> Decay | None:
    """Let the model keep the averages of a callback among these; the decay of its rule, or None where there is none.

    Raises:
        GeminiError: where there are several, or one that averages in another way.
    """
    found: list[Any] = [callback for callback in callbacks if isinstance(callback, WeightAveraging)]
    if len(found) > 1:
        raise GeminiError(f"a model keeps one average, and Trainer has {len(found)} callbacks that average: leave one")
    for callback in found:
        if not isinstance(callback, KeptByModel):
            decay, kind = Decay(callback), type(callback)
            # Behind what its own class says, before what Lightning's does. Its state in checkpoints has the same name.
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            bases = (KeptByModel,) if kind is WeightAveraging else (kind, KeptByModel)
            callback.__class__ = type(kind.__name__, bases, names)
            callback.decay = decay
        return callback.decay  # type: ignore[no-any-return]
    return None


def _buffers_of(module: nn.Module) -> nn.Module:
    """Its buffers in a module without params."""
    found = nn.Module()
    for number, buffer in enumerate(module.buffers()):
        found.register_buffer(str(number), buffer)
    return found


def _states(trainer: pl.Trainer, module: nn.Module, checkpoint: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The states of each param that had a step, by all of its names."""
    states: dict[int, dict[str, Any]] = {}
    for optimizer, saved in zip(trainer.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
        for index, param in enumerate(params_of(getattr(optimizer, "_optimizer", optimizer))):
            if index in saved["state"]:
                states[id(param)] = saved["state"][index]
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in states:
            yield name, states[id(param)]
