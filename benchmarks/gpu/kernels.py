"""CUDA kernels of Gemini against the GPU's own memory, torch's fused AdamW, and the CPU kernels bit for bit.

    python benchmarks/gpu/kernels.py --out FOLDER
    python benchmarks/gpu/kernels.py --device standin --tiny        # to try the script

The yardstick is a copy inside the GPU's memory that reads and writes as many bytes as the kernel does. All contenders
run once per round, beginning with another one; medians over rounds, ratios inside a round. The comparison of bits runs
several steps over random params that include denormals, infinities and NaN in every operand.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks._report import table
from benchmarks._rounds import Spread, measure_in_turn, median_ratio
from benchmarks.gpu import _part
from benchmarks.gpu._card import Card
from gemini import kernels
from gemini.rules import ADAM, Arrays, Segment
from tests import kernel_settings

GOAL_COPY, GOAL_FUSED = 0.9, 1.0
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SLAB = 2**24


class Contender(NamedTuple):
    num_bytes: int
    """Read and written, per element, as the algorithm asks."""
    run: Callable[[], object]


def fused(params: torch.Tensor, grad: torch.Tensor) -> Callable[[], object]:
    """torch.optim.AdamW(fused=True) with states of its own."""
    weights = torch.nn.Parameter(params)
    optimizer = torch.optim.AdamW([weights], **HYPER, fused=True)
    weights.grad = grad
    return optimizer.step


def copying(num_bytes: int, device: str) -> Callable[[], object]:
    """Reads half of ``num_bytes`` and writes the other half."""
    source = torch.randn(num_bytes // 8, device=device)
    into = torch.zeros_like(source)
    return lambda: into.copy_(source)


def update(planes: Sequence[Any], grad: torch.Tensor, scalars: Any) -> None:
    """One update by Adam of weights, residual, exp_avg and exp_avg_sq."""
    weights, residual, exp_avg, exp_avg_sq = planes
    arrays = Arrays(weights, residual, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, grad)
    ADAM.run(arrays, [Segment(0, len(grad), scalars)])


def adam_contenders(n: int, device: str) -> dict[str, Contender]:
    def random(scale: float) -> torch.Tensor:
        return torch.randn(n, device=device) * scale

    master, grad = random(0.02), random(1e-3)
    moments = [random(1e-3), random(1e-3).square_()]
    hi, lo = torch.empty(n, dtype=torch.bfloat16, device=device), torch.empty(n, dtype=torch.int16, device=device)
    kernels.split_master(master, hi, lo)
    grad16, scalars = grad.bfloat16(), ADAM.scalars({**ADAM.defaults, **HYPER}, 1000, 1.0)
    return {
        "device copy of 26 bytes per element": Contender(26, copying(26 * n, device)),
        "gemini split master, bf16 gradient": Contender(26, lambda: update([hi, lo, *moments], grad16, scalars)),
        "gemini fp32": Contender(28, lambda: update([master, None, *moments], grad, scalars)),
        "torch AdamW fused fp32": Contender(28, fused(random(0.02), grad)),
    }


def gradient_contenders(n: int, device: str) -> dict[str, Contender]:
    """What lands gradients and adds up their norm; each with the copy that moves as much."""
    source, plane = (torch.randn(n, device=device).bfloat16() for _ in range(2))
    sums = torch.zeros(n, device=device)
    land, add, norm = (one(source, plane, sums) for one in (landing, accumulating, squares))
    return {
        "device copy of 4 bytes per element": Contender(4, copying(4 * n, device)),
        "land bf16 -> bf16 with its norm": Contender(4, land),
        "device copy of 10 bytes per element": Contender(10, copying(10 * n, device)),
        "accumulate bf16 into fp32 with its norm": Contender(10, add),
        "norm of bf16": Contender(2, norm),
    }


def landing(source: torch.Tensor, plane: torch.Tensor, sums: torch.Tensor) -> Callable[[], object]:
    return lambda: kernels.copy_grad(plane, source)


def accumulating(source: torch.Tensor, plane: torch.Tensor, sums: torch.Tensor) -> Callable[[], object]:
    return lambda: kernels.accumulate_grad(sums, source)


def squares(source: torch.Tensor, plane: torch.Tensor, sums: torch.Tensor) -> Callable[[], object]:
    return lambda: kernels.sum_squares(source)


def speeds(card: Card, results: _part.Results, what: str, contenders: dict[str, Contender], n: int, rounds: int) -> Any:
    times = measure_in_turn(list(contenders), rounds, lambda name: card.time(contenders[name].run))
    results.add(what, {"elements": n, "seconds": times, "bytes": {name: c.num_bytes for name, c in contenders.items()}})
    rows = []
    for name, seconds in times.items():
        spread, num_bytes = Spread.of(seconds), contenders[name].num_bytes
        rates = [num_bytes * n / s / 1e9 for s in (spread.median, spread.most, spread.least)]
        rows.append([name, num_bytes, f"{spread.median * 1e3:.3f}", *(f"{rate:,.0f}" for rate in rates)])
    names = ["contender", "bytes per element", "ms", "GB/s", "least", "most"]
    results.say(f"{what}, {n:,} elements, medians of {rounds} rounds", "", *table(names, rows))
    return times


def ratio(ours: list[float], theirs: list[float], scale: float = 1.0) -> float:
    """How many times as fast ``ours`` is, round by round."""
    return median_ratio(theirs, ours) * scale


# ---- bits ------------------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 1e-39, 3e38, -3e38, 1e-20]


def operands(n: int, seed: int) -> dict[str, torch.Tensor]:
    """fp32 numbers of very different sizes; one in a hundred of each operand is a special one, at places of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in ("master", "exp_avg", "exp_avg_sq", "grad"):
        sizes = 10.0 ** torch.randint(-30, 3, (n,), generator=generator)
        values = torch.randn(n, generator=generator) * sizes
        where = torch.rand(n, generator=generator) < 0.01
        special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=generator)]
        found[name] = torch.where(where, special, values)
    ordinary = torch.rand(n, generator=generator) < 0.98  # a second moment is no negative number, but may become NaN
    found["exp_avg_sq"] = torch.where(ordinary, found["exp_avg_sq"].abs(), found["exp_avg_sq"])
    return found


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ, where not both are NaN."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = a.view(as_int) != b.view(as_int)
    if a.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    return int(differ.sum())


