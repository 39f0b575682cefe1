"""``gemini plan --out FILE`` and then ``gemini sft --plan FILE``: what was printed is what runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import yaml
from rich.console import Console

import gemini
from gemini.jobs import JobError
from gemini.jobs.models import find_model
from gemini.jobs.train import Run, outline_of, trace_of
from gemini.jobs.train_options import Parser, options_of
from gemini.planning.traffic import by_name
from tests.cli.commands import Command, flat, llama_config, same_weights
from tests.world import steps_by_block, world_of


@pytest.fixture
def planned(tmp_path: Path, tiny_config: Path, gemini_command: Command) -> Path:
    path = tmp_path / "plan.json"
    gemini_command.ok("plan", tiny_config, "--cpu", "1MiB", "--nvme", "1MiB", "--compute", "cpu", "--batch-size", 2,
                      "--seq-len", 16, "--out", path)  # fmt: skip
    return path


def test_a_plan_that_was_printed_is_run(planned: Path, tiny_config: Path, text: Path, tmp_path: Path) -> None:
    words = ["--model_name_or_path", tiny_config, "--dataset_name", text, "--plan", planned, "--nvme_path", tmp_path]
    words += ["--max_steps", 2, "--save_strategy", "no", "--output_dir", tmp_path / "out"]
    run = Run(options_of(Parser("sft").read([*map(str, words)])), Console(quiet=True))
    plan = gemini.Plan.from_json(planned.read_text())
    world = world_of(run.model)
    assert world.plan == plan and plan.traffic, "and something moves"
    assert {tier: world.budget(tier) for tier in world.tiers} == plan.problem.budgets
    run.steps()
    assert world.moved_last_step() == by_name(plan.traffic)


def test_a_plan_for_another_step_is_refused(
    planned: Path, tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Command
) -> None:
    def refuse(*words: object, model: Path = tiny_config) -> str:
        given = ["--model_name_or_path", model, "--dataset_name", text, "--output_dir", tmp_path / "out"]
        result = gemini_command("sft", *given, "--plan", planned, *words)
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        return " ".join(result.stderr.split())

    there = ("--nvme_path", tmp_path)
    assert "needs nvme_path=" in refuse()
    longer = refuse(*there, "--max_length", 32)
    assert "was made with --max_length 16, and this job has 32. Leave it out here" in longer
    twice = refuse(*there, "--gradient_accumulation_steps", 2)
    assert "with --gradient_accumulation_steps 1, and this job has 2" in twice
    assert "with --states exact, and this job has compact" in refuse(*there, "--states", "compact")
    assert "the plan was made for durable=False, and here it is True" in refuse(*there, "--durable_every", 1)
    assert "batch_size 2, and this job has 3" in refuse(*there, "--per_device_train_batch_size", 3)
    assert "--gradient_checkpointing False" in refuse(*there, "--gradient_checkpointing")
    assert "--plan does not go with --activations: where" in refuse(*there, "--activations", "1MiB")
    other = tmp_path / "other.json"
    other.write_text(tiny_config.read_text().replace('"n_layer": 2', '"n_layer": 1'))
    assert "is of another model" in refuse(*there, model=other)
    planned.write_text("{}")
    assert f"--plan {planned}: this is JSON, but not a plan that Gemini wrote" in refuse(*there)


def test_a_plan_and_optim_say_one_rule(tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Command) -> None:
    words = ["--model_name_or_path", tiny_config, "--dataset_name", text, "--max_steps", 1, "--optim", "sgd"]
    for rule in ("adamw", "plain-sgd"):
        path = tmp_path / f"{rule}.json"
        step = ["--batch-size", 1, "--seq-len", 16, "--optimizer", rule, "--out", path]
        gemini_command.ok("plan", tiny_config, "--cpu", "2MiB", "--compute", "cpu", *step)
        result = gemini_command("sft", *words, "--plan", path, "--output_dir", tmp_path / rule)
        assert (result.exit_code == 0) is (rule == "plain-sgd"), result.output
        assert rule == "plain-sgd" or "optim='sgd' is PlainSGDRule(), and the model is to be managed for" in flat(
            result
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_of_a_plan_is_the_default(
    tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Command, accumulate: int
) -> None:
    """What is not said is the plan's, whatever the defaults are. The run repeats from its YAML."""
    path, out = tmp_path / "plan.json", tmp_path / "out"
    step = ["--batch-size", 4, "--seq-len", 32, "--accumulate", accumulate, "--gradient-checkpointing"]
    gemini_command.ok("plan", tiny_config, "--cpu", "2MiB", "--compute", "cpu", *step, "--out", path)
    base = ["--model_name_or_path", tiny_config, "--dataset_name", text, "--plan", path, "--max_steps", 1]
    result = gemini_command.ok("sft", *base, "--output_dir", out)
    assert "of max_length 32" in result.stdout
    less = gemini_command("sft", *base, "--output_dir", tmp_path / "less", "--per_device_train_batch_size", 1)
    assert f"{path} was made with --per_device_train_batch_size 4, and this job has 1. Leave" in flat(less)
    same = ["--per_device_train_batch_size", 4, "--output_dir", tmp_path / "same"]
    gemini_command.ok("sft", *base, *same)
    assert yaml.safe_load((tmp_path / "same" / "gemini.yaml").read_text())["per_device_train_batch_size"] == 4
    gemini_command.ok("sft", "--config", tmp_path / "same" / "gemini.yaml", "--output_dir", tmp_path / "again")


