"""Many classes, one after the other, each in a forked process with a limit of time and memory."""

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.hunts.zoo.mappings import Entry
from tests.hunts.zoo.runner import MANAGED, Result, as_record, run

SECONDS = 90
BYTES = 6 * 2**30


def run_apart(kind: str, entry: Entry, seconds: int = SECONDS, precision: str | None = None) -> dict[str, Any]:
    """Run one class in a child: a crash, a hang or a flood of memory there is a result here."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
                out.write_text(json.dumps(as_record(run(kind, entry, Path(folder), precision))))
                code = 0
            finally:
                os._exit(code)
        return _wait(pid, out, Result(entry.name, kind, entry.tasks, entry.model_type), seconds)


def preload() -> None:
    """Import what every class needs once, in the parent: the children find it there."""
    for name in (
        "torch._dynamo", "gemini.train.ddp", "gemini.train.optimizers.optimizer", "transformers.modeling_layers",
        "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit",
    ):  # fmt: skip
        importlib.import_module(name)


def _wait(pid: int, out: Path, result: Result, seconds: int) -> dict[str, Any]:
    begun = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - begun > seconds:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            result.reason, result.seconds = f"not done after {seconds} s", seconds
            return _blame(result, out)
        time.sleep(0.02)
    if out.exists() and (text := out.read_text()):
        return json.loads(text)
    code = os.waitstatus_to_exitcode(status)
    result.reason = f"the process died: {signal.Signals(-code).name if code < 0 else code}"
    return _blame(result, out)


def _blame(result: Result, out: Path) -> dict[str, Any]:
    """A death or hang of the plain loop says nothing about the managed one."""
    ours = (out.parent / MANAGED).exists()
    result.status = "failed" if ours else "untried"
    result.reason = result.reason if ours else f"the plain loop: {result.reason}"
    return as_record(result)


def sweep(chosen: Iterable[tuple[str, Entry]], out: Path, report: Callable[[dict[str, Any]], None]) -> None:
    """Run classes in turn; each result is appended to ``out`` as one line of JSON."""
    preload()
    with out.open("a") as file:
        for kind, entry in chosen:
            record = run_apart(kind, entry)
            file.write(json.dumps(record) + "\n")
            file.flush()
            report(record)
