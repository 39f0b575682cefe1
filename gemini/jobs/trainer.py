"""The Trainers of ``gemini train``: transformers' own for sequences of text, TRL's for rows, both through our bridge.

What a job adds to them is here: the arguments it gives, which checkpoint belongs to which data, and that a resumed run
follows the command line.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from gemini.integrations.huggingface import GeminiTrainerMixin
from gemini.jobs.data import JobData, what_is_cut
from gemini.jobs.errors import JobError
from gemini.jobs.settings import TrainSettings

POSITION = "gemini_train.json"
"""In a checkpoint: what data it stands in."""


class JobTrainer(GeminiTrainerMixin):
    """What both have besides our bridge. ``position`` is written into each checkpoint, ``measure`` adds to what is
    logged, ``told`` is what became of the rows.
    """

    position: dict[str, Any]
    job: TrainSettings
    measure: Callable[[Any, dict[str, float]], None]
    told: tuple[str, ...] = ()
    state: Any
    processing_class: Any
    args: Any
    current_gradient_accumulation_steps: int

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss: what was planned for is what runs, and tiles are Gemini's."""
        if getattr(model.config, "use_cache", None) is not None:  # it would keep keys and values of all layers
            inputs = {**inputs, "use_cache": False}
        loss, outputs = transformers.Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        balance = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if balance is not None and num_items_in_batch is not None:
            # The Trainer's factors are for sums over tokens; the loss for the balance of experts is a mean.
            excess = self.args.world_size - 1 / self.current_gradient_accumulation_steps
            loss = loss - excess * model.config.get_text_config().router_aux_loss_coef * balance.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """For everybody who is told, trackers too."""
        self.measure(self.state, logs)
        super().log(logs, start_time)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            Path(output_dir, POSITION).write_text(json.dumps(self.position))

    def durable_files(self) -> dict[str, str]:
        """Those of a checkpoint."""
        return {**super().durable_files(), POSITION: json.dumps(self.position)}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Learning rate and weight decay stay as the command line has them; the checkpoint has those of its run."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups if "weight_decay" in group]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        scheduler, groups = self.lr_scheduler, self.optimizer.param_groups
        scheduler.base_lrs = [self.job.lr for _ in groups]
        for index, (group, factor) in enumerate(zip(groups, scheduler.lr_lambdas, strict=True)):
            group["initial_lr"] = self.job.lr
            group["lr"] = self.job.lr * factor(scheduler.last_epoch)
            if decays:
                group["weight_decay"] = decays[index]
        scheduler._last_lr = [group["lr"] for group in groups]  # what the next line of the log says

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL would write a README.md beside the model that says what it was not told."""


class TextTrainer(JobTrainer, transformers.Trainer):
    """For sequences of text."""


def make_trainer(
    settings: TrainSettings,
    model: Any,
    data: JobData,
    tokenizer: Any,
    *,
    use_cpu: bool,
    parallelism: Any,
    callbacks: Sequence[Any],
) -> Any:
    """The Trainer of a job; ``model`` is managed already, over the mesh of accelerate's ``parallelism``.

    Raises:
        JobError: for rows that TRL cannot make tokens of.
    """
    arguments = {**arguments_of(settings, use_cpu=use_cpu), "parallelism_config": parallelism}
    use_cache = getattr(model.config, "use_cache", None)
    if not data.rows:
        trainer: Any = TextTrainer(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            data_collator=transformers.default_data_collator,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    else:
        trainer = _row_trainer(settings, model, data, tokenizer, arguments, callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.job, trainer.durable_every = settings, settings.durable_every or 1
    if use_cache is not None:
        model.config.use_cache = use_cache  # the Trainer switched it off; the saved model is to generate with it
    return trainer


def arguments_of(settings: TrainSettings, *, use_cpu: bool) -> dict[str, Any]:
    """What both kinds of TrainingArguments are given."""
    evaluates, saves = settings.evaluates, settings.save_every > 0
    every = settings.steps_between_evaluations
    return {
        "output_dir": str(settings.out),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulate,
        "learning_rate": settings.lr,
        "weight_decay": settings.weight_decay,
        "adam_beta2": 0.95,
        "max_grad_norm": settings.clip,
        "lr_scheduler_type": "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        "warmup_steps": settings.warmup,
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "seed": settings.seed,
        "data_seed": settings.seed,
        "use_cpu": use_cpu,
        "logging_steps": settings.log_every,
        "logging_first_step": True,  # that it has begun to learn, and how long it will take
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "log_level": "error",
        "log_level_replica": "error",
        "report_to": settings.report_to,
        "save_strategy": "steps" if saves else "no",
        # The best weights are found among checkpoints, so every evaluation of a job that looks for them has one.
        "save_steps": every if settings.patience else settings.save_every or settings.steps,
        "save_total_limit": settings.keep,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": every if evaluates else None,
        "prediction_loss_only": True,
        "load_best_model_at_end": settings.patience is not None,
        "metric_for_best_model": "eval_loss" if evaluates else None,
        "greater_is_better": False if evaluates else None,
        "ddp_timeout": settings.rank_timeout,
    }


def _row_trainer(
    settings: TrainSettings,
    model: Any,
    data: JobData,
    tokenizer: Any,
    arguments: dict[str, Any],
    callbacks: Sequence[Any],
) -> Any:
    try:
        import trl
    except ImportError as e:
        raise JobError(
            f"--data with rows needs trl and datasets, the extra 'train' of Gemini ({e}): pip install 'trl>=1.0'. "
            "Plain text needs neither."
        ) from e

    class RowTrainer(JobTrainer, trl.SFTTrainer):  # type: ignore[misc]
        """For rows: TRL makes tokens of them, first of all of a row, so that what is cut can be counted."""

        def _prepare_dataset(
            self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, name: str
        ) -> Any:
            rest = processing_class, replace(args, max_length=None), False, formatting_func, name
            whole = super()._prepare_dataset(dataset, *rest)
            found = what_is_cut(whole, settings, option="--data" if name == "train" else "--eval-data")
            self.told = (*self.told, found)
            return super()._prepare_dataset(whole, processing_class, args, packing, formatting_func, name)

    chats = data.rows == ("messages",)
    completions = settings.loss_on == "completions"
    try:
        with warnings.catch_warnings():  # of newer names of arguments that older versions do not have
            warnings.simplefilter("ignore", FutureWarning)
            args = trl.SFTConfig(
                **arguments,
                gradient_checkpointing=False,  # done before, where it was asked for, so that it is planned for
                include_num_input_tokens_seen="non_padding",
                max_length=settings.seq_len,
                pad_to_multiple_of=settings.cp if settings.cp > 1 else None,
                packing=settings.packing != "none",
                packing_strategy="bfd" if settings.packing == "none" else settings.packing,
                completion_only_loss=completions if "prompt" in data.rows else None,
                assistant_only_loss=chats and completions,
            )
        trainer = RowTrainer(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    except (ValueError, TypeError, RuntimeError, KeyError) as e:
        marked = not chats or re.search(r"{%[-+]?\s*generation\b", str(tokenizer.chat_template))
        if completions and not marked:
            raise JobError(
                "--data: the chat template does not mark what the assistant says, so it alone cannot be learned. Give "
                "one that does (between {% generation %} and {% endgeneration %}) with --chat-template FILE: "
                "docs/examples/chat_templates has some, and the guide on finetuning says how to mark one. Or "
                "--loss-on all learns the whole chat."
            ) from e
        more = " --loss-on all learns the whole chat." if chats and completions else ""
        raise JobError(f"--data: TRL refuses these rows: {' '.join(str(e).split())[:400]}{more}") from e
    return trainer
