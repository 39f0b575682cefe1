"""What a job does between the steps of a Trainer: it shows and writes how far it is, stops when asked, and samples."""

from __future__ import annotations

import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from transformers import TrainerCallback

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.interrupt import StopWish
from gemini.jobs.team import Team

# fp16 skips steps while it looks for a loss scale, but then the loss itself is finite.
_HOPELESS_STEPS = 10
# On narrower terminals the numbers are worth more than the bar.
_WIDTH_WITH_BAR = 130
_SAMPLE = 48
"""Tokens that a sample is made of."""
_WRITTEN = (
    "loss", "grad_norm", "learning_rate", "eval_loss", "eval_perplexity", "mean_token_accuracy", "epoch",
    "tokens_per_second", "step_seconds", "seconds_left",
)  # fmt: skip
_WAITS, _BYTES = "waits_for_", "_bytes"


class Stop(TrainerCallback):
    """One wish to stop for all ranks: each tells the others after a step, and all save and end at the same one.

    Attributes:
        heeded: whether the run was ended by one.
    """

    def __init__(self, wish: StopWish, team: Team, console: Console) -> None:
        self._wish, self._team, self._console = wish, team, console
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
        self._console, self._engine, self._metrics = console, engine, metrics
        self._num_tokens, self._sharing = num_tokens, sharing
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._since, self._at, self._seen, self._good = 0.0, 0, 0, 0

    def rewind(self, step: int) -> None:
        """Drop the rows of steps that are made again: the run goes on after ``step``."""
        if self._metrics is None or not self._metrics.exists():
            return
        kept = [line for line in self._metrics.read_text(encoding="utf-8").splitlines() if _is_row_until(step, line)]
        new = self._metrics.with_name(f".{self._metrics.name}.new")
        new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(new, self._metrics)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since, self._at, self._good = time.perf_counter(), state.global_step, state.global_step
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
        self._since, self._at, self._seen = now, state.global_step, state.num_input_tokens_seen
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
        self._console, self._tokenizer, self._prompt, self._every = console, tokenizer, prompt, every
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
