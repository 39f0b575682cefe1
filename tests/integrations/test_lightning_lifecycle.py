"""A managed LightningModule before, between and after the runs of a Trainer: what it is then, and that it can go on."""

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies.strategy as lightning_strategy
import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy, call_as_forward
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning_cases import L, Tiny, alone, assert_same, config, fit, loader, on_disk, plain_loop, state_of, trainer  # noqa: F401
from torch import nn

import gemini
from tests.world import world_of


def test_the_model_stays_where_it_is(monkeypatch: Any) -> None:
    """Lightning's own strategies move optimizer states and the module to the CPU at the end."""
    monkeypatch.setattr(lightning_strategy, "_optimizers_to_device", None)

    class Staying(Tiny):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            raise AssertionError("moved")

    module = Staying()
    settings = gemini.GeminiConfig(
        precision="bf16", device="standin", memory=gemini.MemoryBudget(gpu="8MiB", cpu="64MiB")
    )
    run = fit(module, GeminiStrategy(settings), 8)
    run.test(module, loader(8), verbose=False)
    assert isinstance(module, gemini.GeminiDDP) and world_of(run.strategy.managed).device.tier is gemini.Tier.GPU
    other = Tiny()
    fit(other, GeminiStrategy(config("bf16")), 8)
    assert_same(state_of(module), state_of(other))


def test_fit_twice_begins_anew_as_torch_does(tmp_path: Path) -> None:
    """The second fit has a new optimizer: no states, no step counts, the masters as they are."""
    module = Tiny()
    run = fit(module, GeminiStrategy(on_disk(tmp_path, "bf16")), 8)
    masters = {name: value for name, value in state_of(module).items() if name.startswith("master")}
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(8))
    assert len(module.losses) == 4 and state_of(module)["step/scale"] == 2

    fresh = Tiny()
    fresh.load_state_dict({name.removeprefix("master/"): value for name, value in masters.items()})
    plain, _, _ = plain_loop(fresh, config("bf16"), loader(8))
    assert_same(state_of(module), state_of(plain))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluating_first_changes_nothing(precision: str, tmp_path: Path) -> None:
    """Without fit the model is managed as well, whole: what is trained later has every bit it would have had."""
    module = Tiny()
    strategy = GeminiStrategy(on_disk(tmp_path, precision))
    run = trainer(strategy)
    (before,) = run.validate(module, loader(8), verbose=False)
    assert isinstance(module, gemini.GeminiDDP)
    predicted = run.predict(module, loader(8))
    assert len(predicted) == 2 and predicted[0].dtype is {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    run.fit(module, loader(8))
    (after,) = run.test(module, loader(8), verbose=False)
    assert after["test_loss"] < before["val_loss"]
    direct = Tiny()
    fit(direct, GeminiStrategy(config(precision)), 8)
    assert_same(state_of(module), state_of(direct))
    world_of(run.strategy.managed).check()


def test_a_frozen_model_is_evaluated_with_its_weights_alone() -> None:
    module = Tiny()
    module.freeze()
    trainer(GeminiStrategy(config("bf16"))).validate(module, loader(4), verbose=False)
    held = world_of(module).chunks
    assert all(set(chunk.planes) == {"weights"} for chunk in held)


class Reading(Tiny):
    """Its validation reads params where no module computes, in inference mode (which Lightning has off on gloo)."""

    def validation_step(self, batch: Any, index: int) -> None:
        assert not torch.is_grad_enabled()
        with torch.inference_mode():
            inner = nn.functional.linear(batch[0], self.blocks[0][0].weight) * self.scale
            self.log("read", self(self.blocks[1][0](inner)).float().mean())


def test_inference_mode_and_reads_in_validation(tmp_path: Path) -> None:
    module, plain = Reading(), Reading()
    (result,) = trainer(GeminiStrategy(on_disk(tmp_path))).validate(module, loader(4), verbose=False)
    (expected,) = trainer("ddp").validate(plain, loader(4), verbose=False)
    assert result == expected
    world_of(module).check()
    fit(module, GeminiStrategy(on_disk(tmp_path)), 8)


class Lazy(Tiny):
    """Built by Lightning when it is needed, as big models are."""

    def __init__(self) -> None:
        super().__init__()
        self.body: Any = None

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Linear(16, 16, device=None)
            assert self.body.weight.device.type == "cpu" and self.body.weight.dtype is torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(super().forward(x))


def test_configure_model(tmp_path: Path) -> None:
    module = Lazy()
    run = fit(module, GeminiStrategy(config("bf16")), 8)
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = Lazy()
    run = trainer(GeminiStrategy(config("bf16")))
    run.fit(again, loader(8), ckpt_path=tmp_path / "x.ckpt")
    assert_same(state_of(again), state_of(module))
    assert state_of(module)["step/body.weight"] == 2


# ---- what goes wrong in the middle -----------------------------------------------------------------------------------


class Failing(Callback):
    def __init__(self, where: str, error: BaseException):
        self.where, self.error = where, error

    def strike(self, trainer: Any) -> None:
        if trainer.global_step == 1:
            raise self.error

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if self.where == "before backward":
            self.strike(trainer)

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        if self.where == "after backward":
            self.strike(trainer)


class FailingForward(Tiny):
    error: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.error is not None and self._trainer is not None and self.trainer.global_step == 1:
                raise self.error
            x = block(x)
        return x * self.scale


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "before backward", "after backward"])
def test_an_exception_leaves_a_model_that_goes_on(where: str, kind: type[BaseException], tmp_path: Path) -> None:
    """The step that failed is forgotten; the state of the last whole one is there, and can be trained further."""
    error = kind("bad batch")  # not a parameter: its traceback would keep the model until pytest ends
    module = FailingForward()
    module.error = error if where == "forward" else None
    settings = on_disk(tmp_path, "bf16")
    # Lightning turns Ctrl-C into the end of the program.
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else RuntimeError):
        fit(module, GeminiStrategy(settings), 8, callbacks=[Failing(where, error)])
    world_of(module).check()
    assert all(module.full_grad(name) is None for name, _ in module.named_parameters())
    module.error = None
    once = Tiny()
    fit(once, GeminiStrategy(config("bf16")), 4)
    assert_same(state_of(module), state_of(once))
    run = fit(module, GeminiStrategy(settings), 8)
    run.test(module, loader(4), verbose=False)
    fit(once, GeminiStrategy(config("bf16")), 8)
    assert_same(state_of(module), state_of(once))


