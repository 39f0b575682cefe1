"""docs/models.md: every class of the auto-mappings with what came out, from the results of a sweep."""

import re
from collections import Counter
from typing import Any

import torch
import transformers

from tests.hunts.zoo.mappings import KINDS, entries

Results = dict[str, dict[str, Any]]

WORDS = {"works": "works", "refused": "refused", "failed": "broken", "untried": "not tried"}

HEAD = """\
<!-- Written by `python tests/hunts/model_zoo.py --results FILE --write`: edit that, not this. -->

# Models

Every class of the auto-mappings of transformers {version} for causal LM, sequence to sequence, masked LM, vision, audio
and vision-language. Each is built from a tiny random config (two layers or one of each kind, 32 wide, 128 words) and
trained for three steps by `GeminiDDP`, with every weight, master and state on NVMe and memory for its most demanding
module, so that chunks are evicted inside forward and inside backward.

- **works**: losses, gradient norms, weights, fp32 masters, states, step counts and buffers are those of the plain
  loop, bit for bit, and chunks were evicted in forward and in backward. The precision it was run in stands beside it
  (every third class is run in fp32 by choice, others where the class does not run in bf16 on a CPU). *+n chunks* means
  that it took room for n more of its largest chunks than the estimated working set, because one module reads the
  weights of another.
- **refused**: GeminiDDP says clearly why it does not train it; the message is given.
- **broken**: neither, a bug.
- **not tried**: the plain loop does not run here either, for want of a package or of a batch that fits the class; so
  nothing is known about it.

"""

TAIL = """
The command is `python tests/hunts/model_zoo.py` (about half an hour on one core); a part of it runs with the tests.
Versions: transformers {transformers}, torch {torch}.
"""


def page(results: Results) -> str:
    """The whole page."""
    parts = [HEAD.format(version=transformers.__version__), summary(results), ""]
    for kind in KINDS:
        parts += [f"## {kind[0].upper()}{kind[1:]}", ""]
        parts += ["| class | tasks | result | run in, or why not |", "|---|---|---|---|"]
        for entry in entries(kind):
            record = results.get(entry.name, {"status": "untried", "reason": "not in the results"})
            tasks = ", ".join(task.lower().replace("_", " ") for task in entry.tasks)
            parts.append(f"| `{entry.name}` | {tasks} | {WORDS[record['status']]} | {remark(record)} |")
        parts.append("")
    versions = TAIL.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0])
    return "\n".join(parts).rstrip("\n") + "\n" + versions


def summary(results: Results) -> str:
    """Counts by kind and result, as a table."""
    lines = ["| kind | classes | " + " | ".join(WORDS.values()) + " |", "|---" * (2 + len(WORDS)) + "|"]
    total: Counter[str] = Counter()
    for kind in KINDS:
        names = [entry.name for entry in entries(kind)]
        counts = Counter(results[name]["status"] if name in results else "untried" for name in names)
        total += counts
        lines.append(f"| {kind} | {len(names)} | " + " | ".join(str(counts[s]) for s in WORDS) + " |")
    lines.append(f"| all | {sum(total.values())} | " + " | ".join(str(total[s]) for s in WORDS) + " |")
    return "\n".join(lines)


def remark(record: dict[str, Any]) -> str:
    """How it works, or why not, in one cell."""
    reason = _plain(record["reason"])
    if record["status"] == "works":
        extra = f", +{record['extra']} chunks" if record.get("extra") else ""
        return record["precision"] + extra + (f"; refused {reason}" if reason else "")
    return reason


_MISSING = re.compile(r"requires the (\w+) library|No module named '(\w+)'")


def _plain(reason: str) -> str:
    missing = _MISSING.search(reason)
    if missing:
        return f"needs {missing.group(1) or missing.group(2)}, which is not among the pinned packages"
    if reason.startswith("forward: "):
        reason = "no batch found: " + reason.removeprefix("forward: ").split(" / ")[0]
    if reason.startswith("build: "):
        reason = "no tiny config found: " + reason.removeprefix("build: ")
    reason = re.sub(r"[|<>`*_\[\]{}]", lambda match: "\\" + match.group(), " ".join(reason.split()))
    return reason if len(reason) <= 300 else reason[:297] + "..."


def rows(text: str) -> dict[str, dict[str, str]]:
    """Result by class by kind, as written on the page."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            found[line[3:].lower()] = {}
        elif match := re.match(r"\| `(\w+)` \| [^|]* \| ([a-z ]+) \|", line):
            found[list(found)[-1]][match.group(1)] = match.group(2)
    return found
