"""Work that ranks do together or not at all: each does its part, the first one hears of all of them and concludes.

What fails on one rank fails on all, with one error that names the rank. In one process the same steps are taken without
any message, and an error is raised as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from gemini import errors
from gemini.errors import GeminiError
from gemini.ranks.wire import guarded

T = TypeVar("T")
R = TypeVar("R")
Failure = tuple[str, str]
"""A failure as other ranks hear of it: the class of the error it becomes there, and its text."""


class Handshake:
    """The steps of one piece of work, for error messages called ``doing``.

    Args:
        group: the ranks, on the CPU; None in one process.
    """

    def __init__(self, group: dist.ProcessGroup | None, doing: str):
        self._group, self._doing = group, doing
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def step(self, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Do ``work`` on every rank, then ``conclude`` on the first one from what each has given; all get its result.

        No rank comes back before all have done their work, well or not.

        Raises:
            GeminiError: on every rank, naming the one that failed; an interrupt of this rank stays what it is.
            RankLost: if a rank died or does not answer.
        """
        if self._group is None:
            return conclude([work()])
        given: Any = None
        concluded: Any = None
        failure: BaseException | None = None
        try:
            given = work()
        except BaseException as e:
            failure = e
        rows = self._gather((given, None if failure is None else _as_failure(failure)))
        failures = {rank: failed for rank, (_, failed) in enumerate(rows) if failed is not None}
        if self.rank == 0 and not failures:
            try:
                concluded = conclude([given for given, _ in rows])
            except BaseException as e:
                failure, failures = e, {0: _as_failure(e)}
        concluded, failures = self._broadcast((concluded, failures))
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failures:
            raise self._error(failures) from failure
        return concluded

    def _gather(self, said: Any) -> list[Any]:
        """On the first rank what each rank says, elsewhere nothing."""
        heard: list[Any] | None = [None] * self.size if self.rank == 0 else None
        first = self._global_rank(0)
        guarded(self._doing, lambda: dist.gather_object(said, heard, dst=first, group=self._group))
        return heard or []

    def _broadcast(self, said: Any) -> Any:
        """What the first rank says."""
        heard = [said]
        first = self._global_rank(0)
        guarded(self._doing, lambda: dist.broadcast_object_list(heard, src=first, group=self._group))
        return heard[0]

    def _error(self, failures: dict[int, Failure]) -> GeminiError:
        rank, (kind, why) = min(failures.items())
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        return error_called(kind)(f"{self._doing} failed on rank {self._global_rank(rank)}{others}: {why}")

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)


def error_called(name: str, default: type[GeminiError] = GeminiError) -> type[GeminiError]:
    """The class of ours with that name, else ``default``: what another rank raised, raised here."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, GeminiError) else default


def _as_failure(cause: BaseException) -> Failure:
    if isinstance(cause, OSError):
        return "StorageError", str(cause.strerror or cause)
    if isinstance(cause, GeminiError):
        return type(cause).__name__, str(cause)
    return "GeminiError", f"{type(cause).__name__}: {cause}"
