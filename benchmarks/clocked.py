"""Steps of an 8B model by the clock of the stand-in, beside what the simulator says of the same plans on that machine.

    python benchmarks/clocked.py --out benchmarks/reports/clocked_DATE.md

No GPU is used and nothing is measured in seconds of this machine: the engine runs as it is, in virtual time
(``tests/clocked_steps.py``), with the speeds of two machines. ``ratio`` is predicted over clocked; ``landed`` are GB/s
with which gradients left while there were any; ``blocked`` are seconds of the launching thread in backward. ``nothing
queued`` is the share of a step in which the device had nothing to compute and nothing that it waited for; ``foreseen``
is that of the simulator: the gradients that come last land, and what is read first is updated.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from tests.clocked_steps import CASES, SCALE, clocked

GOAL, LANDED, IDLE = 0.05, 0.9, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of the model's 32")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    add_out(parser)
    chosen = parser.parse_args()
    rows, off, slow, more = [], 0, 0, 0
    for case in (case for case in CASES if chosen.only in str(case)):
        case = case._replace(layers=chosen.layers)
        with tempfile.TemporaryDirectory() as folder:
            told = clocked(case, Path(folder))
        ratio = told.predicted / told.clocked
        off, slow = off + (abs(ratio - 1) > GOAL), slow + (told.landed < LANDED)
        gigabytes = told.landed * told.link * SCALE / 1e9
        more += told.starved - told.foreseen > IDLE * told.clocked
        rows.append([
            str(case), f"{told.predicted:.3f}", f"{told.clocked:.3f}", f"{ratio:.3f}",
            f"{gigabytes:.1f} ({told.landed:.0%})", f"{told.blocked:.3f}", f"{told.starved / told.clocked:.1%}",
            f"{told.foreseen / told.predicted:.1%}",
        ])  # fmt: skip
        print(*rows[-1], flush=True)
    columns = ["step", "predicted s", "clocked s", "ratio", "landed GB/s", "blocked s", "nothing queued", "foreseen"]
    done = f"{len(rows) - off} of {len(rows)} within {GOAL:.0%}; gradients below {LANDED} of the link: {slow}; "
    done += f"nothing queued for {IDLE:.0%} of a step more than is foreseen: {more}."
    publish([*head("Steps by the clock and by the simulator", [done, ""], 1), *table(columns, rows)], chosen.out)


if __name__ == "__main__":
    main()
