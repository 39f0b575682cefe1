"""What a Trainer is told and Gemini cannot do is refused when the Trainer is made, with what can be done instead."""

from pathlib import Path
from typing import Any

import pytest

import gemini
from gemini.integrations import huggingface
from tests.integrations.trainer_cases import arguments, llama, make, train_new

Config = gemini.GeminiConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16": True, "gemini_config": Config(precision="fp16")}, "Arguments.bf16=True.*say bf16 in both"),
        ({"fp16": True, "gemini_config": Config(precision="bf16")}, "asks for fp16.*managed in bf16"),
        ({"optim": "adafactor"}, "'adafactor' cannot update.*'adamw_torch', 'adamw_torch_fused'.*HybridAdam"),
        ({"optim": "adamw_bnb_8bit"}, "'adamw_bnb_8bit' cannot update"),
        ({"fsdp": True}, "fsdp= cannot be used.*MemoryBudget"),
        ({"torch_compile": True}, "torch_compile=True.*leave it out"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True, but the model is managed in fp32"),
        ({"gemini_config": Config(gradients="transient")}, "max_grad_norm=0, gradient_accumulation_steps=1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_refused_when_made(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **changes)


def test_deepspeed_and_what_accelerate_was_configured_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match="deepspeed= cannot be used with GeminiTrainer"):
        huggingface.check_args(args)
    args.deepspeed = None
    huggingface.check_args(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate config"):
        huggingface.check_args(args)


def test_a_folder_of_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path, save_on_each_node=True)
    huggingface.check_args(args)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="give an output_dir they share"):
        huggingface.check_args(args)


def test_several_gpus_in_one_process_are_not_data_parallel(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert args.n_gpu <= 1
    args._n_gpu = 4
    with pytest.warns(UserWarning, match="torchrun --nproc-per-node 4"):
        huggingface.use_one_gpu(args)
    assert args.n_gpu == 1


def test_a_model_that_was_managed_otherwise(tmp_path: Path) -> None:
    model = gemini.GeminiDDP(llama(), Config(precision="fp32"))
    with pytest.raises(ValueError, match="asks for bf16.*managed in fp32"):
        make(tmp_path, model=model, bf16=True)
    with pytest.raises(ValueError, match="managed already, with another config"):
        make(tmp_path, model=model, gemini_config=Config(memory=gemini.MemoryBudget(cpu="1GiB"), precision="fp32"))
    trainer, _ = train_new(
        tmp_path, model=model, gemini_config=Config(precision="fp32"), max_steps=1, save_strategy="no"
    )


def test_configs_and_devices(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="gemini_config= is a gemini.GeminiConfig.*got dict"):
        make(tmp_path, gemini_config={"precision": "bf16"})
    trainer, _ = make(tmp_path, gemini_config=Config(precision="fp32", device="cuda"))
    with pytest.raises(ValueError, match="device='cuda'.*batches are put on cpu"):
        trainer.evaluate()
    spread = llama()
    spread.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    trainer, _ = make(tmp_path, model=spread)
    with pytest.raises(ValueError, match="device_map=: load it without"):
        trainer.train()
