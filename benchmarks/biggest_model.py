"""The largest model that trains here: full-parameter AdamW with an exact fp32 master, 12 bytes per param over RAM and
drive, in a process that the kernel would kill at its memory limit.

    python benchmarks/biggest_model.py --spill /scratch --report benchmarks/reports/biggest_model_<hardware>_<date>.md

A Llama of ``--params`` params is drawn from its config straight into the tiers (never whole in memory) and makes some
real steps: gradient checkpointing, updates inside backward, few tokens. It runs in a process of its own inside a memory
cgroup (v1 or v2; root, or a delegated group), whose limit counts everything: interpreter, torch, activations, page
cache. The CPU budget is what the limit leaves after a stated reserve for those. The report has seconds per step, loss,
bytes per tier, what moved, how fast the drive was, and the arithmetic of what a larger model would take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BYTES_PER_PARAM = 12
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


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    vocab: int

    @property
    def largest(self) -> int:
        """Elements of the largest param."""
        return self.hidden * max(self.vocab, self.intermediate)

    @property
    def params(self) -> int:
        return self.of_layer * self.layers + self.hidden * (2 * self.vocab + 1)

    @property
    def of_layer(self) -> int:
        return self.hidden * (4 * self.hidden + 3 * self.intermediate + 2)


def shape_of(params: float, vocab: int) -> Shape:
    """A Llama of at least so many params: as wide as those of its size are, and as deep as that takes."""
    widths = ((4e8, 1024), (1.6e9, 2048), (4e9, 3072), (3e10, 4096))
    hidden = next((width for limit, width in widths if params < limit), 8192)
    one = Shape(hidden, hidden * 11 // 4, 1, vocab)
    return one._replace(layers=max(1, math.ceil((params - one.params) / one.of_layer) + 1))


def reserve_bytes(shape: Shape, tokens: int) -> int:
    """Memory of the process that is no part of the CPU budget."""
    # Logits with their gradient and log-probabilities in fp32; inputs of all blocks; what one block keeps.
    activations = tokens * (4 * 4 * shape.vocab + 2 * shape.hidden * shape.layers + 40 * shape.intermediate)
    return INTERPRETER + PARAMS_IN_FLIGHT * 2 * shape.largest + 2 * activations


def states_on_drive(shape: Shape, cpu: int, in_flight: int) -> float | None:
    """The fraction of optimizer states on the drive that leaves ``in_flight`` bytes of the CPU budget to gradients that
    wait for their update. A placement by fractions is exact to one chunk, so one chunk more goes there. None where not
    even the weights fit: then the planner decides.
    """
    chunk = max(shape.largest, CHUNK)
    left = cpu - 2 * shape.params - in_flight - 10 * chunk - STAGING
    return None if left < 0 else max(0.0, 1 - left / (10 * shape.params))


# ---- the process inside the limit ------------------------------------------------------------------------------------


def say(event: str, **what: Any) -> None:
    print(json.dumps({"event": event} | what), flush=True)


def job(args: argparse.Namespace) -> None:
    """Build, train, tell."""
    import torch
    from transformers import LlamaConfig

    import gemini

    shape = shape_of(args.params, args.vocab)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 128,
        num_key_value_heads=shape.hidden // 128, max_position_embeddings=args.tokens, tie_word_embeddings=False,
        use_cache=False, dtype="bfloat16",
    )  # fmt: skip
    memory = gemini.MemoryBudget(cpu=args.cpu, nvme=args.nvme, nvme_path=args.spill)
    fraction = states_on_drive(shape, args.cpu, args.in_flight) if args.in_flight else None
    placement: Any = "auto" if fraction is None else gemini.StaticPlacement(optimizer_on_nvme=fraction)
    settings = gemini.GeminiConfig(
        precision="bf16", memory=memory, placement=placement, gradients="transient", device="cpu", max_chunk=CHUNK
    )
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = gemini.from_config(config, settings)
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = gemini.HybridAdam(model.parameters(), lr=args.lr, step_in_backward=True)
    say("built", seconds=time.perf_counter() - begin, params=sum(p.numel() for p in model.parameters()), **memory_now())
    ids = torch.randint(0, shape.vocab, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    for number in range(args.steps):
        clock = [time.perf_counter()]
        loss = model(input_ids=ids, labels=ids).loss
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        if number == args.steps - 1:
            model._gemini_engine.drain()  # the next forward of the other steps waits for what it needs
        clock.append(time.perf_counter())
        parts = [b - a for a, b in zip(clock, clock[1:], strict=False)]
        report = model.memory_report()
        say("step", loss=float(loss.detach()), parts=parts, moved=report["moved"], **memory_now())
    tiers = {name: report[name] for name in ("cpu", "nvme") if name in report}
    say(
        "trained", tiers=tiers, bytes_per_param=report["bytes_per_param"], stalls=dict(report.get("stalls", {})),
        direct=model._gemini_engine.spill.direct, threads=torch.get_num_threads(), **memory_now(),
    )  # fmt: skip


def memory_now() -> dict[str, int]:
    """RSS and its peak, in bytes."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {"rss": int(lines["VmRSS"].split()[0]) * 1024, "peak_rss": int(lines["VmHWM"].split()[0]) * 1024}


