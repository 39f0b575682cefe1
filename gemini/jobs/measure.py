"""What ``gemini doctor --measure`` prints and writes: a table of this machine's figures, a file for ``--machine``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gemini import kernels
from gemini.jobs.step_files import write_file
from gemini.machines.measure import measure
from gemini.planning.hardware import FIGURES, Figure, Hardware, human_figure

_BUSY = 0.5
"""Of the cores."""


def measured(console: Console, name: str, *, nvme_path: Path | None, file: Path | None) -> None:
    """Measure, print the table, and write the file if one is asked for."""
    load = os.getloadavg()[0]
    figures: dict[str, Figure] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring")
        for key, figure in measure(nvme_path):
            figures[key] = figure
            progress.update(task, description=f"measuring: {len(figures)} figures so far, {key} last")
    hardware = Hardware(name, {key: figures[key] for key in FIGURES if key in figures})
    console.print(_table(hardware), soft_wrap=False)
    for line in _remarks(nvme_path, load, kernels.get_num_threads()):
        console.print(f"  {line}")
    if file is not None:
        write_file(file, hardware.to_json() + "\n", "--json")
        console.print(f"  written to {file}")


def _table(hardware: Hardware) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    today = str(datetime.date.today())
    for key, figure in hardware.figures.items():
        source = figure.source.removeprefix(f"measured {today}, ").removeprefix(f"asked {today}, ")
        table.add_row(key, human_figure(key, figure.value), source)
    return table


def _remarks(nvme_path: Path | None, load: float, cores: int) -> Iterator[str]:
    """What a reader of the table should know: what is not in it, and whether the machine had other work."""
    if load > _BUSY * cores:
        yield (
            f"the machine was busy, a load of {load:.1f} on {cores} cores in the last minute: what was measured is "
            "less than it can do"
        )
    if nvme_path is None:
        yield "the drive was not measured: add --nvme-path FOLDER"
    if not torch.cuda.is_available():
        yield "there is no GPU to measure"
