"""Checkpoints of a Trainer: ordinary directories, exact resume, and never a torn one under a checkpoint's name."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import gemini
from gemini.errors import PlanMismatch
from tests.integrations.trainer_cases import Sentences, Stop, assert_same_run, llama, make, train_new
from tests.train.helpers import mixtral


class Death(BaseException):
    """What SIGKILL is to a program, as far as its files are concerned."""


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def resumed(folder: Path, source: Any = True, **changes: Any) -> Any:
    trainer, _ = make(folder, model=llama(tied=True, dropout=0.2), **changes)
    trainer.train(resume_from_checkpoint=source)
    return trainer


def uninterrupted(folder: Path, **changes: Any) -> Any:
    trainer, _ = train_new(folder, model=llama(tied=True, dropout=0.2), **changes)
    return trainer


# ---- what is there -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_an_ordinary_directory_with_gemini_in_it(tmp_path: Path) -> None:
    trainer = uninterrupted(tmp_path, bf16=True)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]
    assert checkpoints(tmp_path / "checkpoint-6") == [
        "config.json", "gemini", "generation_config.json", "model.safetensors", "rng_state.pth", "scheduler.pt",
        "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert type(plain) is transformers.LlamaForCausalLM and plain.dtype is torch.bfloat16
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    for name, param in plain.named_parameters():
        assert torch.equal(param, trainer.model.full_param(name)), name
    trainer.save_model(str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, plain.lm_head.weight)


@pytest.mark.parametrize("changes", [{"bf16": True}, {"fp16": True, "save_steps": 5}, {"save_steps": 2}], ids=str)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    """In the middle of an epoch and (8 rows, 2 steps each) at its end; dropout, shuffled rows, schedule."""
    how = {"train_dataset": Sentences(8)} | changes
    whole = uninterrupted(tmp_path, **how)
    shutil.rmtree(tmp_path / "checkpoint-6", ignore_errors=True)
    again = resumed(tmp_path, **how)
    assert_same_run(whole, again)
    assert again.state.global_step == 6
    assert whole.state.log_history[-2]["loss"] == again.state.log_history[-2]["loss"]


def test_fused_experts_are_resumed_too(tmp_path: Path) -> None:
    """The weights file has each expert by itself: looked for by the names of the model, they would be left out."""
    whole, _ = train_new(tmp_path, model=mixtral(), bf16=True)
    shutil.rmtree(tmp_path / "checkpoint-6")
    again, _ = make(tmp_path, model=mixtral(), bf16=True)
    again.train(resume_from_checkpoint=True)
    assert_same_run(whole, again)
    again.state.best_model_checkpoint = str(tmp_path / "checkpoint-3")
    again._load_best_model()
    third, _ = make(tmp_path / "third", model=mixtral(), bf16=True, save_strategy="no")
    third.add_callback(Stop(3))
    third.train()
    assert_same_run(again, third)


def test_memory_may_be_another_when_a_run_goes_on(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path, bf16=True)
    memory = gemini.MemoryBudget(cpu="640KiB", nvme="64MiB", nvme_path=str(tmp_path))
    config = gemini.GeminiConfig(memory=memory)
    again = resumed(tmp_path, str(tmp_path / "checkpoint-3"), bf16=True, gemini_config=config)
    assert_same_run(whole, again)


def test_the_limit_of_checkpoints_and_the_best_model(tmp_path: Path) -> None:
    """The best of three is in the middle: it is kept, and loaded at the end with its exact masters."""
    worse = {2: 1.0, 4: 0.5, 6: 2.0}

    class Judge(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_fake"] = worse[state.global_step]

    def train(folder: Path, **changes: Any) -> Any:
        trainer, _ = make(
            folder, bf16=True, eval_strategy="steps", eval_steps=2, save_steps=2, metric_for_best_model="fake",
            greater_is_better=False, **changes,
        )  # fmt: skip
        trainer.add_callback(Judge())
        trainer.train()
        return trainer

    trainer = train(tmp_path, save_total_limit=1, load_best_model_at_end=True)
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")
    random = torch.get_rng_state()
    trainer._load_best_model()
    assert torch.equal(torch.get_rng_state(), random), "what comes after draws as if nothing had been loaded"
    four, _ = make(tmp_path / "four", bf16=True, save_strategy="no")
    four.add_callback(Stop(4))
    four.train()
    assert_same_run(trainer, four)


def test_only_weights(tmp_path: Path) -> None:
    trainer = uninterrupted(tmp_path, save_only_model=True)
    assert not (tmp_path / "checkpoint-6" / "gemini").exists()
    with pytest.raises(ValueError, match="save_only_model=True left them out"):
        resumed(tmp_path)
    best, _ = make(tmp_path / "best", model=llama(tied=True), bf16=True)
    best._wrap_model(best.model)
    best.state.best_model_checkpoint = str(tmp_path / "checkpoint-6")
    best._load_best_model()
    for name, _ in trainer.model.named_parameters():
        assert torch.equal(best.model.full_param(name), trainer.model.full_param(name).bfloat16()), name


# ---- deaths ------------------------------------------------------------------------------------------------------

STAGES = {
    "weights": ("transformers.modeling_utils.PreTrainedModel.save_pretrained", False),
    "states": ("gemini.integrations.huggingface_save.save_checkpoint", False),
    "after states": ("gemini.integrations.huggingface_save.save_checkpoint", True),
    "randomness": ("transformers.Trainer._save_rng_state", True),
    "trainer state": ("transformers.trainer_callback.TrainerState.save_to_json", False),
    "before its name": ("gemini.replacing.swap", False),
    "after its name": ("gemini.replacing.swap", True),
    "limit": ("gemini.integrations.huggingface_save.rotate_checkpoints", True),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return uninterrupted(tmp_path_factory.mktemp("whole"), save_total_limit=1)


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("stage", STAGES)
def test_death_while_saving_leaves_a_whole_checkpoint_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, stage: str
) -> None:
    """At each stage of the second save, with room for one checkpoint only."""
    where, done_first = STAGES[stage]
    holder, name = where.rpartition(".")[::2]
    owner = _find(holder)
    original = getattr(owner, name)

    def die(*args: Any, **kwargs: Any) -> Any:
        last = any("checkpoint-6" in str(arg) for arg in args if isinstance(arg, (str, Path)))
        if name == "swap":
            last = last and Path(args[1]).name == "checkpoint-6"  # not of gemini/ inside it
        elif name == "rotate_checkpoints":
            last = (tmp_path / "checkpoint-6").exists()
        if last and not done_first:
            raise Death(stage)
        result = original(*args, **kwargs)
        if last:
            raise Death(stage)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Death):
            uninterrupted(tmp_path, save_total_limit=1)
    newest = get_last_checkpoint(str(tmp_path))  # transformers' own, which judges by name
    named_already = stage in ("after its name", "limit")
    assert newest == str(tmp_path / ("checkpoint-6" if named_already else "checkpoint-3"))
    again = resumed(tmp_path, True, save_total_limit=1)
    assert_same_run(whole, again)
    assert checkpoints(tmp_path) == (["checkpoint-3"] if stage == "after its name" else []) + ["checkpoint-6"]


def _find(path: str) -> Any:
    parts = path.split(".")
    found: Any = __import__(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            __import__(".".join(parts[:at]))
            found = getattr(found, part)
    return found


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-6")
    os.rename(tmp_path / "checkpoint-3", tmp_path / ".checkpoint-3.old")
    assert_same_run(whole, resumed(tmp_path))
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]


# ---- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["gemini", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_without_its_states_is_refused_not_silently_restarted(tmp_path: Path, missing: str) -> None:
    """The stock Trainer starts optimizer and schedule anew, without a word, where ``optimizer.pt`` is not there."""
    uninterrupted(tmp_path)
    path = tmp_path / "checkpoint-6" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=f"has no {missing}.*Resume from .*checkpoint-3"):
        resumed(tmp_path, str(tmp_path / "checkpoint-6"))
    again = resumed(tmp_path)  # the newest that is whole
    assert again.state.global_step == 6


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    uninterrupted(tmp_path, bf16=True)
    with pytest.raises(PlanMismatch, match="saved in bf16, the model is in fp32"):
        resumed(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint at"):
        resumed(tmp_path, str(tmp_path / "checkpoint-9"))
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        (tmp_path / "empty").mkdir()
        resumed(tmp_path / "empty")
    shutil.copy(tmp_path / "checkpoint-3" / "trainer_state.json", tmp_path / "checkpoint-6")
    with pytest.raises(ValueError, match="step 6 and a trainer_state.json of step 3"):
        resumed(tmp_path, str(tmp_path / "checkpoint-6"), bf16=True)


def test_a_run_of_the_stock_trainer_goes_on(tmp_path: Path) -> None:
    """From its weights, its AdamW's moments and its schedule; one update agrees to 1e-6."""
    stock, wanted = train_new(tmp_path, Trainer)
    trainer, record = make(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert record.of("loss") == pytest.approx(wanted.of("loss")[3:], rel=2e-5)
    assert record.of("learning_rate") == wanted.of("learning_rate")[3:]
    assert trainer.optimizer.optimizer.full_state("lm_head.weight")["step"] == 6


def test_a_stop_between_backward_and_step_saves_the_last_step(tmp_path: Path) -> None:
    """SIGTERM with ``enable_jit_checkpoint``: the gradients at hand are dropped, and their rows come again."""

    class Term(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.callback_handler.callbacks[-2].jit_manager.is_checkpoint_requested = True

    trainer, _ = make(tmp_path, model=llama(tied=True, dropout=0.2), enable_jit_checkpoint=True, save_steps=100)
    jit = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
    trainer.callback_handler.callbacks.remove(jit)
    trainer.callback_handler.callbacks.append(jit)
    trainer.add_callback(Term())
    try:
        trainer.train()
    finally:
        jit.on_train_end(trainer.args, trainer.state, trainer.control)
    assert "checkpoint-2" in checkpoints(tmp_path) and "gemini" in checkpoints(tmp_path / "checkpoint-2")
    assert_same_run(uninterrupted(tmp_path / "whole", save_steps=100), resumed(tmp_path, save_steps=100))
