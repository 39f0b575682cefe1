"""``benchmarks/house.py`` counts what it says: habits in a text that has one of each, and walks of a model."""

import sys
from pathlib import Path

from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import house  # noqa: E402

ENGINE = '''"""Of one model."""

from collections.abc import Callable

from gemini.memory.room import Room


# ---- a ruler -----------------------------------------------------------------------------------------------------
class Engine:
    """The parts of one model."""

    def __init__(self, a: int, b, c, d, e, f, g, h: Callable[[], None] | None, room: Room):
        # A comment says why.
        self._a, self.b, self.c = a, b, c  # and another
        self._own = h is None or room._frames  # fmt: skip

    def connect(self, h: Callable[[], None]) -> None:
        """What others give it."""
'''
ROOM = """class Room:
    def __init__(self) -> None:
        self._frames = []


class Engine: ...
"""


def test_a_text_with_one_of_each(tmp_path: Path) -> None:
    for name, text in {"gemini/train/engine.py": ENGINE, "gemini/memory/room.py": ROOM}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    figures, _ = house.in_the_text(tmp_path)
    assert {name: figures[name] for name in house.HABITS} == dict.fromkeys(house.HABITS, 1) | {"Tier.NVME": 0}
    assert figures["lines of Engine.__init__"] == 4
    assert figures["gemini/, files"] == 2 and figures["gemini/, lines"] == 24
    assert figures["lines of code per comment in train/"] == 3.5  # of seven lines, two


def test_a_walk_is_of_the_whole_model_and_ours() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with house.walks_of_the_model(model, str(ROOT / "tests")) as (same, walkers):
        list(model.parameters())
        [name for name, _ in model.named_modules()]
        list(model[0].parameters())
        model.state_dict()  # torch's own
    assert same is model and list(walkers.values()) == [2]
    assert nn.Module.parameters.__name__ == "parameters", "put back"
