"""What the tests of the Lightning strategy share: a tiny LightningModule, its data, a quiet Trainer, the plain loop.

The plain loop is GeminiDDP and HybridAdam by hand: what Lightning is told to do, written out. Run as a script this file
is the job of the tests with ``devices=2``.
"""

import logging
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import nn

for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: E402

import gemini  # noqa: E402
from gemini.train.sharding.reduction import Reduction  # noqa: E402

KNOWN_BEFORE = "gemini" in L.pytorch.strategies.StrategyRegistry

from gemini.integrations.lightning import GeminiStrategy  # noqa: E402

from tests.world import world_of  # noqa: E402

WIDTH, ROWS = 16, 4


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, num: int = 24):
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0).cumsum(0)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Any:
    """Lightning makes a process group and says so in the environment: neither is for the tests that come after."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def clean_environment() -> dict[str, str]:
    """For a process that is to find no trace of this one's Lightning."""
    ours = ("MASTER_", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"OMP_NUM_THREADS": "1"}


def loader(num: int = 24, **how: Any) -> Any:
    return torch.utils.data.DataLoader(Data(num), batch_size=ROWS, **how)


class Tiny(L.LightningModule):
    """Blocks in a list (so that chunks follow them), a direct param, a buffer; losses and rates are kept."""

    def __init__(self, dropout: float = 0.0, lr: float = 1e-2, through_forward: bool = True):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))
        self.register_buffer("seen", torch.zeros(()))
        self.dropout = nn.Dropout(dropout)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return x * self.scale

    def loss_of(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        if self._trainer is not None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss_of(batch))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


class Asking(Tiny):
    """Validation asks the model more often on rank 1, of which a module has to be gathered each time."""

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)) for _ in range(12))
        self.blocks = nn.ModuleList(wide)

    def validation_step(self, batch: Any, index: int) -> None:
        for _ in range(1 + 3 * self.trainer.global_rank):
            loss = self.loss_of(batch)
        self.log("asked", loss, sync_dist=True)
        self.all_gather(loss)


class Looking(Tiny):
    """One rank alone looks at the norm before each step; the optimizer has a hook."""

    def __init__(self, looks: bool):
        super().__init__()
        self.looks, self.norms, self.stepped = looks, [], 0  # type: ignore[var-annotated]

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["optimizer"].register_step_post_hook(lambda *_: setattr(self, "stepped", self.stepped + 1))
        return made

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.looks:
            self.norms.append(float(self.trainer.strategy.grad_norm))


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def config(precision: str = "fp32", **how: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(precision=precision, memory=gemini.MemoryBudget(cpu="256MiB"), **how)


def on_disk(path: Path, precision: str = "fp32", **how: Any) -> gemini.GeminiConfig:
    """Weights and states on NVMe, so that every module is gathered and let go."""
    return gemini.GeminiConfig(
        precision=precision,
        memory=gemini.MemoryBudget(cpu="4MiB", nvme="64MiB", nvme_path=path),
        placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1),
        **how,
    )


def trainer(strategy: Any = "gemini", **how: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1, "use_distributed_sampler": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **settings | how)


def fit(module: Any, strategy: Any = "gemini", num: int = 24, ckpt_path: Any = None, **how: Any) -> L.Trainer:
    """A Trainer that has trained the module on ``num`` rows."""
    run = trainer(strategy, **how)
    run.fit(module, loader(num), ckpt_path=ckpt_path)
    return run


