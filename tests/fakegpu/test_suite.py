"""``benchmarks/gpu_suite.py``, every part in its tiny form: on a GPU that is lent no minute goes to mending scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from tests.gpu import gpu_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
    pytest.mark.timeout(1200),
]


def test_every_part_runs(tmp_path: Path) -> None:
    """DeepSpeed is not there; what it would do is its own."""
    command = [sys.executable, "benchmarks/gpu_suite.py", "--tiny", "--seconds", "1100", "--out", str(tmp_path)]
    command += ["--args", "peers=--peers gemini,fsdp2", "--args", "tests=-k test_cuda_device", "--spill", str(tmp_path)]
    path = [str(Path(__file__).parent / "site"), str(gpu_suite.ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    ran = subprocess.run(command, env=environment, cwd=gpu_suite.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    (raw,) = tmp_path.glob("*.json")
    parts = json.loads(raw.read_text())["parts"]
    assert {name: one["state"] for name, one in parts.items()} == dict.fromkeys(gpu_suite.PARTS, "done")
    (report,) = tmp_path.glob("*.md")
    told = report.read_text()
    assert "could not be started" not in told and "does not fit" not in told and "Ended early" not in told
    assert "losses of fsdp2 and gemini at 64 tokens agree" in told and "6 placements; goal the same bits: met" in told
