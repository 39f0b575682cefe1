"""What a hunt found: counts by feature and outcome, findings by kind with the smallest program of each."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.hunts.program_draw import Block, Program, fitted, program_of
from tests.hunts.program_run import FAILURES, GOES_ON, OUTCOMES, REFUSED, Result
from tests.hunts.program_source import source


def table(results: Iterable[Result]) -> str:
    """One row per feature: how many runs with it ended how. A run counts in the row of each of its features."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for result in results:
        total[result.outcome] += 1
        for feature in {*features_of(result.seed), f"at {result.placement}", f"in {result.precision}"}:
            rows[feature][result.outcome] += 1
    width = max(map(len, rows), default=10) + 2
    lines = [" " * width + "".join(f"{name:>15}" for name in OUTCOMES)]
    for feature in sorted(rows):
        lines.append(f"{feature:<{width}}" + "".join(f"{rows[feature][name] or '':>15}" for name in OUTCOMES))
    lines.append(f"{'all':<{width}}" + "".join(f"{total[name]:>15}" for name in OUTCOMES))
    return "\n".join(lines)


def features_of(seed: int) -> list[str]:
    return program_of(seed).features


def findings(results: Iterable[Result], outcomes: tuple[str, ...]) -> str:
    """Runs of some outcomes by kind: how many, the program with the fewest odd parts, what they have in common."""
    kinds: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.outcome in outcomes:
            kinds[result.outcome, result.kind].append(result)
    lines = []
    for (outcome, kind), found in sorted(kinds.items(), key=lambda item: -len(item[1])):
        least = min(found, key=lambda r: (len(features_of(r.seed)), r.seed))
        often = Counter(feature for r in {r.seed: r for r in found}.values() for feature in features_of(r.seed))
        most = ", ".join(f"{name} {n}" for name, n in often.most_common(6) if name not in ORDINARY_FEATURES)
        lines.append(f"{outcome} x {len(found)}: {kind}")
        lines.append(f"    --replay {least.seed}:{least.placement}:{least.precision}  {features_of(least.seed)}")
        lines.append(f"    {least.detail.splitlines()[0][:300] if least.detail else ''}")
        lines.append(f"    most often with: {most}")
    return "\n".join(lines)


ORDINARY_FEATURES = {
    "objective plain", "habit grads", "habit clip", "habit evaluate", "kind linear", "kind own", "kind norm",
    "kind mlp", "kind attention", "exit tuple", "exit dict",
}  # fmt: skip


def write(path: Path, results: list[Result], settings: dict[str, Any]) -> None:
    """All that was found, as JSON: settings, counts, and every run that was not right."""
    counts = Counter(result.outcome for result in results)
    others = [r.as_json() | {"features": features_of(r.seed)} for r in results if r.outcome != "right"]
    path.write_text(json.dumps({"settings": settings, "counts": counts, "runs": others}, indent=1))


def summary(results: list[Result]) -> str:
    parts = [table(results)]
    for title, outcomes in (("refused", (REFUSED,)), ("findings", (*FAILURES, GOES_ON))):
        told = findings(results, outcomes)
        if told:
            parts.append(f"---- {title} " + "-" * 60 + f"\n{told}")
    return "\n\n".join(parts)


# ---- shrinking -----------------------------------------------------------------------------------------------------


def smaller(program: Program) -> Iterable[Program]:
    """Programs with one part less."""
    for at in range(len(program.blocks)):
        if len(program.blocks) > 1:
            blocks = program.blocks[:at] + program.blocks[at + 1 :]
            target = program.target - (program.target > at)
            yield replace(program, blocks=blocks, target=min(target, len(blocks) - 1))
    if program.objective != "plain":
        yield replace(program, objective="plain")
    for name in program.habits:
        yield replace(program, habits=tuple(h for h in program.habits if h != name))
    for name in program.root:
        yield replace(program, root=tuple(r for r in program.root if r != name))
    if program.root_exit != "tensor":
        yield replace(program, root_exit="tensor")
    if program.adam != "whole":
        yield replace(program, adam="whole")
    for name in ("schedule", "adapter"):
        if getattr(program, name):
            yield replace(program, **{name: ""})
    for at, block in enumerate(program.blocks):
        simplest = Block()
        for name in ("inside", "aux", "late", "call", "exit", "kind", "frozen", "numbered"):
            if getattr(block, name) != getattr(simplest, name):
                one = replace(block, **{name: getattr(simplest, name)})
                yield replace(program, blocks=(*program.blocks[:at], one, *program.blocks[at + 1 :]))
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)
    if program.batch > 1:
        yield replace(program, batch=1)
    if program.width > 4:
        yield replace(program, width=4)


def shrink(program: Program, still: Callable[[str], bool]) -> Program:
    """Drop parts one by one as long as ``still(source)`` holds."""
    while True:
        for candidate in smaller(program):
            candidate = fitted(candidate)
            if candidate == program:
                continue
            try:
                text = source(candidate)
            except KeyError:
                continue
            if still(text):
                program = candidate
                break
        else:
            return program
