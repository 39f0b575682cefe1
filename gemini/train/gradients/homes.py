"""Other planes for gradients, in the middle of a step: fp32 sums where a second backward comes unannounced, and planes
where modules compute while several backwards add to the gradients of a block. The planes of a chunk change in one
statement that no Ctrl-C can cut, after nothing lands in the old ones any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from gemini.errors import BudgetExceeded, StorageError, human_bytes
from gemini.interrupts import WHOLE
from gemini.ledger import OF_BUDGET, WELCOME, Turn
from gemini.memory.chunks.chunk import Chunk, MemoryPlane, Plane
from gemini.memory.movement.transfers import Lane
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRAD, GRAD_ERROR, PlaneSpec
from gemini.tiers import Tier
from gemini.train.params.by_name import copy_plane
from gemini.train.params.handle import Leftover, ParamHandle

WAIT_FOR_LANDING = "gradient landing", "wait for gradients to land"
"""How a wait for gradients shows in timelines and in errors."""

_SUMS, _WHAT = PlaneSpec(GRAD, "float32"), "a sum of the gradients of a stage"
_BEFORE_WINDOWS = WELCOME | {Turn.KEPT, Turn.PREFETCHES}  # each is read once more, sums for each micro-batch

Land: TypeAlias = Callable[[ParamHandle, torch.Tensor], None]


class GradientHomes:
    """Which planes the gradients of one engine are in. Called by the training thread, or by that of its backward."""

    def __init__(self, handles: list[ParamHandle], store: ChunkStore, *, working_set: int):
        """``working_set``: bytes of the computing tier that a step takes beside planes, which sums must leave free."""
        self._handles, self._working_set = handles, working_set
        self._store, self._transfers = store, store.transfers
        self._ledger, self._device, self._mover = store.ledger, store.device, store.mover
        self._rounds = False
        self.away: dict[Chunk, Plane] = {}  # the grad planes of chunks whose sums are at hand
        self.rounded: set[ParamHandle] = set()
        """Params whose sum was rounded into such a plane when it was added to last."""

    def promote(self, chunks: list[Chunk]) -> None:
        """Turn the grad planes of ``chunks`` into fp32 sums, all of them or none. Raises BudgetExceeded if there is no
        room (what was retained is as it was, and so is the ledger), and StorageError if the disk fails: every gradient
        is still there, in one form or the other.
        """
        narrow = [c for c in chunks if GRAD in c.planes and not adds_up(c)]
        if not narrow or self._rounds:
            return
        # Landings under way write to the planes that are replaced.
        self._transfers.drain(Lane.LANDING, *WAIT_FOR_LANDING)
        self._ledger.reclaim_all(self._device.tier, OF_BUDGET)  # what moves beside computing gives way
        num_bytes = sum(4 * chunk.planes[GRAD].numel for chunk in narrow)
        wide: list[Plane] = []
        staging, was_reserved, is_used = self._mover.staging, self._mover.staging.is_reserved, False
        try:
            try:
                self._make_wide(narrow, wide, num_bytes)
            except (BudgetExceeded, StorageError) as e:
                raise type(e)(
                    "a second backward before optimizer.step() needs fp32 sums of the gradients, "
                    f"{human_bytes(num_bytes)} for a moment: {e}. Declare it with "
                    "GeminiConfig(gradients='accumulate'), raise the budget, or step after every backward"
                ) from e
            is_used = True
            for chunk, plane in zip(narrow, wide, strict=True):
                old = chunk.planes[GRAD]
                self._widen(chunk, old, plane)
                # The old plane is given back when no chunk refers to it any more, and not before.
                with WHOLE:
                    chunk.change_planes({GRAD: plane})
                    self._store.give_back(GRAD, old)
        except BaseException:
            # Sums that were not put in place; the others have their chunk's gradients in them, and stay.
            with WHOLE:
                self._store.give_back(
                    GRAD, *(plane for c, plane in zip(narrow, wide, strict=False) if c.planes[GRAD] is not plane)
                )
                if staging.is_reserved and not (was_reserved or is_used):
                    staging.give_back()
            raise

    @contextlib.contextmanager
    def at_hand(self, chunks: Sequence[Chunk], land: Land | None, *, rounds: bool) -> Iterator[None]:
        """Add up the gradients of these chunks where modules compute; they go home once, as ``land`` lands a gradient,
        or (None, with several ranks, whose gradients may still be on their way) as they are. Where there is no room
        they are added up where they live, with the same bits. ``rounds``: those that are narrower than a sum have sums
        here in any case, rounded on their way, and nowhere else. Raises BudgetExceeded if there is no room to add up;
        StorageError if the disk fails.
        """
        try:
            self._rounds = rounds
            self.promote(list(chunks))
            # Their weights stay there for all backwards inside: fetched for each, more would be lost than is won.
            needed = self._working_set + sum(chunk.weights.num_bytes for chunk in chunks if not chunk.resident)
            for chunk in chunks:
                home = chunk.planes.get(GRAD)
                if home is None or GRAD_ERROR in chunk.planes:
                    continue
                left = self._ledger.left_beside_windows(self._device.tier, needed)
                if not adds_up(chunk) or (home.tier is not self._device.tier and home.num_bytes <= left):
                    self._bring(chunk, home)
            yield
        finally:
            with WHOLE, contextlib.ExitStack() as going:  # one that fails keeps none of the others here
                self._rounds = False
                going.callback(self.rounded.clear)
                going.callback(self.away.clear)
                for chunk, home in self.away.items():
                    going.callback(self._send_home, chunk, home, land)

    def _bring(self, chunk: Chunk, home: Plane) -> None:
        """Put sums on the device in the place of a chunk's gradients; of what adds up at home, if there is room."""
        tier, num_bytes = self._device.tier, 4 * home.numel
        near: Plane | None = None
        chunk.settle()  # an update of the step before may still read them
        self._transfers.drain(Lane.LANDING, *WAIT_FOR_LANDING)
        with WHOLE:
            if adds_up(chunk):
                if not self._ledger.reserve_if_room(tier, num_bytes, GRAD, _BEFORE_WINDOWS):
                    return
            elif self._device.frames is None or self._store.moves:
                self._ledger.reserve(tier, num_bytes, GRAD, what=_WHAT)
            else:
                # Between steps this memory waits: the system takes long to make new pages, and no window needs it.
                window = self._device.make_window(num_bytes)
                near = of_window = MemoryPlane(window.bytes.view(torch.float32), tier, self._device)
                of_window.window = window
                self._store.manager.room.populate(window, GRAD, what=_WHAT)
            near = near or self._store.make_plane(_SUMS, home.numel, tier)
            try:
                # Before it takes the place: what goes home from there is all that the chunk has.
                self._widen(chunk, home, near)
            except BaseException:
                self._store.give_back(GRAD, near)
                raise
            chunk.change_planes({GRAD: near})
            self.away[chunk] = home

    def _send_home(self, chunk: Chunk, home: Plane, land: Land | None) -> None:
        """Let the sums of a chunk land as gradients do, beside what is computed next. In ``WHOLE``."""
        near, copied = chunk.planes[GRAD], False
        own = [h for h in self._handles if h.chunk is chunk and h.has_grad and h not in self.rounded]
        try:
            if own and land is None:
                copy_plane(self._mover, near, home)
            copied = True
        finally:
            chunk.change_planes({GRAD: home})
            for handle in own if land is not None or not copied else ():
                # There is none where it lives, until it lands.
                handle.norm_sums, handle.leftover = None, Leftover.TORN
        try:
            for handle in own if land is not None else ():
                sums = near.device_view(handle.slot.start, handle.slot.start + handle.slot.numel)
                assert sums is not None and land is not None
                land(handle, sums.to(home.dtype))
                handle.leftover = Leftover.NOTHING
        finally:
            self._store.give_back(GRAD, near)

    def _make_wide(self, narrow: list[Chunk], wide: list[Plane], num_bytes: int) -> None:
        """Put planes for the sums, of ``num_bytes``, into ``wide``, in what is free, and reserve them and staging; the
        caller gives all of it back if that fails. BudgetExceeded if there is no room; StorageError if the spill file
        cannot grow.
        """
        # The old planes stay until the new ones are filled, so the whole fp32 size must be free for a moment.
        staging, here = self._mover.staging, self._device.tier
        with WHOLE:
            # Before the sums: those that stay here may take the room of the staging that the others need.
            is_away = any(chunk.planes[GRAD].tier is not here for chunk in narrow)
            if is_away or num_bytes > self._ledger.left_beside_windows(self._device.tier, self._working_set):
                staging.reserve()
            for chunk in narrow:
                wide.append(self._store.make_plane(_SUMS, chunk.planes[GRAD].numel, self._reserve_wide(chunk)))
            if any(plane.tier is not here for plane in wide):
                staging.reserve()

    def _reserve_wide(self, chunk: Chunk) -> Tier:
        """Take the bytes of an fp32 sum in the tier of the retained gradient, else in the next slower one with room."""
        # Never to a faster one: that memory was not planned for gradients.
        slower = [*Tier][[*Tier].index(chunk.planes[GRAD].tier) :]
        *first, last = [tier for tier in slower if tier in self._ledger.tiers]
        for tier in first:
            with contextlib.suppress(BudgetExceeded):
                return self._reserve_in(tier, 4 * chunk.planes[GRAD].numel)
        return self._reserve_in(last, 4 * chunk.planes[GRAD].numel)

    def _reserve_in(self, tier: Tier, num_bytes: int) -> Tier:
        if tier is self._device.tier:
            free = self._ledger.left_beside_windows(tier, self._working_set)
            # Else there were no room to gather weights, and the step would break off in its middle.
            if num_bytes > free:
                raise BudgetExceeded(
                    f"a sum of gradients asked for {human_bytes(num_bytes)} of {tier.value}, where "
                    f"{human_bytes(max(free, 0))} are free beside the {human_bytes(self._working_set)} that gathered "
                    "weights need"
                )
        self._ledger.reserve(tier, num_bytes, GRAD, what="a sum of gradients")
        return tier

    def _widen(self, chunk: Chunk, old: Plane, new: Plane) -> None:
        """Copy what a plane has into its wider successor; nothing if no param of the chunk has a gradient."""
        if not any(handle.has_grad for handle in self._handles if handle.chunk is chunk):
            return
        there, into = old.device_view(0, old.numel), new.device_view(0, old.numel)
        if there is not None and into is not None:
            into.copy_(there)  # neither through the host nor waited for
            return
        copy_plane(self._mover, old, new)


def adds_up(chunk: Chunk) -> bool:
    """Whether gradients can be added to what is in the grad plane of a chunk."""
    return GRAD_ERROR in chunk.planes or chunk.planes[GRAD].dtype is torch.float32
