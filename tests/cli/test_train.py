"""``gemini sft`` and its kin from the command line: they learn, keep to their budgets, stop and go on without losing a
bit.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

from gemini.jobs import parts
from gemini.jobs.models import byte_tokenizer
from gemini.planning.rules import RULES
from tests.cli.commands import Command, flat, refused, same_weights
from tests.world import steps_by_block

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def train(tiny_config: Path, text: Path) -> Command:
    """``train("--output_dir", out, ...)``: a tiny model on a little text, a checkpoint every 5 of 10 steps."""
    return Command("sft", *base(tiny_config, text), "--max_steps", 10, "--save_steps", 5)


def base(config: Path, text: Path) -> list[object]:
    given: dict[str, object] = {
        "model_name_or_path": config, "dataset_name": text, "max_length": 16, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def losses_of(output: str) -> list[float]:
    return [float(loss.rstrip(",")) for loss in re.findall(r"^step \d+/\d+  loss (\S+)", output, re.MULTILINE)]


def rows_of(out: Path) -> list[dict[str, float]]:
    """What was logged of steps, as the Trainer keeps it."""
    rows = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [row for row in rows if {"loss", "eval_loss"} & row.keys()]


def test_it_learns_reports_and_saves(train: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train.ok("--output_dir", out, "--cpu_memory", "64MiB", "--max_steps", 40, "--save_total_limit", 2)
    losses = losses_of(result.stdout)
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    before = result.stdout.partition("step 1/40")[0]
    assert "data: 1 row of text; byte-level tokens" in before and "packed into 251 sequences of" in flat(result)
    assert re.search(r"^plan: GPT2LMHeadModel, [\d,]+ params", before, re.MULTILINE)
    assert re.search(r"^cpu: stayed within its budget, peak \S+ \wiB of 64 MiB$", result.stdout, re.MULTILINE)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.use_cache, "only training goes without the cache"
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-35", "checkpoint-40"}
    row = rows_of(out)[-1]
    assert row["tokens_per_second"] > 0 and row["cpu_peak_bytes"] >= row["cpu_bytes"] > 0 and row["seconds_left"] == 0
    history = json.loads((out / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
    for name in ("tokens_per_second", "step_seconds", "seconds_left", "cpu_bytes", "cpu_peak_bytes"):
        assert row[name] == history[-1][name], "and so have trackers"


# ---- every trainer ---------------------------------------------------------------------------------------------------

PAIR = {"prompt": "{n} and one is", "chosen": " {m}.", "rejected": " {n}?"}
DATA = {
    "sft": {"prompt": "{n} and one is", "completion": " {m}."},
    "dpo": PAIR,
    "reward": PAIR,
    "kto": {"prompt": "{n} and one is", "completion": " {m}."},
    "grpo": {"prompt": "{n} and one is"},
    "rloo": {"prompt": "{n} and one is"},
    "distillation": {"prompt": "{n} and one is"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with weights and the tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=258,
        max_position_embeddings=128, eos_token_id=256, bos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def of_kind(kind: str, model: Path, folder: Path, *more: object) -> Command:
    rows = [{name: form.format(n=n, m=n + 1) for name, form in DATA[kind].items()} for n in range(40)]
    if kind == "kto":
        rows = [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]  # type: ignore[dict-item]
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", model, "--dataset_name", folder / f"{kind}.jsonl", "--learning_rate", 1e-3]
    words += ["--logging_steps", 1, "--max_steps", 4, "--save_steps", 2, "--per_device_train_batch_size", 4]
    if kind in ("grpo", "rloo"):
        words += ["--reward_funcs", "tests.cli.rewards.variety", "--num_generations", 4, "--max_completion_length", 6]
    if kind == "distillation":
        teacher = transformers.LlamaConfig.from_pretrained(model, hidden_size=64)
        transformers.LlamaForCausalLM(teacher).save_pretrained(folder / "teacher")
        words += ["--teacher_model_name_or_path", folder / "teacher", "--max_completion_length", 6]
    return Command(kind, *words, *more)


ONE_BY_ONE = {
    "kto": "compute_loss calls the model more than once",
    **dict.fromkeys(("grpo", "rloo", "distillation"), "prepares its batches for several steps"),
}
SLOW_ORDERS = ("kto", "rloo", "distillation")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW_ORDERS else []) for kind in DATA]
)
def test_every_trainer_in_both_orders(kind: str, llama: Path, tmp_path: Path) -> None:
    """With the same bits and logs. Block by block, or a warning says once why not."""
    rows: list[Any] = []
    for order in ("bfs", "dfs"):
        words = ["--order", order, "--gradient_accumulation_steps", 2, "--save_strategy", "no"]
        with (
            warnings.catch_warnings(record=True) as warned,
            steps_by_block() as by_block,
        ):
            warnings.simplefilter("always")
            of_kind(kind, llama, tmp_path, *words).ok("--output_dir", tmp_path / order)
        said = [str(each.message) for each in warned if "one after another" in str(each.message)]
        why = ONE_BY_ONE.get(kind) if order == "bfs" else None
        assert (len(said) == 1 and why in said[0]) if why else not said, said
        tried = kind == "kto"  # what its loss does is not known before
        assert by_block.call_count == (0 if order == "dfs" else tried if why else 4)
        kept = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "rewards/margins", "entropy")
        rows.append([{name: row.get(name) for name in kept} for row in rows_of(tmp_path / order)])
    assert rows[0] == rows[1]
    assert same_weights(tmp_path / "bfs", tmp_path / "dfs")


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", DATA)
def test_every_trainer_goes_on_from_a_checkpoint(kind: str, lora: bool, llama: Path, tmp_path: Path) -> None:
    """With the same bits, in a budget that needs the drive; the reference of DPO and KTO takes no memory, and that of
    RLOO is in the budget.
    """
    more: list[object] = ["--use_peft", "--lora_r", 2, "--lora_target_modules", "all-linear"] if lora else []
    run, out, again = of_kind(kind, llama, tmp_path, *more), tmp_path / "out", tmp_path / "again"
    result = run.ok("--output_dir", out)
    assert len(losses_of(result.stdout)) == 4 and "\nplan: " in result.stdout
    memory = "1MiB" if lora or kind in ("rloo", "distillation") else "700KiB"
    tight = ["--cpu_memory", memory, "--nvme_memory", "8MiB", "--nvme_path", tmp_path]
    rest = run.ok("--output_dir", again, "--resume_from_checkpoint", out / "checkpoint-2", *tight)
    assert losses_of(rest.stdout) == losses_of(result.stdout)[2:]
    assert same_weights(out, again, "adapter_model.safetensors" if lora else "model.safetensors")
    has_another = kind == "distillation" or (kind == "rloo" and not lora)
    assert ("models that are evaluated beside it: " in rest.stdout) == has_another


def test_a_reward_that_is_none_is_refused(llama: Path, tmp_path: Path) -> None:
    run = of_kind("grpo", llama, tmp_path)
    refused(
        run("--output_dir", tmp_path / "out", "--reward_funcs", "tests.nothing"),
        "--reward_funcs tests.nothing",
        begun=True,
    )


def test_a_reward_model_that_reads_no_chats_is_refused(llama: Path, tmp_path: Path) -> None:
    run, rows, judge = of_kind("grpo", llama, tmp_path), tmp_path / "chats.jsonl", tmp_path / "judge"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "one and one is"}]}) + "\n")
    config = transformers.AutoConfig.from_pretrained(llama, num_labels=1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(judge)
    refused(
        run("--output_dir", tmp_path / "out", "--dataset_name", rows, "--reward_model_name_or_path", judge),
        "a tokenizer without a chat template",
        begun=True,
    )


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("name", RULES)
def test_it_trains_by_every_rule_that_a_plan_can_be_made_for(name: str, train: Command, tmp_path: Path) -> None:
    """And goes on from a checkpoint with the same bits."""
    out, again, lr = tmp_path / "out", tmp_path / "again", 1e-3 if name == "lion" else 1e-2
    how = ["--optimizer", name, "--learning_rate", lr]
    losses = losses_of(train.ok("--output_dir", out, *how).stdout)
    assert len(losses) == 10 and losses[-1] < losses[0]
    resumed = train.ok("--output_dir", again, *how, "--resume_from_checkpoint", out / "checkpoint-5")
    assert losses_of(resumed.stdout) == losses[5:]


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_store(train: Command, tiny_config: Path, text: Path, tmp_path: Path) -> None:
    """No checkpoint was ever written. Another run does not replace its states, and goes on from them if told to. The
    store is on two drives.
    """
    whole = train.ok("--output_dir", tmp_path / "whole", "--max_steps", 60)
    store, drive, out = tmp_path / "store", tmp_path / "drive", tmp_path / "out"
    for folder in (store, drive):
        folder.mkdir()
    durable = ["--durable_every", 1, "--nvme_path", store, drive, "--nvme_memory", "64MiB", "--save_strategy", "no"]
    durable += ["--max_steps", 60]
    how = [*base(tiny_config, text), "--output_dir", out, *durable]
    command = [sys.executable, "-m", "gemini", "sft", *map(str, how)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 4/60"):
            run.kill()
            break
    run.stdout.close()
    assert run.wait(60) == -signal.SIGKILL
    held = f"holds the durable store of the run in {out}"
    refused(train("--output_dir", tmp_path / "other", *durable), held, begun=True)
    refused(train("--output_dir", out, *durable), "Continue it with --resume_from_checkpoint auto", begun=True)
    rest = train.ok("--output_dir", out, *durable, "--resume_from_checkpoint", "auto")
    found = re.search(r"resuming from the store in \S+ after step (\d+)", flat(rest))
    # The line of step 4 comes before its commit begins, which waits for that of step 3.
    assert found is not None and 2 <= int(found[1]) < 60 and len(losses_of(rest.stdout)) == 60 - int(found[1])
    assert losses_of(rest.stdout) == losses_of(whole.stdout)[-len(losses_of(rest.stdout)) :]
    assert same_weights(tmp_path / "whole", out)
    gc.collect()  # the run in this process had the store
    more = ["--max_steps", 61, "--resume_from_checkpoint", store, "--save_strategy", "no"]
    assert "after step 60" in train.ok("--output_dir", tmp_path / "more", *more).output


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_resumed_run_is_the_uninterrupted_run(train: Command, tmp_path: Path, precision: str) -> None:
    """Dropout, schedule, warm-up, accumulation and the order of the text included; under another budget."""
    common = ["--gradient_accumulation_steps", 2, "--warmup_steps", 3, "--lr_scheduler_type", "cosine"]
    common += ["--bf16", "false"] if precision == "fp32" else [f"--{precision}", "true"]
    whole = train.ok("--output_dir", tmp_path / "whole", *common)
    resume = ["--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-5"]
    rest = train.ok("--output_dir", tmp_path / "rest", *common, "--cpu_memory", "16MiB", *resume)
    assert losses_of(rest.stdout) == losses_of(whole.stdout)[5:]
    assert same_weights(tmp_path / "whole", tmp_path / "rest")


def test_resume_auto_goes_on_or_says_that_there_is_nothing(train: Command, tmp_path: Path) -> None:
    out, auto = tmp_path / "out", ["--output_dir", tmp_path / "out", "--resume_from_checkpoint", "auto"]
    assert "no checkpoint in" in train.ok(*auto, "--max_steps", 5).stdout
    before = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()  # as after a death between the last checkpoint and the end
    assert losses_of(train.ok(*auto, "--max_steps", 5).stdout) == []
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    past = train.ok(*auto, "--max_steps", 3)
    assert "The model of step 5 is in" in flat(past) and "To go on" not in past.stdout and not losses_of(past.stdout)
    assert same_weights(out, out / "checkpoint-5")
    more = train.ok(*auto, "--max_steps", 8)
    assert "after step 5" in more.stdout and len(losses_of(more.stdout)) == 3
    shutil.rmtree(out / "checkpoint-8")
    train.ok(*auto, "--max_steps", -1, "--num_train_epochs", 0.1)
    assert [row["step"] for row in rows_of(out)] == list(range(1, 14)), "steps that are made again have one row"


def test_resuming_with_other_text_is_refused(train: Command, tmp_path: Path, text: Path) -> None:
    train.ok("--output_dir", tmp_path / "out")
    text.write_text("other text " * 100)
    again = ["--output_dir", tmp_path / "out", "--resume_from_checkpoint", "auto", "--max_steps", 20]
    refused(train(*again), "stands in the middle of other data: its content of rows", begun=True)


def test_a_damaged_checkpoint_is_a_plain_refusal(train: Command, tmp_path: Path) -> None:
    train.ok("--output_dir", tmp_path / "out")
    for path in (tmp_path / "out" / "checkpoint-10" / "gemini").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = ["--output_dir", tmp_path / "out", "--max_steps", 20, "--resume_from_checkpoint", "auto"]
    refused(train(*again), begun=True)


def test_a_run_that_explodes_is_stopped(train: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    how = ["--learning_rate", 1e30, "--max_steps", 100, "--save_strategy", "no"]
    refused(train("--output_dir", out, *how), "The gradients of step 2 hold inf or NaN", begun=True)
    assert not (out / "model.safetensors").exists() and (out / "checkpoint-1").is_dir()


# ---- memory, and what else the options do ----------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused(train: Command, tmp_path: Path) -> None:
    with parts.claimed(tmp_path / "out"):
        refused(train("--output_dir", tmp_path / "out"), "is in use: another job writes into it")


def test_a_model_that_does_not_fit_is_refused_with_a_command(train: Command, tmp_path: Path) -> None:
    how = ["--cpu_memory", "150KiB", "--states", "exact"]
    result = train("--output_dir", tmp_path / "out", *how)
    refused(result, "missing", "--nvme_path FOLDER --nvme_memory", "gemini plan MODEL --alternatives", begun=True)


def test_checkpointed_activations_and_tiles(train: Command, tmp_path: Path) -> None:
    """Neither changes what is learned; tiles of tokens are within rounding."""
    how = ["--save_strategy", "no", "--bf16", "false", "--output_dir"]
    plain = losses_of(train.ok(*how, tmp_path / "plain").stdout)
    assert losses_of(train.ok(*how, tmp_path / "checkpointed", "--gradient_checkpointing").stdout) == plain
    nvme = ["--gradient_checkpointing", "--offload_activations", "nvme", "--nvme_path", tmp_path]
    assert losses_of(train.ok(*how, tmp_path / "offloaded", *nvme).stdout) == plain
    tiled = train.ok(*how, tmp_path / "tiled", "--tile_tokens", 8)
    assert losses_of(tiled.stdout) == pytest.approx(plain, rel=1e-3) and " tok/s" in tiled.stdout


def test_a_run_can_be_repeated_from_its_yaml(train: Command, gemini_command: Command, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    losses = losses_of(train.ok("--output_dir", out, "--max_steps", 3).stdout)
    repeated = gemini_command.ok("sft", "--config", out / "gemini.yaml", "--output_dir", again)
    assert losses_of(repeated.stdout) == losses and "max_steps: 3" in (again / "gemini.yaml").read_text()


def test_a_base_in_4_bits_goes_on_from_a_checkpoint(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install '.[quantized]'")
    model, out, again = tmp_path / "base", tmp_path / "out", tmp_path / "again"
    train.ok("--output_dir", model, "--max_steps", 1, "--save_strategy", "no")
    how = ["--model_name_or_path", model, "--use_peft", "--lora_r", 2, "--lora_target_modules", "all-linear"]
    how += ["--load_in_4bit", "--max_steps", 4, "--save_steps", 2]
    losses = losses_of(train.ok("--output_dir", out, *how).stdout)
    rest = train.ok("--output_dir", again, *how, "--resume_from_checkpoint", out / "checkpoint-2")
    assert losses_of(rest.stdout) == losses[2:] and len(losses) == 4
    assert same_weights(out, again, "adapter_model.safetensors")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    refused(train("--output_dir", tmp_path / "no", *how), "bitsandbytes", begun=True)


def test_what_the_files_of_a_model_lack_is_said(train: Command, tmp_path: Path) -> None:
    """A classifier has no head that predicts tokens."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=258
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    how = ["--model_name_or_path", tmp_path / "model", "--bytes", "--max_steps", 1]
    result = train.ok("--output_dir", tmp_path / "out", *how)
    assert "not in its files, and therefore drawn at random: lm_head.weight\n" in result.stdout


