"""What the command line's tests share: a tiny model's config, some text, and a way to call ``gemini``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemini.jobs import planner
from gemini.jobs.settings import TraceSettings
from gemini.planning.trace import MemoryTrace
from tests.cli.commands import Command

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planning"))  # the traces that are made by arithmetic


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    """Its log handler keeps the stderr of its first import, which is closed after that test."""
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is folded at the width of the terminal, and tests must not depend on whose that is."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="session", autouse=True)
def traced_once() -> Iterator[None]:
    """Plans for the same step share a trace, though each test has its config in a file of its own."""
    take, made = planner.take_trace, dict[Any, MemoryTrace]()

    def once(settings: TraceSettings) -> MemoryTrace:
        path = Path(settings.config or "")
        key = replace(settings, config=path.read_text() if path.is_file() else str(path), out=None)
        if key not in made:
            made[key] = take(settings)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "take_trace", once)
        yield


@pytest.fixture
def gemini_command() -> Command:
    """``gemini_command("train", "--steps", 3)`` runs it in this process."""
    return Command()


@pytest.fixture
def tiny_values() -> dict[str, Any]:
    """The config of a GPT-2 with 35k params and 32 positions."""
    return {
        "model_type": "gpt2",
        "vocab_size": 257,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_values: dict[str, Any]) -> Path:
    """The same as a file."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(tiny_values))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 4,000 bytes with something to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times two is {2 * n}.\n" for n in range(250))[:4000])
    return path
