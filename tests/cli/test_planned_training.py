"""``gemini plan --out FILE`` and then ``gemini train --plan FILE``: what was printed is what runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gemini
from gemini.jobs.settings import TrainSettings
from gemini.jobs.train import TrainRun
from gemini.planning.trace import Source
from gemini.planning.traffic import by_name
from gemini.tiers import Tier


@pytest.fixture
def planned(tmp_path: Path, tiny_config: Path, gemini_command: Callable[..., Any]) -> Path:
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
    engine = run.model._gemini_engine
    assert engine.decision.plan == plan and plan.traffic, "and something moves"
    assert {tier: engine.store.ledger.budget(tier) for tier in engine.store.ledger.tiers} == plan.problem.budgets
    run.run()
    assert engine.store.mover.watch.moved_last_step.counts() == by_name(plan.traffic)


def test_a_plan_for_another_step_is_refused(
    planned: Path, tiny_config: Path, text: Path, tmp_path: Path, gemini_command: Callable[..., Any]
) -> None:
    def refuse(*words: object) -> str:
        result = gemini_command("train", "--model", tiny_config, "--data", text, "--out", tmp_path / "out", "--plan",
                                planned, *words)  # fmt: skip
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        return " ".join(result.stderr.split())

    there = ("--nvme-path", tmp_path, "--batch-size", 2)
    assert "give --nvme-path" in refuse("--batch-size", 2, "--seq-len", 16)
    assert "is for 32 tokens in a batch" in refuse(*there, "--seq-len", 32)
    assert "without --gradient-checkpointing" in refuse(*there, "--seq-len", 16, "--gradient-checkpointing")
    assert "--activations is the plan's to say" in refuse(*there, "--seq-len", 16, "--activations", "1MiB")
    assert "is of another model" in refuse(*there, "--seq-len", 16, "--layers", 1)
    planned.write_text("{}")
    assert f"--plan {planned}: this is JSON, but not a plan that Gemini wrote" in refuse(*there, "--seq-len", 16)


def test_the_jobs_own_step_is_traced_where_activations_need_room(tiny_config: Path, text: Path, tmp_path: Path) -> None:
    run = TrainRun(settings(tiny_config, text, tmp_path, device="standin", gpu_memory="4MiB"), Console(quiet=True))
    engine = run.model._gemini_engine
    assert engine.decision.plan.trace.source is Source.AHEAD and engine.decision.plan.trace.tokens == 32
    assert engine.store.ledger.held(Tier.GPU, "activations") == engine.decision.problem.activations > 0
    run.run()
