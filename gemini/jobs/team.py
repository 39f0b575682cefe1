"""The processes of one job: what they tell each other besides the model, and who of them says what went wrong.

They use torch's default process group, which ``join`` makes; Gemini makes groups of its own beside it, so their
messages never meet. A process alone is a team of one: every method answers at once, nothing is sent.

An error is said once. Before the model exists the ranks compare what they found (``all_or_none``) and refuse as one.
Later a rank cannot ask the others, who may be waiting for it in a collective: it leaves its words in torchrun's store,
and a rank that finds the same words there from rank 0 keeps silent (``speaking``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.errors import GeminiError, RankLost
from gemini.jobs.errors import JobError, SaidByRanks, exit_code_of
from gemini.ranks import launch
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
        self._wire = Wire(None) if wire is None else wire
        self._store = store
        self._patience = timedelta(seconds=patience_s)
        self.rank, self.size = self._wire.rank, self._wire.size

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes what only one may write."""
        return self.rank == 0

    def tell(self, value: Any, what: str) -> list[Any]:
        """The ``value`` (plain, as in JSON) of every rank. All call it at the same point, called ``what``."""
        return [json.loads(text) for text in self._wire.exchange_texts(json.dumps(value), what)]

    def swap(self, numbers: list[float], what: str) -> list[list[float]]:
        """The same for some numbers, cheaply: one short message to and from each rank."""
        return self._wire.swap(Tag.VALUES, torch.tensor(numbers, dtype=torch.float64, device="cpu"), what).tolist()

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """A block without collectives that all ranks go through: what one of them refuses in it, all refuse.

        Raises:
            SaidByRanks: on every rank of several, if any raised a ``JobError`` or ``GeminiError`` in the block.
        """
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except (JobError, GeminiError) as e:
            error = e
        texts = self.tell(None if error is None else str(error), what)
        if not any(texts):
            return
        alike = all(text == texts[0] for text in texts)
        own = "" if error is None or (alike and self.rank) else str(error)
        raise SaidByRanks(own if alike or not own else self._mine(own)) from error

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Around everything else: what all ranks run into is said by rank 0, what one runs into by that one.

        Raises:
            SaidByRanks: instead of a ``JobError`` or ``GeminiError`` of one of several ranks.
        """
        try:
            yield
        except SaidByRanks:
            raise
        except (JobError, GeminiError) as e:
            if self.size == 1:
                raise
            raise SaidByRanks(self._words_for(e), exit_code_of(e)) from e

    def _words_for(self, error: Exception) -> str:
        words = str(error)
        if isinstance(error, RankLost) or self._store is None:
            return self._mine(words)
        try:
            self._store.set(f"error/{self.rank}", words)
            if self.is_first:
                return words
            self._store.wait(["error/0"], self._patience)
            return "" if self._store.get("error/0").decode() == words else self._mine(words)
        except RuntimeError:  # rank 0 met no error, or the store went with its process
            return self._mine(words)

    def _mine(self, words: str) -> str:
        return f"rank {self.rank}: {words}"


@contextmanager
def join(timeout_s: float, *, cuda: bool) -> Iterator[Team]:
    """The team of this process; with others, in a process group that waits ``timeout_s`` seconds for any of them.

    Raises:
        RankLost: if the others do not come.
    """
    if dist.is_available() and dist.is_initialized():
        yield Team(Wire(_world())) if dist.get_world_size() > 1 else Team()
        return
    if launch.num_processes() == 1:
        yield Team()
        return
    if not dist.is_available():
        raise JobError(f"{launch.num_processes()} processes were started, but this build of torch cannot connect them.")
    store = start_group(timedelta(seconds=timeout_s), cuda=cuda)
    yield Team(Wire(_world()), dist.PrefixStore("job", store))
    # Not after an error: a group whose ranks stand at different points may wait for them, and the process ends anyway.
    dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
