"""Two nodes of two ranks each, joined by a narrow link: what crosses it with hybrid sharding and with flat ZeRO-3.

    sudo python benchmarks/two_nodes.py

The nodes are network namespaces, the link a veth pair shaped by ``tc``; the ranks of one node talk over their own
node's address, which never leaves it. Hybrid sharding (mesh of 2 replicas x 2 shards) gathers and scatters inside a
node; per step a rank sends only the all-reduce of its gradient shard across, 2 (R-1)/R times its bytes for R replicas.
Flat ZeRO-3 over four ranks sends every all-gather and reduce-scatter across. The bytes are the kernel's own counters
of the interface. All replicas must end with the same bits, and with the flat run's weights within rounding.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of, train_step
from benchmarks._processes import Group, run_script
from benchmarks._report import add_report_arguments, head, mb, publish, set_threads, table

OVERHEAD = 0.08
"""What may be counted above the arithmetic: TCP/IP and Ethernet headers (4.6 % at 1500 bytes), acknowledgements of the
other direction, agreement."""
RTOL = 1e-5


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import gemini

    set_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2)) if settings["hybrid"] else None
    memory = gemini.MemoryBudget(cpu="8GiB")
    model = gemini.GeminiDDP(
        make_llama(settings["shape"]),
        gemini.GeminiConfig(precision="fp32", memory=memory, device="cpu"),
        mesh=mesh,
    )
    # A large eps keeps the update smooth where a gradient is nearly zero: there Adam would turn rounding into lr.
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, eps=1e-4)
    state = {"number": 0}

    def train(steps: int) -> dict[str, Any]:
        seconds, losses, norms = [], [], []
        for _ in range(steps):
            batch = make_batch(settings["shape"], state["number"], rank)
            state["number"] += 1
            begin = time.perf_counter()
            loss, norm = train_step(model, optimizer, model.clip_grad_norm_, batch)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
            norms.append(norm)
        chunks = [chunk.numel for chunk in model._gemini_engine.decision.problem.layout.chunks]
        return {"seconds": seconds, "losses": losses, "norms": norms, "sent": model.memory_report()["sent"],
                "chunks": chunks, "params": model._gemini_engine.decision.problem.layout.payload}  # fmt: skip

    def weights(path: str) -> int:
        """A checksum of all masters; rank 0 also leaves them at ``path``."""
        values = model.state_dict(dtype=torch.float32)
        checksum = 0
        for name in sorted(values):
            checksum = zlib.crc32(values[name].contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
        if rank == 0:
            torch.save(values, path)
        return checksum

    return {"train": train, "weights": weights}


# ---- the nodes -------------------------------------------------------------------------------------------------------


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Nodes:
    """Two namespaces and the link between them; gone when closed, whatever happened."""

    def __init__(self, rate: str):
        pid = os.getpid()
        self.names = [f"gemini-node-{pid}-{i}" for i in range(2)]
        self.links = [f"gem{pid}n{i}"[:15] for i in range(2)]
        self.addresses = ["10.213.57.1", "10.213.57.2"]
        self.shaped = ""
        _remove_leftovers()
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self.links[0], "netns", self.names[0], "type", "veth",
               "peer", "name", self.links[1], "netns", self.names[1])  # fmt: skip
            for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
            self.shaped = self._shape(rate)
        except BaseException:
            self.close()
            raise

    def _shape(self, rate: str) -> str:
        """Slow both directions down; says what the link is like now."""
        if rate == "none":
            return "the link is not shaped"
        if shutil.which("tc") is None:
            return "the link is NOT shaped: there is no tc"
        for name, link in zip(self.names, self.links, strict=True):
            words = ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate, "burst", "256kb",
                     "latency", "200ms"]  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
            if done.returncode:
                return f"the link is NOT shaped: tc tbf is refused ({done.stderr.strip()})"
        return f"each direction of the link is limited to {rate} (tc tbf, queue of 200 ms at most, no delay added)"

    def prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[rank // 2]]

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": self.addresses[0],
            "GLOO_SOCKET_IFNAME": self.links[rank // 2],
        }  # fmt: skip

    def counted(self) -> list[int]:
        """Bytes that have left node 0 and node 1 over the link, by the kernel's counters."""
        counts = []
        for name, link in zip(self.names, self.links, strict=True):
            path = f"/sys/class/net/{link}/statistics/tx_bytes"
            done = subprocess.run(
                ["ip", "netns", "exec", name, "cat", path], capture_output=True, text=True, timeout=20, check=True
            )
            counts.append(int(done.stdout))
        return counts

    def close(self) -> None:
        # The last namespace of a veth pair takes the pair with it.
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _remove_leftovers() -> None:
    """Namespaces of runs that were killed outright."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        words = name.split("-")
        if name.startswith("gemini-node-") and len(words) == 4 and not Path(f"/proc/{words[2]}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


# ---- the comparison --------------------------------------------------------------------------------------------------


def one_run(args: argparse.Namespace, nodes: Nodes, hybrid: bool, path: Path) -> dict[str, Any]:
    settings = {"hybrid": hybrid, "shape": shape_of(args)}
    with Group(
        __file__, settings, 4, timeout=args.timeout, prefix=nodes.prefix, environment=nodes.environment
    ) as group:
        group.order("train", steps=args.warmup)
        before = nodes.counted()
        done = group.order("train", steps=args.steps)
        crossed = [(b - a) / args.steps for a, b in zip(before, nodes.counted(), strict=True)]
        checksums = group.order("weights", path=str(path))
    return {
        "crossed": crossed, "checksums": checksums, "chunks": done[0]["chunks"], "params": done[0]["params"],
        "sent": [rank["sent"] for rank in done],
        "seconds": statistics.median(max(step) for step in zip(*(r["seconds"] for r in done), strict=True)),
        "losses": [statistics.fmean(step) for step in zip(*(r["losses"] for r in done), strict=True)],
        "norms": done[0]["norms"],
    }  # fmt: skip


def predicted(run: Mapping[str, Any], hybrid: bool) -> float:
    """Bytes per step and direction that must cross: two ranks of a node send."""
    if hybrid:
        replicas, shard = 2, 4 * sum(run["chunks"]) // 2
        return 2 * shard * 2 * (replicas - 1) / replicas
    # Of a rank's three peers two are on the other node; all-gather and reduce-scatter send a shard to each.
    shard = 4 * sum(run["chunks"]) // 4
    gathers = run["sent"][0]["all_gather"] / (3 * shard)
    return 2 * 2 * shard * (gathers + 1)


def compare_weights(paths: list[Path]) -> float:
    """The largest relative distance ||a - b|| / ||b|| of any param between two files of weights."""
    import torch

    a, b = (torch.load(path) for path in paths)
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=384, layers=6, vocab=2048, batch=2, tokens=64)
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc says it; none: not shaped")
    parser.add_argument("--steps", type=int, default=6, help="counted (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2)
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.steps = 256, 4, 1024, 3
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("two_nodes.py makes network namespaces: it needs root and iproute2 (ip, tc)", file=sys.stderr)
        return 2
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, Nodes(args.rate) as nodes:
        shaped = nodes.shaped
        paths = [Path(folder) / name for name in ("hybrid", "flat")]
        for name, path in zip(("hybrid", "flat"), paths, strict=True):
            runs[name] = one_run(args, nodes, name == "hybrid", path)
            print(f"{name}: {runs[name]['seconds']:.2f} s per step", file=sys.stderr, flush=True)
        distance = compare_weights(paths)
    wrong, rows = [], []
    for name, run in runs.items():
        expected = predicted(run, name == "hybrid")
        ratios = [crossed / expected for crossed in run["crossed"]]
        sent = {how: statistics.fmean(s.get(how, 0) for s in run["sent"]) for how in
                ("all_gather", "reduce_scatter", "all_reduce", "agreement")}  # fmt: skip
        rows.append([name, mb(expected), *(mb(c) for c in run["crossed"]), *(f"{r:.3f}" for r in ratios),
                     f"{run['seconds']:.2f}", *(mb(n) for n in sent.values())])  # fmt: skip
        if not all(1 <= ratio <= 1 + OVERHEAD for ratio in ratios):
            wrong.append(f"{name}: {' and '.join(f'{r:.3f}' for r in ratios)} times the predicted bytes crossed")
        if len(set(run["checksums"])) != 1:
            wrong.append(f"{name}: the ranks end with different weights (checksums {run['checksums']})")
    hybrid, flat = runs["hybrid"], runs["flat"]
    pairs = [pair for what in ("losses", "norms") for pair in zip(hybrid[what], flat[what], strict=True)]
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    if not max(distance, off) <= RTOL:
        wrong.append(f"hybrid and flat differ: weights by {distance:.1e}, losses and norms by {off:.1e}")
    report = head(
        "Two nodes and a narrow link",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {hybrid['params']:,} params in fp32; "
            f"2 nodes (network namespaces) of 2 ranks, {args.batch} x {args.tokens} tokens per rank, {args.steps} "
            f"steps after {args.warmup} to warm up; {shaped}.",
        ],
    )
    report += [
        "MB (10^6) per step and direction, by the kernel's counters of the interface, and the arithmetic: hybrid, each "
        "rank's gradient shard times 2 (R-1)/R = 1; flat, a shard to each of two ranks beyond the link, per all-gather "
        "and reduce-scatter. To the right what a rank sent in a step, to whomever, as memory_report() counts it.",
        "",
        *table(
            ["mesh", "predicted", "from node 0", "from node 1", "ratio 0", "ratio 1", "s per step", "all_gather",
             "reduce_scatter", "all_reduce", "agreement"], rows
        ),
        f"Flat over hybrid: {flat['crossed'][0] / hybrid['crossed'][0]:.2f} times the bytes over the link, "
        f"{flat['seconds'] / hybrid['seconds']:.2f} times the time of a step. Weights of all four ranks: "
        f"{'the same bits' if all(len(set(r['checksums'])) == 1 for r in runs.values()) else 'DIFFERENT'} within each "
        f"run; hybrid against flat ||a - b|| / ||b|| <= {distance:.1e} for every param, losses and norms of each step "
        f"within {off:.1e}.",
        "",
    ]  # fmt: skip
    report += [f"WRONG: {w}" for w in wrong]
    publish(report, args.out, theme=None if args.quick else "two_nodes")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_script(make_orders, main)
