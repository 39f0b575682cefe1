"""Times Gemini's CPU Adam against torch's and against the memory itself, all in one interleaved run.

    python benchmarks/cpu_adam.py --params 100e6 --rounds 9 --out benchmarks/reports/cpu_adam_<hardware>_<date>.md

Adam is bound by memory, so the yardstick is a stream of the same mix (four fp32 arrays read, three written) through the
same threads. All contenders work on the same arrays, on 2 MiB-aligned huge pages, with the same number of threads; in
each round all of them run once, starting with another one, and ratios are taken inside a round, so that a busy machine
hurts everybody alike. The numbers are medians.
"""

import argparse
import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import Spread, measure_in_turn, median_ratio, seconds_of
from gemini import kernels
from gemini.optim.around import CompactRule
from gemini.rules import ADAM, Arrays, Segment, Where
from tests import kernel_settings

HUGE_PAGE = 2 << 20
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_mappings: list[mmap.mmap] = []  # torch.frombuffer borrows: the memory must outlive the tensors


def huge_tensor(n: int, dtype: torch.dtype) -> Tensor:
    """A zeroed, touched tensor of n elements at a 2 MiB boundary, on huge pages where the kernel gives them."""
    mapping = mmap.mmap(-1, n * dtype.itemsize + HUGE_PAGE)
    _mappings.append(mapping)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE
    return torch.frombuffer(mapping, dtype=dtype, count=n, offset=skip).zero_()


@dataclass
class Contender:
    name: str
    bytes_per_element: int  # read and written, as the algorithm asks; caches may add reads of what is only written
    run: Callable[[], None]


def adamw(params: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **how: bool) -> tuple[torch.optim.Optimizer, Tensor]:
    """Torch's AdamW over the given arrays, its state included (its own would not be on huge pages)."""
    weights = torch.nn.Parameter(params)
    optimizer = torch.optim.AdamW([weights], **HYPER, **how)
    optimizer.state[weights] = {"step": torch.tensor(1000.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer, weights


def contenders(n: int) -> list[Contender]:
    native = kernels._native
    if native is None:
        sys.exit(f"the native kernels are needed to be measured: {kernels.capabilities().reason}")
    isa = native.Isa.__members__[kernels.capabilities().isa]
    p, m, v, g = (huge_tensor(n, torch.float32) for _ in range(4))
    hi, g16, out16 = (huge_tensor(n, torch.bfloat16) for _ in range(3))
    lo = huge_tensor(n, torch.int16)
    g32 = huge_tensor(n, torch.float32)
    streams = [huge_tensor(n, torch.float32) for _ in range(3)]
    p.normal_(0, 0.02)
    g.normal_(0, 1e-3)
    m.copy_(g)
    v.copy_(g).square_()
    g16.copy_(g)
    kernels.split_master(p, hi, lo)

    rule = CompactRule(ADAM)
    states = {s.kind: torch.zeros(s.num_items(n), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes}
    halved = Arrays(hi, torch.zeros(n, dtype=getattr(torch, rule.spec.residual)), states, g16)

    fused, weights = adamw(p, m, v, fused=True)
    foreach, foreach_weights = adamw(p, m, v, foreach=True)
    whole = [Segment(0, n, ADAM.scalars({**ADAM.defaults, **HYPER}, 1000, 1.0), Where("weight", 0))]
    in_fp32, split = (
        Arrays(weights, residual, {"exp_avg": m, "exp_avg_sq": v}, grad)
        for weights, residual, grad in ((p, None, g), (hi, lo, g16))
    )

    def run_torch(optimizer: torch.optim.Optimizer, params: Tensor, grad: Tensor) -> None:
        params.grad = grad
        optimizer.step()

    def run_cast() -> None:
        g32.copy_(g16)
        run_torch(fused, weights, g32)
        out16.copy_(p)

    def run_stream() -> None:
        a, b, c = (t.data_ptr() for t in streams)
        native.stream_rmw3(isa, a, b, c, g.data_ptr(), n)

    return [
        Contender("memory stream, 3 updated + 1 read", 28, run_stream),
        Contender("gemini fp32", 28, lambda: kernels.update(in_fp32, ADAM.spec, whole)),
        Contender("gemini split master, bf16 grad", 26, lambda: kernels.update(split, ADAM.spec, whole)),
        Contender("gemini compact states, bf16 grad", int(rule.spec.touched), lambda: rule.run(halved, whole)),
        Contender("torch AdamW fused fp32", 28, lambda: run_torch(fused, weights, g)),
        Contender("torch cast + fused + copy to bf16", 40, run_cast),
        Contender("torch AdamW foreach fp32", 28, lambda: run_torch(foreach, foreach_weights, g)),
    ]


def speeds(all_of_them: list[Contender], times: dict[str, list[float]], n: int) -> list[str]:
    rows = []
    for c in all_of_them:
        spread = Spread.of(times[c.name])
        rate = c.bytes_per_element * n / spread.median / 1e9
        rows.append([c.name, *(f"{s / n * 1e9:.3f}" for s in spread[:2]), f"{rate:.1f}", c.bytes_per_element])
    return table(["contender", "ns/element", "best", "GB/s", "bytes/element"], rows)


def goals(times: dict[str, list[float]]) -> list[str]:
    """How many times as quick the first is as the second, against what we set ourselves."""
    stream, fp32, split, compact, fused, cast, foreach = times
    rows = []
    wanted = (
        (fp32, stream, 0.95), (fp32, fused, 1.0), (split, fused, 1.05), (split, cast, 1.6), (fp32, foreach, None),
        (compact, fused, None),
    )  # fmt: skip
    for ours, theirs, goal in wanted:
        ratio = median_ratio(times[theirs], times[ours])
        verdict = ["", ""] if goal is None else [f">= {goal:.2f}", "met" if ratio >= goal else "missed"]
        rows.append([ours, theirs, f"{ratio:.3f}", *verdict])
    return table(["speed of", "over", "ratio", "goal", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6, help="elements (default: %(default)g)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=kernels.get_num_threads(), help="threads of every contender")
    parser.add_argument("--isa", default=None, help="instruction set of gemini's kernels (default: the best)")
    add_out(parser)
    args = parser.parse_args()

    n = int(args.params)
    kernel_settings.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    with kernel_settings.use_isa(args.isa):
        all_of_them = contenders(n)
        by_name = {c.name: c for c in all_of_them}
        times = measure_in_turn(list(by_name), args.rounds, lambda name: seconds_of(by_name[name].run))
        what = f"{n:,} params, {args.threads} threads, median of {args.rounds} interleaved rounds."
        report = [*head("CPU Adam", [what]), *speeds(all_of_them, times, n), *goals(times)]
    publish(report, args.out)


if __name__ == "__main__":
    main()
