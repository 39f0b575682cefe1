"""Updates that begin inside backward as if the step clipped nothing: the bits of the plain loop, right or wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gemini
from tests.plain import Plain
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_state,
    engine_of,
    make_config,
    squares,
    train_plain,
)

ALWAYS, NEVER = 1e-6, 1e6
"""Thresholds that every step, and none, is clipped at."""


def model_of(path: Path, where: str = "disk", *, durable: bool = True, **how: Any) -> Any:
    """Blocks on a store."""
    raw = Blocks()
    config = make_config(raw, where, path, **how)
    memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme": "64MiB", "nvme_path": path, "durable": durable})
    return gemini.GeminiDDP(raw, replace(config, memory=memory))


def guessing(path: Path, where: str = "disk", **how: Any) -> tuple[Any, Any]:
    model = model_of(path, where, **how)
    return model, adam(model, step_in_backward=True, speculate=True)


def train(model: Any, optimizer: Any, number: int, clip: float, store: Path | None = None) -> None:
    """One step of the ordinary loop, with a commit behind it perhaps."""
    squares(model, number).backward()
    model.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()
    if store is not None:
        gemini.save_checkpoint(store, model, optimizer, extra=number, wait=False)


def counts(model: Any) -> tuple[int, int]:
    """Updates that were kept, and undone."""
    found = model.memory_report()["speculation"]
    return found["kept"], found["undone"]


def guess_always(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps before have shown."""
    monkeypatch.setattr(type(engine_of(model).updates.guesses), "pays", True)


THRESHOLDS = {
    "never": [NEVER] * 6,
    "always": [ALWAYS] * 6,
    "sometimes": [NEVER, ALWAYS, NEVER, NEVER, ALWAYS, NEVER],
}


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("which", THRESHOLDS)
@pytest.mark.parametrize("where", ["disk", "half", "standin"])
def test_the_bits_are_those_of_the_plain_loop(
    where: str, which: str, commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    guess_always(model, monkeypatch)
    for number, clip in enumerate(THRESHOLDS[which]):
        train(model, optimizer, number, clip, tmp_path if commits else None)
        train_plain(plain, [number], squares, clip=clip)
        assert_same_state(model, plain)
    kept, undone = counts(model)
    assert (kept > 0) == (which != "always") and (undone > 0) == (which != "never"), (kept, undone)
    engine_of(model).close()
