"""Rank processes for benchmarks: started, given orders, watched from outside, and ended whatever happens.

A script starts itself again as each rank of a :class:`Group` (``python script.py rank``), whose side is :func:`serve`:
orders come as lines of JSON and every rank answers with one. The coordinator decides who computes when, so several
systems can take turns in one run, each in processes of its own. Every wait is bounded. What the benchmarks of ranks
share besides is here too: the model, the batches, what memory a plan needs, and the head of a report.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MB = 10**6
MARK = "@rank "
"""What begins a line of ours: libraries print too."""
PR_SET_PDEATHSIG = 1


# ---- a rank ----------------------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process is a rank that a :class:`Group` has started."""
    return sys.argv[1:2] == ["rank"]


def serve(make_orders: Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]]) -> None:
    """Do what the coordinator says, until it closes the pipe. ``make_orders(settings)`` gives the orders by name."""
    orders: Mapping[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["order"] == "begin":
                orders, result = make_orders(message["arguments"]), None
            else:
                result = orders[message["order"]](**message["arguments"])
            answer = {"result": result}
        except BaseException as e:
            answer = {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
        print(MARK + json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the other ranks may be gone already: nothing here is worth waiting for them


def set_threads(number: int) -> None:
    """Of torch and of our kernels."""
    import torch

    from gemini import kernels

    torch.set_num_threads(number)
    kernels.set_num_threads(number)


def trim() -> None:
    """Give freed heap memory back: what glibc keeps for later is nobody's, and would hide what is really held."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the coordinator -------------------------------------------------------------------------------------------------


class RanksFailed(Exception):
    """A rank raised, died, or did not answer in time."""


@dataclass
class Rank:
    """One process of a group, as seen from outside."""

    process: subprocess.Popen[bytes]
    errors: Any
    text: bytes = b""
    peak_anon: int = 0

    def status(self) -> dict[str, int]:
        """Bytes of RssAnon and VmHWM (the peak of RSS since the process began)."""
        with open(f"/proc/{self.process.pid}/status") as status:
            lines = [line.split() for line in status if line.startswith(("RssAnon", "VmHWM"))]
        return {name[:-1]: int(kib) * 1024 for name, kib, _ in lines}


class Group:
    """``size`` processes of one job. ``environment`` and ``prefix`` (a command to run under) may differ by rank.

    ``python``: the interpreter, for a job in a virtual environment of its own.
    """

    def __init__(
        self,
        script: str,
        settings: Mapping[str, Any],
        size: int,
        *,
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        threads: int = 1,
        timeout: float = 300.0,
        python: str = sys.executable,
    ):
        self.size = size
        self.timeout = timeout
        self.ranks: list[Rank] = []
        port = str(free_port())
        root = str(Path(__file__).resolve().parents[1])
        common = {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        try:
            for rank in range(size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment(rank)}
                errors = tempfile.TemporaryFile("w+")
                process = subprocess.Popen(
                    [*prefix(rank), python, str(Path(script).resolve()), "rank"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                    env=os.environ | common | own, preexec_fn=_die_with_parent,
                )  # fmt: skip
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                self.ranks.append(Rank(process, errors))
            self.order("begin", **settings)
        except BaseException:
            self.close()
            raise

    def order(self, order: str, *, watch: bool = False, **arguments: Any) -> list[Any]:
        """Give all ranks an order and wait: what each answered. ``watch``: sample anonymous memory every 4 ms.

        Raises:
            RanksFailed: with the traceback of the first rank that failed, or the end of its stderr.
        """
        line = json.dumps({"order": order, "arguments": arguments}).encode() + b"\n"
        waiting = dict(enumerate(self.ranks))
        results: list[Any] = [None] * self.size
        end = time.monotonic() + self.timeout
        for index, rank in waiting.items():
            rank.peak_anon = 0
            try:
                assert rank.process.stdin is not None
                rank.process.stdin.write(line)
            except OSError as e:
                raise RanksFailed(self._last_words(index, f"is gone ({e})")) from e
        while waiting:
            if time.monotonic() > end:
                raise RanksFailed(f"ranks {sorted(waiting)} did not finish {order!r} within {self.timeout:.0f} s")
            if watch:
                for rank in self.ranks:
                    rank.peak_anon = max(rank.peak_anon, rank.status().get("RssAnon", 0))
            pipes = [rank.process.stdout for rank in waiting.values()]
            ready, _, _ = select.select(pipes, [], [], 0.004 if watch else 0.5)
            for index, rank in list(waiting.items()):
                if rank.process.stdout in ready and (answer := self._read(index, order)) is not None:
                    results[index] = answer["result"]
                    del waiting[index]
        return results

    def _read(self, index: int, order: str) -> dict[str, Any] | None:
        rank = self.ranks[index]
        assert rank.process.stdout is not None
        data = rank.process.stdout.read()
        if not data:
            rank.process.wait(timeout=10)
            raise RanksFailed(self._last_words(index, f"ended with {rank.process.returncode} during {order!r}"))
        rank.text += data
        *lines, rank.text = rank.text.split(b"\n")
        for line in lines:
            if line.startswith(MARK.encode()):
                answer = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise RanksFailed(f"rank {index} failed in {order!r}: {answer['error']}\n{answer['traceback']}")
                return answer
        return None

    def _last_words(self, index: int, what: str) -> str:
        errors = self.ranks[index].errors
        errors.seek(0)
        return f"rank {index} {what}:\n{errors.read()[-3000:]}"

    def close(self) -> None:
        """End every process and wait for it."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
        for rank in self.ranks:
            rank.process.wait(timeout=30)
            for pipe in (rank.process.stdin, rank.process.stdout, rank.errors):
                if pipe is not None:
                    pipe.close()
        self.ranks = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end the coordinator as Ctrl-C does: through every ``finally``."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


# ---- the model and the loop ------------------------------------------------------------------------------------------


def add_model_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """``--hidden``, ``--layers``, ...: the shape of a Llama and of its batches."""
    shape = {"hidden": 768, "layers": 12, "vocab": 4096, "batch": 2, "tokens": 128} | defaults
    words = {"batch": "sequences per rank and step", "tokens": "of a sequence"}
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words.get(name, '')} (default: %(default)s)")


def make_llama(shape: Mapping[str, int], dtype: str = "float32") -> Any:
    """The same weights on every call and in every process. ``shape`` as from :func:`add_model_arguments`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, shape["hidden"] // 64)
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["hidden"] * 8 // 3 // 64 * 64,
        num_hidden_layers=shape["layers"], num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=max(shape["tokens"], 64), use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def make_batch(shape: Mapping[str, int], step: int, rank: int) -> dict[str, Any]:
    """Tokens of a small part of the vocabulary, so that the loss falls within a few steps."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, min(shape["vocab"], 256), (shape["batch"], shape["tokens"]), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train_step(
    model: Any, optimizer: Any, clip: Callable[[float], Any], batch: Mapping[str, Any]
) -> tuple[float, float]:
    """The ordinary loop: the loss, and the gradient norm before clipping to 1."""
    loss = model(**batch).loss
    loss.backward()
    norm = clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


def smallest_budget(
    shape: Mapping[str, int], ranks: int, precision: str, replicas: int = 1
) -> tuple[dict[str, int], Any]:
    """Bytes per rank that a plan asks for on the CPU when every plane stays in memory, by what for; and the layout."""
    import torch

    from gemini.planning.layout import ParamSpec, make_layout
    from gemini.planning.planes import compute_itemsize, plane_specs
    from gemini.planning.working import PIECE, gradients_in_flight, scratch_bytes, staging_bytes, tile_numel
    from gemini.train.setup.structure import working_set

    with torch.device("meta"):
        model = make_llama(shape)
    named = list(model.named_parameters())
    layout = make_layout([ParamSpec(name, param.numel()) for name, param in named], ranks=ranks)
    tile = tile_numel(max(chunk.numel for chunk in layout.chunks))
    planes = sum(spec.block_bytes for spec in plane_specs(precision, "retain", trainable=True).values())
    need = {"planes": planes * layout.numel // ranks}
    size = compute_itemsize(precision)
    if ranks > 1:
        need["working set"] = working_set(model, layout, precision)
        need["staging"] = staging_bytes(tile)
    if ranks * replicas > 1:
        need["gradients in flight"] = gradients_in_flight(layout, size)
        need["exchange"] = scratch_bytes(max(ranks, replicas), min(tile, PIECE))
        need.setdefault("staging", staging_bytes(tile))
    return need, layout


# ---- the report ------------------------------------------------------------------------------------------------------


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it works; writes no report")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one order (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=None, help="the report (default: under benchmarks/reports, dated)")


def mb(num_bytes: float) -> str:
    return f"{num_bytes / MB:,.1f}"


def processor() -> str:
    """``epyc-2-cores``"""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1] for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    words = [word for word in model.lower().split() if word.isalpha() and word not in ("amd", "intel", "processor")]
    return f"{words[0] if words else platform.machine()}-{len(os.sched_getaffinity(0))}-cores"


def head(title: str, lines: Sequence[str], threads: int = 1) -> list[str]:
    """Title, machine, versions and command of a report. ``threads``: of each rank."""
    import torch
    import transformers

    import gemini
    from gemini import kernels

    set_threads(threads)
    arguments = [a for i, a in enumerate(sys.argv[1:], 1) if not a.startswith("--out") and sys.argv[i - 1] != "--out"]
    command = " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *arguments])
    return [
        f"# {title}, {time.strftime('%Y-%m-%d')}",
        "",
        *lines,
        f"{platform.system()} {platform.release()}, {processor()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, gemini {gemini.__version__}; "
        f"{kernels.capabilities()} per rank; load at the end {os.getloadavg()[0]:.1f}.",
        f"Command: `{command}`",
        "",
    ]


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Markdown: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (names, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [
        "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |" for row in cells
    ]  # fmt: skip
    rule = "|" + "|".join("-" * (w + 2) if not i else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:], ""]


def publish(args: argparse.Namespace, theme: str, report: Sequence[str]) -> None:
    """Print the report and write it, unless the run is a quick one without ``--out``."""
    print("\n".join(report))
    out = args.out
    if out is None and not args.quick:
        folder = Path(__file__).resolve().parent / "reports"
        out = folder / f"{theme}_{processor()}_{time.strftime('%Y-%m-%d')}.md"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(report).rstrip("\n") + "\n")
