"""What a job says about the tiers: what is used of each budget, and whether it was kept, on every rank."""

from __future__ import annotations

from typing import Any

from gemini.errors import human_bytes
from gemini.planning.plan import Plan
from gemini.planning.traffic import by_name


def tiers_of(memory: Any) -> list[str]:
    """The tiers a memory report has, fastest first."""
    return [tier for tier in ("gpu", "cpu", "nvme") if tier in memory]


def use_line(memory: Any, num_ranks: int = 1) -> str:
    """What of each budget is taken."""
    tiers = ", ".join(
        f"{tier} {human_bytes(memory[tier]['used'])} of {human_bytes(memory[tier]['budget'])}"
        for tier in tiers_of(memory)
    )
    return f"memory: {tiers}" if num_ranks == 1 else f"memory of rank 0, about that of each: {tiers}"


def plan_lines(plan: Plan | None) -> list[str]:
    """What each tier will hold at most, and what moves in a step, before the first one."""
    if plan is None:
        return []
    tiers = [
        f"  {tier.value}: {', '.join(f'{what} {human_bytes(n)}' for what, n in held.items())}"
        for tier, held in plan.held.items()
        if held
    ]
    moved = ", ".join(f"{name} {human_bytes(n)}" for name, n in by_name(plan.traffic).items() if n)
    return [*tiers, f"  moved in a step: {moved or 'nothing'}"]


def budget_lines(*reports: Any) -> tuple[list[str], bool]:
    """For each tier whether its peak stayed within its budget, in the reports of all ranks, and whether all did."""
    lines, all_within = [], True
    for tier in tiers_of(reports[0]):
        tiers = [report[tier] for report in reports]
        within = all(tier["peak"] <= tier["budget"] for tier in tiers)
        all_within = all_within and within
        # Where all kept to it, the one that came closest; else the one that went furthest over.
        rank, most = max(enumerate(tiers), key=lambda item: item[1]["peak"] - item[1]["budget"])
        verdict = "stayed within" if within else "WENT OVER"
        where = "" if len(reports) == 1 else f" on {'each' if within else 'some'} of {len(reports)} ranks"
        who = "" if len(reports) == 1 else f"rank {rank} "
        lines.append(
            f"{tier}: {verdict} its budget{where}, {who}peak {human_bytes(most['peak'])} of "
            f"{human_bytes(most['budget'])}"
        )
    return lines, all_within


def shares(memory: Any) -> dict[str, Any]:
    """What ``budget_lines`` needs of a report, as plain values for the other ranks."""
    return {tier: {"peak": memory[tier]["peak"], "budget": memory[tier]["budget"]} for tier in tiers_of(memory)}
