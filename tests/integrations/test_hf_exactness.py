"""The Trainer adds nothing to the arithmetic: the bits of the loop written by hand, and of a loop without Gemini."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.huggingface import GeminiTrainer
from transformers import Trainer, get_scheduler

import gemini
from tests.integrations.trainer_cases import Sentences, assert_same_run, llama, masters, rows, train_new
from tests.scaling import backward, clip_grads, make_step
from tests.train.helpers import Plain

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


def loss_outside(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_trainer_and_a_loop_without_gemini_come_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    """Masters in a dict, the update written in torch operations: nothing of the engine or its kernels.

    In fp16 with a loss outside the model, scaled by the Trainer's scaler.
    """
    outside = loss_outside if precision == "fp16" else None
    trainer, record = trained(tmp_path, precision, **({} if outside is None else {"compute_loss_func": outside}))
    plain = Plain(llama(), precision, lr=1e-2, weight_decay=0.1, scale=None if outside is None else 2.0**16)
    plain.of = {n: {"weight_decay": 0.0} for n, _ in plain.model.named_parameters() if any(w in n for w in GROUPS)}
    plain.model.train()
    scale = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1)], lr=1e-2), lambda s: s / 2 if s < 2 else (STEPS - s) / (STEPS - 2)
    )
    for step in batches():
        plain.lr = scale.get_last_lr()[0]
        for batch in step:
            if outside is None:
                loss = plain.model(**batch, num_items_in_batch=num_items(step)).loss
            else:
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                loss = outside(plain.model(**inputs), batch["labels"], num_items_in_batch=num_items(step))
            plain.backward(loss)
        plain.clip(0.5)
        plain.step()
        scale.optimizer.step()
        scale.step()
    for name, master in masters(trainer.model).items():
        assert torch.equal(master.view(-1), plain.master(name).view(-1)), name


def test_fp32_follows_the_stock_trainer(tmp_path: Path) -> None:
    """Losses, norms before clipping, learning rates, evaluation. One update of torch's AdamW agrees to 1e-6."""
    stock, wanted = trained(tmp_path / "stock", "fp32", kind=Trainer, eval_strategy="steps", eval_steps=3)
    ours, record = trained(tmp_path / "ours", "fp32", kind=GeminiTrainer, eval_strategy="steps", eval_steps=3)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert record.of(key) == pytest.approx(wanted.of(key), rel=2e-5), key
    assert len(record.of("eval_loss")) == 2
    assert record.of("learning_rate") == wanted.of("learning_rate")
    assert record.of("train_loss") == pytest.approx(wanted.of("train_loss"), rel=2e-5)
    for name, param in stock.model.named_parameters():
        torch.testing.assert_close(ours.model.full_param(name), param.detach(), rtol=1e-3, atol=2e-5)


def test_random_order_and_epochs_follow_the_stock_trainer(tmp_path: Path) -> None:
    """Shuffled data, an epoch that does not divide by the micro-batches of a step, a fraction of an epoch."""
    how: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 1.5, "save_strategy": "no"}
    how["train_dataset"] = Sentences(14)
    stock, wanted = train_new(tmp_path / "stock", Trainer, **how)
    ours, record = train_new(tmp_path / "ours", **how)
    assert len(record.of("loss")) == ours.state.global_step == 6
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=2e-5)
    assert record.of("grad_norm") == pytest.approx(wanted.of("grad_norm"), rel=2e-5)


def test_where_weights_live_changes_no_bit(tmp_path: Path) -> None:
    memory = gemini.MemoryBudget(cpu="640KiB", nvme="64MiB", nvme_path=str(tmp_path))
    tight, _ = trained(tmp_path / "tight", "bf16", gemini_config=gemini.GeminiConfig(memory=memory))
    report = tight.model.memory_report()
    assert report["nvme"]["used"] > 0 and report["cpu"]["peak"] <= report["cpu"]["budget"]
    roomy, _ = trained(tmp_path / "roomy", "bf16")
    assert_same_run(tight, roomy)