def test_a_checkpoint_on_exception_is_whole(tmp_path: Path) -> None:
    module = FailingForward()
    module.error = RuntimeError("bad batch")
    saving = OnExceptionCheckpoint(tmp_path, "rescue")
    with pytest.raises(RuntimeError, match="bad batch"):
        fit(module, GeminiStrategy(on_disk(tmp_path, "bf16")), 8, callbacks=[saving], enable_checkpointing=True)
    resumed, once = FailingForward(), Tiny()
    run = trainer(GeminiStrategy(config("bf16")), max_steps=1)
    run.fit(resumed, loader(8), ckpt_path=tmp_path / "rescue.ckpt")
    fit(once, GeminiStrategy(config("bf16")), 4)
    assert not resumed.losses, "nothing but loading"
    assert_same(state_of(resumed), state_of(once))


def test_a_model_that_does_not_fit_is_refused_and_stays_plain() -> None:
    module = Tiny()
    settings = gemini.GeminiConfig(precision="bf16", memory=gemini.MemoryBudget(cpu="8KiB"))
    with pytest.raises(gemini.BudgetExceeded):
        fit(module, GeminiStrategy(settings), 8)
    assert not isinstance(module, gemini.GeminiDDP)
    fit(module, GeminiStrategy(config("bf16")), 8)


def test_a_device_that_is_not_trainers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:0'.*batches are put on cpu"):
        fit(Tiny(), GeminiStrategy(config(device="cuda:0")), 8)


def test_metrics_and_other_parts_are_moved_by_themselves() -> None:
    class Metric(nn.Module):
        moved = 0

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.moved += 1
            return self

    module = Tiny()
    module.metric = Metric()
    fit(module, GeminiStrategy(config()), 8)
    assert module.metric.moved == 1


def test_sync_batchnorm_is_put_in_before() -> None:
    module = Tiny()
    module.norm = nn.BatchNorm1d(16)
    run = trainer(GeminiStrategy(config()), sync_batchnorm=True, max_steps=0)
    run.fit(module, loader(4))
    assert type(module.norm) is nn.SyncBatchNorm and module.norm.weight._gemini is not None
    assert L is not None


def test_methods_of_several_threads_run_in_the_place_of_one_forward() -> None:
    """Each thread its own, and who calls the model meanwhile gets its forward; then it is as it was."""
    model: Any = gemini.GeminiDDP(nn.Linear(2, 2), gemini.GeminiConfig(device="cpu", precision="fp32"))
    x, both, done = torch.ones(1, 2), threading.Barrier(2), threading.Event()
    found: dict[str, Any] = {}

    class Waits(nn.Module):
        """In front of the first forward, which stands still between its method's coming and its beginning."""

        def __call__(self, module: nn.Module, args: Any) -> None:
            if threading.current_thread().name == "first" and not done.is_set():
                both.wait(20)
                assert done.wait(20)

    hook = model.register_forward_pre_hook(Waits(), prepend=True)

    def first() -> None:
        found["first"] = call_as_forward(model, lambda x: ("first", model(x)), x)

    thread = threading.Thread(target=first, name="first")
    thread.start()
    both.wait(20)
    found["plain"] = model(x)
    found["second"] = call_as_forward(model, lambda x: ("second", model(x)), x)
    done.set()
    thread.join()
    hook.remove()
    assert found["first"][0] == "first" and found["second"][0] == "second"
    for value in (found["plain"], found["first"][1], found["second"][1]):
        assert torch.equal(value, found["plain"])
    assert "forward" not in model.__dict__ and torch.equal(model(x), found["plain"])
