"""Checkpoints: seconds and memory to save and load one, ours against plain ``torch.distributed.checkpoint``.

    python benchmarks/checkpoint_speed.py --gigabytes 1 --ranks 1 2

Every measurement runs in processes of its own: masters and moments of the same size, in memory or on the disk. Plain
DCP is given the tensors of each rank in a dictionary, as FSDP would; it has to have them in memory, so for states on
the disk there is no such peer. The number after the seconds is the largest rise of anonymous memory on any rank. Files
are synced to the disk by both; loading reads what was just written, so mostly from the page cache, for both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MODES = ("dcp", "gemini ram", "gemini disk", "gemini ram, behind", "gemini disk, behind")


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measured(function: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and the rise of anonymous memory."""
    before, peak, done = anonymous_bytes(), 0, False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    done = True
    thread.join()
    return {"seconds": seconds, "rise": max(peak - before, 0)}


def run(mode: str, num_bytes: int, rank: int, size: int, folder: Path, queue: Any) -> None:
    torch.set_num_threads(1)
    if size > 1:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    result = plain(num_bytes // size, folder, size) if mode == "dcp" else ours(mode, num_bytes, folder)
    queue.put((rank, result))


def plain(num_bytes: int, folder: Path, size: int) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    numel, rank = num_bytes // 12 // 16, dist.get_rank() if size > 1 else 0
    dtypes = {"weights": torch.bfloat16, "residual": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    names = [(kind, layer) for layer in range(16) for kind in dtypes]
    state = {f"{kind}/{rank}/{layer}": torch.ones(numel, dtype=dtypes[kind]) for kind, layer in names}
    save = measured(lambda: dcp.save(state, checkpoint_id=folder / "ckpt", no_dist=size == 1))
    load = measured(lambda: dcp.load(state, checkpoint_id=folder / "ckpt", no_dist=size == 1))
    return {"save": save, "load": load}


def ours(mode: str, num_bytes: int, folder: Path) -> dict[str, Any]:
    import gemini

    width = int((num_bytes / 12 / 16) ** 0.5)
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
    gigabyte = 2**30
    memory = gemini.MemoryBudget(cpu=4 * num_bytes + gigabyte, nvme=4 * num_bytes, nvme_path=folder)
    on_disk = 1.0 if "disk" in mode else 0.0
    placement = gemini.StaticPlacement(weights_on_nvme=on_disk, optimizer_on_nvme=on_disk)
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, placement=placement, device="cpu"))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    batch = torch.randn(4, width, dtype=torch.bfloat16)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    result: dict[str, Any] = {}
    if "behind" in mode:
        result["step"] = measured(step)["seconds"]
        steps: list[float] = []

        def save() -> None:
            pending = gemini.save_checkpoint(folder / "ckpt", model, optimizer, wait=False)
            for _ in range(4):
                start = time.perf_counter()
                step()
                steps.append(time.perf_counter() - start)
            pending.wait()

        result["save"] = measured(save)
        result["steps"] = steps
    else:
        result["save"] = measured(lambda: gemini.save_checkpoint(folder / "ckpt", model, optimizer))
        result["load"] = measured(lambda: gemini.load_checkpoint(folder / "ckpt", model, optimizer))
    return result


def measure(mode: str, num_bytes: int, size: int, where: str | None) -> dict[str, Any]:
    """The slowest rank's seconds and the largest rise."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-speed-", dir=where))
    context = mp.get_context("spawn")
    queue = context.Queue()
    try:
        arguments = [(mode, num_bytes, rank, size, folder, queue) for rank in range(size)]
        processes = [context.Process(target=run, args=each) for each in arguments]
        for process in processes:
            process.start()
        results = [queue.get(timeout=600)[1] for _ in processes]
        for process in processes:
            process.join(60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worst: dict[str, Any] = {
        what: {key: max(result[what][key] for result in results) for key in ("seconds", "rise")}
        for what in ("save", "load")
        if what in results[0]
    }
    if "steps" in results[0]:
        worst["step"] = max(result["step"] for result in results)
        worst["steps"] = max((result["steps"] for result in results), key=sum)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of masters and moments, all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--where", help="a folder on the disk to measure (default: the system's for temporary files)")
    arguments = parser.parse_args()
    num_bytes = int(arguments.gigabytes * 2**30)
    print(f"{arguments.gigabytes} GiB, torch {torch.__version__}, {os.cpu_count()} cores")
    for size in arguments.ranks:
        for mode in arguments.modes:
            found = measure(mode, num_bytes, size, arguments.where)
            line = [f"{size} ranks, {mode:20s}"]
            for what in ("save", "load"):
                if what in found:
                    mib = found[what]["rise"] / 2**20
                    line.append(f"{what} {found[what]['seconds']:6.2f} s, +{mib:6.1f} MiB")
            if "steps" in found:
                steps = [round(seconds, 2) for seconds in found["steps"]]
                line.append(f"a step {found['step']:.2f} s, while it was written {json.dumps(steps)}")
            print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
