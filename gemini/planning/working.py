"""What a step needs beside the planes, in bytes: closed forms for the planner, and for the runtime, which takes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise

from gemini.planning.layout import Layout, block_of, page_up
from gemini.planning.planes import ADAM, RuleSpec, bytes_by_kind
from gemini.planning.trace import MemoryTrace, Moment, chunks_of_params
from gemini.tiers import Tier

TILE = 2**20
"""Elements per tile. A whole norm tile, so that a gradient's norm is the same whether it is staged or not."""

PIECE = 2**20
"""Elements at most on their way between two ranks at once: 4 MiB messages reach the full speed of a wire."""

MARGIN = 0.8
"""The share of measured free bytes that a budget which was left out may take; the rest is for others."""

ACTIVATION_MARGIN = 1.05
"""What a traced peak is multiplied by: traces are within 3 % of it, and allocators round up."""

CUDA_CONTEXT = 2**30
"""A context takes some hundred MiB. Where more than this is used and not by torch, the rest is other programs'."""

CUDA_KERNELS = 192 * 2**20
"""Of the driver, beyond what a context takes at first: kernels are loaded when they are first launched."""

CUDA_SEGMENTS = 128 * 2**20
"""Of torch's allocator beyond what it hands out, where segments grow, and of libraries that no trace knows (cuDNN's
attention): 67 to 117 MiB of a model of 219M params on an H200. On no other card, and of no larger model, measured."""

DEVICE_TILE = 2**21
"""Elements per tile of a streamed update: copies of 4 and 8 MiB, long beside what starting one costs the host."""

DEVICE_SLOTS = 4
"""Tiles of streamed updates under way at once: one or two on their way in, one in the kernel or on its way out."""

WAITING_GRADIENTS = 3
"""Chunks whose transient gradients may wait for their updates at least; more where a budget has room."""

FLIGHTS = {Tier.GPU: 0, Tier.CPU: 1280 * 2**20, Tier.NVME: 128 * 2**20}
"""Bytes of activations that may be on their way to a tier, or from it, where there is room: what a PCIe 4.0 link and a
drive move in 50 ms, so that computing does not wait where blocks are short."""


def tile_numel(largest_chunk: int, whole: int = 0) -> int:
    """Elements per tile; ``whole``: of the largest param that has to be one tile."""
    return max(min(TILE, largest_chunk), whole)


def whole_numel(layout: Layout, rule: RuleSpec) -> int:
    """Elements of the largest trained param, in whole pages, where a tile has to be a whole param; else 0."""
    if not rule.whole:
        return 0
    trained = (slot.numel for chunk in layout.chunks if chunk.trainable for slot in chunk.slots)
    return page_up(max(trained, default=0), rule.align)


def staged_bytes(tile: int, rule: RuleSpec) -> dict[str, int]:
    """Bytes of staging by area, for tiles of ``tile`` elements: whole pages each."""
    return bytes_by_kind(rule.staged, tile)


def staging_bytes(tile: int, rule: RuleSpec = ADAM) -> int:
    """Host bytes of staging for tiles of ``tile`` elements."""
    return sum(staged_bytes(tile, rule).values())


