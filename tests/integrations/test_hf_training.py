"""Everything a Trainer does besides arithmetic goes on: logs, clipping, evaluation, generation, optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.huggingface import GeminiSeq2SeqTrainer
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import gemini
from tests.integrations.trainer_cases import (
    Record,
    Sentences,
    arguments,
    assert_same_run,
    llama,
    make,
    masters,
    train_new,
)
from tests.train.helpers import t5
from tests.world import world_of

# ---- traps -------------------------------------------------------------------------------------------------------


def test_without_clipping_the_norm_is_logged_all_the_same(tmp_path: Path) -> None:
    trainer, record = train_new(tmp_path, max_grad_norm=0, max_steps=2, save_strategy="no")
    assert min(record.of("grad_norm")) > 0.5


def test_gradients_of_params_outside_the_optimizer_do_not_pile_up(tmp_path: Path) -> None:
    """The Trainer calls ``model.zero_grad()``, never the optimizer's."""
    model = llama()
    only_norms = [p for n, p in model.named_parameters() if "norm" in n]
    trainer, record = train_new(
        tmp_path, model=model, optimizers=(torch.optim.AdamW(only_norms, lr=0.0), None), max_steps=3,
        save_strategy="no", train_dataset=Sentences(4),
    )  # fmt: skip
    assert all(trainer.model.full_grad(name) is None for name, _ in trainer.model.named_parameters())
    assert record.of("grad_norm")[2] == pytest.approx(record.of("grad_norm")[0], rel=1e-3), "the same rows, lr 0"


def test_optimizer_states_are_not_copied_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's optimizer wrapper reads and writes the whole state where it may place it."""

    def copied(*_: Any) -> Any:
        raise AssertionError("the whole optimizer state was copied")

    monkeypatch.setattr(gemini.HybridAdam, "state_dict", copied)
    monkeypatch.setattr(gemini.HybridAdam, "load_state_dict", copied)
    trainer, _ = train_new(tmp_path, max_steps=2, save_steps=1)
    assert isinstance(trainer.optimizer.optimizer, gemini.HybridAdam)


