"""Hunts data races in the native code: builds tests/native/stress.cpp with ThreadSanitizer and runs it.

    python tests/hunts/native_races.py --rounds 100 --out benchmarks/reports/native_races_<hardware>_<date>.md

The program (its head says what it does) links the sources of the library as they are, without Python. Before it counts,
ThreadSanitizer has to find a race that is there on purpose. Status 0: nothing found; 1: something was; 2: it could not
be run.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks._report import add_out, head, publish  # noqa: E402

SOURCES = ["tests/native/stress.cpp", *(f"csrc/{n}.cpp" for n in ("thread_pool", "nvme_io", "cpu_update", "cpu_grad"))]
FLAGS = "-fsanitize=thread -std=c++17 -O1 -g -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Icsrc".split()
FOUND = 66  # the exit status when something was reported


def build(compiler: str, folder: Path) -> Path:
    """The stress program in ``folder``. Raises subprocess.CalledProcessError if the compiler refuses."""
    program = folder / "stress"
    command = [compiler, *FLAGS, *SOURCES, "-o", str(program)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Shadow memory stands at fixed addresses, which a kernel that randomises more bits than expected denies.
    setarch = shutil.which("setarch")
    command = [*([setarch, platform.machine(), "-R"] if setarch else []), str(program), *arguments]
    options = f"exitcode={FOUND} second_deadlock_stack=1 history_size=4"
    return subprocess.run(
        command, env=os.environ | {"TSAN_OPTIONS": options}, capture_output=True, text=True, timeout=3600
    )


def usable(compiler: str, folder: Path) -> Path | None:
    """The program, if the race that is there on purpose is found; else None, and what went wrong is printed."""
    try:
        program = build(compiler, folder)
        control = run(program, str(folder), "0", "race")
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        print(f"ThreadSanitizer cannot be used: {getattr(e, 'stderr', e)}", file=sys.stderr)
        return None
    if control.returncode != FOUND or "race" not in control.stderr:
        print(f"missed a race that is there (status {control.returncode}): {control.stderr[-500:]}", file=sys.stderr)
        return None
    return program


def report(compiler: str, rounds: int, seconds: float, done: list[str], warnings: int) -> list[str]:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    about = f"ThreadSanitizer, {version}. {rounds} rounds, {seconds:.0f} s on a machine with other work."
    return [
        *head("Races in the native code", [about]),
        "Control: a race that is there on purpose was reported. The program itself checked that every element was",
        "touched once, that threads changed no bit, and that every byte came back. What ran:",
        "",
        *(f"- {line}" for line in done),
        "",
        f"**{warnings} warnings.**" if warnings else "**Nothing found.**",
        "",
        "Not covered: a fork (tests/native/test_native_process.py does), and the bindings to Python.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="20 take about half a minute")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "g++"))
    parser.add_argument("--folder", type=Path, help="where the program and its file go (default: a temporary folder)")
    add_out(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        program = usable(args.compiler, Path(made))
        if program is None:
            return 2
        print(f"the control was found; {args.rounds} rounds ...", flush=True)
        begin = time.perf_counter()
        result = run(program, made, str(args.rounds))
        seconds = time.perf_counter() - begin
    print(result.stdout + result.stderr)
    if result.returncode not in (0, FOUND):
        print(f"the program ended with status {result.returncode}", file=sys.stderr)
        return 1
    warnings = max(result.stderr.count("WARNING: ThreadSanitizer"), int(result.returncode == FOUND))
    publish(report(args.compiler, args.rounds, seconds, result.stdout.splitlines(), warnings), args.out)
    return int(warnings > 0)


if __name__ == "__main__":
    sys.exit(main())