# ---- outside of it ---------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    code: int
    said: dict[str, list[dict[str, Any]]]
    errors: str
    peak: int | None
    """Of the cgroup; None without one."""


def run(args: argparse.Namespace, cpu: int, nvme: int, cage: Any) -> Ran:
    """The job as a process, in the cgroup from its first instruction on."""
    command = [
        sys.executable, str(Path(__file__).resolve()), "job", f"--params={args.params}", f"--vocab={args.vocab}",
        f"--tokens={args.tokens}", f"--steps={args.steps}", f"--lr={args.lr}", f"--spill={args.spill}",
        f"--cpu={cpu}", f"--nvme={nvme}", f"--in-flight={args.in_flight}",
    ]  # fmt: skip
    if cage is not None:
        command = ["sh", "-c", f'echo $$ > "{cage.procs}" && exec "$@"', "sh", *command]
    root = str(Path(__file__).resolve().parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    said: dict[str, list[dict[str, Any]]] = {}
    errors: list[str] = []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                message = json.loads(line)
                said.setdefault(message.pop("event"), []).append(message)
                print(line.strip()[:200], file=sys.stderr, flush=True)
            else:
                errors.append(line)
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    return Ran(code, said, "".join(errors[-30:]), None if cage is None else cage.peak())


def make_cage(args: argparse.Namespace) -> Any:
    """The cgroup, or None where there is to be none.

    Raises:
        SystemExit: where none can be made.
    """
    from memory_promise import Cage

    if args.no_cgroup:
        return None
    try:
        cage = Cage(args.limit)
    except OSError as e:
        raise SystemExit(
            f"no memory cgroup of {args.limit} bytes can be made here ({e}): run as root, or in a delegated group; "
            "--no-cgroup runs without a limit, and the report says so"
        ) from e
    for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):  # no way out over swap
        try:
            (cage.path / name).write_text("0" if name == "memory.swap.max" else str(cage.limit))
        except OSError:
            pass
    return cage


def main() -> None:
    args = parse()
    if args.what == "job":
        return job(args)
    from _ranks import publish

    from gemini.errors import human_bytes, parse_bytes
    from gemini.machines.measure import Sizes, measure_nvme

    args.quick = args.out is None
    args.limit, args.keep_free = parse_bytes(args.limit), parse_bytes(args.keep_free)
    shape = shape_of(args.params, args.vocab)
    args.in_flight = GRADIENTS_IN_FLIGHT * 2 * max(shape.largest, CHUNK) if args.in_flight is None else args.in_flight
    reserve = reserve_bytes(shape, args.tokens) if args.reserve is None else parse_bytes(args.reserve)
    cpu = args.limit - reserve
    free = free_bytes(args.spill)
    nvme = free - args.keep_free
    room = (max(cpu, 0) + max(nvme, 0)) / BYTES_PER_PARAM
    if shape.params > room or cpu <= 0:
        raise SystemExit(
            f"{shape.params:,} params take {human_bytes(BYTES_PER_PARAM * shape.params)}, and there are "
            f"{human_bytes(max(cpu, 0))} of RAM and {human_bytes(max(nvme, 0))} of disk: at most --params {room:.2g}"
        )
    drive = dict(measure_nvme(args.spill, Sizes()))
    cage = make_cage(args)
    begin = time.monotonic()
    try:
        ran = run(args, cpu, nvme, cage)
    finally:
        if cage is not None:
            cage.close()
    lines = report_of(args, shape, ran, drive, cpu, nvme, free, time.monotonic() - begin)
    publish(args, "biggest_model", lines)
    if ran.code:
        sys.exit(1)


