"""``GeminiTrainer``: transformers' ``Trainer`` with the model managed by Gemini. One line in a script:

    from gemini.integrations.huggingface import GeminiTrainer as Trainer

``GeminiTrainerMixin`` does the same for any subclass: ``class GeminiSFTTrainer(GeminiTrainerMixin, SFTTrainer)``. The
model is managed when training, evaluation or prediction begins, so that whatever prepares it before (PEFT, freezing, a
``model_init``) may. All of Trainer's own loop stays; what is replaced is the accelerator, and how things are saved.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import StorageError, warn
from gemini.optim.elementwise import PlainSGDRule, SGDRule
from gemini.patches import replaced
from gemini.planning.plan import Plan
from gemini.ranks.agree import Attempt, Point
from gemini.ranks.wire import collectives_of
from gemini.rules import AdamRule, UpdateRule, rule_of
from gemini.train.checkpoint.saving import load_checkpoint
from gemini.train.checkpoint.states import rng_states, set_rng_states
from gemini.train.ddp import GeminiDDP
from gemini.train.modules.changing import BLOCKS_INSTEAD
from gemini.train.params.handle import original_class

try:
    from accelerate.utils import broadcast_object_list
    from transformers import Seq2SeqTrainer, Trainer
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as e:
    raise ImportError(
        f"gemini.integrations.huggingface needs transformers 5.0 and accelerate 1.12 or newer ({e}), the extra "
        "'trainer' of Gemini: pip install 'transformers>=5.0' 'accelerate>=1.12'",
        name="transformers",
    ) from e

from .accelerate import GeminiAccelerator
from .block_by_block import BlockByBlock
from .huggingface_save import (
    NEWEST,
    STATES,
    as_checkpoint,
    check_resumable,
    clean_up,
    commit,
    committed,
    load_states,
    newest,
    publish,
    save_states,
    staging_in,
    store_behind,
    store_of,
)
from .metrics import MetricsCallback
from .rules import BY_NAME, class_of, owns_managed, rule_of_name, to_hybrid
from .settings import ORDERS, check_config, check_precision, config_of, order_of, warn_half

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
ANSWERS = "generated"
"""Begins the name of the file of a checkpoint with what a rank has generated and not used up."""
_PEERS = ("deepspeed", "fsdp", "megatron_lm")


# ---- arguments that Gemini cannot honour: refused when the Trainer is made, naming what can be done instead ----------


def check_args(args: Any) -> None:
    """Refuse what takes Gemini's own place, or needs what a managed model has not."""
    for peer in _PEERS:
        if getattr(args, peer, None) or os.environ.get(f"ACCELERATE_USE_{peer.upper()}", "false").lower() == "true":
            raise ValueError(
                f"{peer}= cannot be used with GeminiTrainer, which shards and offloads the model itself: leave it out "
                "(in `accelerate config` too). GeminiConfig(memory=gemini.MemoryBudget(...)) says what goes where"
            )
    if args.torch_compile:
        raise ValueError(
            f"torch_compile=True: a managed model cannot be compiled as a whole; leave it out. {BLOCKS_INSTEAD}"
        )
    optim = getattr(args.optim, "value", args.optim)
    if optim not in (*OPTIMIZERS, *BY_NAME):
        raise ValueError(
            f"optim={optim!r} cannot update a managed model: use one of {', '.join(map(repr, OPTIMIZERS))} (both "
            "become gemini.HybridAdam: exact fp32 masters and states on whatever tier the budgets say), of "
            f"{', '.join(map(repr, BY_NAME))}, or GeminiConfig(optimizer=rule) with any rule of gemini.optim"
        )
    if args.save_on_each_node and int(os.environ.get("WORLD_SIZE", 1)) > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise ValueError(
            "save_on_each_node=True: a checkpoint is written by all nodes into one folder; give an output_dir they "
            "share"
        )


def with_rule(args: Any, config: GeminiConfig | None) -> GeminiConfig | None:
    """The config of a model that is to be managed, with the rule that ``optim=`` says."""
    optim = getattr(args.optim, "value", args.optim)
    if optim not in BY_NAME:
        return config
    config, (rule, _) = config or GeminiConfig(), rule_of_name(args)
    if config.optimizer is not None and rule_of(config.optimizer).face == rule:
        return config
    if config.optimizer is not None:
        raise ValueError(
            f"optim={optim!r} is {rule!r}, and the model is to be managed for {config.optimizer!r}: say one of them"
        )
    return replace(config, optimizer=rule)


