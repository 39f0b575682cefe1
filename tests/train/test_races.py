"""Random schedules give the bits of a run in which everything is done in turn: a few of tests/hunts/race_hunt.py."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.rules import Arrays
from tests.hunts import fault_hunt, race_hunt
from tests.hunts.fault_hunt import Child
from tests.hunts.faults import KINDS

SEEDS = range(10_000, 10_025)  # not those of the hunt


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("guesses", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("seeds", [SEEDS[:6], pytest.param(SEEDS[6:], marks=pytest.mark.slow)], ids=str)
def test_schedules_do_not_change_the_bits(
    seeds: range, guesses: bool, tmp_path: Path, summary: Callable[[str], None]
) -> None:
    """With guesses: of steps that clip and steps that do not, read at any moment."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule, own = race_hunt.draw(seed), tmp_path / str(seed)
        own.mkdir()
        try:
            seen += race_hunt.run(race_hunt.guessing(schedule) if guesses else schedule, own)
        except BaseException:
            option = "--guess " if guesses else ""
            print(f"failed: python tests/hunts/race_hunt.py {option}--seeds {seed}:{seed + 1}\n{schedule}")
            raise
    if guesses:
        assert seen["kept"] and seen["undone"], seen
    else:
        assert seen["evictions"] > len(seeds) and len(seen) > 10, seen
    summary(f"races{' with guesses' * guesses}: {len(seeds)} schedules, {dict(sorted(seen.items()))}")


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


# Whatever breaks wherever, the error is clear, nothing is left, and the last checkpoint resumes to the same bits. A
# few of the faults of ``tests/hunts/fault_hunt.py``, which makes every call of several cases fail in turn.


PER_KIND = 4

MET = [
    ("cpu, all on nvme", "write: disk full"),
    ("standin, half on nvme", "read: i/o error"),
    ("cpu, all on nvme, in backward", "adam: raises"),
    ("cpu, half on nvme, fp16", "interrupt"),
]


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(("name", "kind"), MET)
def test_a_fault_anywhere(name: str, kind: str, summary: Callable[[str], None]) -> None:
    errors: list[tuple[int, BaseException]] = []

    def report(number: int, error: BaseException | None) -> None:
        if error is not None:
            errors.append((number, error))

    fired = fault_hunt.sweep(name, kind, lambda calls: range(2, calls + 1, max(calls // PER_KIND, 1)), report)
    if errors:
        number, error = errors[0]
        which = f"--case {name!r} --only {kind!r} --first {number} --stride 9999"
        print(f"failed: python tests/hunts/fault_hunt.py {which}")
        raise error
    assert fired.total() >= 2, "hardly anything broke"
    summary(f"faults: {name}; {kind}: " + ", ".join(f"{where[0]} ({where[1]}) {n}" for where, n in fired.items()))


def test_every_kind_is_met() -> None:
    assert {kind for _, kind in MET} == set(KINDS)


@pytest.mark.slow  # of test_interrupts.py much is quick
def test_ctrl_c_ends_a_program_in_order(tmp_path: Path) -> None:
    """In the middle of training, a checkpoint perhaps being written behind it."""
    child = Child.start("cpu, all on nvme", tmp_path)
    assert child.kill(signal.SIGINT, 0.05) >= 2
