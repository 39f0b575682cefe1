"""What a machine can do, as a value: capacities and speeds, each with where it comes from.

A figure that a plan needs and the value does not have is an error that names it, never a guess. Named machines are in
``gemini/machines/*.json``: *peaks* by the makers' data sheets, each with its source; what share of a peak a program
reaches is the business of whoever computes with it. A machine that was measured (``gemini doctor --measure --json
FILE``) is read by its path, and its figures are what was reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from gemini.errors import MissingFigure, PlanMismatch, human_bytes, parse_bytes
from gemini.planning import document
from gemini.planning.document import Document
from gemini.tiers import Tier

FIGURES: dict[str, str] = {
    "num_gpus": "GPUs of one machine",
    "gpu_bytes": "bytes of memory of one GPU",
    "cpu_bytes": "bytes of host memory",
    "nvme_bytes": "bytes of all NVMe drives together",
    "cpu_threads": "processor cores",
    "gpu_flops_bf16": "FLOP/s of one GPU in half-precision matrix products",
    "gpu_flops_fp32": "FLOP/s of one GPU in fp32 matrix products",
    "gpu_flops_fp16_accumulation": "FLOP/s of one GPU in fp16 products with fp16 sums (GeForce cards: twice as many)",
    "gpu_flops_float8": "FLOP/s of one GPU in float8 products with fp32 sums (from Ada and Hopper on: twice as many)",
    "gpu_matrix_share": "share of its peak that the best matrix products reach on this GPU (without it: of any, 0.83)",
    "gpu_attention_share": "share of its peak that fused attention reaches in forward (without it: the A100's, 0.73)",
    "gpu_attention_backward_share": "the same in backward (without it: the A100's, 0.63)",
    "gpu_sms": "streaming multiprocessors of one GPU (without it: products are not cut into waves)",
    "gpu_bandwidth": "bytes/s that one GPU reads and writes in its own memory",
    "gpu_op_seconds": "seconds that launching one operation on the GPU takes at least",
    "hook_seconds": "seconds that launching takes for each param gathered and gradient landed (without it: none)",
    "cpu_flops_bf16": "FLOP/s of the host in bf16 matrix products, all threads of torch",
    "cpu_flops_fp32": "FLOP/s of the host in fp32 matrix products, all threads of torch",
    "cpu_op_seconds": "seconds that one operation on the host takes at least",
    "dram_bandwidth": "bytes/s that the host reads and writes in its memory, shared by all that touch it",
    "h2d": "bytes/s from host to one GPU, pinned",
    "d2h": "bytes/s from one GPU to host, pinned",
    "link_mixed": "bytes/s both ways together while a GPU's link does both (without it: each as if alone)",
    "copy_seconds": "seconds that each copy over a GPU's link takes besides its bytes (without it: none)",
    "nvme_read": "bytes/s read from all NVMe drives together",
    "nvme_write": "bytes/s written to all NVMe drives together",
    "nvme_write_sustained": "bytes/s written to all of them for hours, their caches full (without it: as nvme_write)",
    "nvme_endurance": "bytes that all NVMe drives together are rated to be written",
    "nvme_mixed": "bytes/s read and written together while all NVMe drives do both (without it: each as if alone)",
    "update_cpu": "seconds per param of one Adam update on the host, all cores, bf16 weights with a split fp32 master",
    "update_gpu": "seconds per param of the same update on one GPU, all planes in its memory",
    "land_cpu": "seconds per param of one half-precision gradient copied into its plane on the host, with its norm",
    "torch_threads": "threads with which torch computes on the host, and did for the figures of products",
    "update_cpu_one": "seconds per param of the same update by one thread",
    "update_cpu_compact": "seconds per param of one Adam update of compact states on the host, all cores",
    "cpu_contention": "times as long as alone that computing and an update take on cores of their own, side by side",
    "interconnect": "bytes/s that one GPU sends to its neighbour in a ring",
    "network": "bytes/s that one GPU sends to other machines (without it: as its interconnect)",
}
"""Every figure there is, with its unit; those of other tiers by their names."""

for _tier in Tier:
    FIGURES.setdefault(f"{_tier.value}_bytes", f"bytes of {_tier.spec.title}")
    for _way in _tier.spec.ways:
        FIGURES.setdefault(_way.figure, f"bytes/s of {_way.track}")


@dataclass(frozen=True)
class Figure:
    """A number in the unit of :data:`FIGURES`, and where it comes from ("measured 2026-11-21", a data sheet, ...)."""

    value: int | float
    source: str


@dataclass(frozen=True)
class Hardware(Document, kind="hardware"):
    """A machine: its name, and its figures (speeds, capacities), each with its source.

    Raises:
        ValueError: for a figure that is not in :data:`FIGURES`, or is not a positive number.
    """

    name: str
    figures: Mapping[str, Figure]

    def __post_init__(self) -> None:
        for key, figure in self.figures.items():
            if key not in FIGURES:
                raise ValueError(
                    f"hardware {self.name!r}: unknown figure {key!r}; the known ones are {', '.join(FIGURES)}"
                )
            value: object = figure.value
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"hardware {self.name!r}: {key} must be a positive number, got {value!r}")

    def has(self, key: str) -> bool:
        return key in self.figures

    def get(self, key: str, *, needed_for: str) -> float:
        """The figure ``key``. Raises MissingFigure if it is not there, saying what needs it and how to get it."""
        assert key in FIGURES, key
        if key not in self.figures:
            raise MissingFigure(
                f"hardware {self.name!r} has no figure {key!r} ({FIGURES[key]}), which {needed_for} needs: add it to "
                'its JSON as {"value": ..., "source": "..."}, or measure the machine with gemini doctor --measure'
            )
        return self.figures[key].value

    def sustained(self, key: str) -> str:
        """The figure of a speed that holds for hours: a step writes again and again, which no drive's cache holds."""
        return f"{key}_sustained" if self.has(f"{key}_sustained") else key

    def useful_threads(self, most: int) -> int:
        """The CPU threads of ``most`` that make an update faster; all if its speed by one and by all is not here."""
        if not (self.has("update_cpu") and self.has("update_cpu_one")):
            return most
        # Until memory has no more to give, each thread adds one's speed; close to that each is slower: a quarter more.
        return min(most, ceil(1.25 * self.figures["update_cpu_one"].value / self.figures["update_cpu"].value))

    def capacity(self, tier: Tier) -> int | None:
        """Bytes of a tier; None if the machine has none of it (or does not say)."""
        figure = self.figures.get(f"{tier.value}_bytes")
        return None if figure is None else int(figure.value)

    def with_gpus(self, count: int) -> Hardware:
        """This machine with so many GPUs if it has one: a second card is put into the same box, and what they send to
        each other goes through host memory. One that has a network stays as it is: more GPUs are more machines.
        """
        if count == 1 or not self.has("num_gpus") or self.figures["num_gpus"].value != 1 or self.has("network"):
            return self
        boxed = self.with_figures("as given", num_gpus=count)
        if self.has("interconnect") or not (self.has("h2d") and self.has("d2h")):
            return boxed
        through_host = "assumption: through host memory, each GPU's link to it at its full speed"
        return boxed.with_figures(through_host, interconnect=min(self.figures["h2d"].value, self.figures["d2h"].value))

    def with_figures(self, source: str, **values: float) -> Hardware:
        """The same machine with some figures replaced."""
        return Hardware(self.name, {**self.figures, **{key: Figure(v, source) for key, v in values.items()}})

    def __str__(self) -> str:
        """A line per figure, with its source."""
        lines = [self.name]
        width = max((len(key) for key in self.figures), default=0)
        lines += [f"  {key:<{width}}  {human_figure(key, f.value):>14}  {f.source}" for key, f in self.figures.items()]
        return "\n".join(lines)


