"""What two processes with a GPU each do for ``test_two_ranks.py``: NCCL's part is gloo's, on the same CUDA tensors.

gloo's threads copy to page-locked memory and back on streams of their own, behind the stream of the caller, as NCCL's
kernels come behind it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gemini
from benchmarks._processes import serve
from gemini.memory.devices.cuda_windows import CudaEvent
from gemini.planning.placement import bytes_per_tier
from gemini.ranks import group
from gemini.ranks.process_groups import make_subgroup
from gemini.ranks.wire import Wire
from gemini.tiers import Tier
from tests.fakegpu import computing
from tests.fakegpu.test_counts import Blocks
from tests.gpu import gpu_cases
from tests.ranks import context_cases
from tests.world import world_of

met: list[tuple[str, str, str]] = []
"""Of every collective, in their order: its name, the device of its buffers, and the thread that called it."""
streams: dict[str, set[int]] = {}
"""On which streams each thread called any."""


def begin(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank())
    group._collective = lambda ranks: make_subgroup(ranks, "gloo")
    for method in ("all_gather_by_library", "reduce_scatter_by_library", "all_to_all"):
        setattr(Wire, method, _noted(method.removesuffix("_by_library"), getattr(Wire, method)))
    return {"train": train, "context": context, "train_without_waits": train_without_waits}


def _noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(wire: Wire, tag: Any, *rest: Any) -> Any:
        devices = {value.device for value in rest if isinstance(value, torch.Tensor)}
        assert len(devices) == 1
        thread = threading.current_thread().name
        met.append((name, str(devices.pop()), thread))
        streams.setdefault(thread, set()).add(torch.cuda.current_stream().cuda_stream)
        return call(wire, tag, *rest)

    return noted


def train(where: str | None, tight: bool = False) -> dict[str, Any]:
    """Four steps, each rank with batches of its own; ``where``: a placement of ``tests.gpu``, or None for the CPU.
    ``tight``: in the least of the GPU.
    """
    met.clear()
    streams.clear()
    model = _wrap(where, tight)
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
    world = world_of(model)
    more = {"scripted": world.shards.num_scripted, "gathers": world.num_gathers}
    return _answer(told + weights, str(model.device)) | more


def _wrap(where: str | None, tight: bool) -> Any:
    if where is None:
        return gemini.GeminiDDP(Blocks(4), gemini.GeminiConfig(device="cpu", max_chunk=5000))
    placement, gpu = gpu_cases.PLACEMENTS[where].static, gpu_cases.budget("1MiB")
    for _ in range(2 if tight else 1):
        memory = gemini.MemoryBudget(gpu=gpu, cpu="64MiB", nvme="64MiB", nvme_path=Path(tempfile.mkdtemp()))
        config = gemini.GeminiConfig(memory=memory, placement=placement, max_chunk=5000)
        model: Any = gemini.GeminiDDP(Blocks(4), config)
        decision = world_of(model).decision
        gpu = gpu_cases.budget(bytes_per_tier(decision.problem, decision.placement)[Tier.GPU] + 4096)
    return model


def train_without_waits(where: str) -> list[str]:
    """Races, if nothing waits on the device; what is computed then may be NaN."""
    CudaEvent.wait_on_device = lambda event: None  # type: ignore[method-assign]
    with contextlib.suppress(gemini.NonFiniteGradient):
        train(where)
    return computing.races()


def context() -> dict[str, Any]:
    """A step on parts of sequences, on this GPU; how far it is off one process on the CPU."""
    met.clear()
    case = context_cases.Case(device="cuda")
    result = context_cases.step(case)
    loss, grads = context_cases.differences(
        context_cases.Result(result.loss, {name: grad.cpu() for name, grad in result.grads.items()}),
        context_cases.alone(case, 1),
    )
    return _answer([loss, grads], "cuda")


def _answer(numbers: list[float], device: str) -> dict[str, Any]:
    torch.cuda.synchronize()
    by_thread = {thread: sorted(own) for thread, own in streams.items()}
    return {"numbers": numbers, "device": device, "met": met, "streams": by_thread, "races": computing.races()}


if __name__ == "__main__":
    serve(begin)
