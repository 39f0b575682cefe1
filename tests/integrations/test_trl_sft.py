"""TRL's SFTTrainer with the mixin before it, and LoRA: the stock trainers' losses, exact resume, ordinary adapters."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import trl
from gemini.integrations.huggingface import GeminiTrainerMixin
from gemini.integrations.trl import GeminiSFTTrainer as ReadyTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer

import gemini
from tests.integrations.trainer_cases import Record, assert_same_run, llama, make, train_new
from tests.world import steps_by_block

WORDS = "the a cat dog sat ran on under mat tree and then slept".split()
LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


class GeminiSFTTrainer(GeminiTrainerMixin, trl.SFTTrainer):
    """What a user writes."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sft(folder: Path, kind: type = GeminiSFTTrainer, **changes: Any) -> tuple[Any, Record]:
    config = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "bf16": False,
        "disable_tqdm": True, "seed": 7, "max_length": 16, "max_grad_norm": 0.5,
    }  # fmt: skip
    known = trl.SFTConfig.__dataclass_fields__
    config |= {key: changes.pop(key) for key in list(changes) if key in known}
    lines = [" ".join(WORDS[(i * 5 + j * (i + 1)) % len(WORDS)] for j in range(4 + i % 5)) for i in range(16)]
    record = Record()
    trainer = kind(
        model=changes.pop("model", None) or llama(), args=trl.SFTConfig(**config), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"text": lines}), callbacks=[record], **changes,
    )  # fmt: skip
    return trainer, record


def test_sft_follows_the_stock_sft_trainer_and_resumes_exactly(tmp_path: Path) -> None:
    stock, wanted = sft(tmp_path / "stock", trl.SFTTrainer, save_strategy="no")
    stock.train()
    trainer, record = sft(tmp_path / "ours")
    trainer.train()
    for key in ("loss", "grad_norm", "mean_token_accuracy"):
        assert record.of(key) == pytest.approx(wanted.of(key), rel=2e-5), key
    assert trainer.args.gradient_checkpointing and isinstance(trainer.optimizer.optimizer, gemini.HybridAdam)
    shutil.rmtree(tmp_path / "ours" / "checkpoint-4")
    again, _ = sft(tmp_path / "ours")
    again.train(resume_from_checkpoint=True)
    assert_same_run(trainer, again)


def adapted() -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(llama(), peft.LoraConfig(**LORA))


@pytest.mark.parametrize("make_model", [llama, adapted], ids=["full", "lora"])
def test_sft_block_by_block(make_model: Any, tmp_path: Path) -> None:
    """TRL's fused head reads the weight of an output head that never runs itself. Logs count each token once."""
    runs, logs = [], []
    for order in ("bfs", "dfs"):
        how: dict[str, Any] = {"order": order, "gradient_accumulation_steps": 4, "save_strategy": "no"}
        trainer, record = sft(tmp_path / order, ReadyTrainer, model=make_model(), **how)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*one after another")
            with steps_by_block() as by_block:
                trainer.train()
        assert by_block.call_count == (4 if order == "bfs" else 0)
        runs.append(trainer)
        logs.append([{k: v for k, v in log.items() if "second" not in k and "runtime" not in k} for log in record.logs])
    assert logs[0] == logs[1]
    for name, param in runs[0].model.named_parameters():
        assert torch.equal(runs[0].model.full_param(name), runs[1].model.full_param(name)), name
        if param.requires_grad:
            mine, theirs = (run.optimizer.optimizer.full_state(name) for run in runs)
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


def test_a_fused_head_that_is_not_used_is_said_once(tmp_path: Path) -> None:
    """With smoothed labels TRL calls the model a second time, for its metrics."""
    trainer, _ = sft(tmp_path, ReadyTrainer, order="bfs", label_smoothing_factor=0.1, save_strategy="no")
    with warnings.catch_warnings(record=True) as warned, steps_by_block():
        warnings.simplefilter("always")
        trainer.train()
    said = [str(each.message) for each in warned if "one after another" in str(each.message)]
    assert len(said) == 1 and said[0].endswith("compute_loss calls the model more than once")


# ---- PEFT without TRL --------------------------------------------------------------------------------------------


def test_lora_through_the_trainer(tmp_path: Path) -> None:
    """The stock Trainer's losses; an adapter that plain PEFT opens; exact resume; the best adapter at the end."""

    stock, wanted = train_new(tmp_path / "stock", Trainer, model=adapted(), save_strategy="no")
    how: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer, record = train_new(tmp_path / "ours", model=adapted(), **how)
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=2e-5)
    assert record.of("grad_norm") == pytest.approx(wanted.of("grad_norm"), rel=2e-4)
    trainer.save_model(str(tmp_path / "out"))
    for folder in (trainer.state.best_model_checkpoint, tmp_path / "out"):
        opened = peft.PeftModel.from_pretrained(llama(), folder)
        own = {name: param for name, param in opened.named_parameters() if "lora_" in name}
        assert len(own) == 8
        for name, param in own.items():
            assert torch.equal(param, trainer.model.full_param(name)), name
    shutil.rmtree(tmp_path / "ours" / "checkpoint-6")
    again, _ = make(tmp_path / "ours", model=adapted(), **how)
    again.train(resume_from_checkpoint=True)
    for name, param in trainer.model.named_parameters():
        assert torch.equal(trainer.model.full_param(name), again.model.full_param(name)), name
        if param.requires_grad:
            mine, theirs = (t.optimizer.optimizer.full_state(name)["exp_avg"] for t in (trainer, again))
            assert torch.equal(mine, theirs), name
