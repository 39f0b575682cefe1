"""``gemini demo``: the README's promise, with the real model and text and few steps; and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gemini.integrations.callbacks import StopCallback
from rich.console import Console

from gemini.jobs import JobError
from gemini.jobs.parts import claimed
from gemini.jobs.train import demo
from tests.cli.commands import Command, refused


def test_several_processes_are_refused_once(
    gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report.json"))
    monkeypatch.setattr("gemini.cli.PATIENCE_S", 0)
    for rank, says in ((0, "`gemini demo` runs in one process, and 2 were started."), (1, "")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        result = gemini_command("demo", "--output_dir", tmp_path / "out")
        assert result.exit_code == 2 and says in " ".join(result.stderr.split())
        assert bool(result.stderr) == bool(says)


@pytest.mark.parametrize(
    ("words", "warmup"), [((), 10), (("--max_steps", "8"), 2), (("--max_steps", "-1"), 0), (("--warmup_steps", "0"), 0)]
)
def test_a_warm_up_that_is_said_is_taken(
    words: tuple[str, ...], warmup: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run(options: Any, _: Any) -> None:
        asked.append(options.args.warmup_steps)
        raise JobError("enough")

    monkeypatch.setattr("gemini.jobs.train.Run", run)
    with pytest.raises(JobError, match="enough"):
        demo(["--output_dir", str(tmp_path / "out"), "--use_cpu", *words], Console())
    assert asked == [warmup]


@pytest.mark.slow
def test_the_demo_keeps_its_promises(gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, which has no warm-up; of some that Ctrl-C stops, and that go on by the command that it says. Needs
    2 GiB on the disk under the temporary folder.
    """
    out = tmp_path / "out"
    with claimed(out):
        refused(gemini_command("demo", "--output_dir", out), "is in use: another job writes into it")
    assert ": it fell" in gemini_command.ok("demo", "--max_steps", 1, "--output_dir", tmp_path / "one").stdout
    with monkeypatch.context() as patch:
        patch.setattr(StopCallback, "__enter__", lambda stop: setattr(stop, "wanted", True))
        stopped = gemini_command("demo", "--max_steps", 6, "--output_dir", out)
    assert stopped.exit_code == 130 and "Stopped after step 1 of 6." in stopped.stdout
    again = stopped.stdout.partition("To go on: gemini ")[2].split()
    result = gemini_command.ok(*again)
    for words in (
        "after step 1\n",
        ": it fell",
        "cpu: stayed within its budget",
        "nvme: stayed within its budget",
        "here: the same bits",
    ):
        assert words in result.stdout
    assert len(result.stdout.splitlines()) <= 25, "one screen"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"checkpoint-1"}, "no folder of the spill file"
