"""Keeps the memory promise under watch: a GPT-2-shaped model trains in budgets far below its 12 bytes per param.

    python benchmarks/memory_promise.py --out benchmarks/reports/memory_promise_<hardware>_<date>.md

Each budget is a process of its own, watched from outside: anonymous RSS is sampled every few milliseconds, the spill
file is counted in blocks of the disk. Where a memory cgroup can be made (root, v1 or v2), the process runs inside a
hard limit of budget + constant, beyond which the kernel kills it; a control run whose budget is not below its state
must then die, which shows that the limit is real. ``job`` is the watched process; tests/train/test_memory.py runs it
as well.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _progress import PATIENCE, Progress  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MB = 10**6
CONSTANT = 450 * MB
"""What comes on top of the budget: interpreter, torch, transformers, activations, torch's own gradient of one param."""


# ---- the watched process ---------------------------------------------------------------------------------------------


def say(event: str, **what: Any) -> None:
    """One line for the watcher, who answers when it has looked."""
    print(json.dumps({"event": event} | what), flush=True)
    sys.stdin.readline()


def trim() -> None:
    """Give freed heap memory back: what glibc keeps for later is nobody's, and would hide what is really held."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def job(args: argparse.Namespace) -> None:
    """Build in bf16, wrap, train some steps, delete; tells the watcher where it is."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import gemini

    def make(layers: int, width: int, vocab: int) -> Any:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        config = GPT2Config(
            vocab_size=vocab, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=256, use_cache=False,
            bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
        )  # fmt: skip
        try:
            return GPT2LMHeadModel(config).train()
        finally:
            torch.set_default_dtype(torch.float32)

    def train(model: Any, optimizer: Any, steps: int, clip: Any) -> list[float]:
        losses = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, model.config.vocab_size, (1, args.tokens), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    torch.set_num_threads(args.threads)
    # What the first step of any model leaves behind (thread pools, caches of primitives) belongs to before.
    tiny = make(1, 64, 512)
    train(tiny, gemini.HybridAdam(tiny.parameters()), 1, lambda norm: None)
    del tiny
    trim()
    say("ready")
    model = make(args.layers, args.width, args.vocab)
    num_params = sum(p.numel() for p in model.parameters())
    say("built", params=num_params)
    memory = gemini.MemoryBudget(cpu=args.cpu, nvme=args.nvme, nvme_path=args.nvme_path)
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="bf16", memory=memory, device="cpu"))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4)
    trim()
    say("wrapped")
    losses = train(model, optimizer, args.steps, model.clip_grad_norm_)
    report = dict(model.memory_report())
    if args.fork:
        trim()  # what a worker inherits is then what is in use, not what updates on other threads have left behind
        loader = torch.utils.data.DataLoader(
            range(4), num_workers=1, multiprocessing_context="fork", worker_init_fn=_worker, collate_fn=_anon_of_worker
        )
        report["worker"] = max(loader)
    say("trained", losses=losses, report=report)
    del model, optimizer
    trim()
    say("deleted")


def _worker(index: int) -> None:
    """What a worker may do with what it inherited: collect it."""
    gc.collect()


def _anon_of_worker(items: Any) -> int:
    return read_status(os.getpid())["RssAnon"]


# ---- the watcher -----------------------------------------------------------------------------------------------------


def read_status(pid: int) -> dict[str, int]:
    """Bytes of RssAnon, VmRSS and VmHWM (the peak of VmRSS)."""
    with open(f"/proc/{pid}/status") as status:
        lines = [line.split() for line in status if line.startswith(("RssAnon", "VmRSS", "VmHWM"))]
    return {name[:-1]: int(kib) * 1024 for name, kib, _ in lines}


def spill_bytes(pid: int) -> int:
    """Bytes on disk of the deleted (nameless) regular files that the process holds open."""
    total = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).endswith("(deleted)"):
                total += os.stat(path).st_blocks * 512
        except OSError:
            pass
    return total


