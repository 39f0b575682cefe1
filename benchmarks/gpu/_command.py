"""A command line as a report tells it: without what is only one machine's, its folders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

PATHS = ("out", "spill", "deepspeed", "extensions")


def told_command(argv: Sequence[str]) -> str:
    """``python benchmarks/gpu/size.py --spill DIR``, of ``sys.argv``; also where an argument holds further ones."""
    script = argv[0].replace("\\", "/").rpartition("benchmarks/")[2]
    words = ["python", f"benchmarks/{script}", *argv[1:]]
    for number, word in enumerate(words):
        if words[number - 1].removeprefix("--") in PATHS:
            words[number] = "DIR"
        else:
            words[number] = re.sub(rf"(--(?:{'|'.join(PATHS)})[ =])\S+", r"\1DIR", word)
    return shlex.join(words)
