"""Lightning's loop with strategy="gemini" is the plain loop: same bits, with everything Trainer adds to a step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from lightning_cases import (
    L,
    Tiny,
    alone,  # noqa: F401
    assert_same,
    config,
    loader,
    on_disk,
    plain_loop,
    schedule,
    state_of,
    trainer,
)
from torch import nn

import gemini


def fit(module: Any, strategy: Any = "gemini", num: int = 24, **how: Any) -> Any:
    run = trainer(strategy, **how)
    run.fit(module, loader(num))
    return run


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_bits_as_the_plain_loop(precision: str, where: str, tmp_path: Path) -> None:
    settings = config(precision) if where == "ram" else on_disk(tmp_path, precision)
    module = Tiny()
    run = fit(module, GeminiStrategy(settings), accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=2)
    plain, optimizer, norms = plain_loop(Tiny(), settings, loader(), accumulate=2, clip=0.5, epochs=2)
    assert_same(state_of(module), state_of(plain))
    assert run.strategy.grad_norm == pytest.approx(norms[-1], abs=0) and norms[-1] > 0.5, "clipping did something"
    assert run.global_step == 6 and module.rates[-1] == pytest.approx(1e-2 / 6)
    assert run.optimizers[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert module is run.lightning_module is run.strategy.model and type(module).__name__ == "Tiny"
    assert (module._gemini_engine.store.spill is not None) == (where == "disk")


def test_the_name_stands_for_the_strategy() -> None:
    """That importing registers it, and nothing else does, the job of two ranks sees in a process of its own."""
    run = trainer("gemini")
    assert type(run.strategy) is GeminiStrategy and run.strategy.config is None


# ---- precision and clipping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "precision"),
    [("32-true", "fp32"), (None, "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("16-true", "fp16")],
)
def test_what_trainer_says_is_the_precision(flag: Any, precision: str) -> None:
    run = trainer("gemini", precision=flag)
    assert run.precision_plugin.compute == precision
    if flag is not None:
        assert trainer(GeminiStrategy(config(precision)), precision=flag).precision_plugin.compute == precision
    assert trainer(GeminiStrategy(config("bf16"))).precision_plugin.compute == "bf16"


def test_mixed_fp16_is_fp16_where_lightning_lets_it_through() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=5)
    run = trainer("gemini", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert run.precision_plugin.compute == "fp16" and isinstance(run.precision_plugin.scaler, gemini.GradScaler)
    assert run.precision_plugin.scaler.state_dict() == scaler.state_dict()
    assert trainer("gemini", precision="bf16-true").precision_plugin.scaler is None


def test_contradicting_and_unknown_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='16-true'.* is fp16 .*GeminiConfig\(precision='bf16'\)"):
        trainer(GeminiStrategy(config("bf16")), precision="16-true")
    with pytest.raises(ValueError, match="precision='64-true' .*use one of '32-true'"):
        trainer("gemini", precision="64-true")


class Watching(Tiny):
    """Notes what a step sees."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen_in_step = {
            "input": batch[0].dtype,
            "autocast": torch.is_autocast_enabled("cpu"),
            "weight": self.blocks[0][0].weight.dtype,
        }
        return super().training_step(batch, index)


def test_no_autocast_and_no_grad_scaler_in_bf16() -> None:
    module = Watching()
    run = fit(module, "gemini", 4, precision="bf16-mixed")
    assert module.seen_in_step == {"input": torch.bfloat16, "autocast": False, "weight": torch.bfloat16}
    assert run.precision_plugin.scaler is None


def test_a_step_with_inf_is_skipped_in_fp16() -> None:
    """Automatic and manual steps: hooks see unscaled gradients, the scale falls, and masters stand still."""

    class Bad(Tiny):
        norms: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index) * (float("inf") if index == 1 else 1.0)
            if self.automatic_optimization:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            return self.optimizers().step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms = [*self.norms, float(self.clip_grad_norm_(1e9))]  # type: ignore[operator]

    outcomes = []
    for automatic in (True, False):
        module = Bad()
        module.automatic_optimization = automatic
        run = fit(module, "gemini", 16, precision="16-true")
        assert run.precision_plugin.scaler.get_scale() == 2.0**15
        assert state_of(module)["step/scale"] == 3
        assert [norm < 1e3 for norm in module.norms] == [True, False, True, True]
        outcomes.append(state_of(module))
    assert torch.equal(outcomes[0]["step/scale"], outcomes[1]["step/scale"])