@dataclass
class Watched:
    """What was seen from outside, by the event that ended each stretch ("ready", "built", "wrapped", "trained", ..)."""

    code: int = 0
    peak_anon: dict[str, int] = field(default_factory=dict)
    anon: dict[str, int] = field(default_factory=dict)
    """Anonymous RSS at the event itself."""
    spill: dict[str, int] = field(default_factory=dict)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    peak_rss: int = 0
    seconds: float = 0.0
    errors: str = ""

    @property
    def params(self) -> int:
        return self.said["built"]["params"]


def watch(
    arguments: list[str], *, cage: Cage | None = None, interval: float = 0.004, patience: float = PATIENCE
) -> Watched:
    """Run ``job`` with ``arguments`` and look at it every ``interval`` seconds.

    Raises:
        NoProgress: if it has done nothing for ``patience`` seconds.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "job", *arguments]
    if cage is not None:
        command = ["sh", "-c", f'echo $$ > "{cage.procs}" && exec "$@"', "sh", *command]
    root = str(Path(__file__).resolve().parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    watched = Watched()
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, bufsize=0
        )
        assert child.stdout is not None and child.stdin is not None
        os.set_blocking(child.stdout.fileno(), False)
        progress = Progress([child.pid], " ".join(command), patience=patience)
        try:
            peak, text = 0, b""
            while child.poll() is None:
                progress.check()
                try:
                    status = read_status(child.pid)
                except (OSError, ValueError):
                    break
                peak = max(peak, status.get("RssAnon", 0))
                watched.peak_rss = max(watched.peak_rss, status.get("VmHWM", 0))
                text += child.stdout.read() or b""
                line, newline, rest = text.partition(b"\n")
                if newline and line.startswith(b"{"):
                    text = rest
                    message = json.loads(line)
                    event = message.pop("event")
                    watched.said[event], watched.spill[event] = message, spill_bytes(child.pid)
                    watched.anon[event] = read_status(child.pid)["RssAnon"]
                    watched.peak_anon[event], peak = peak, 0
                    child.stdin.write(b"\n")
                elif newline:
                    text = rest
                time.sleep(interval)
            watched.code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            watched.seconds = time.monotonic() - began
            errors.seek(0)
            watched.errors = errors.read()
            for pipe in (child.stdin, child.stdout):
                try:
                    pipe.close()
                except OSError:
                    pass
    return watched


class Cage:
    """A memory cgroup with a hard limit, v1 or v2. Raises OSError where none can be made."""

    def __init__(self, limit: int):
        v1 = Path("/sys/fs/cgroup/memory")
        base = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
        self.path = base / f"gemini-memory-promise-{os.getpid()}"
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if v1.is_dir() else ("memory.max", "memory.peak")
        self._limit, self._peak = names
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(limit))
            self.limit = int((self.path / self._limit).read_text())
        except OSError:
            self.path.rmdir()
            raise
        self.procs = self.path / "cgroup.procs"

    def peak(self) -> int:
        """The most that was ever charged: anonymous memory, page cache, and what the kernel holds for the process."""
        return int((self.path / self._peak).read_text())

    def close(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


# ---- the report ------------------------------------------------------------------------------------------------------


def mb(num_bytes: float) -> str:
    return f"{num_bytes / MB:,.0f}"


def one_run(args: argparse.Namespace, cpu: str, limit: int | None) -> tuple[Watched, int]:
    """A run in a cage of ``limit`` bytes (None: no cage); also the peak that the cage counted."""
    arguments = [
        f"--cpu={cpu}", f"--nvme={args.nvme}", f"--nvme-path={args.nvme_path}", f"--layers={args.layers}",
        f"--width={args.width}", f"--vocab={args.vocab}", f"--tokens={args.tokens}", f"--steps={args.steps}",
        f"--threads={args.threads}",
    ]  # fmt: skip
    cage = None if limit is None else Cage(limit)
    try:
        watched = watch(arguments, cage=cage, patience=args.patience)
        return watched, 0 if cage is None else cage.peak()
    finally:
        if cage is not None:
            cage.close()


def row(name: str, budget: int, watched: Watched, caged: int, limit: int | None) -> str:
    if "trained" not in watched.said:
        what = "killed by the limit" if watched.code == -9 else f"failed ({watched.code})"
        return f"| {name} | {mb(budget)} | {mb(limit or 0)} | {what} | | | {mb(caged)} | | {watched.seconds:.0f} |"
    report = watched.said["trained"]["report"]
    peak = watched.peak_anon["trained"]
    return (
        f"| {name} | {mb(budget)} | {mb(limit) if limit else 'none'} | {mb(peak)} | {mb(peak - budget)} | "
        f"{mb(watched.peak_rss)} | {mb(caged) if limit else ''} | {mb(watched.spill['trained'])} | "
        f"{watched.seconds:.0f} |"
        if report["cpu"]["peak"] <= budget
        else f"| {name} | {mb(budget)} | ledger over its budget: {mb(report['cpu']['peak'])} |"
    )


def main() -> None:
    from gemini.errors import parse_bytes

    args = parse()
    if args.what == "job":
        args.cpu = args.cpu[0]
        return job(args)
    caged = not args.no_cgroup
    if caged:
        try:
            Cage(CONSTANT).close()
        except OSError as e:
            print(f"no memory cgroup can be made here ({e}): runs are watched, not limited", file=sys.stderr)
            caged = False
    budgets = args.cpu or ["1500MB", "700MB"]
    lines, params, first = [], 0, None
    for cpu in budgets:
        budget = parse_bytes(cpu)
        limit = budget + CONSTANT if caged else None
        watched, peak = one_run(args, cpu, limit)
        if watched.code != 0:
            print(watched.errors, file=sys.stderr)
        params = params or watched.params
        lines.append(row(f"cpu={cpu}", budget, watched, peak, limit))
        now = watched.peak_anon.get("trained", 0)
        if first is not None and now:
            fall = (first[1] - now) / (first[0] - budget)
            lines[-1] += f" {fall:.3f} |"
        else:
            lines[-1] += " |"
        first = first or (budget, now)
    if caged:
        smallest = min(parse_bytes(cpu) for cpu in budgets)
        watched, peak = one_run(args, "64GiB", smallest + CONSTANT)
        lines.append(row("control: all in memory", 14 * params, watched, peak, smallest + CONSTANT) + " |")
    report = [
        f"# The memory promise, {time.strftime('%Y-%m-%d')}",
        "",
        f"GPT-2 shape, {args.layers} layers of {args.width}, vocab {args.vocab}: {params:,} params, "
        f"{mb(12 * params)} MB of persistent state ({12 * params / CONSTANT:.1f} times the constant of "
        f"{mb(CONSTANT)} MB) and {mb(2 * params)} MB of gradients between backward and update; {args.steps} steps of "
        f"{args.tokens} tokens.",
        f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} CPUs, Python "
        f"{platform.python_version()}. Command: `python {' '.join(sys.argv)}`",
        "",
        "All in MB. Peak anonymous is sampled from the end of wrapping (heap trimmed) to the end of training; peak RSS "
        "is the whole life of the process, building the model and file-backed pages included; the cgroup counts all.",
        "",
        "| run | budget | hard limit | peak anonymous | above budget | peak RSS, whole life | cgroup peak | spill file "
        "| s | fall of peak / fall of budget |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *lines,
    ]
    print("\n".join(report))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(report) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("watch", "job"), default="watch", help="job: the process to watch")
    parser.add_argument("--cpu", action="append", help="CPU budget; may be given several times (1500MB and 700MB)")
    parser.add_argument("--nvme", default="8GB", help="budget of the spill file (default: %(default)s)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="its directory (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=32, help="per step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--fork", action="store_true", help="job: also run a forked DataLoader worker")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds that a run may do nothing (default: %(default)s)"
    )
    parser.add_argument("--no-cgroup", action="store_true", help="only watch, set no hard limit")
    parser.add_argument("--out", type=Path, default=None, help="write the report here, as markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