def test_the_managed_model_looks_like_the_model(tmp_path: Path) -> None:
    """A wrapper would drop columns, mis-scale the loss, give no eval loss and fail to save."""
    stock, _ = make(tmp_path / "stock", Trainer)
    managed = gemini.GeminiDDP(llama(), gemini.GeminiConfig(precision="fp32"))
    trainer, _ = make(tmp_path / "ours", model=managed)
    for each in (stock, trainer):
        each._set_signature_columns_if_needed()
    assert trainer._signature_columns == stock._signature_columns
    assert "labels" in trainer._signature_columns
    assert trainer.model_accepts_loss_kwargs and trainer._loss_shifts_labels and trainer.label_names == ["labels"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    trainer.save_model()
    assert (tmp_path / "ours" / "model.safetensors").is_file()


# ---- options -----------------------------------------------------------------------------------------------------


def quick(folder: Path, **changes: Any) -> tuple[Any, Record]:
    return train_new(folder, max_steps=3, save_strategy="no", **changes)


@pytest.mark.parametrize(
    "option",
    [
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"gradient_checkpointing": True},
        {"average_tokens_across_devices": False, "lr_scheduler_type": "cosine"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_do_what_they_do_in_the_stock_trainer(tmp_path: Path, option: dict[str, Any]) -> None:
    _, wanted = quick(tmp_path / "stock", kind=Trainer, **option)
    trainer, record = quick(tmp_path / "ours", **option)
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=1e-5)
    assert record.of("grad_norm") == pytest.approx(wanted.of("grad_norm"), rel=1e-5)
    if "gradient_checkpointing" in option:
        assert trainer.model.is_gradient_checkpointing
        assert_same_run(trainer, quick(tmp_path / "plain")[0])  # the same bits as without


def test_a_smaller_batch_is_found_after_running_out_of_memory(tmp_path: Path) -> None:
    trainer, record = make(
        tmp_path, auto_find_batch_size=True, per_device_train_batch_size=3, save_strategy="no", max_steps=2
    )
    layer = trainer.model.model.layers[1]

    def too_much(module: Any, args: Any) -> None:
        if args[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    layer.register_forward_pre_hook(too_much)
    trainer.train()
    assert trainer._train_batch_size <= 2 and len(record.of("loss")) == 2


def test_a_micro_batch_that_runs_out_of_memory_in_its_backward_is_made_again(tmp_path: Path) -> None:
    def trained(folder: Path, fails: int | None) -> Any:
        config = gemini.GeminiConfig(device="standin", gradients="accumulate", memory=gemini.MemoryBudget(cpu="64MiB"))
        model, backwards = gemini.GeminiDDP(llama(dropout=0.1), config), list[int]()

        def arrive(grad: torch.Tensor) -> None:
            backwards.append(1)
            if len(backwards) == fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")

        # The gradients of the layers above are added to the sum by then.
        hook = lambda module, args, output: output.requires_grad and output.register_hook(arrive) and None  # noqa: E731
        model.model.layers[0].mlp.register_forward_hook(hook)
        trainer, _ = make(folder, model=model, save_strategy="no", max_steps=3)
        trainer.train()
        assert len(backwards) == (6 if fails is None else 7)
        return trainer

    with pytest.warns(UserWarning, match="a micro-batch ran out of memory.* made once more"):
        failed = trained(tmp_path / "a", 4)
    assert_same_run(failed, trained(tmp_path / "b", None))


def test_updates_inside_backward(tmp_path: Path) -> None:
    config = gemini.GeminiConfig(gradients="transient")
    how: dict[str, Any] = {"max_grad_norm": 0, "gradient_accumulation_steps": 1, "bf16": True}
    inside, record = quick(tmp_path / "inside", gemini_config=config, **how)
    assert record.of("grad_norm") == []
    after, _ = quick(tmp_path / "after", **how)
    assert_same_run(inside, after)


def test_a_model_init_and_training_twice(tmp_path: Path) -> None:
    trainer, record = train_new(tmp_path, model_init=lambda: llama(), max_steps=2, save_strategy="no")
    first = masters(trainer.model)
    trainer.train()  # a new model from the same seed
    assert record.of("loss")[:2] == record.of("loss")[2:]
    assert all(torch.equal(value, first[name]) for name, value in masters(trainer.model).items())
    again, record = train_new(tmp_path, max_steps=2, save_strategy="no")
    again.train()  # the same model goes on
    assert record.of("loss")[2] < record.of("loss")[0]
    assert again.optimizer.optimizer.full_state("lm_head.weight")["step"] == 4


def test_gradients_from_before_are_dropped_as_the_trainer_does(tmp_path: Path) -> None:
    trainer, other = (make(tmp_path / each, max_steps=1, save_strategy="no")[0] for each in ("with", "without"))
    for param in trainer.model.parameters():
        param.grad = torch.ones_like(param)
    trainer.train()
    other.train()
    assert_same_run(trainer, other)


def test_generation_in_evaluation(tmp_path: Path) -> None:
    def seq2seq(kind: type, name: str) -> dict[str, float]:
        args = arguments(
            tmp_path / name, kind=Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6,
            max_steps=2, save_strategy="no",
        )  # fmt: skip
        said = []

        def count(prediction: Any) -> dict[str, float]:
            said.append(prediction.predictions)
            return {"length": float(prediction.predictions.shape[1])}

        trainer = kind(
            model=t5(), args=args, train_dataset=Sentences(), eval_dataset=Sentences(4), compute_metrics=count
        )
        trainer.train()
        metrics = trainer.evaluate()
        assert metrics["eval_length"] >= 2
        return {"loss": metrics["eval_loss"], "tokens": said[0].tolist()}

    ours, stock = seq2seq(GeminiSeq2SeqTrainer, "ours"), seq2seq(Seq2SeqTrainer, "stock")
    assert ours["tokens"] == stock["tokens"] and ours["loss"] == pytest.approx(stock["loss"], rel=1e-5)


def test_the_model_is_managed_with_room_for_sums_when_steps_accumulate(tmp_path: Path) -> None:
    said = gemini.GeminiConfig(precision="fp32")
    for steps, gradients in ((1, "retain"), (2, "accumulate")):
        trainer, _ = make(tmp_path, gemini_config=said, gradient_accumulation_steps=steps)
        assert isinstance(trainer.accelerator, GeminiAccelerator)
        trainer.evaluate()
        assert world_of(trainer.model).config.gradients == gradients


def test_ranks_reduce_after_each_micro_batch_unless_told_otherwise(tmp_path: Path) -> None:
    """``sync_each_batch`` is the Trainer's own word for it."""
    trainer, _ = make(tmp_path)
    assert trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True
    said = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    trainer, _ = make(tmp_path, accelerator_config=said)
    assert not trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
