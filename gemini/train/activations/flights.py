"""Offloaded activations in flight beside computing: written behind forward, read ahead of backward.

What a checkpoint saves is copied at once, and moves on from there: nobody waits for the drive, and the model may
overwrite it. What nodes of kept blocks save leaves a GPU from where it is: overwritten meanwhile it is refused, as by
torch. What one block saves may be on its way out while the blocks behind it compute. Backward asks for
tensors in about the reverse order of their saving, so as much is read ahead of the place that it has come to. All of it
takes room that a plan has for it or that is left over ("activations in flight"), and gives way to whoever needs that:
where there is none, moves are made in turn as without overlap. Used by the training thread alone.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.ledger import WELCOME, Ledger, Turn, Want
from gemini.memory.devices.device import DONE, Event
from gemini.memory.devices.pages import in_pages
from gemini.memory.movement.mover import Working
from gemini.memory.movement.transfers import Lane, Transfer
from gemini.memory.store import ChunkStore
from gemini.planning import working
from gemini.tiers import Tier
from gemini.train.activations.kept import INSIDE
from gemini.train.modules.saved_weights import overwritten

IN_FLIGHT = "activations in flight"

_TOGETHER = 8
"""Tensors that one checkpointed block saves: backward asks for them in the order of saving, within the block."""

AHEAD = WELCOME | {Turn.BUFFERS}
"""Asked for the memory of one that comes ahead of its use."""
BEHIND = AHEAD | {Turn.FLIGHTS}
"""And of one that leaves: those before it as well."""

_SAVE, _RESTORE = "offload activations", "fetch activations"


class Offloaded:
    """One saved tensor that is elsewhere. Its place is free again when nothing refers to it."""

    __slots__ = "__weakref__ _gone back device dtype error flight num_bytes of_nodes place shape stride wanted".split()

    def __init__(self, gone: deque[Gone], tensor: torch.Tensor, place: Any):
        self._gone, self.place = gone, place
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape
        # As it travels, and as autograd gives it back: dense, in the order of dimensions of the tensor.
        self.stride = torch.empty_like(tensor, device="meta").stride()
        self.num_bytes = in_pages(tensor.nbytes)
        self.flight: Flight | None = None  # on its way out, or back
        self.error: BaseException | None = None  # what kept it from being written
        self.of_nodes = True  # whether only nodes of kept blocks ask for it, which write to nothing that they saved
        self.wanted = 0  # of a kept block: how many nodes of it have not asked for it in this backward
        self.back: torch.Tensor | None = None  # its values, until all of them have

    def let_go(self) -> None:
        """Leave a note that nobody will read it, and no more: it may run in the middle of anything, under any lock."""
        # Taken out first: a finalizer after this leaves no second note, which would give the place back twice.
        place, self.place = self.place, None
        if place is not None:
            self._gone.append(Gone(place, self.num_bytes, self.flight))

    __del__ = let_go

    def empty(self) -> torch.Tensor:
        """Memory for its values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Gone(NamedTuple):
    """The remains of an :class:`Offloaded` that nobody will read."""

    place: Any
    num_bytes: int
    flight: Flight | None


class Flight(Transfer):
    """One tensor on its way, in either direction, and the memory that it travels in."""

    def __init__(self, lane: Lane, offloaded: Offloaded):
        # Weakly: a flight must not keep what the graph has let go.
        super().__init__(lane, of=weakref.ref(offloaded))
        self.num_bytes = offloaded.num_bytes
        self.buffer: torch.Tensor | None = None  # page-aligned host memory, between the computing memory and the drive
        self.on_device: torch.Tensor | None = None
        """Where the host does not compute: the values there, laid out as they travel. Nobody else may have that memory
        before ``copies`` are over."""
        self.version = -1  # which that had, where it is the tensor itself
        self.stream = -1  # on which a save was begun
        self.taken = False  # whether backward has what a save still copies: it is counted there

    def overwritten(self) -> RuntimeError | None:
        """The error of a tensor that was written to while it left from where it is."""
        tensor, version = self.on_device, self.version
        return None if tensor is None or version in (-1, tensor._version) else overwritten(tensor, version)


