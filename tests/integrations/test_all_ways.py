"""One tiny model and its data through a loop without Gemini, the loop by hand, Trainer, Accelerate and Lightning: the
same final weights, bit for bit.

The frameworks do the same arithmetic once the loss is the same: Trainer divides the sum over labels by how many there
are in the step (``num_items_in_batch``), which is another rounding than the mean; so all the others are told to.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.lightning import GeminiStrategy

import gemini
from tests.integrations.lightning_cases import alone  # noqa: F401 - a fixture for this module
from tests.integrations.trainer_cases import Sentences, llama, masters, rows, train_new
from tests.train.helpers import Plain

STEPS, LR, CLIP, DECAY = 6, 1e-2, 0.5, 0.1


def batches() -> list[dict[str, torch.Tensor]]:
    return [rows(2 * i, 2 * i + 1) for i in range(STEPS)]


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, num_items_in_batch=batch["labels"][:, 1:].ne(-100).sum()).loss


def config(precision: str) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(precision=precision, memory=gemini.MemoryBudget(cpu="64MiB"))


def without_gemini(precision: str, folder: Path) -> dict[str, torch.Tensor]:
    plain = Plain(llama(), precision, lr=LR, weight_decay=DECAY)
    plain.model.train()
    for batch in batches():
        plain.backward(loss_of(plain.model, batch))
        assert plain.clip(CLIP) > CLIP
        plain.step()
    return {name: plain.master(name) for name, _ in plain.model.named_parameters()}


def by_hand(precision: str, folder: Path) -> dict[str, torch.Tensor]:
    model = gemini.GeminiDDP(llama(), config(precision)).train()
    optimizer = gemini.HybridAdam(model.parameters(), lr=LR, weight_decay=DECAY)
    for batch in batches():
        loss_of(model, batch).backward()
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return masters(model)


def trainer(precision: str, folder: Path) -> dict[str, torch.Tensor]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)  # its own has no decay on norms
    made, _ = train_new(
        folder, model=model, gemini_config=config(precision), optimizers=(optimizer, None), max_steps=STEPS,
        gradient_accumulation_steps=1, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=CLIP,
        train_sampling_strategy="sequential", save_strategy="no",
    )  # fmt: skip
    return masters(made.model)


def accelerate(precision: str, folder: Path) -> dict[str, torch.Tensor]:
    accelerator = GeminiAccelerator(gemini_config=config(precision), cpu=True)
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches():
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return masters(model)


def lightning(precision: str, folder: Path) -> dict[str, torch.Tensor]:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.llama, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=DECAY)

    module = Module().train()
    L.Trainer(
        strategy=GeminiStrategy(config(precision)), accelerator="cpu", devices=1, max_steps=STEPS, logger=False,
        gradient_clip_val=CLIP, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, use_distributed_sampler=False,  # which would shuffle
    ).fit(module, torch.utils.data.DataLoader(Sentences(2 * STEPS), batch_size=2))  # fmt: skip
    return {name.removeprefix("llama."): value for name, value in masters(module).items()}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_all_ways_come_to_the_same_bits(precision: str, tmp_path: Path) -> None:
    wanted = without_gemini(precision, tmp_path)
    start = {name: param.detach() for name, param in llama().named_parameters()}
    assert not any(torch.equal(start[name], value.view_as(start[name])) for name, value in wanted.items())
    for way in (by_hand, trainer, accelerate, lightning):
        found = way(precision, tmp_path)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name].view(-1), value.view(-1)), f"{way.__name__}: {name}"
