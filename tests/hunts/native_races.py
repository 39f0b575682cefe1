"""Hunts data races in the native code: builds tests/native/stress.cpp with ThreadSanitizer and runs it.

    python tests/hunts/native_races.py --rounds 100 --out benchmarks/reports/native_races_<hardware>_<date>.md

The program (its head says what it does) links the sources of the library as they are, without Python. Before it counts,
the detector has to find a race that is there on purpose. Where the compiler has no ThreadSanitizer, valgrind's helgrind
runs the plain build; it does not know atomics, so its complaints about them are to be read, and the exit status says
so. Status 0: nothing found; 1: something was; 2: it could not be run.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks._report import add_out, head, publish  # noqa: E402

SOURCES = ["tests/native/stress.cpp", *(f"csrc/{n}.cpp" for n in ("thread_pool", "nvme_io", "cpu_update", "cpu_grad"))]
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Icsrc"]
FOUND = 66  # the exit status a detector gives when it has reported something


@dataclass(frozen=True)
class Detector:
    name: str
    flags: list[str]  # of the compiler, beside FLAGS
    runner: list[str]  # what stands before the program
    environment: dict[str, str] = field(default_factory=dict)


def thread_sanitizer() -> Detector:
    # It needs its shadow memory at fixed addresses, which a kernel that randomises more bits than it expects denies.
    setarch = shutil.which("setarch")
    runner = [setarch, platform.machine(), "-R"] if setarch else []
    options = f"exitcode={FOUND} second_deadlock_stack=1 history_size=4"
    return Detector("ThreadSanitizer", ["-fsanitize=thread"], runner, {"TSAN_OPTIONS": options})


def helgrind() -> Detector:
    return Detector("helgrind", [], ["valgrind", "--tool=helgrind", f"--error-exitcode={FOUND}", "-q"])


def build(detector: Detector, compiler: str, folder: Path) -> Path:
    """The stress program in ``folder``. Raises subprocess.CalledProcessError if the compiler refuses."""
    program = folder / f"stress-{detector.name}"
    command = [compiler, *FLAGS, *detector.flags, *SOURCES, "-o", str(program)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return program


def run(detector: Detector, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*detector.runner, str(program), *arguments]
    return subprocess.run(command, env=os.environ | detector.environment, capture_output=True, text=True, timeout=3600)


def usable(detector: Detector, compiler: str, folder: Path) -> tuple[Path | None, str]:
    """The program, if the detector finds the race that is there on purpose; else None and what went wrong."""
    try:
        program = build(detector, compiler, folder)
        control = run(detector, program, str(folder), "0", "race")
    except FileNotFoundError as e:
        return None, str(e)
    except subprocess.CalledProcessError as e:
        return None, f"does not build: {e.stderr[-500:]}"
    if control.returncode != FOUND or "race" not in control.stderr:
        return None, f"missed a race that is there (status {control.returncode}): {control.stderr[-500:]}"
    return program, ""


def report(detector: Detector, compiler: str, rounds: int, seconds: float, done: list[str], warnings: int) -> list[str]:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    about = f"{detector.name}, {version}. {rounds} rounds, {seconds:.0f} s on a machine with other work."
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
    parser.add_argument("--tool", choices=["tsan", "helgrind"], help="default: tsan, or else helgrind")
    parser.add_argument("--folder", type=Path, help="where the program and its file go (default: a temporary folder)")
    add_out(parser)
    args = parser.parse_args()
    tools = {"tsan": thread_sanitizer(), "helgrind": helgrind()}
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        for detector in tools.values() if args.tool is None else [tools[args.tool]]:
            program, why = usable(detector, args.compiler, Path(made))
            if program is not None:
                break
            print(f"{detector.name} cannot be used: {why}", file=sys.stderr)
        else:
            return 2
        print(f"{detector.name}: the control was found; {args.rounds} rounds ...", flush=True)
        begin = time.perf_counter()
        result = run(detector, program, made, str(args.rounds))
        seconds = time.perf_counter() - begin
    print(result.stdout + result.stderr)
    if result.returncode not in (0, FOUND):
        print(f"the program ended with status {result.returncode}", file=sys.stderr)
        return 1
    warnings = len(
        re.findall(
            r"WARNING: ThreadSanitizer|^==\d+== (?:Possible data race|Thread .* unlock|.*lock order)",
            result.stderr,
            re.MULTILINE,
        )
    )
    warnings = max(warnings, int(result.returncode == FOUND))
    publish(report(detector, args.compiler, args.rounds, seconds, result.stdout.splitlines(), warnings), args.out)
    return int(warnings > 0)


if __name__ == "__main__":
    sys.exit(main())
