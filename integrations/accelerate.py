"""``GeminiAccelerator``: accelerate's ``Accelerator`` for models that Gemini manages, in the loop people already have.

    accelerator = GeminiAccelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

``prepare`` manages the model in place of DDP and device moves, and makes AdamW a HybridAdam where it stands. Autocast
stays off: precision is the config's. In fp16 ``accelerator.scaler`` is a ``gemini.GradScaler``, which ``backward``,
clipping and ``optimizer.step`` use as accelerate's own. The Hugging Face Trainer integration uses the same class.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import GeminiError, StorageError
from gemini.patches import replaced
from gemini.replacing import find, place_of
from gemini.sharing import SharedBudget
from gemini.train.checkpoint.format import read_manifest
from gemini.train.checkpoint.saving import load_checkpoint, save_checkpoint
from gemini.train.context import sequence_batch
from gemini.train.ddp import GeminiDDP
from gemini.train.modules.changing import BLOCKS_INSTEAD
from gemini.train.optimizers.grad_scaler import GradScaler
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import handles_of

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, recursively_apply
except ImportError as e:
    raise ImportError(
        f"the integrations of Trainer and Accelerate need accelerate 1.12 or newer ({e}), part of the extra 'trainer' "
        "of Gemini: pip install 'accelerate>=1.12'",
        name="accelerate",
    ) from e

from .beside import manage_beside
from .rules import owns_managed, to_hybrid
from .settings import Parallel, check_config, check_precision, config_of, parallel_of, resolve_config, warn_half
from .turns import Turns

_STATE_ID = "gemini.json"
Pairs = list[tuple[str, Any, HybridOptimizer]]
"""Folder, model and optimizer of each model that is trained here."""
Around = tuple[Callable[..., None], Callable[..., None]]


class GeminiAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` manages the model with Gemini.

    Args:
        gemini_config: how to manage models; None for measured budgets. Without a precision in it, ``mixed_precision``
            says that.
        parallelism_config: accelerate's: chunks are divided over ``dp_shard_size`` (and over ``cp_size``), replicated
            over ``dp_replicate_size``, layers sliced over ``tp_size``, and sequences divided over ``cp_size``, or over
            ``sp_size`` by Ulysses. A batch is cut by ``accelerator.sequence_batch(batch)``.
        mixed_precision: "bf16", "fp16" or "no" (fp32, unless the config says another); must not contradict the config.
        **kwargs: accelerate's.

    With several processes every micro-batch's gradients are reduced at once, so that a rank keeps its shard only.
    ``with accelerator.no_sync(model)`` keeps them whole on each rank, and so does ``accumulate`` if you pass a
    ``gradient_accumulation_plugin`` (its ``sync_each_batch=False`` is accelerate's default).

    Raises:
        ValueError: for what Gemini takes the place of (DeepSpeed, FSDP, Megatron, torch.compile, fp8), and for
            precisions that differ.
    """

    _models: list[Any]
    _optimizers: list[Any]
    scaler: Any
    _gemini_config: GeminiConfig | None
    _gemini_flag: str | None
    _gemini_parallel: Parallel
    _gemini_beside: list[nn.Module] | None = None
    """What is evaluated beside the model that is trained, and managed together with it; None: it stays plain."""
    _gemini_turns: Turns

    def __init__(self, *args: Any, gemini_config: GeminiConfig | None = None, **kwargs: Any):
        flag = kwargs.pop("mixed_precision", None)
        parallelism = kwargs.pop("parallelism_config", None)  # accelerate would bring FSDP or DeepSpeed for it
        plugin = kwargs.get("gradient_accumulation_plugin")
        super().__init__(*args, mixed_precision="no", **kwargs)
        if flag is None:
            flag = os.environ.get("ACCELERATE_MIXED_PRECISION")
        self.adopt(
            gemini_config, None if flag is None else str(flag), reduce_always=plugin is None, parallelism=parallelism
        )

    def adopt(
        self, config: GeminiConfig | None, flag: str | None, *, reduce_always: bool, parallelism: Any = None
    ) -> None:
        """What ``__init__`` adds to accelerate's; a Trainer's accelerator is given this class, then this."""
        check_config(config)
        check_precision(flag, config, f"mixed_precision={flag!r}")
        if self.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ValueError(
                f"accelerate is configured for {self.distributed_type.value}: Gemini takes its place. Run "
                "`accelerate config` again without it, or start with torchrun"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise ValueError(
                "torch.compile of a whole managed model is not supported: leave torch_compile= (dynamo_backend=, "
                f"ACCELERATE_DYNAMO_BACKEND) out. {BLOCKS_INSTEAD}"
            )
        if self.parallelism_config is not None and self.parallelism_config.total_size > 1:
            raise ValueError(
                "accelerate was started with a parallelism config (ACCELERATE_USE_PARALLELISM_CONFIG), for which it "
                "brings FSDP or DeepSpeed: leave that out and pass parallelism_config= to GeminiAccelerator"
            )
        parallel = self._gemini_parallel = parallel_of(parallelism, self.num_processes, self.device.type)
        if self._sharing > 1:
            self._let_ranks_read()
        if parallel.mesh is not None:  # last of what may be refused: all accelerators of a process share their state
            self.state.device_mesh = parallel.mesh  # by which accelerate's data loaders divide samples
        self._gemini_config, self._gemini_flag = config, flag
        self._gemini_turns = Turns()
        if flag == "fp16" or (config is not None and config.precision == "fp16"):
            self._scale_losses()
        if reduce_always:
            self.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def _let_ranks_read(self) -> None:
        """accelerate reads an iterable dataset in one process for all, each of which gets other samples, also those
        that share a batch: each reads its own in its place.
        """
        if self.dataloader_config.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True gives every process other samples, also those that share a batch (cp_size, "
                "sp_size, tp_size): leave it out, each process reads the dataset"
            )
        self.dataloader_config.dispatch_batches = False

    def _scale_losses(self) -> None:
        """Make the scaler that fp16 needs, as a ``GradScalerKwargs`` handler says."""
        if self.scaler is None:
            how = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = GradScaler(self.device.type, **how)

    @property
    def mixed_precision(self) -> str:
        """What was asked for. accelerate itself is told "no", so that it adds neither autocast nor its own scaler."""
        return self._gemini_flag or "no"

    # ---- prepare ------------------------------------------------------------------------------------------------

    def manage(self, model: nn.Module) -> Any:
        """``GeminiDDP(model)`` unless it is managed already, and what is evaluated beside it in its budget.

        Raises:
            ValueError: for models that were dispatched with ``device_map=``, or managed in another precision.
        """
        if isinstance(model, GeminiDDP):
            self.check_managed(model)
            if config_of(model).precision == "fp16":  # type: ignore[union-attr]
                self._scale_losses()
            self._manage_beside(model, config_of(model))
            self._gemini_turns.watch(model)
            return model
        if len({str(where) for where in (getattr(model, "hf_device_map", None) or {}).values()}) > 1:
            raise ValueError("the model was spread out with device_map=: load it without, Gemini places its weights")
        config = resolve_config(
            self._gemini_config, self._gemini_flag, self.device, accumulates=self.gradient_accumulation_steps > 1
        )
        model = GeminiDDP(model, self._manage_beside(model, config), mesh=self._gemini_parallel.mesh)
        self._gemini_turns.watch(model)
        return model

    def _manage_beside(self, model: nn.Module, config: Any) -> Any:
        """Manage what is evaluated beside ``model``; the config for that one. A model with a budget of its own alone,
        which has planned with all of it, leaves them plain.
        """
        beside, self._gemini_beside = self._gemini_beside, None if self._gemini_beside is None else []
        if not beside:
            return config
        if isinstance(model, GeminiDDP) and not isinstance(config.memory, SharedBudget):
            for each in beside:
                super().prepare_model(each, evaluation_mode=True)
            return config
        config = manage_beside(beside, model, config, self._gemini_parallel.mesh)
        own = {*model.parameters()}
        for each in beside:
            if isinstance(each, GeminiDDP):
                self._gemini_turns.watch(each)
            elif own.isdisjoint(each.parameters()):  # it stays plain, and nobody else brings it to the device
                super().prepare_model(each, evaluation_mode=True)
        return config

    @property
    def context_size(self) -> int:
        """Ranks that have parts of the same sequences: ``cp_size`` or ``sp_size`` of the ``parallelism_config``."""
        return self._gemini_parallel.size_of("cp")

    @property
    def tensor_size(self) -> int:
        """Ranks that have slices of the same layers: ``tp_size`` of the ``parallelism_config``."""
        return self._gemini_parallel.size_of("tp")

    @property
    def _sharing(self) -> int:
        """Ranks that compute with the same samples."""
        return self.context_size * self.tensor_size

    def sequence_batch(self, batch: Any) -> Any:
        """This rank's part of a batch (:func:`gemini.sequence_batch`); without ``cp_size`` the batch as it is."""
        return batch if self.context_size == 1 else sequence_batch(batch, self._gemini_parallel.mesh)

    def gather(self, tensor: Any) -> Any:
        """As accelerate's, when all ranks have ended what they do in the model: they may generate other lengths."""
        self._gemini_turns.leave()
        return super().gather(tensor)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, after all ranks have ended what they do in the model."""
        self._gemini_turns.leave()
        return super().reduce(*args, **kwargs)

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, after all ranks have ended what they do in the model."""
        self._gemini_turns.leave()
        return super().pad_across_processes(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """As accelerate's, after all ranks have ended what they do in the model."""
        self._gemini_turns.leave()
        super().wait_for_everyone()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's. Ranks that share a batch (``cp_size``, ``sp_size``, ``tp_size``) have the same: it counts
        once.
        """
        sharing = self._sharing
        if sharing == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        gather = self.gather

        def once(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (self.num_processes // sharing, sharing, -1))[:, 0].flatten(0, 1)

        if use_gather_object or not _is_of_tensors(input_data):
            return super().gather_for_metrics([] if self.process_index % sharing else input_data, True)
        with replaced(self, "gather", lambda data: recursively_apply(once, gather(data))):
            return super().gather_for_metrics(input_data)

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where it would have to do something.

        Raises:
            ValueError: with ``cp_size`` or ``sp_size``.
        """
        if self.context_size > 1:
            raise ValueError(
                "maybe_context_parallel cuts buffers for torch's own context parallel: write "
                "model(**accelerator.sequence_batch(batch)) in its place"
            )
        return nullcontext()

    def check_managed(self, model: nn.Module) -> None:
        """Compare a model that may be managed already with what was asked for."""
        there = config_of(model)
        if there is not None:
            check_precision(self._gemini_flag, there, f"mixed_precision={self._gemini_flag!r}")
            if self._gemini_config is not None and _said(there) != _said(self._gemini_config.resolved(there.precision)):
                raise ValueError(
                    "the model is managed already, with another config: leave gemini_config= out, or give the bare "
                    "model"
                )

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's, models first; what belongs to a managed model is converted.

        Raises:
            ValueError: for an optimizer of another rule than the model's (:mod:`gemini.integrations.rules`).
        """
        for obj in args:
            if isinstance(obj, nn.Module):
                if self._gemini_flag in (None, "no"):
                    unsaid, flag = "mixed_precision= was not given", 'mixed_precision="{}"'
                    warn_half(obj, self._gemini_config, "fp32", unsaid, flag)
                self.manage(obj)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Manage a model that is to be trained. With ``evaluation_mode`` another model (a teacher) stays plain; of a
        Trainer it is frozen, and managed with the trained one in its budget. One that is managed is taken as it is.
        """
        if not evaluation_mode:
            self.manage(model)
        elif not isinstance(model, GeminiDDP):
            if self._gemini_beside is None:
                return super().prepare_model(model, device_placement, evaluation_mode)
            self._gemini_beside.append(model.requires_grad_(False))
            return model
        if not any(model is known for known in self._models):
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Convert where it stands, and wrap without moving states."""
        if getattr(optimizer, "_is_accelerate_prepared", False) or not owns_managed(optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = AcceleratedOptimizer(to_hybrid(optimizer), device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    # ---- a step -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, learning_rate: float | None = None, **kwargs: Any) -> None:
        """As accelerate's; ``learning_rate``, which the Trainer adds for LOMO, stands in the optimizer's groups."""
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale what fp16 has scaled, of all optimizers or of those given; without a scaler nothing is done."""
        if self.scaler is None:
            return
        given = optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
        for one in self._optimizers if optimizer is None else given:
            while isinstance(one, AcceleratedOptimizer):
                one = one.optimizer
            self.scaler.unscale_(one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients of a managed model, or of those of its params, to ``max_norm``; returns their norm before.

        Raises:
            ValueError: for params of several models, and before the last micro-batch of an accumulation.
        """
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        handles = handles_of(params)
        if not handles:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        engine = owner_of(handles[0])
        if len(handles) < len(params) or any(owner_of(handle) is not engine for handle in handles):
            raise ValueError(
                "clip_grad_norm_ was given params of several models, and the norm of a managed one is its own: clip "
                "each model by itself, or prepare them as one (nn.ModuleDict), whose norm is that of all"
            )
        if not self.sync_gradients:
            raise ValueError(
                "clip_grad_norm_ before the last micro-batch: clipping now and again would scale gradients that are "
                "still to come. Write `if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)`"
            )
        model = next((m for m in self._models if m.__dict__.get("_gemini_engine") is engine), None)
        if model is None:
            raise ValueError("clip_grad_norm_ was given the params of a model that this accelerator has not prepared")
        self.unscale_gradients([optimizer for optimizer in self._optimizers if engine_in(optimizer) is engine])
        is_all = {*params} >= {handle.param for handle in engine.params.handles if handle.param.requires_grad}
        return model.clip_grad_norm_(max_norm, norm_type, params=None if is_all else params)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused for managed params: their gradients are clipped by norm only."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if handles_of(params):
            raise ValueError("clip_grad_value_ on a managed model: use clip_grad_norm_, its gradients live in chunks")
        super().clip_grad_value_(params, clip_value)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """``model.no_sync()``: whole gradients stay on each rank until the next backward outside."""
        with model.no_sync() if isinstance(model, GeminiDDP) else super().no_sync(model):
            yield

    # ---- saving and loading: accelerate's folder, with Gemini's checkpoint inside -------------------------------
    #
    # What accelerate knows (schedulers, RNGs, samplers, registered objects) it writes itself; masters, states and step
    # counts of managed models are a Gemini checkpoint in the same folder. An identifier written into both tells whether
    # they belong together.

    def save_model(self, model: nn.Module, save_directory: Any, max_shard_size: Any = "10GB", **kwargs: Any) -> None:
        """As accelerate's; a managed transformers model is streamed from its tiers, with its config. All ranks call."""
        if isinstance(model, GeminiDDP) and hasattr(model, "config"):
            model.save_pretrained(save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, **kwargs)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Everything a resumed run needs to be the same run, bit for bit. All ranks call, between steps.

        Managed models and their optimizers go into ``output_dir/gemini`` (``gemini_1``, ...), the rest where accelerate
        puts it. Hooks of ``register_save_state_pre_hook`` are given models and weights as by accelerate; those of
        managed models are whole in memory for them. A state whose saving was interrupted is refused by
        :meth:`load_state`; give each a folder of its own.
        """
        token = uuid.uuid4().hex
        pairs = self._managed_pairs()
        with self._without(pairs, self._save_model_state_pre_hook, _around_saving(pairs)):
            location = Path(super().save_state(output_dir, safe_serialization, **kwargs))
        if pairs and self.is_main_process:
            (location / _STATE_ID).write_text(json.dumps({"id": token}))
        for folder, model, optimizer in pairs:
            save_checkpoint(location / folder, model, optimizer, extra={"id": token})
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """What :meth:`save_state` saved; with automatic naming and no ``input_dir`` the newest that is whole.

        Hooks of ``register_load_state_pre_hook`` are given the managed models when these are loaded. What a hook then
        loads into one stays, and where it is the weights that were saved no bit of their masters changes.

        Raises:
            StorageError: if it was not saved by this class, its saving was interrupted, or it is damaged.
            PlanMismatch: if it was saved for another model, precision or other groups. In both cases nothing was
                changed (of several models: but those that were loaded before).
        """
        pairs = self._managed_pairs()
        if pairs:
            input_dir = self._newest_whole(pairs) if input_dir is None else Path(input_dir).expanduser()
            _check_state(Path(input_dir), pairs)
        for folder, model, optimizer in pairs:  # before the rest: what it refuses leaves all as it was
            load_checkpoint(Path(input_dir) / folder, model, optimizer)
        with self._without(pairs, self._load_model_state_pre_hook, _around_loading(pairs)):
            super().load_state(None if input_dir is None else str(input_dir), load_kwargs, **kwargs)

    def _managed_pairs(self) -> Pairs:
        """Folder, model and optimizer of each model that is trained here."""
        pairs: Pairs = []
        for model in self._models:
            engine = model.__dict__.get("_gemini_engine")
            own = [o.optimizer for o in self._optimizers if engine is not None and engine_in(o) is engine]
            if len(own) > 1:
                raise ValueError("save_state: the model has several optimizers; make one HybridAdam with groups")
            if own:
                pairs.append((f"gemini_{len(pairs)}" if pairs else "gemini", model, own[0]))
        return pairs

    @contextmanager
    def _without(self, pairs: Pairs, hooks: MutableMapping[Any, Any], around: Around) -> Iterator[None]:
        """accelerate does not see what is saved by Gemini. Where users have ``hooks``, these do, as they do with
        accelerate alone: the first and the last of ``around`` are called before and after them.
        """
        models, optimizers, own = self._models, self._optimizers, dict(hooks)
        self._optimizers = [o for o in optimizers if not any(o.optimizer is mine for _, _, mine in pairs)]
        if own and pairs:
            hooks.clear()
            hooks.update({"first": around[0], **own, "last": around[1]})
        else:
            self._models = [model for model in models if not _is_in(pairs, model)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            hooks.clear()
            hooks.update(own)

    def _newest_whole(self, pairs: Pairs) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state(): no input_dir, and automatic checkpoint naming is off")
        folder = Path(self.project_dir) / "checkpoints"
        for path in sorted(folder.glob("checkpoint_*"), key=lambda p: int(p.name.rpartition("_")[2]), reverse=True):
            try:
                _check_state(path, pairs)
            except StorageError:
                continue
            return path
        raise StorageError(f"there is no whole state in {folder}")


def _is_of_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _said(config: GeminiConfig) -> GeminiConfig:
    """A config without what was added to it: by :func:`resolve_config`, and where its budget came to be shared."""
    gradients = "retain" if config.gradients == "accumulate" else config.gradients
    return replace(config, device=None, gradients=gradients, memory=SharedBudget.of(config.memory))


def _is_in(pairs: Pairs, model: Any) -> bool:
    return any(model is own for _, own, _ in pairs)


def _around_saving(pairs: Pairs) -> Around:
    """Hooks before saving are given the weights of managed models too, and may take them out to save them themselves;
    what they leave is not saved twice.
    """
    shown: list[tuple[int, Any, dict[str, Any]]] = []

    def first(models: list[Any], weights: list[Any], folder: str) -> None:
        states = enumerate(zip(models, weights, strict=True))
        shown.extend((index, state, dict(state)) for index, (model, state) in states if _is_in(pairs, model))
        shown.append((len(weights), None, {}))

    def last(models: list[Any], weights: list[Any], folder: str) -> None:
        number = shown.pop()[0]
        for index, state, before in shown:
            replaced = len(weights) == number and weights[index] is not state
            changed = state.keys() != before.keys() or any(state[name] is not value for name, value in before.items())
            if replaced or (changed and any(one is state for one in weights)):
                raise GeminiError(
                    "a hook of register_save_state_pre_hook has changed the weights of a managed model, which are "
                    "saved from its tiers as they are: let the hook save what it wants and take them out, "
                    "weights.pop()"
                )
        weights[:] = [one for one in weights if not any(one is state for _, state, _ in shown)]

    return first, last


def _around_loading(pairs: Pairs) -> Around:
    """Hooks before loading are given the managed models too, which have been loaded already."""

    def last(models: list[Any], folder: str) -> None:
        models[:] = [model for model in models if not _is_in(pairs, model)]

    return (lambda models, folder: None), last


def engine_in(optimizer: Any) -> Any:
    inner = optimizer.optimizer
    return inner.owner() if isinstance(inner, HybridOptimizer) else None


def _check_state(location: Path, pairs: Pairs) -> None:
    """Refuse a folder whose parts do not belong together, before anything is changed."""
    try:
        token = json.loads((location / _STATE_ID).read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{location} was not saved by GeminiAccelerator.save_state, or its saving was interrupted: give another "
            "folder, or load its weights alone (model.load_state_dict) and start anew"
        ) from e
    for folder, _, _ in pairs:
        path = find(place_of(location / folder))
        if read_manifest(path).extra != {"id": token}:
            raise StorageError(f"{location} was being overwritten when its saving was interrupted: give an older one")
