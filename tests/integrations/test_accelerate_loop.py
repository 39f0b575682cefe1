"""The loop of accelerate's documentation, managed: the bits of the loop by hand, exact states, clear refusals."""

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.rules import to_hybrid
from torch.utils.data import DataLoader

import gemini
from gemini.errors import StorageError
from tests.integrations.trainer_cases import LENGTH, Sentences, assert_same_run, llama, masters, rows
from tests.scaling import backward, clip_grads, make_step
from tests.train.helpers import Plain
from tests.world import world_of

Config = gemini.GeminiConfig


class Run:
    """The objects of one program, prepared together."""

    def __init__(self, precision: str = "bf16", dropout: float = 0.0, micro: int = 2, **how: Any):
        self.accelerator = GeminiAccelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=micro, **how
        )
        model = llama(dropout=dropout)
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        loader = DataLoader(Sentences(16), batch_size=2)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.norms: list[float] = []

    @property
    def pair(self) -> tuple[Any, Any]:
        return self.model, self.optimizer.optimizer

    def train(self, start: int = 0, stop: int = 8) -> list[float]:
        """As in the documentation of accelerate."""
        losses = []
        self.model.train()
        for number, batch in enumerate(self.loader):
            if not start <= number < stop:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def groups(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0, "lr": 3e-3},
    ]


def test_a_step_block_by_block_has_the_bits_of_accumulate() -> None:
    """The micro-batches that ``accumulate`` counts, given to ``gemini.train_step``."""
    plain = Run(micro=4)
    losses = plain.train()
    steps, found = Run(micro=1, gemini_config=Config(gradients="accumulate")), list[float]()
    batches = iter(steps.loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="train_step")
        while micro_batches := list(itertools.islice(batches, 4)):
            found += (4 * gemini.train_step(steps.model.train(), micro_batches)).tolist()
            steps.norms.append(steps.accelerator.clip_grad_norm_(steps.model.parameters(), 0.5).item())
            steps.optimizer.step()
            steps.scheduler.step()
            steps.optimizer.zero_grad()
    assert found == losses and steps.norms == plain.norms and len(steps.norms) == 2
    assert_same_run(plain.pair, steps.pair)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_the_loop_comes_to_the_bits_of_the_loop_by_hand(precision: str) -> None:
    run = Run(precision)
    losses = run.train()
    model = gemini.GeminiDDP(llama(), Config(precision="fp32" if precision == "no" else precision))
    optimizer = gemini.HybridAdam(groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    wanted, norms = [], []
    model.train()
    for number in range(8):
        loss = model(**rows(2 * number, 2 * number + 1)).loss
        backward(model, loss / 2)
        if number % 2:
            norms.append(clip_grads(model, optimizer, 0.5).item())
            make_step(model, optimizer)
            scheduler.step()
            optimizer.zero_grad()
        wanted.append(loss.item())
    assert losses == wanted and run.norms == norms and max(norms) > 0.5
    assert_same_run(run.pair, (model, optimizer))
    assert world_of(run.model).config.gradients == "accumulate", "room for sums was reserved from the start"
    assert isinstance(run.accelerator.scaler, gemini.GradScaler if precision == "fp16" else type(None))
    assert not run.accelerator.native_amp
    assert run.accelerator.mixed_precision == precision


def test_adam_with_a_past_becomes_hybrid_adam_with_the_same_groups_and_states() -> None:
    plain = llama()
    optimizer = torch.optim.AdamW(groups(plain), lr=1e-2, betas=(0.8, 0.95), fused=True)
    for number in range(3):
        plain(**rows(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in plain.named_parameters()}
    accelerator = GeminiAccelerator(cpu=True)
    model, prepared = accelerator.prepare(plain, optimizer)
    hybrid = prepared.optimizer
    assert hybrid is optimizer and isinstance(hybrid, gemini.HybridAdam)
    assert model is plain and world_of(model).config.precision == "fp32"
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in hybrid.param_groups] == [
        (1e-2, 0.1, (0.8, 0.95)),
        (3e-3, 0.0, (0.8, 0.95)),
    ]
    assert hybrid.param_groups[0].keys() == torch.optim.AdamW(llama().parameters()).param_groups[0].keys()
    for name, _ in model.named_parameters():
        for key, value in states[name].items():
            assert torch.equal(hybrid.full_state(name)[key], value), (name, key)
    other = torch.nn.Linear(2, 2)
    assert type(accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1.0)).optimizer) is torch.optim.SGD


