"""Builds, tests and measures Gemini on a GPU, in one call of under ten minutes, and writes one report.

On a machine with a GPU, from the repository's root (no network, nothing is installed):

    python benchmarks/gpu_suite.py --out runs/gpu                    # all parts in order of value, as far as time goes
    python benchmarks/gpu_suite.py --out runs/gpu --parts build,tests,kernels
    python benchmarks/gpu_suite.py --out runs/gpu --parts build,throughput --args throughput="--budgets 24GiB"
    python benchmarks/gpu_suite.py --out runs/gpu --parts build,throughput --args throughput="--budgets 80GiB"
    python benchmarks/gpu_suite.py --out runs/gpu --parts build,size --spill DRIVE --args size="--params 18.2e9"
    python benchmarks/gpu_suite.py --out runs/gpu --parts build,peers --args peers="--deepspeed FOLDER"
    python benchmarks/gpu_suite.py --out runs/gpu2 --resume runs/gpu    # what that call left; one report

Without one, to see that every script runs (its numbers mean nothing; the build is left out):

    python benchmarks/gpu_suite.py --device standin --tiny --out runs/gpu-tiny

Each part is a process of its own with a time limit; one that fails or is stopped is reported as such, with what it had
measured until then, and the rest goes on. Into ``--out`` (by default the folder that the variable OUT names, else
``runs/gpu_suite``) go ``gpu_suite_CARD_DATE.md``, all raw numbers beside it as ``.json``, and ``log.txt``; they are
written again after every part. The parts are scripts of their own in ``benchmarks/gpu/``, described in its README.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._report import table, told_command  # noqa: E402

MARGIN = 8.0
"""Seconds of a call that are left for writing the report."""


class Part(NamedTuple):
    title: str
    seconds: float
    """At most, and less where less of the call is left."""
    least: float
    """Not begun with less than this."""


PARTS = {
    "build": Part("Build", 180, 20),
    "exactness": Part("Exactness", 110, 20),
    "copies": Part("Copies", 90, 20),
    "throughput": Part("Throughput", 320, 60),
    "peers": Part("Peers", 540, 60),
    "kernels": Part("Kernels", 100, 20),
    "tests": Part("Tests on the GPU", 300, 30),
    "size": Part("Size", 520, 60),
}
"""In order of value: bits, landed gradients, the step against its bound and the simulator, the peers. One call on a
built library comes as far as the peers."""


NEEDED = ("torch", "numpy", "psutil", "safetensors", "msgspec", "scipy", "transformers")
NEEDED_BY = {"build": ("setuptools", "pybind11"), "tests": ("pytest", "hypothesis")}
"""What has to be there to import: for every part but the build, and for some more. Nothing is installed."""


def missing_for(part: str) -> str:
    """Why a part cannot run here, in words; "" where it can. Seconds on a lent machine are no time to find out."""
    names = [*(NEEDED if part != "build" else ()), *NEEDED_BY.get(part, ())]
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{sys.executable} cannot import {', '.join(absent)}" if absent else ""


def command_of(part: str, args: argparse.Namespace, seconds: float) -> list[str]:
    more = shlex.split(args.args.get(part, ""))
    if part == "build":
        return [sys.executable, "setup.py", "build_ext", "--inplace", *more]
    if part == "tests":
        options = ["-v", "--tb=short", "-p", "no:cacheprovider", *more]
        return [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *options]
    command = [sys.executable, f"benchmarks/gpu/{part}.py", "--device", args.device, "--out", str(args.parts_folder)]
    command += ["--spill", str(args.spill), "--seconds", f"{max(seconds - 15, 10):.0f}"]
    command += ["--tiny"] if args.tiny else []
    command += ["--host", args.host] if args.host else []
    return [*command, *more]


def is_built() -> bool:
    """Whether the library for this Python is newer than everything that it is made of."""
    libraries = list((ROOT / "gemini").glob(f"_C*{sysconfig.get_config_var('EXT_SUFFIX')}"))
    sources = [ROOT / "setup.py", *(ROOT / "csrc").rglob("*.*")]
    return bool(libraries) and libraries[0].stat().st_mtime > max(file.stat().st_mtime for file in sources)


class Ran(NamedTuple):
    state: str
    """"done", "failed with N", "stopped after N s" or "not run: why"."""
    seconds: float
    output: str


def run(part: str, args: argparse.Namespace, seconds: float) -> Ran:
    """One part; its whole process group is gone when this returns."""
    if part == "build" and is_built() and not args.args.get("build"):
        return checked(Ran("done", 0.0, "built already: the library is newer than its sources\n"), args)
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    if part == "tests" and args.device == "standin":
        environment["GEMINI_GPU_TESTS"] = "standin"
    begin = time.monotonic()
    command = command_of(part, args, seconds)
    print(f"---- {part}: at most {seconds:.0f} s: {shlex.join(command)}", flush=True)
    with open(args.out / "log.txt", "a+") as log:
        log.write(f"\n---- {part}: {shlex.join(command)}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            state = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {seconds:.0f} s"
        finally:
            end_group(process)
        log.seek(start)
        output = log.read()
    if part == "build":
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # what is left there could be shipped in another build
    print(output[-3000:], flush=True)
    ran = Ran(state, time.monotonic() - begin, output)
    return checked(ran, args) if part == "build" and state == "done" else ran


def checked(ran: Ran, args: argparse.Namespace) -> Ran:
    """A build, and whether CUDA kernels run on the card: they are compiled when they are asked for."""
    program = "from gemini import kernels; print(kernels.capabilities())"
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    has_cuda = "on CUDA: compiled" in told.stdout
    state = "done" if has_cuda or args.device != "cuda" else "failed: no CUDA kernel runs"
    return ran._replace(state=state, output=ran.output + told.stdout + told.stderr[-2000:])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Also what the process has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def result_of(part: str, ran: Ran, args: argparse.Namespace) -> dict[str, Any]:
    """What a part has written itself, or the end of what it said."""
    file = args.parts_folder / f"{part}.json"
    found: dict[str, Any] = {}
    if file.exists() and not ran.state.startswith("not run"):
        found = json.loads(file.read_text())
    found |= {"part": part, "state": ran.state, "seconds": ran.seconds}
    if ran.state != "done" or not found.get("lines"):
        found["end of output"] = ran.output.splitlines()[-40:]
    return found


def lines_of(part: str, found: dict[str, Any]) -> list[str]:
    lines = [f"## {PARTS[part].title}", ""]
    if found["state"] != "done":
        lines += [f"**{part}: {found['state']}** (after {found['seconds']:.0f} s).", ""]
    lines += found.get("lines", [])
    said = found.get("end of output", [])
    if part == "tests":
        said = [
            line for line in said if re.match(r"(FAILED|ERROR|on |card:|=+ .* in )|\d+ (passed|failed|skipped)", line)
        ]
        said = [line for line in said if line] or found.get("end of output", [])
    elif part == "build" and found["state"] == "done":
        said = said[-1:]
    if said:
        lines += ["```", *said, "```", ""]
    return lines


def goals_of(results: dict[str, dict[str, Any]]) -> list[str]:
    """A table of every goal that a part has told, on top of the report."""
    told = [
        [what, part, found, goal, said]
        for part, one in results.items()
        for line in one.get("lines", [])
        for what, found, goal, said in re.findall(r"^- (.+?)(?:: ([\d.]+))?; goal (.+?): (met|MISSED)", line)
    ]
    return table(["what", "part", "found", "goal", ""], told) if told else []


def earlier(folder: Path) -> dict[str, dict[str, Any]]:
    """What the last call into this folder has finished. A build is not among it: it has to be there now."""
    reports = sorted(folder.glob("gpu_suite_*.json"), key=lambda file: file.stat().st_mtime)
    if not reports:
        raise SystemExit(f"--resume {folder}: there is no gpu_suite_*.json of an earlier call")
    body = json.loads(reports[-1].read_text())
    done = {part: one for part, one in body["parts"].items() if one["state"] == "done" and part != "build"}
    return {part: one | {"kept": one.get("kept") or f"{body['commit']}, {body['date']}"} for part, one in done.items()}


def write(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> Path:
    """The report and all raw numbers; again after every part."""
    machine = next((one["machine"] for one in results.values() if "machine" in one), {})
    date = time.strftime("%Y-%m-%d")
    name = f"gpu_suite_{slug(machine.get('card', 'card'))}_{date}"
    told = [f"{key.replace('_', ' ')} {value}" for key, value in machine.items()]
    lines = [
        f"# GPU suite on {machine.get('card', 'a GPU')}, {date}",
        "",
        "; ".join(told) + "." if told else "No part has said what machine this is.",
        f"Commit {commit()}. Command: `{told_command(args.argv)}`. "
        + ", ".join(
            f"{part}: {one['state']}, {one['seconds']:.0f} s" + (f" (kept: {one['kept']})" if "kept" in one else "")
            for part, one in results.items()
        )
        + ".",
        "",
    ]
    if args.tiny or args.device != "cuda":
        lines += [
            "**A trial of the scripts, not a measurement: " + ("tiny sizes" if args.tiny else "no GPU") + ".**",
            "",
        ]
    lines += goals_of(results)
    for part, found in results.items():
        lines += lines_of(part, found)
    missing = [part for part in PARTS if part not in results]
    if missing:
        lines += [f"Not asked for in this call, so not measured: {', '.join(missing)}.", ""]
    body = json.dumps(
        {"date": date, "commit": commit(), "command": told_command(args.argv), "parts": results}, indent=1, default=str
    )
    for old in [*args.out.glob("gpu_suite_*.md"), *args.out.glob("gpu_suite_*.json")]:
        if old.stem != name and old.name in args.written:
            old.unlink()
    for suffix, text in ((".json", body), (".md", "\n".join(lines).rstrip("\n") + "\n")):
        (args.out / f"{name}{suffix}").write_text(text)
        args.written.add(f"{name}{suffix}")
    return args.out / f"{name}.md"


def slug(card: str) -> str:
    words = re.findall(r"[a-z0-9]+", card.lower())
    return next((word for word in words if re.fullmatch(r"[a-z]+\d+\w*", word)), "-".join(words))


def commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    args.parts_folder.mkdir(parents=True, exist_ok=True)
    (args.out / "log.txt").write_text("")
    results = earlier(args.resume) if args.resume else {}
    report = write(args, results)
    try:
        for part in args.parts:
            if part in results:
                continue
            (args.parts_folder / f"{part}.json").unlink(missing_ok=True)
            left = args.seconds - MARGIN - (time.monotonic() - begin)
            if why := missing_for(part):
                ran = Ran(f"not run: {why}", 0.0, "")
            elif left < (1 if args.tiny else PARTS[part].least):
                ran = Ran("not run: no time left", 0.0, "")
            else:
                ran = run(part, args, min(args.limits.get(part, PARTS[part].seconds), left))
            results[part] = result_of(part, ran, args)
            report = write(args, {name: results[name] for name in PARTS if name in results})
    finally:
        shutil.rmtree(args.parts_folder, ignore_errors=True)
    print(report.read_text())
    return 0 if all(one["state"] == "done" for one in results.values()) else 1


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if name not in PARTS or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not PART=VALUE; parts are {', '.join(PARTS)}")
    return name, value


def chosen(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", type=chosen, default=None, metavar="NAME,...", help=f"(default: {','.join(PARTS)})")
    add("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs" / "gpu_suite"),
        help="folder of report, raw numbers and log (default: %(default)s)")  # fmt: skip
    add("--resume", type=Path, metavar="FOLDER",
        help="of an earlier call: what it has finished is not run again, and stands in this report")  # fmt: skip
    add("--seconds", type=float, default=570, help="of the whole call (default: %(default)s)")
    add("--args", type=pair, action="append", default=[], metavar="PART=ARGUMENTS", help="further arguments of a part")
    add("--limit", type=pair, action="append", default=[], metavar="PART=SECONDS", help="its time limit")
    add("--device", choices=("cuda", "standin"), default="cuda", help="standin: to try the scripts without a GPU")
    add("--tiny", action="store_true", help="small and short, to see that everything runs")
    add("--spill", type=Path, default=Path("/tmp"), help="folder of spill files, on a drive (default: %(default)s)")
    add("--host", default=None, help="host memory for budgets (default: 86 %% of what there is)")
    args = parser.parse_args(argv)
    args.args = dict(args.args)
    if args.parts is None:
        args.parts = [part for part in PARTS if part != "build" or args.device == "cuda"]
    args.limits = {part: float(seconds) for part, seconds in args.limit}
    args.out = args.out.resolve()
    args.parts_folder = args.out / "parts"
    args.written = set()
    args.argv = [__file__, *(sys.argv[1:] if argv is None else argv)]
    return args


if __name__ == "__main__":
    sys.exit(main())
