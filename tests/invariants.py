"""What must be so of a model's books between any two calls: who holds how many bytes, who reads, what is on its way.

Each part is checked by itself, so that a test of a part needs no model; :func:`check_engine` is for whole ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import MemoryPlane, Use
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.device import Device
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.room import Room
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.memory.store import ChunkStore
from gemini.sharing import Pool
from gemini.tiers import Tier
from gemini.train.activations.flights import IN_FLIGHT, Flights
from gemini.train.params.guard import ManagedParameter


def check_ledger(ledger: Ledger) -> None:
    """used = sum of holders, 0 <= used <= peak <= budget; of a shared budget all models together."""
    with ledger._lock:
        for tier, account in ledger._accounts.items():
            held = sum(account.held.values())
            assert held == account.used, f"{tier.value}: holders hold {held}, used says {account.used}"
            assert 0 <= account.used <= account.peak <= account.budget, (tier.value, account)
    if ledger._pool is not None:
        _check_pool(ledger._pool)


def _check_pool(pool: Pool) -> None:
    with pool.lock:
        for tier, budget in pool._budgets.items():
            used = sum(ledger.used(tier) for ledger in pool.members())
            assert 0 <= used <= pool._peaks.get(tier, 0) <= budget, (tier.value, used, pool._peaks, budget)


def bytes_behind(device: Device, tensors: Iterable[torch.Tensor]) -> int | None:
    """Bytes that torch's allocator was asked for by these tensors' memory; None where it has no books to ask."""
    if (own := getattr(device, "bytes_behind", None)) is not None:  # a stand-in that keeps books
        return own(tensors)  # type: ignore[no-any-return]
    if not isinstance(device, CudaDevice):
        return None
    asked: dict[int, int] = {}  # by address: what each block was asked for
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == device.torch_device.index:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    asked[address] = block["requested_size"]
                address += block["size"]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_cuda}
    return sum(asked.get(address, 0) for address in addresses)


def _check_room(room: Room) -> None:
    """Windows and pool are what is gathered or parked, for the allocator too."""
    check_ledger(room.ledger)
    assert room.is_balanced()
    gathered = room.ledger.held(room.tier, "windows")
    behind = bytes_behind(room._device, (window.bytes for window in room._windows()))
    assert behind in (None, gathered), f"{gathered} bytes of windows are {behind} bytes of the allocator's"


def check_manager(manager: Manager) -> None:
    """Every chunk is in a state that pins, updates and fetches ahead agree with."""
    _check_room(manager.room)
    for chunk in manager.chunks:
        assert (chunk.use is Use.COMPUTE) == (chunk.pins > 0), (chunk.name, chunk.use, chunk.pins)
        assert chunk.use is not Use.UPDATING or chunk.spec.index in manager._updating, chunk.name
        assert chunk.gathered or not chunk.resident, chunk.name
        assert (chunk.use is Use.FETCHING) == (chunk.spec.index in manager.ahead), chunk.name


def check_transfers(transfers: Transfers) -> None:
    """Behind a drain nothing is on its way but a checkpoint, which goes on behind steps: no drain waits for it."""
    for lane, of_lane in transfers.open.items():
        for key, transfer in of_lane.items():
            assert transfer.key == key and transfer.lane is lane, (lane, key)
            assert lane is Lane.CHECKPOINT or transfer.is_over(), f"{transfer.what} of {lane.value} is on its way"


def _check_flights(flights: Flights) -> None:
    """What the ledger holds is what flights travel in, and what waits for the next one."""
    under_way = [*flights.saving.values(), *flights.restoring.values()]
    buffers = sum(flight.num_bytes for flight in under_way if flight.buffer is not None)
    held = {Tier.CPU: buffers + flights.parked.num_bytes}
    if flights._computing is not Tier.CPU:
        held[flights._computing] = sum(flight.num_bytes for flight in under_way if not flight.taken)
    assert all(flights._ledger.held(tier, IN_FLIGHT) == num_bytes for tier, num_bytes in held.items()), held


def _check_planes(store: ChunkStore, kinds: tuple[str, ...]) -> None:
    """The ledger has of planes on the device what its allocator was asked for."""
    tier = store.device.tier
    planes = [p for c in store.chunks for p in c.planes.values() if isinstance(p, MemoryPlane) and p.tier is tier]
    behind = bytes_behind(store.device, (plane.tensor for plane in planes))
    held = sum(store.ledger.held(tier, kind) for kind in kinds)
    assert behind in (None, held), f"{held} bytes of planes are {behind} bytes of the allocator's"


def check_engine(engine: Any) -> None:
    """Settle a model, and demand all of it."""
    engine.drain()
    check_transfers(engine.store.transfers)
    check_manager(engine.store.manager)
    _check_flights(engine.activations.flights)
    _check_planes(engine.store, engine.stepping.rule.spec.kinds)
    if not engine.state.computing:
        assert all(isinstance(h.param, ManagedParameter) for h in engine.params.handles)
        assert all(c.pins == 0 for c in engine.store.chunks)
