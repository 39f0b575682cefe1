"""Process groups of torch: how they are made by the ranks that need them, and end.

torchrun keeps one store for all its restarts, and torch writes the same names into it each time: a rank that is quick
reads the address where another one listened before it was killed (seen with torch 2.13: "Connection refused", or a wait
for the whole timeout). So the ranks first agree on a word that no earlier attempt knew, and put it before all names.
The number of the restart will not do: each machine counts its own.

torch names a group that is made locally by a hash of its ranks and of how many groups the process has, and ranks that
hash differently wait for each other until the timeout (torch 2.13, ``_hash_ranks_to_str``). Ranks do have different
numbers: of ``new_group([0, 1])`` ranks 0 and 1 keep one, the others none. A group of all ranks is named by a count that
is the same on all of them; for one of some ranks, its members agree through the store first.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gemini.errors import RankLost
from gemini.patches import register
from gemini.ranks import launch
from gemini.ranks.wire import guarded

# How often these ranks have met to make a group: the number of their next meeting in the store.
_made: Counter[tuple[int, ...]] = Counter()
# By ranks, the count of groups that their last group was named by. The next one needs a higher count, since in the
# store the name of a group that has ended still leads to its old addresses.
_highest: dict[tuple[int, ...], int] = {}


def make_subgroup(ranks: Sequence[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of ``ranks`` (global ones, ascending), of which this process is one; called by all of them. If one
    does not come within ``timeout``, which is that of its collectives too, raises RankLost; None is torch's default.
    """
    # A group of all ranks: torch names it by a count that is the same on all of them.
    if len(ranks) == dist.get_world_size():
        with guarded("making a process group for the model"):
            return dist.new_group(list(ranks), backend=backend, timeout=timeout)
    most = max(_group_counts(tuple(ranks), timeout or c10d.default_pg_timeout))
    fill_up = []
    # Groups of this rank alone, which nobody has to join, until its count is that of the others.
    while len(c10d._world.pg_names) < most:
        fill_up.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
    made = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    _highest[tuple(ranks)] = most
    # Only now: while the group got its name they had to count.
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
    # Said before the others are waited for, who wait for it as well.
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


T = TypeVar("T")

_open: weakref.WeakSet[WaitingGroup] = weakref.WeakSet()


class WaitingGroup:
    """A group of some ranks (ascending, with this one), made by all of them at the first use. It is another group than
    those of training, whose messages go on while a checkpoint is written behind it, and waits as long as torch does by
    default (half an hour), whatever was chosen to notice a rank that hangs in a step.
    """

    def __init__(self, global_ranks: Sequence[int]):
        self._ranks = list(global_ranks)
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, made when it is asked for first, by all of its ranks; None for a rank alone."""
        if self._group is None and len(self._ranks) > 1:
            self._group = make_subgroup(self._ranks, "gloo")
            _open.add(self)
        return self._group

    def wait_for_all(self, doing: str) -> None:
        """Let one rank work on something long, while the others wait here. If one does not come, raises RankLost."""
        if self.group is not None:
            with guarded(doing):
                dist.barrier(self.group)

    def exchange(self, value: T, doing: str) -> list[T]:
        """Collect what every rank gives, in their order: plain values and tensors on the CPU; raises as the above."""
        if self.group is None:
            return [value]
        heard: list[Any] = [None] * len(self._ranks)
        with guarded(doing):
            dist.all_gather_object(heard, value, group=self.group)
        return heard

    def close(self) -> None:
        group, self._group = self._group, None  # its threads live as long as somebody refers to it
        if group is not None:
            end_subgroup(group)


@partial(register, "atexit.register")
def end_all() -> None:
    """A thread of gloo may be the last to let go of a tensor, which takes the interpreter: they end before it does."""
    # A copy: the set shrinks when a group is collected meanwhile.
    for waiting in list(_open):
        waiting.close()


_POLL_S = 0.02


def start_group(timeout: timedelta, *, cuda: bool) -> dist.Store:
    """Make the default process group of a process that torchrun or srun has started; its part of the store. If the
    others do not come within ``timeout``, raises RankLost.
    """
    # Before the rendezvous, which reads these variables.
    launch.tell_torch()
    with guarded("joining the other processes"):
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        store = fresh_part(store, rank, size, timeout)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return store


def fresh_part(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A part of ``store`` for the ranks that are alive now; RuntimeError if one does not come within ``timeout``."""
    # Rank 0 chooses, because every attempt has one.
    word = _call_all(store, size, timeout) if rank == 0 else _answer(store, rank, timeout)
    return dist.PrefixStore(f"gemini-{word}", store)


def _call_all(store: dist.Store, size: int, timeout: timedelta) -> str:
    """Rank 0 chooses the word and tells it to whoever greets, until each rank of this attempt has repeated it."""
    word = uuid.uuid4().hex
    greeted: dict[int, bytes] = {}
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if not store.check([f"gemini-greeting/{rank}"]):
                continue
            greeting = store.get(f"gemini-greeting/{rank}")  # perhaps one of a process that is dead
            if greeted.get(rank) != greeting:
                store.set(f"gemini-word-for/{greeting.decode()}", word)
                greeted[rank] = greeting
            # No process of an earlier attempt knows the word: who repeats it is alive.
            if store.check([f"gemini-heard/{word}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"after {timeout.total_seconds():.0f} s there is still no rank {ranks}")
        time.sleep(_POLL_S if missing else 0)
    return word


def _answer(store: dist.Store, rank: int, timeout: timedelta) -> str:
    # A name of this process alone: an answer to an earlier process of this rank is not taken for its own.
    greeting = uuid.uuid4().hex
    store.set(f"gemini-greeting/{rank}", greeting)
    store.wait([f"gemini-word-for/{greeting}"], timeout)
    word = store.get(f"gemini-word-for/{greeting}").decode()
    store.set(f"gemini-heard/{word}/{rank}", "yes")
    return word