def device_tile_numel(largest_chunk: int, rule: RuleSpec = ADAM, whole: int = 0) -> int:
    """Elements per tile of a streamed update: of a small chunk a part, so that it goes through in a pipeline too."""
    return max(min(DEVICE_TILE, page_up(-(-largest_chunk // DEVICE_SLOTS), rule.align)), whole)


def device_staging_bytes(largest_chunk: int, rule: RuleSpec = ADAM, whole: int = 0, *, overlap: bool) -> int:
    """Device bytes of staging for streamed updates; updates in turn, and of whole params, need one tile of it."""
    tile = staging_bytes(device_tile_numel(largest_chunk, rule, whole), rule)
    return (DEVICE_SLOTS if overlap and not rule.whole else 1) * tile


def staging_sets(compute: Tier, precision: str, *, overlap: bool, many: bool = False) -> int:
    """How many threads stage: the one that trains; beside it the update worker; the fetch worker, where weights are
    cast or cross to a device on their way; and the landing worker, where gradients leave a device, or with ``many``
    ranks the one that adds up gradients.
    """
    if not overlap:
        return 1
    return 4 if compute is Tier.GPU else 2 + (precision == "fp16") + many


def scratch_bytes(ranks: int, piece: int, replicas: int = 1) -> int:
    """Host bytes for reducing pieces of ``piece`` elements over so many ranks, and over replicas beside that."""
    return 4 * piece * (max(2 * ranks, 4) + 2 * (replicas > 1))


def replica_scratch_bytes(ranks: int, scratch: int) -> int:
    """The bytes of :func:`scratch_bytes` with replicas for the sums over these."""
    return 2 * scratch // (max(2 * ranks, 4) + 2)


def gradients_in_flight(layout: Layout, itemsize: int) -> int:
    """Bytes of whole gradients that wait for the rest of their chunk, before they are divided among ranks: the chunks
    of one block are open together, and one of the block before it may be.
    """
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    largest = max((chunk.numel * chunk.grad_itemsize(itemsize) for chunk in trained), default=0)
    # Around blocks a head in fp32 is on its way while the chunk of its neighbours, which the embedding ends, is open.
    outside = (4 * chunk.numel for chunk in trained if chunk.fp32 and not block_of(chunk.slots[0].name))
    return max(_gradients_by_block(layout, itemsize).values(), default=0) + largest + max(outside, default=0)


def _gradients_by_block(layout: Layout, itemsize: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in layout.chunks:
        if chunk.trainable:
            block = block_of(chunk.slots[0].name) or f"chunk {chunk.index}"
            found[block] = found.get(block, 0) + chunk.numel * chunk.grad_itemsize(itemsize)
    return found


def waiting_gradients(layout: Layout, itemsize: int) -> int:
    """Bytes on a GPU of gradients on their way to the host: a block's. With less, computing waits for the bus."""
    return max(_gradients_by_block(layout, itemsize).values(), default=0)


def allocator_bytes(rule: RuleSpec, capability: tuple[int, int] = (9, 0), workspace: int = 0) -> int:
    """Bytes of torch's allocator beside what anybody holds. Each thread that multiplies keeps a cuBLAS ``workspace``
    (``aten/src/ATen/cuda/CublasHandlePool.cpp``): 32 MiB on Hopper, 8,320 KiB before, the larger counted on newer
    cards, and 1 MiB for cuBLASLt. It is the caller's, autograd's, and an update's that needs params whole (Muon).
    """
    workspace = workspace or (32 * 2**20 if capability[0] >= 9 else 8320 * 2**10)
    return (2 + rule.whole) * (workspace + 2**20) + CUDA_SEGMENTS


def beside_bytes(target: str, compute: Tier, rule: RuleSpec) -> int:
    """Bytes of a GPU's budget that nothing managed can have, before a device is there to be asked: at most."""
    return CUDA_CONTEXT + CUDA_KERNELS + allocator_bytes(rule) if target == "cuda" and compute is Tier.GPU else 0


def gathered_at_once(trace: MemoryTrace, layout: Layout, precision: str) -> int:
    """The working set: the most bytes of gathered weights that any moment, or any module, needs at once."""
    by_param = chunks_of_params(trace, layout)
    num_bytes = [chunk.numel * chunk.itemsize(precision) for chunk in layout.chunks]
    read = {*trace.read_together, *(moment.params for moment in trace.moments)}
    needs = {frozenset(by_param[index] for index in indices) for indices in read}
    return max((sum(num_bytes[i] for i in chunks) for chunks in needs), default=0)


def flight_bytes(trace: MemoryTrace) -> int:
    """Bytes that activations on their way have: as much as the block that saves most, or two moments do for one."""
    largest = max((m.saved_bytes for m in trace.moments), default=0)
    return max(2 * largest, *(sum(m.saved_bytes for m in run) for run in _by_block(trace)), 0) // trace.micro_batches


def _by_block(trace: MemoryTrace) -> list[list[Moment]]:
    """The moments, those of a stage together, or of a block where some are kept."""
    if trace.stages:
        return [[*trace.moments[start:stop]] for start, stop in pairwise((*trace.stages, len(trace.moments)))]
    return [
        [*run]
        for _, run in groupby(trace.moments, lambda m: trace.kept_blocks and block_of(f"{m.module}.") or object())
    ]


def activation_bytes(trace: MemoryTrace, *, offloaded: bool) -> int:
    """Bytes that activations (unless ``offloaded``), workspaces and buffers take at once, with the stated margin."""
    away = carried_away(trace) if offloaded else [0] * len(trace.moments)
    most = max((moment.peak_bytes - own for moment, own in zip(trace.moments, away, strict=True)), default=0)
    return int((max(most, 0) + trace.buffer_bytes) * ACTIVATION_MARGIN)


def carried_away(trace: MemoryTrace) -> Iterator[int]:
    """Bytes by moment that are elsewhere meanwhile, where what is saved for backward is taken to another tier."""
    waiting, number = 0, trace.micro_batches
    # What a kept block saves counts as there while it runs: much of that is still read.
    for moments in _by_block(trace):
        after = [*accumulate((m.saved_bytes - m.restored_bytes for m in moments), initial=waiting)]
        away = min(after) if len(moments) > 1 else waiting
        # Of all but the one that computes, all that they have saved before the stage or behind it.
        away += (number - 1) * (max(after[0], after[-1]) - away) // number
        yield from [away] * len(moments)
        waiting = after[-1]


def sums_at_hand(trace: MemoryTrace, layout: Layout) -> int:
    """Bytes where modules compute of the fp32 sums of a stage's gradients, while its micro-batches add to them."""
    by_param, numels = chunks_of_params(trace, layout), [4 * chunk.numel for chunk in layout.chunks]
    stages = ({by_param[index] for index in moment.gradients} for moment in trace.moments)
    return max((sum(numels[i] for i in chunks) for chunks in stages), default=0) if trace.stages else 0