class Parked:
    """Host buffers of one holder in which nothing lies: to page-lock another one takes a GPU longer than to fill it."""

    def __init__(self, ledger: Ledger, holder: str):
        self._ledger, self._holder = ledger, holder
        self._of_size: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        ledger.register(Turn.BUFFERS, self.trim, Tier.CPU)

    def put(self, buffer: torch.Tensor) -> None:
        self._of_size[buffer.nbytes].append(buffer)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        return self._of_size[num_bytes].pop() if self._of_size[num_bytes] else None

    @property
    def num_bytes(self) -> int:
        return sum(size * len(buffers) for size, buffers in self._of_size.items())

    def trim(self, want: Want | None = None) -> bool:
        """Give them back; False if there are none."""
        num_bytes = self.num_bytes
        self._of_size.clear()
        if num_bytes:
            self._ledger.release(Tier.CPU, num_bytes, self._holder)
        return num_bytes > 0


class Flights:
    """The activations in flight of one model; none where its moves are made in turn. ``tier``: where they wait. To and
    from a drive they pass through page-aligned host buffers.
    """

    def __init__(self, store: ChunkStore, tier: Tier):
        self.in_turn = not store.transfers.beside  # whether moves are made in turn: then nothing is begun here
        self._device, self._mover, self._file = store.device, store.mover, store.files.get(tier)
        self._ledger, self._transfers = store.ledger, store.transfers
        self._tier, self._computing = tier, store.device.tier
        self.saving: dict[Any, Any] = store.transfers.open[Lane.OFFLOAD]
        self.restoring: dict[Any, Any] = store.transfers.open[Lane.RESTORE]
        self.parked = Parked(store.ledger, IN_FLIGHT)
        self._untold: list[BaseException] = []  # errors of saves that nobody has heard of
        # In the order of saving; what knows none keeps its place.
        self._order: list[Callable[[], Offloaded | None]] = []
        self._at = 0  # place in it that backward has come to
        self._foreseen = False  # whether what it asked for last was on its way
        self._needed, self._in_block = 0, (0, 0)  # bytes that have a use; the kept block that saved last, and its bytes
        self._is_starved = False
        store.ledger.register(Turn.FLIGHTS, self.relieve, *{Tier.CPU, self._computing})
        store.ledger.register_claim(self._computing, self.missing)

    # ---- behind forward -----------------------------------------------------------------------------------------

    def save(self, offloaded: Offloaded, tensor: torch.Tensor) -> bool:
        """Begin to move what ``tensor`` holds now. False if that is done in turn, or there is no room for it. Raises
        StorageError if an earlier one could not be written.
        """
        if self.in_turn:
            return False
        # Before more is saved: a drive that fails is told in the forward, and not at the end of the step.
        self.check()
        num_bytes = offloaded.num_bytes
        self._count(num_bytes)
        flight = Flight(Lane.OFFLOAD, offloaded)
        while sum(other.num_bytes for other in self.saving.values()) + num_bytes > max(
            working.FLIGHTS[self._tier], self._needed
        ):
            self._end_oldest()
        if not self._lend(flight, BEHIND):
            # Parked buffers of other sizes are no use here, and whoever moves this one in turn may need the memory.
            self.parked.trim()
            self._is_starved = True
            return False
        with self._or_free(flight):
            self._begin_save(flight, offloaded, tensor)
        return True

    def _count(self, num_bytes: int) -> None:
        """Learn what should have room on its way: what the block saves that saves most, or two tensors."""
        block, before = self._in_block
        self._in_block = INSIDE.number, num_bytes + (before if INSIDE.kept and block == INSIDE.number else 0)
        self._needed = max(self._needed, 2 * num_bytes, self._in_block[1])  # `working.flight_bytes`

    @contextmanager
    def _or_free(self, flight: Flight) -> Iterator[None]:
        """Begin a flight inside: one that breaks off before it is in the list, where others end it, gives back all."""
        try:
            yield
        except BaseException:
            if flight.key not in self._transfers.open[flight.lane]:
                flight.copies.wait_until_over()
                self._free(flight)
            raise

    def _begin_save(self, flight: Flight, offloaded: Offloaded, tensor: torch.Tensor) -> None:
        """Begin to move what the tensor holds."""
        mover, device, computing, num_bytes = self._mover, self._device, self._computing, flight.num_bytes
        file, buffer, place, working = self._file, flight.buffer, offloaded.place, Working(self._mover.watch.moved)

        def write() -> None:
            assert file is not None and buffer is not None
            label = torch.profiler.record_function("gemini::offload_activation")
            with label, mover.working(working), mover.about("activation", _SAVE):
                # The buffer is whole when the device has copied into it.
                flight.copies.wait()
                with mover.crossing(Tier.CPU, file.tier, num_bytes):
                    file.write(buffer, place)

        flight.run = write
        into = (place if buffer is None else buffer)[: tensor.nbytes]
        if computing is Tier.CPU:
            # Here and now: when this returns the model may overwrite the tensor.
            into.view(tensor.dtype).as_strided(offloaded.shape, offloaded.stride).copy_(tensor)
        else:
            # A copy on the device where a checkpoint saves: the model may overwrite the tensor before the link has come
            # to it. What a node saves must stay as it is, so its own memory does, if it is no part of something else.
            is_own = INSIDE.kept and tensor.stride() == offloaded.stride
            if is_own and tensor.untyped_storage().nbytes() == tensor.nbytes:
                flight.on_device, flight.version = tensor, tensor._version
                if tensor.is_cuda:  # of whatever stream: it is freed behind what this one waits for
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            else:
                flight.on_device = tensor.clone()
            flight.stream = device.stream_number()
        with WHOLE:  # memory of a flight that is not known would be given to others while it is copied
            if flight.on_device is not None:
                source = in_bytes(flight.on_device)
                flight.copies = mover.under_way(
                    computing, Tier.CPU, num_bytes, lambda: device.copy(into, source, "offload", kept=True), _SAVE, -1
                )
            (self._transfers.add if file is None else self._transfers.submit)(flight)
            offloaded.flight = flight

    def _end_oldest(self) -> None:
        """End the save that was begun first; a GPU waits for it itself."""
        for flight in list(self.saving.values())[:1]:
            self._end_save(flight)

    def _pass(self, flight: Flight) -> None:
        """Let the device wait for copies, and nobody else: memory and place have their next use behind what it computes
        from here on. One that failed is as it was.
        """
        if flight.is_complete() and flight.on_device is not None:
            with contextlib.suppress(GeminiError):
                flight.copies.wait_on_device()
                flight.copies = DONE

    def reap(self) -> None:
        """Take note of the saves that are over; what went wrong is told by :meth:`check`."""
        for flight in list(self.saving.values()):
            if not flight.is_over():
                return
            self._note_end(flight)

    def _end_save(self, flight: Flight) -> None:
        """Wait for a save, a GPU itself, and take note of it."""
        if flight.stream == self._device.stream_number():
            self._pass(flight)
        self._transfers.wait(flight, "activation", "wait for room to offload activations")
        self._note_end(flight)

    def _note_end(self, flight: Flight) -> None:
        # Its memory goes back in any case; the error is told to whoever asks for the tensor.
        error = self._end(flight)
        if error and not flight.taken_back:
            self._untold.append(error)

    def _end(self, flight: Flight) -> Exception | None:
        """Take the memory of a flight back when it is over: what went wrong."""
        error, offloaded = flight.outcome(), flight.of()
        # First: without a flight and without an error its place would be read, which was not written.
        if error and offloaded and flight.lane is Lane.OFFLOAD:
            # Without its traceback, whose frames would keep the graph alive that keeps the error.
            offloaded.error = copy.copy(error)
            offloaded.error.__cause__ = error.__cause__
        elif offloaded:
            offloaded.error = flight.overwritten()  # told if backward asks for it, as by torch
        # Off the list and freed together: what is off it is freed by nobody else.
        with WHOLE:
            self._transfers.end(flight)
            self._free(flight, park=not error)
            if offloaded:
                offloaded.flight = None
        return error

    def check(self) -> None:
        """Raise what went wrong behind that nobody has waited for, once; then nothing is in flight."""
        self.reap()
        if self._untold:
            error = self._untold[0]
            # Nothing of the other flights is wanted after an error.
            self.drain()
            self._untold.clear()
            raise error

    # ---- ahead of backward --------------------------------------------------------------------------------------

    def note(self, offloaded: Offloaded, *, at_once: bool) -> None:
        """Note that it was saved, perhaps once more: backward asks for it as often, or ``at_once``."""
        if at_once and (at := self._last_of(offloaded)) is not None:
            self._order[at] = _had
        self._order.append(weakref.ref(offloaded))

    def begin_forward(self) -> None:
        """Forget what no graph refers to any more: it will not be asked for."""
        # Tried anew in every forward: the room may be there now.
        self._is_starved = False
        self._order = [known for known in self._order if known()]

    def begin_backward(self) -> None:
        """Begin to read what was saved last."""
        self._at, self._foreseen = len(self._order), False
        with self._mover.about("activation", _RESTORE):
            self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read what backward asks for next, as far as there is room."""
        depth = max(working.FLIGHTS[self._tier], self._needed)
        ahead = sum(flight.num_bytes for flight in self.restoring.values())
        # Enough is on its way, and it is what is asked for: looked at again when an eighth has come to its use.
        if self.in_turn or (self._foreseen and ahead > depth - depth // 8):
            return
        self.reap()
        wanted: dict[Offloaded, None] = {}  # in the order in which backward comes to them
        num_bytes = 0
        # From a few behind the place: within a block backward asks in the order of saving.
        for at in reversed(range(min(self._at + _TOGETHER + 1, len(self._order)))):
            offloaded = self._order[at]()
            if offloaded is None or offloaded in wanted:
                continue
            if wanted and num_bytes + offloaded.num_bytes > depth:
                break
            wanted[offloaded] = None
            num_bytes += offloaded.num_bytes
        # What is not wanted goes first: its memory is for what is.
        for flight in [flight for flight in self.restoring.values() if flight.of() not in wanted]:
            self.take_back(flight)
        for offloaded in wanted:
            if offloaded.flight is None and not self._begin_restore(offloaded):
                return

    def _begin_restore(self, offloaded: Offloaded) -> bool:
        """Begin to move a tensor back; False if there is no room."""
        mover, computing, place = self._mover, self._computing, offloaded.place
        flight = Flight(Lane.RESTORE, offloaded)
        if not self._lend(flight, AHEAD):
            return False
        file, buffer, num_bytes, working = self._file, flight.buffer, flight.num_bytes, Working(mover.watch.moved)
        with self._or_free(flight):
            if computing is not Tier.CPU:
                flight.on_device = offloaded.empty()
            # Behind it nobody uses what is the memory on the device now; the worker comes much later.
            free = DONE if file is None else self._device.mark()

            def read() -> None:
                assert file is not None and buffer is not None
                label = torch.profiler.record_function("gemini::fetch_activation")
                with label, mover.working(working), mover.about("activation", _RESTORE):
                    with mover.crossing(file.tier, Tier.CPU, num_bytes):
                        file.read(buffer, place)
                    if flight.on_device is not None:
                        with mover.crossing(Tier.CPU, computing, num_bytes):
                            self._send(flight, buffer, after=free, behind_computing=False).wait()

            flight.run = read
            with WHOLE:
                if file is None:
                    begin = partial(self._send, flight, place)
                    flight.copies = mover.under_way(Tier.CPU, computing, num_bytes, begin, _RESTORE, -1)
                    self._transfers.add(flight)
                else:
                    self._transfers.submit(flight)
                offloaded.flight = flight
        return True

    def _send(self, flight: Flight, source: torch.Tensor, **after: Any) -> Event:
        assert flight.on_device is not None
        into = in_bytes(flight.on_device)
        return self._device.copy(into, source[: into.numel()], "restore", kept=True, **after)

    def take(self, offloaded: Offloaded) -> torch.Tensor | None:
        """Return the values if they came ahead or have not left yet; None: they must be moved now. Raises StorageError
        if they, or others, could not be written, RuntimeError if they were overwritten before.
        """
        self.check()
        flight = offloaded.flight
        if error := offloaded.error or (flight and flight.overwritten()):
            raise error
        # Also where it is not elsewhere any more: this is the place that backward has come to.
        self._count_use(offloaded)
        # It has not left: the copy that travels is the value.
        if flight is not None and flight.lane is Lane.OFFLOAD:
            return self._share(offloaded, flight)
        self._end_taken()
        self._foreseen = flight is not None
        if flight is None:
            return None
        if not flight.is_complete():
            self._transfers.thread(flight.lane).hurry(flight)
        self._pass(flight)
        error = self._transfers.wait(flight, "activation", "wait for activations")
        values = None  # one that failed is tried again by whoever needs it: here and now
        if error is None:
            values = self._copy_of(offloaded, flight) if flight.on_device is None else flight.on_device
        self._end_restore(flight)
        return values

    def _share(self, offloaded: Offloaded, flight: Flight) -> torch.Tensor:
        """Give backward what a device still copies: its memory is that of backward, and goes when both are done."""
        if flight.on_device is None or self._file is not None or not offloaded.of_nodes:
            return self._copy_of(offloaded, flight)
        with WHOLE:
            if not flight.taken:
                self._ledger.release(self._computing, flight.num_bytes, IN_FLIGHT)
            flight.taken = True
        return flight.on_device

    def _end_taken(self) -> None:
        """Backward has come to a block whose values have left: what those behind it had is free for its own."""
        for flight in [flight for flight in self.saving.values() if flight.taken]:
            self._end_save(flight)

    def _copy_of(self, offloaded: Offloaded, flight: Flight) -> torch.Tensor:
        """Copy what a flight has into the memory that computes."""
        if flight.on_device is not None:
            return flight.on_device.clone()
        assert flight.buffer is not None
        out = offloaded.empty()
        into = in_bytes(out)
        into.copy_(flight.buffer[: into.numel()])
        return out

    def _count_use(self, offloaded: Offloaded) -> None:
        """Move the place to the last time that this was saved, of those that backward has not come to."""
        if (at := self._last_of(offloaded)) is not None:
            # It keeps its place: with graphs of several forwards what lies behind it is not asked for next.
            self._order[at], self._at = _had, at
        # Behind the place: backward does not come there again.
        while self._order and self._order[-1]() is None:
            self._order.pop()

    def _last_of(self, offloaded: Offloaded) -> int | None:
        return next((at for at in reversed(range(len(self._order))) if self._order[at]() is offloaded), None)

    def take_back(self, flight: Flight) -> None:
        """Give up a flight that nobody wants: its memory is free afterwards, and nobody writes to its place."""
        self._transfers.take_back(flight, "activation", "wait for activations that nobody wants")
        if flight.lane is Lane.RESTORE:
            self._end_restore(flight)
        else:
            self.reap()

    def _end_restore(self, flight: Flight) -> None:
        """End a flight back, which is over or was taken back, and may have been ended before."""
        if flight.key in self.restoring:
            self._end(flight)

    def end_backward(self) -> None:
        """End what is on its way back: nothing is asked for until another backward."""
        for flight in reversed(list(self.restoring.values())):
            self.take_back(flight)
        self._end_taken()
        self.reap()
        self.parked.trim()

    # ---- memory -------------------------------------------------------------------------------------------------

    def _lend(self, flight: Flight, asking: frozenset[Turn]) -> bool:
        """Give a flight memory, from room that is left over. False if there is none; then it has none."""
        tier, num_bytes = self._computing, flight.num_bytes
        if self._file is not None:
            flight.buffer = self._buffer(num_bytes, asking)
            if flight.buffer is None:
                return False
        # Gradients on their way home have what nobody uses; a device waits for those itself, that have long left.
        ours = self._ledger.held(tier, IN_FLIGHT) + num_bytes <= self._needed
        first = asking - {Turn.FLIGHTS} | {Turn.LANDINGS} if ours else asking
        has_room = tier is Tier.CPU
        try:
            has_room = has_room or any(
                self._ledger.reserve_if_room(tier, num_bytes, IN_FLIGHT, turns) for turns in (first, asking)
            )
        finally:
            # Both or neither: a flight that holds half of its memory would keep others from theirs.
            if not has_room and flight.buffer is not None:
                self.parked.put(flight.buffer)
                flight.buffer = None
        return has_room

    def _buffer(self, num_bytes: int, asking: frozenset[Turn]) -> torch.Tensor | None:
        """A buffer to be lent; None if there is no room to make one."""
        # A parked one is in the ledger already: no bytes are taken for it.
        while (buffer := self.parked.take(num_bytes)) is None:
            # Saves end here and not when asked to give way: that would free a buffer, to make the same one anew.
            turns = AHEAD if self.saving else asking
            if self._ledger.reserve_if_room(Tier.CPU, num_bytes, IN_FLIGHT, turns):
                try:
                    self.parked.put(self._device.make_host_buffer(num_bytes))
                except BaseException:
                    self._ledger.release(Tier.CPU, num_bytes, IN_FLIGHT)
                    raise
            elif turns is asking:
                return None
            else:
                self._end_oldest()
        return buffer

    def _free(self, flight: Flight, *, park: bool = False) -> None:
        """Take back the memory of a flight that is over."""
        buffer = flight.buffer
        # The memory before the books: they may say more than there is, never less.
        flight.buffer = flight.on_device = None
        if self._computing is not Tier.CPU and not flight.taken:
            self._ledger.release(self._computing, flight.num_bytes, IN_FLIGHT)
        if buffer is not None and park:
            self.parked.put(buffer)
        elif buffer is not None:
            self._ledger.release(Tier.CPU, flight.num_bytes, IN_FLIGHT)

    def headroom_bytes(self) -> int:
        """Memory that windows should leave for transfers: a block's, unless one found no room, or it is no use."""
        return 0 if self._is_starved or self._device.keeps_windows else self._needed

    def missing(self) -> int:
        """Bytes of that headroom that they do not hold, in flight or ready to be."""
        return max(self.headroom_bytes() - self._ledger.held(self._computing, IN_FLIGHT), 0)

    def relieve(self, want: Want) -> bool:
        """Give back some memory, waiting if need be; False if none of that tier is held."""
        return self._ledger.held(want.tier, IN_FLIGHT) > 0 and self._give()

    def _give(self) -> bool:
        """Give back some memory: parked buffers, else those of one flight; False if there are none."""
        if self.parked.trim():
            return True
        is_any = bool(self.restoring or self.saving)
        if self.restoring:
            # The last one: it is needed latest.
            self.take_back(next(reversed(self.restoring.values())))
        else:
            self._end_oldest()
        self.parked.trim()
        return is_any

    def drain(self) -> None:
        """Wait until nothing is in flight, whatever became of it."""
        while self._give():
            pass

    def start_over(self) -> None:
        """Hold nothing, whatever the books say: an interrupt may have come between two lines of them."""
        self.drain()
        for tier in {self._computing, Tier.CPU}:
            if held := self._ledger.held(tier, IN_FLIGHT):
                self._ledger.release(tier, held, IN_FLIGHT)


def _had() -> None:
    """In the place of one that backward has had."""


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
