"""Thousands of images of a power cut, of stores of one rank and of two: each must open at a commit, bit for bit.

    python -m tests.hunts.crash_image_hunt [--images 2000]

The images are those of ``tests/crash_images.py``. Prints a line per case; ends with 1 if an image is wrong.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from tests.ranks.pool import Pool
from tests.ranks.test_rank_durable import images as images_of_ranks
from tests.train.test_durable import images

PLACEMENTS = ("disk", "half", "standin", "small")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    cases = list(itertools.product(PLACEMENTS, ("exact", "compact"), (False, True)))
    each, is_good = -(-parser.parse_args().images // len(cases)), True
    pool = Pool(2)
    for where in ("disk", "mixed", "standin"):
        with tempfile.TemporaryDirectory() as folder:
            failures = images_of_ranks(pool, Path(folder), 2 * each, where)
        is_good &= not failures
        print(f"two ranks, {where}: {2 * each} images, {len(failures)} wrong", *failures[:3], sep="\n    ", flush=True)
    pool.close()
    for where, states, behind in cases:
        with tempfile.TemporaryDirectory() as folder:
            failures = images(Path(folder), each, where, states, behind=behind)
        is_good &= not failures
        print(
            f"{where} {states} {'behind' if behind else 'waited for'}: {each} images, {len(failures)} wrong", flush=True
        )
        for failure in failures[:3]:
            print(f"    {failure}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
