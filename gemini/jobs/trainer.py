"""The Trainers of ``gemini train``: transformers' own for sequences of text, TRL's for rows, both through our bridge.

What a job adds to them is here: the arguments it gives, which checkpoint belongs to which data, that a resumed run
follows the command line; and what is done between steps: lines and metrics, samples, the wish to stop.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from transformers import TrainerCallback

from gemini.errors import human_bytes
from gemini.integrations.huggingface import GeminiTrainerMixin
from gemini.jobs.data import JobData, what_is_cut
from gemini.jobs.errors import JobError
from gemini.jobs.settings import TrainSettings
from gemini.jobs.team import Team

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


# ---- what is done between steps --------------------------------------------------------------------------------------

# fp16 skips steps while it looks for a loss scale, but then the loss itself is finite.
_HOPELESS_STEPS = 10
# On narrower terminals the numbers are worth more than the bar.
_WIDTH_WITH_BAR = 130
_SAMPLE = 48
"""Tokens that a sample is made of."""
_WRITTEN = (
    "loss grad_norm learning_rate eval_loss eval_perplexity mean_token_accuracy epoch tokens_per_second "
    "step_seconds seconds_left"
).split()
_WAITS, _BYTES = "waits_for_", "_bytes"


class Stop(TrainerCallback):
    """One wish to stop for all ranks: each tells the others after a step, and all save and end at the same one.

    Attributes:
        heeded: whether the run was ended by one.
    """

    def __init__(self, wish: StopWish, team: Team, console: Console) -> None:
        self._wish = wish
        self._team = team
        self._console = console
        self.heeded = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        everyone = self._team.swap([float(self._wish.wanted)], "the wish to stop")
        if not any(wanted for (wanted,) in everyone):
            return
        if not self._wish.wanted:
            self._console.print("Another rank was asked to stop: stopping after this step, then saving.")
        self.heeded = control.should_training_stop = control.should_save = True


class Shown(TrainerCallback):
    """A line now and then, on a terminal a live bar under them; the same as rows of ``metrics.jsonl`` and for trackers.

    Args:
        num_tokens: of a step of whole sequences, on all ranks.
        sharing: ranks that compute with the same sequences, whose tokens the Trainer counts on each.
    """

    def __init__(
        self, console: Console, engine: Any, *, num_tokens: int, metrics: Path | None, sharing: int = 1
    ) -> None:
        self._console = console
        self._engine = engine
        self._metrics = metrics
        self._num_tokens = num_tokens
        self._sharing = sharing
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._since = 0.0  # when the rows since the last line began, after which step, after how many tokens
        self._at = 0
        self._seen = 0
        self._good = 0  # the last step whose loss was finite

    def rewind(self, step: int) -> None:
        """Drop the rows of steps that are made again: the run goes on after ``step``."""
        if self._metrics is None or not self._metrics.exists():
            return
        kept = [line for line in self._metrics.read_text(encoding="utf-8").splitlines() if _is_row_until(step, line)]
        new = self._metrics.with_name(f".{self._metrics.name}.new")
        new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(new, self._metrics)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.perf_counter()
        self._at = self._good = state.global_step
        self._seen = state.num_input_tokens_seen
        if self._console.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("{task.completed}/{task.total}  {task.description}")]
            if self._console.width >= _WIDTH_WITH_BAR:
                columns.append(BarColumn(bar_width=None))
            self._bar = Progress(*columns, console=self._console, expand=True)
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def end(self) -> None:
        """Leave the terminal as it was, whatever ended the run."""
        if self._bar is not None:
            self._bar.stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)
        if state.global_step >= state.max_steps:  # whatever the number of steps is a multiple of
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"

    def measure(self, state: Any, logs: dict[str, float]) -> None:
        """Add to what the Trainer logs what is known here: perplexity, speed, memory, waits, the time that is left."""
        if "eval_loss" in logs:
            logs["eval_perplexity"] = math.exp(min(logs["eval_loss"], 700.0))
        if "loss" not in logs:
            return
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, state.global_step - self._at)
        # Rows are counted as they come, without what fills them up; sequences are full.
        counted = (state.num_input_tokens_seen - self._seen) / self._sharing
        tokens = counted / max(1, state.global_step - self._at) or self._num_tokens
        self._since = now
        self._at = state.global_step
        self._seen = state.num_input_tokens_seen
        store = self._engine.store  # memory_report() would wait for the updates that are in flight
        logs["tokens_per_second"] = tokens / max(seconds, 1e-9)
        logs["step_seconds"] = seconds
        logs["seconds_left"] = seconds * (state.max_steps - state.global_step)
        for tier in store.ledger.tiers:
            logs[f"{tier.value}{_BYTES}"] = store.ledger.used(tier)
            logs[f"{tier.value}_peak{_BYTES}"] = store.ledger.peak(tier)
        for cause, waited in store.mover.watch.stalls.items():
            logs[f"{_WAITS}{cause.replace(' ', '_')}"] = waited

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "eval_loss" in logs:
            self._console.print(
                f"evaluation after step {state.global_step}: loss {logs['eval_loss']:.4f}, perplexity "
                f"{logs['eval_perplexity']:.2f}"
            )
        if "eval_loss" in logs or "loss" in logs:
            self._write(state.global_step, logs)
        if "loss" not in logs:
            return
        self._refuse_hopeless(state.global_step, logs["loss"])
        rest = timedelta(seconds=round(logs["seconds_left"]))
        rate = logs.get("learning_rate", 0.0)
        self._console.print(
            f"step {state.global_step}/{state.max_steps}  {self._line(logs)}  {rest} left  lr {rate:.3g}"
        )
        if self._bar is not None:
            self._bar.update(self._task, description=f"{rest} left")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._console.print(f"saved {Path(args.output_dir, f'checkpoint-{state.global_step}')}")

    def _line(self, logs: dict[str, Any]) -> str:
        norm = f"  grad norm {logs['grad_norm']:.3g}" if logs.get("grad_norm") is not None else ""
        used = {tier.value: logs[f"{tier.value}{_BYTES}"] for tier in self._engine.store.ledger.tiers}
        tiers = "".join(f"  {tier} {human_bytes(num_bytes)}" for tier, num_bytes in used.items())
        waits = {key.removeprefix(_WAITS): value for key, value in logs.items() if key.startswith(_WAITS)}
        cause, waited = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
        share = waited / max(logs["step_seconds"], 1e-9)
        bound = f"  waits {min(1, share):.0%} for {cause.replace('_', ' ')}" if share > 0.05 else ""
        return f"loss {logs['loss']:.4f}{norm}  {logs['tokens_per_second']:,.0f} tok/s{tiers}{bound}"

    def _refuse_hopeless(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            self._good = step
        elif step - self._good >= _HOPELESS_STEPS:
            raise JobError(
                f"The loss has been inf or NaN for {step - self._good} steps, the last is step {step}. A lower --lr "
                "may help, or --precision bf16. Checkpoints that were saved before are in --out."
            )

    def _write(self, step: int, logs: dict[str, Any]) -> None:
        if self._metrics is not None:
            row = {"step": step, "time": round(time.time(), 3)}
            ours = {key for key in logs if key.endswith(_BYTES) or key.startswith(_WAITS)}
            row |= {key: value for key, value in logs.items() if key in _WRITTEN or key in ours}
            with open(self._metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _is_row_until(step: int, line: str) -> bool:
    """Whether a line is a whole row, and of a step up to that: one may have been cut by a kill."""
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, TypeError, KeyError):
        return False


class Samples(TrainerCallback):
    """Shows what the model writes after a prompt; the likeliest words, so that no random number is drawn."""

    def __init__(self, console: Console, tokenizer: Any, prompt: str, every: int, *, chat: bool) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._every = every
        self._chat = chat

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._every:
            return
        text = self._prompt
        if self._chat:
            chat = [{"role": "user", "content": self._prompt}]
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        begin = self._tokenizer.encode(text, add_special_tokens=False)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or len(begin) + _SAMPLE
        ids = torch.tensor([begin[: positions - 1]], device=args.device)
        end = self._tokenizer.eos_token_id
        model.eval()
        with torch.no_grad():
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(_SAMPLE, positions - ids.shape[1]),
                do_sample=False,
                pad_token_id=end,
            )
        model.train()
        words = self._tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        shown = " ".join("".join(char if char.isprintable() else " " for char in words).split())
        self._console.print(f"sample after step {state.global_step}: {self._prompt} -> {shown}")


# ---- Ctrl-C, and a polite kill ---------------------------------------------------------------------------------------

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class StopWish:
    """The wish to stop, at which the loop looks between steps, so that it stops at a whole step.

    Within its ``with`` block the first SIGINT or SIGTERM sets ``wanted`` and is answered on stderr (if there is an
    ``answer``); the second one takes effect as ever.
    """

    def __init__(self, answer: str) -> None:
        self.wanted = False
        self._answer = answer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()
        # Straight to the descriptor: the signal may come in the middle of a print, whose buffer would be printed twice.
        if self._answer:
            os.write(_STDERR, f"\n{self._answer}\n".encode())

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
