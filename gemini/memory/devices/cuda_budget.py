"""The budget of a GPU against what the driver says: what is not the allocator's, what others hold, and a limit.

``gpu=`` is the whole of what the process may take. Not all of it is handed out by torch's allocator: a CUDA context and
the kernels in it are the driver's, so the ledger holds them ("context") before anything else. What the allocator takes
beyond what it hands out (whole segments, fragments) has no holder; that it stays inside the budget is torch's own limit
for the process, at which it gives back what it has cached before it asks for more.

    context + kernels + reserved by torch <= gpu=

Plans leave room for the same (:func:`gemini.planning.working.beside_bytes`). None of the constants was measured on a
GPU yet.
"""

from __future__ import annotations

import weakref

import torch

from gemini.errors import BudgetExceeded, human_bytes, warn
from gemini.planning.working import CUDA_CONTEXT, CUDA_KERNELS, CUDA_WORKSPACES

_limits: weakref.WeakKeyDictionary[object, tuple[int, int | None]] = weakref.WeakKeyDictionary()
"""By owner: the number of its device, and the bytes that the allocator may reserve for it; None: as many as there are.
"""


def beside_bytes(device: torch.device) -> int:
    """Bytes of a declared budget that nothing managed can have."""
    return _context(device) + CUDA_KERNELS + CUDA_WORKSPACES


def _context(device: torch.device) -> int:
    """What of the memory in use on a device is this process's and not torch's, as far as one can tell."""
    return min(_elsewhere(device), CUDA_CONTEXT)


def _elsewhere(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def check_room(device: torch.device, budget: int, reserved: int, freed: int) -> None:
    """Compare a budget with what there is: a warning if it can never be had in full.

    Args:
        reserved: bytes that are needed at once, the context included.
        freed: bytes of tensors there that are about to go.

    Raises:
        BudgetExceeded: if there are less than ``reserved``.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated, kept = torch.cuda.memory_allocated(device) - freed, torch.cuda.memory_reserved(device)
    has = free + kept - allocated + min(_elsewhere(device), beside_bytes(device))
    if has >= budget:
        return
    others = max(_elsewhere(device) - CUDA_CONTEXT, 0)
    holders = []
    if allocated > 0:
        holders.append(f"tensors of this program that are not managed hold {human_bytes(allocated)}")
    if others:
        holders.append(f"other programs hold {human_bytes(others)} or more (nvidia-smi names them)")
    told = (
        f"the gpu budget is {human_bytes(budget)}, but {human_bytes(has)} of the {human_bytes(total)} of {device} "
        f"can be had: {' and '.join(holders) or 'it is no larger'}"
    )
    if has < reserved:
        raise BudgetExceeded(f"{told}. {human_bytes(reserved)} are needed at once: free some, or lower the gpu budget")
    warn(f"{told}. Lower the gpu budget to that, or free some")


def limit(owner: object, device: torch.device, budget: int | None) -> None:
    """Let the allocator reserve no more on a device than the budgets of its owners, and what the program has there
    before the first of them, until they end. One without a budget is an owner that needs no limit.
    """
    assert device.index is not None
    torch.cuda.empty_cache()
    is_first = all(index != device.index for index, _ in _limits.values())
    before = torch.cuda.memory_allocated(device) if is_first else 0
    _limits[owner] = device.index, None if budget is None else before + budget - _context(device) - CUDA_KERNELS
    weakref.finalize(owner, _apply, device).atexit = False
    _apply(device)


def lift(owner: object, device: torch.device) -> None:
    """The owner ends."""
    if _limits.pop(owner, None) is not None:
        _apply(device)


def _apply(device: torch.device) -> None:
    allowed = [num_bytes for index, num_bytes in _limits.values() if index == device.index]
    total = torch.cuda.get_device_properties(device).total_memory
    known = [num_bytes for num_bytes in allowed if num_bytes is not None]
    is_limited = bool(known) and len(known) == len(allowed)
    torch.cuda.set_per_process_memory_fraction(min(sum(known) / total, 1.0) if is_limited else 1.0, device)
