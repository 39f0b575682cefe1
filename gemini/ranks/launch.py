"""What the launcher tells a process it has started: how many there are, and which of them speaks. Loads nothing heavy.

torchrun and most others (Ray Train, Kubeflow, accelerate) set the same variables. Slurm's ``srun`` sets its own, which
are read as those. A process without either is alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

# What torch's rendezvous "env://" reads; a process that lacks one of them was not started by a launcher.
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_processes() -> int:
    """How many processes were started together with this one, itself included."""
    told = _told()
    return int(told["WORLD_SIZE"]) if all(name in told for name in _NEEDED) else 1


def rank() -> int:
    """The number of this process among them."""
    return int(_told()["RANK"]) if num_processes() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine."""
    told = _told()
    return int(told.get("LOCAL_RANK", told["RANK"])) if num_processes() > 1 else 0


def speaks() -> bool:
    """Whether this process says what all find out alike, before they can compare: the first one of each machine."""
    return local_rank() == 0


def again(arguments: str) -> str:
    """How to start ``gemini`` with ``arguments`` again, in as many processes."""
    how = "" if num_processes() == 1 else "torchrun, as before, -m " if "RANK" in os.environ else "srun, as before, "
    return f"{how}gemini {arguments}"


def tell_torch(environment: MutableMapping[str, str] = os.environ) -> None:
    """Write down what ``srun`` has said in the variables that torch reads."""
    environment.update(_told(environment))


def _told(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The launcher's variables by torch's names. Only what ``srun`` starts has a number of tasks of a *step*: a batch
    script is one process, whatever it asked for.
    """
    num = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if "RANK" in environment or num == 1 or "SLURM_PROCID" not in environment:
        return environment
    job, step = int(environment.get("SLURM_JOB_ID", 0)), int(environment.get("SLURM_STEP_ID", 0))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(num),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(
            _tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num)), int(environment.get("SLURM_NODEID", 0)))
        ),
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "localhost")),
        # The same on all of a step, another for the next one, and below what the system gives out by itself.
        "MASTER_PORT": str(12000 + (job * 31 + step) % 18000),
    }
    # What is set already, by torchrun or the user, is not overwritten.
    return {**found, **environment}


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: ``node[007-012,20],other`` begins with ``node007``."""
    # A prefix, perhaps a list of numbers and ranges, perhaps a suffix, up to the first comma outside of brackets.
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", hosts)
    if match is None:
        return hosts
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split("[-,]", numbers)[0] if numbers else "") + (suffix or "")


def _tasks_of(counts: str, node: int) -> int:
    """Slurm's ``2(x3),1`` are the tasks of four nodes: 2, 2, 2 and 1."""
    each: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        each += [int(count)] * int(times or 1)
    return each[node]
