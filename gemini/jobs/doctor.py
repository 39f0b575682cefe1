"""What this machine offers Gemini, or what is in a durable store. Every line is asked of the machine when the command
runs; what cannot be asked is said to be unknown, never guessed. Nothing is written to a store, and no lock is kept: a
run may use it meanwhile. What it overwrites meanwhile is no damage, since its records then name a newer commit.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import nn

import gemini
from gemini import kernels
from gemini.errors import StorageError, counted, human_bytes
from gemini.jobs import refusing
from gemini.jobs.screen import WIDEST, human_count
from gemini.jobs.settings import DoctorSettings
from gemini.machines.measure import Figures, measure, measured
from gemini.memory import nvme
from gemini.memory.devices.cuda import prefer_expandable_segments
from gemini.memory.devices.device import make_device
from gemini.memory.durable.folder import holder, is_store, last_commit, stores
from gemini.memory.system import memory_limit, memory_nodes
from gemini.planning.hardware import FIGURES, Figure, Hardware, human_figure
from gemini.ranks import launch
from gemini.train.checkpoint.durable import open_store
from gemini.train.checkpoint.format import decode

_PACKAGES = ("torch transformers safetensors accelerate datasets trl peft bitsandbytes lightning flash-attn").split()


def doctor(asked: DoctorSettings, console: Console) -> int:
    """Print the findings as they are made; returns the exit code, 1 if the NVMe folder or the store cannot be used."""
    if not launch.speaks():
        return 0

    def show(title: str, say: Callable[..., Iterable[str]], *of: Any) -> bool:
        """A section, whose lines are printed as they are found; whether it came to its end."""
        console.print(title, style="bold")
        try:
            for line in say(*of):
                console.print(f"  {line}")
        except (RuntimeError, OSError) as e:  # ours, or torch's where others have all of a GPU
            console.print("Problems", style="bold")
            console.print(f"  {e}")
            return False
        return True

    if asked.store is not None:
        return 0 if show("Durable store", _store, asked.store) else 1
    show("Versions", _versions)
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores may be used"
    threads = f"torch uses {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} threads"
    show("CPU", lambda: [f"{_cpu_name()}, {cores}", threads])
    show("Native kernels", lambda: str(kernels.capabilities()).splitlines())
    show("Memory", _memory)
    show("GPU", _gpus)
    usable = bool(asked.nvme_path) or show(
        "NVMe", lambda: ["not asked: `gemini doctor --nvme-path FOLDER` tries a folder"]
    )
    for path in asked.nvme_path:
        usable = show("NVMe", lambda folder=path: str(nvme.probe(folder)).splitlines()) and usable
        if is_store(path):
            usable = show("Durable store", _store, path) and usable
    if asked.measure and usable:
        usable = show("Measured", _figures, asked, min(console.width, WIDEST))
    return 0 if usable else 1


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    yield ", ".join(f"{name} {_version(name)}" for name in ("gemini-offload", *_PACKAGES))
    others = {*importlib.metadata.packages_distributions().get("gemini", [])} - {"gemini-offload"}
    if others:
        yield f"ANOTHER PACKAGE IS CALLED gemini TOO, of {', '.join(sorted(others))}: each overwrites the other's files"
        yield f"  pip uninstall {' '.join(sorted(others))}, then install Gemini again"


def _version(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "is not installed"


def _cpu_name() -> str:
    """The processor's name as Linux has it, or as Python knows it."""
    with suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def _memory() -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield f"{human_bytes(memory.available)} available of {human_bytes(memory.total)}"
    limit = memory_limit()
    if limit is not None:
        yield f"limited to {human_bytes(limit)} by a control group"
    nodes = memory_nodes()
    if len(nodes) > 1:
        yield f"of {len(nodes)} NUMA nodes: states are spread over them, weights and gradients are near their GPU"


def _gpus() -> Iterator[str]:
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is built without CUDA: training runs on the CPU"
    elif not torch.cuda.is_available():
        yield f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no usable GPU"
    else:
        yield f"torch's allocator: {prefer_expandable_segments()}"
        for index in range(torch.cuda.device_count()):
            free, total = map(human_bytes, torch.cuda.mem_get_info(index))
            yield f"{index}: {torch.cuda.get_device_name(index)}, {free} free of {total}"


# ---- how fast the machine is -----------------------------------------------------------------------------------------


def _figures(asked: DoctorSettings, width: int) -> Iterator[str]:
    """Each figure with its source as soon as it is measured, then what readers should know; writes ``--json``."""
    load, nvme_path, today = os.getloadavg()[0], next(iter(asked.nvme_path), None), datetime.date.today()
    width_of_keys = max(map(len, FIGURES))
    figures: dict[str, Figure] = {}
    for key, figure in chain(measure(nvme_path), measure_hooks() if torch.cuda.is_available() else ()):
        figures[key] = figure
        begin = f"{key:<{width_of_keys}}{human_figure(key, figure.value):>14}  "
        source = figure.source.removeprefix(f"measured {today}, ").removeprefix(f"asked {today}, ")
        yield from textwrap.wrap(begin + source, width - 2, subsequent_indent=" " * len(begin), break_on_hyphens=False)
    if load > (cores := kernels.get_num_threads()) / 2:
        yield f"the machine was busy, a load of {load:.1f} on {cores} cores: what was measured is less than it can do"
    if nvme_path is None:
        yield "the drive was not measured: add --nvme-path FOLDER"
    if asked.json is not None:
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
        name = f"{gpus}{_cpu_name()}, {kernels.get_num_threads()} cores"
        hardware = Hardware(name, {key: figures[key] for key in FIGURES if key in figures})
        with refusing(f"--json {asked.json} cannot be written"):
            asked.json.write_text(hardware.to_json() + "\n", encoding="utf-8")
        yield f"written to {asked.json}"