def test_pairs_of_a_plan_are_half_its_rows(
    planned: Path, tiny_config: Path, text: Path, gemini_command: Command
) -> None:
    """The model computes both rows of a pair, and the plan has room for as many rows as were planned."""
    words = ["--model_name_or_path", str(tiny_config), "--dataset_name", str(text), "--plan", str(planned)]
    words += ["--nvme_path", str(planned.parent)]
    for kind, pairs in (("sft", 2), ("dpo", 1), ("reward", 1)):
        assert options_of(Parser(kind).read([*words, "--use_cpu", "true"])).args.per_device_train_batch_size == pairs
    step = ["--compute", "cpu", "--cpu", "2MiB", "--batch-size", 1, "--seq-len", 16, "--out", planned]
    gemini_command.ok("plan", tiny_config, *step)
    refused = gemini_command("dpo", *words)
    assert "is of 1 row at a time, and here each example is 2: plan a multiple of that, --batch-size 2" in flat(refused)


@pytest.fixture
def by_block() -> Iterator[Any]:
    with (
        warnings.catch_warnings(),
        steps_by_block() as called,
    ):
        warnings.filterwarnings("error", message=".*one after another")
        yield called


def test_a_plan_block_by_block_is_run_so(by_block: Any, text: Path, tmp_path: Path, gemini_command: Command) -> None:
    """By itself, and in no other order; its bytes are those that it says."""
    config, path = llama_config(tmp_path / "llama.json", vocab_size=300), tmp_path / "plan.json"
    step = ("--seq-len", 16, "--accumulate", 4, "--order", "bfs", "--precision", "fp32")
    gemini_command.ok("plan", config, *step, "--compute", "cpu", "--cpu", "2MiB", "--nvme", "16MiB", "--out", path)
    words = ["--model_name_or_path", config, "--dataset_name", text, "--plan", path, "--nvme_path", tmp_path]
    words += ["--max_steps", 3, "--save_strategy", "no", "--output_dir", tmp_path / "out"]
    run = Run(options_of(Parser("sft").read([*map(str, words)])), Console(quiet=True))
    run.steps()
    assert by_block.call_count == 3
    plan, world = gemini.Plan.from_json(path.read_text()), world_of(run.model)
    assert world.plan == plan and plan.trace.micro_batches == 4
    assert world.moved_last_step() == by_name(plan.traffic)
    other = gemini_command("sft", *words[:8], "--output_dir", tmp_path / "dfs", "--order", "dfs")
    assert "was made with --order bfs, and this job has dfs" in flat(other)


def test_the_order_is_an_option_of_jobs(by_block: Any, text: Path, tmp_path: Path, gemini_command: Command) -> None:
    """With the same bits, from its own YAML as well."""
    config = llama_config(tmp_path / "llama.json", vocab_size=300)
    words = ["--model_name_or_path", config, "--dataset_name", text, "--max_length", 16, "--max_steps", 3]
    words += ["--gradient_accumulation_steps", 4, "--save_strategy", "no"]
    for order in ("bfs", "dfs"):
        gemini_command.ok("train", *words, "--order", order, "--output_dir", tmp_path / order)
        assert by_block.call_count == 3
    assert same_weights(tmp_path / "bfs", tmp_path / "dfs")
    gemini_command.ok("sft", "--config", tmp_path / "bfs" / "gemini.yaml", "--output_dir", tmp_path / "again")
    assert by_block.call_count == 6
    wrong = gemini_command("sft", *words, "--order", "breadth", "--output_dir", tmp_path / "wrong")
    assert wrong.exit_code == 2 and "--order: invalid choice: 'breadth'" in flat(wrong)


