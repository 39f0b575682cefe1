"""Builds the source distribution and wheels, installs each into an empty environment, trains with it, and reports.

    python benchmarks/installation.py --dist dist --out REPORT.md
    python benchmarks/installation.py --dist dist --python ~/py312/bin/python --python ~/py313/bin/python

A ``--python`` is an interpreter that has torch, transformers and what else Gemini needs: what was built is installed
into a virtual environment of its own, which sees those packages and no other Gemini. The source is that of the last
commit. Builds happen in pip's isolation, so pip needs an index. Where auditwheel (with patchelf) is on PATH, a wheel
with kernels gets the oldest manylinux tag that it is good for. Exit code 1 if anything did not work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import add_out, head, publish, table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
TRAIN = """
import hashlib, json, sys, torch, transformers, gemini
from gemini import kernels
torch.manual_seed(0); torch.set_num_threads(1)
config = transformers.AutoConfig.for_model(**json.load(open("config.json")))
memory = gemini.MemoryBudget(cpu="2MiB", nvme="16MiB", nvme_path=".")
model = gemini.GeminiDDP(transformers.LlamaForCausalLM(config), gemini.GeminiConfig(precision="bf16", memory=memory))
optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
ids = torch.arange(64).view(2, 32)
for _ in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(); model.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
found = kernels.capabilities()
kind = f"native, {found.isa}{', with CUDA' if found.cuda else ''}" if found.native else "torch reference"
print(json.dumps([sys.version.split()[0], torch.__version__, transformers.__version__, kind, f"{loss.item():.4f}"]))
"""
TIMED = {
    "python, nothing imported": ["-c", "pass"],
    "import gemini": ["-c", "import gemini"],
    "import torch": ["-c", "import torch"],
    "import gemini and GeminiDDP": ["-c", "from gemini import GeminiDDP"],
    "gemini --version": ["-m", "gemini", "--version"],
    "gemini plan --help": ["-m", "gemini", "plan", "--help"],
    "gemini plan config.json (2 layers)": ["-m", "gemini", "plan", "config.json", "--cpu", "1GiB", "--compute", "cpu"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where what is built goes")
    parser.add_argument("--python", type=Path, action="append", help="an interpreter with torch (default: this one)")
    parser.add_argument("--rounds", type=int, default=5, help="of timing starts (default: %(default)s)")
    add_out(parser)
    args = parser.parse_args()
    pythons = args.python or [Path(sys.executable)]
    args.dist.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = build_source(args.dist, folder)
        ways = {"wheel": {}, "source, no compiler": {"CC": "/bin/false", "CXX": "/bin/false"}}
        for python in pythons:
            for way, environment in ways.items():
                print(f"{python}: {way}", file=sys.stderr, flush=True)
                rows.append(try_out(python, way, environment, source, args.dist, folder / f"venv-{len(rows)}"))
        times = timed(folder / "venv-0" / "bin" / "python", folder / "venv-0", args.rounds)
    listed = [
        "Python",
        "torch",
        "transformers",
        "what",
        "platform",
        "size, kB",
        "build, s",
        "kernels",
        "loss after 3 steps",
    ]
    report = head("Installation", ["What was built, installed into an empty environment, and trained with.", ""])
    report += ["", f"Source distribution: {source.stat().st_size / 1000:,.0f} kB.", ""]
    report += table(listed, rows)
    report += ["Seconds to start, in the first of these environments, median of "
               f"{args.rounds} (lowest), files read before:", ""]  # fmt: skip
    report += table(["command", "s", "lowest"], times)
    publish(report, args.out)
    return int(any(row[-1] == "FAILED" for row in rows))


def run(command: Sequence[object], **how: Any) -> subprocess.CompletedProcess[str]:
    """
    Raises:
        RuntimeError: with what it said, if it fails.
    """
    result = subprocess.run([str(word) for word in command], text=True, capture_output=True, **how)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result


def build_source(dist: Path, folder: Path) -> Path:
    """The source distribution of the last commit."""
    archive, tree = folder / "tree.tar", folder / "tree"
    tree.mkdir()
    run(["git", "archive", "-o", archive, "HEAD"], cwd=ROOT)
    run(["tar", "xf", archive, "-C", tree])
    run([sys.executable, "setup.py", "-q", "sdist", "-d", dist.resolve()], cwd=tree)
    return max(dist.resolve().glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)


def try_out(python: Path, way: str, environment: dict[str, str], source: Path, dist: Path, venv: Path) -> list[str]:
    """One row: built from the source distribution, installed, imported and trained with."""
    told = clean({**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    versions = json.loads(run([python, "-c", "import json, sys; print(json.dumps(sys.version.split()[0]))"]).stdout)
    row = [versions, "", "", way]
    try:
        wheels = dist / way.replace(", ", "-").replace(" ", "-")
        began = time.perf_counter()
        before = set(wheels.glob("*.whl"))
        run([python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-cache-dir", "-w", wheels, source], env=told)
        seconds = time.perf_counter() - began
        newest = max(set(wheels.glob("*.whl")) - before or set(wheels.glob("*.whl")), key=lambda p: p.stat().st_mtime)
        if shutil.which("auditwheel") and way.startswith("wheel"):
            newest = repaired(newest, dist / "manylinux" / wheels.name)
        run([python, "-m", "venv", venv])
        seen = json.loads(run([python, "-c", "import json, site; print(json.dumps(site.getsitepackages()))"]).stdout)
        packages = json.loads(
            run([venv / "bin" / "python", "-c", "import json, site; print(json.dumps(site.getsitepackages()))"]).stdout
        )
        run([venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", newest], env=told)
        Path(packages[0], "others.pth").write_text("\n".join(seen) + "\n")
        (venv / "config.json").write_text(json.dumps(CONFIG))
        found = json.loads(run([venv / "bin" / "python", "-c", TRAIN], cwd=venv, env=told).stdout.splitlines()[-1])
        run([venv / "bin" / "gemini", "plan", "config.json", "--cpu", "1GiB", "--compute", "cpu"], cwd=venv, env=told)
        platform = newest.stem.rpartition("-")[2]
        return [*found[:3], way, platform, f"{newest.stat().st_size / 1000:,.0f}", f"{seconds:.0f}", *found[3:]]
    except RuntimeError as e:
        print(e, file=sys.stderr, flush=True)
        return [*row, "", "", "", "", "FAILED"]


def repaired(wheel: Path, folder: Path) -> Path:
    """The wheel with its manylinux tag."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.whl"))
    run(["auditwheel", "repair", "-w", folder, wheel])
    found = set(folder.glob("*.whl"))
    return max(found - before or found, key=lambda path: path.stat().st_mtime)


def clean(changes: dict[str, str]) -> dict[str, str]:
    """The environment of a user: nothing of a source checkout in it."""
    return {name: value for name, value in {**os.environ, **changes}.items() if name != "PYTHONPATH"}


def timed(python: Path, folder: Path, rounds: int) -> list[list[str]]:
    rows = []
    for name, words in TIMED.items():
        seconds = []
        for _ in range(rounds + 1):  # the first one reads the files
            began = time.perf_counter()
            run([python, *words], cwd=folder, env=clean({}))
            seconds.append(time.perf_counter() - began)
        rows.append([name, f"{statistics.median(seconds[1:]):.2f}", f"{min(seconds[1:]):.2f}"])
    return rows


if __name__ == "__main__":
    sys.exit(main())
