"""Lightning: ``Trainer(strategy="gemini")`` and ``Trainer(strategy=GeminiStrategy(...))``.

Importing this module registers the name. The strategy makes the LightningModule itself a managed model, and
``torch.optim.AdamW`` and ``Adam`` a ``HybridAdam``. It takes precision and clipping out of Lightning's hands: no
autocast, and in fp16 a ``gemini.GradScaler``. Processes, samplers and logging are those of Lightning's DDPStrategy.
Checkpoints are ordinary Lightning files with exact fp32 masters and states, written from the chunks param by param.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gemini.config import GeminiConfig
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.optim.around import AveragedRule
from gemini.patches import replaced
from gemini.ranks.agree import Attempt, Point
from gemini.rules import rule_of
from gemini.train.checkpoint.states import rng_states, set_rng_states
from gemini.train.ddp import GeminiDDP
from gemini.train.engine import Engine
from gemini.train.modules.changing import BLOCKS_INSTEAD
from gemini.train.modules.mixed import TARGETS, cast_floats
from gemini.train.optimizers.grad_scaler import GradScaler
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.guard import refuse_in

from .rules import hybrids_of
from .settings import check_config, check_precision, config_of, resolve_config, warn_half
from .torch_files import keep_promises, promised_model_state, promised_optimizer_state, write_torch_file
from .turns import Turns

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import _MockOptimizer
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import grad_norm

    from .lightning_averages import Decay, keep_averages
except ImportError as e:
    raise ImportError(f"gemini.integrations.lightning needs Lightning 2.6 or newer ({e}): pip install lightning") from e

_REFUSED_CALLBACKS = {"StochasticWeightAveraging", "ModelPruning"}
_DDP_ARGUMENTS = {*inspect.signature(ParallelStrategy).parameters, "process_group_backend", "timeout"}
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


_in_place = threading.Lock()
"""Held where a method comes into the place of a forward or goes from there. Nobody waits while holding it."""


class _Method:
    """A method of a model in the place of its forward, for one thread, until that forward begins. Other threads may do
    the same meanwhile, or call the model.
    """

    def __init__(self, model: Any, method: Callable[..., Any]):
        self._model, self._method, self._thread = model, method, threading.get_ident()
        self._is_over = False
        with WHOLE, _in_place:
            self._own = model.__dict__.get("forward")
            model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_over or threading.get_ident() != self._thread:
            own = type(self._model).forward.__get__(self._model) if self._own is None else self._own
            return own(*args, **kwargs)
        self.end()  # calls of the model inside the method run its real forward
        return self._method(*args, **kwargs)

    def end(self) -> None:
        """Put back what was there, as soon as nobody who came later stands in front of it."""
        with WHOLE, _in_place:
            self._is_over = True
            own = self._model.__dict__
            while isinstance(last := own.get("forward"), _Method) and last._is_over:
                own["forward"] = last._own
                if last._own is None:
                    del own["forward"]


def call_as_forward(model: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of ``model`` as its forward runs: params are ordinary. Calls of the model inside are parts of it."""
    in_place = _Method(model, method)
    try:
        return model(*args, **kwargs)
    finally:
        in_place.end()


class GeminiPrecision(Precision):
    """What the strategy puts in the place of Lightning's precision plugin, which would add autocast and torch's
    GradScaler, and clip gradients that are not there. It casts inputs, clips through the managed model, and keeps what
    a checkpoint needs to go on. In fp16 it scales losses and steps through a ``gemini.GradScaler``.
    """

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