def check_managed_args(args: Any, config: GeminiConfig | None) -> None:
    """Compare arguments with how the model is, or is to be, managed."""
    precision = check_precision(args.mixed_precision, config, f"TrainingArguments({args.mixed_precision}=True)")
    for flag in ("bf16", "fp16"):
        if getattr(args, f"{flag}_full_eval") and precision != flag:
            raise ValueError(
                f"{flag}_full_eval=True, but the model is managed in {precision} and evaluated in it: leave it out, or "
                f"train in {flag} too"
            )
    transient = config is not None and config.gradients == "transient"
    if transient and (args.max_grad_norm or args.gradient_accumulation_steps > 1):
        raise ValueError(
            'GeminiConfig(gradients="transient") updates inside backward, so that gradients can be neither clipped nor '
            "accumulated: give TrainingArguments(max_grad_norm=0, gradient_accumulation_steps=1), or use "
            'gradients="retain"'
        )


def with_offloading(args: Any, there: GeminiConfig | None, config: GeminiConfig | None) -> GeminiConfig | None:
    """The config that does what TRL's ``activation_offloading=True`` asks for, of a model that is to be managed;
    ``there``: that of one that is.
    """
    if not args.gradient_checkpointing:
        raise ValueError(
            "activation_offloading=True moves what checkpointed blocks keep to host memory, and "
            "gradient_checkpointing=False: give both as True"
        )
    said = there or config or GeminiConfig()
    plan = said.placement if isinstance(said.placement, Plan) else None
    if said.offload_activations is not None or (plan is not None and plan.offload_activations is not None):
        return config
    if there is not None or plan is not None:
        what = "the model is managed already, and" if there is not None else "the plan"
        raise ValueError(
            f"activation_offloading=True, but {what} keeps activations where they are: leave it out, or say "
            'GeminiConfig(offload_activations="cpu") when the model is managed or planned'
        )
    return replace(said, offload_activations="cpu")


def use_one_gpu(args: Any) -> None:
    """Without torchrun the Trainer would put DataParallel around the model where it sees several GPUs."""
    if args.n_gpu > 1:
        warn(f"{args.n_gpu} GPUs are there, one is used: `torchrun --nproc-per-node {args.n_gpu}` uses all")
        args._n_gpu = 1


# ---- the mixin -------------------------------------------------------------------------------------------------------


@contextmanager
def _not_cast(model: Any) -> Iterator[None]:
    """TRL casts the adapters of a 4-bit model to bf16, by ``param.data``: those of a managed one compute in its
    precision already, and keep their masters.
    """
    with ExitStack() as stack:
        for part in model.modules() if isinstance(model, GeminiDDP) else ():
            if "is_loaded_in_4bit" in vars(part):
                stack.enter_context(replaced(part, "is_loaded_in_4bit", False))
        yield


