"""Optimizers in Lightning's loop: groups, schedulers, two by hand, and those that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning_cases import (
    L,
    Tiny,
    alone,  # noqa: F401
    assert_same,
    config,
    loader,
    on_disk,
    state_of,
)
from torch import nn

import gemini
from tests.integrations.test_lightning_fit import fit
from tests.world import world_of


def optimizing(make: Any) -> Any:
    class Other(Tiny):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Other()


def test_a_plateau_lowers_the_rate() -> None:
    def plateau(module: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "monitor": "loss"}}

    module = optimizing(plateau)
    fit(module, "gemini", 8, max_epochs=3)
    assert module.rates[0] == 1e-2 and module.rates[-1] < 1e-2, "the loss falls, and it should rise"


class Gan(L.LightningModule):
    """Two optimizers by hand; ``toggle`` as Lightning's guides have it, or gradients left lying in the other half."""

    def __init__(self, toggle: bool, clip: float | None = None):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.judge = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.toggle, self.clip = toggle, clip
        self.norms: list[float] = []

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.maker(z)

    def losses(self, x: torch.Tensor) -> Any:
        return (
            lambda: nn.functional.softplus(-self.judge(self(x))).mean(),
            lambda: nn.functional.softplus(self.judge(self(x).detach()) - self.judge(x)).mean(),
        )

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer, loss_of in zip(self.optimizers(), self.losses(batch[0]), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of())
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
                self.norms.append(float(self.trainer.strategy.grad_norm))
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2, betas=(0.5, 0.9)) for part in (self.maker, self.judge)]


@pytest.mark.parametrize("toggle", [True, False])
def test_two_optimizers_by_hand(toggle: bool, tmp_path: Path) -> None:
    """Stock torch clips each optimizer's own gradients, whatever lies in the other's: so must we."""
    module = Gan(toggle, clip=0.05)
    fit(module, GeminiStrategy(on_disk(tmp_path)), 16)
    plain = Gan(toggle)
    optimizers = plain.configure_optimizers()
    norms = []
    for batch in loader(16):
        for optimizer, loss_of in zip(optimizers, plain.losses(batch[0]), strict=True):
            optimizer.zero_grad()
            loss_of().backward()
            norms.append(float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)))
            optimizer.step()
    assert module.norms == pytest.approx(norms, rel=1e-4) and min(norms) > 0.05
    for name, value in plain.state_dict().items():
        assert torch.allclose(module.full_param(name), value, rtol=1e-4, atol=1e-6), name
    assert all(p.requires_grad for p in module.parameters())
    world_of(module).check()


class Thawing(Gan):
    """Trains the judge alone, never through the model's own forward; its last layer is frozen for the first steps."""

    def __init__(self) -> None:
        super().__init__(False)
        self.judge[2].requires_grad_(False)

    def step_on(self, x: torch.Tensor, optimizer: Any, backward: Any, number: int) -> None:
        if number == 2:
            self.judge[2].requires_grad_(True)
        optimizer.zero_grad()
        backward(self.judge(x).square().mean())
        optimizer.step()

    def training_step(self, batch: Any, index: int) -> None:
        self.step_on(batch[0], self.optimizers(), self.manual_backward, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.judge.parameters(), lr=1e-2)


def test_a_param_that_is_thawed_in_a_manual_loop_is_trained() -> None:
    module, plain = Thawing(), Thawing()
    fit(module, GeminiStrategy(config()), 20)
    optimizer = plain.configure_optimizers()
    for number, batch in enumerate(loader(20)):
        plain.step_on(batch[0], optimizer, lambda loss: loss.backward(), number)
    for name, value in plain.state_dict().items():
        assert torch.allclose(module.full_param(name), value, rtol=1e-4, atol=1e-6), name
    assert state_of(module)["step/judge.2.weight"] == 3


def test_clipping_one_of_two_leaves_the_other_alone() -> None:
    """Both have gradients; one is clipped and steps, then the other: torch's figures, each by its own norm."""

    def gradients(clips: tuple[float | None, float | None]) -> dict[str, torch.Tensor]:
        model: Any = gemini.GeminiDDP(Gan(False), config())
        halves = [list(part.parameters()) for part in (model.maker, model.judge)]
        optimizers = [gemini.HybridAdam(params, betas=(0.0, 0.0)) for params in halves]  # the moment is the gradient
        for loss_of in model.losses(next(iter(loader(4)))[0]):
            loss_of().backward()
        for optimizer, params, clip in zip(optimizers, halves, clips, strict=True):
            if clip is not None:
                model.clip_grad_norm_(clip, params=params)
            optimizer.step()
        return {name: value for name, value in state_of(model).items() if name.startswith("exp_avg/")}

    free, both = gradients((None, None)), gradients((0.01, 0.02))
    assert_same(free, gradients((1e9, 1e9)))
    for half, norm in (("maker", 0.01), ("judge", 0.02)):
        whole = torch.cat([value.flatten() for name, value in free.items() if half in name])
        clipped = torch.cat([value.flatten() for name, value in both.items() if half in name])
        assert whole.norm() > 2 * norm
        assert torch.allclose(clipped, whole * (norm / (whole.norm() + 1e-6)), rtol=1e-5)
    with pytest.raises(ValueError, match="clip_grad_norm_ was given a tensor"):
        gemini.GeminiDDP(Gan(False), config()).clip_grad_norm_(1.0, params=[nn.Parameter(torch.ones(1))])


def test_a_param_in_two_optimizers_is_refused() -> None:
    class Shared(Gan):
        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(self.maker.parameters()), torch.optim.AdamW(self.parameters())]

    with pytest.raises(ValueError, match="'maker.0.weight' is in two optimizers"):
        fit(Shared(True), "gemini", 4)
