"""One optimizer update of one chunk, tile by tile, wherever its planes live.

Planes in host memory are updated in place; planes in the spill file (or in a device's own memory) pass through one
staging tile each and are written back. Where every plane stands on the computing device, the update runs there. Params
of one tile may have different hyperparameters, step counts, or no gradient: each is a segment, and neighbours that are
updated alike go through the kernel together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.memory.chunk import Chunk
from gemini.memory.mover import page_up, tiles
from gemini.memory.recorder import NOTHING
from gemini.planning.planes import OPTIMIZER_PLANES, PlaneKind
from gemini.planning.timeline import Lane
from gemini.tiers import Tier
from gemini.train.guard import ParamHandle, optimizer_of

if TYPE_CHECKING:
    from gemini.train.engine import Engine

_UPDATED = (PlaneKind.WEIGHTS, *OPTIMIZER_PLANES)


class Segment(NamedTuple):
    """A param to update, as far as this rank keeps it; ``grad`` is that part of its gradient, flat, where it is not in
    the chunk's grad plane.
    """

    handle: ParamHandle
    hyper: kernels.AdamHyper
    grad: torch.Tensor | None = None


def update_chunk(engine: Engine, chunk: Chunk, segments: list[Segment]) -> None:
    """Update ``segments`` (params of ``chunk``), then drop the gathered copy that they have overtaken."""
    segments = [s for s in segments if s.handle.part.numel]
    start = min((s.handle.part.start for s in segments), default=0)
    stop = page_up(max((s.handle.part.stop for s in segments), default=0))
    engine.before_write(chunk)
    try:
        about = engine.mover.about("update", f"update chunk {chunk.spec.index}", chunk.spec.index)
        with torch.profiler.record_function("gemini::adam"), about:
            for first, last in tiles(start, stop, engine.mover.tile):
                active = [s for s in segments if s.handle.part.start < last and s.handle.part.stop > first]
                if active:
                    _update_tile(engine, chunk, active, first, last)
        engine.manager.drop([chunk])
    except BaseException as e:
        # A repeated step would update finished tiles twice, and planes may be torn: there is no way on from here.
        engine.mark_lost(e)
        raise


def update_now(engine: Engine, handle: ParamHandle, grad: torch.Tensor) -> None:
    """``step_in_backward``: update one param with its gradient, as far as this rank keeps it.

    Raises:
        GeminiError: if no optimizer owns it, or it was updated in this backward already.
    """
    if handle.in_backward == engine.backward_number:
        raise GeminiError(
            f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), after its "
            'update: gradients="transient" cannot be used with this model; use gradients="retain"'
        )
    optimizer = optimizer_of(handle.param)
    if optimizer is None:
        raise GeminiError(
            f'gradients="transient": no HybridAdam(step_in_backward=True) owns {handle.name!r}, so its gradient '
            "would be lost. Give all trained params to the optimizer before the first backward, or freeze this one"
        )
    optimizer.update_in_backward(engine, handle, grad)
    handle.in_backward = engine.backward_number


def _update_tile(engine: Engine, chunk: Chunk, active: list[Segment], first: int, last: int) -> None:
    kinds = [kind for kind in _UPDATED if kind in chunk.planes]
    grads_landed = active[0].grad is None
    if grads_landed:
        kinds.append(PlaneKind.GRAD)
    views: dict[PlaneKind, torch.Tensor] = {}
    staged: list[PlaneKind] = []
    on_device = engine.device.tier is Tier.GPU and all(chunk.planes[kind].tier is Tier.GPU for kind in kinds)
    for kind in kinds:
        plane = chunk.planes[kind]
        if on_device:
            view = plane.device_view(first, last)
            assert view is not None
            views[kind] = view
        else:
            views[kind], is_staged = engine.mover.host_tile(kind, plane, first, last)
            if is_staged:
                staged.append(kind)
    for start, stop, segment in _spans(active):
        a, b = max(start, first), min(stop, last)
        part = slice(a - first, b - first)
        if segment.grad is None:
            grad = views[PlaneKind.GRAD][part]
        else:
            grad = _bring(engine, segment.grad[a - start : b - start], on_device)
        residual = views.get(PlaneKind.RESIDUAL)
        with NOTHING if engine.mover.recorder is None else engine.mover.recorder.span(Lane.ADAM):
            kernels.adam_update(
                views[PlaneKind.WEIGHTS][part],
                None if residual is None else residual[part],
                views[PlaneKind.EXP_AVG][part],
                views[PlaneKind.EXP_AVG_SQ][part],
                grad,
                segment.hyper,
            )
    for kind in staged:
        if kind is not PlaneKind.GRAD:
            engine.mover.store(chunk.planes[kind], first, last, views[kind])


def _spans(segments: list[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """Element ranges to update in one go: neighbours that are updated alike, the padding between them included.

    Padding goes through the update like everything else and nobody ever reads what becomes of it; a few long calls keep
    the kernel's threads busy where many short ones would wake them in vain.
    """
    run: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.handle.part.start):
        follows = run and segment.handle.part.start == page_up(run[-1].handle.part.stop)
        if not (follows and segment.grad is None and run[-1].grad is None and segment.hyper == run[-1].hyper):
            if run:
                yield run[0].handle.part.start, run[-1].handle.part.stop, run[0]
            run = []
        run.append(segment)
    if run:
        yield run[0].handle.part.start, run[-1].handle.part.stop, run[0]


def _bring(engine: Engine, grad: torch.Tensor, on_device: bool) -> torch.Tensor:
    """A gradient that was never landed, where the update runs."""
    if on_device or engine.device.tier is Tier.CPU:
        return grad
    inbound = engine.mover.staged(PlaneKind.GRAD, grad.dtype, grad.numel())
    with engine.mover.crossing(Tier.GPU, Tier.CPU, inbound.numel() * inbound.element_size()):
        engine.device.copy(inbound, grad, "evict").wait()
    return inbound
