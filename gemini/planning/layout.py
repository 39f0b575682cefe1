"""Which params share a chunk, and where in it each one stands: the layout, a pure function of names and sizes.

Chunks follow the model's repeated structure: params of one repeated block (``model.layers.7``) never share a chunk with
those of another, and blocks with the same params in the same order get chunks of the same shape. So the padding is a
few alignment gaps, and a handful of sizes serves a whole model (a single chunk size for all wastes 3 to 18 %).

Sizes are in elements, because a chunk has planes of several element sizes. Every param starts at a multiple of
``align`` elements, which is a page of 4 KiB in every plane that may be in a file (2048 where 2-byte planes are the
smallest), so each param's part of each plane can be read and written by direct I/O, and a plane fills whole pages.

Weights that are codes of a few bits have chunks of their own, whose elements are bytes, and so have those that stay in
fp32 where the others are of two bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

from gemini.planning.planes import ALIGN, PAGE, compute_itemsize, precision_of

DEFAULT_MAX_CHUNK = 64 * 2**20
"""Elements above which a block is cut into several chunks (128 MiB of bf16). A larger single param is its own chunk."""

_INDEX = re.compile(r"^(?P<block>(?:.*?\.)?\d+)\.")


@dataclass(frozen=True)
class ParamSpec:
    """The facts of a param for the layout; ``exact``: it keeps exact states where others do not; ``apart``: its
    chunk holds nothing else; ``coded``: it is bytes of codes; ``fp32``: it stays in fp32 where others do not.
    """

    name: str
    numel: int
    trainable: bool = True
    exact: bool = False
    apart: bool = False
    coded: bool = False
    fp32: bool = False


@dataclass(frozen=True)
class Slot:
    """A param's place in its chunk: elements ``[start, start + numel)``."""

    name: str
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Part:
    """A rank's part of a param: elements ``[start, stop)`` of its planes are the param's from ``offset`` on."""

    start: int
    stop: int
    offset: int

    @cached_property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkSpec:
    """A contiguous run of whole params of one block; ``numel`` includes the padding, the same on every rank. Params
    start at multiples of ``align``. ``exact``: its params keep exact states where those of other chunks are compact.
    ``coded``: its elements are bytes of codes, of several weights each. ``fp32``: it stays in fp32.
    """

    index: int
    slots: tuple[Slot, ...]
    numel: int
    trainable: bool
    align: int = ALIGN
    exact: bool = False
    coded: bool = False
    fp32: bool = False

    def itemsize(self, precision: str) -> int:
        """Bytes per element of the gathered weights, in a model of ``precision``."""
        return compute_itemsize(precision_of(self, precision), coded=self.coded)

    def grad_itemsize(self, itemsize: int) -> int:
        """Bytes per element of a gradient on its way, where others have ``itemsize``."""
        return 4 if self.fp32 else itemsize

    @property
    def payload(self) -> int:
        return sum(slot.numel for slot in self.slots)


def part_of(slot: Slot, chunk_numel: int, ranks: int, rank: int) -> Part:
    """The part of ``slot`` in the shard of ``rank``: elements ``[rank * n / ranks, (rank + 1) * n / ranks)`` of the
    chunk are elements ``[0, n / ranks)`` of that rank's planes. Empty where the param stands in other shards only.
    """
    shard = chunk_numel // ranks
    begin = rank * shard
    first, last = max(slot.start, begin), min(slot.stop, begin + shard)
    return Part(0, 0, 0) if first >= last else Part(first - begin, last - begin, first - slot.start)


@dataclass(frozen=True)
class Layout:
    """All chunks of a model, in declaration order of their first params."""

    chunks: tuple[ChunkSpec, ...]
    ranks: int

    @property
    def numel(self) -> int:
        return sum(chunk.numel for chunk in self.chunks)

    @property
    def payload(self) -> int:
        return sum(chunk.payload for chunk in self.chunks)


def block_of(name: str) -> str:
    """The outermost numbered block of a param: ``block_of("model.layers.7.mlp.w") == "model.layers.7"``, or ``""``."""
    return match["block"] if (match := _INDEX.match(name)) else ""


def page_up(numel: int, align: int = ALIGN) -> int:
    """The element count rounded up to where the next param can start: a whole page in every plane."""
    return -(-numel // align) * align


def make_layout(
    params: Sequence[ParamSpec], *, ranks: int = 1, max_chunk: int = DEFAULT_MAX_CHUNK, align: int = ALIGN
) -> Layout:
    """Cut ``params`` (in declaration order, tied names once) into chunks.

    A chunk ends where the block ends, where trained and frozen params meet (or those with exact states and others,
    codes and numbers, fp32 and less), at a param that stands apart, or where ``max_chunk`` elements would be passed.
    Blocks that are larger than ``max_chunk`` are cut into pieces of about equal size. ``numel`` of every chunk is a
    multiple of ``ranks``, and each rank's shard of it a whole number of pages in every plane. Raises ValueError without
    params, with a repeated name, or a negative number of elements.
    """
    if not params:
        raise ValueError("the model has no params: there is nothing to manage")
    if len({p.name for p in params}) != len(params):
        raise ValueError("the layout was given a param name twice; pass tied params once")
    chunks: list[ChunkSpec] = []
    for run in _runs(params):
        first, own = run[0], max(align, PAGE) if run[0].coded else align  # codes have a byte per element
        # Whole pages, and one for a param without elements too, so that no chunk is empty.
        rooms = [page_up(max(spec.numel, 1), own) for spec in run]
        for begin, end in _pieces(rooms, max_chunk):
            *starts, stop = accumulate(rooms[begin:end], initial=0)
            slots = [Slot(spec.name, at, spec.numel) for spec, at in zip(run[begin:end], starts, strict=True)]
            kind = first.trainable, own, first.exact, first.coded, first.fp32
            chunks.append(ChunkSpec(len(chunks), tuple(slots), page_up(stop, ranks * own), *kind))
    return Layout(tuple(chunks), ranks)


def _pieces(rooms: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut a run of params that need so much room into pieces: the first of each, and the first behind it."""
    total = sum(rooms)
    num_pieces = -(-total // most)
    begin = filled = done = num_closed = 0
    for number, room in enumerate(rooms):
        # The cut nearest to an even split; a param is never divided.
        past_cut = (done + filled + room / 2) * num_pieces > total * (num_closed + 1)
        if filled and (past_cut or filled + room > most):
            yield begin, number
            begin, num_closed, done, filled = number, num_closed + 1, done + filled, 0
        filled += room
    yield begin, len(rooms)


def _runs(params: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    """Stretches of one block, and in each what :func:`make_layout` keeps apart: LoRA declares trained params and frozen
    ones in turns, norms stand between matrices.
    """
    runs: list[list[ParamSpec]] = []
    for _, stretch in groupby(params, key=lambda spec: block_of(spec.name)):
        by_kind: dict[tuple[bool, bool, bool, bool, str], list[ParamSpec]] = {}
        for spec in stretch:
            if spec.numel < 0:
                raise ValueError(f"param {spec.name!r} has {spec.numel} elements")
            kind = (spec.trainable, spec.exact, spec.coded, spec.fp32, spec.name if spec.apart else "")
            by_kind.setdefault(kind, []).append(spec)
        runs += by_kind.values()
    return runs
