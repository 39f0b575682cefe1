"""The Trainer adds nothing to the arithmetic: the bits of the loop written by hand, and of a loop without Gemini."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, get_scheduler

import gemini
from tests.integrations.trainer_cases import Sentences, assert_same_run, llama, rows, train_new
from tests.scaling import backward, clip_grads, make_step

STEPS, MICRO = 6, 2
GROUPS = ("bias", "norm")


def batches() -> list[list[dict[str, torch.Tensor]]]:
    """What the Trainer's own sequential sampler gives: rows in order, two in a batch, two batches in a step."""
    first = [range(2 * i, 2 * i + 2) for i in range(STEPS * MICRO)]
    return [[rows(*(i % 32 for i in first[step * MICRO + m])) for m in range(MICRO)] for step in range(STEPS)]


def num_items(step: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Labels that count, over the whole step: what the Trainer divides every micro-batch's sum by."""
    return torch.stack([batch["labels"][:, 1:].ne(-100).sum() for batch in step]).sum()


def groups(model: Any) -> list[dict[str, Any]]:
    """No decay on norms, as the Trainer does it."""
    named = dict(model.named_parameters())
    plain = [p for n, p in named.items() if not any(word in n for word in GROUPS)]
    return [
        {"params": plain, "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if any(word in n for word in GROUPS)], "weight_decay": 0.0},
    ]


def by_hand(precision: str) -> tuple[Any, gemini.HybridAdam, list[float], list[float]]:
    model = gemini.GeminiDDP(llama(), gemini.GeminiConfig(precision=precision))
    optimizer = gemini.HybridAdam(groups(model), lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    losses, norms = [], []
    model.train()
    for step in batches():
        total = torch.tensor(0.0)
        for batch in step:
            loss = model(**batch, num_items_in_batch=num_items(step)).loss
            backward(model, loss)
            total += loss.detach()
        norms.append(clip_grads(model, optimizer, 0.5).item())
        make_step(model, optimizer)
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model, optimizer, losses, norms


def trained(folder: Path, precision: str, **changes: Any) -> tuple[Any, Any]:
    flags = {} if precision == "fp32" else {precision: True}
    return train_new(folder, train_sampling_strategy="sequential", save_strategy="no", **flags, **changes)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_trainer_and_the_loop_by_hand_come_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    trainer, record = trained(tmp_path, precision)
    model, optimizer, losses, norms = by_hand(precision)
    assert_same_run(trainer, (model, optimizer))
    assert record.of("loss") == losses
    assert record.of("grad_norm") == norms
    assert max(norms) > 0.5, "clipping was to bite"


def test_random_order_and_epochs_follow_the_stock_trainer(tmp_path: Path) -> None:
    """Shuffled data, an epoch that does not divide by the micro-batches of a step, a fraction of an epoch."""
    how: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 1.5, "save_strategy": "no"}
    how["train_dataset"] = Sentences(14)
    stock, wanted = train_new(tmp_path / "stock", Trainer, **how)
    ours, record = train_new(tmp_path / "ours", **how)
    assert len(record.of("loss")) == ours.state.global_step == 6
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=2e-5)
    assert record.of("grad_norm") == pytest.approx(wanted.of("grad_norm"), rel=2e-5)
