"""Models with parts in fp32, and their training by stock mixed precision and by Gemini, through every road.

Stock mixed precision is autocast over fp32 weights, as the Trainer, Accelerate and Lightning have it. Gemini has the
compute dtype's weights beside the parts in fp32. So losses are compared within the spread of the stock runs: how far
they are from each other when all that differs is a rounding of the weights they begin with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import torch
import transformers
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.huggingface import GeminiTrainer
from gemini.integrations.lightning import GeminiStrategy
from torch import nn
from torch.nn.utils import parametrizations
from transformers import TrainerCallback, TrainingArguments

import gemini

STEPS, LR, ROWS = 8, 3e-3, 8
DATA = [
    {
        "pixel_values": torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(i)) + 0.2 * (i % 4),
        "labels": torch.tensor(i % 4),
    }
    for i in range(ROWS)
]
BATCH = {name: torch.stack([row[name] for row in DATA]) for name in DATA[0]}


class Small(nn.Module):
    """What has a forward like transformers' models."""

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.features(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Spectral(Small):
    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 16, 3))
        self.fc, self.head = nn.utils.spectral_norm(nn.Linear(16, 32)), nn.Linear(32, 4)

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.conv(pixel_values).relu().mean((2, 3))).relu())


class Fp32Head(Small):
    """As TRL and others have it: the head is computed in fp32, under autocast too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 32), nn.Linear(32, 4)

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(self.conv(pixel_values).relu().mean((2, 3))).relu()
        with torch.autocast("cpu", enabled=False):
            return self.head(hidden.float())


class Declares(transformers.PreTrainedModel):
    """A class that declares what stays in fp32, and casts where that begins and ends."""

    config_class = transformers.PretrainedConfig
    _keep_in_fp32_modules_strict = ["gate", "scale"]
    _no_split_modules: list[str] = []

    def __init__(self, config: Any):
        super().__init__(config)
        self.conv, self.gate, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.conv(pixel_values).relu().mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            gate = self.gate(hidden.float()).sigmoid() * self.scale
        logits = self.head((hidden * gate).to(hidden.dtype))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


KINDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet": (resnet, ["classifier"]),
    "resnet_half": (resnet, "auto"),
    "spectral": (Spectral, "auto"),
    "head": (Fp32Head, ["head"]),
    "declares": (lambda: Declares(transformers.PretrainedConfig()), "auto"),
}


def make(kind: str, nudge: int = 0) -> nn.Module:
    """The same weights every time; those of another ``nudge`` differ from them by a rounding to bf16."""
    torch.manual_seed(0)
    model = KINDS[kind][0]().train()
    generator = torch.Generator().manual_seed(nudge)
    with torch.no_grad():
        for param in model.parameters() if nudge else ():
            param.mul_(1 + (torch.rand(param.shape, generator=generator) - 0.5) * 2**-7)
    return model


def config(kind: str) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB"), device="cpu", keep_fp32=KINDS[kind][1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


# ---- roads -----------------------------------------------------------------------------------------------------------


def loop(model: Any, kind: str, stock: bool, folder: Path) -> list[float]:
    if not stock:
        model = gemini.GeminiDDP(model, config(kind))
        optimizer: Any = gemini.HybridAdam(model.parameters(), lr=LR, weight_decay=0.0)
    else:
        optimizer = adamw(model)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=stock):
            loss = model(**BATCH)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def accelerator(model: Any, kind: str, stock: bool, folder: Path) -> list[float]:
    if stock:
        made: Any = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    else:
        made = GeminiAccelerator(cpu=True, mixed_precision="bf16", gemini_config=config(kind))
    model, optimizer = made.prepare(model, adamw(model))
    losses = []
    for _ in range(STEPS):
        loss = model(**BATCH)["loss"]
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def trainer(model: Any, kind: str, stock: bool, folder: Path) -> list[float]:
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=LR, bf16=True, use_cpu=True,
        logging_steps=1, save_strategy="no", report_to=[], lr_scheduler_type="constant", max_grad_norm=0.0,
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    record, how = _Losses(), {} if stock else {"gemini_config": config(kind)}
    made: Any = (transformers.Trainer if stock else GeminiTrainer)(
        model=model, args=args, train_dataset=DATA, callbacks=[record], **how
    )
    made.train()
    return record.losses


class _Module(L.LightningModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.losses = net, list[float]()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(**batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)


def lightning(model: Any, kind: str, stock: bool, folder: Path) -> list[float]:
    module = _Module(model)
    made = L.Trainer(
        accelerator="cpu", devices=1, precision="bf16-mixed", logger=False, default_root_dir=folder,
        strategy="auto" if stock else GeminiStrategy(config(kind)),
        max_steps=STEPS, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=ROWS))
    return module.losses


ROADS: dict[str, Callable[[Any, str, bool, Path], list[float]]] = {
    "loop": loop,
    "accelerate": accelerator,
    "trainer": trainer,
    "lightning": lightning,
}
