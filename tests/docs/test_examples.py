"""The programs of docs/examples are run: what they print is what they are for."""

import ast
import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from doc_blocks import ROOT

from benchmarks._progress import run
from tests.ranks.test_launchers import SRUN, wait_for

EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "guide" / "examples.md").read_text()
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def output_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a program in an empty folder, which is its scratch too, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def printed(program: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [program, *words])
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return str(capsys.readouterr().out)

    return printed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_it_is_short_stands_on_the_page_and_its_commands_are_meant(program: Path) -> None:
    source = program.read_text()
    assert len(source.splitlines()) < 80
    assert f"../examples/{program.name}" in PAGE
    head = ast.get_docstring(ast.parse(source)) or ""
    commands = re.findall(rf"^ *\S.* {program.name}(.*?)(?:  +#.*)?$", head, re.MULTILINE)
    commands += re.findall(rf"^python docs/examples/{program.name}(.*)$", PAGE, re.MULTILINE)
    known = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
    assert commands or program.name == "two_nodes.py"
    for command in commands:
        assert set(re.findall(r"--[\w-]+", command)) <= known | {"--help"}, command


def test_pretraining_learns_and_goes_on_from_its_checkpoint(output_of: Callable[..., str], tmp_path: Path) -> None:
    words = ("--toy", "--scratch", ".", "--data", str(ROOT / "docs" / "guide"))
    whole = output_of("pretrain.py", *words, "--steps", "40", "--out", "whole")
    losses = [float(loss) for loss in re.findall(r"held out ([\d.]+)", whole)]
    assert re.search(r"^nvme +\d", whole, re.MULTILINE) and len(losses) == 2 and losses[1] < losses[0] < 5.0, whole
    again = output_of("pretrain.py", *words, "--steps", "40", "--out", "whole")
    assert "step 40\n" in again and "held out" not in again  # nothing is left to do
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model").num_parameters() > 100_000


def test_the_finetuning_example_plans_and_trains(output_of: Callable[..., str], tmp_path: Path) -> None:
    planned = output_of("finetune_8b.py", "--plan-only")
    assert "predicted step" in planned and "Adam runs on" in planned
    trained = output_of("finetune_8b.py", "--scratch", ".")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", trained, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0] and "nvme" in trained


@pytest.mark.slow
def test_the_8b_fits_on_24_gib(output_of: Callable[..., str], tmp_path: Path) -> None:
    planned = output_of("finetune_8b.py", "--size", "8b", "--plan-only", "--picture", "8b.png")
    seconds = float(re.search(r"predicted step ([\d.]+) s,", planned)[1])  # type: ignore[index]
    assert f"{seconds:.1f} s" in PAGE, "the page tells another time"
    assert (tmp_path / "8b.png").stat().st_size > 10_000


def test_lora_learns_from_a_base_on_the_drive(output_of: Callable[..., str], tmp_path: Path) -> None:
    printed = output_of("lora.py", "--toy", "--scratch", ".")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert re.search(r"^nvme .* weights \d", printed, re.MULTILINE), printed
    assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_activations_of_a_long_sequence_wait_on_the_drive(output_of: Callable[..., str], tmp_path: Path) -> None:
    printed = output_of("long_context.py", "--scratch", ".", "--picture", "long.svg")
    waited = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes of activations", printed)]
    assert len(waited) == 3 and min(waited) >= 4 * 512 * 64 * 2  # the inputs of four blocks, in bf16
    assert (tmp_path / "long.svg").is_file()


def test_two_models_share_a_budget_and_one_of_them_learns(output_of: Callable[..., str], tmp_path: Path) -> None:
    printed = output_of("two_models.py", "--scratch", ".")
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", printed)]
    drifts = [float(drift) for drift in re.findall(r"drift ([\d.]+)", printed)]
    assert rewards[-1] > rewards[0] + 0.1
    assert drifts[0] == 0.0 < drifts[-1], "they begin as the same model, and one alone is trained"
    params, trained = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) params \(([\d,]+) ", printed).groups())  # type: ignore[union-attr]
    assert params == 2 * trained


@pytest.mark.slow
def test_two_machines_stop_together_and_go_on(tmp_path: Path) -> None:
    """The batch script as printed, on stand-ins of Slurm's commands: both machines are this one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text(SRUN.format(python=sys.executable))
    (commands / "scontrol").write_text(f'#!/bin/bash\n[ "$1" = requeue ] && echo $2 >> {tmp_path}/again\n')
    (commands / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    mine = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    cluster = {
        **mine, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()),
        "RANKS": "1", "OMP_NUM_THREADS": "1", "OUT": str(tmp_path / "out"),
        "PROGRAM": str(EXAMPLES / "two_nodes.py"),
    }  # fmt: skip
    script = ["bash", str(EXAMPLES / "two_nodes.sbatch")]
    started = subprocess.Popen(
        script, cwd=tmp_path, env={**cluster, "OPTIONS": "--steps 1000000"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(tmp_path / "out" / "checkpoint", started)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=120)
    last = int(re.findall(r"step (\d+): .* saved by 2 processes", output)[-1])
    assert (tmp_path / "again").read_text().strip() == cluster["SLURM_JOB_ID"]
    result = run(script, cwd=tmp_path, env={**cluster, "OPTIONS": f"--steps {last + 3}"})
    assert result.returncode == 0 and f"step {last + 3}: loss" in result.stdout, result.stdout + result.stderr