def free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def report_of(
    args: argparse.Namespace, shape: Shape, ran: Ran, drive: dict[str, Any], cpu: int, nvme: int, free: int,
    seconds: float,
) -> list[str]:  # fmt: skip
    from _ranks import head, table

    from gemini.errors import human_bytes
    from gemini.planning.hardware import human_figure

    limit = f"a memory cgroup of {human_bytes(args.limit)}" if ran.peak is not None else "NO limit (--no-cgroup)"
    lines = head(
        "The largest model that trains here",
        [
            f"Llama of {shape.layers} layers of {shape.hidden} (MLP {shape.intermediate}, vocabulary {shape.vocab}): "
            f"{shape.params:,} params, AdamW on an exact fp32 master, {args.tokens} tokens per step, gradient "
            f"checkpointing, updates inside backward. In {limit}; budgets: CPU {human_bytes(cpu)}, NVMe "
            f"{human_bytes(nvme)} on {args.spill}. {seconds:.0f} s in all.",
        ],
        threads=len(os.sched_getaffinity(0)),
    )
    if ran.code:
        what = "was killed (by the limit, if it was -9)" if ran.code < 0 else "failed"
        return [*lines, f"The process {what}: exit code {ran.code}.", "", "```", ran.errors.strip(), "```"]
    (built,), steps, (trained,) = ran.said["built"], ran.said["step"], ran.said["trained"]
    rows = []
    for number, step in enumerate(steps):
        whole, moved = sum(step["parts"]), step["moved"]
        up, down = moved.get("nvme->cpu", 0), moved.get("cpu->nvme", 0)
        rows.append([
            number + 1, f"{step['loss']:.4f}", f"{whole:.1f}", *(f"{part:.1f}" for part in step["parts"]),
            human_bytes(up), human_bytes(down), f"{(up + down) / whole / 1e9:.2f} GB/s", human_bytes(step["rss"]),
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
    caged = "" if ran.peak is None else f"; the cgroup counted {human_bytes(ran.peak)} at most (page cache included)"
    rates = ", ".join(
        f"{key.removeprefix('nvme_')} {human_figure(key, drive[key].value)}" for key in ("nvme_read", "nvme_write")
    )
    return [
        *lines,
        f"{trained['bytes_per_param']:.2f} bytes per param. Built in {built['seconds']:.0f} s, peak RSS until then "
        f"{human_bytes(built['peak_rss'])}; peak RSS of the whole run {human_bytes(trained['peak_rss'])}{caged}. "
        f"The drive alone, one request at a time: {rates}; {'O_DIRECT' if trained['direct'] else 'page cache'}.",
        "",
        *why_not_larger(args, shape, trained, cpu, nvme, free),
    ]


def why_not_larger(
    args: argparse.Namespace, shape: Shape, trained: dict[str, Any], cpu: int, nvme: int, free: int
) -> list[str]:
    from gemini.errors import human_bytes

    holders = trained["tiers"]["cpu"]["holders"]
    planes = ("weights", "residual", "exp_avg", "exp_avg_sq", "grad")
    working = trained["tiers"]["cpu"]["peak"] - sum(holders.get(kind, 0) for kind in planes)
    most = (cpu - working + nvme) / BYTES_PER_PARAM
    return [
        f"Why not larger: every param takes {BYTES_PER_PARAM} bytes, in RAM or on the drive. Of "
        f"{human_bytes(args.limit)} of RAM, {human_bytes(args.limit - cpu)} are reserved for the interpreter, torch, "
        f"activations and gradients on their way, and {human_bytes(working)} were working memory; of "
        f"{human_bytes(free)} free on the drive {human_bytes(args.keep_free)} stay free. "
        f"({human_bytes(cpu - working)} + {human_bytes(nvme)}) / {BYTES_PER_PARAM} = {most / 1e9:.2f} G params at "
        f"most, of which this model has {shape.params / 1e9:.2f}.",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("run", "job"), default="run", help="job: the process in the limit")
    parser.add_argument("--params", type=float, default=5e9)
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
    parser.add_argument("--cpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--nvme", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--report", "--out", dest="out", type=Path, default=None, help="write the report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