def plain_loop(
    model: Any, settings: gemini.GeminiConfig, batches: Any, *, accumulate: int = 1, clip: float | None = None,
    epochs: int = 1,
) -> tuple[Any, Any, list[float]]:  # fmt: skip
    """By hand: (managed model, optimizer, norms)."""
    module: Any = gemini.GeminiDDP(model, settings)
    optimizer = gemini.HybridAdam(module.parameters(), lr=module.hparams["lr"], weight_decay=0.1)
    scheduler, norms = schedule(optimizer), []
    scaler = gemini.GradScaler("cpu", enabled=settings.precision == "fp16")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]
    for number, batch in enumerate(batch for _ in range(epochs) for batch in batches):
        last = number % accumulate == accumulate - 1
        x, y = (t.to(dtype) for t in batch)
        if last:
            scaler.scale(nn.functional.mse_loss(module(x).float(), y.float()) / accumulate).backward()
        else:
            with module.no_sync():
                scaler.scale(nn.functional.mse_loss(module(x).float(), y.float()) / accumulate).backward()
            continue
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(float(module.clip_grad_norm_(clip)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    return module, optimizer, norms


def state_of(module: Any) -> dict[str, Any]:
    """Everything that a step leaves behind, by name: masters, states, step counts, buffers."""
    world = world_of(module)
    found = {f"master/{name}": value for name, value in module.state_dict(dtype=torch.float32).items()}
    for handle in world.handles:
        for kind in handle.chunk.planes:
            if kind.startswith("exp_avg"):
                found[f"{kind}/{handle.name}"] = world.read_plane(handle, kind)
        found[f"step/{handle.name}"] = torch.tensor(handle.num_steps)
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def main(out: str) -> None:
    """One rank of two: Lightning, the plain loop, and Lightning in two halves. Rank 0 writes what came out of each."""
    found: dict[str, Any] = {"known before": KNOWN_BEFORE}
    blocked = count_no_sync()
    settings: dict[str, Any] = {"devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    whole = trainer(GeminiStrategy(config("bf16")), max_epochs=2, **settings)
    module = Looking(whole.global_rank == 0)
    whole.fit(module, batches_of(whole.global_rank))
    found["lightning"], found["losses"], found["blocked"] = state_of(module), module.losses, len(blocked)
    found["norms"], found["names"] = module.norms, [type(o).__name__ for o in whole.optimizers]
    found["hooks"] = module.stepped

    plain, _, norms = plain_loop(
        Tiny(), config("bf16"), batches_of(whole.global_rank), accumulate=2, clip=0.5, epochs=2
    )
    found["plain"], found["plain norms"] = state_of(plain), norms

    half = trainer(GeminiStrategy(config("bf16")), **settings)
    half.fit(Tiny(), batches_of(half.global_rank))
    found["half"] = state_of(half.lightning_module)
    half.save_checkpoint(Path(out) / "two.ckpt")
    blocked.clear()
    often, each = Tiny(), trainer(GeminiStrategy(config("bf16"), reduce_every_backward=True), **settings)
    each.fit(often, batches_of(each.global_rank))
    found["often"], found["blocked often"] = state_of(often), len(blocked)
    again = trainer(GeminiStrategy(config("bf16")), max_epochs=2, **settings)
    resumed = Tiny()
    again.fit(resumed, batches_of(again.global_rank), ckpt_path=Path(out) / "two.ckpt")
    found["resumed"], found["resumed losses"] = state_of(resumed), resumed.losses
    averaging = trainer(GeminiStrategy(config("bf16")), callbacks=[EMAWeightAveraging(decay=0.5)], **settings)
    averaged = Tiny()
    averaging.fit(averaged, batches_of(averaging.global_rank), loader(4))
    found["averaged"] = state_of(averaged)
    rule = gemini.optim.AveragedRule(decay=lambda step: 0.5 if step > 1 else 0.0)
    own = config("bf16", optimizer=rule)
    by_hand, _, _ = plain_loop(Tiny(), own, batches_of(averaging.global_rank), accumulate=2, clip=0.5)
    with gemini.EMA(by_hand).swapped_in():
        found["averaged by hand"] = by_hand.state_dict(dtype=torch.float32)
    small = gemini.MemoryBudget(cpu="560KiB", nvme="64MiB", nvme_path=out)
    drive = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    own = gemini.GeminiConfig(precision="fp32", memory=small, placement=drive, max_chunk=256)
    asking = trainer(GeminiStrategy(own, timeout=timedelta(seconds=100)), devices=2)
    asking.fit(Asking(), batches_of(asking.global_rank), loader(8))
    found["asked"] = float(asking.callback_metrics["asked"])
    try:
        (Path(out) / "taken").write_text("a file where a folder would have to be")
        again.save_checkpoint(Path(out) / "taken" / "x.ckpt")
    except gemini.GeminiError as e:
        found[f"refusal {again.global_rank}"] = str(e)
    torch.save(found, Path(out) / f"rank{again.global_rank}.pt")


def count_no_sync() -> list[None]:
    """Grows by one each time a backward keeps its gradients to its rank."""
    seen: list[None] = []
    without_reducing = Reduction.without_reducing

    def counted(self: Any) -> Any:
        seen.append(None)
        return without_reducing(self)

    Reduction.without_reducing = counted  # type: ignore[method-assign]
    return seen


def batches_of(rank: int) -> Any:
    return loader(48, sampler=torch.utils.data.DistributedSampler(Data(48), 2, rank, shuffle=False))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
