"""How far plans are from the optimum, and policies from each other, on random instances of paging.

    python benchmarks/plan_quality.py --instances 1000 --out benchmarks/reports/plan_quality_<date>.md

Instances have up to 8 chunks, one plane and two tiers: palindromes as forward and backward make them, random orders,
and moments that need two chunks. The optimum is the shortest path over resident subsets (Dijkstra's algorithm). Counts
only: nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "planning")]

from paging import fetched_bytes, least_bytes, random_instance, walk  # noqa: E402

from benchmarks._report import add_out, head, publish, table  # noqa: E402
from gemini.planning.moves import cheapest_moves, moves_by_policy  # noqa: E402
from gemini.planning.policy import NextUse  # noqa: E402
from gemini.testing.policies import FirstInFirstOut, LeastRecentlyUsed, StaticFraction  # noqa: E402

POLICIES = ("next use", "least recently used", "first in first out", "static half")


def policies(sizes: dict[int, int]) -> dict[str, object]:
    half = StaticFraction.of([sizes[i] for i in sorted(sizes)], 0.5)
    return dict(zip(POLICIES, (NextUse(), LeastRecentlyUsed(), FirstInFirstOut(), half), strict=True))


def measure(instances: int, seed: int, *, equal: bool) -> dict[str, list[float]]:
    """For every instance the bytes of each policy and of the plan over the optimum's."""
    rng = random.Random(seed)
    ratios: dict[str, list[float]] = {"plan": [], **{name: [] for name in POLICIES}}
    for _ in range(instances):
        accesses, sizes, room = random_instance(rng, equal=equal)
        least = least_bytes(accesses, sizes, room)
        made = {"plan": cheapest_moves(accesses, sizes=sizes, room=room)}
        for name, policy in policies(sizes).items():
            made[name] = moves_by_policy(accesses, sizes=sizes, room=room, policy=policy)  # type: ignore[arg-type]
        for name, moves in made.items():
            walk(moves, accesses, sizes, room)
            ratios[name].append(fetched_bytes(moves, sizes) / least)
    return ratios


def quality(ratios: dict[str, list[float]]) -> list[str]:
    rows = []
    for name, found in ratios.items():
        optimal = sum(ratio <= 1 + 1e-9 for ratio in found) / len(found)
        rows.append([name, f"{optimal:.1%}", f"{sum(found) / len(found):.4f}", f"{max(found):.3f}"])
    return table(["moves by", "optimal in", "mean over optimum", "worst"], rows)


def against_next_use(ratios: dict[str, list[float]]) -> list[str]:
    """How often and by how much next use moves more than another policy."""
    lines = []
    for name in POLICIES[1:]:
        pairs = list(zip(ratios["next use"], ratios[name], strict=True))
        more = [a / b for a, b in pairs if a > b * (1 + 1e-9)]
        verdict = Counter(
            "more" if a > b * (1 + 1e-9) else "less" if b > a * (1 + 1e-9) else "as much" for a, b in pairs
        )
        by = f", on average {sum(more) / len(more) - 1:.1%} more there, at worst {max(more) - 1:.1%}" if more else ""
        lines.append(
            f"- Next use moves less than {name} in {verdict['less']}, as much in {verdict['as much']}, more in "
            f"{verdict['more']} of {len(pairs)} instances{by}."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=5)
    add_out(parser)
    options = parser.parse_args()
    equal = measure(options.instances, options.seed, equal=True)
    mixed = measure(options.instances, options.seed + 1, equal=False)
    lines = [
        *head(
            "Plan quality",
            [f"{options.instances} random instances each, seed {options.seed}. Bytes fetched over the optimum's."],
        ),
        "## Chunks of one size", "", *quality(equal), *against_next_use(equal), "",
        "## Chunks of mixed sizes (1 to 20)", "",
        "Next use is not optimal here: it looks at when a chunk is needed again, not at what it frees.", "",
        *quality(mixed), *against_next_use(mixed), "",
        f"Goal: the plan within 2 % of the optimum on every instance: "
        f"{'met' if max(*equal['plan'], *mixed['plan']) <= 1.02 else 'NOT met'} "
        f"(worst {max(*equal['plan'], *mixed['plan']):.4f}).",
    ]  # fmt: skip
    publish(lines, options.out)


if __name__ == "__main__":
    main()
