"""Out of memory at every allocation of a step: how each ended.

python -m tests.hunts.allocation_hunt [--kinds accumulate ...] [--model small llama] [--micro-batch | --by-blocks]
    [--every N]
"""

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from tests.train.test_out_of_memory import KINDS, Dropping, Refusing, dropping_llama, make_trial, make_trial_by_blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--model", default="small", choices=("small", "llama"))
    parser.add_argument("--micro-batch", action="store_true", help="steps are made of model.micro_batch()")
    parser.add_argument("--by-blocks", action="store_true", help="steps are made by gemini.train_step, block by block")
    parser.add_argument("--every", type=int, default=1, help="only each N-th allocation")
    options = parser.parse_args()
    total = 0
    for kind in options.kinds:
        make = Dropping if options.model == "small" else dropping_llama
        if options.by_blocks:
            trial = make_trial_by_blocks(kind, Path(tempfile.mkdtemp()))
        else:
            trial = make_trial(kind, Path(tempfile.mkdtemp()), whole=options.micro_batch, make=make)
        counted, found = Refusing(), Counter[str]()
        trial.run(counted)
        for number in range(1, counted.count + 1, options.every):
            try:
                trial.at(number)
                found["told" if trial.errors else "same bits"] += 1
            except Exception:
                found["FAULT"] += 1
                print(f"FAULT {kind}, allocation {number} of {counted.count}", file=sys.stderr)
                traceback.print_exc(limit=-4)
        print(f"{kind}: {counted.count} allocations, {dict(found)}", flush=True)
        total += found["FAULT"]
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