def test_clipping_by_value_is_refused() -> None:
    with pytest.raises(gemini.GeminiError, match='gradient_clip_algorithm="norm"'):
        fit(Tiny(), "gemini", 4, gradient_clip_val=0.5, gradient_clip_algorithm="value")


# ---- what a step may do ----------------------------------------------------------------------------------------------


class Free(Tiny):
    """Its step reads params and deep modules where no module computes, calls itself, and returns a dict."""

    def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
        inner = self.blocks[0][0](batch[0]) + nn.functional.linear(batch[0], self.blocks[1][0].weight)
        loss = nn.functional.mse_loss((self(inner) + inner * self.scale).float(), batch[1].float())
        return {"loss": loss, "inner": inner.detach()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_may_use_params_and_the_model_itself_as_it_likes(precision: str, tmp_path: Path) -> None:
    """In fp16 every path to the loss has the loss scale once: else the norm of one of them would be 65536 times off."""
    states, norms = [], []
    for settings in (config(precision), on_disk(tmp_path, precision)):
        module = Free()
        run = fit(module, GeminiStrategy(settings), 8, gradient_clip_val=1e9)
        states.append(state_of(module))
        norms.append(float(run.strategy.grad_norm))
        assert "forward" not in vars(module) and not module._gemini_engine.state.in_method
        module._gemini_engine.check_invariants()
    assert_same(*states)
    exact = Free()
    reference = fit(exact, GeminiStrategy(config("fp32")), 8, gradient_clip_val=1e9)
    assert norms[0] == norms[1] == pytest.approx(float(reference.strategy.grad_norm), rel=0.02)


def test_a_step_that_is_left_out_and_gradients_that_are_not_kept() -> None:
    class Skipping(Tiny):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index == 1 else super().training_step(batch, index)

    kept, transient = Skipping(), Skipping()
    fit(kept, GeminiStrategy(config("bf16")))
    fit(transient, GeminiStrategy(config("bf16", gradients="transient")))
    assert state_of(kept)["step/scale"] == 5
    assert_same(state_of(kept), state_of(transient))
    with pytest.raises(gemini.GeminiError, match="cannot be clipped"):
        fit(Tiny(), GeminiStrategy(config("bf16", gradients="transient")), gradient_clip_val=1.0)


def test_gradients_from_before_are_dropped_as_lightning_does() -> None:
    module, other = Tiny(), Tiny()
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    fit(module, num=4)
    fit(other, num=4)
    assert_same(state_of(module), state_of(other))
    manual = Tiny()
    manual.automatic_optimization = False
    for param in manual.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="has a gradient already"):
        fit(manual, num=4)


def test_gradients_that_would_not_be_found_are_not_looked_for() -> None:
    class Looking(Tiny):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    with pytest.raises(gemini.GeminiError, match=r"trainer\.strategy\.grad_norm"):
        fit(Looking(), "gemini", 4)


def test_the_learning_rate_finder_puts_everything_back(tmp_path: Path) -> None:
    class Free(Tiny):
        lr = 1e-2

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=5)
    module, direct = Free(), Free()
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    fit(module, GeminiStrategy(config("bf16")), callbacks=[finder], **saving)
    fit(direct, GeminiStrategy(config("bf16")))
    assert module.lr == direct.lr and module.losses[-6:] == direct.losses and len(module.losses) > 6
    assert_same(state_of(module), state_of(direct))


def test_a_module_compiled_as_a_whole_is_refused() -> None:
    module = Tiny()
    module._compiler_ctx = {"compiler": "dynamo"}  # what Trainer notes of torch.compile(module), which takes seconds
    with pytest.raises(gemini.GeminiError, match="compiled as a whole. Compile its blocks"):
        fit(module, "gemini", 4)


