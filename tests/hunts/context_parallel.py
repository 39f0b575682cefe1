"""Context parallel against one process, family by family: how far loss and gradients are off, at cp 2, 4 and 8.

    python -m tests.hunts.context_parallel [--ranks 8] [--nvme FOLDER] [--family llama ...]

Every family of ``tests/ranks/context_cases.py``, both kinds of attention, with chunks in RAM; with ``--nvme`` all of
them on NVMe and blocks checkpointed. Prints a table in Markdown; ends with 1 if a loss is off by more than 1e-6, or a
gradient by more than 1e-5 of the largest one of its param.
"""

import argparse
import sys

from tests.ranks.context_cases import FAMILIES, Case, alone, differences, step
from tests.ranks.pool import Failure, started

MOST_LOSS, MOST_GRADIENT = 1e-6, 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nvme", default="", help="a folder for spill files")
    parser.add_argument("--family", nargs="*", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    options = parser.parse_args()
    pool, is_good, num = started(options.ranks), True, 0
    print("| family | kind | cp | loss off by | gradients off by |\n|---|---|---|---|---|")
    for family in options.family:
        for kind in ("auto", "gathered"):
            for cp in (size for size in (2, 4, 8) if options.ranks % size == 0):
                case = Case(family, cp, kind, nvme=options.nvme, checkpointing=bool(options.nvme))
                outcomes = pool.outcomes(step, case)
                num += 1
                failed = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
                if failed is not None:
                    print(f"| {family} | {kind} | {cp} | {failed.kind}: {failed.text} | |")
                    is_good, pool = False, pool if pool.alive else started(options.ranks)
                    continue
                loss, gradient = differences(outcomes[0], alone(case, options.ranks // cp))
                is_good &= loss <= MOST_LOSS and gradient <= MOST_GRADIENT
                print(f"| {family} | {kind} | {cp} | {loss:.1e} | {gradient:.1e} |", flush=True)
                pool.renew()
    pool.close()
    print(f"\n{num} cases, {'all' if is_good else 'NOT all'} within {MOST_LOSS} and {MOST_GRADIENT}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