def other_kernels(device: str) -> Any:
    """Without a GPU the other side is the torch reference: on one side or the other something has to be native."""
    return kernel_settings.use_isa("reference") if device == "cpu" else contextlib.nullcontext()


def numbers(sums: Any) -> torch.Tensor:
    """Sums of squares, wherever the kernels left them."""
    resolve = getattr(kernels, "resolve", None)
    return torch.tensor(sums if resolve is None else resolve([sums])[0], dtype=torch.float64)


def compare_slab(n: int, seed: int, device: str) -> dict[str, int]:
    """Three updates of one slab on both, for each kind of master and gradient; elements that differ, and were NaN."""
    found = operands(n, seed)
    seen = {"compared": 0, "differing": 0, "nan": 0, "norms differing": 0}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        grad = found["grad"].to(dtype)
        for split in (True, False):
            planes: list[Any] = [found["master"].clone(), None]
            if split:
                planes = [torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)]
                kernels.split_master(found["master"], *planes)
            planes += [found["exp_avg"].clone(), found["exp_avg_sq"].clone()]
            there = [None if plane is None else plane.to(device, copy=True) for plane in planes]
            for step in (1, 2, 1000):
                scalars = ADAM.scalars({**ADAM.defaults, **HYPER, "decoupled": step != 2}, step, 0.37)
                update(planes, grad, scalars)
                with other_kernels(device):
                    update(there, grad.to(device), scalars)
            for here, theirs in zip(planes, there, strict=True):
                if here is not None:
                    seen["compared"] += n
                    seen["differing"] += differing(here, theirs.cpu())
                    seen["nan"] += int(here.isnan().sum()) if here.is_floating_point() else 0
        finite = grad.nan_to_num(0, 0, 0)
        for given in (finite, grad):
            sums = [numbers(kernels.sum_squares(given))]
            with other_kernels(device):
                sums.append(numbers(kernels.sum_squares(given.to(device))))
            seen["norms differing"] += differing(*sums)
    return seen


def bits(results: _part.Results, num_params: int, device: str) -> None:
    total: dict[str, int] = {}
    done, seed = 0, 0
    while done < num_params and results.left() > 0:
        n = min(SLAB, num_params - done)
        for name, count in compare_slab(n, seed, device).items():
            total[name] = total.get(name, 0) + count
        done, seed = done + n, seed + 1
        results.add("bits", {"params": done, "asked": num_params} | total)
    results.say(
        f"Bits against the CPU kernels: {done:,} of {num_params:,} random params (one in a hundred denormal, infinite, "
        f"NaN or zero), both masters, three formats of gradients, three updates each: {total['compared']:,} values "
        f"compared, {total['differing']} differ, {total['nan']:,} are NaN on both; {total['norms differing']} sums of "
        "squares differ.",
        "",
    )


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    n = 100_000 if args.tiny else int(args.params)
    rounds = 3 if args.tiny else args.rounds
    results.say(f"{kernels.capabilities()}.", "")
    if card.real and not kernels.capabilities().cuda:
        raise SystemExit(f"the CUDA kernels do not run here: {kernels.capabilities().why_not_cuda}")
    adam = speeds(card, results, "Adam", adam_contenders(n, card.torch), n, rounds)
    card.forget()
    grads = speeds(card, results, "Gradients", gradient_contenders(n, card.torch), n, rounds)
    card.forget()
    copy, split, fp32, torch_fused = adam
    same_bytes = 26 / 28
    lines = [
        _part.verdict("bandwidth of split-master Adam over device copy", ratio(adam[split], adam[copy]), GOAL_COPY),
        _part.verdict(
            "bandwidth of fp32 Adam over device copy", ratio(adam[fp32], adam[copy], 1 / same_bytes), GOAL_COPY
        ),
        _part.verdict("speed of fp32 Adam over torch's fused AdamW", ratio(adam[fp32], adam[torch_fused]), GOAL_FUSED),
    ]
    copy4, land, copy10, add, norm = grads
    for name, copied, scale in ((land, copy4, 1.0), (add, copy10, 1.0), (norm, copy4, 0.5)):
        lines.append(f"- bandwidth of {name} over device copy: {ratio(grads[name], grads[copied], scale):.3f}")
    results.say(*lines, "")
    bits(results, 200_000 if args.tiny else int(args.compared), card.torch)


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=90)
    parser.add_argument("--params", type=float, default=400e6, help="elements (default: %(default)g)")
    parser.add_argument("--compared", type=float, default=100e6, help="params whose bits are compared")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    return _part.run("kernels", parser, measure, argv)


if __name__ == "__main__":
    main()