class GeminiTrainerMixin:
    """Put it before ``Trainer`` or a subclass of it.

    Args:
        gemini_config: how to manage the model; None measures the budgets. Without a precision in it the flags say it:
            bf16 for ``bf16=True``, fp16 for ``fp16=True``, else fp32.
        durable_every: with ``MemoryBudget(durable=True)``, steps between commits to the store.
        order: "bfs" computes the micro-batches of a step block by block, by :func:`gemini.train_step`, with the same
            losses, gradients and logs; "dfs" one after another. None: as the plan was made, if the config has one.
            What cannot be computed block by block is not, and a warning says why.
        *args, **kwargs: the Trainer's own.

    Raises:
        ValueError: for arguments that contradict each other or cannot be honoured, naming what can.
        BudgetExceeded: when training or evaluation begins, if the budgets cannot hold the model.
    """

    args: Any
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    control: Any
    callback_handler: Any
    _step: int
    _buffered_inputs: Any
    has_own_loss = False
    """Whether the loss is right on a part of the layers or sequences, where the stock trainer's is not."""

    def __init__(
        self,
        *args: Any,
        gemini_config: GeminiConfig | None = None,
        durable_every: int = 1,
        order: str | None = None,
        **kwargs: Any,
    ):
        check_config(gemini_config)
        if order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(map(repr, ORDERS))}, got {order!r}")
        if type(durable_every) is not int or durable_every < 1:
            raise ValueError(f"durable_every is a number of steps, 1 or more, got {durable_every!r}")
        self.durable_every, self.order = durable_every, order
        self._gemini_steps = BlockByBlock(self, super().training_step.__module__)  # type: ignore[misc]
        self._gemini_config = gemini_config
        self._gemini_run_dir: str | None = None
        self._gemini_random: dict[str, Any] | None = None
        self._gemini_evaluates = False
        self._gemini_restored: list[Any] = []
        try:
            with _not_cast(kwargs.get("model", args[0] if args else None)):
                super().__init__(*args, **kwargs)
        finally:
            for given in self._gemini_restored:
                given.activation_offloading = True
        self._gemini_check_loss()
        # First, since trackers are told of what is in the row when their turn comes; a sort keeps the order of others.
        self.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, MetricsCallback))

    def _gemini_check_loss(self) -> None:
        """TRL's trainers compute from the weight of the output head, of which a slice of a model has a part alone, and
        count sequences whole.
        """
        cut = self.accelerator.tensor_size * self.accelerator.context_size > 1
        if cut and not self.has_own_loss and any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            raise ValueError(
                f"{type(self).__name__}: TRL's loss is of whole layers and sequences, so tp_size= and cp_size= of "
                "parallelism_config= go with gemini.integrations.trl.GeminiSFTTrainer alone: leave them out"
            )

    # ---- the accelerator ----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's accelerator becomes a ``GeminiAccelerator``; called early in ``Trainer.__init__``."""
        check_args(self.args)
        if config_of(self.model) is None:
            self._gemini_config = with_rule(self.args, self._gemini_config)
        check_managed_args(self.args, config_of(self.model) or self._gemini_config)
        if getattr(self.args, "activation_offloading", False):
            self._gemini_config = with_offloading(self.args, config_of(self.model), self._gemini_config)
            # Hooks of TRL's would save weights, and need an accelerator: its own __init__, behind this, makes none.
            self._gemini_restored.append(self.args)
            self.args.activation_offloading = False
        use_one_gpu(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = GeminiAccelerator
        if not getattr(self.args, "precompute_ref_log_probs", False):  # before there is a managed model; then it goes
            self.accelerator._gemini_beside = []
        chosen = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        self.accelerator.adopt(
            self._gemini_config,
            self.args.mixed_precision,
            reduce_always="sync_each_batch" not in chosen,
            parallelism=self.args.parallelism_config,
        )
        gather = self.accelerator.gather_for_metrics  # what the Trainer keeps of it is of the class before
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        if self.model is not None:
            self.accelerator.check_managed(self.model)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Autocast and torch's scaler would come with the flag; the model computes in its own precision.
        # FSDP or DeepSpeed would come with a parallelism config.
        theirs = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return {**theirs, "mixed_precision": "no", "parallelism_config": None}

    def get_cp_size(self) -> int:
        """Ranks with parts of the same sequences, for the Trainer's count of tokens and samples. Evaluation has whole
        ones.
        """
        return 1 if self._gemini_evaluates else self.accelerator.context_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """As the Trainer's: slices of a layer compute with the same samples."""
        # get_tp_size() stays 1: what the Trainer divides by it differs among its versions, and undivided all is right.
        return int(super().get_total_train_batch_size(args)) // self.accelerator.tensor_size  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, on this rank's part of the sequences if ``args.parallelism_config`` divides them. Out of
        memory it is made once more (``GeminiDDP.micro_batch``). Block by block the first one of a step computes all.
        """
        step = super().training_step  # type: ignore[misc]

        def compute(model: Any, inputs: Any) -> torch.Tensor:
            return step(model, self.accelerator.sequence_batch(inputs), *args, **kwargs)  # type: ignore[no-any-return]

        if order_of(config_of(model), self.order) == "bfs":
            if (loss := self._gemini_steps.loss_of(model, inputs, compute)) is not None:
                return loss
        return model.micro_batch(lambda: compute(model, inputs))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._gemini_steps.begin(samples)
        return samples, num_items

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """As that of TRL's, which gathers rewards and texts without the accelerator."""
        with self.accelerator._gemini_turns.before_functions_of(type(self)):
            return super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        self._gemini_evaluates = True
        try:
            return super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._gemini_evaluates = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not moved: its weights go from where they are to their tiers."""

    def _gemini_manage(self) -> Any:
        """Manage the model now, if it is not yet."""
        if not isinstance(self.model, GeminiDDP):
            if self.args.mixed_precision == "no":
                unsaid = "neither bf16=True nor fp16=True was given"
                warn_half(self.model, self._gemini_config, "fp32", unsaid, "{}=True")
            self.model.zero_grad()  # as the Trainer does it before its first step
            steps = self.accelerator.gradient_state.plugin_kwargs
            told = steps.get("num_steps", 1)
            steps["num_steps"] = self.args.gradient_accumulation_steps  # what the Trainer keeps from accelerate
            try:
                self.accelerator.manage(self.model)
            finally:
                steps["num_steps"] = told
        elif self.accelerator._gemini_beside:
            self.accelerator.manage(self.model)
        return self.model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self._gemini_manage() if model is self.model else model

    # ---- optimizer and scheduler --------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's own, or one given by ``optimizers=``, converted where it stands; or one by the rule that the
        model is managed for, with the Trainer's groups and hyperparameters.
        """
        self._gemini_manage()
        rule = rule_of(config_of(self.model).optimizer).face  # type: ignore[union-attr]
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and not isinstance(rule, AdamRule):
            self.optimizer_cls_and_kwargs = self._gemini_class_and_kwargs(rule)
        super().create_optimizer(model)  # type: ignore[misc]
        bare = getattr(self.optimizer, "optimizer", self.optimizer)  # of a second train() it is accelerate's
        if owns_managed(bare):
            to_hybrid(bare)
        return self.optimizer

    def _gemini_class_and_kwargs(self, rule: UpdateRule) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
        """Of an optimizer by the rule that the model is managed for; what the arguments do not say is the rule's. None
        for the Trainer's own.
        """
        if getattr(self.args.optim, "value", self.args.optim) in BY_NAME:
            rule, hypers = rule_of_name(self.args)
        else:
            hypers = {"lr": self.args.learning_rate}
        if self.args.weight_decay and "weight_decay" not in rule.defaults:
            raise ValueError(f"weight_decay={self.args.weight_decay}: {rule!r} has none; leave it out")
        if isinstance(rule, SGDRule | PlainSGDRule) and self.args.optim == "sgd":
            return None
        transient = config_of(self.model).gradients == "transient"  # type: ignore[union-attr]
        how = {"params": self._gemini_groups(rule), "rule": rule, "step_in_backward": transient, **hypers}
        return class_of(rule), how

    def _gemini_groups(self, rule: UpdateRule) -> list[dict[str, Any]]:
        """The Trainer's groups, as the rule takes them."""
        decayed = {*self.get_decay_parameter_names(self.model)}  # type: ignore[attr-defined]
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in trained if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, self.args.weight_decay), (False, 0.0))
        ]
        return rule.grouped(self.model, groups)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # gradients are not at the params, where the Trainer would look for meshes

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if config_of(self.model).gradients == "transient":  # type: ignore[union-attr]
            return None  # there is none after backward: updates were made inside it
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    # ---- saving -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return self._gemini_run_dir or super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write under another name and give the checkpoint its own when it is whole: a torn one never has it."""
        run_dir = self._get_output_dir(trial)
        clean_up(run_dir, self.accelerator, begins=True)
        self._gemini_run_dir = str(staging_in(run_dir))
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._gemini_run_dir = None
        publish(run_dir, self)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        commit(self)
        if self.args.enable_jit_checkpoint:
            self._gemini_random = rng_states()  # for a checkpoint of this step that is asked for inside the next

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._gemini_run_dir is None:  # from the final folder, see publish()
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """All ranks come here; the first one writes while the others serve what they keep."""
        engine = self.model.__dict__.get("_gemini_engine")
        if engine is None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        with Attempt() as attempt:
            if self.args.should_save:
                super()._save(output_dir, state_dict)  # type: ignore[misc]
            elif (
                state_dict is None
                and isinstance(self.model, GeminiDDP)
                and hasattr(original_class(self.model), "save_pretrained")
            ):
                self.model.save_pretrained(output_dir or self.args.output_dir)
        engine.shards.agree(Point.EXPORT, "saving the model", refusal=attempt.refusal, among=engine.ranks.writers)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_states(self, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """As the Trainer's, on every rank; and of TRL's trainers that generate, what they have not used up of that."""
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if getattr(self, "_buffered_inputs", None) is not None:
            answers = {"step": self._step, "inputs": self._buffered_inputs}
            torch.save(answers, Path(output_dir, f"{ANSWERS}_{self.args.process_index}.pt"))

    # ---- loading ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, or the last
        commit of this run's durable store if that is newer, "auto" the same or none; the folder of a store takes its
        last commit.

        Raises:
            ValueError: for a checkpoint without the states that an exact resume needs.
            StorageError: for a store that another run uses.
            RankLost: if a rank does not answer, whether in a collective of Gemini's or of the Trainer's own.
        """
        with collectives_of("the Trainer"):
            clean_up(self.args.output_dir, self.accelerator)
            if resume_from_checkpoint:
                resume_from_checkpoint = self._gemini_choose(resume_from_checkpoint)
            self.args.resume_from_checkpoint = resume_from_checkpoint or None
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's.

        Raises:
            RankLost: as in training.
        """
        with collectives_of("the Trainer"):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _gemini_choose(self, asked: Any) -> str | None:
        """The folder to go on from, the same on all ranks, or None."""
        chosen: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                chosen = [self._gemini_find(asked)]
            except (ValueError, StorageError) as e:
                chosen = [e]
        broadcast_object_list(chosen)
        if isinstance(chosen[0], Exception):
            raise chosen[0]
        return chosen[0]

    def _gemini_find(self, asked: Any) -> str | None:
        run_dir, engine = self.args.output_dir, self.model.__dict__.get("_gemini_engine")
        own = None if engine is None else engine.store.durable
        if asked not in NEWEST:
            found = committed(Path(asked), own)
            return str(asked) if found is None else str(as_checkpoint(Path(asked), found, run_dir))
        store = store_of(config_of(self.model) or self._gemini_config)
        chosen = newest(run_dir, store, own)
        if chosen is None and asked != "auto" and (chosen := get_last_checkpoint(run_dir)) is None:
            raise ValueError(f"No valid checkpoint found in output directory ({run_dir})")
        return chosen

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As the Trainer's; of a store that of its commit, which data loaders have drawn from since it was loaded."""
        if checkpoint is None or store_behind(checkpoint) is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            assert self._gemini_random is not None
            set_rng_states(self._gemini_random)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps > 0:  # resumed at its end: the Trainer would add a step
            self.control.should_training_stop = True
            return
        said = inspect.signature(super()._run_epoch).bind(*args, **kwargs).arguments  # type: ignore[misc]
        if said["resume_from_checkpoint"] is not None and said["epoch"] == said["epochs_trained"]:
            _pass_epochs(said["train_dataloader"], said["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_resumable(resume_from_checkpoint)
        if not (Path(resume_from_checkpoint) / STATES).is_dir():  # a plain Trainer's: weights first, then states
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._gemini_load_answers(Path(checkpoint))
        if (Path(checkpoint) / STATES).is_dir():
            load_states(self, checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _gemini_load_answers(self, checkpoint: Path) -> None:
        files = [checkpoint / f"{ANSWERS}_{rank}.pt" for rank in range(self.args.world_size)]
        # All ranks or none: of another number of ranks all generate anew.
        if hasattr(self, "_buffered_inputs") and files == sorted(checkpoint.glob(f"{ANSWERS}_*.pt"), key=_number):
            device = self.args.device if self.args.device.type != "cpu" else "cpu"
            saved = torch.load(files[self.args.process_index], map_location=device, weights_only=True)
            self._step, self._buffered_inputs = saved["step"], saved["inputs"]

    def _load_best_model(self) -> None:
        """From the exact masters where they were saved, and from the weights otherwise."""
        states = Path(self.state.best_model_checkpoint) / STATES
        if not states.is_dir():
            super()._load_best_model()  # type: ignore[misc]
            return
        random_states = rng_states()
        load_checkpoint(states, self.model, self.optimizer.optimizer)
        set_rng_states(random_states)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _pass_epochs(loader: Any, num_epochs: int) -> None:
    """Let a sampler with a generator of its own, which nobody tells the epoch (TRL's for prompts), draw what it has
    drawn in so many epochs: else a run that goes on in a later one would begin again with the rows of the first.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    own = isinstance(getattr(sampler, "generator", None), torch.Generator)
    if sampler is not None and own and not hasattr(sampler, "set_epoch"):
        for _ in range(num_epochs):
            deque(sampler, maxlen=0)


class GeminiTrainer(GeminiTrainerMixin, Trainer):
    """``transformers.Trainer`` with the model managed by Gemini."""


class GeminiSeq2SeqTrainer(GeminiTrainerMixin, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with the model managed by Gemini."""
