"""``gemini.MemoryTracer``: a trace of real steps. Counting operations costs time, so only the first step is counted."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.planning.trace import MemoryTrace, Source, with_seconds
from gemini.tracing.meter import make_target
from gemini.tracing.observer import ObservedStep, Observer, trace_of_step
from gemini.train.engine import Engine
from gemini.train.modules.mixed import kept_in_fp32
from gemini.train.modules.reading import is_compiled, structure_of


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

    def __init__(self, model: nn.Module):
        """Raises TypeError for what is no module, ValueError for one without params."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"MemoryTracer records an nn.Module, got {type(model).__name__}")
        if next(model.parameters(), None) is None:
            raise ValueError(f"{type(model).__name__} has no params: there is nothing to trace")
        self._model = model
        self._recorder: _Recorder | None = None

    def __enter__(self) -> MemoryTracer:
        if self._recorder is not None and self._recorder.is_on:
            raise GeminiError("this MemoryTracer is recording already: make one for each block")
        self._recorder = _Recorder(self._model)
        self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        self._recorder.stop()

    @property
    def trace(self) -> MemoryTrace:
        """The recorded trace.

        Raises:
            GeminiError: until a whole step, forward and backward, has run inside the block.
        """
        recorder = self._recorder
        if recorder is None or recorder.recorded is None:
            raise GeminiError(
                f"no whole step of {type(self._model).__name__} was recorded: run a forward of the model itself and "
                "the backward of its loss inside the `with gemini.MemoryTracer(model)` block"
            )
        step, engine = recorder.recorded, recorder.engine
        same = [timed.times for timed in recorder.timed if timed.keys == [key for key in step.keys if key is not None]]
        precision = self._precision() if engine is None else engine.config.precision
        kept = kept_in_fp32(self._model, precision) if engine is None else engine.params.in_fp32
        made = trace_of_step(self._model, step, precision, kept, target=recorder.target.name, source=Source.RECORDED)
        return with_seconds(made, seconds_of_moments(step, same))

    def _precision(self) -> str:
        sizes: Counter[torch.dtype] = Counter()
        for param, _ in structure_of(self._model).params:
            sizes[param.dtype] += param.numel()
        most = max(sizes, key=lambda dtype: sizes[dtype])
        return next((name for name, dtype in COMPUTE_DTYPES.items() if dtype is most), "fp32")


class _Recorder(Observer):
    """Counts the operations of the first whole step, and times the steps after it."""

    def __init__(self, model: nn.Module):
        self.engine: Engine | None = model.__dict__.get("_gemini_engine")
        device = next(model.parameters()).device if self.engine is None else self.engine.store.device.torch_device
        super().__init__(model, make_target("cuda" if device.type == "cuda" else "cpu"), free_gradients=False)
        self.is_on = False
        self.recorded: ObservedStep | None = None
        self.timed: list[ObservedStep] = []
        self._as_python: Any = None  # what keeps compiled code from running while operations are counted

    def start(self) -> None:
        try:
            with WHOLE:
                self.attach()
                self.is_on = True
                if self.engine is not None:
                    self.engine.watch_apart(self.elsewhere)
                self.before_step()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        with WHOLE:
            self.is_on = False
            if self.engine is not None:
                self.engine.watch_apart(None)
            self.detach()
            self._end_counting()

    def before_step(self) -> None:
        """The one place where the meter can come and go."""
        if self.recorded is not None:
            self._end_counting()
        elif self.meter is None:
            if any(map(is_compiled, self.model.modules())):
                self._as_python = torch.compiler.set_stance("force_eager")
            self.make_meter().__enter__()

    def _end_counting(self) -> None:
        if self.meter is not None:
            self.meter.leave_stack()
        self.meter = None
        stance, self._as_python = self._as_python, None
        if stance is not None:
            stance.__exit__(None, None, None)

    def take_step(self, step: ObservedStep) -> None:
        if self.recorded is None:
            self.recorded = step
        else:
            self.timed.append(step)

    def now(self) -> float:
        if self.target.name == "cuda":  # not run on a GPU: kernels are waited for at each boundary: overlap is lost
            torch.cuda.synchronize()
        return super().now()


def seconds_of_moments(step: ObservedStep, later: list[list[float]]) -> list[float]:
    """Seconds of each moment of ``step``: medians over ``later`` runs of the same boundaries, else its own times. What
    stands between boundaries without an operation counts to the moment before. A boundary that only counting notices
    (key None) does not divide the times of later runs: the first moment of the two gets them.
    """
    seconds = [0.0] * len(step.moments)
    if not later:
        times = step.times
        owners = list(range(len(times)))
    else:
        times = [statistics.median(run) for run in zip(*later, strict=True)]
        *owners, _ = accumulate((key is not None for key in step.keys), initial=0)
    used: set[int] = set()
    last = 0
    for moment, owner in zip(step.moment_at, owners, strict=True):
        if moment is not None:
            last = moment
        if owner not in used and seconds:
            used.add(owner)
            seconds[last] += times[owner]
    return seconds
