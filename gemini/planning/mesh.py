"""The ranks of a mesh laid out over machines: who is on one machine, and what goes over which wire.

Ranks are numbered as ``DeviceMesh`` numbers them, the last dim first: ``tp`` innermost, then ``cp``, ``dp`` and ``pp``.
So neighbours in ``tp`` are on one machine before those of any other dim are.
"""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Ranks that send each other something: how many, and how many of them are on one machine."""

    size: int
    local: int

    @property
    def crosses(self) -> bool:
        """Whether they are on several machines."""
        return self.local < self.size


class MeshSizes(NamedTuple):
    """The sizes of a mesh's dims. Params are sharded over ``dp`` and ``cp`` together."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Ranks that have parts of the same chunks."""
        return self.dp * self.cp

    def __str__(self) -> str:
        """The dims with more than one rank: "pp 4 x dp 2 x tp 8"."""
        return " x ".join(f"{dim} {size}" for dim, size in self._asdict().items() if size > 1) or "one rank"


class Grid(NamedTuple):
    """A mesh over machines of ``per_machine`` ranks each."""

    sizes: MeshSizes
    per_machine: int

    @property
    def slices(self) -> Group:
        return self._group(1, self.sizes.tp)

    @property
    def parts(self) -> Group:
        return self._group(self.sizes.tp, self.sizes.cp)

    @property
    def shards(self) -> Group:
        return self._group(self.sizes.tp, self.sizes.shards)

    @property
    def stages(self) -> Group:
        return self._group(self.sizes.tp * self.sizes.shards, self.sizes.pp)

    def _group(self, stride: int, size: int) -> Group:
        return Group(size, max(1, min(size, self.per_machine // stride)))


class Sent(NamedTuple):
    """Bytes that one rank sends to ranks of its machine, and to those of others."""

    inside: float = 0.0
    between: float = 0.0


def sent_in_ring(group: Group, num_bytes: float) -> Sent:
    """What becomes of ``num_bytes`` that each rank of a ring sends on.

    Of B bytes that all ranks are to have, each sends ``num_bytes`` = B (size - 1) / size. Rings are laid so that each
    machine receives what it has not, B (size - local) / size, once, through the network ports of its ``local`` ranks
    together, and hands it around inside. As NCCL does with one port for each GPU.
    """
    if not group.crosses:
        return Sent(num_bytes, 0.0)
    whole = num_bytes * group.size / (group.size - 1)
    between = whole * (group.size - group.local) / group.size / group.local
    return Sent(whole * (group.local - 1) / group.local, between)