def test_wrapped_by_hand_first(tmp_path: Path) -> None:
    module: Any = gemini.GeminiDDP(Tiny(), config())
    fit(module, GeminiStrategy(config()), 8)
    assert module._gemini_engine.params.handles[0].num_steps == 2
    with pytest.raises(gemini.GeminiError, match="managed already"):
        fit(module, GeminiStrategy(on_disk(tmp_path)), 8)
    with pytest.raises(gemini.GeminiError, match="managed already"):
        fit(module, "gemini", 8, precision="bf16-true")


# ---- optimizers ------------------------------------------------------------------------------------------------------


def optimizing(make: Any) -> Any:
    class Other(Tiny):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Other()


def test_groups_and_hyperparameters_are_kept() -> None:
    def make(module: Any) -> Any:
        groups = [{"params": module.blocks.parameters(), "weight_decay": 0.3}, {"params": [module.scale], "lr": 1e-4}]
        return torch.optim.Adam(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01)

    module = optimizing(make)
    run = fit(module, "gemini", 8)
    (optimizer,) = run.optimizers
    assert type(optimizer) is gemini.HybridAdam
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["betas"], first["eps"]) == (1e-3, 0.3, (0.8, 0.9), 1e-6)
    assert (second["lr"], second["weight_decay"]) == (1e-4, 0.01)
    assert not first["decoupled"], "Adam, not AdamW"

    by_hand: Any = gemini.GeminiDDP(Tiny(), config())
    groups = [{"params": by_hand.blocks.parameters(), "weight_decay": 0.3}, {"params": [by_hand.scale], "lr": 1e-4}]
    hybrid = gemini.HybridAdam(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01, decoupled=False)
    for batch in loader(8):
        by_hand.loss_of(batch).backward()
        hybrid.step()
        hybrid.zero_grad()
    assert_same(state_of(module), state_of(by_hand))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "SGD cannot update a managed model"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "AdamW has amsgrad=True"),
        (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), "AdamW has maximize=True"),
    ],
)
def test_other_optimizers_are_refused(make: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        fit(optimizing(make), "gemini", 4)


def test_nested_schedulers_epochs_and_plateaus_follow() -> None:
    def nested(module: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, schedule(optimizer)], [2])
        return [optimizer], [{"scheduler": both, "interval": "step"}]

    module = optimizing(nested)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lr_scheduler.step|optimizer.step).*")
        fit(module, "gemini", 20, callbacks=[])
    assert module.rates == pytest.approx([1e-3, 5.5e-3, 1e-2, 5e-3, 1e-2 / 3])

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
    module._gemini_engine.check_invariants()


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


# ---- refusals of the strategy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(swa_lrs=1e-3), EMAWeightAveraging()])
def test_weight_averaging_is_refused(callback: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="behind Gemini's back"):
        fit(Tiny(), "gemini", 4, callbacks=[callback])


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters.*no DistributedDataParallel"),
        ({"start_method": "spawn"}, ValueError, "does not come back from a spawned one"),
        ({"config": {"precision": "bf16"}}, TypeError, "takes a gemini.GeminiConfig, got dict"),
    ],
)
def test_arguments_of_others_are_refused(arguments: Any, error: Any, what: str) -> None:
    with pytest.raises(error, match=what):
        GeminiStrategy(**arguments)


def test_with_all_the_trimmings(tmp_path: Path) -> None:
    """Trainer's defaults: summary, checkpoints, a logger, sanity check, validation in between, rates logged."""
    module = Tiny()
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    run = L.Trainer(
        strategy=GeminiStrategy(config("bf16")), accelerator="cpu", devices=1, max_epochs=2, logger=logger,
        default_root_dir=tmp_path, enable_progress_bar=False, val_check_interval=3, log_every_n_steps=1,
        callbacks=[LearningRateMonitor()],
    )  # fmt: skip
    run.fit(module, loader(), loader(8))
    assert {"loss", "val_loss"} <= set(run.callback_metrics)
    logged = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "lr-HybridAdam" in logged and "val_loss" in logged
