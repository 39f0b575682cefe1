"""The processes of one job: what they tell each other besides the model, and who of them says what went wrong.

They use torch's default process group, which ``join`` makes; Gemini makes groups of its own beside it, so their
messages never meet. A process alone is a team of one: every method answers at once, nothing is sent.

An error is said once. Before the model exists the ranks refuse as one (``all_or_none``), and the first one says it.
Later a rank cannot ask the others, who may be waiting for it in a collective: it leaves its words in torchrun's store,
and a rank that finds the same words there from rank 0 keeps silent (``speaking``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.errors import GeminiError, RankLost
from gemini.jobs.errors import BROKEN, REFUSED, SaidByRanks
from gemini.ranks import launch
from gemini.ranks.agree import Attempt, Facts, agree
from gemini.ranks.process_groups import start_group
from gemini.ranks.wire import Tag, Wire


class Team:
    """This process among those of the job.

    Args:
        wire: to the others, if there are any.
        store: where words are left for the others, if there is such a place.
        patience_s: how long a rank waits to see whether rank 0 runs into the same error; lost once where it does not.
    """

    def __init__(self, wire: Wire | None = None, store: dist.Store | None = None, *, patience_s: float = 5) -> None:
        self._wire, self._store, self._patience = wire or Wire(None), store, timedelta(seconds=patience_s)
        self.rank, self.size = self._wire.rank, self._wire.size
        self.is_first = self.rank == 0
        """Whether this process prints, and writes what only one may write."""

    def tell(self, value: Any, what: str) -> list[Any]:
        """The ``value`` (plain, as in JSON) of every rank. All call it at the same point, called ``what``."""
        return [json.loads(text) for text in self._wire.exchange_texts(json.dumps(value), what)]

    def any(self, wish: bool, what: str) -> bool:
        """Whether any rank has the wish: one short message to and from each of them."""
        return bool(self._wire.swap(Tag.VALUES, torch.tensor([float(wish)], device="cpu"), what).any())

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[dict[str, Any]]:
        """A block without collectives that all ranks go through: what one of them refuses in it, all refuse. It is
        given a place for values (as in JSON) that must be the same on all of them.
        """
        alike: dict[str, Any] = {}
        with Attempt(GeminiError) as attempt:
            yield alike
        try:
            agree(self._wire, what, lambda: Facts(alike), attempt.refusal)
        except RankLost:
            raise
        except GeminiError as e:
            raise SaidByRanks(str(e) if self.is_first else "") from e

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Around everything else: what all ranks run into is said by rank 0, what one runs into by that one."""
        try:
            yield
        except SaidByRanks:
            raise
        except GeminiError as e:
            raise SaidByRanks(self._words_for(e), BROKEN if isinstance(e, RankLost) else REFUSED) from e

    def _words_for(self, error: Exception) -> str:
        words = str(error)
        if self.size == 1:
            return words
        if self._store is not None and not isinstance(error, RankLost):
            with suppress(RuntimeError):  # rank 0 met no error, or the store went with its process
                if self.is_first:
                    self._store.set("error", words)
                    return words
                self._store.wait(["error"], self._patience)
                if self._store.get("error").decode() == words:
                    return ""
        return f"rank {self.rank}: {words}"


@contextmanager
def join(timeout_s: float, *, cuda: bool) -> Iterator[Team]:
    """The team of this process; with others, in a process group that waits ``timeout_s`` seconds for any of them."""
    if dist.is_available() and dist.is_initialized():
        yield Team(Wire(dist.group.WORLD)) if dist.get_world_size() > 1 else Team()
    elif launch.num_processes() == 1:
        yield Team()
    else:
        store = start_group(timedelta(seconds=timeout_s), cuda=cuda)
        yield Team(Wire(dist.group.WORLD), dist.PrefixStore("job", store))
        # Not after an error: a group whose ranks stand at different points may wait for them, and the process ends.
        dist.destroy_process_group()
