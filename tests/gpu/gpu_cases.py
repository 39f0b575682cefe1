"""What the tests of a GPU share: which device it is, the placements, and the plain loop computed on that device.

The models, the loops and the comparisons are those of ``tests/models.py`` and ``tests/train/helpers.py``; here they
only get the device. A GPU is the device unless ``GEMINI_GPU_TESTS=standin`` says otherwise.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import parse_bytes
from gemini.memory.devices.device import make_device
from gemini.planning.layout import DEFAULT_MAX_CHUNK, ParamSpec, make_layout
from gemini.planning.planes import compute_itemsize
from gemini.train.setup.problem import collect_params
from tests.train import helpers

ON_STANDIN = os.environ.get("GEMINI_GPU_TESTS") == "standin"
DEVICE = "standin" if ON_STANDIN else "cuda"
"""What ``GeminiConfig(device=)`` is given."""
TORCH = "cpu" if ON_STANDIN else "cuda"
"""Where tensors of forward are."""
ON_FAKE = "fakegpu" in os.environ.get("LD_PRELOAD", "")
"""Whether the card is a CUDA runtime in host memory (tests/fakegpu), which takes no time and computes at once."""
takes_time = pytest.mark.skipif(ON_FAKE, reason="about the time that a card takes")
PLENTY = "64MiB"
"""For models of some 40,000 params; host memory in a budget may be page-locked, all of it."""


@dataclass(frozen=True)
class Where:
    """Fractions on the GPU and on NVMe; what is left over is in host memory. ``roomy``: no window ever has to go."""

    fractions: dict[str, float] = field(default_factory=dict)
    roomy: bool = False

    @property
    def static(self) -> gemini.StaticPlacement:
        return gemini.StaticPlacement(**self.fractions)


PLACEMENTS: dict[str, Where] = {
    "all on the gpu": Where({"weights_on_gpu": 1, "optimizer_on_gpu": 1}, roomy=True),
    "states on the host": Where({"weights_on_gpu": 1}, roomy=True),
    "all on the host": Where(),
    "all on nvme": Where({"weights_on_nvme": 1, "optimizer_on_nvme": 1}),
    "mixed": Where({"weights_on_gpu": 0.4, "optimizer_on_gpu": 0.3, "weights_on_nvme": 0.3, "optimizer_on_nvme": 0.4}),
}
if "updates_on_gpu" in gemini.StaticPlacement.__dataclass_fields__:  # states of the host that are updated on the GPU
    PLACEMENTS["updated through the gpu"] = Where({"weights_on_gpu": 0.4, "updates_on_gpu": 1})


def budget(size: str | int) -> int:
    """Of a GPU, with so many bytes for what is managed."""
    return parse_bytes(size) + make_device(DEVICE).beside_bytes()


def config(model: nn.Module, where: str, path: Path, *, precision: str = "bf16", **more: Any) -> gemini.GeminiConfig:
    """Budgets with room on the GPU for what lives there and, unless roomy, the weights of one module at a time."""
    placement = PLACEMENTS[where]
    on_gpu = {name: fraction for name, fraction in placement.fractions.items() if name.endswith("on_gpu")}
    sizes = chunk_sizes(model, more.get("max_chunk", DEFAULT_MAX_CHUNK))
    planes = sum(sizes) * (4 * on_gpu.get("weights_on_gpu", 0) + 16 * on_gpu.get("optimizer_on_gpu", 0))
    # A fraction is honoured to one chunk of weights and one of states. An update through the GPU takes tiles there.
    extra = 20 * max(sizes) if on_gpu else 0
    extra += 4 * 20 * max(sizes) if "updates_on_gpu" in on_gpu else 0
    gathered, _ = helpers.tight_bytes(model, precision)
    waiting = 2 * max(sizes) * compute_itemsize(precision)  # gradients that leave beside computing
    gpu = budget(PLENTY if placement.roomy else int(planes + gathered + extra + waiting))
    memory = gemini.MemoryBudget(gpu=gpu, cpu=PLENTY, nvme=PLENTY, nvme_path=path)
    return gemini.GeminiConfig(precision=precision, memory=memory, placement=placement.static, device=DEVICE, **more)


def chunk_sizes(model: nn.Module, max_chunk: int = DEFAULT_MAX_CHUNK) -> list[int]:
    """Elements of each chunk, padding included."""
    specs = [ParamSpec(n.names[0], n.param.numel(), n.param.requires_grad) for n in collect_params(model)]
    return [chunk.numel for chunk in make_layout(specs, max_chunk=max_chunk).chunks]


def wrap(model: nn.Module, where: str, path: Path, **how: Any) -> Any:
    return gemini.GeminiDDP(model, config(model, where, path, **how))


def batch(seed: int, **shape: int) -> dict[str, torch.Tensor]:
    return {name: ids.to(TORCH) for name, ids in helpers.batch(seed, **shape).items()}


def on_batch(model: Any, seed: int) -> torch.Tensor:
    return model(**batch(seed)).loss


def train(model: Any, optimizer: Any, steps: Any, *, clip: float | None = 1.0, loss_of: Any = on_batch) -> list[float]:
    return helpers.train(model, optimizer, steps, loss_of, clip=clip)


def plain(make: Callable[[], nn.Module], precision: str = "bf16", **how: Any) -> helpers.Plain:
    """The loop that defines the bits, of a model on the device."""
    return helpers.Plain(make().to(TORCH), precision, **how)


def bring_home(loop: helpers.Plain) -> helpers.Plain:
    """What the plain loop has trained, on the CPU, where everything that is read of a managed model comes out."""
    loop.model.to("cpu")
    for state in loop.states.values():
        state.update({name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)})
    return loop


def forget_cached() -> None:
    """Give what torch's allocator keeps for later back to the GPU, and count peaks from here."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
