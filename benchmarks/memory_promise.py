"""Keeps the memory promise under watch: a GPT-2-shaped model trains in budgets far below its 12 bytes per param.

    python benchmarks/memory_promise.py --out benchmarks/reports/memory_promise_<hardware>_<date>.md

Each budget is a process of its own, watched from outside: anonymous RSS is sampled every few milliseconds, the spill
file is counted in blocks of the disk. Where a memory cgroup can be made (root, v1 or v2), the process runs inside a
hard limit of budget + constant, beyond which the kernel kills it; a control run whose budget is not below its state
must then die, which shows that the limit is real. tests/train/test_memory.py watches the same process.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _memory, _models
from benchmarks._memory import Cage, trim
from benchmarks._processes import Group, RanksFailed, run_script
from benchmarks._progress import PATIENCE
from benchmarks._report import MB, add_out, head, mb, publish, table

CONSTANT = 450 * MB
"""What comes on top of the budget: interpreter, torch, transformers, activations, torch's own gradient of one param."""
STRETCHES = ("ready", "built", "wrapped", "trained", "deleted")


# ---- the watched process ---------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """Build in bf16, wrap, train some steps, delete."""
    import torch
    from transformers import GPT2Config

    import gemini

    torch.set_num_threads(settings["threads"])
    state: dict[str, Any] = {}

    def make(layers: int, width: int, vocab: int) -> Any:
        config = GPT2Config(
            vocab_size=vocab, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=256, use_cache=False,
            bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        )  # fmt: skip
        return _models.build(config, "bfloat16")

    def train(model: Any, optimizer: Any, steps: int, clip: Any) -> list[float]:
        batches = (_models.uniform_batch(model.config.vocab_size, 1, settings["tokens"], step) for step in range(steps))
        return [_models.train_step(model, optimizer, clip, batch)[0] for batch in batches]

    def ready() -> dict[str, Any]:
        # What the first step of any model leaves behind (thread pools, caches of primitives) belongs to before.
        tiny = make(1, 64, 512)
        train(tiny, gemini.HybridAdam(tiny.parameters()), 1, None)
        del tiny
        trim()
        return {}

    def built() -> dict[str, Any]:
        state["model"] = make(settings["layers"], settings["width"], settings["vocab"])
        return {"params": sum(p.numel() for p in state["model"].parameters())}

    def wrapped() -> dict[str, Any]:
        memory = gemini.MemoryBudget(**settings["memory"])
        config = gemini.GeminiConfig(precision="bf16", memory=memory, device="cpu")
        state["model"] = gemini.GeminiDDP(state["model"], config)
        state["optimizer"] = gemini.HybridAdam(state["model"].parameters(), lr=1e-4)
        trim()
        return {}

    def trained() -> dict[str, Any]:
        model = state["model"]
        losses = train(model, state["optimizer"], settings["steps"], model.clip_grad_norm_)
        report = dict(model.memory_report())
        if settings["fork"]:
            trim()  # what a worker inherits is then what is in use, not what updates on other threads have left behind
            loader = torch.utils.data.DataLoader(
                range(4), num_workers=1, multiprocessing_context="fork", worker_init_fn=_worker,
                collate_fn=_anon_of_worker,
            )  # fmt: skip
            report["worker"] = max(loader)
        return {"losses": losses, "report": report}

    def deleted() -> dict[str, Any]:
        state.clear()
        trim()
        return {}

    return {order.__name__: order for order in (ready, built, wrapped, trained, deleted)}


def _worker(index: int) -> None:
    """What a worker may do with what it inherited: collect it."""
    gc.collect()


def _anon_of_worker(items: Any) -> int:
    return _memory.status()["RssAnon"]


# ---- the watcher -----------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What was seen from outside, by the stretches of :data:`STRETCHES`, as far as the process came."""

    code: int = 0
    peak_anon: dict[str, int] = field(default_factory=dict)
    anon: dict[str, int] = field(default_factory=dict)
    """Anonymous RSS at the end of the stretch."""
    spill: dict[str, int] = field(default_factory=dict)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    peak_rss: int = 0
    seconds: float = 0.0
    errors: str = ""

    @property
    def params(self) -> int:
        return self.said["built"]["params"]


def watch(arguments: list[str], *, cage: Cage | None = None) -> Watched:
    """A run of the process with ``arguments`` of this script.

    Raises:
        NoProgress: if it has done nothing for ``--patience`` seconds.
    """
    args = parse(arguments)
    settings = {
        name: getattr(args, name) for name in ("layers", "width", "vocab", "tokens", "steps", "threads", "fork")
    }
    settings["memory"] = {"cpu": args.cpu[0], "nvme": args.nvme, "nvme_path": args.nvme_path}
    watched, begin, before = Watched(), time.monotonic(), 0
    try:
        with Group(
            __file__, settings, prefix=lambda _: [] if cage is None else cage.prefix(), threads=args.threads,
            patience=args.patience, ranked=False, watch=True,
        ) as group:  # fmt: skip
            (rank,) = group.ranks
            before = rank.peak_anon
            for stretch in STRETCHES:
                (watched.said[stretch],) = group.order(stretch)
                now = rank.status()
                watched.peak_anon[stretch], before = max(rank.peak_anon, before), 0
                watched.anon[stretch], watched.peak_rss = now["RssAnon"], max(watched.peak_rss, now["VmHWM"])
                watched.spill[stretch] = _memory.spill_bytes(rank.process.pid)
    except RanksFailed as e:
        watched.code, watched.errors = 1 if e.code is None else e.code, str(e)
    watched.seconds = time.monotonic() - begin
    return watched


