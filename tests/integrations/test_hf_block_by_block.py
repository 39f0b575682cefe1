"""``order="bfs"``: the Trainer's steps block by block have the bits and the logs of one after another."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gemini.integrations.huggingface import GeminiTrainer
from transformers import TrainerCallback

from gemini.pipeline import micro_batches
from tests.integrations.trainer_cases import Sentences, assert_same_run, make

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
STEP = {"gradient_accumulation_steps": 4, "max_steps": 5, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def nothing_is_said() -> Iterator[None]:
    """A run in the ordinary order by mistake would pass all comparisons."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one after another")
        yield


class Losses(TrainerCallback):
    """The loss that has come together so far, after each micro-batch and each step."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(f"substep of {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(f"step {state.global_step}")


def both(folder: Path, kind: type = GeminiTrainer, **how: Any) -> tuple[Any, Any]:
    """Trained block by block, and one after another: trainer, model and logs are the same."""
    runs, logs, calls, steps = [], [], [], []
    for order in ("bfs", "dfs"):
        seen = Losses()
        trainer, record = make(folder / order, kind, order=order, **(STEP | how))
        trainer.add_callback(seen)
        with mock.patch.object(micro_batches, "breadth_first", wraps=micro_batches.breadth_first) as by_block:
            trainer.train()
        runs.append(trainer)
        steps.append(by_block.call_count)
        logs.append([{key: value for key, value in log.items() if key not in TIMES} for log in record.logs])
        calls.append(seen.found)
    assert steps == [4, 0], "of five steps one has one micro-batch"
    assert logs[0] == logs[1] and calls[0] == calls[1]
    assert_same_run(*runs)
    return runs[0], runs[1]


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    losses: torch.Tensor = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


@pytest.mark.parametrize(
    "how",
    [
        {}, {"bf16": True}, {"label_smoothing_factor": 0.1}, {"compute_loss_func": smoothed},
        {"average_tokens_across_devices": False, "gradient_checkpointing": True},
    ],
    ids=["fp32", "bf16", "smoothing", "own loss", "checkpoints"],
)  # fmt: skip
def test_the_bits_and_logs_of_one_after_another(how: dict[str, Any], tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches: of 26 rows four, four, four and one."""
    both(tmp_path, train_dataset=Sentences(26), **how)
