"""``gemini trace`` from a config: what is said, the file, and what it refuses; and plans of what it traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import gemini
from tests.cli.commands import FOUR_BLOCKS, Command, llama_config, refused

LLAMA2_70B = Path(__file__).parent / "configs" / "llama2_70b.json"


def test_a_trace_is_said_and_written_as_it_is(gemini_command: Command, tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = gemini_command.ok("trace", tiny_config, "--batch-size", 3, "--gradient-checkpointing", "--out", out)
    found = gemini.MemoryTrace.from_json(out.read_text())
    said = " ".join(result.stdout.split())
    assert " ".join(str(found).split()) in said and f"gemini plan --trace {out}" in said
    assert found.batch["input_ids"] == (3, 32)  # the model's positions
    assert found.checkpointing and found.target == "cuda" and found.precision == "bf16"


def test_what_is_traced_is_what_was_asked(gemini_command: Command, tiny_config: Path, tmp_path: Path) -> None:
    def traced(attention: str) -> gemini.MemoryTrace:
        options = ["--seq-len", 16, "--precision", "fp32", "--target", "cpu", "--layers", 1, "--out", tmp_path / "t"]
        gemini_command.ok("trace", tiny_config, *options, "--attn-implementation", attention)
        return gemini.MemoryTrace.from_json((tmp_path / "t").read_text())

    found, fused = traced("eager"), traced("sdpa")
    assert (found.batch["labels"], found.precision, found.target) == ((1, 16), "fp32", "cpu")
    assert not any(".1." in param.name for param in found.params)
    assert sum(m.num_ops for m in found.moments) > sum(m.num_ops for m in fused.moments)


def test_a_plan_from_a_config_is_that_of_its_trace(gemini_command: Command, tiny_config: Path, tmp_path: Path) -> None:
    """The same answer, but for what to change: a trace says nothing of the step with checkpointing."""
    sizes, out = ("--gpu", "4MiB", "--cpu", "64MiB"), tmp_path / "trace.json"
    gemini_command.ok("trace", tiny_config, "--out", out)
    by_config = gemini_command.told("plan", tiny_config, *sizes)
    by_trace = gemini_command.told("plan", tiny_config, "--trace", out, *sizes)
    assert {**by_config, "alternatives": []} == {**by_trace, "alternatives": []}
    cut = gemini_command("plan", tiny_config, "--layers", 1, "--trace", out, *sizes)
    refused(cut, f"--trace {out} is of another model", "'transformer.h.1.")


def test_a_micro_batch_is_chosen_that_fits(gemini_command: Command, tiny_config: Path) -> None:
    """The largest of those that divide the sequences of a step: where eight at once are a little too much, four."""
    sizes = ("--cpu", "64MiB", "--gradients", "accumulate", "--json")
    eight = ("plan", tiny_config, "--batch-size", 8, "--accumulate", 2, *sizes)
    needed = re.search(r"at least (\d+) MiB", gemini_command.told(*eight, "--gpu", "1MiB")["refusal"])
    assert needed
    gpu = ("--gpu", f"{int(needed[1]) - 1}MiB")
    refusal = gemini_command(*eight, *gpu)
    assert refusal.exit_code == 2
    others = {other["options"]: other["fits"] for other in json.loads(refusal.stdout)["alternatives"]}
    assert others["--gradient-checkpointing --batch-size 1 --accumulate 16"] and not others["as asked"]
    said = gemini_command.told(*eight, *gpu, "--fastest")
    assert said["fits"] and said["batch"]["input_ids"] == [4, 32] and said["accumulate"] == 4
    assert said["tokens"] == 16 * 32 and said["gradients"] == "accumulate"


def test_block_by_block_is_planned_with_no_sums_but_a_stages(
    gemini_command: Command, tiny_config: Path, tmp_path: Path
) -> None:
    """Of a model whose head is its own: one that reads a param in two stages is refused."""
    sizes = ("--batch-size", 1, "--accumulate", 4, "--order", "bfs", "--gpu", "2GiB", "--cpu", "64MiB")
    config = llama_config(tmp_path / "llama.json", **FOUR_BLOCKS)
    said = gemini_command.told("plan", config, *sizes)
    assert (said["order"], said["accumulate"], said["gradients"]) == ("bfs", 4, "retain")
    assert said["tokens"] == 4 * said["batch"]["input_ids"][1]
    assert 2 * said["needs"]["grad"] == said["needs"]["exp_avg"]
    refused(gemini_command("plan", tiny_config, *sizes), "--order bfs: ", "is read in more than one of its stages")


def test_block_by_block_is_refused_where_a_run_computes_one_after_another(
    gemini_command: Command, tmp_path: Path
) -> None:
    """What ``train_step`` would only warn of when the plan runs: dropout, and a loss of all blocks."""
    sizes = ("--batch-size", 1, "--accumulate", 4, "--gpu", "2GiB", "--cpu", "64MiB")
    config = llama_config(tmp_path / "llama.json", **FOUR_BLOCKS, attention_dropout=0.1)
    refused(gemini_command("plan", config, *sizes, "--order", "bfs"), "attention_dropout of the model is 0.1", "dfs")
    assert gemini_command.told("plan", config, *sizes, "--order", "dfs")["order"] == "dfs"


@pytest.mark.slow
def test_the_largest_llama_2_is_planned_on_a_workstation(gemini_command: Command) -> None:
    sizes = ("--gpu", "24GiB", "--cpu", "64GiB", "--nvme", "1TB", "--machine", "rtx4090")
    said = gemini_command.told("plan", LLAMA2_70B, *sizes, "--gradient-checkpointing")
    assert said["fits"] and said["num_params"] == 68_976_648_192
    assert said["bytes_per_param"] == pytest.approx(12.0, abs=0.01)
    assert all(sum(held.values()) <= said["budgets"][tier] for tier, held in said["held"].items())
    refusal = gemini_command("plan", LLAMA2_70B, *sizes, "--json")
    assert refusal.exit_code == 2
    as_asked, checkpointed, *_ = json.loads(refusal.stdout)["alternatives"]
    assert not as_asked["fits"] and checkpointed["fits"]
    assert checkpointed["options"] == "--gradient-checkpointing"
