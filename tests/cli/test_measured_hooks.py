"""What launching costs with weights that move, on the stand-in."""

from typing import Any

import pytest

import tests.standin_device  # noqa: F401 - "standin" is a device then
from gemini.jobs import doctor
from gemini.memory.movement.mover import Mover
from gemini.planning.hardware import FIGURES, Hardware


def test_hooks_are_measured_with_weights_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer comes in every forward and backward, but those at the turn, which are there."""
    gathered, gather = list[str](), Mover.gather

    def count(mover: Mover, chunk: Any, *args: Any, **kwargs: Any) -> Any:
        gathered.append(chunk.name)
        return gather(mover, chunk, *args, **kwargs)

    monkeypatch.setattr(Mover, "gather", count)
    monkeypatch.setattr(doctor, "_LAYERS", 12)
    [(key, figure)] = doctor.measure_hooks("standin", repeats=2)
    assert len(set(gathered)) == 12, "a layer is a chunk, and none stays where it is read"
    # Of five steps: in each forward, and again in backward but for those that the turn finds there, more of them where
    # fetches ahead are late.
    assert len(gathered) > 5 * 12
    assert key in FIGURES and "12 layers of 9 params" in figure.source and "median of 2" in figure.source
    assert Hardware("here", {key: figure}).figures[key].value > 0