_WIDTH, _LAYERS, _PARAMS = 64, 16, 9
"""So small that only the thread itself takes time; a layer has as many params as one of a Llama."""


def measure_hooks(name: str = "cuda", repeats: int = 15) -> Figures:
    """``hook_seconds`` of a device with memory of its own: what forward and backward take more where weights come from
    host memory, for each time that a param is gathered (two) and each gradient that leaves.
    """
    device, dtype = make_device(name), torch.bfloat16
    linear = partial(nn.Linear, _WIDTH, _WIDTH, bias=False)
    # Two levels above a param: what is numbered inside something is a block, and in one chunk.
    layers = [nn.Sequential(*(linear() for _ in range(_PARAMS))) for _ in range(_LAYERS)]
    plain: Any = nn.Sequential(nn.Sequential(*layers)).to(device.torch_device, dtype)
    # Room for a few layers: the weights of others come anew in each pass.
    room = device.beside_bytes() + 8 * _PARAMS * _WIDTH**2 * dtype.itemsize
    memory, placement = gemini.MemoryBudget(gpu=room, cpu="1GiB"), gemini.StaticPlacement()
    config = gemini.GeminiConfig(memory=memory, placement=placement, device=device)
    managed: Any = gemini.GeminiDDP(deepcopy(plain), config)
    both = (plain, torch.optim.SGD(plain.parameters())), (managed, gemini.HybridAdam(managed.parameters()))
    x, seconds = torch.ones(1, _WIDTH, device=device.torch_device, dtype=dtype), list[float]()
    for model, optimizer in both * (repeats + 3):  # in turn: what else the machine does is in both
        begin = time.perf_counter()
        model(x).sum().backward()
        seconds.append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
    # Behind the third step the schedule is known, and nothing is made for the first time.
    more = [with_hooks - without for without, with_hooks in zip(seconds[6::2], seconds[7::2], strict=True)]
    how = f"forward and backward of {_LAYERS} layers of {_PARAMS} params that move, beyond those of the plain model"
    yield "hook_seconds", measured("hook_seconds", more, how, lambda s: max(s, 1e-9) / (3 * _LAYERS * _PARAMS))


# ---- what is in a durable store --------------------------------------------------------------------------------------


def _store(directory: Path) -> Iterator[str]:
    """Say what would be resumed from a store, and whether it is all that was written; a StorageError if not."""
    stored = open_store(directory)
    manifest = stored.manifest
    # Before anything is printed: a run that goes on may remove the folder with its first commit to a newer one.
    times = [path.stat().st_mtime for path in stored.commit.folder.glob("record-*")]
    ago = f"{timedelta(seconds=max(0, round(time.time() - max(times))))} ago" if times else "gone by now"
    yield f"{directory.resolve()}, in use by {holder(directory) or 'nobody'}"
    if len(found := [store.name for store in stores(directory)]) > 1:
        yield f"{', '.join(found[:-1])} beside {found[-1]}: gone with the first commit to the newest"
    steps = [param.step for param in manifest.params.values()]
    ranks = counted(len(stored.commit.records), "rank")
    yield f"commit {stored.commit.sequence}, step {max(steps)}, {ago}, of {ranks}; for any number of ranks"
    numel = human_count(sum(math.prod(param.shape) for param in manifest.params.values()))
    compact = "" if manifest.rule.exact is None else ", compact states"
    yield f"{len(steps)} params, {numel} elements, {manifest.precision}, rule {manifest.rule.name}{compact}"
    num_bytes = sum(size for file in stored.opened.values() for _, _, size in file.slots.values())
    yield f"{human_bytes(2 * num_bytes)} on the drive, each state twice"
    extra = decode(manifest.extra, stored.values)
    store = stored.commit.folder.parent
    if isinstance(extra, dict) and {"global_step", "run"} <= extra.keys():
        yield f"of a Trainer, step {extra['global_step']} of the run in {extra['run']}:"
        yield f"gemini sft --resume_from_checkpoint {store}"
    else:
        yield f"by gemini.load_checkpoint({str(store)!r}, ...)"
    yield f"reading {human_bytes(num_bytes)}"
    damaged = [words for file in stored.opened.values() for words in file.damage()]
    now = last_commit(directory)
    if (now.folder, now.sequence) != (stored.commit.folder, stored.commit.sequence) and damaged:
        yield "the run has overwritten it since. Ask again when the run has ended"
    elif damaged:
        places = "\n  ".join(damaged)
        raise StorageError(f"{len(damaged)} damaged\n  {places}")
    else:
        yield "all of it is what was written"
