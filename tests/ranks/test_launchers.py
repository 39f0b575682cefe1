"""What launchers tell a process, and the page about them, run as written: Slurm by stand-ins, Ray if it is there."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gemini
from gemini.ranks import launch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "clusters.md"
SRUN = '''#!{python}
"""Stands in for srun: the command, once for each task of the batch script that it is called from."""
import os, signal, subprocess, sys
nodes, tasks = int(os.environ["SLURM_NNODES"]), 1
words = sys.argv[1:]
while words[0].startswith("--"):
    option, _, value = words.pop(0).partition("=")
    tasks = int(value) if option == "--ntasks-per-node" else tasks
running = []
for task in range(nodes * tasks):
    told = {{
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % tasks), "SLURM_NODEID": str(task // tasks), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": f"{{tasks}}(x{{nodes}})",
    }}
    running.append(subprocess.Popen(words, env={{**os.environ, **told}}))
signal.signal(signal.SIGTERM, lambda *_: [process.send_signal(signal.SIGTERM) for process in running])
sys.exit(max(process.wait() for process in running))
'''


def told(**changes: str) -> dict[str, str]:
    """What srun tells task 5 of eight, on the second of three machines."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu-a[007-009]",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", **changes,
    }  # fmt: skip


def test_srun_tells_what_torchrun_would() -> None:
    environment = told()
    launch.tell_torch(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["5", "8", "2", "3", "gpu-a007"]
    other = told(SLURM_STEP_ID="3")
    launch.tell_torch(other)
    assert 1024 < int(environment["MASTER_PORT"]) < 32768 and other["MASTER_PORT"] != environment["MASTER_PORT"]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node7", "node7"), ("n[1,3-5]", "n1"), ("a[08-11]x,b2", "a08x"), ("one,two", "one"), ("b2,a[1-2]", "b2")],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert launch.first_host(hosts) == first


def test_who_is_not_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script, a shell of one task, and a process of torchrun inside of a task."""
    for changes in ({"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}):
        environment = told(**changes)
        launch.tell_torch(environment)
        assert environment == told(**changes)
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launch.num_processes() == 1
    for name, value in told().items():
        monkeypatch.setenv(name, value)
    assert (launch.num_processes(), launch.local_rank()) == (8, 2)
    assert gemini.data_rank() == (5, 8)
    assert launch.again("train") == "srun, as before, gemini train"


# ---- the page --------------------------------------------------------------------------------------------------------


def file_of_page(name: str) -> str:
    """A file that the page prints: the block whose first comment is its name."""
    found = re.search(rf"```\w*\n(?:#![^\n]*\n)?# {re.escape(name)}\n.*?```", PAGE.read_text(), re.DOTALL)
    assert found, f"{PAGE} has no {name}"
    return found[0].partition("\n")[2].removesuffix("```")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on a cluster of two machines, which are this one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text(SRUN.format(python=sys.executable))
    (commands / "scontrol").write_text(
        '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] && echo localhost\n'
        f'[ "$1" = requeue ] && echo $2 >> {tmp_path}/again\n'
    )
    (commands / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (commands / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    for name in ("train.py", "train.sbatch", "srun.sbatch"):
        (tmp_path / name).write_text(file_of_page(name))
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    return {
        **mine, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "OMP_NUM_THREADS": "1", "RANKS": "1",
        "PORT": str(free_port()),
    }  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} did not come")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.sbatch", "srun.sbatch"])
def test_the_slurm_page_runs_as_written(script: str, cluster: dict[str, str], tmp_path: Path) -> None:
    """Stopped by SIGTERM before its time is over, queued again, and gone on with."""
    options = re.findall(r"^#SBATCH (\S+)", (tmp_path / script).read_text(), re.MULTILINE)
    assert "--signal=B:TERM@120" in options and "--requeue" in options
    started = subprocess.Popen(
        ["bash", script], cwd=tmp_path, env={**cluster, "STEPS": "1000000"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(tmp_path / "checkpoint", started)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=120)
    assert "stopped after step" in output and (tmp_path / "again").read_text().strip() == cluster["SLURM_JOB_ID"]
    step = int(output.partition("stopped after step ")[2].split()[0])
    again = subprocess.run(
        ["bash", script], cwd=tmp_path, env={**cluster, "STEPS": str(step + 3)}, text=True, capture_output=True,
        timeout=240,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"goes on after step {step}" in again.stdout and f"done after step {step + 3}" in again.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_ray_page_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "ray_train.py").write_text(file_of_page("ray_train.py"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_STORAGE": str(tmp_path / "results"),
    }
    done = subprocess.run(
        [sys.executable, "ray_train.py"], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"checkpoint in (\S+), loss ([\d.]+)", done.stdout)
    assert found and (Path(found[1]) / "gemini").is_dir() and 0 < float(found[2]) < 10
