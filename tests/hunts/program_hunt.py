"""Hunt for programs that Gemini runs wrong: draw training scripts, run each plainly and managed, compare the bits.

    python tests/hunts/program_hunt.py --seeds 0:1000 --placements all --precisions all --jobs 2 --out report.json
    python tests/hunts/program_hunt.py --seeds 0:20000 --one-each --jobs 2
    python tests/hunts/program_hunt.py --seeds 0:2000 --one-each --drawn-with train_step chain
    python tests/hunts/program_hunt.py --replay 17:nvme:bf16
    python tests/hunts/program_hunt.py --shrink 17:nvme:bf16
    python tests/hunts/program_hunt.py --program some.py --placements nvme --precisions fp32

A run is one program at one placement in one precision. It ends ``right``, ``refused`` with a clear error, or
``torch refuses`` it too. What else there is (``SILENT``, ``RAW``, ``HANG``, ``GOES ON``) is a finding; docs/programs.md
says what each means. The exit code is 1 if there is a SILENT, RAW or HANG.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import reduce
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import plain_programs  # noqa: E402
from tests.hunts import program_ranks  # noqa: E402
from tests.hunts import program_report as report  # noqa: E402
from tests.hunts.program_draw import Program, each_part, program_of, with_part  # noqa: E402
from tests.hunts.program_run import FAILURES, GOES_ON, Result, run_managed, run_plain  # noqa: E402
from tests.hunts.program_sides import PLACEMENTS, PRECISIONS, STEPPING  # noqa: E402
from tests.hunts.program_source import source  # noqa: E402
from tests.hunts.program_workers import Task, run_tasks  # noqa: E402


def tasks_of(program: Program, precisions: list[str], placements: list[str], ranks: int = 1) -> list[Task]:
    """One task per precision, without the placements that make no sense for the program."""
    found: list[Task] = []
    if ranks > 1 and "clip" in program.habits:
        return found
    for precision in precisions:
        if precision == "fp16" and program.adam == "left_out":
            continue  # torch leaves the gradients of such params scaled, where clipping adds them up with the others
        fit = [
            p for p in placements
            if not (p in STEPPING and precision == "fp16") and (p != "transient" or program.may_step_in_backward)
            # Block by block such sums are rounded to bf16, and those of the plain loop are not (`gemini.train_step`).
            and not (precision == "bf16" and PLACEMENTS[p].gradients == "retain" and "train_step" in program.objective)
        ]  # fmt: skip
        if fit:
            own = program_of(program.seed)
            found.append(Task(program.seed, precision, tuple(fit), "" if program == own else source(program)))
    return found


def one_each(tasks: list[Task]) -> list[Task]:
    """Of each program's runs one, in turn another placement and precision."""
    of_seed: dict[int, list[Task]] = {}
    for task in tasks:
        of_seed.setdefault(task.seed, []).extend(replace(task, placements=(p,)) for p in task.placements)
    return [runs[seed % len(runs)] for seed, runs in of_seed.items()]


def hunt(args: argparse.Namespace) -> int:
    first, _, last = args.seeds.partition(":")
    seeds = [p.seed for p in each_part()] if args.parts else range(int(first), int(last or int(first) + 1))
    drawn = (reduce(with_part, args.drawn_with, program_of(seed)) for seed in seeds)
    tasks = [t for program in drawn for t in tasks_of(program, args.precisions, args.placements, args.ranks)]
    if args.one_each:
        tasks = one_each(tasks)
    planned, results, start = sum(len(t.placements) for t in tasks), [], time.monotonic()
    counts: Counter[str] = Counter()

    def on_result(result: Result) -> None:
        results.append(result)
        counts[result.outcome] += 1
        if result.outcome in (*FAILURES, GOES_ON) and not args.quiet:
            told = result.detail.splitlines()[0][:160] if result.detail else ""
            print(f"{result.outcome} {result.seed}:{result.placement}:{result.precision} {told}", flush=True)
        if len(results) % 500 == 0:
            print(f"-- {len(results)} of {planned}, {time.monotonic() - start:.0f} s: {dict(counts)}", flush=True)

    if args.ranks > 1:
        program_ranks.run_tasks(tasks, size=args.ranks, limit=args.limit, on_result=on_result)
    else:
        run_tasks(tasks, jobs=args.jobs, limit=args.limit, on_result=on_result)
    print(report.summary(results))
    print(f"{len(results)} runs of {len(seeds)} programs in {time.monotonic() - start:.0f} s: {dict(counts)}")
    if args.out:
        settings = {k: v for k, v in vars(args).items() if isinstance(v, (str, int, float, list))}
        report.write(args.out, results, settings)
    return int(any(counts[name] for name in FAILURES))