def test_a_step_that_fp16_skips_is_told() -> None:
    run = Run("fp16", micro=1)
    scaler = run.accelerator.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**40})
    rate = run.scheduler.get_last_lr()
    run.train(0, 1)
    assert run.accelerator.optimizer_step_was_skipped and run.scheduler.get_last_lr() == rate
    assert scaler.get_scale() == 2.0**39
    scaler.update(2.0**10)
    run.train(1, 2)
    assert not run.accelerator.optimizer_step_was_skipped and run.scheduler.get_last_lr() != rate


def test_a_loss_outside_has_the_bits_of_torchs_scaler() -> None:
    """fp16, with a loss that the model does not compute: what only a scale at the loss gets right."""
    run, plain = Run("fp16", micro=1), Plain(llama(), "fp16", lr=1e-2, weight_decay=0.1, scale=2.0**16)
    plain.of = {n: {"weight_decay": 0.0, "lr": 3e-3} for n, _ in plain.model.named_parameters() if "norm" in n}
    norms = []
    for number in range(2):
        batch = rows(2 * number, 2 * number + 1)
        for model in (run.model, plain.model):
            logits = model.train()(input_ids=batch["input_ids"]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            run.accelerator.backward(loss) if model is run.model else plain.backward(loss)
        norms.append(float(run.accelerator.clip_grad_norm_(run.model.parameters(), 0.5)))
        assert norms[-1] == float(torch.tensor(plain.clip(0.5)))
        run.optimizer.step()
        run.optimizer.zero_grad()
        plain.step()
    for name, master in masters(run.model).items():
        assert torch.equal(master.view(-1), plain.master(name).view(-1)), name
    with pytest.raises(RuntimeError, match="already been called"):
        run.accelerator.backward(run.model(**batch).loss)
        run.accelerator.unscale_gradients(run.optimizer)
        run.accelerator.clip_grad_norm_(run.model.parameters(), 0.5)


# ---- states ------------------------------------------------------------------------------------------------------


def test_the_scaler_is_saved(tmp_path: Path) -> None:
    run = Run("fp16", micro=1)
    run.train(0, 2)
    run.accelerator.scaler.update(2.0**9)
    run.accelerator.save_state(tmp_path / "state")
    again = Run("fp16", micro=1)
    again.accelerator.load_state(tmp_path / "state")
    assert again.accelerator.scaler.state_dict() == run.accelerator.scaler.state_dict()
    assert again.optimizer.scaler is again.accelerator.scaler


def test_a_loaded_state_goes_on_as_the_same_run(tmp_path: Path) -> None:
    whole = Run(dropout=0.2)
    whole.train(0, 4)
    whole.accelerator.save_state(tmp_path / "state")
    rest = whole.train(4)
    again = Run(dropout=0.2)
    again.train(0, 2)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.train(4) == rest
    assert_same_run(whole.pair, again.pair)
    assert whole.scheduler.get_last_lr() == again.scheduler.get_last_lr()
    assert not list((tmp_path / "state").glob("model*")) and not list((tmp_path / "state").glob("optimizer*"))


def test_states_that_were_interrupted_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(project_config=ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True))
    run.train(0, 2)
    run.accelerator.save_state()
    after_two = masters(run.model)
    run.train(2, 4)
    checkpoints = tmp_path / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr("gemini.integrations.accelerate.save_checkpoint", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.accelerator.save_state()
    assert (checkpoints / "checkpoint_1").is_dir()
    with pytest.raises(StorageError, match="no checkpoint at .*gemini"):
        run.accelerator.load_state(str(checkpoints / "checkpoint_1"))
    run.accelerator.load_state()  # the newest that is whole
    assert all(torch.equal(value, after_two[name]) for name, value in masters(run.model).items())
    (checkpoints / "checkpoint_0" / "gemini.json").write_text(json.dumps({"id": "of another save"}))
    with pytest.raises(StorageError, match="was being overwritten"):
        run.accelerator.load_state(str(checkpoints / "checkpoint_0"))
    with pytest.raises(StorageError, match="no whole state"):
        run.accelerator.load_state()
    shutil.rmtree(checkpoints / "checkpoint_0" / "gemini")
    (checkpoints / "checkpoint_0" / "gemini.json").unlink()
    with pytest.raises(StorageError, match="was not saved by GeminiAccelerator"):
        run.accelerator.load_state(str(checkpoints / "checkpoint_0"))
    with pytest.raises(ValueError, match="automatic checkpoint naming is off"):
        Run().accelerator.load_state()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_damaged_state_changes_nothing(precision: str, tmp_path: Path) -> None:
    run = Run(precision)
    run.train(0, 2)
    run.accelerator.save_state(tmp_path)
    run.train(2, 4)
    file = next((tmp_path / "gemini").glob("params-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")

    def look() -> list[Any]:
        scaler = run.accelerator.scaler
        kept = [run.scheduler.state_dict(), None if scaler is None else scaler.state_dict(), torch.get_rng_state()]
        return [*map(str, kept), {name: value.tolist() for name, value in masters(run.model).items()}]

    torch.rand(1)
    before = look()
    with pytest.raises(StorageError, match="is damaged"):
        run.accelerator.load_state(str(tmp_path))
    assert look() == before
    (tmp_path / "gemini.json").write_text("[1]")
    with pytest.raises(StorageError, match="was not saved by GeminiAccelerator"):
        run.accelerator.load_state(str(tmp_path))


def test_clipping_a_model_that_was_not_prepared() -> None:
    run, model = Run(), gemini.GeminiDDP(llama(), Config(precision="bf16"))
    with pytest.raises(ValueError, match="has not prepared"):
        run.accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_models_are_saved_as_ordinary_ones(tmp_path: Path) -> None:
    run = Run()
    run.train(0, 2)
    model = run.accelerator.unwrap_model(run.model)
    assert model is run.model
    state = run.accelerator.get_state_dict(run.model)
    assert state.keys() == llama().state_dict().keys()
    run.accelerator.save_model(run.model, str(tmp_path / "model"), max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    model.save_pretrained(
        tmp_path / "again", is_main_process=True, save_function=run.accelerator.save, state_dict=dict(state)
    )
    for folder in ("model", "again"):
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


# ---- refused -----------------------------------------------------------------------------------------------------


def test_clipping_that_would_mean_something_else_is_refused() -> None:
    run = Run(micro=2)
    run.model.train()
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(**rows(0, 1)).loss)
        with pytest.raises(ValueError, match="before the last micro-batch.*if accelerator.sync_gradients"):
            run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(**rows(0, 1)).loss)
        other = run.accelerator.prepare_model(torch.nn.Linear(2, 2))
        for more in (other, torch.nn.Linear(2, 2)):
            with pytest.raises(ValueError, match="of several models"):
                run.accelerator.clip_grad_norm_([*run.model.parameters(), *more.parameters()], 1.0)
        layer = [*run.model.model.layers[0].parameters()]
        of_layer = [name for name, param in run.model.named_parameters() if param in {*layer}]
        norm = torch.stack([run.model.full_grad(name).norm() for name in of_layer]).norm()
        assert run.accelerator.clip_grad_norm_(layer, torch.inf) == pytest.approx(norm.item())
        with pytest.raises(ValueError, match="use clip_grad_norm_"):
            run.accelerator.clip_grad_value_(run.model.parameters(), 1.0)
        assert run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0) > 0
    teacher = torch.nn.Linear(2, 2)
    teacher(torch.ones(1, 2)).sum().backward()
    assert run.accelerator.clip_grad_norm_(teacher.parameters(), 1.0) == pytest.approx(6**0.5)


