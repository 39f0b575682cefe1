"""Processes that are measured: started, given orders, watched from outside, and ended whatever happens.

A script starts itself again as each process of a :class:`Group` (``python script.py rank``), whose side is
:func:`serve`: orders come as lines of JSON and every process answers with one. The coordinator decides who computes
when, so several systems can take turns in one run, each in processes of its own. Every wait is bounded.
"""

from __future__ import annotations

import ctypes
import json
import os
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

from benchmarks import _memory
from benchmarks._progress import Progress

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
MARK = "@rank "
"""What begins a line of ours: libraries print too."""
PR_SET_PDEATHSIG = 1


# ---- a rank ----------------------------------------------------------------------------------------------------------


def run_script(
    make_orders: Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]], main: Callable[[], int | None]
) -> None:
    """What a script ends with: it obeys orders where a :class:`Group` has started it, else it is the coordinator."""
    if sys.argv[1:2] == ["rank"]:
        serve(make_orders)
    else:
        end_on_signals()
        sys.exit(main())


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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the coordinator -------------------------------------------------------------------------------------------------


class RanksFailed(Exception):
    """A process raised, died, or did not answer in time. ``code``: its exit status, if it has ended."""

    def __init__(self, text: str, code: int | None = None):
        super().__init__(text)
        self.code = code


@dataclass
class Rank:
    """One process of a group, as seen from outside."""

    process: subprocess.Popen[bytes]
    errors: Any
    text: bytes = b""
    peak_anon: int = 0
    """While the last order that was watched was obeyed."""

    def status(self) -> dict[str, int]:
        """Bytes of RssAnon, VmRSS and VmHWM."""
        return _memory.status(self.process.pid)


class Group:
    """``size`` processes of one job. ``environment`` and ``prefix`` (a command to run under) may differ by rank.

    Args:
        ranked: whether they are to find each other by torch's variables; without, each is alone.
        timeout: seconds for one order, or with ``patience`` seconds for which all may do nothing.
        watch: sample anonymous memory every 4 ms, from the start of the interpreter on.
        python: the interpreter, for a job in a virtual environment of its own.
    """

    def __init__(
        self, script: str, settings: Mapping[str, Any], size: int = 1, *,
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
        prefix: Callable[[int], Sequence[str]] = lambda rank: (), threads: int = 1, timeout: float = 300.0,
        patience: float | None = None, ranked: bool = True, watch: bool = False, python: str = sys.executable,
    ):  # fmt: skip
        self.size, self.timeout, self.patience, self.watch = size, timeout, patience, watch
        self.ranks: list[Rank] = []
        common = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if ranked:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
                       "LOCAL_WORLD_SIZE": str(size)}  # fmt: skip
        try:
            for rank in range(size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranked else {}
                errors = tempfile.TemporaryFile("w+")
                process = subprocess.Popen(
                    [*prefix(rank), python, str(Path(script).resolve()), "rank"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                    env=os.environ | common | own | environment(rank), preexec_fn=_die_with_parent,
                )  # fmt: skip
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                self.ranks.append(Rank(process, errors))
            self.order("begin", **settings)
        except BaseException:
            self.close()
            raise

    def order(self, order: str, *, watch: bool = False, **arguments: Any) -> list[Any]:
        """Give all an order and wait: what each answered. ``watch``: sample anonymous memory every 4 ms.

        Raises:
            RanksFailed: with the traceback of the first process that failed, or the end of its stderr.
        """
        line = json.dumps({"order": order, "arguments": arguments}).encode() + b"\n"
        waiting = dict(enumerate(self.ranks))
        results: list[Any] = [None] * self.size
        end, peaks, watch = time.monotonic() + self.timeout, _memory.Peaks(), watch or self.watch
        peaks.begin(rank.process.pid for rank in self.ranks if watch)
        progress = None
        if self.patience is not None:
            pids = [rank.process.pid for rank in self.ranks]
            progress = Progress(pids, f"{order!r} of {self.ranks[0].process.args}", patience=self.patience)
        for index, rank in waiting.items():
            try:
                assert rank.process.stdin is not None
                rank.process.stdin.write(line)
            except OSError as e:
                raise self._ended(index, f"is gone ({e})") from e
        while waiting:
            if progress is not None:
                progress.check()
            elif time.monotonic() > end:
                raise RanksFailed(f"ranks {sorted(waiting)} did not finish {order!r} within {self.timeout:.0f} s")
            peaks.look()
            pipes = [rank.process.stdout for rank in waiting.values()]
            ready, _, _ = select.select(pipes, [], [], peaks.INTERVAL if watch else 0.5)
            for index, rank in list(waiting.items()):
                if rank.process.stdout in ready and (answer := self._read(index, order)) is not None:
                    results[index] = answer["result"]
                    del waiting[index]
        for rank in self.ranks:
            rank.peak_anon = peaks.anon.get(rank.process.pid, 0)
        return results

    def _read(self, index: int, order: str) -> dict[str, Any] | None:
        rank = self.ranks[index]
        assert rank.process.stdout is not None
        data = rank.process.stdout.read()
        if not data:
            rank.process.wait(timeout=10)
            raise self._ended(index, f"ended with {rank.process.returncode} during {order!r}")
        rank.text += data
        *lines, rank.text = rank.text.split(b"\n")
        for line in lines:
            if line.startswith(MARK.encode()):
                answer = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise RanksFailed(f"rank {index} failed in {order!r}: {answer['error']}\n{answer['traceback']}")
                return answer
        return None

    def _ended(self, index: int, what: str) -> RanksFailed:
        errors = self.ranks[index].errors
        errors.seek(0)
        return RanksFailed(f"rank {index} {what}:\n{errors.read()[-3000:]}", self.ranks[index].process.poll())

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
