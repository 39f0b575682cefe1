"""The small parts of the jobs: the wish to stop, the names of checkpoints, the watch on memory, the shown lines."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from gemini.jobs.budgets import budget_lines
from gemini.jobs.checkpoints import checkpoint_path, checkpoints_in, choose, clean_up, prune
from gemini.jobs.interrupt import StopWish
from gemini.jobs.progress import StepReport, TrainProgress
from gemini.jobs.resident import ResidentPeak, resident_bytes
from gemini.ranks import launch
from gemini.train.checkpoint import replacing

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_is_served(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, lambda *_: served.append(True))
    served: list[bool] = []
    try:
        with StopWish("as you wish") as stop:
            assert not stop.wanted
            os.kill(os.getpid(), number)
            assert stop.wanted and served == []
            assert capfd.readouterr().err == "\nas you wish\n"
            os.kill(os.getpid(), number)
            assert served == [True]
    finally:
        signal.signal(number, before)


def test_handlers_come_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopWish(""):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_checkpoints_are_found_pruned_and_chosen_by_step(tmp_path: Path) -> None:
    assert checkpoints_in(tmp_path) == [] and choose("auto", tmp_path, overwrite=False) is None
    for step in (20, 100, 9):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    (
        tmp_path / "checkpoints" / "step-00000100.tmp"
    ).mkdir()  # another's unfinished work is not ours to choose or remove
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000009", "step-00000020", "step-00000100"]
    assert choose("auto", tmp_path, overwrite=False) == checkpoint_path(tmp_path, 100)
    assert choose(str(checkpoint_path(tmp_path, 20)), tmp_path, overwrite=False) == checkpoint_path(tmp_path, 20)
    prune(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000020",
        "step-00000100",
        "step-00000100.tmp",
    ]


def test_what_a_death_left_is_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    dead = subprocess.Popen(["true"])
    dead.wait()
    living = replacing.begin(folder / "step-00000003").name  # of this process, until it ends it
    young = subprocess.Popen(["sleep", "60"])
    another = living.replace(str(os.getpid()), str(young.pid))  # its number lives, but it began at another time
    going = [f".step-00000003.new-{dead.pid}", f".step-00000003.new-{os.getpid()}", another, f"{another}.old",
             ".step-00000001.removed", ".step-00000004.old"]  # fmt: skip
    staying = [living, "step-00000004", "notes", ".step-00000003.new-x", ".other.new-7", ".step-00000002.old"]
    for name in [*going, *staying]:
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text("{}")
    try:
        clean_up(tmp_path)
    finally:
        young.kill()
        young.wait()
    assert sorted(path.name for path in folder.iterdir()) == sorted([*staying[:-1], "step-00000002"])


def test_the_budgets_of_all_ranks_are_judged() -> None:
    def report(peak: int) -> dict[str, dict[str, int]]:
        return {"cpu": {"peak": peak * MIB, "budget": 64 * MIB}}

    assert budget_lines(report(3)) == (["cpu: stayed within its budget, peak 3 MiB of 64 MiB"], True)
    assert budget_lines(report(3), report(5)) == (
        ["cpu: stayed within its budget on each of 2 ranks, rank 1 peak 5 MiB of 64 MiB"],
        True,
    )
    lines, within = budget_lines(report(65), report(5), report(64))
    assert not within and lines == ["cpu: WENT OVER its budget on some of 3 ranks, rank 0 peak 65 MiB of 64 MiB"]


def test_how_to_start_again_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.again("train --resume auto") == "gemini train --resume auto" and launch.speaks()
    several = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    assert launch.num_processes() == 1, "a rank without an address to meet at is alone"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch.num_processes() == 2 and not launch.speaks()
    assert launch.again("train") == "torchrun --nproc-per-node 2 -m gemini train"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch.again("train") == "torchrun, as before on every machine, -m gemini train"


@pytest.mark.skipif(resident_bytes() is None, reason="the kernel does not say")
def test_the_watch_sees_memory_that_is_gone_again() -> None:
    with ResidentPeak(interval_s=0.001) as resident:
        before = resident.peak
        assert before is not None
        block = b"x" * (64 * MIB)
        deadline = time.monotonic() + 10
        while resident.peak < before + 60 * MIB and time.monotonic() < deadline:
            time.sleep(0.001)
        del block
    after = resident_bytes()
    assert after is not None and resident.peak >= before + 60 * MIB > after


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        loss=2.5,
        grad_norm=1.25,
        lr=1e-3,
        num_tokens=1,
        used_bytes={"cpu": 3 * MIB, "nvme": int(1.234 * GIB)},
    )


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    with TrainProgress(Console(file=out), num_steps=7, first_step=0, log_every=3) as progress:
        for step in range(1, 8):
            progress.show(report(step))
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    for words in ("loss 2.5000", "grad norm 1.25", "tok/s", "cpu 3 MiB", "lr 0.001"):
        assert words in lines[0]


@pytest.mark.parametrize("width", [80, 150])
def test_on_a_terminal_there_is_a_live_line(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with TrainProgress(console, num_steps=2000, first_step=0, log_every=1) as progress:
        progress.say("a line above it")
        progress.show(report(1999))
        progress.show(report(2000))
    for words in ("a line above it", "2000/2000", "loss 2.5000", "grad norm 1.25", "cpu 3 MiB", "nvme 1.234 GiB"):
        assert words in out.getvalue()