def run_here(text: str, seed: int, precision: str, placement: str) -> Result:
    plain = run_plain(text, seed, precision)
    with tempfile.TemporaryDirectory() as folder:
        return run_managed(text, seed, precision, placement, Path(folder), plain)


def one_of(spoken: str, args: argparse.Namespace) -> tuple[int, list[str], list[str]]:
    """ "17", "17:nvme" or "17:nvme:bf16"."""
    seed, placement, precision, *_ = [*spoken.split(":"), "", ""]
    return int(seed), [placement] if placement else args.placements, [precision] if precision else args.precisions


def replay(args: argparse.Namespace) -> int:
    seed, placements, precisions = one_of(args.replay, args)
    text = source(reduce(with_part, args.drawn_with, program_of(seed)))
    print(text)
    return show(text, seed, placements, precisions)


def show(text: str, seed: int, placements: list[str], precisions: list[str]) -> int:
    failed = False
    for precision in precisions:
        for placement in placements:
            result = run_here(text, seed, precision, placement)
            failed |= result.outcome in FAILURES
            print(f"# {placement} {precision}: {result.outcome} {result.detail}")
            if result.trace:
                print(result.trace)
    return int(failed)


def shrink(args: argparse.Namespace) -> int:
    """In this process: a program that hangs or crashes is shrunk by hand."""
    seed, placements, precisions = one_of(args.shrink, args)
    placement, precision = placements[0], precisions[0]
    program = reduce(with_part, args.drawn_with, program_of(seed))
    wanted = run_here(source(program), seed, precision, placement)

    def still(text: str) -> bool:
        found = run_here(text, seed, precision, placement)
        return found.outcome == wanted.outcome and (found.outcome == "SILENT" or found.kind == wanted.kind)

    least = report.shrink(program, still)
    print(source(least))
    return show(source(least), seed, [placement], [precision])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="programs to draw, FIRST:LAST (LAST is left out)")
    parser.add_argument("--parts", action="store_true", help="instead of drawn programs one for each part there is")
    parser.add_argument("--drawn-with", nargs="+", default=[], help="objective, roots, habits of every program")
    parser.add_argument("--placements", default="all", help=f"all, or some of {','.join(PLACEMENTS)}")
    parser.add_argument("--precisions", default="all", help=f"all, or some of {','.join(PRECISIONS)}")
    parser.add_argument(
        "--one-each", action="store_true", help="run each program once, in turn at another placement and precision"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that share each model (gloo); one run at a time"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds without progress that make a HANG")
    parser.add_argument("--out", type=Path, help="write a report in JSON")
    parser.add_argument("--quiet", action="store_true", help="only counts, and the summary at the end")
    parser.add_argument("--replay", help="print the program of SEED[:PLACEMENT[:PRECISION]] and how it ends")
    parser.add_argument("--shrink", help="the same with parts dropped while the outcome stays")
    parser.add_argument("--program", type=Path, help="a program from a file instead of drawn ones")
    args = parser.parse_args(argv)
    args.placements = chosen("placement", args.placements, tuple(PLACEMENTS), parser)
    args.precisions = chosen("precision", args.precisions, PRECISIONS, parser)
    import torch

    torch.set_num_threads(1)
    if args.replay or args.shrink or args.program:
        plain_programs.prepare()  # before anything is managed here
    if args.replay:
        return replay(args)
    if args.shrink:
        return shrink(args)
    if args.program:
        return show(args.program.read_text(), 0, args.placements, args.precisions)
    return hunt(args)


def chosen(what: str, spoken: str, known: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    names = list(known) if spoken == "all" else spoken.split(",")
    for name in names:
        if name not in known:
            parser.error(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
