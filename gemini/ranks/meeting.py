"""How the processes of one attempt find each other in a store that outlives attempts.

torchrun keeps one store for all its restarts, and torch writes the same names into it each time: a rank that is quick
reads the address where another one listened before it was killed (seen with torch 2.13: "Connection refused", or a wait
for the whole timeout). So the ranks first agree on a word that no earlier attempt knew, and put it before all names.
The number of the restart will not do: each machine counts its own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from gemini.ranks import launch
from gemini.ranks.wire import guarded

_POLL_S = 0.02


def start_group(timeout: timedelta, *, cuda: bool) -> dist.Store:
    """Make the default process group of a process that torchrun or srun has started; its part of the store.

    Raises:
        RankLost: if the others do not come within ``timeout``.
    """
    stores: list[dist.Store] = []

    launch.tell_torch()

    def meet() -> None:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        stores.append(fresh_part(store, rank, size, timeout))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=stores[0], rank=rank, world_size=size, timeout=timeout)

    guarded("joining the other processes", meet)
    return stores[0]


def fresh_part(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A part of ``store`` for the ranks that are alive now.

    Raises:
        RuntimeError: if one of them does not come within ``timeout``.
    """
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
            if store.check([f"gemini-heard/{word}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"after {timeout.total_seconds():.0f} s there is still no rank {ranks}")
        time.sleep(_POLL_S if missing else 0)
    return word


def _answer(store: dist.Store, rank: int, timeout: timedelta) -> str:
    greeting = uuid.uuid4().hex
    store.set(f"gemini-greeting/{rank}", greeting)
    store.wait([f"gemini-word-for/{greeting}"], timeout)
    word = store.get(f"gemini-word-for/{greeting}").decode()
    store.set(f"gemini-heard/{word}/{rank}", "yes")
    return word
