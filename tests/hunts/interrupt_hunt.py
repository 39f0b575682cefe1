"""Ctrl-C at every moment of an operation, in every placement: a table of how it ended, and every fault.

python -m tests.hunts.interrupt_hunt [--where ram disk standin] [--operations step drain ...] [--every N] [--silent]
"""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.train.helpers import PLACEMENTS
from tests.train.interrupted import OPERATIONS, Trials, make_trials

COLUMNS = ("moments", "before", "after", "error", "unsent", "lost", "faults", "seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", default=list(PLACEMENTS), choices=PLACEMENTS)
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--every", type=int, default=1, help="only each N-th moment")
    parser.add_argument("--silent", action="store_true", help="also before instructions that take no signal")
    parser.add_argument("--faults", type=int, default=20, help="give an operation up after so many")
    options = parser.parse_args()
    print(f"{'placement':<10}{'operation':<22}" + "".join(f"{name:>9}" for name in COLUMNS), flush=True)
    total = 0
    for where in options.where:
        for name in options.operations:
            total += _hunt(where, name, options)
    return 1 if total else 0


def _hunt(where: str, name: str, options: argparse.Namespace) -> int:
    began, faults, number = time.monotonic(), 0, 0

    def make() -> Trials:
        return make_trials(where, name, Path(tempfile.mkdtemp(prefix="interrupts-")))

    trials = make()
    moments = trials.moments(silent=options.silent)[:: options.every]
    counted = dict(trials.outcomes)
    for moment in moments:
        number += 1
        try:
            trials.at(moment)
        except BaseException as e:
            faults += 1
            torch._C._set_grad_enabled(True)  # a fault may have left it off, and the next trial begins a training
            print(f"FAULT {where}, {name}, at {moment}: {type(e).__name__}: {e}", file=sys.stderr)
            traceback.print_exc(limit=-6)
            taken = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in trials.taken]
            print("taken in " + " < ".join(reversed(taken)) + "\n", file=sys.stderr)
            if faults == options.faults:
                break
            counted = {key: counted[key] + value for key, value in trials.outcomes.items()}
            trials = make()
    counted = {key: counted[key] + value for key, value in trials.outcomes.items()}
    row = [number, *counted.values(), faults, round(time.monotonic() - began)]
    print(f"{where:<10}{name:<22}" + "".join(f"{value:>9}" for value in row), flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
