"""What this machine offers Gemini: versions, processors, native kernels, memory, a folder for the NVMe tier; or what is
in a durable store.

Every line is asked of the machine when the command runs; what cannot be asked is said to be unknown, never guessed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from rich.console import Console

from gemini.errors import GeminiError, human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.measure import measured
from gemini.jobs.step_files import check_file
from gemini.jobs.store_report import PROBLEMS, store_report
from gemini.memory.durable.folder import is_store
from gemini.memory.system import memory_limit
from gemini.ranks import launch

_PACKAGES = (
    "torch", "transformers", "safetensors", "accelerate", "datasets", "trl", "peft", "bitsandbytes", "lightning",
    "flash-attn",
)  # fmt: skip


def doctor(
    console: Console, *, store: Path | None = None, nvme_path: Path | None = None, measure: bool = False,
    json: Path | None = None,
) -> int:  # fmt: skip
    """Print the findings; returns the exit code, 1 if the NVMe folder or the store that was asked about cannot be used.

    With ``store`` they are of that alone.

    With ``measure`` the machine's figures follow, and go to the file ``json`` as well.
    """
    if json is not None and not measure:
        raise JobError(f"--json {json} is for the figures that --measure finds: add --measure")
    check_file("--json", json)
    if store is not None:
        return _report(console, store)
    sections: tuple[tuple[str, Iterable[str]], ...] = (
        ("Versions", _versions()),
        ("CPU", _cpu()),
        ("Native kernels", _kernels()),
        ("Memory", _memory()),
        ("GPU", _gpus()),
        ("Processes", _processes()),
    )
    for title, lines in sections:
        _section(console, title, lines)
    if nvme_path is None:
        usable, lines = True, ["not asked: `gemini doctor --nvme-path FOLDER` tries a folder"]
    else:
        usable, lines = _nvme(nvme_path)
    _section(console, "NVMe", lines)
    if nvme_path is not None and is_store(nvme_path):
        usable &= _report(console, nvme_path) == 0
    if measure and usable:
        _section(console, "Measured", [])
        measured(console, _name(), nvme_path=nvme_path, file=json)
    return 0 if usable else 1


def _report(console: Console, store: Path) -> int:
    title = ""
    for title, lines in store_report(store):
        _section(console, title, lines)
    return 1 if title == PROBLEMS else 0


def _section(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(title, style="bold")
    for line in lines:
        console.print(f"  {line}")


def _versions() -> Iterator[str]:
    yield f"gemini {_version('gemini-offload') or 'from a source folder, not installed'}"
    yield f"python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    others = {*importlib.metadata.packages_distributions().get("gemini", [])} - {"gemini-offload"}
    if others:
        yield f"ANOTHER PACKAGE IS CALLED gemini TOO, of {', '.join(sorted(others))}: each overwrites the other's files"
        yield f"  pip uninstall {' '.join(sorted(others))}, then install Gemini again"
    present = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    yield ", ".join(present)
    if absent := [name for name in _PACKAGES if not _version(name)]:
        yield f"not installed (optional): {', '.join(absent)}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{_cpu_name()}, {usable} of {os.cpu_count()} cores may be used"
    yield f"torch uses {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} threads"


def _name() -> str:
    """Of the machine, as its description is called: its GPUs and processor."""
    from gemini import kernels

    cpu = _cpu_name()
    if not torch.cuda.is_available():
        return f"{cpu}, {kernels.get_num_threads()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {cpu}"


def _cpu_name() -> str:
    """As Linux has it, or what Python knows."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _kernels() -> Iterator[str]:
    from gemini import kernels

    yield from str(kernels.capabilities()).splitlines()


def _memory() -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield f"{human_bytes(memory.available)} available of {human_bytes(memory.total)}"
    limit = memory_limit()
    if limit is not None:
        yield f"limited to {human_bytes(limit)} by a control group"


def _gpus() -> Iterator[str]:
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is built without CUDA: training runs on the CPU"
    elif not torch.cuda.is_available():
        yield f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no usable GPU"
    query = "--query-gpu=index,name,memory.free,memory.total,driver_version"
    try:
        asked = ["nvidia-smi", query, "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        yield "none found: there is no nvidia-smi, which comes with NVIDIA's driver"
        return
    except (OSError, subprocess.SubprocessError) as e:  # no permission, a driver without a card: each is an answer
        yield f"none found ({getattr(e, 'stderr', '') or getattr(e, 'stdout', '') or e})".rstrip()
        return
    for line in said.splitlines():
        index, name, free, total, driver = line.split(", ")
        yield f"{index}: {name}, {free} free of {total}, driver {driver}"


def _processes() -> Iterator[str]:
    if not torch.distributed.is_available():
        yield "one: this build of torch cannot connect several"
        return
    found = {"gloo": torch.distributed.is_gloo_available(), "NCCL": torch.distributed.is_nccl_available()}
    wires = ", ".join(f"{name} {'is' if there else 'is not'} there" for name, there in found.items())
    several = "`torchrun --nproc-per-node N -m gemini train ...` starts several"
    num_here, num = launch.local_size(), launch.num_processes()
    yield f"{'one; ' + several if num == 1 else f'{num_here} on this machine of {num}'} ({wires})"


def _nvme(path: Path) -> tuple[bool, list[str]]:
    from gemini.memory import nvme

    try:
        return True, [*str(nvme.probe(path)).splitlines()]
    except (GeminiError, OSError) as e:
        return False, [str(e)]
