"""Hunts ranks that follow a script and end with other bits, another error, or not at all.

    python tests/hunts/script_hunt.py                        # 500 drawn schedules over 2 and 3 ranks
    python tests/hunts/script_hunt.py --ranks 4 --replicas 2 # the same with two replicas of two ranks
    python tests/hunts/script_hunt.py --library              # collectives are the library's, as among GPUs
    python tests/hunts/script_hunt.py --places               # every kind of divergence at every block
    python tests/hunts/script_hunt.py --kills                # a rank is killed before every message of a step

A drawn schedule is a training run of a few steps (``tests/ranks/schedules.py``) with messages that are late by chance,
and in half of them steps in which a rank does something else: it skips a block, uses another module, evaluates, goes
through a forward without a backward, fails in forward or backward and repeats it, or comes to the end of its data. Each
is made with and without overlap, and both must come to the same losses, norms and bits of masters and states on every
rank, or to the same error. A killed rank must be ``RankLost`` on all others. The exit code is 1 unless all of that was
so; a schedule that went wrong is printed, and can be run again by its number (``--first``). Among replicas a rank may
not fail in a backward and repeat it: the others may have added up what it has computed until then, and say so.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks.pool import Failure, Pool  # noqa: E402
from tests.ranks.schedules import KINDS, NUM_BLOCKS, Event, Play, run, until_error  # noqa: E402

PATIENCE_S = 60.0
"""How long ranks may do nothing at all before they count as hung."""


def draw(number: int, ranks: int, folder: str, replicas: int = 1) -> Play:
    """Schedule ``number``."""
    rng = random.Random(number)
    num_micro = rng.choice((1, 1, 2))
    play = Play(
        num_steps=rng.choice((4, 6)), seed=number, tight=rng.random() < 0.5, num_micro=num_micro,
        no_sync=num_micro > 1 and rng.random() < 0.5, checkpointing=rng.random() < 0.4,
        precision=rng.choice(("fp32", "bf16")), nvme=folder if rng.random() < 0.25 else "", replicas=replicas,
    )  # fmt: skip
    if play.no_sync or (replicas > 1 and num_micro > 1):
        play = replace(play, tight=False)  # whole gradients, or sums in fp32, which no least budget holds
    if rng.random() < 0.5:
        return play
    steps = sorted(rng.sample(range(1, play.num_steps), rng.choice((1, 1, 2))))
    kinds = [kind for kind in KINDS[1:] if kind != "two forwards" or (num_micro > 1 and not play.no_sync)]
    if replicas > 1:
        kinds.remove("raise in backward")
    events = []
    for step in steps:
        kind, place = rng.choice(kinds), rng.randrange(NUM_BLOCKS)
        # Gradients are of as many backwards on all ranks.
        every = range(ranks) if kind == "two forwards" else (rng.randrange(ranks),)
        events += [Event(kind, rank, step, place) for rank in every]
    # Who repeats a backward adds to gradients that the others have: fp32 sums, which no least budget holds.
    is_tight = play.tight and not any(event.kind == "raise in backward" for event in events)
    return replace(play, events=tuple(events), tight=is_tight)


class Hunt:
    """Pools of ranks, and what was found."""

    def __init__(self, launched: bool) -> None:
        self.launched = launched
        self.pools: dict[int, Pool] = {}
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    def outcomes(self, ranks: int, play: Play) -> list[Any]:
        """Of every rank."""
        pool = self.pools.get(ranks)
        if pool is None or not pool.alive:
            pool = self.pools[ranks] = Pool(ranks, timeout=300.0)
        found = pool.outcomes(run, replace(play, launched=self.launched), seconds=PATIENCE_S)
        if pool.alive:
            pool.renew(300.0)
        return found

    def compare(self, ranks: int, play: Play) -> None:
        """With and without overlap."""
        begin = time.monotonic()
        plain = self.outcomes(ranks, replace(play, overlap=False, seed=-1))
        other = self.outcomes(ranks, play)
        failed = [o for o in (*plain, *other) if isinstance(o, Failure)]
        if failed or any(until_error(a) != until_error(b) for a, b in zip(plain, other, strict=True)):
            what = f"{ranks} ranks, {play}: {failed[0].kind + ': ' + failed[0].text if failed else 'other results'}"
            self.wrong.append(what)
            print(what, *(o.traceback for o in failed), sep="\n", flush=True)
            return
        if len({tuple(o.met) for o in other}) > 1 and not other[0].error:
            self.wrong.append(f"{ranks} ranks, {play}: collectives in different orders")
        scripted = sum(sum(o.scripted) for o in other)
        self.seen["steps"] += ranks * play.num_steps
        self.seen["scripted steps"] += scripted
        for event in play.events or (Event("nothing"),):
            self.seen[event.kind] += 1
        ends = f"ends with {other[0].error}" if other[0].error else "same bits"
        print(f"{ranks} ranks, seed {play.seed}, {[tuple(e) for e in play.events]}: {ends}, {scripted} steps scripted, "
              f"{time.monotonic() - begin:.1f} s", flush=True)  # fmt: skip

    def kill(self, ranks: int, play: Play) -> bool:
        """A rank dies before a message of its last step; False if it has sent all of them before."""
        found = self.outcomes(ranks, play)
        victim = play.kill[0]
        if not isinstance(found[victim], Failure):
            return False
        kinds = [o.kind if isinstance(o, Failure) else "went on" for o in found]
        if any(kind != "RankLost" for rank, kind in enumerate(kinds) if rank != victim):
            self.wrong.append(f"{play.kill}: {kinds}")
        print(f"killed before message {play.kill[1]}: {kinds}", flush=True)
        self.seen["kills"] += 1
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--ranks", type=int, default=0, help="else 2 and 3 in turn")
    parser.add_argument("--replicas", type=int, default=1, help="among how many replicas the ranks are divided")
    parser.add_argument("--library", action="store_true", help="collectives are those of gloo, launched as NCCL's are")
    parser.add_argument("--places", action="store_true", help="every kind of divergence at every block instead")
    parser.add_argument("--kills", action="store_true", help="kills instead")
    parser.add_argument("--stride", type=int, default=1, help="of the messages before which a rank is killed")
    parser.add_argument("--minutes", type=float, default=1e9, help="then no other schedule is begun")
    args = parser.parse_args()
    hunt, end = Hunt(args.library), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        if args.kills:
            message = args.first
            while time.monotonic() < end and hunt.kill(
                args.ranks or 2, Play(num_steps=3, kill=(1, message), replicas=args.replicas)
            ):
                message += args.stride
        elif args.places:
            for place in range(NUM_BLOCKS):
                for kind in KINDS:
                    for tight in (False, True):
                        ranks = args.ranks or 2
                        every = range(ranks) if kind == "two forwards" else (place % ranks,)
                        events = tuple(Event(kind, rank, 2, place) for rank in every)
                        micro = 2 if kind == "two forwards" else 1
                        if time.monotonic() < end:
                            play = Play(events=events, tight=tight, num_micro=micro, replicas=args.replicas)
                            hunt.compare(ranks, play)
        else:
            for number in range(args.first, args.first + args.schedules):
                if time.monotonic() < end:
                    ranks = args.ranks or 2 + number % 2
                    hunt.compare(ranks, draw(number, ranks, folder, args.replicas))
        for pool in hunt.pools.values():
            pool.close()
    print(f"{dict(hunt.seen)}; wrong: {len(hunt.wrong)}", *hunt.wrong, sep="\n")
    return 1 if hunt.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
