"""The door: integrations/ is importable as gemini.integrations, in a source checkout too, and under no other name."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._progress import run as watched_run

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    # -c puts the working directory on sys.path: the checkout as it lies there, installed or not.
    return watched_run([sys.executable, "-c", code], cwd=ROOT)


def test_the_door_leads_to_the_folder() -> None:
    result = run("import gemini.integrations as it; print(it.__name__, list(it.__path__)[0])")
    assert result.returncode == 0, result.stderr
    name, path = result.stdout.split(maxsplit=1)
    assert name == "gemini.integrations"
    assert Path(path.strip()) == ROOT / "integrations"


def test_a_second_name_is_refused() -> None:
    result = run("import integrations")
    assert result.returncode == 1
    assert "ImportError: import this folder as 'gemini.integrations', not as 'integrations'" in result.stderr


@pytest.mark.slow  # imports every framework anew
def test_modules_have_one_name() -> None:
    names = [f"gemini.integrations.{path.stem}" for path in sorted((ROOT / "integrations").glob("[!_]*.py"))]
    result = run(f"import importlib\nfor name in {names}: assert importlib.import_module(name).__name__ == name")
    assert result.returncode == 0, result.stderr