@pytest.mark.slow
def test_compiled_blocks_and_another_attention(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is compiled too, and the same wherever chunks live."""
    from gemini.jobs import train as job
    from gemini.train.modules.changing import compile_blocks

    num_blocks: list[int] = []
    monkeypatch.setattr(job, "compile_blocks", lambda model, **how: num_blocks.append(compile_blocks(model, **how)))
    runs = {}
    nvme, eager = ["--cpu_memory", "1600KiB", "--nvme_path", tmp_path], ["--attn_implementation", "eager"]
    compiled = ["--torch_compile_backend", "aot_eager"]  # which to transformers says --torch_compile as well
    ways = {"ram": [*eager, *compiled], "disk": [*eager, "--torch_compile", *compiled, *nvme], "sdpa": []}
    for name, more in ways.items():
        runs[name] = train.ok("--output_dir", tmp_path / name, "--max_steps", 2, *more).stdout
    assert num_blocks == [2, 2] * 2  # the model that is planned for, and the one that is drawn
    assert "bf16, eager attention\n" in runs["ram"] and "bf16, sdpa attention\n" in runs["sdpa"]
    assert losses_of(runs["ram"]) == losses_of(runs["disk"])
    assert same_weights(tmp_path / "ram", tmp_path / "disk")
    refused(
        train("--output_dir", tmp_path / "out", "--torch_compile_backend", "none"),
        "--torch_compile",
        "'none'",
        begun=True,
    )


def test_attention_that_cannot_be_is_refused(train: Command, tmp_path: Path) -> None:
    for asked, said in {"flash_attention_2": ["FlashAttention2"], "fast": ["fast", "is not supported"]}.items():
        refused(train("--output_dir", tmp_path / "out", "--attn_implementation", asked), *said, begun=True)


@pytest.mark.parametrize(("optim", "rate"), [("adamw_torch", 1e-2), ("sgd", 0.3)])
def test_the_run_is_that_of_the_stock_trainer(
    tiny_config: Path, text: Path, tmp_path: Path, optim: str, rate: float
) -> None:
    """transformers' Trainer with torch's optimizer, from the same weights on the same sequences."""

    from gemini.jobs.train import Run
    from gemini.jobs.train_options import Parser, options_of

    given = ["--bf16", "false", "--max_steps", 6, "--save_strategy", "no", "--output_dir", tmp_path / "out"]
    given += ["--optim", optim, "--learning_rate", rate]
    words = [*base(tiny_config, text), "--gradient_accumulation_steps", 2, "--weight_decay", 0.1, *given]
    run = Run(options_of(Parser("sft").read([*map(str, words)])), Console(quiet=True))
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    rows = [
        {"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in run.trainer.train_dataset["input_ids"]
    ]
    run.steps()
    ours = [row["loss"] for row in run.trainer.state.log_history if "loss" in row]

    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_config))
    plain.load_state_dict(weights)
    plain.loss_type = "ForCausalLM"
    same = "learning_rate lr_scheduler_type weight_decay per_device_train_batch_size gradient_accumulation_steps seed"
    same += " optim data_seed max_steps logging_steps use_cpu save_strategy report_to"
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "stock"), **{name: getattr(run.trainer.args, name) for name in same.split()}
    )
    stock = transformers.Trainer(
        model=plain, args=arguments, train_dataset=rows, data_collator=transformers.default_data_collator
    )
    stock.train()
    theirs = [row["loss"] for row in stock.state.log_history if "loss" in row]
    assert ours == pytest.approx(theirs, rel=2e-5) and ours[-1] < 0.95 * ours[0]
