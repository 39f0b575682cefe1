"""What the tests of Trainer and Accelerate share: a tiny model, a dataset, arguments, and a record of logs."""

import gc
from pathlib import Path
from typing import Any

import torch
import transformers
from gemini.integrations.huggingface import GeminiTrainer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.train import helpers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
gc.collect()
gc.freeze()  # every train() of a Trainer collects garbage several times: not among all that was imported

LENGTH = 12


def llama(tied: bool = False, dropout: float = 0.0) -> Any:
    """The same weights every time."""
    return helpers.llama(tied, layers=2, dropout=dropout)


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Token ids by number; some labels do not count, a different number in each row, and one column is no input."""

    def __init__(self, size: int = 32):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, helpers.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}


def rows(*indices: int) -> dict[str, torch.Tensor]:
    """One batch."""
    data = Sentences()
    return {key: torch.stack([data[i][key] for i in indices]) for key in ("input_ids", "labels")}


class Record(TrainerCallback):
    """What was logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def of(self, key: str) -> list[float]:
        return [logs[key] for logs in self.logs if key in logs]


class Stop(TrainerCallback):
    """End at a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Six steps of two micro-batches of two rows; clipping bites; logged at every step, saved after the third."""
    kind = changes.pop("kind", TrainingArguments)
    said: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6,
        "logging_steps": 1, "save_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "warmup_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    return kind(**(said | changes))


def make(
    folder: Path | str, kind: type[Trainer] = GeminiTrainer, model: nn.Module | None = None, **changes: Any
) -> tuple[Any, Record]:
    """A trainer and the record of its logs. What TrainingArguments knows goes there, the rest to the trainer."""
    for_args = {key: changes.pop(key) for key in list(changes) if key in TrainingArguments.__dataclass_fields__}
    record = Record()
    model = llama() if model is None and "model_init" not in changes else model
    said = {"train_dataset": Sentences(), "eval_dataset": Sentences(4), "callbacks": [record]} | changes
    return kind(model=model, args=arguments(folder, **for_args), **said), record


def train_new(*args: Any, **changes: Any) -> tuple[Any, Record]:
    """A trainer of :func:`make` that has trained, and the record of its logs."""
    trainer, record = make(*args, **changes)
    trainer.train()
    return trainer, record


def masters(model: Any) -> dict[str, torch.Tensor]:
    """The exact fp32 weights by name."""
    return {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}


def assert_same_run(a: Any, b: Any) -> None:
    """Masters, states and step counts of two trainers (or pairs of model and optimizer) are the same bits."""
    (model_a, optimizer_a), (model_b, optimizer_b) = (
        pair if isinstance(pair, tuple) else (pair.model, pair.optimizer.optimizer) for pair in (a, b)
    )
    other = masters(model_b)
    for name, value in masters(model_a).items():
        assert torch.equal(value, other[name]), name
        mine, theirs = optimizer_a.full_state(name), optimizer_b.full_state(name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), (name, key)
