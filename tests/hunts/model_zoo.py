"""Train a tiny model of every class in transformers' auto-mappings managed and plain, and compare every bit.

    python tests/hunts/model_zoo.py                                  # the whole zoo: about half an hour on one core
    python tests/hunts/model_zoo.py --only 'Llama|T5For'             # classes by a regular expression
    python tests/hunts/model_zoo.py --results results.jsonl --again failed untried     # those that did not work
    python tests/hunts/model_zoo.py --results results.jsonl --write                    # docs/models.md, from results

Each class is built from a tiny random config and trained for three steps by ``GeminiDDP`` with all state on NVMe and
memory for its most demanding module, so that chunks are evicted inside forward and backward; losses, gradient norms,
weights, fp32 masters, states, step counts and buffers must be those of the plain loop, bit for bit.
"""

import argparse
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    parser.add_argument("--kinds", nargs="*", help="kinds of models (all)")
    parser.add_argument("--results", type=Path, default=Path("runs/model_zoo.jsonl"), help="one line of JSON per class")
    parser.add_argument("--again", nargs="*", default=[], help="run what has these statuses in --results again")
    parser.add_argument("--here", action="store_true", help="in this process, with whole errors, to debug")
    parser.add_argument("--write", action="store_true", help="write docs/models.md from --results, run nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    from tests.hunts.zoo import mappings, runner, sweep

    done = read(args.results)
    if args.write:
        from tests.hunts.zoo import table

        (ROOT / "docs" / "models.md").write_text(table.page(done))
        return
    chosen = [
        (kind, entry)
        for kind, entry in mappings.all_entries()
        if (not args.kinds or kind in args.kinds)
        and re.search(args.only, entry.name)
        and (args.only or entry.name not in done or done[entry.name]["status"] in args.again)
    ]
    if args.here:
        for kind, entry in chosen:
            debug(runner, kind, entry)
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(chosen)} classes", flush=True)
    sweep.sweep(chosen, args.results, lambda r: print(line(r), flush=True))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each class."""
    if not path.exists():
        return {}
    return {record["name"]: record for record in map(json.loads, path.read_text().splitlines())}


def line(record: dict[str, Any]) -> str:
    what = f"{record['status']:<8}{record['kind']:<16}{record['name']:<50}{record['precision']:<5}{record['loss']:<7}"
    return f"{what}{record['params']:>9,}  {record['evictions']}  {record['seconds']} s  {record['reason']}"


def debug(runner: Any, kind: str, entry: Any) -> None:
    import tempfile
    import traceback

    raised: list[BaseException] = []
    plain_line = runner._line
    runner._line = lambda e: (raised.append(e), plain_line(e))[1]
    with tempfile.TemporaryDirectory() as folder:
        record = runner.as_record(runner.run(kind, entry, Path(folder)))
    for error in raised[:2]:
        traceback.print_exception(error)
    print(line(record))


if __name__ == "__main__":
    main()
