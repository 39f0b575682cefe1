"""Checkpoints: seconds and memory to save and load one, ours against plain ``torch.distributed.checkpoint``.

    python benchmarks/checkpoint_speed.py --gigabytes 1 --ranks 1 2

Every measurement runs in processes of its own: masters and states of the same size, in memory or on the disk. Plain
DCP is given the tensors of each rank in a dictionary, as FSDP would; it has to have them in memory, so for states on
the disk there is no such peer. The number after the seconds is the largest rise of anonymous memory on any rank. Files
are synced to the disk by both; loading reads what was just written, so mostly from the page cache, for both.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._processes import Group, run_script
from benchmarks._report import set_threads, versions
from benchmarks._rounds import seconds_of

MODES = ("dcp", "gemini ram", "gemini disk", "gemini ram, behind", "gemini disk, behind")


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import torch.distributed as dist

    set_threads(1)
    if settings["size"] > 1:
        dist.init_process_group("gloo")
    return (plain if settings["mode"] == "dcp" else ours)(settings, Path(settings["folder"]))


def plain(settings: dict[str, Any], folder: Path) -> Mapping[str, Callable[..., Any]]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    alone = settings["size"] == 1
    numel, rank = settings["num_bytes"] // settings["size"] // 12 // 16, 0 if alone else dist.get_rank()
    dtypes = {"weights": torch.bfloat16, "residual": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    names = [(kind, layer) for layer in range(16) for kind in dtypes]
    state = {f"{kind}/{rank}/{layer}": torch.ones(numel, dtype=dtypes[kind]) for kind, layer in names}
    return {
        "save": lambda: seconds_of(lambda: dcp.save(state, checkpoint_id=folder / "ckpt", no_dist=alone)),
        "load": lambda: seconds_of(lambda: dcp.load(state, checkpoint_id=folder / "ckpt", no_dist=alone)),
    }


def ours(settings: dict[str, Any], folder: Path) -> Mapping[str, Callable[..., Any]]:
    import torch
    from torch import nn

    import gemini

    num_bytes, mode = settings["num_bytes"], settings["mode"]
    width = int((num_bytes / 12 / 16) ** 0.5)
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
    memory = gemini.MemoryBudget(cpu=4 * num_bytes + 2**30, nvme=4 * num_bytes, nvme_path=folder)
    on_disk = 1.0 if "disk" in mode else 0.0
    placement = gemini.StaticPlacement(weights_on_nvme=on_disk, optimizer_on_nvme=on_disk)
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, placement=placement, device="cpu"))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    batch = torch.randn(4, width, dtype=torch.bfloat16)

    def step() -> float:
        def whole() -> None:
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return seconds_of(whole)

    def save_behind() -> list[float]:
        pending = gemini.save_checkpoint(folder / "ckpt", model, optimizer, wait=False)
        steps = [step() for _ in range(4)]
        pending.wait()
        return steps

    step()
    step()
    return {
        "step": step,
        "save": lambda: seconds_of(lambda: gemini.save_checkpoint(folder / "ckpt", model, optimizer)),
        "load": lambda: seconds_of(lambda: gemini.load_checkpoint(folder / "ckpt", model, optimizer)),
        "save_behind": save_behind,
    }


# ---- from outside ----------------------------------------------------------------------------------------------------


def measure(mode: str, num_bytes: int, size: int, where: str | None) -> list[str]:
    """The slowest rank's seconds and the largest rise, in words."""
    told = []

    def watched(what: str, order: str) -> list[Any]:
        before, begin = [rank.status()["RssAnon"] for rank in group.ranks], time.perf_counter()
        answers = group.order(order, watch=True)
        seconds = time.perf_counter() - begin if order == "save_behind" else max(answers)
        rise = max(rank.peak_anon - anon for rank, anon in zip(group.ranks, before, strict=True))
        told.append(f"{what} {seconds:6.2f} s, +{max(rise, 0) / 2**20:6.1f} MiB")
        return answers

    with tempfile.TemporaryDirectory(prefix="checkpoint-speed-", dir=where, ignore_cleanup_errors=True) as folder:
        settings = {"mode": mode, "num_bytes": num_bytes, "size": size, "folder": folder}
        with Group(__file__, settings, size, timeout=600) as group:
            if "behind" not in mode:
                watched("save", "save")
                watched("load", "load")
                return told
            step = max(group.order("step"))
            steps = [round(seconds, 2) for seconds in max(watched("save", "save_behind"), key=sum)]
            return [*told, f"a step {step:.2f} s, while it was written {json.dumps(steps)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of masters and states, all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--where", help="a folder on the disk to measure (default: the system's for temporary files)")
    args = parser.parse_args()
    print(f"{args.gigabytes} GiB, {versions('torch')}, {len(os.sched_getaffinity(0))} cores")
    for size in args.ranks:
        for mode in args.modes:
            told = measure(mode, int(args.gigabytes * 2**30), size, args.where)
            print("   ".join([f"{size} ranks, {mode:20s}", *told]), flush=True)


if __name__ == "__main__":
    run_script(make_orders, main)
