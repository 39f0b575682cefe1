"""Lightning's callbacks that average weights: under the strategy the model keeps what they average, with the same
numbers as Lightning alone, in its checkpoints too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

import gemini
from tests.integrations.lightning_cases import Tiny, alone, config, fit, loader, on_disk, trainer

__all__ = ["alone"]  # a fixture


class Counting(Tiny):
    """A buffer that every forward of training changes, and what validation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_losses: list[float] = []

    def loss_of(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.seen += 1.0
        return super().loss_of(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen_losses.append(self.loss_of(batch).item())


class Late(WeightAveraging):
    """The mean of every second step, from the third on, as in Lightning's documentation."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 2 and step_idx % 2 == 0


CALLBACKS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "late": lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_step=2, use_buffers=False),
    "mean": lambda: Late(),
    "many": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6)),
}


def run(strategy: Any, callback: Any, num: int = 24, **how: Any) -> tuple[Counting, Any]:
    module = Counting()
    made = trainer(strategy, callbacks=[callback], val_check_interval=2, num_sanity_val_steps=1, **how)
    made.fit(module, loader(num), loader(8), ckpt_path=how.pop("ckpt_path", None))
    return module, made


def assert_close(mine: Any, stock: Any) -> None:
    assert mine.keys() == stock.keys()
    for name, value in stock.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("which", [*CALLBACKS])
@pytest.mark.parametrize("where", ["memory", "drive"])
def test_as_lightning_alone(which: str, where: str, tmp_path: Path) -> None:
    """Validation sees averages, training does not; both files and the model at the end are Lightning's."""
    own = on_disk(tmp_path) if where == "drive" else config()
    callback = CALLBACKS[which]()
    stock, by_lightning = run("auto", CALLBACKS[which]())
    mine, by_gemini = run(GeminiStrategy(own), callback)
    assert mine.losses == pytest.approx(stock.losses, rel=1e-5)
    assert mine.seen_losses == pytest.approx(stock.seen_losses, rel=1e-5) and len(mine.seen_losses) > 4
    assert_close(mine.state_dict(dtype=torch.float32), stock.state_dict())
    assert type(callback).__name__ == type(CALLBACKS[which]()).__name__
    saved = {}
    for name, made in ("stock", by_lightning), ("mine", by_gemini):
        made.save_checkpoint(tmp_path / name)
        saved[name] = torch.load(tmp_path / name, weights_only=False)
    for part in "state_dict", "averaging_state", "current_model_state":
        assert_close(saved["mine"][part], saved["stock"][part])
    assert saved["mine"]["callbacks"] == saved["stock"]["callbacks"]


@pytest.mark.parametrize("saver", ["stock", "mine"])
def test_a_checkpoint_is_gone_on_with(saver: str, tmp_path: Path) -> None:
    """Gemini's own, with the averages of an undisturbed run; and one of Lightning's."""
    whole, _ = run("auto", CALLBACKS["ema"](), max_epochs=2)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "half")

    strategy = "auto" if saver == "stock" else GeminiStrategy(config())
    first = trainer(strategy, callbacks=[CALLBACKS["ema"](), Saves()], max_epochs=1)
    first.fit(Counting(), loader(24))
    file = torch.load(tmp_path / "half", weights_only=False)
    names = [name for name in file["state_dict"] if name != "seen"]
    assert any(not torch.equal(file["state_dict"][name], file["current_model_state"][name]) for name in names)
    module = Counting()
    again = trainer(GeminiStrategy(config()), callbacks=[CALLBACKS["ema"]()], max_epochs=2)
    again.fit(module, loader(24), ckpt_path=tmp_path / "half")
    assert module.losses == pytest.approx(whole.losses[6:], rel=1e-5)
    assert_close(module.state_dict(dtype=torch.float32), whole.state_dict())


def test_a_run_without_averages_is_gone_on_with(tmp_path: Path) -> None:
    """The averages begin at its weights."""
    fit(Tiny(), GeminiStrategy(config())).save_checkpoint(tmp_path / "none")
    module = Tiny()
    how = {"callbacks": [EMAWeightAveraging(decay=1.0)], "max_epochs": 2, "ckpt_path": tmp_path / "none"}
    fit(module, GeminiStrategy(config()), **how)
    assert len(module.losses) == 6
    assert_close(
        module.state_dict(dtype=torch.float32), torch.load(tmp_path / "none", weights_only=False)["state_dict"]
    )


def test_what_raises_in_validation_leaves_the_weights(tmp_path: Path) -> None:
    class Breaking(Counting):
        def validation_step(self, batch: Any, index: int) -> None:
            if self.trainer.global_step:
                raise RuntimeError("validation broke off")

    module, averaging = Breaking(), EMAWeightAveraging(decay=0.5)
    with pytest.raises(RuntimeError, match="validation broke off"):
        trainer(GeminiStrategy(config()), callbacks=[averaging], val_check_interval=2).fit(module, loader(), loader(4))
    assert not module._gemini_engine.state.shows_averages  # type: ignore[attr-defined]
    plain = Tiny()
    fit(plain, GeminiStrategy(config()), 8)
    assert_close(module.state_dict(dtype=torch.float32) | {"seen": plain.seen}, plain.state_dict(dtype=torch.float32))


class AtEpochs(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx == 0


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([EMAWeightAveraging(update_starting_at_epoch=1)], "EMAWeightAveraging: an average at the end of an epoch"),
        ([AtEpochs()], "AtEpochs: an average at the end of an epoch"),
        ([EMAWeightAveraging(), Late()], "keeps one average, and Trainer has 2 callbacks"),
        ([WeightAveraging(avg_fn=lambda average, weight, number: average.maximum(weight))], "no moving average"),
    ],
)  # fmt: skip
def test_what_is_no_average_behind_a_step_is_refused(callbacks: Any, words: str) -> None:
    with pytest.raises(gemini.GeminiError, match=words):
        fit(Tiny(), GeminiStrategy(config()), 4, callbacks=callbacks)


def test_a_model_wrapped_by_hand_has_to_keep_one() -> None:
    module: Any = gemini.GeminiDDP(Tiny(), config())
    with pytest.raises(gemini.GeminiError, match="keeps no average"):
        fit(module, "gemini", 4, callbacks=[EMAWeightAveraging()])
