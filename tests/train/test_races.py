"""Random schedules give the bits of a run in which everything is done in turn: a few of tests/hunts/race_hunt.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.rules import Arrays
from tests.hunts import race_hunt

SEEDS = range(10_000, 10_025)  # not those of the hunt


@pytest.mark.parametrize("seeds", [SEEDS[:6], pytest.param(SEEDS[6:], marks=pytest.mark.slow)], ids=str)
def test_schedules_do_not_change_the_bits(seeds: range, tmp_path: Path, summary: Callable[[str], None]) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = race_hunt.draw(seed)
        try:
            seen += race_hunt.run(schedule, tmp_path)
        except BaseException:
            print(f"failed: python tests/hunts/race_hunt.py --seeds {seed}:{seed + 1}\n{schedule}")
            raise
    assert seen["evictions"] > len(seeds) and len(seen) > 10, seen
    summary(f"races: {len(seeds)} schedules, {dict(sorted(seen.items()))}")


@pytest.mark.parametrize("seeds", [SEEDS[:4], pytest.param(SEEDS[4:], marks=pytest.mark.slow)], ids=str)
def test_schedules_with_guesses_do_not_change_the_bits(
    seeds: range, tmp_path: Path, summary: Callable[[str], None]
) -> None:
    """Of steps that clip and steps that do not, read at any moment."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = race_hunt.guessing(race_hunt.draw(seed))
        own = tmp_path / str(seed)
        own.mkdir()
        try:
            seen += race_hunt.run(schedule, own)
        except BaseException:
            print(f"failed: python tests/hunts/race_hunt.py --guess --seeds {seed}:{seed + 1}\n{schedule}")
            raise
    assert seen["kept"] and seen["undone"], seen
    summary(f"races with guesses: {len(seeds)} schedules, {dict(sorted(seen.items()))}")


def test_the_hunt_sees_one_wrong_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is different in a schedule, not in the reference, is found."""
    schedule = next(s for s in map(race_hunt.draw, SEEDS) if not s.recipe.in_backward)
    race_hunt.reference(schedule.recipe)
    real, calls = race_hunt.kernels.update, []

    def wrong(arrays: Arrays, *args: Any) -> bool:
        done = real(arrays, *args)
        calls.append(1)
        if len(calls) == 5:
            arrays.states["exp_avg"][7] *= 1.01
        return done

    monkeypatch.setattr(race_hunt.kernels, "update", wrong)
    with pytest.raises(AssertionError, match="differ|losses|norms|after"):
        race_hunt.run(schedule, tmp_path)
    assert len(calls) > 5
