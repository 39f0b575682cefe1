"""What two processes with a GPU each do for ``test_two_ranks.py``: NCCL's part is gloo's, on the same CUDA tensors.

gloo's threads copy to page-locked memory and back on streams of their own, behind the stream of the caller, as NCCL's
kernels come behind it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gemini
from benchmarks._processes import serve
from gemini.memory.devices.cuda_streams import CudaEvent
from gemini.ranks import collectives, group
from gemini.ranks.subgroup import make_subgroup
from tests.fakegpu import computing
from tests.fakegpu.test_counts import Blocks
from tests.gpu import gpu_cases
from tests.ranks import context_cases

met: set[tuple[str, str, int]] = set()
"""Of every collective: its name, the device of its buffers, and the stream it was called on."""


def begin(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank())
    group._collective = lambda ranks, parent: make_subgroup(ranks, "gloo")
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        setattr(collectives, name, _noted(name, getattr(collectives, name)))
    return {"train": train, "context": context, "train_without_waits": train_without_waits}


def _noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
    def noted(into: torch.Tensor, own: torch.Tensor, *rest: Any) -> None:
        devices = {into.device, own.device}
        assert len(devices) == 1
        met.add((name, str(devices.pop()), torch.cuda.current_stream().cuda_stream))
        call(into, own, *rest)

    return noted


def train(where: str | None) -> dict[str, Any]:
    """Four steps, each rank with batches of its own; ``where``: a placement of ``tests.gpu``, or None for the CPU."""
    met.clear()
    config = gemini.GeminiConfig(device="cpu")
    if where is not None:
        memory = gemini.MemoryBudget(
            gpu=gpu_cases.budget("1MiB"), cpu="64MiB", nvme="64MiB", nvme_path=Path(tempfile.mkdtemp())
        )
        placement = gemini.StaticPlacement(**gpu_cases.PLACEMENTS[where].fractions)
        config = gemini.GeminiConfig(memory=memory, placement=placement)
    model = gemini.GeminiDDP(Blocks(4), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    told = []
    for step in range(4):
        ids = (torch.arange(32) * (dist.get_rank() + 2) + step).remainder(96).view(2, 16)
        loss = model(ids.to(model.device))
        loss.backward()
        told.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    weights = [model.full_param(name).double().sum().item() for name, _ in model.named_parameters()]
    return _answer(told + weights, str(model.device))


def train_without_waits(where: str) -> list[str]:
    """Races, if nothing waits on the device; what is computed then may be NaN."""
    CudaEvent.wait_on_device = lambda event: None  # type: ignore[method-assign]
    with contextlib.suppress(gemini.NonFiniteGradient):
        train(where)
    return computing.races()


def context(kind: str) -> dict[str, Any]:
    """A step on parts of sequences, on this GPU; how far it is off one process on the CPU.

    The lower right mask of torch's own attention is a subclass of Tensor, which torch cannot make under the mode that
    computes here (2.13); eager attention takes another one.
    """
    met.clear()
    case = context_cases.Case(kind=kind, device="cuda", attention="eager" if kind == "gathered" else "sdpa")
    result = context_cases.step(case)
    loss, grads = context_cases.differences(
        context_cases.Result(result.loss, {name: grad.cpu() for name, grad in result.grads.items()}),
        context_cases.alone(case, 1),
    )
    return _answer([loss, grads], "cuda")


def _answer(numbers: list[float], device: str) -> dict[str, Any]:
    torch.cuda.synchronize()
    return {"numbers": numbers, "device": device, "met": sorted(met), "races": computing.races()}


if __name__ == "__main__":
    serve(begin)
