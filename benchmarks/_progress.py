"""Limits on progress, not on time: a process is given up when it does nothing for long, never because it is slow.

On a busy machine everything takes as long as it takes. What hangs is told by what does not change: no processor time,
no bytes read or written, nothing said, and nothing of it waiting for a processor or a disk. A process that computes in
circles is not told apart from one that works; the test runner's own limit is for that.
"""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds without progress after which something hangs."""
_CPU_SECONDS = 0.25
"""Processor time that is progress: more than waiting in a loop takes."""


class NoProgress(TimeoutError):
    """Nothing has happened for as long as anybody is ready to wait."""


class Progress:
    """Watches processes with all that they started.

    Args:
        pids: the processes.
        what: their name in the error.
        patience: seconds without progress before :meth:`check` raises.
        said: a number that grows with what they say, if there is any.
    """

    def __init__(
        self, pids: Iterable[int], what: str, *, patience: float = PATIENCE, said: Callable[[], int] = lambda: 0
    ):
        self._pids, self._what, self._patience, self._said = tuple(pids), what, patience, said
        self._looked = self._since = time.monotonic()
        self._before = self._now()

    def check(self) -> None:
        """To be called now and again; looks at most once a second.

        Raises:
            NoProgress: if there was none for ``patience`` seconds.
        """
        now = time.monotonic()
        if now - self._looked < min(1.0, self._patience / 4):
            return
        self._looked = now
        cpu, others, waits_for_machine = found = self._now()
        if cpu - self._before[0] >= _CPU_SECONDS or others != self._before[1] or waits_for_machine:
            self._before, self._since = found, now
        if now - self._since > self._patience:
            raise NoProgress(f"{self._what} has made no progress for {self._patience:.0f} s")

    def _now(self) -> tuple[float, tuple[int, int], bool]:
        """Processor seconds, (bytes read and written, what was said), and whether any thread could go on or reads."""
        cpu, num_bytes, waits = 0.0, 0, False
        for pid in _with_children(self._pids):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                states = [
                    path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")
                ]
            except (OSError, IndexError):
                continue  # it has ended
            cpu += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            num_bytes += int(io["read_bytes"]) + int(io["write_bytes"])
            waits |= pid != os.getpid() and bool({"R", "D"} & {*states})
        return cpu, (num_bytes, self._said()), waits


def wait_until(is_over: Callable[[float], bool], progress: Progress) -> None:
    """Call ``is_over(seconds)``, which waits for so long at most, until it says so.

    Raises:
        NoProgress: if what is waited for hangs.
    """
    while not is_over(0.25):
        progress.check()


def finish(process: subprocess.Popen[Any], *, patience: float = PATIENCE) -> tuple[Any, Any]:
    """``process.communicate()``; one that hangs is killed.

    Raises:
        NoProgress: with its command.
    """
    progress = Progress([process.pid], f"{process.args}", patience=patience)
    while True:
        try:
            return process.communicate(timeout=0.25)
        except subprocess.TimeoutExpired:
            try:
                progress.check()
            except NoProgress:
                process.kill()
                process.communicate()
                raise


def run(command: Sequence[str], *, patience: float = PATIENCE, **how: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True)``, with a limit on progress.

    Raises:
        NoProgress: with what it has said so far.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:

        def said() -> int:
            return os.fstat(out.fileno()).st_size + os.fstat(error.fileno()).st_size

        def texts() -> list[str]:
            for file in (out, error):
                file.seek(0)
            return [out.read(), error.read()]

        process = subprocess.Popen(command, stdout=out, stderr=error, text=True, **how)
        progress = Progress([process.pid], " ".join(command)[:200], patience=patience, said=said)
        try:
            wait_until(lambda seconds: _ended(process, seconds), progress)
        except NoProgress as e:
            process.kill()
            process.wait()
            raise NoProgress("\n".join([str(e), *texts()])) from None
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(command, process.returncode, *texts())


def join(thread: threading.Thread, *, patience: float = PATIENCE) -> None:
    """``thread.join()``, as long as this process does anything.

    Raises:
        NoProgress: naming it.
    """

    def is_over(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    wait_until(is_over, Progress([os.getpid()], f"thread {thread.name}", patience=patience))


def _ended(process: subprocess.Popen[Any], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _with_children(pids: Iterable[int]) -> list[int]:
    found, left = [], list(pids)
    while left:
        pid = left.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                left += map(int, children.read_text().split())
            except OSError:
                continue
    return found
