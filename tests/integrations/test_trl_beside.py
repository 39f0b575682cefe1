"""TRL's trainers with a reference, rewards, a teacher: frozen and managed in the budget of the model they train."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from gemini.integrations.huggingface import GeminiTrainerMixin

import gemini
from gemini.integrations import trl as ours
from gemini.tiers import Tier
from tests.integrations.test_trl_sft import WORDS, tokenizer
from tests.integrations.trainer_cases import Record, llama
from tests.world import is_managed, world_of

STEPS = 3
PAIRS = {
    "prompt": [" ".join(WORDS[i % 5 : i % 5 + 3]) for i in range(8)],
    "chosen": [" ".join(WORDS[i % 7 : i % 7 + 4]) for i in range(8)],
    "rejected": [" ".join(WORDS[i % 6 : i % 6 + 5]) for i in range(8)],
}
LABELLED = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 4}
PROMPTS = {"prompt": PAIRS["prompt"]}


class GeminiDistillationTrainer(GeminiTrainerMixin, trl.DistillationTrainer):
    """What a user writes."""


def reward_model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**llama().config.to_dict(), "num_labels": 1})
    return transformers.LlamaForSequenceClassification(config)


def other(seed: int = 5) -> Any:
    model = llama()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


ONLINE = {"max_completion_length": 5, "beta": 0.1, "temperature": 1.0, "per_device_train_batch_size": 4}
KINDS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "DPO": (trl.DPOConfig, {"beta": 0.1, "max_length": 16}, PAIRS, {}),
    "KTO": (trl.KTOConfig, {"beta": 0.1, "max_length": 16, "per_device_train_batch_size": 4}, LABELLED, {}),
    "GRPO": (trl.GRPOConfig, {**ONLINE, "num_generations": 2}, PROMPTS, {}),
    "RLOO": (trl.RLOOConfig, {**ONLINE, "num_generations": 2}, PROMPTS, {}),
    "Distillation": (trl.DistillationConfig, ONLINE, PROMPTS, {}),
}


def make(kind: str, folder: Path, managed: bool, memory: Any = None, **changes: Any) -> tuple[Any, Record]:
    config, args, rows, more = KINDS[kind]
    said = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": STEPS, "save_strategy": "no",
        "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "bf16": False, "seed": 7,
        "disable_tqdm": True,
    }  # fmt: skip
    said |= args | {key: changes.pop(key) for key in list(changes) if key in config.__dataclass_fields__}
    more = {**more, **changes}
    if kind in ("DPO", "KTO"):
        more.setdefault("ref_model", other())
    if kind in ("GRPO", "RLOO"):
        more.setdefault("reward_funcs", [reward_model()])
        more.setdefault("reward_processing_classes", [tokenizer()])
    if kind == "Distillation":
        more.setdefault("teacher_model", other())
    if managed and memory is not None:
        more["gemini_config"] = gemini.GeminiConfig(memory=memory)
    record = Record()
    torch.manual_seed(11)
    stock = getattr(trl, f"{kind}Trainer")
    managing = GeminiDistillationTrainer if kind == "Distillation" else getattr(ours, f"Gemini{kind}Trainer", None)
    trainer = (managing if managed else stock)(
        model=more.pop("model", None) or llama(), args=config(**said), processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict(rows), callbacks=[record], **more,
    )  # fmt: skip
    return trainer, record


def saved(folder: Path) -> str:
    """A policy by its name, of which a trainer makes a reference itself."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def beside(trainer: Any) -> list[Any]:
    found = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
    return [model for model in (*found, *getattr(trainer, "reward_funcs", ())) if model is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_reference_and_rewards_are_managed_with_the_model(kind: str, tmp_path: Path) -> None:
    """In a budget of few MiB with a drive: losses and metrics of the stock trainer, and the bytes by arithmetic."""
    policy = saved(tmp_path / "policy") if kind in ("GRPO", "RLOO") else None
    given = {"model": policy, "sync_ref_model": True, "ref_model_sync_steps": 2} if policy else {}
    stock, wanted = make(kind, tmp_path / "stock", False, **given)
    stock.train()
    memory = gemini.MemoryBudget(cpu="2MiB", nvme="16MiB", nvme_path=tmp_path)
    trainer, record = make(kind, tmp_path / "ours", True, memory, **given)
    trainer.train()
    keys = {key for logs in wanted.logs for key, value in logs.items() if isinstance(value, float)}
    keys -= {key for key in keys if "runtime" in key or "per_second" in key or "time" in key}
    assert {"loss", "grad_norm"} < keys
    for key in keys:
        assert record.of(key) == pytest.approx(wanted.of(key), rel=5e-4, abs=5e-5), key
    models = beside(trainer)
    assert len(models) == len(beside(stock)) >= 1
    shared = world_of(trainer.model).config.memory.report()
    for model, plain in zip(models, beside(stock), strict=True):
        world = world_of(model)
        for name, param in plain.named_parameters():
            assert torch.allclose(model.full_param(name), param, rtol=1e-3, atol=1e-5), name
        assert not any(param.requires_grad for param in model.parameters())
        held = sum(world.held(tier, "weights") for tier in world.tiers)
        assert held == sum(world.problem.window_bytes(c.spec.index) for c in world.chunks)  # 4 bytes: it is in fp32
        world.check()
    total = {tier: sum(world_of(m).used(Tier(tier)) for m in (trainer.model, *models)) for tier in shared}
    assert {tier: row["used"] for tier, row in shared.items()} == total
    assert all(row["peak"] <= row["budget"] for row in shared.values())
    assert all(is_managed(model) for model in models)
