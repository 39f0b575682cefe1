"""In which order and in which moments of a backward the gradients of chunks are complete: for the next one's script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Completions:
    """Of the backward that runs, and of the last one that ended."""

    def __init__(self) -> None:
        self._moments: dict[int, int] = {}
        self._backward = 0
        self._before: dict[int, int] = {}
        self._partial: set[int] = set()

    def __contains__(self, index: object) -> bool:
        """Whether the gradients of a chunk are complete in the backward that runs."""
        return index in self._moments

    def note(self, index: int, moment: int | None, backward: int) -> None:
        """All gradients of a chunk have arrived in backward number ``backward``; in which moment, if that is known."""
        if self._backward != backward:  # what broke off before it ended is none of this one
            self._moments, self._backward = {}, backward
        if moment is not None:
            self._moments[index] = moment

    def note_reduced(self, index: int, *, is_full: bool) -> None:
        """The ranks have reduced a chunk one by one, and all know whether all had all of its gradients."""
        (self._partial.discard if is_full else self._partial.add)(index)

    def end_backward(self) -> None:
        """What was noted is how the next one may be."""
        if self._moments:
            self._before, self._moments = self._moments, {}

    def usual(self, chunks: Iterable[int]) -> Mapping[int, int]:
        """Of ``chunks`` those whose gradients all ranks have, with their moments, in the order of the last backward."""
        known = set(chunks) - self._partial
        return {index: moment for index, moment in self._before.items() if index in known}
