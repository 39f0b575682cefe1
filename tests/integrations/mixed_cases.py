"""Models with parts in fp32."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

import gemini

ROWS = 8
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
