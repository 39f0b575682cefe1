"""What happens between the steps of a training job: the lines of what is logged, and the wish to stop."""

from __future__ import annotations

import json
import math
import os
import signal
import zlib
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.team import Team
from gemini.tiers import Tier

# fp16 skips steps while it looks for a loss scale, but then the loss itself is finite.
_HOPELESS_STEPS = 10


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


class Position(TrainerCallback, ExportableState):
    """Writes into each checkpoint (``trainer_state.json``) of which rows it is: another run's are not gone on with."""

    def __init__(self, identity: dict[str, Any]) -> None:
        self.identity = identity

    def state(self) -> dict[str, Any]:
        return {"args": {"identity": self.identity}, "attributes": {}}

    def check(self, checkpoint: Path) -> None:
        """Refuse to go on in the middle of other rows than those that a checkpoint was made of.

        Raises:
            JobError: saying what is there and here. A checkpoint that says nothing is taken.
        """
        saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"].get("Position")
        before = self.identity if saved is None else saved["args"]["identity"]
        for name, now in self.identity.items():
            if before.get(name) != now:
                raise JobError(
                    f"{checkpoint} stands in the middle of other data: its {name} is {before.get(name)}, here it is "
                    f"{now}. Give what that run was given, or start anew in another --output_dir."
                )


def identity_of(dataset: Any, seed: int, length: int | None) -> dict[str, Any]:
    """What a resumed run has to have the same of: the number of rows, three of them, and what cuts and orders them."""
    if not hasattr(dataset, "__len__"):  # a stream
        return {"seed": seed, "max_length": length}
    some = [dataset[index] for index in sorted({0, len(dataset) // 2, len(dataset) - 1})]
    checksum = zlib.crc32(json.dumps(some, sort_keys=True, default=str).encode())
    return {"number of rows": len(dataset), "content of rows": f"{checksum:08x}", "seed": seed, "max_length": length}


class Shown(TrainerCallback):
    """A line for each row that is logged.

    Raises:
        JobError: if the loss stays inf or NaN.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._good = 0  # the last step whose loss was finite

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._good = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps:  # whatever the number of steps is a multiple of
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        step = state.global_step
        if "eval_loss" in logs:
            more = {**logs, "eval_perplexity": math.exp(min(logs["eval_loss"], 700.0))}
            self._console.print(f"evaluation after step {step}: loss {logs['eval_loss']:.4f}{_more(more, 'eval_')}")
        elif "loss" in logs:
            if math.isfinite(logs["loss"]):
                self._good = step
            elif step - self._good >= _HOPELESS_STEPS:
                raise JobError(
                    f"The loss has been inf or NaN for {step - self._good} steps, the last is step {step}. A lower "
                    "--learning_rate may help, or --bf16 true. Checkpoints that were saved before are in --output_dir."
                )
            self._console.print(f"step {step}/{state.max_steps}  {_line(logs)}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._console.print(f"saved {Path(args.output_dir, f'checkpoint-{state.global_step}')}")


_SHOWN = {"perplexity": "perplexity", "reward": "reward", "rewards/accuracies": "accuracy", "accuracy": "accuracy"}


def _more(logs: dict[str, Any], prefix: str = "") -> str:
    """What the trainers of preferences and rewards say beside their loss."""
    found = {words: logs[f"{prefix}{name}"] for name, words in _SHOWN.items() if f"{prefix}{name}" in logs}
    return "".join(f", {words} {value:.4g}" for words, value in found.items())


def _line(logs: dict[str, Any]) -> str:
    """The figures of a row, those that a person looks at first."""
    words = [f"loss {round(logs['loss'], 4) + 0.0:.4f}{_more(logs)}"]  # of -0.0 it makes 0.0
    if logs.get("grad_norm") is not None:
        words.append(f"grad norm {logs['grad_norm']:.3g}")
    if "tokens_per_second" in logs:
        words.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    words += [f"{t.value} {human_bytes(logs[f'{t.value}_bytes'])}" for t in Tier if f"{t.value}_bytes" in logs]
    waits = {key.removeprefix("waits_for_"): value for key, value in logs.items() if key.startswith("waits_for_")}
    cause, waited = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    share = waited / max(logs.get("step_seconds", 0.0), 1e-9)
    if share > 0.05:
        words.append(f"waits {min(1, share):.0%} for {cause.replace('_', ' ')}")
    words.append(f"{timedelta(seconds=round(logs.get('seconds_left', 0)))} left")
    return "  ".join([*words, f"lr {logs.get('learning_rate', 0.0):.3g}"])


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
