"""The clock of :mod:`tests.virtual_time` for the runtime of ``cudart.cpp``, which knows itself when what is over.

Threads have their times there, so that every call of the runtime sees them, torch's own too; who waits for whom is
Python's, as for the stand-in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gemini.kernels.cuda import CudaKernels
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.cuda_windows import CudaEvent
from tests.fakegpu import computing
from tests.virtual_time import Rates, Span, TimedThread, VirtualClock

_runtime = ctypes.PyDLL(None)
_runtime.fake_clock.argtypes = [ctypes.c_double] * 4
_runtime.fake_clock.restype = _runtime.fake_move.restype = _runtime.fake_thread.restype = None
_runtime.fake_now.restype = _runtime.fake_starved.restype = _runtime.fake_over_at.restype = ctypes.c_double
_runtime.fake_over_at.argtypes = [ctypes.c_void_p]
_runtime.fake_move.argtypes = [ctypes.c_int, ctypes.c_double]
_runtime.fake_spans.restype = ctypes.c_size_t
_runtime.fake_spans.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]

_runtime.fake_host_seconds.argtypes = [ctypes.c_double]
_runtime.fake_host_seconds.restype = None

_ENGINES = "h2d", "d2h", "compute", "blocked", "sum"


class RuntimeThread(TimedThread):
    """A thread whose time the runtime has."""

    @property
    def now(self) -> float:  # type: ignore[override]
        return _runtime.fake_now(self.number)

    @now.setter
    def now(self, at: float) -> None:
        _runtime.fake_move(self.number, at)


class RuntimeClock(VirtualClock):
    """Times of the GPU of this process.

    Args:
        seconds_of: what a kernel takes, by its name and the bytes of each thing that it reads or writes.
    """

    thread_kind = RuntimeThread

    def __init__(self, rates: Rates, seconds_of: Callable[[str, Sequence[int]], float]):
        _runtime.fake_clock(rates.h2d, rates.d2h, rates.latency, rates.call)
        super().__init__(rates)
        self._seconds_of = seconds_of

    def begin_thread(self, thread: TimedThread) -> None:
        super().begin_thread(thread)
        _runtime.fake_thread(thread.number)

    @property
    def starved(self) -> float:  # type: ignore[override]
        return _runtime.fake_starved()

    @starved.setter
    def starved(self, seconds: float) -> None:
        assert not seconds

    def spans(self, engine: str) -> list[Span]:
        number = _ENGINES.index(engine)
        count = _runtime.fake_spans(number, None, 0)
        out = (ctypes.c_double * (4 * count))()
        _runtime.fake_spans(number, out, count)
        return [Span(*out[4 * at : 4 * at + 4]) for at in range(count)]

    def blocked(self, since: float, until: float, name: str = "launcher") -> list[tuple[float, float, str]]:
        told = [(span.start, span.stop, "a call of the runtime") for span in self.spans("blocked")]
        cut = [(max(start, since), min(stop, until), what) for start, stop, what in told if name == "launcher"]
        return super().blocked(since, until, name) + [span for span in cut if span[1] > span[0]]

    @contextmanager
    def running(self) -> Iterator[VirtualClock]:
        clock, wait, is_complete = self, CudaEvent.wait, CudaEvent.is_complete
        copy, mark, fetch = CudaDevice.copy, CudaDevice.mark, CudaKernels.fetch
        land = CudaDevice._land_by_host

        def timed_wait(event: CudaEvent) -> None:
            clock.until(_runtime.fake_over_at(event._event.cuda_event), event.what)
            wait(event)

        def timed_look(event: CudaEvent) -> bool:
            clock.arrive()
            return is_complete(event)

        def alone(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed_call(*args: Any, **how: Any) -> Any:
                # Before the lock of the device is taken: inside nobody is waited for, who may need that lock.
                clock.arrive()
                with clock.going_on():
                    return call(*args, **how)

            return timed_call

        def timed_land(
            device: CudaDevice,
            through: Any,
            areas: Any,
            source: Any,
            into: Any,
            lost: Any,
            piece: int,
            is_added: bool,
            **also: Any,
        ) -> Any:
            of_plane = into.element_size() + (0 if lost is None else lost.element_size())
            touched = 1 + of_plane * (1 + is_added) / source.element_size()
            _runtime.fake_host_seconds(touched / clock.rates.host)
            return land(device, through, areas, source, into, lost, piece, is_added, **also)

        def timed_fetch(*args: Any) -> list[float]:
            numbers = fetch(*args)
            clock.arrive()  # the runtime has moved this thread on
            return numbers

        CudaEvent.wait, CudaEvent.is_complete = timed_wait, timed_look  # type: ignore[method-assign]
        CudaKernels.fetch = timed_fetch  # type: ignore[method-assign]
        CudaDevice.copy, CudaDevice.mark = alone(copy), alone(mark)  # type: ignore[method-assign]
        CudaDevice._land_by_host = alone(timed_land)  # type: ignore[method-assign]
        computing.seconds_of = self._seconds_of
        try:
            with super().running():
                yield self
        finally:
            CudaEvent.wait, CudaEvent.is_complete = wait, is_complete  # type: ignore[method-assign]
            CudaDevice.copy, CudaDevice.mark = copy, mark  # type: ignore[method-assign]
            CudaDevice._land_by_host = land  # type: ignore[method-assign]
            CudaKernels.fetch = fetch  # type: ignore[method-assign]
            computing.seconds_of = None
            _runtime.fake_clock(0, 0, 0, 0)
