"""What a job says about budgets: what to give where they are too small, and whether each was kept, on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.errors import BudgetExceeded, human_bytes
from gemini.jobs.errors import JobError

_DRIVE = re.compile(r"nvme_path= and nvme=(\d+) (\w+)")


def in_options(remedy: str, drive: str) -> str:
    """What would make a model fit, in the words of a command whose options ``drive`` bring a drive in."""
    return _DRIVE.sub(rf"{drive} \1\2", remedy)


@contextmanager
def refusing_in_options(drive: str, more: str) -> Iterator[None]:
    """Say of a model that does not fit what options do, and nothing of one that is not trained; ``more`` stands behind.

    Raises:
        JobError: in the place of ``BudgetExceeded``.
    """
    try:
        yield
    except BudgetExceeded as e:
        refusal = str(e).partition(" If it is only evaluated")[0].rstrip(".")
        raise JobError(f"{in_options(refusal, drive)}. {more}") from e


def tiers_of(memory: Any) -> list[str]:
    """The tiers a memory report has, fastest first."""
    return [tier for tier in ("gpu", "cpu", "nvme") if tier in memory]


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