def test_what_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="asks for bf16.*managed in fp32"):
        GeminiAccelerator(cpu=True, mixed_precision="bf16", gemini_config=Config(precision="fp32"))
    with pytest.raises(ValueError, match="asks for fp8"):
        GeminiAccelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(TypeError, match="got str"):
        GeminiAccelerator(cpu=True, gemini_config="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # what `accelerate launch --mixed_precision bf16` sets
    accelerator = GeminiAccelerator(cpu=True)
    model = llama()
    with pytest.raises(ValueError, match="the optimizer SGD cannot update a managed model"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert world_of(model).config.precision == "bf16"
    with pytest.raises(ValueError, match="maximize=True"):
        to_hybrid(torch.optim.Adam(model.parameters(), maximize=True))


def test_a_teacher_stays_plain_and_gradients_inside_backward_work() -> None:
    accelerator = GeminiAccelerator(cpu=True, gemini_config=Config(precision="fp32", gradients="transient"))
    teacher = accelerator.prepare_model(llama(), evaluation_mode=True)
    assert not isinstance(teacher, gemini.GeminiDDP)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = teacher(**rows(0)).loss
    accelerator.backward(model(**rows(0)).loss)
    optimizer.step()
    assert model(**rows(0)).loss < before and optimizer.optimizer.step_in_backward
    assert rows(0)["labels"].shape == (1, LENGTH)


def test_a_plugin_of_ones_own_decides_when_ranks_reduce() -> None:
    assert GeminiAccelerator(cpu=True).gradient_state.plugin_kwargs["sync_each_batch"]
    plugin = GradientAccumulationPlugin(num_steps=3)
    kwargs = GeminiAccelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_state.plugin_kwargs
    assert not kwargs.get("sync_each_batch", False) and kwargs["num_steps"] == 3
