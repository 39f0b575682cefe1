"""Process groups of some ranks, made by those ranks alone.

torch names a group that is made locally by a hash of its ranks and of how many groups the process has, and ranks that
hash differently wait for each other until the timeout (torch 2.13, ``_hash_ranks_to_str``). Ranks do have different
numbers: of ``new_group([0, 1])`` ranks 0 and 1 keep one, the others none. A group of all ranks is named by a count that
is the same on all of them; for one of some ranks, its members agree through the store first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gemini.errors import RankLost
from gemini.ranks.wire import guarded

_made: Counter[tuple[int, ...]] = Counter()
_highest: dict[tuple[int, ...], int] = {}


def make_subgroup(ranks: Sequence[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of ``ranks`` (global ones, ascending), of which this process is one; called by all of them.

    ``timeout``: of its collectives and of waiting for the others to come here; None is torch's default.

    Raises:
        RankLost: if one of them does not come.
    """
    if len(ranks) == dist.get_world_size():
        groups: list[dist.ProcessGroup] = []
        guarded(
            "making a process group for the model",
            lambda: groups.append(dist.new_group(list(ranks), backend=backend, timeout=timeout)),
        )
        return groups[0]
    most = max(_group_counts(tuple(ranks), timeout or c10d.default_pg_timeout))
    fill_up = []
    while len(c10d._world.pg_names) < most:
        fill_up.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
    made = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    _highest[tuple(ranks)] = most
    for group in fill_up:
        dist.destroy_process_group(group)
    return made


def end_subgroup(group: dist.ProcessGroup) -> None:
    """End a group of :func:`make_subgroup`, with its threads and connections; its ranks are done with it."""
    with contextlib.suppress(Exception):  # ended by the program already, with the default group
        dist.destroy_process_group(group)


def _group_counts(ranks: tuple[int, ...], timeout: timedelta) -> list[int]:
    """How many groups each of ``ranks`` has, or should have: the name of a group that has ended leads nowhere."""
    default = dist.group.WORLD
    assert default is not None
    meeting = f"gemini/subgroup/{'_'.join(map(str, ranks))}/{_made[ranks]}"
    _made[ranks] += 1
    store = c10d._world.pg_map[default][1]
    mine = f"{meeting}/{dist.get_rank()}"
    store.set(mine, str(max(len(c10d._world.pg_names), _highest.get(ranks, -1) + 1)))
    counts = []
    for rank in ranks:
        try:
            store.wait([f"{meeting}/{rank}"], timeout)
        except RuntimeError as e:
            _made[ranks] -= 1
            store.delete_key(mine)  # they may meet here at another attempt
            raise RankLost(
                f"rank {rank} did not come to make a process group of ranks {list(ranks)} within {timeout}. It died, "
                "hangs, or does not wrap this model: its own output says why"
            ) from e
        counts.append(int(store.get(f"{meeting}/{rank}")))
    return counts
