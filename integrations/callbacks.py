"""Callbacks for a Trainer under :class:`~gemini.integrations.huggingface.GeminiTrainerMixin`, as ``gemini sft`` has
them: a line for each row of the log, one stop for all ranks, and no going on with other data.
"""

from __future__ import annotations

import json
import math
import os
import signal
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gemini.errors import PlanMismatch, human_bytes
from gemini.ranks import launch
from gemini.ranks.process_groups import make_subgroup
from gemini.ranks.wire import Tag, Wire
from gemini.tiers import Tier

from .huggingface_save import store_behind


class Position(TrainerCallback, ExportableState):
    """Writes into each checkpoint (``trainer_state.json``, by the name of this class) of which rows it is. One of other
    rows is refused before the first step; one that says nothing is taken. ``begun_at``: the steps done when the run
    began, or None.

    Args:
        identity: of the rows (:func:`identity_of`).

    Raises:
        PlanMismatch: if rows or their order are not those of the checkpoint that training goes on from.
    """

    def __init__(self, identity: dict[str, Any]) -> None:
        self.identity = identity
        self.begun_at: int | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"identity": self.identity}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun_at = state.global_step
        before = state.stateful_callbacks.get("Position", self.state())["args"]["identity"]  # as the checkpoint has it
        for name, now in self.identity.items():
            if before.get(name) != now:
                raise PlanMismatch(
                    f"resume_from_checkpoint: step {state.global_step} stands in the middle of other data: its {name} "
                    f"is {before.get(name)}, here it is {now}. Give what that run was given, or start anew in another "
                    "output_dir."
                )


def identity_of(dataset: Any, seed: int, length: int | None) -> dict[str, Any]:
    """What a resumed run has to have the same of: the number of rows, three of them, and what cuts and orders them."""
    if not hasattr(dataset, "__len__"):  # a stream
        return {"seed": seed, "max_length": length}
    some = [dataset[index] for index in sorted({0, len(dataset) // 2, len(dataset) - 1})]
    checksum = zlib.crc32(json.dumps(some, sort_keys=True, default=str).encode())
    return {"number of rows": len(dataset), "content of rows": f"{checksum:08x}", "seed": seed, "max_length": length}


class LinesCallback(TrainerCallback):
    """A line for each row that is logged, for each evaluation and each checkpoint. ``say`` prints one."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (resume := args.resume_from_checkpoint) is not None:
            store = store_behind(resume)
            where = resume if store is None else f"the store in {store}"
            self._say(f"resuming from {where} after step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "eval_loss" in logs:
            of_eval = {name.removeprefix("eval_"): value for name, value in logs.items()}
            if not any("reward" in name for name in logs):  # a loss of tokens, and not of answers
                of_eval["perplexity"] = math.exp(min(logs["eval_loss"], 700.0))
            self._say(f"evaluation after step {state.global_step}: {', '.join(_figures(of_eval))}")
        elif "loss" in logs:
            self._say("  ".join((f"step {state.global_step}/{state.max_steps}", *_figures(logs))))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._say(f"saved {Path(args.output_dir, f'checkpoint-{state.global_step}')}")


_SHOWN = {
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.4g}",
    "reward": "reward {:.4g}",
    "rewards/accuracies": "accuracy {:.4g}",
    "accuracy": "accuracy {:.4g}",
    "grad_norm": "grad norm {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
    **{f"{tier.value}_bytes": f"{tier.value} {{}}" for tier in Tier},
    "waits": "waits {}",
    "seconds_left": "{} left",
    "learning_rate": "lr {:.3g}",
}
"""What is shown of a row, in this order."""


def _figures(logs: dict[str, Any]) -> list[str]:
    """The figures of a row, those that a person looks at first."""
    shown = {name: value for name, value in logs.items() if name in _SHOWN and value is not None}
    shown |= {name: human_bytes(value) for name, value in shown.items() if name.endswith("_bytes")}
    if "loss" in shown:
        shown["loss"] = round(shown["loss"], 4) + 0.0  # -0.0 is none: that of GRPO is at first nothing but for rounding
    if "seconds_left" in shown:
        shown["seconds_left"] = timedelta(seconds=round(shown["seconds_left"]))
    waits = {key.removeprefix("waits_for_"): value for key, value in logs.items() if key.startswith("waits_for_")}
    cause, waited = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
    share = waited / max(logs.get("step_seconds", 0.0), 1e-9)
    if share > 0.05:
        shown["waits"] = f"{min(1, share):.0%} for {cause.replace('_', ' ')}"
    return [form.format(shown[name]) for name, form in _SHOWN.items() if name in shown]


# ---- Ctrl-C, and a polite kill ---------------------------------------------------------------------------------------

_ANSWER = b"\nStopping after this step, then saving. Once more stops at once, and saves nothing.\n"


class StopCallback(TrainerCallback):
    """One wish to stop for all ranks: each tells the others after a step, and all save and end at the same one. In its
    ``with`` block the first SIGINT or SIGTERM is one (``wanted``), answered on stderr by the first rank; the second one
    takes effect as ever. ``heeded``: whether the run was ended by one.

        with StopCallback() as stop:
            trainer.add_callback(stop)
            trainer.train()

    Args:
        wire: to the other ranks; None makes one when training begins.
        say: prints a line.
    """

    def __init__(self, wire: Wire | None = None, say: Callable[[str], None] = print) -> None:
        self._wire, self._say = wire, say
        self.wanted = self.heeded = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopCallback:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True
        self.__exit__()
        # Straight to the descriptor: the signal may come in the middle of a print, whose buffer would be printed twice.
        if launch.rank() == 0:
            os.write(2, _ANSWER)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._wire is None:
            several = dist.is_available() and dist.is_initialized()
            self._wire = Wire(make_subgroup(range(dist.get_world_size()), "gloo") if several else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._wire is not None
        wishes = self._wire.swap(Tag.VALUES, torch.tensor([float(self.wanted)], device="cpu"), "the wish to stop")
        if not wishes.any():
            return
        if not self.wanted:
            self._say("Another rank was asked to stop: stopping after this step, then saving.")
        self.heeded = control.should_training_stop = control.should_save = True