class GeminiStrategy(DDPStrategy):
    """Train a LightningModule as a managed model, in one process or in ``devices`` of them.

    Args:
        config: how to manage it; without one budgets are measured. A precision in it must agree with
            ``Trainer(precision=...)``; without, that decides alone (Lightning's default is "32-true": fp32).
        reduce_every_backward: with several ranks and accumulation, reduce gradients after each backward instead of the
            last (``no_sync``): the same within rounding, more traffic, and 4 bytes per param and rank less.
        ddp: arguments of Lightning's DDPStrategy about processes: ``timeout``, ``process_group_backend``,
            ``cluster_environment``, ``checkpoint_io``, ...

    Raises:
        ValueError: for a precision that contradicts the config or is not one of "32-true", "bf16-mixed", "bf16-true",
            "16-mixed", "16-true".
        TypeError: for arguments that would go to DistributedDataParallel, whose place Gemini takes.
    """

    strategy_name = "gemini"
    optimizers: Any
    _precision_plugin: Any

    def __init__(self, config: GeminiConfig | None = None, *, reduce_every_backward: bool = False, **ddp: Any):
        check_config(config, "config")
        if "start_method" in ddp and ddp["start_method"] != "popen":
            raise ValueError(
                f"start_method={ddp['start_method']!r}: a managed model lives in the process that trains it and does "
                "not come back from a spawned one. Run a script (Lightning starts the others), or torchrun"
            )
        if unknown := ddp.keys() - _DDP_ARGUMENTS - {"start_method"}:
            raise TypeError(
                f"GeminiStrategy({', '.join(sorted(unknown))}=...): not an argument of Gemini's, and there is no "
                f"DistributedDataParallel to give it to. Known are config, reduce_every_backward, "
                f"{', '.join(sorted(_DDP_ARGUMENTS))}"
            )
        self.config = config
        self.reduce_every_backward = reduce_every_backward
        self._weights_only: bool | None = None
        self._in_step = False  # whether a step runs as the forward: the model is in its middle, and not interrupted
        self._decay: Decay | None = None
        self._turns = Turns()
        super().__init__(**ddp)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name known to Lightning."""
        strategy_registry.register(cls.strategy_name, cls, description="chunks over GPU, CPU and NVMe, ZeRO-3")

    @property
    def managed(self) -> Any:
        """The LightningModule as a managed model."""
        if not isinstance(self.model, GeminiDDP):
            raise GeminiError("the LightningModule is not managed yet: it is from Trainer.fit, validate, ... on")
        return self.model

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before clipping (with several optimizers: of the last one's).

        It is there from ``on_before_optimizer_step`` on, where it is that of the step to come; without clipping only if
        it is read there. None with ``gradients="transient"``, where gradients are gone by then.
        """
        return self.precision_plugin.grad_norm  # type: ignore[attr-defined,no-any-return]

    @property
    def engine(self) -> Engine:
        """The engine of the managed model."""
        return self.managed._gemini_engine  # type: ignore[no-any-return]

    # ---- precision: Trainer makes a plugin of its own from precision=..., and hands it to this setter ---------------

    @property
    def precision_plugin(self) -> Precision:
        """Always a :class:`GeminiPrecision`."""
        if self._precision_plugin is None:
            self._precision_plugin = GeminiPrecision(self, (self.config or GeminiConfig()).resolved("fp32").precision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, GeminiPrecision):
            self._precision_plugin = plugin
            return
        self._precision_plugin = GeminiPrecision(
            self, precision_of(plugin, self.config), getattr(plugin, "scaler", None)
        )

    # ---- setup and end ----------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """``configure_model`` builds in host memory (the model may be larger than the GPU) and in its own dtypes."""
        with torch.device("cpu"):
            yield

    def setup_environment(self) -> None:
        """The first call of a run: callbacks are set up only then."""
        super().setup_environment()
        module: Any = self.lightning_module
        self._decay = keep_averages(module.trainer.callbacks)

    def setup(self, trainer: pl.Trainer) -> None:
        """Manage the model and, to fit, its optimizers. The order matters: weights of a checkpoint come after it."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        for callback in trainer.callbacks:
            if _REFUSED_CALLBACKS & {base.__name__ for base in type(callback).__mro__}:
                raise GeminiError(
                    f"{type(callback).__name__} copies and rewrites the weights behind Gemini's back: leave the "
                    "callback out. Averages of weights are possible: EMAWeightAveraging, and WeightAveraging with a "
                    "should_update of your own"
                )
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.model = self._manage(self.lightning_module, fitting)
        self._turns.watch(self.model)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _manage(self, module: Any, fitting: bool) -> Any:
        compute = self.precision_plugin.compute  # type: ignore[attr-defined]
        config = resolve_config(self.config, compute, self.root_device)
        if self._decay is not None:
            config = dataclasses.replace(config, optimizer=AveragedRule(rule_of(config.optimizer), self._decay))
        if (existing := config_of(module)) is not None:
            known = dataclasses.replace(existing, device=existing.device or str(self.root_device))
            if known.precision != compute or (self.config is not None and known != config):
                raise GeminiError(
                    f"the model is managed already, with {known}, and this Trainer asks for {config}: a model keeps "
                    "its config. Use the same strategy, or a fresh model with the weights of a checkpoint"
                )
            return module
        if getattr(module, "_compiler_ctx", None) is not None:
            raise GeminiError(f"the LightningModule was compiled as a whole. {BLOCKS_INSTEAD}")
        if compute == "fp32":
            warn_half(module, self.config, compute, 'Trainer(precision=) is "32-true"', "Trainer(precision=)")
        if fitting and self._layer_sync:
            module = self._layer_sync.apply(module)
        for part in module.modules():  # metrics and the like, which move their states themselves
            if type(part)._apply is not torch.nn.Module._apply and not any(True for _ in part.parameters()):
                part.to(self.root_device)
        if fitting and module.automatic_optimization:
            module.zero_grad()  # as Lightning does it before the first backward of every step
        return GeminiDDP(module, config)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Call ``configure_optimizers`` and turn what it gives into HybridAdam."""
        super().setup_optimizers(trainer)
        given = [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]
        found = [optimizer for optimizer in given if not isinstance(optimizer, _MockOptimizer)]
        hybrids = iter(hybrids_of(found))
        self.optimizers = [o if isinstance(o, _MockOptimizer) else next(hybrids) for o in given]

    def teardown(self) -> None:
        """The model stays managed and where it is; what an exception left half done is forgotten."""
        if isinstance(self.model, GeminiDDP):
            self.managed.zero_grad()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """With automatic optimization the step runs as the model's forward; a manual one calls the model itself."""
        module: Any = self.lightning_module
        if not module.automatic_optimization:
            return module.training_step(*args, **kwargs)
        with replaced(self, "_in_step", True):
            return call_as_forward(module, module.training_step, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards of an accumulation but the last."""
        if self.reduce_every_backward:
            yield
        else:
            with self.managed.no_sync():
                yield

    # ---- collectives ------------------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, when all ranks have ended what they do in the model: they may generate other lengths."""
        self._turns.leave()
        super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, after all ranks have ended what they do in the model."""
        self._turns.leave()
        return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, after all ranks have ended what they do in the model."""
        self._turns.leave()
        return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, after all ranks have ended what they do in the model."""
        self._turns.leave()
        return super().all_gather(*args, **kwargs)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the managed model: every bit of the masters, whatever dtype the plain one had."""
        asking = sys._getframe(1)
        if asking.f_code is pl.Trainer._run.__code__:  # it forgets this argument where it restores after setup (2.6)
            self._weights_only = asking.f_locals.get("weights_only")
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """For :meth:`save_checkpoint`: names, shapes and dtypes; ``model.state_dict()`` gives values."""
        if not isinstance(self.model, GeminiDDP):
            return super().lightning_module_state_dict()
        self.engine.state.check_whole()
        if not self._in_step:
            self.engine.recovery.forget_interrupted()
        return promised_model_state(super(GeminiDDP, self.managed))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As ``torch.optim.AdamW`` has it, the states named but not read."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if not isinstance(optimizer, HybridOptimizer):
            return super().optimizer_state(optimizer)
        self.engine.state.check_whole()
        return promised_optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Written by rank 0 while the others serve its reads; a failure is raised on all of them."""
        if not isinstance(self.model, GeminiDDP):
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        with Attempt() as attempt:
            if self.is_global_zero and self._is_local(filepath) and storage_options is None:
                write_torch_file(checkpoint, Path(filepath))
            elif self.is_global_zero:
                values = keep_promises(checkpoint)
                self.checkpoint_io.save_checkpoint(values, filepath, storage_options=storage_options)
        among, refusal = self.engine.ranks.writers, attempt.refusal
        self.engine.shards.agree(Point.SAVE_CHECKPOINT, "Trainer.save_checkpoint", refusal=refusal, among=among)

    def _is_local(self, path: Any) -> bool:
        """Whether the file may be written here; through a CheckpointIO or a URL go values, 12 bytes per param."""
        return type(self.checkpoint_io) is TorchCheckpointIO and "://" not in os.fspath(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A local file is mapped, not read: its pages come when they are copied into chunks."""
        weights_only = self._weights_only if weights_only is None else weights_only
        if self._is_local(checkpoint_path) and zipfile.is_zipfile(checkpoint_path):
            return torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Lightning's own would move the states to the GPU."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


GeminiStrategy.register_strategies(StrategyRegistry)
refuse_in(
    grad_norm,
    "lightning.pytorch.utilities.grad_norm would see no gradient of {name!r}: gradients of a managed model live in "
    "chunks. Use trainer.strategy.grad_norm, which clipping leaves, or model.full_grad(name)",
)