def human_figure(key: str, value: float) -> str:
    """A figure as a person would say it."""
    unit = FIGURES[key]
    if unit.startswith("bytes/s"):
        return _human_rate(value, "B/s")  # powers of 1000, as data sheets have it
    if unit.startswith("bytes"):
        return human_bytes(value)
    if unit.startswith("FLOP/s"):
        return _human_rate(value, "FLOP/s")
    if unit.startswith("seconds per param"):
        return f"{value * 1e9:.3g} ns"
    return f"{value * 1e6:.3g} us" if unit.startswith("seconds") else f"{value:g}"


def _human_rate(value: float, unit: str) -> str:
    factor, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G") if value >= 1e9 else (1e6, "M")
    return f"{value / factor:.4g} {prefix}{unit}"


_FOLDER = Path(__file__).resolve().parents[1] / "machines"


def machine_names() -> tuple[str, ...]:
    """The machines that come with Gemini, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A machine by its name (a ``str`` out of :func:`machine_names`), or else from the JSON file at that path. Behind
    either may stand what this one has more or less of: ``"rtx4090,cpu=128GiB,nvme=4TB"``.

    Raises:
        PlanMismatch: if it is neither, the file cannot be read or is no hardware of this version, or for a size that is
            none.
    """
    path = Path(name_or_path)
    name, *sizes = str(name_or_path).split(",")
    if sizes and not path.exists():
        return _with_sizes(load_hardware(name), sizes)
    if name in machine_names():
        return Hardware.from_json((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if not path.exists():
        raise PlanMismatch(
            f"{str(name_or_path)!r} is neither a machine that Gemini knows nor a file: there are "
            f"{', '.join(machine_names())}; gemini doctor --measure --json FILE writes one of this machine"
        )
    return document.load(path, "", Hardware.from_json)


def _with_sizes(hardware: Hardware, sizes: list[str]) -> Hardware:
    for asked in sizes:
        tier, _, size = asked.partition("=")
        try:
            hardware = hardware.with_figures("as given", **{f"{Tier(tier.strip()).value}_bytes": parse_bytes(size)})
        except ValueError:
            raise PlanMismatch(
                f"{hardware.name},{asked}: behind a machine stands what it has of gpu, cpu or nvme, such as "
                f"{hardware.name},cpu=128GiB"
            ) from None
    return hardware
