"""``gemini plan --out FILE`` and then ``gemini train --plan FILE``: what was printed is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import gemini
from gemini.jobs.settings import TrainSettings
from gemini.jobs.train import TrainRun
from gemini.planning.trace import Source
from gemini.planning.traffic import by_name
from gemini.tiers import Tier
from tests.cli.commands import Command
from tests.world import world_of


@pytest.fixture
def planned(tmp_path: Path, tiny_config: Path, gemini_command: Command) -> Path:
    path = tmp_path / "plan.json"
    made = gemini_command("plan", tiny_config, "--cpu", "1MiB", "--nvme", "1MiB", "--compute", "cpu", "--batch-size", 2,
                          "--seq-len", 16, "--out", path)  # fmt: skip
    assert made.exit_code == 0, made.stderr
    return path


def settings(config: Path, text: Path, folder: Path, **more: Any) -> TrainSettings:
    return TrainSettings(model=config, data=(text,), batch_size=2, seq_len=16, steps=2, out=folder / "out",
                         nvme_path=folder, **more)  # fmt: skip


def test_a_plan_that_was_printed_is_run(planned: Path, tiny_config: Path, text: Path, tmp_path: Path) -> None:
    run = TrainRun(settings(tiny_config, text, tmp_path, plan=planned), Console(quiet=True))
    plan = gemini.Plan.from_json(planned.read_text())
    world = world_of(run.model)
    assert world.plan == plan and plan.traffic, "and something moves"
    assert {tier: world.budget(tier) for tier in world.tiers} == plan.problem.budgets
    run.run()
    assert world.moved_last_step() == by_name(plan.traffic)


def test_a_plan_for_another_step_is_refused(
    planned: Path, tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Command
) -> None:
    def refuse(*words: object) -> str:
        result = gemini_command("train", "--model", tiny_config, "--data", text, "--out", tmp_path / "out", "--plan",
                                planned, *words)  # fmt: skip
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        return " ".join(result.stderr.split())

    there = ("--nvme-path", tmp_path, "--batch-size", 2)
    assert "give --nvme-path" in refuse("--batch-size", 2, "--seq-len", 16)
    longer = refuse(*there, "--seq-len", 32)
    assert "was made with --seq-len 16, and this job is with --seq-len 32. Leave it out here" in longer
    assert "with --accumulate 1, and this job is with --accumulate 2" in refuse(*there, "--accumulate", 2)
    assert "with --states exact, and this job is with --states compact" in refuse(*there, "--states", "compact")
    assert "without a durable store: leave --durable-every out" in refuse(*there, "--durable-every", 1)
    assert "with --batch-size 2, and this job is with --batch-size 3" in refuse(*there[:2], "--batch-size", 3)
    assert "without --gradient-checkpointing" in refuse(*there, "--seq-len", 16, "--gradient-checkpointing")
    assert "--activations is the plan's to say" in refuse(*there, "--seq-len", 16, "--activations", "1MiB")
    assert "is of another model" in refuse(*there, "--seq-len", 16, "--layers", 1)
    planned.write_text("{}")
    assert f"--plan {planned}: this is JSON, but not a plan that Gemini wrote" in refuse(*there, "--seq-len", 16)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_of_a_plan_is_the_default(
    tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Command, accumulate: int
) -> None:
    """What is not said is the plan's, whatever the defaults are; what is said and smaller is told. The run repeats."""
    path, out = tmp_path / "plan.json", tmp_path / "out"
    step = ["--batch-size", 4, "--seq-len", 32, "--accumulate", accumulate, "--gradient-checkpointing"]
    gemini_command.ok("plan", tiny_config, "--cpu", "2MiB", "--compute", "cpu", *step, "--out", path)
    base = ["--model", tiny_config, "--data", text, "--plan", path, "--steps", 1, "--device", "cpu"]
    result = gemini_command.ok("train", *base, "--out", out)
    told = [line for line in result.stdout.splitlines() if line.startswith("--plan")]
    assert not told and "sequences of 32" in result.stdout
    written = yaml.safe_load((out / "gemini.yaml").read_text())
    assert written["batch-size"] == 4 and written["accumulate"] == accumulate and written["gradient-checkpointing"]
    less = gemini_command.ok("train", *base, "--out", tmp_path / "less", "--batch-size", 1)
    assert f"--plan {path} was made with --batch-size 4, and this job is with --batch-size 1: its speed" in less.stdout
    again = gemini_command.ok("train", "--config", tmp_path / "less" / "gemini.yaml", "--out", tmp_path / "again")
    assert "this job is with --batch-size 1" in again.stdout, "1 is the usual default, too"


def test_the_jobs_own_step_is_traced_where_activations_need_room(tiny_config: Path, text: Path, tmp_path: Path) -> None:
    run = TrainRun(settings(tiny_config, text, tmp_path, device="standin", gpu_memory="4MiB"), Console(quiet=True))
    world = world_of(run.model)
    assert world.plan.trace.source is Source.AHEAD and world.plan.trace.tokens == 32
    assert world.held(Tier.GPU, "activations") == world.problem.activations > 0
    run.run()
