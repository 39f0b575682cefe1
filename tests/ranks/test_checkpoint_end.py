"""What a checkpoint leaves in a process: no thread of gloo that is still there when the interpreter ends.

Such a thread may be the last to hold a tensor of a collective. Letting go of it takes the interpreter, so the process
is aborted if there is none any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gemini
from gemini.ranks import process_groups
from tests.ranks.pool import Pool


def num_threads() -> int:
    """Threads of gloo that work on collectives of a group."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since it was listed
            names.append(task.joinpath("comm").read_text().strip())
    return names.count("pt_gloo_runloop")


def threads_of_a_save(folder: Path) -> tuple[int, int, int]:
    """Before the first checkpoint, with one written and its handle kept, and when the program's end has begun."""
    config = gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu=64 * 2**20), device="cpu")
    model = gemini.GeminiDDP(torch.nn.Linear(32, 32), config)
    optimizer = gemini.HybridAdam(model.parameters())
    before = num_threads()
    handles = [gemini.save_checkpoint(folder / str(wait), model, optimizer, wait=wait) for wait in (True, False)]
    for handle in handles:
        handle.wait()
    saved = num_threads()
    process_groups.end_all()
    deadline = time.monotonic() + 10
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined may be listed a moment longer
    return before, saved, num_threads()


def test_the_threads_of_checkpoints_end_before_the_interpreter(pool_of: Callable[[int], Pool], tmp_path: Path) -> None:
    """Nothing may follow in the same default group: one made after another has ended may get its dead addresses."""
    for before, saved, ended in pool_of(2).run(threads_of_a_save, tmp_path):
        assert saved > before, "no thread was seen: this test looks for the wrong name"
        assert ended <= before
