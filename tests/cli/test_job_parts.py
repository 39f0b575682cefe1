"""The small parts of the jobs: the wish to stop, the names of checkpoints, the shown lines."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from gemini.integrations.callbacks import LinesCallback, StopCallback
from gemini.integrations.huggingface_save import newest
from gemini.integrations.metrics import MetricsCallback
from rich.console import Console

from gemini import cli
from gemini.cli import COMMANDS, RECORDS
from gemini.jobs.parts import check_start
from gemini.jobs.screen import budget_lines
from gemini.jobs.settings import spelled
from gemini.ranks import launch
from gemini.tiers import Tier
from gemini.version import __version__
from tests.cli.commands import Command

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_is_served(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, lambda *_: served.append(True))
    served: list[bool] = []
    try:
        with StopCallback() as stop:
            assert not stop.wanted
            os.kill(os.getpid(), number)
            assert stop.wanted and served == []
            assert capfd.readouterr().err.startswith("\nStopping after this step, then saving.")
            os.kill(os.getpid(), number)
            assert served == [True]
    finally:
        signal.signal(number, before)


def test_handlers_come_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopCallback():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def checkpoint(out: Path, step: int) -> Path:
    path = out / f"checkpoint-{step}"
    (path / "gemini").mkdir(parents=True)
    for name in ("gemini/manifest.json", "scheduler.pt", "trainer_state.json"):
        (path / name).touch()
    return path


def test_checkpoints_are_chosen_by_step(tmp_path: Path) -> None:
    assert newest(str(tmp_path), None) is None
    assert "starting anew" in check_start("auto", tmp_path)
    paths = {step: checkpoint(tmp_path, step) for step in (20, 100, 9)}
    (paths[100] / "scheduler.pt").unlink()  # torn
    assert newest(str(tmp_path), None) == str(paths[20])
    assert not check_start("auto", tmp_path) and not check_start(str(paths[9]), tmp_path)


def test_the_budgets_of_all_ranks_are_judged() -> None:
    def report(peak: int) -> dict[str, tuple[int, int]]:
        return {"cpu": (peak * MIB, 64 * MIB)}

    assert budget_lines(report(3)) == (["cpu: stayed within its budget, peak 3 MiB of 64 MiB"], True)
    assert budget_lines(report(3), report(5)) == (
        ["cpu: stayed within its budget on 2 ranks, rank 1 peak 5 MiB of 64 MiB"],
        True,
    )
    lines, within = budget_lines(report(65), report(5), report(64))
    assert not within and lines == ["cpu: WENT OVER its budget on 3 ranks, rank 0 peak 65 MiB of 64 MiB"]


def test_how_to_start_again_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        launch.again("train --resume_from_checkpoint auto") == "gemini train --resume_from_checkpoint auto"
        and launch.speaks()
    )
    several = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    assert launch.num_processes() == 1, "a rank without an address to meet at is alone"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch.num_processes() == 2 and not launch.speaks()
    assert launch.again("train") == "torchrun, as before, -m gemini train"


class Logged:
    """A Trainer's state as far as the lines look at it."""

    max_steps = 2000

    def __init__(self, step: int) -> None:
        self.global_step, self.log_history = step, [{}]


def managed() -> SimpleNamespace:
    """A managed model as far as the metrics look at it."""
    tiers = {Tier.CPU: 3 * MIB, Tier.NVME: int(1.234 * GIB)}
    ledger = SimpleNamespace(tiers=tiers, used=tiers.get, peak=tiers.get)
    mover = SimpleNamespace(watch=SimpleNamespace(stalls={"nvme read": 1e9}))
    return SimpleNamespace(_gemini_engine=SimpleNamespace(store=SimpleNamespace(ledger=ledger, mover=mover)))


def shown(console: Console) -> tuple[Callable[..., None], list[dict[str, float]]]:
    """The lines and rows of a run; the first of what it returns logs one more."""
    lines, figures, model, rows = LinesCallback(console.print), MetricsCallback(), managed(), []
    args, state = SimpleNamespace(eval_strategy="no"), Logged(1998)
    figures.on_train_begin(args, state, None)

    def log(step: int, **logs: float) -> None:
        for callback in (figures, lines):  # the mixin has the metrics first
            callback.on_log(args, Logged(step), None, logs=logs, model=model)
        rows.append(logs)

    for step in (1999, 2000):
        log(step, loss=2.5, grad_norm=1.25, learning_rate=1e-3, num_tokens=32.0 * (step - 1998))
    return log, rows


def test_there_are_lines_and_rows() -> None:
    out = io.StringIO()
    log, rows = shown(Console(file=out, soft_wrap=True))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1999/2000", "step 2000/2000"]
    for words in ("loss 2.5000", "grad norm 1.25", " tok/s", "cpu 3 MiB", "% for nvme read", "0:00:00 left", "lr "):
        assert words in out.getvalue().splitlines()[-1]
    log(2000, eval_loss=1.0)
    assert out.getvalue().splitlines()[-1] == "evaluation after step 2000: loss 1.0000, perplexity 2.718"
    log(2000, eval_loss=0.5, **{"eval_rewards/accuracies": 0.75})
    assert out.getvalue().splitlines()[-1] == "evaluation after step 2000: loss 0.5000, accuracy 0.75"
    assert rows[1]["tokens_per_second"] > 0 and rows[0]["step_seconds"] > 0 and rows[1]["seconds_left"] == 0
    assert "tokens_per_second" not in rows[0], "of a resumed run it is not known what was counted before"
    assert rows[0]["cpu_bytes"] == rows[0]["cpu_peak_bytes"] == 3 * MIB and rows[0]["waits_for_nvme_read"] == 1e9


def test_a_loss_below_nothing_by_rounding_is_nothing() -> None:
    """GRPO's is, in its first steps."""
    out = io.StringIO()
    log, _ = shown(Console(file=out, soft_wrap=True))
    log(2000, loss=-0.00003)
    assert "  loss 0.0000  " in out.getvalue().splitlines()[-1]
    log(2000, loss=-0.5)
    assert "  loss -0.5000  " in out.getvalue().splitlines()[-1]


# ---- what a stranger asks first --------------------------------------------------------------------------------------


def test_the_commands_and_their_help(gemini_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, code in ([], 2), (["--help"], 0):
        monkeypatch.setattr("sys.argv", ["gemini", *words])
        said = gemini_command(*words)
        assert said.exit_code == code and all(f"\n  {name} " in said.stdout for name in COMMANDS)
    assert cli.app() == 0, "of the process's own words"
    monkeypatch.setattr("sys.argv", ["gemini"])
    assert cli.app() == 2
    assert gemini_command.ok("--version").stdout == f"gemini {__version__}\n"
    for name in COMMANDS:
        said = gemini_command.ok(name, "--help").stdout
        own = [option.name for option in fields(RECORDS[name])] if name in RECORDS else None
        known = own or ("gpu_memory", "nvme_path", "learning_rate")
        assert all(spelled(option) in said.replace("_", "-") or option.upper() in said for option in known)


@pytest.mark.parametrize(("said", "code"), [(3, 3), ("no more", 1), (None, 0)])
def test_who_ends_the_process_says_the_exit_code(said: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function of the user's, say; not what argparse says behind ``--help``."""

    def ends(*_: object) -> int:
        raise SystemExit(said)

    monkeypatch.setattr(cli, "_run", ends)
    assert cli.app(["sft"]) == code


# ---- how threads wait ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "spins", "policy"],
)
def test_how_threads_wait(given: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(cli, "app", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")) or 0)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cli.main()
    assert seen == [found]
