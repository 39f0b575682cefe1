"""What the tests of this room share: a tiny model that spills, small worlds of chunks without a model, and
subprocesses.

A *world* is what the engine builds below a model (layout, ledger, device, mover, manager) at sizes where every byte
can be counted by hand. Content is a number per chunk, so that a chunk that came back with another one's bytes is seen.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini
from benchmarks._progress import run
from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, Chunk, Use, make_plane
from gemini.memory.devices.device import Device
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.transfers import Transfers
from gemini.memory.nvme import SpillFile
from gemini.planning.layout import ALIGN, ParamSpec, make_layout
from gemini.planning.planes import WEIGHTS, PlaneSpec, compute_dtype
from gemini.planning.working import staging_bytes
from gemini.tiers import Tier
from tests.scaling import backward, clip_grads, make_step

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096
EVERYTHING_ON_DISK = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)


class Net(nn.Module):
    """An embedding, blocks with a residual connection, a head: small, but of several chunks and kinds of params."""

    def __init__(self, width: int = 48, blocks: int = 3, vocab: int = 40):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def make_net(**sizes: int) -> Net:
    torch.manual_seed(3)
    return Net(**sizes)


def batch(step: int, vocab: int = 40) -> torch.Tensor:
    return torch.randint(0, vocab, (2, 6), generator=torch.Generator().manual_seed(100 + step))


def wrap(net: nn.Module, directory: Path | None = None, **config: Any) -> tuple[Any, gemini.HybridAdam]:
    """The model in chunks and its optimizer; with a ``directory`` all planes are in the spill file."""
    memory = gemini.MemoryBudget(
        cpu=config.pop("cpu", "16MiB"), nvme="64MiB" if directory else None, nvme_path=directory
    )
    if directory is not None:
        config.setdefault("placement", EVERYTHING_ON_DISK)
    model: Any = gemini.GeminiDDP(net, gemini.GeminiConfig(memory=memory, **({"device": "cpu"} | config)))
    return model, gemini.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_step(model: Any, optimizer: gemini.HybridAdam, step: int) -> float:
    loss = model(batch(step))
    backward(model, loss)
    clip_grads(model, optimizer, 1.0)
    make_step(model, optimizer)
    optimizer.zero_grad()
    return float(loss.detach())


def masters(model: Any) -> dict[str, torch.Tensor]:
    return model.state_dict(dtype=torch.float32)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


MASTER = PlaneSpec(WEIGHTS, "float32")


@dataclass
class World:
    """Chunks of given sizes (in units of ``ALIGN`` elements), their weights at one home, under one manager."""

    sizes: list[int]
    device: Device
    budget: int
    home: Tier
    directory: Path
    precision: str = "bf16"
    beside: int = 0
    """Bytes of the computing tier that windows do not have at first."""
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One block per param, so that each is a chunk of its own.
        self.layout = make_layout([ParamSpec(f"b.{i}.w", n * ALIGN) for i, n in enumerate(self.sizes)])
        tile = 2 * ALIGN
        tier = self.device.tier
        total = 8 * sum(self.sizes) * ALIGN
        budgets = {Tier.CPU: total + staging_bytes(tile), Tier.NVME: total}
        self.ledger = Ledger(
            budgets | {tier: self.budget + self.beside + (staging_bytes(tile) if tier is Tier.CPU else 0)}
        )
        self.ledger.reserve(Tier.CPU, staging_bytes(tile), "staging")
        if self.device.keeps_windows:
            self.device.reserve_windows(self.budget)
            self.ledger.reserve(tier, self.budget, "pool")
        self.files = {Tier.NVME: SpillFile(self.directory, total)} if self.home is Tier.NVME else {}
        self.mover = Mover(self.device, tile, self.ledger)
        self.chunks = [self._chunk(spec) for spec in self.layout.chunks]
        self.manager = Manager(
            self.chunks,
            ledger=self.ledger,
            device=self.device,
            mover=self.mover,
            foresight=Foresight(),
            transfers=Transfers(self.mover),
        )
        for chunk in self.chunks:
            chunk.on_gone.append(lambda gone: self.evicted.append(gone.spec.index))
        for index, chunk in enumerate(self.chunks):
            self.write(chunk, float(index + 1))

    def _chunk(self, spec: Any) -> Chunk:
        dtype = COMPUTE_DTYPES[self.precision]
        weights = PlaneSpec(WEIGHTS, compute_dtype(self.precision))
        plane = make_plane(weights, spec.numel, self.home, self.device, self.files)
        if self.home is not Tier.CPU or self.device.tier is not Tier.CPU:
            self.ledger.reserve(self.home, plane.num_bytes, "weights")
        window = self.device.make_window(spec.numel * dtype.itemsize)
        return Chunk(spec, {WEIGHTS: plane}, window.bytes.view(dtype), window, window.face().view(dtype))

    def make_room(self, num_bytes: int) -> None:
        """For a window where they have memory of their own, which nothing else gets."""
        tier, room = self.device.tier, self.manager.room
        if self.device.keeps_windows:
            window = self.device.make_window(num_bytes)
            room.populate(window, "a test", what="a test")
            room.depopulate(window, "a test")
        else:
            self.ledger.reserve(tier, num_bytes, "a test", what="a test")
            self.ledger.release(tier, num_bytes, "a test")
        assert self.room() >= num_bytes

    def room(self) -> int:
        """Bytes that a window could have."""
        tier = self.device.tier
        return self.ledger.held(tier, "pool") if self.device.keeps_windows else self.ledger.free(tier)

    def write(self, chunk: Chunk, value: float) -> None:
        """What an update does: new content at home; the gathered copy is overtaken."""
        plane = chunk.weights
        for start in range(0, plane.numel, self.mover.tile):
            stop = min(start + self.mover.tile, plane.numel)
            staged = self.mover.scratch(0, plane.dtype, stop - start)
            self.mover.store([(plane, staged.fill_(value))], start, stop)

    def window_bytes(self, *indices: int) -> int:
        return sum(2 * self.sizes[i] * ALIGN for i in indices)

    def snapshot(self) -> Any:
        holders = {tier: self.ledger.holders(tier) for tier in self.ledger.tiers}
        return holders, [(c.use, c.pins, c.last_use, c.stale) for c in self.chunks], list(self.evicted)

    def gathered(self) -> list[int]:
        return [c.spec.index for c in self.chunks if c.use is not Use.FREE]


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a program that can be killed, or that hangs, apart from the tests.

    One torch thread: the threads of OpenMP do not follow a fork, and the child of a program that used them would hang.
    """
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport torch; torch.set_num_threads(1)\n{code}"
    return run([sys.executable, "-c", program, *map(str, args)])
