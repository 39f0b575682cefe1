"""``gemini.MemoryTracer``: a trace recorded from real steps, of a wrapped model or of any other.

Counting every operation costs time, so the first step gives moments, bytes and work, and the later ones, which are
only cut at the same boundaries, give their seconds.
"""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.planning.trace import MemoryTrace, Source, with_seconds
from gemini.tracing.observer import Listener, ObservedStep, Observer, trace_of_step
from gemini.tracing.targets import make_target
from gemini.train.engine import Engine
from gemini.train.modules.mixed import kept_in_fp32
from gemini.train.modules.reading import compiled_part
from gemini.train.setup.structure import distinct_params


class MemoryTracer:
    """Records steps of ``model`` that run inside the ``with`` block::

        with gemini.MemoryTracer(model) as tracer:
            for batch in batches[:3]:
                model(**batch).loss.backward()
        trace = tracer.trace

    A step is a forward (or several) and its backward. The first whole one is recorded operation by operation; those
    after it are timed without that, and each moment gets the median of its seconds. Of a model that ``GeminiDDP``
    manages, the moves of chunks are neither counted nor timed. What it keeps of activations elsewhere
    (``offload_activations``) is not in the recorded bytes: record without it.

    Compiled code has no operations to count: the step that is counted runs compiled blocks as Python, so its results
    are other bits than theirs, and its bytes those of operations that are not fused. Later steps are timed compiled.

    Attributes:
        trace: the MemoryTrace. Also after the block.
    """

    def __init__(self, model: nn.Module, *, skip: int = 0):
        """``skip``: whole steps to let pass before one is recorded.

        Raises:
            TypeError: for what is no module.
            ValueError: without params.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"MemoryTracer records an nn.Module, got {type(model).__name__}")
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError(f"{type(model).__name__} has no params: there is nothing to trace")
        self._model = model
        self._engine: Engine | None = model.__dict__.get("_gemini_engine")
        self._cuda = first.device.type == "cuda" or (
            self._engine is not None and self._engine.store.device.torch_device.type == "cuda"
        )
        self._target = make_target("cuda" if self._cuda else "cpu")
        self._observer: Observer | None = None
        self._skip = skip
        self._recorded: ObservedStep | None = None
        self._timed: list[ObservedStep] = []
        self._as_python: Any = None  # what keeps compiled code from running while operations are counted

    def __enter__(self) -> MemoryTracer:
        if self._observer is not None:
            raise GeminiError("this MemoryTracer is recording already: make one for each block")
        self._recorded, self._timed = None, []
        observer = Observer(self._model, self._target, listener=_Listening(self), free_gradients=False)
        observer.attach()
        self._observer = observer
        try:
            if self._engine is not None:
                self._engine.watch_apart(observer.elsewhere)
            if not self._skip:
                self._begin_counting(observer)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        if self._engine is not None:
            self._engine.watch_apart(None)
        observer.detach()
        self._end_counting(observer)

    def _begin_counting(self, observer: Observer) -> None:
        if any(compiled_part(module) is not None for module in self._model.modules()):
            self._as_python = torch.compiler.set_stance("force_eager")
        observer.make_meter().__enter__()

    def _end_counting(self, observer: Observer) -> None:
        if observer.meter is not None:
            observer.meter.leave_stack()
        observer.meter = None
        stance, self._as_python = self._as_python, None
        if stance is not None:
            stance.__exit__(None, None, None)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A forward of the model begins, and no step is under way: the one place where the meter can come and go."""
        observer = self._observer
        assert observer is not None
        if self._recorded is not None and observer.meter is not None:
            self._end_counting(observer)
        elif self._recorded is None and not self._skip and observer.meter is None:
            self._begin_counting(observer)

    def _end_step(self, step: ObservedStep) -> None:
        if self._skip:
            self._skip -= 1
        elif self._recorded is None:
            self._recorded = step
        else:
            self._timed.append(step)

    def _now(self) -> float:
        if self._cuda:  # not run on a GPU: kernels are waited for at each boundary, so overlap is lost
            torch.cuda.synchronize()
        return time.perf_counter()

    # ---- the trace ---------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> MemoryTrace:
        """What was recorded.

        Raises:
            GeminiError: until a whole step, forward and backward, has run inside the block.
        """
        step = self._recorded
        if step is None:
            raise GeminiError(
                f"no whole step of {type(self._model).__name__} was recorded: run a forward of the model itself and "
                "the backward of its loss inside the `with gemini.MemoryTracer(model)` block"
            )
        same = [timed.times for timed in self._timed if timed.keys == [key for key in step.keys if key is not None]]
        precision = self._precision()
        kept = kept_in_fp32(self._model, precision) if self._engine is None else self._engine.params.in_fp32
        made = trace_of_step(self._model, step, precision, kept, target=self._target.name, source=Source.RECORDED)
        return with_seconds(made, seconds_of_moments(step, same))

    def _precision(self) -> str:
        if self._engine is not None:
            return self._engine.config.precision
        sizes: dict[torch.dtype, int] = {}
        for param, _ in distinct_params(self._model):
            sizes[param.dtype] = sizes.get(param.dtype, 0) + param.numel()
        most = max(sizes, key=lambda dtype: sizes[dtype])
        return next((name for name, dtype in COMPUTE_DTYPES.items() if dtype is most), "fp32")


def seconds_of_moments(step: ObservedStep, later: list[list[float]]) -> list[float]:
    """Seconds of each moment of ``step``: medians over ``later`` runs of the same boundaries, else its own times.

    What stands between two boundaries without an operation is counted to the moment before it. A boundary that only
    counting notices (key None) does not divide the times of later runs: the first moment of the two gets them.
    """
    seconds = [0.0] * len(step.moments)
    if not later:
        times = step.times
        owners = list(range(len(times)))
    else:
        times = [statistics.median(run) for run in zip(*later, strict=True)]
        owners, at = [], 0
        for key in step.keys:
            owners.append(at)
            at += key is not None
    used: set[int] = set()
    last = 0
    for moment, owner in zip(step.moment_at, owners, strict=True):
        if moment is not None:
            last = moment
        if owner not in used and seconds:
            used.add(owner)
            seconds[last] += times[owner]
    return seconds


class _Listening(Listener):
    """The ear of one tracer."""

    def __init__(self, tracer: MemoryTracer):
        self._tracer = tracer

    def begin_step(self) -> None:
        self._tracer._begin()

    def end_step(self, step: ObservedStep) -> None:
        self._tracer._end_step(step)

    def now(self) -> float:
        return self._tracer._now()
