"""TRL's trainers with a reference, rewards, a teacher: frozen and managed in the budget of the model they train."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.beside import budget_for, manage_beside

import gemini
from gemini.integrations import trl as ours
from gemini.planning.hardware import load_hardware
from gemini.planning.together import evaluated, kept_bytes
from gemini.tiers import Tier
from tests.integrations.test_trl_sft import LORA, WORDS, tokenizer
from tests.integrations.trainer_cases import Record, assert_same_run, llama
from tests.world import is_managed, world_of

STEPS = 3
CHUNK = 4096  # else so small a model takes more memory for staging than for itself
PAIRS = {
    "prompt": [" ".join(WORDS[i % 5 : i % 5 + 3]) for i in range(8)],
    "chosen": [" ".join(WORDS[i % 7 : i % 7 + 4]) for i in range(8)],
    "rejected": [" ".join(WORDS[i % 6 : i % 6 + 5]) for i in range(8)],
}
LABELLED = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 4}
PROMPTS = {"prompt": PAIRS["prompt"]}


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
ALONE: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "SFT": (trl.SFTConfig, {"max_length": 16}, {"text": PAIRS["chosen"]}, {}),
    "Reward": (trl.RewardConfig, {"max_length": 16}, PAIRS, {}),
}


def make(kind: str, folder: Path, managed: bool, memory: Any = None, **changes: Any) -> tuple[Any, Record]:
    config, args, rows, more = (KINDS | ALONE)[kind]
    said = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": STEPS, "save_strategy": "no",
        "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "bf16": False, "seed": 7,
        "disable_tqdm": True,
    }  # fmt: skip
    said |= args | {key: changes.pop(key) for key in list(changes) if key in config.__dataclass_fields__}
    more = {**more, **changes}
    if kind in ("DPO", "KTO") and "peft_config" not in more:
        more.setdefault("ref_model", other())
    if kind == "Reward":
        more.setdefault("model", reward_model())
    if kind in ("GRPO", "RLOO"):
        more.setdefault("reward_funcs", [reward_model()])
        more.setdefault("reward_processing_classes", [tokenizer()])
    if kind == "Distillation":
        more.setdefault("teacher_model", other())
    if managed and memory is not None:
        more["gemini_config"] = gemini.GeminiConfig(memory=memory, max_chunk=CHUNK)
    record = Record()
    torch.manual_seed(11)
    trainer = (getattr(ours, f"Gemini{kind}Trainer") if managed else getattr(trl, f"{kind}Trainer"))(
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
    """In less than a MiB with a drive: losses and metrics of the stock trainer, and the bytes by arithmetic."""
    policy = saved(tmp_path / "policy") if kind in ("GRPO", "RLOO") else None
    given = {"model": policy, "sync_ref_model": True, "ref_model_sync_steps": 2} if policy else {}
    stock, wanted = make(kind, tmp_path / "stock", False, **given)
    stock.train()
    memory = budget(tmp_path, shared=False)
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
    assert all(row["peak"] <= row["budget"] for row in shared.values()) and shared["nvme"]["used"] > 0
    assert all(is_managed(model) for model in models)


FULL_AND_LORA = [(kind, lora) for kind in (*KINDS, *ALONE) for lora in (False, True) if kind in ALONE or lora]


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize(("kind", "lora"), FULL_AND_LORA)
def test_every_trainer_is_the_stock_one_in_full_and_with_a_lora(kind: str, lora: bool, tmp_path: Path) -> None:
    """Losses, norms and rewards of the stock trainer, in half a MiB and a drive; a LoRA is its own reference."""
    found = []
    for managed in (False, True):
        how: dict[str, Any] = {}
        if lora:
            task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
            how["peft_config"] = peft.LoraConfig(**{**LORA, "task_type": task})
        folder = tmp_path / f"{managed}"
        folder.mkdir()
        trainer, record = make(kind, folder, managed, budget(folder, shared=False), **how)
        trainer.train()
        found.append(record)
        if managed:
            world = world_of(trainer.model)
            world.check()
            assert all(world.peak(tier) <= world.budget(tier) for tier in world.tiers)
            assert all(is_managed(model) for model in beside(trainer))
            assert (len(beside(trainer)) == 0) == (kind in ALONE or (lora and kind in ("DPO", "KTO")))
    stock, ours = found
    keys = {key for logs in stock.logs for key, value in logs.items() if isinstance(value, float)}
    keys -= {key for key in keys if "runtime" in key or "per_second" in key or "time" in key}
    assert {"loss", "grad_norm"} < keys and len(stock.of("loss")) == STEPS
    for key in keys:
        assert ours.of(key) == pytest.approx(stock.of(key), rel=5e-4, abs=5e-5), key


def one_run(kind: str, folder: Path, kill_at: int) -> Any:
    """A run that saves each step, whose process is killed at the end of a step; it goes on from what is there."""
    how: dict[str, Any] = {"bf16": True, "save_strategy": "steps", "save_steps": 1}
    if kind in ("GRPO", "RLOO"):
        how |= {"model": saved(folder / "policy"), "num_iterations": 2}  # answers are used in two steps
    trainer, _ = make(kind, folder / "run", True, budget(folder, shared=False), **how)
    trainer.add_callback(Killed(kill_at))
    there = [path for path in (folder / "run").glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    trainer.train(resume_from_checkpoint=bool(there))
    return trainer


class Killed(transformers.TrainerCallback):
    """What a machine does that loses power behind the begin of a step."""

    def __init__(self, at: int):
        self.at = at

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation"])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = one_run(kind, tmp_path / "whole", 0)
    first = (
        f"from tests.integrations.test_trl_beside import Path, one_run; one_run({kind!r}, Path({str(tmp_path)!r}), 2)"
    )
    # Not the process group that this process may be in.
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MASTER_", "LOCAL_", "RANK", "WORLD_SIZE"))
    }
    died = subprocess.run([sys.executable, "-c", first], env=own, capture_output=True, text=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint-1").is_dir() and not (tmp_path / "run" / "checkpoint-3").exists()
    again = one_run(kind, tmp_path, 0)
    assert again.state.global_step == STEPS
    assert_same_run(whole, again)


def budget(folder: Path, shared: bool = True, cpu: str = "450KiB", **more: Any) -> Any:
    kind = gemini.SharedBudget if shared else gemini.MemoryBudget
    return kind(cpu=cpu, nvme="16MiB", nvme_path=folder, **more)


def test_a_trainer_has_what_a_plan_of_both_said(tmp_path: Path) -> None:
    """What the reference keeps, and what it leaves to the policy in room for what both gather at once."""
    trainer, _ = make("DPO", tmp_path, True, budget(tmp_path, shared=False), max_steps=1)
    trainer.train()
    ids = torch.ones(2, 16, dtype=torch.long)
    step = gemini.trace(llama(), {"input_ids": ids, "labels": ids}, precision="fp32", target="cpu")
    there = {Tier.CPU: 450 * 2**10, Tier.NVME: 2**24}
    said = gemini.plan_together(
        {"ref": evaluated(step), "policy": step}, None, there, at_once=True, max_chunk=CHUNK
    ).plans  # fmt: skip
    policy, reference = world_of(trainer.model), world_of(trainer.ref_model)
    assert reference.placement == said["ref"].placement
    for tier in reference.tiers:
        assert reference.ledger.kept(tier) == kept_bytes(said["ref"])[tier], tier
    for name in ("others", "working_set", "budgets"):
        assert getattr(policy.problem, name) == getattr(said["policy"].problem, name), name


def by_hand(memory: Any, model: Any = None) -> Any:
    return gemini.GeminiDDP(
        model or llama(), gemini.GeminiConfig(precision="fp32", memory=memory, device="cpu", max_chunk=CHUNK)
    )


@pytest.mark.parametrize("who", ["policy", "policy of its own", "reference", "both"])
def test_models_wrapped_by_hand_are_taken_as_they_are(who: str, tmp_path: Path) -> None:
    """What is left plain joins a budget that is shared. A policy that has planned with all of its own leaves it so."""
    stock, wanted = make("DPO", tmp_path / "stock", False)
    stock.train()
    memory = budget(tmp_path, who != "policy of its own", **({} if who == "policy of its own" else {"later": "200KiB"}))
    policy = by_hand(memory) if who != "reference" else llama()
    reference = other() if who.startswith("policy") else by_hand(budget(tmp_path), other())
    given = None if who != "reference" else memory
    trainer, record = make("DPO", tmp_path / "ours", True, given, model=policy, ref_model=reference)
    trainer.train()
    assert record.of("loss") == pytest.approx(wanted.of("loss"), rel=5e-4)
    assert trainer.ref_model is reference and is_managed(reference) == (who != "policy of its own")
    assert trainer.model is policy
    if who in ("policy", "reference", "both"):
        together = world_of(reference).config.memory.pool is world_of(policy).config.memory.pool  # type: ignore[attr-defined]
        assert together == (who == "policy")


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_run_with_a_reference_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """In bf16, where a frozen model has 2 bytes per param wherever it is; the first one is all in memory."""
    how: dict[str, Any] = {"bf16": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    if kind == "GRPO":
        how["model"] = saved(tmp_path / "policy")
    first, _ = make(kind, tmp_path / "run", True, gemini.MemoryBudget(cpu="64MiB"), **how)
    first.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    again, _ = make(kind, tmp_path / "run", True, budget(tmp_path, shared=False), **how)
    again.train(resume_from_checkpoint=True)
    assert_same_run(first, again)
    for trainer, tier in ((first, Tier.CPU), (again, Tier.NVME)):
        for model in beside(trainer):
            world = world_of(model)
            in_bf16 = 2 * sum(chunk.numel for chunk in world.layout.chunks)
            assert world.held(tier, "weights") == in_bf16 and sum(world.held(t, "weights") for t in Tier) == in_bf16


def test_what_shares_params_or_cannot_be_managed_stays_plain(tmp_path: Path) -> None:
    policy = llama()
    judge = torch.nn.ModuleList([policy.lm_head])
    odd = torch.nn.Linear(2, 2)
    odd.register_parameter("codes", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    config = gemini.GeminiConfig(precision="fp32", memory=budget(tmp_path, shared=False), device="cpu")
    with pytest.warns(UserWarning, match="Linear is evaluated outside of the budgets, since it cannot be managed"):
        found = manage_beside([judge, odd, torch.nn.ReLU()], policy, config, None)
    assert not is_managed(judge) and not is_managed(odd) and isinstance(found.memory, gemini.SharedBudget)
    with pytest.raises(gemini.BudgetExceeded, match="LlamaForCausalLM, which is evaluated beside"):
        manage_beside([other()], policy, replace(config, memory=gemini.MemoryBudget(cpu="10KiB")), None)


def test_what_is_chosen_for_the_step_of_training_is_not_of_a_model_beside_it(tmp_path: Path) -> None:
    """``step="fastest"`` takes no placement, which a model that is only evaluated has."""
    judge, hardware = other(), load_hardware("rtx4090")
    memory = budget(tmp_path, shared=False)
    config = gemini.GeminiConfig("bf16", memory, device="cpu", hardware=hardware, step="fastest", kept_blocks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = manage_beside([judge, judge], llama(), config, None)  # a program may prepare it twice
    assert is_managed(judge) and (found.step, found.kept_blocks) == ("fastest", 1)
    assert world_of(judge).config.kept_blocks is None


def test_what_stays_plain_is_brought_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By accelerate, but for what shares params with the model that is going to be managed."""
    brought: list[Any] = []
    monkeypatch.setattr(Accelerator, "prepare_model", lambda self, model, **how: brought.append(model))
    policy, odd = llama(), torch.nn.Linear(2, 2)
    odd.register_parameter("codes", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    accelerator = GeminiAccelerator(cpu=True, gemini_config=gemini.GeminiConfig(memory=budget(tmp_path, shared=False)))
    accelerator._gemini_beside = []
    for model in (odd, other(), torch.nn.ModuleList([policy.lm_head])):
        accelerator.prepare_model(model, evaluation_mode=True)
    with pytest.warns(UserWarning, match="Linear is evaluated outside of the budgets"):
        accelerator.prepare_model(policy)
    assert brought == [odd]


@pytest.mark.parametrize(("cpu", "left"), [("4MiB", 5 / 3), ("8MiB", 10 / 3), ("16MiB", 4), ("64MiB", 16)])
def test_with_a_drive_a_quarter_is_left_to_the_others_and_of_little_memory_more(
    cpu: str, left: float, tmp_path: Path
) -> None:
    """GRPO of two ranks in 4 MiB: what is staged for the reference does not shrink with the memory."""
    config = gemini.GeminiConfig(precision="bf16", memory=budget(tmp_path, False, cpu))
    assert budget_for(config, 1).later == pytest.approx(left * 2**20, abs=1)
    alone = gemini.GeminiConfig(precision="bf16", memory=gemini.MemoryBudget(cpu=cpu))
    assert budget_for(alone, 1).later == int(gemini.errors.parse_bytes(cpu) * 2 / 16)


OFFLOADED = {"gradient_checkpointing": True, "activation_offloading": True}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_activation_offloading_of_trl_is_the_one_of_the_engine(kind: str, tmp_path: Path) -> None:
    """And the arguments say afterwards what they were given, for the next trainer."""
    found = []
    for how in ({}, OFFLOADED, {**OFFLOADED, "activation_offloading": False}):
        trainer, record = make(kind, tmp_path / str(len(found)), True, gemini.MemoryBudget(cpu="64MiB"), **how)
        trainer.model.config.use_cache = False
        on_cpu = pytest.warns(UserWarning, match="has no effect") if how is OFFLOADED else contextlib.nullcontext()
        with on_cpu:  # where forward and backward run there is nothing to move to
            trainer.train()
        asked = world_of(trainer.model).config.offload_activations
        assert asked == ("cpu" if how is OFFLOADED else None)
        assert trainer.args.activation_offloading is (how is OFFLOADED)
        found.append(record.of("loss"))
    assert found[1] == found[2]


def test_activation_offloading_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both as True"):
        make("SFT", tmp_path, True, activation_offloading=True, gradient_checkpointing=False)
    plain = by_hand(gemini.MemoryBudget(cpu="64MiB"))
    with pytest.raises(ValueError, match="the model is managed already, and keeps activations where they are"):
        make("SFT", tmp_path, True, model=plain, **OFFLOADED)
