"""What a model has to do with other ranks: of one that shares its params with none nothing, and every call answers.

A process alone is a group of one, so nobody asks whether there are others. Where ranks share params
:class:`gemini.train.sharding.shards.Shards` takes the place of this.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from gemini.memory.movement.mover import Mover
from gemini.planning.planes import PlaneKind
from gemini.ranks.agree import Facts, agree, tell
from gemini.ranks.agreement import Point
from gemini.ranks.group import Ranks
from gemini.ranks.wire import Wire
from gemini.train.params.by_name import read_range
from gemini.train.params.handle import ParamHandle


class Company:
    """The company of a rank that shares its params with none."""

    def __init__(self, ranks: Ranks, mover: Mover):
        self.ranks, self._mover = ranks, mover
        self.sent_last_step: Counter[str] = Counter()
        """Bytes by what they were sent for."""

    @property
    def divides(self) -> bool:
        """Whether each rank has a part of every chunk; of a param perhaps all or nothing, and yet all read together."""
        return self.ranks.size > 1

    # ---- agreeing -----------------------------------------------------------------------------------------------

    def agree(
        self,
        point: Point,
        doing: str,
        facts: Callable[[], Facts] | None = None,
        refusal: BaseException | None = None,
        *,
        among: Wire | None = None,
        words: str = "values",
    ) -> None:
        """Wait until all ranks of the model stand at ``point``, serving those that do not yet; then go on together, or
        not at all: see :func:`gemini.ranks.agree.agree`.

        Args:
            among: who must agree, if more than those with the same params.
        """
        everyone, among = self.ranks.everyone, among or self.ranks.everyone

        def meet(number: int) -> list[int]:
            return [said for row in self.meet_all(point, number) for said in row]

        # Those with the same params meet first, and serve each other; then all of the job stand together.
        if among is not everyone:
            meet(0)
        agree(among, doing, facts, refusal, swap=meet if among is everyone else None, words=words)

    def agree_on_folder(
        self, point: Point, doing: str, directory: str | os.PathLike[str], refusal: BaseException | None
    ) -> None:
        """Let all who write or read one model do it, in folders with the same name, or none."""
        # Only the name: mounts and drives differ between machines.
        facts = Facts({"directory": Path(os.fsdecode(directory)).name})
        self.agree(point, doing, lambda: facts, refusal, among=self.ranks.writers, words="folder")

    def refuse_differing(self, doing: str, facts: Facts) -> None:
        """Say what differs, on all ranks with the same params, when their checksums do: raises as ``agree``."""
        tell(self.ranks.everyone, doing, facts)

    def meet_all(self, point: Point, detail: int = 0) -> list[list[int]]:
        """Wait until every rank of the model stands at ``point``; what each of them says, by replica."""
        return [[detail]]

    # ---- values -------------------------------------------------------------------------------------------------

    def read_into(self, handle: ParamHandle, kind: PlaneKind, out: torch.Tensor) -> None:
        """Read the values of a param in a plane, whole, into a flat host tensor of the plane's dtype."""
        read_range(self._mover, handle.chunk.planes[kind], handle, out)

    # ---- steps --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a forward begins that a backward may follow."""

    def end_step(self) -> None:
        """Note that an optimizer step is over."""

    def close(self) -> None:
        """End what goes on for the model, which ends."""