# ---- the report ------------------------------------------------------------------------------------------------------


def one_run(args: argparse.Namespace, cpu: str, limit: int | None) -> tuple[Watched, int]:
    """A run in a cage of ``limit`` bytes (None: no cage); also the peak that the cage counted."""
    names = ("nvme", "nvme_path", "layers", "width", "vocab", "tokens", "steps", "threads", "patience")
    arguments = [f"--cpu={cpu}", *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names)]
    cage = None if limit is None else Cage(limit)
    try:
        return watch(arguments, cage=cage), 0 if cage is None else cage.peak()
    finally:
        if cage is not None:
            cage.close()


def row(name: str, budget: int, watched: Watched, caged: int, limit: int | None, fall: str = "") -> list[str]:
    cells = [name, mb(budget, 0), mb(limit, 0) if limit else "none"]
    if "trained" not in watched.said:
        what = "killed by the limit" if watched.code == -9 else f"failed ({watched.code})"
        return [*cells, what, "", "", mb(caged, 0), "", f"{watched.seconds:.0f}", ""]
    ledger, peak = watched.said["trained"]["report"]["cpu"]["peak"], watched.peak_anon["trained"]
    if ledger > budget:
        return [*cells, f"ledger over its budget: {mb(ledger, 0)}", "", "", "", "", "", ""]
    return [*cells, mb(peak, 0), mb(peak - budget, 0), mb(watched.peak_rss, 0), mb(caged, 0) if limit else "",
            mb(watched.spill["trained"], 0), f"{watched.seconds:.0f}", fall]  # fmt: skip


def main() -> None:
    from gemini.errors import parse_bytes

    args = parse()
    caged = not args.no_cgroup
    if caged:
        try:
            Cage(CONSTANT).close()
        except OSError as e:
            print(f"no memory cgroup can be made here ({e}): runs are watched, not limited", file=sys.stderr)
            caged = False
    rows, params, first = [], 0, None
    for cpu in args.cpu:
        budget = parse_bytes(cpu)
        limit = budget + CONSTANT if caged else None
        watched, peak = one_run(args, cpu, limit)
        if watched.code != 0:
            print(watched.errors, file=sys.stderr)
        params, now, fall = params or watched.params, watched.peak_anon.get("trained", 0), ""
        if first is not None and now:
            fall = f"{(first[1] - now) / (first[0] - budget):.3f}"
        rows.append(row(f"cpu={cpu}", budget, watched, peak, limit, fall))
        first = first or (budget, now)
    if caged:
        limit = min(parse_bytes(cpu) for cpu in args.cpu) + CONSTANT
        watched, peak = one_run(args, "64GiB", limit)
        rows.append(row("control: all in memory", 14 * params, watched, peak, limit))
    names = ["run", "budget", "hard limit", "peak anonymous", "above budget", "peak RSS, whole life", "cgroup peak",
             "spill file", "s", "fall of peak / fall of budget"]  # fmt: skip
    report = head(
        "The memory promise",
        [
            f"GPT-2 shape, {args.layers} layers of {args.width}, vocab {args.vocab}: {params:,} params, "
            f"{mb(12 * params, 0)} MB of persistent state ({12 * params / CONSTANT:.1f} times the constant of "
            f"{mb(CONSTANT, 0)} MB) and {mb(2 * params, 0)} MB of gradients between backward and update; {args.steps} "
            f"steps of {args.tokens} tokens.",
        ],
    )
    report += [
        "All in MB. Peak anonymous is sampled from the end of wrapping (heap trimmed) to the end of training; peak RSS "
        "is the whole life of the process, building the model and file-backed pages included; the cgroup counts all.",
        "",
        *table(names, rows),
    ]
    publish(report, args.out)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="append", help="CPU budget; may be given several times (1500MB and 700MB)")
    parser.add_argument("--nvme", default="8GB", help="budget of the spill file (default: %(default)s)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="its directory (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=32, help="per step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--fork", action="store_true", help="also run a forked DataLoader worker (for the tests)")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds that a run may do nothing (default: %(default)s)"
    )
    parser.add_argument("--no-cgroup", action="store_true", help="only watch, set no hard limit")
    add_out(parser)
    args = parser.parse_args(arguments)
    args.cpu = args.cpu or ["1500MB", "700MB"]
    return args


if __name__ == "__main__":
    run_script(make_orders, main)