@pytest.mark.parametrize("order", ["bfs", "dfs"])
def test_a_step_on_a_gpu_is_traced_in_its_order(order: str, text: Path, tmp_path: Path) -> None:
    """Activations of all micro-batches exist at once block by block."""
    config = llama_config(tmp_path / "llama.json")
    words = ["--model_name_or_path", config, "--dataset_name", text, "--max_length", 16, "--order", order]
    words += ["--gradient_accumulation_steps", 4, "--output_dir", tmp_path / "out"]
    options = options_of(Parser("sft").read([*map(str, words)]))
    with mock.patch.object(type(options.args), "device", torch.device("cuda")):
        trace = trace_of(options, outline_of(find_model(str(config)), options)[0].model)
    assert trace is not None and trace.micro_batches == (4 if order == "bfs" else 1)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (("--tp", 3), "its step cannot be traced: tensor parallel over 3 ranks: .* not a multiple of 3"),
        (("--cp", 3), "its step cannot be traced: sequence_batch: 16 tokens cannot be cut into cp=3 parts"),
        ((), "gemini sft of a bloom without positions, which say no length: --max_length N"),
    ],
)
def test_a_step_that_cannot_be_traced_on_a_gpu_is_refused(
    more: tuple[object, ...], refusal: str, text: Path, tmp_path: Path
) -> None:
    config = llama_config(tmp_path / "llama.json")
    if not more:
        config.write_text('{"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300}')
    words = ["--model_name_or_path", config, "--dataset_name", text, "--output_dir", tmp_path / "out", *more]
    options = options_of(Parser("sft").read([*map(str, words), "--max_length", "16"]), 3)
    options.args.max_length = 16 if more else None  # as of YAML that says null
    outline = outline_of(find_model(str(config)), options)[0].model
    with (
        mock.patch.object(type(options.args), "device", torch.device("cuda")),
        pytest.raises(JobError, match=refusal),
    ):
        trace_of(options, outline)


@pytest.mark.parametrize("kind", ["reward", "sft"])
def test_what_is_traced_on_a_gpu_is_the_model_that_is_trained(
    kind: str, tiny_config: Path, text: Path, tmp_path: Path
) -> None:
    """With its own head, and with its adapters."""
    pytest.importorskip("peft")
    model, more = tmp_path / "model", ["--use_peft", "--lora_target_modules", "all-linear"] * (kind == "sft")
    config = transformers.AutoConfig.from_pretrained(tiny_config)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    words = [
        "--model_name_or_path",
        model,
        "--dataset_name",
        text,
        "--output_dir",
        tmp_path / "out",
        "--use_cpu",
        *more,
    ]
    options = options_of(Parser(kind).read([*map(str, words), "--max_length", "16"]))
    outline, _ = outline_of(find_model(str(model)), options)
    with mock.patch.object(type(options.args), "device", torch.device("cuda")):
        trace = trace_of(options, outline.model)
    assert trace is not None and trace.moments
    outline.manage(replace(options.config, device="cpu", trace=trace))  # which compares them


def test_a_lora_is_trained_by_its_plan(gemini_command: Command, tiny_config: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, planned = tmp_path / "model", tmp_path / "plan.json"
    base = ["--dataset_name", text, "--max_steps", 1, "--save_strategy", "no"]
    gemini_command.ok("sft", *base, "--model_name_or_path", tiny_config, "--output_dir", model)
    asked = ("--seq-len", 16, "--batch-size", 2, "--lora", 4)
    gemini_command.ok("plan", model, *asked, "--gpu", "0MiB", "--cpu", "64MiB", "--out", planned)
    lora = ["--use_peft", "--lora_r", 4, "--lora_alpha", 8, "--lora_target_modules", "all-linear", "--plan", planned]
    gemini_command.ok("sft", *base, "--model_name_or_path", model, *lora, "--output_dir", tmp_path / "adapted")
    assert (tmp_path / "adapted" / "adapter_model.safetensors").is_file()
