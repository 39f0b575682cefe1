"""Checkpoints under Lightning: ordinary files, exact resume, and no more memory than a param or two to write them."""

import copy
import errno
import os
import pickle
import resource
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies.strategy as lightning_strategy
import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning_cases import (  # noqa: F401
    L,
    Tiny,
    alone,
    assert_same,
    clean_environment,
    config,
    fit,
    loader,
    on_disk,
    state_of,
    trainer,
)

import gemini
from tests.world import world_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("precision", "then"), [("fp32", "disk"), ("bf16", "ram"), ("bf16", "disk"), ("fp16", "disk")])
def test_resumed_is_uninterrupted(precision: str, then: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Masters, states, step counts, schedule, loss scale; weights are loaded after they are managed, states stay."""
    monkeypatch.setattr(lightning_strategy, "_optimizer_to_device", None)  # base strategies would call it
    settings = on_disk(tmp_path, precision) if then == "disk" else config(precision)
    whole = Tiny()
    fit(whole, GeminiStrategy(settings), max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    half = fit(Tiny(), GeminiStrategy(config(precision)), accumulate_grad_batches=2, gradient_clip_val=0.5)
    if precision == "fp16":
        scaler = half.precision_plugin.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**9, "_growth_tracker": 7})
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed: Any = Tiny().to(torch.bfloat16)  # a plain model that could not hold the masters
    run = fit(
        resumed, GeminiStrategy(settings), ckpt_path=tmp_path / "half.ckpt", max_epochs=2, accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )  # fmt: skip
    state = state_of(whole)
    state["master/seen"] = state["master/seen"].to(torch.bfloat16)
    assert_same(state_of(resumed), state)
    assert resumed.losses == whole.losses[6:] and resumed.rates == whole.rates[6:]
    if precision == "fp16":
        state = run.precision_plugin.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (2.0**9, 10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_are_in_the_file(precision: str, tmp_path: Path) -> None:
    """Beside the states of the optimizer's rule, which knows nothing of them."""
    average = gemini.optim.AveragedRule(decay=0.9)
    settings = {"disk": on_disk(tmp_path, precision, optimizer=average), "ram": config(precision, optimizer=average)}
    whole, resumed = Tiny(), Tiny()
    fit(whole, GeminiStrategy(settings["disk"]), max_epochs=2)
    fit(Tiny(), GeminiStrategy(settings["disk"])).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, GeminiStrategy(settings["ram"]), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert_same(state_of(resumed), state_of(whole))
    for name, master in whole.state_dict(dtype=torch.float32).items():  # type: ignore[call-arg]
        if name != "seen":
            found = gemini.EMA(whole).full_param(name)
            assert torch.equal(gemini.EMA(resumed).full_param(name), found) and not torch.equal(found, master), name


class Tracked(Tiny):
    """With state that is no param and no buffer, and a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.top = 1.0
        self.register_buffer("order", torch.empty(0))

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss = super().loss_of(batch)
        self.top = max(self.top, 1.5 * loss.item())
        self.order = torch.cat([self.order, loss.detach()[None].cpu()])
        return loss / self.top + self.order.mean()

    def get_extra_state(self) -> Any:
        return {"top": self.top}

    def set_extra_state(self, state: Any) -> None:
        self.top = state["top"]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.order = state[f"{prefix}order"].clone()
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_state_of_modules_is_resumed(precision: str, tmp_path: Path) -> None:
    whole, resumed = Tracked(), Tracked()
    fit(whole, GeminiStrategy(config(precision)), max_epochs=2)
    fit(Tracked(), GeminiStrategy(config(precision))).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, GeminiStrategy(on_disk(tmp_path, precision)), ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert resumed.losses == whole.losses[6:] and resumed.top == whole.top
    assert torch.equal(resumed.order, whole.order)
    for name, _ in whole.named_parameters():
        assert torch.equal(whole.full_param(name, torch.float32), resumed.full_param(name, torch.float32)), name


def test_resume_in_the_middle_of_an_epoch_and_with_dropout(tmp_path: Path) -> None:
    def run(module: Any, ckpt_path: Any = None, **how: Any) -> Any:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        batches = loader(24, shuffle=True)
        found = trainer(GeminiStrategy(config("bf16")), callbacks=[saving], enable_checkpointing=True, **how)
        found.fit(module, batches, ckpt_path=ckpt_path)
        return found

    torch.manual_seed(3)
    whole = Tiny(dropout=0.5)
    run(whole, max_epochs=2)
    torch.manual_seed(4)  # at the end of an epoch the RNGs of the checkpoint decide, order of the data included
    resumed = Tiny(dropout=0.5)
    run(resumed, ckpt_path=tmp_path / "step=6.ckpt", max_epochs=2)
    assert resumed.losses == whole.losses[6:]
    assert_same(state_of(resumed), state_of(whole))
    middle = Tiny()
    run(middle, ckpt_path=tmp_path / "step=4.ckpt", max_epochs=1)
    assert len(middle.losses) == 2 and world_of(middle).handles[0].num_steps == 6


def test_callbacks_save_remove_and_link(tmp_path: Path) -> None:
    module = Tiny()
    saving = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last="link", filename="{step}")
    run = trainer(GeminiStrategy(config()), max_epochs=4, callbacks=[saving], enable_checkpointing=True)
    run.fit(module, loader(8), loader(8))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"], "two best, the last, and nothing else"
    assert (tmp_path / "last.ckpt").is_symlink() and saving.best_model_path.endswith("step=8.ckpt")
    best = run.validate(module, loader(8), ckpt_path="best", verbose=False)
    assert best[0]["val_loss"] == pytest.approx(float(saving.best_model_score))
    resumed = Tiny()
    run = trainer(GeminiStrategy(config()), max_epochs=5)
    run.fit(resumed, loader(8), ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 10


def test_the_file_is_an_ordinary_one(tmp_path: Path) -> None:
    """Plain torch.load, load_from_checkpoint, and Lightning's own ddp strategy with torch's AdamW go on from it."""
    module = Tiny(lr=3e-3)
    run = fit(module, GeminiStrategy(on_disk(tmp_path, "bf16")))
    file = tmp_path / "deep" / "er" / "x.ckpt"
    run.save_checkpoint(file)
    state = state_of(module)
    plain: Any = Tiny.load_from_checkpoint(file)
    assert type(plain) is Tiny and plain.hparams["lr"] == 3e-3
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[f"master/{name}"]), name
        assert value.dtype is torch.float32
    (saved,) = torch.load(file)["optimizer_states"]
    for index, (name, _) in enumerate(plain.named_parameters()):
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][index][kind], state[f"{kind}/{name}"])
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt")

    stock = trainer("ddp", max_epochs=2)
    stock.fit(plain, loader(), ckpt_path=file)
    (optimizer,) = stock.optimizers
    assert type(optimizer) is torch.optim.AdamW and stock.global_step == 12
    assert all(float(state["step"]) == 12 for state in optimizer.state.values())
    stock.save_checkpoint(tmp_path / "ddp.ckpt")
    back = Tiny()
    run = fit(back, GeminiStrategy(config("fp32")), ckpt_path=tmp_path / "ddp.ckpt", max_epochs=2)
    there = state_of(back)
    for name, param in plain.named_parameters():
        assert torch.equal(there[f"master/{name}"], param)
        assert torch.equal(there[f"exp_avg_sq/{name}"], optimizer.state[param]["exp_avg_sq"])
        assert there[f"step/{name}"] == 12


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(6))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x = batch[0].repeat(1, 32)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_writing_holds_one_param_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    """12 bytes per param are 18.9 MB here; of what is read no more than the tensors of one param live at once."""
    module = Wide()
    run = fit(module, GeminiStrategy(config("bf16")), 4)
    alive, most = [0], [0]
    by_names = world_of(run.strategy.managed).by_names

    def counted(read: Any) -> Any:
        def reading(*args: Any, **kwargs: Any) -> Any:
            value = read(*args, **kwargs)
            num_bytes = value.untyped_storage().nbytes()
            alive[0] += num_bytes
            most[0] = max(most[0], alive[0])
            weakref.finalize(value, lambda: alive.__setitem__(0, alive[0] - num_bytes))
            return value

        return reading

    monkeypatch.setattr(by_names, "read", counted(by_names.read))
    monkeypatch.setattr(by_names, "read_plane", counted(by_names.read_plane))
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").stat().st_size > 12 * 6 * 512 * 512
    assert 4 * 512 * 512 <= most[0] <= 2 * 4 * 512 * 512
    saved = torch.load(tmp_path / "x.ckpt", mmap=True)
    assert torch.equal(saved["state_dict"]["layers.3.weight"], module.full_param("layers.3.weight", torch.float32))


def test_loading_maps_the_file(tmp_path: Path) -> None:
    run = fit(Tiny(), GeminiStrategy(config("bf16")), 4)
    run.save_checkpoint(tmp_path / "x.ckpt")
    with open("/proc/self/maps") as maps:
        assert "x.ckpt" not in maps.read()
    checkpoint = run.strategy.load_checkpoint(tmp_path / "x.ckpt")
    with open("/proc/self/maps") as maps:
        assert "x.ckpt" in maps.read()
    assert checkpoint["global_step"] == 1


class Own:
    """A value of the user's that no checkpoint of weights only may hold."""


def test_hyperparameters_of_ones_own_types(tmp_path: Path) -> None:
    """Lightning forgets weights_only=False where it restores after setup."""
    run = fit(Tiny(), GeminiStrategy(config("bf16")), 4)
    run.lightning_module.hparams["own"] = Own()
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = trainer(GeminiStrategy(config("bf16")), max_epochs=2)
    with pytest.raises(pickle.UnpicklingError):
        again.fit(Tiny(), loader(4), ckpt_path=tmp_path / "x.ckpt")
    again = trainer(GeminiStrategy(config("bf16")), max_epochs=2)
    again.fit(Tiny(), loader(4), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert again.global_step == 2


def test_gemini_checkpoints_can_be_written_by_a_callback(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                gemini.save_checkpoint(tmp_path / "three", module, trainer.optimizers[0], module.lr_schedulers())

    module: Any = Tiny()
    fit(module, GeminiStrategy(config("bf16")), 12, callbacks=[Saving()])
    state = state_of(module)
    run = fit(module, GeminiStrategy(config("bf16")), 4)  # whose optimizer is a new one, and has the states now
    gemini.load_checkpoint(tmp_path / "three", module, run.optimizers[0], run.lr_scheduler_configs[0].scheduler)
    assert_same(state_of(module), state)


class Hooked(Tiny):
    do: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        type(self).do(checkpoint)


@pytest.fixture
def fitted() -> Any:
    module = Hooked()
    return module, fit(module, GeminiStrategy(config("bf16")), 8)


def test_hooks_may_take_entries_out_and_not_compute_with_them(fitted: Any, tmp_path: Path) -> None:
    module, run = fitted
    Hooked.do = lambda checkpoint: checkpoint["state_dict"].pop("scale")
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert set(module.state_dict()) - set(torch.load(tmp_path / "x.ckpt")["state_dict"]) == {"scale"}
    Hooked.do = lambda checkpoint: checkpoint.update(half={k: v.half() for k, v in checkpoint["state_dict"].items()})
    with pytest.raises(gemini.GeminiError, match="model.full_param"):
        run.save_checkpoint(tmp_path / "y.ckpt")
    Hooked.do = lambda checkpoint: checkpoint.update(copy=copy.deepcopy(checkpoint["state_dict"]))
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert_same(*(torch.load(tmp_path / "x.ckpt")[key] for key in ("copy", "state_dict")))
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"], "nothing is left behind"


class Box:
    """Hides a tensor where nobody can look for it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def test_hidden_tensors_views_and_sparse_ones_are_saved_too(fitted: Any, tmp_path: Path) -> None:
    module, run = fitted
    long = torch.arange(10.0)
    sparse = torch.eye(3).to_sparse()
    for extra in (
        {"box": Box(torch.ones(3))},
        {"views": [long[2:5], long[7:]], "empty": torch.zeros(0)},
        {"s": sparse},
    ):
        Hooked.do = lambda checkpoint, extra=extra: checkpoint.update(extra)
        run.save_checkpoint(tmp_path / "x.ckpt")
        saved = torch.load(tmp_path / "x.ckpt", weights_only=False)
        assert torch.equal(saved["state_dict"]["scale"], module.full_param("scale", torch.float32))
        if "box" in extra:
            assert torch.equal(saved["box"].tensor, torch.ones(3))
        if "views" in extra:
            assert torch.equal(saved["views"][0], long[2:5]) and torch.equal(saved["views"][1], long[7:])
        if "s" in extra:
            assert torch.equal(saved["s"].to_dense(), torch.eye(3))


@pytest.mark.parametrize("point", ["posix_fallocate", "replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file(fitted: Any, point: str, tmp_path: Path, monkeypatch: Any) -> None:
    _, run = fitted
    Hooked.do = lambda checkpoint: None
    run.save_checkpoint(tmp_path / "x.ckpt")
    before = (tmp_path / "x.ckpt").read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, point, full)
        with pytest.raises(gemini.StorageError, match="No space left"):
            run.save_checkpoint(tmp_path / "x.ckpt")
        patch.undo()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for hides in (False, True):  # torch writes the whole of the one, and only the frame of the other
            Hooked.do = lambda checkpoint, hides=hides: checkpoint.update(odd=Box(torch.ones(999))) if hides else None
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
            try:
                with pytest.raises(gemini.StorageError, match="could not save .*full, or fails|File too large"):
                    run.save_checkpoint(tmp_path / "x.ckpt")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Hooked.do = lambda checkpoint: None
    assert (tmp_path / "x.ckpt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    dead = tmp_path / ".x.ckpt.new-999999999"
    dead.write_text("what a process that was killed had written")
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert not dead.exists()


def test_another_checkpoint_io_is_given_values(tmp_path: Path) -> None:
    module = Tiny()
    run = fit(module, GeminiStrategy(config("bf16")), 8, plugins=[AsyncCheckpointIO()])
    run.save_checkpoint(tmp_path / "x.ckpt")
    run.strategy.checkpoint_io.teardown()
    saved = torch.load(tmp_path / "x.ckpt")
    assert torch.equal(saved["state_dict"]["scale"], module.full_param("scale", torch.float32))
    resumed = Tiny()
    fit(resumed, GeminiStrategy(config("bf16")), 8, ckpt_path=tmp_path / "x.ckpt")
    assert_same(state_of(resumed), state_of(module))


def test_a_missing_checkpoint_and_one_without_states(fitted: Any, tmp_path: Path) -> None:
    _, run = fitted
    Hooked.do = lambda checkpoint: None
    with pytest.raises(FileNotFoundError, match="nowhere.ckpt"):
        fit(Tiny(), GeminiStrategy(config()), ckpt_path=tmp_path / "nowhere.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        fit(Tiny(), GeminiStrategy(config()), ckpt_path=tmp_path / "weights.ckpt")


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------
