"""What torchrun tells a process it has started: how many there are, and which of them speaks. Loads nothing heavy.

Other launchers set the same variables. A process without them is alone.
"""

from __future__ import annotations

import os

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_processes() -> int:
    """How many processes were started together with this one, itself included."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _NEEDED) else 1


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) if num_processes() > 1 else 0


def local_size() -> int:
    """How many processes were started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if num_processes() > 1 else 1


def speaks() -> bool:
    """Whether this process says what all find out alike, before they can compare: the first one of each machine."""
    return local_rank() == 0


def again(arguments: str) -> str:
    """How to start ``gemini`` with ``arguments`` again, in as many processes."""
    if num_processes() == 1:
        return f"gemini {arguments}"
    if num_processes() == local_size():
        return f"torchrun --nproc-per-node {local_size()} -m gemini {arguments}"
    return f"torchrun, as before on every machine, -m gemini {arguments}"
