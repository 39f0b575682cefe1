"""The largest model that trains here: full-parameter AdamW over RAM and drive, with exact states (12 bytes per param)
or compact ones (5), in a process that the kernel would kill at its memory limit.

    python benchmarks/biggest_model.py --spill /scratch --report benchmarks/reports/biggest_model_<hardware>_<date>.md
    python benchmarks/biggest_model.py --spill /scratch --states compact --params 11e9

A Llama of ``--params`` params is drawn from its config straight into the tiers (never whole in memory) and makes some
real steps: gradient checkpointing, updates inside backward, few tokens. It runs in a process of its own inside a memory
cgroup (v1 or v2; root, or a delegated group), whose limit counts everything: interpreter, torch, activations, page
cache. The CPU budget is what the limit leaves after a stated reserve for those. The report has seconds per step, loss,
bytes per tier, what moved, how fast the drive was, and the arithmetic of what a larger model would take.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _memory
from benchmarks._processes import Group, RanksFailed, run_script
from benchmarks._report import add_out, head, publish, table
from benchmarks.gpu._llama import Shape, config_of

BYTES_PER_PARAM = {"exact": 12.0, "compact": 2 + 1 + 2 + 2 / 64}
"""Weights, residuals, two moments, and of compact ones two scales for each block of 64."""
INTERPRETER = 600 * 2**20
"""Python, torch and transformers with their thread pools, and what a small model computes with."""
PARAMS_IN_FLIGHT = 6
"""Of the largest param, in bf16, beside the budget: its gradient, the one before it that is still being updated, a copy
of the weights in the order that a matrix product wants, and at the beginning its drawn values and their masters.
"""
GRADIENTS_IN_FLIGHT = 3
"""Chunks whose gradients may wait for their updates inside the CPU budget."""
CHUNK = 64 * 2**20
"""Elements of a chunk at most, unless a single param is larger."""
STAGING = 128 * 2**20
"""Bytes, more than any staging takes."""


def largest_of(shape: Shape) -> int:
    """Elements of the largest param."""
    return shape.hidden * max(shape.vocab, shape.intermediate)


def shape_of(params: float, vocab: int) -> Shape:
    """A Llama of at least so many params: as wide as those of its size are, and as deep as that takes."""
    widths = ((4e8, 1024), (1.6e9, 2048), (4e9, 3072), (3e10, 4096))
    hidden = next((width for limit, width in widths if params < limit), 8192)
    one = Shape(hidden, hidden * 11 // 4, 1, hidden // 128, hidden // 128, vocab)
    return one._replace(layers=max(1, math.ceil((params - one.params) / (one.of_layer + 2 * hidden)) + 1))


def reserve_bytes(shape: Shape, tokens: int) -> int:
    """Memory of the process that is no part of the CPU budget."""
    # Logits with their gradient and log-probabilities in fp32; inputs of all blocks; what one block keeps.
    activations = tokens * (4 * 4 * shape.vocab + 2 * shape.hidden * shape.layers + 40 * shape.intermediate)
    return INTERPRETER + PARAMS_IN_FLIGHT * 2 * largest_of(shape) + 2 * activations


def states_on_drive(shape: Shape, states: str, cpu: int, in_flight: int) -> float | None:
    """The fraction of optimizer states on the drive that leaves ``in_flight`` bytes of the CPU budget to gradients that
    wait for their update. A placement by fractions is exact to one chunk, so one chunk more goes there. None where not
    even the weights fit: then the planner decides.
    """
    chunk = max(largest_of(shape), CHUNK)
    per_param = BYTES_PER_PARAM[states] - 2
    left = cpu - 2 * shape.params - in_flight - int(per_param * chunk) - STAGING
    return None if left < 0 else max(0.0, 1 - left / (per_param * shape.params))


# ---- the process inside the limit ------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """Build, train, tell."""
    import torch

    import gemini

    shape, fraction, tokens = Shape(*settings["shape"]), settings["fraction"], settings["tokens"]
    placement: Any = "auto" if fraction is None else gemini.StaticPlacement(optimizer_on_nvme=fraction)
    config = gemini.GeminiConfig(
        precision="bf16", memory=gemini.MemoryBudget(**settings["memory"]), placement=placement,
        gradients="transient", device="cpu", max_chunk=CHUNK, states=settings["states"],
    )  # fmt: skip
    torch.manual_seed(0)
    begin = time.perf_counter()
    model: Any = gemini.from_config(config_of(shape, tokens), config)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = gemini.HybridAdam(model.parameters(), lr=settings["lr"], step_in_backward=True)
    seconds, num_params = time.perf_counter() - begin, sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(1))

    def built() -> dict[str, Any]:
        return {"seconds": seconds, "params": num_params, **_memory.status()}

    def step(is_last: bool) -> dict[str, Any]:
        clock = [time.perf_counter()]
        loss = model(input_ids=ids, labels=ids).loss
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            model._gemini_engine.drain()  # the next forward of the other steps waits for what it needs
        clock.append(time.perf_counter())
        parts = [b - a for a, b in zip(clock, clock[1:], strict=False)]
        moved = dict(model.memory_report()["moved"])
        return {"loss": float(loss.detach()), "parts": parts, "moved": moved, **_memory.status()}

    def trained() -> dict[str, Any]:
        report = model.memory_report()
        return {
            "tiers": {name: report[name] for name in ("cpu", "nvme") if name in report},
            "bytes_per_param": report["bytes_per_param"], "stalls": dict(report.get("stalls", {})),
            "direct": model._gemini_engine.store.files[gemini.Tier.NVME].direct, **_memory.status(),
        }  # fmt: skip

    return {"built": built, "step": step, "trained": trained}


# ---- outside of it ---------------------------------------------------------------------------------------------------


def watch(args: argparse.Namespace, settings: dict[str, Any], cage: _memory.Cage | None) -> dict[str, Any]:
    """What the process says, in the cgroup from its first instruction on; and how it ended, if that was early."""
    said: dict[str, Any] = {"steps": []}
    try:
        with Group(
            __file__, settings, prefix=lambda _: [] if cage is None else cage.prefix(),
            threads=int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))), patience=600, ranked=False,
        ) as group:  # fmt: skip
            (said["built"],) = group.order("built")
            for number in range(args.steps):
                said["steps"] += group.order("step", is_last=number == args.steps - 1)
                print(f"step {number + 1}: {said['steps'][-1]}"[:200], file=sys.stderr, flush=True)
            (said["trained"],) = group.order("trained")
    except RanksFailed as e:
        said |= {"code": e.code, "errors": str(e)}
    if cage is not None:
        said["peak"] = cage.peak()
    return said


def make_cage(args: argparse.Namespace) -> _memory.Cage | None:
    """The cgroup, or None where there is to be none.

    Raises:
        SystemExit: where none can be made.
    """
    if args.no_cgroup:
        return None
    try:
        return _memory.Cage(args.limit)
    except OSError as e:
        raise SystemExit(
            f"no memory cgroup of {args.limit} bytes can be made here ({e}): run as root, or in a delegated group; "
            "--no-cgroup runs without a limit, and the report says so"
        ) from e


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=5e9)
    parser.add_argument("--states", choices=list(BYTES_PER_PARAM), default="exact")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=128, help="per step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--limit", default="20GiB", help="of the cgroup (default: %(default)s)")
    parser.add_argument("--reserve", default=None, help="of it, what is no budget (default: computed)")
    parser.add_argument("--spill", type=Path, default=Path("/tmp"), help="folder of the spill file")
    parser.add_argument("--keep-free", default="8GiB", help="of the drive (default: %(default)s)")
    in_flight = "bytes of the CPU budget left to gradients that wait (default: some chunks' worth; 0: planned by auto)"
    parser.add_argument("--in-flight", type=int, default=None, help=in_flight)
    parser.add_argument("--no-cgroup", action="store_true", help="run without a limit")
    add_out(parser)
    args = parser.parse_args()
    from gemini.errors import human_bytes, parse_bytes
    from gemini.machines.measure import Sizes, measure_nvme

    args.limit, args.keep_free = parse_bytes(args.limit), parse_bytes(args.keep_free)
    shape = shape_of(args.params, args.vocab)
    if args.in_flight is None:
        args.in_flight = GRADIENTS_IN_FLIGHT * 2 * max(largest_of(shape), CHUNK)
    reserve = reserve_bytes(shape, args.tokens) if args.reserve is None else parse_bytes(args.reserve)
    cpu = args.limit - reserve
    free = _memory.free_disk(args.spill)
    nvme = free - args.keep_free
    per_param = BYTES_PER_PARAM[args.states]
    room = (max(cpu, 0) + max(nvme, 0)) / per_param
    if shape.params > room or cpu <= 0:
        raise SystemExit(
            f"{shape.params:,} params take {human_bytes(per_param * shape.params)}, and there are "
            f"{human_bytes(max(cpu, 0))} of RAM and {human_bytes(max(nvme, 0))} of disk: at most --params {room:.2g}"
        )
    drive = dict(measure_nvme(args.spill, Sizes()))
    memory = {"cpu": cpu, "nvme": nvme, "nvme_path": str(args.spill)}
    fraction = states_on_drive(shape, args.states, cpu, args.in_flight) if args.in_flight else None
    settings = {
        "shape": shape, "states": args.states, "tokens": args.tokens, "lr": args.lr, "memory": memory,
        "fraction": fraction,
    }  # fmt: skip
    cage = make_cage(args)
    begin = time.monotonic()
    try:
        said = watch(args, settings, cage)
    finally:
        if cage is not None:
            cage.close()
    publish(report_of(args, shape, said, drive, cpu, nvme, free, time.monotonic() - begin), args.out)
    if "errors" in said:
        sys.exit(1)


def report_of(
    args: argparse.Namespace, shape: Shape, said: dict[str, Any], drive: dict[str, Any], cpu: int, nvme: int,
    free: int, seconds: float,
) -> list[str]:  # fmt: skip
    from gemini.errors import human_bytes
    from gemini.planning.hardware import human_figure

    limit = f"a memory cgroup of {human_bytes(args.limit)}" if "peak" in said else "NO limit (--no-cgroup)"
    lines = head(
        "The largest model that trains here",
        [
            f"Llama of {shape.layers} layers of {shape.hidden} (MLP {shape.intermediate}, vocabulary {shape.vocab}): "
            f"{shape.params:,} params, AdamW with {args.states} states, {args.tokens} tokens per step, gradient "
            f"checkpointing, updates inside backward. In {limit}; budgets: CPU {human_bytes(cpu)}, NVMe "
            f"{human_bytes(nvme)} on {args.spill}. {seconds:.0f} s in all.",
        ],
        threads=len(os.sched_getaffinity(0)),
    )
    if "errors" in said:
        what = "was killed (by the limit, if it was -9)" if (said["code"] or 0) < 0 else "failed"
        return [*lines, f"The process {what}: exit code {said['code']}.", "", "```", said["errors"].strip(), "```"]
    built, steps, trained = said["built"], said["steps"], said["trained"]
    rows = []
    for number, step in enumerate(steps):
        whole, moved = sum(step["parts"]), step["moved"]
        up, down = moved.get("nvme->cpu", 0), moved.get("cpu->nvme", 0)
        rows.append([
            number + 1, f"{step['loss']:.4f}", f"{whole:.1f}", *(f"{part:.1f}" for part in step["parts"]),
            human_bytes(up), human_bytes(down), f"{(up + down) / whole / 1e9:.2f} GB/s", human_bytes(step["VmRSS"]),
        ])  # fmt: skip
    names = ["step", "loss", "seconds", "forward", "backward", "end", "read", "written", "drive", "RSS after"]
    lines += table(names, rows)
    if trained["stalls"]:
        told = ", ".join(f"{cause} {s:.1f} s" for cause, s in sorted(trained["stalls"].items(), key=lambda i: -i[1]))
        lines += [f"Waited for in the last step: {told}.", ""]
    rows = [
        [name, human_bytes(tier["budget"]), human_bytes(tier["peak"]), human_bytes(tier["used"]),
         ", ".join(f"{holder} {human_bytes(n)}" for holder, n in sorted(tier["holders"].items(), key=lambda i: -i[1]))]
        for name, tier in trained["tiers"].items()
    ]  # fmt: skip
    lines += table(["tier", "budget", "peak", "at the end", "held by"], rows)
    caged = (
        "" if "peak" not in said else f"; the cgroup counted {human_bytes(said['peak'])} at most (page cache included)"
    )
    rates = ", ".join(
        f"{key.removeprefix('nvme_')} {human_figure(key, drive[key].value)}" for key in ("nvme_read", "nvme_write")
    )
    return [
        *lines,
        f"{trained['bytes_per_param']:.2f} bytes per param. Built in {built['seconds']:.0f} s, peak RSS until then "
        f"{human_bytes(built['VmHWM'])}; peak RSS of the whole run {human_bytes(trained['VmHWM'])}{caged}. "
        f"The drive alone, one request at a time: {rates}; {'O_DIRECT' if trained['direct'] else 'page cache'}.",
        "",
        *why_not_larger(args, shape, trained, cpu, nvme, free),
    ]


def why_not_larger(
    args: argparse.Namespace, shape: Shape, trained: dict[str, Any], cpu: int, nvme: int, free: int
) -> list[str]:
    from gemini.errors import human_bytes

    holders = trained["tiers"]["cpu"]["holders"]
    planes = ("weights", "residual", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "grad")
    per_param = BYTES_PER_PARAM[args.states]
    working = trained["tiers"]["cpu"]["peak"] - sum(holders.get(kind, 0) for kind in planes)
    most = (cpu - working + nvme) / per_param
    return [
        f"Why not larger: every param takes {per_param:.4g} bytes, in RAM or on the drive. Of "
        f"{human_bytes(args.limit)} of RAM, {human_bytes(args.limit - cpu)} are reserved for the interpreter, torch, "
        f"activations and gradients on their way, and {human_bytes(working)} were working memory; of "
        f"{human_bytes(free)} free on the drive {human_bytes(args.keep_free)} stay free. "
        f"({human_bytes(cpu - working)} + {human_bytes(nvme)}) / {per_param:.4g} = {most / 1e9:.2f} G params at "
        f"most, of which this model has {shape.params / 1e9:.2f}.",
    ]


if __name__ == "__main__":
    run_script(make_orders, main)
