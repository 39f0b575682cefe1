"""Lightning's loop with strategy="gemini" is the plain loop: same bits, with everything Trainer adds to a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning.pytorch.callbacks import (
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
    fit,
    loader,
    on_disk,
    plain_loop,
    state_of,
    trainer,
)
from torch import nn

import gemini
from tests.world import world_of


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
    assert (world_of(module).spill is not None) == (where == "disk")


class Asking(Tiny):
    """Looks at the norm where people log it, in the hook before a step, and after it."""

    def __init__(self, asks: bool = True):
        super().__init__()
        self.asks, self.before, self.after = asks, [], []  # type: ignore[var-annotated]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.asks:
            self.before.append(self.trainer.strategy.grad_norm)

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(self.trainer.strategy.grad_norm)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_the_norm_before_a_step_is_that_of_the_step(
    clip: float | None, precision: str, where: str, tmp_path: Path
) -> None:
    settings = config(precision) if where == "ram" else on_disk(tmp_path, precision)
    module, silent = Asking(), Asking(asks=False)
    fit(module, GeminiStrategy(settings), gradient_clip_val=clip)
    fit(silent, GeminiStrategy(settings), gradient_clip_val=clip)
    plain, _, norms = plain_loop(Tiny(), settings, loader(), clip=clip or float("inf"))
    assert module.before == module.after == norms and len(set(norms)) == 6 and min(norms) > 0.5
    assert silent.after == (norms if clip else [None] * 6), "nobody has asked for it, and nothing needed it"
    assert_same(state_of(module), state_of(plain))
    assert_same(state_of(silent), state_of(plain))


def test_a_norm_of_gradients_that_are_not_kept_is_none() -> None:
    module = Asking()
    fit(module, GeminiStrategy(config(gradients="transient")))
    assert module.before == module.after == [None] * 6


# ---- precision and clipping ------------------------------------------------------------------------------------------


def test_mixed_fp16_is_fp16_where_lightning_lets_it_through() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=5)
    run = trainer("gemini", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert run.precision_plugin.compute == "fp16" and isinstance(run.precision_plugin.scaler, gemini.GradScaler)
    assert run.precision_plugin.scaler.state_dict() == scaler.state_dict()
    assert trainer("gemini", precision="bf16-true").precision_plugin.scaler is None


def test_contradicting_and_unknown_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='16-true'.* asks for fp16.*GeminiConfig\(precision='bf16'\)"):
        trainer(GeminiStrategy(config("bf16")), precision="16-true")
    with pytest.raises(ValueError, match="precision='64-true' .*use one of '32-true'"):
        trainer("gemini", precision="64-true")


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
        assert "forward" not in vars(module)
        world_of(module).check()
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
    assert world_of(module).handles[0].num_steps == 2
    with pytest.raises(gemini.GeminiError, match="managed already"):
        fit(module, GeminiStrategy(on_disk(tmp_path)), 8)
    with pytest.raises(gemini.GeminiError, match="managed already"):
        fit(module, "gemini", 8, precision="bf16-true")


# ---- refusals of the strategy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(swa_lrs=1e-3)])
def test_weight_averaging_is_refused(callback: Any) -> None:
    with pytest.raises(gemini.GeminiError, match="behind Gemini's back"):
        fit(Tiny(), "gemini", 4, callbacks=[callback])


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters.*no DistributedDataParallel"),
        ({"start_method": "spawn"}, ValueError, "does not come back from a spawned one"),
        ({"config": {"precision": "bf16"}}, TypeError, "config= is a gemini.GeminiConfig.*got dict"),
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
    assert "lr-AdamW" in logged and "val_loss" in logged
