"""Streams and events of CUDA: points in a stream that host code can wait for, and the two streams of one copy stream.

An error of the GPU belongs to the whole process: CUDA tells it in whichever call comes next, and nothing works
afterwards. So a copy that failed there surfaces in the next wait of anybody, not only in its own, and trying it again
fails like everything else; what can fail on its own (a file, a refused copy) is told before the copy is under way.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.devices.device import Event
from gemini.waiting import PROGRESS

SPIN_SECONDS = 50e-6
"""How long a wait asks without a pause: about what it takes to be woken up once."""

_SHORTEST, _LONGEST = 20e-6, 100e-6
"""Seconds between two questions after that: a sixteenth of what was waited so far, within these bounds."""


class CudaEvent(Event):
    """A point in a stream. CUDA's own wait has no limit, so the host asks again and again."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, what: str):
        self.what = what
        self.stream = stream.cuda_stream
        """Which stream it is a point of."""
        self._device = device
        self._event = torch.cuda.Event()
        # Recorded here and never again: an event that is recorded anew would be another point.
        self._event.record(stream)

    def is_complete(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # over, though not well: wait() says how
            return True

    def wait(self) -> None:
        try:
            # No clock is read where it is over already.
            if self._event.query():
                return
            since = time.perf_counter()
            # Asked and not synchronized with: `synchronize` of CUDA has no limit, and Ctrl-C waits for it.
            while not self._event.query():
                waited = time.perf_counter() - since
                if waited > waiting.LOOK_SECONDS:
                    with PROGRESS.elsewhere():
                        self._wait_long()
                    return
                # 0 lets other threads of Python run; a sleep also gives the processor away, and costs a wake-up.
                time.sleep(0 if waited < SPIN_SECONDS else min(max(waited / 16, _SHORTEST), _LONGEST))
        except GeminiError:
            raise
        except RuntimeError as e:  # an error of the GPU, of this work or of any before it
            raise GeminiError(f"{self.what} failed: {e}") from e

    def _wait_long(self) -> None:
        looks = waiting.patience(lambda: self.what, is_elsewhere=True)
        looked = time.perf_counter()
        while not self._event.query():
            time.sleep(_LONGEST)
            if time.perf_counter() - looked > waiting.LOOK_SECONDS:
                next(looks)
                looked = time.perf_counter()

    def wait_on_device(self) -> None:
        with torch.cuda.device(self._device):
            # The current stream of the calling thread: each thread has its own.
            self.hold_back(torch.cuda.current_stream(self._device))

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Let what ``stream`` is given from now on come after this event."""
        if stream.cuda_stream != self.stream:  # of its own points each stream is past
            stream.wait_event(self._event)

    def finish(self, error: BaseException | None = None) -> None:
        raise AssertionError("the GPU says when its work is over")


class CopyStreams:
    """The CUDA streams of one copy stream, one for each direction. Its copies are in order, in both directions
    together. Changed under the lock of its device.
    """

    def __init__(self) -> None:
        self.by_direction: dict[str, torch.cuda.Stream] = {}
        self.last: tuple[str, CudaEvent] | None = None  # direction and end of the copy that was given last
        # Host memory of copies under way: the GPU's engines use it and hold no reference.
        self.in_flight: deque[tuple[CudaEvent, torch.Tensor, torch.Tensor]] = deque()

    def let_go(self) -> None:
        """Drop the references to tensors whose copies are over. In order: a stream ends its copies in the order of
        their beginning.
        """
        while self.in_flight and self.in_flight[0][0].is_complete():
            self.in_flight.popleft()
