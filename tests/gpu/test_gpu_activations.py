"""On a GPU: checkpointed activations wait in host memory or on the drive. The same bits, and they leave the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import DEVICE
from tests.train import test_activations
from tests.train.helpers import llama, t5
from tests.world import world_of

SHAPE = {"rows": 4, "length": 64}


def wrap(folder: Path, offload: str | None, make: Any, **more: Any) -> Any:
    sizes: dict[str, Any] = {"gpu": gpu_cases.budget("64MiB"), "cpu": "64MiB", "nvme": "64MiB", **more}
    memory = gemini.MemoryBudget(**sizes, nvme_path=folder)
    config = gemini.GeminiConfig(device=DEVICE, memory=memory, offload_activations=offload)
    model = gemini.GeminiDDP(make(), config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(step: int) -> dict[str, torch.Tensor]:
    return gpu_cases.batch(step, **SHAPE)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("make", [lambda: llama(dropout=0.1), lambda: t5(dropout=0.1)], ids=["llama", "t5"])
def test_the_same_bits(make: Any, offload: str, tmp_path: Path) -> None:
    seen, nowhere, masters = test_activations.train(wrap(tmp_path, None, make), batch)
    moved, waited, same_masters = test_activations.train(wrap(tmp_path, offload, make), batch)
    assert moved == seen and set(waited) == {offload} and not nowhere
    assert all(torch.equal(value, same_masters[name]) for name, value in masters.items())


@gpu_cases.takes_time  # blocks stay on the card until their copies are over, and here copies are as late as can be
def test_inputs_of_blocks_leave_the_card(card: torch.device, tmp_path: Path) -> None:
    """Between forward and backward torch holds their bytes less, each of which the ledger has in host memory."""

    def make() -> Any:
        return llama(layers=8)

    shape, held = {"rows": 64, "length": 64}, {}
    for offload in (None, "cpu"):
        model = wrap(tmp_path, offload, make)
        for _ in range(2):  # the second forward finds windows, staging and workspaces where they stay
            loss = model(**gpu_cases.batch(0, **shape)).loss
            world_of(model).activations.drain()
            torch.cuda.synchronize()
            held[offload] = torch.cuda.memory_allocated(card), test_activations.held(model).get("cpu", 0)
            loss.backward()
            model.zero_grad()
        del model, loss
    inputs = 8 * 64 * 64 * 32 * 2
    assert held["cpu"][1] == inputs
    assert held[None][0] - held["cpu"][0] >= 0.9 * inputs, held
