"""Where bytes may live (tiers), and how many (budgets)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from gemini.errors import parse_bytes


class Direction(NamedTuple):
    """One direction between a tier and the one through which it is reached."""

    track: str
    """Of a timeline, by its name."""
    figure: str
    """The speed, as machines have it."""
    usual: float
    """That speed where no machine is given, in bytes/s."""


class TierSpec(NamedTuple):
    """A description of a tier for plans, simulations and reports: whoever adds one says it here, and in no other table.
    Its budget is a field of :class:`MemoryBudget`, its fractions are fields of ``StaticPlacement``, each by its name.
    """

    title: str
    through: Tier | None = None
    """The tier through which all others reach it; None for host memory itself."""
    in_files: bool = False
    """Whether its bytes are pages of files: they pass through staging, and nothing computes on them in place."""
    ways: tuple[Direction, ...] = ()
    """From that tier into this one, and back."""
    figures: tuple[str, ...] = ()
    """A machine that has any of these has such a tier."""


class Tier(Enum):
    """A kind of memory, fastest first. The value is its name in budgets and reports."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"

    @property
    def spec(self) -> TierSpec:
        """The description of this tier."""
        return _SPECS[self]

    @property
    def in_files(self) -> bool:
        return _SPECS[self].in_files

    __hash__ = object.__hash__  # Enum's own is Python, and tiers are keys for every tile that moves


_SPECS = {
    Tier.GPU: TierSpec(
        "GPU memory",
        through=Tier.CPU,
        # A PCIe 4.0 x16 link at four fifths of its 31.5 GB/s.
        ways=(Direction("host to gpu", "h2d", usual=25e9), Direction("gpu to host", "d2h", usual=25e9)),
        figures=("gpu_bytes", "gpu_flops_bf16", "gpu_flops_fp32", "gpu_bandwidth"),
    ),
    Tier.CPU: TierSpec("Host memory"),
    Tier.NVME: TierSpec(
        "NVMe",
        through=Tier.CPU,
        in_files=True,
        # A fast drive.
        ways=(Direction("nvme write", "nvme_write", usual=2e9), Direction("nvme read", "nvme_read", usual=3e9)),
        figures=("nvme_bytes", "nvme_read", "nvme_write"),
    ),
}
"""Every tier has an entry: one without is an error as soon as this module is read (``_OUTER``)."""

DRIVE = Tier.NVME
"""The tier whose files may outlive the process."""

FILED = tuple(tier for tier in Tier if tier.in_files)
"""The tiers that a budget adds by naming a folder, fastest first."""

OFFLOAD_TO = tuple(tier.value for tier in Tier if tier is not Tier.GPU)
"""Where activations may wait for backward, by name."""


class Boundary(NamedTuple):
    """A way that bytes take, named as in ``memory_report()["moved"]``."""

    source: Tier
    target: Tier

    @property
    def outer(self) -> Tier:
        """The tier that is reached through the other one."""
        return _OUTER[self]

    @property
    def way(self) -> Direction:
        """How it shows in timelines, and which figure is its speed."""
        return self.outer.spec.ways[0 if self.outer is self.target else 1]

    def __str__(self) -> str:
        return f"{self.source.value}->{self.target.value}"


_OUTER = {
    boundary: tier
    for tier in Tier
    if (through := tier.spec.through) is not None
    for boundary in (Boundary(through, tier), Boundary(tier, through))
}
BOUNDARIES = tuple(_OUTER)
"""All there are."""


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes each tier may hold. A size is a string such as "20GiB" or a number of bytes. Tiers that are left
    out are measured when the model is wrapped: 80 % of what is free.

    Args:
        gpu: all GPU memory that the process may use, the CUDA context and kernels included. If memory is reserved for
            activations (by a trace or ``GeminiConfig(activations=)``), torch's allocator is limited to the rest of the
            budget while the model exists, also for tensors that Gemini does not manage. Tensors that existed before are
            not counted.
        cpu: chunks, staging buffers and pools in host memory. The Python process itself and activations that are
            computed on the CPU are not counted.
        nvme: the size of the spill file. Needs ``nvme_path``.
        nvme_path: an existing, writable directory ("~" is your home). Without it there is no NVMe tier. The spill file
            in it has no name, and its space is free again when the process ends. A list of directories, one on each
            drive: they are read and written together, in equal shares, and ``nvme`` is the size of all.
        durable: keep weights and optimizer states in a store in ``nvme_path`` that remains when the process ends, in
            whatever way. ``save_checkpoint(nvme_path, ...)`` then only adds what is in memory and a record of a few
            KiB, because training has written the rest already. The store takes twice the space of all weights and
            states.

    Raises:
        ValueError, TypeError: for an invalid size (:func:`gemini.errors.parse_bytes`), or for ``nvme`` or ``durable``
            without ``nvme_path``.
    """

    gpu: str | int | None = None
    cpu: str | int | None = None
    nvme: str | int | None = None
    nvme_path: str | Path | Sequence[str | Path] | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        for tier in Tier:
            # Read here so that a wrong size is refused where it was written, and not when a model is wrapped.
            size = getattr(self, tier.value)
            if size is not None:
                parse_bytes(size, what=f"MemoryBudget({tier.value}=)")
        for tier in FILED:
            name = f"{tier.value}_path"
            # The dataclass is frozen, and everybody after this reads paths that exist as they stand.
            object.__setattr__(self, name, _paths_in(getattr(self, name), name, tier.spec.title))
            if not self.paths_of(tier) and (self.bytes_of(tier) or 0) > 0:
                raise ValueError(
                    f"MemoryBudget({tier.value}={getattr(self, tier.value)!r}) needs {tier.value}_path=, the directory "
                    "for the spill file"
                )
        if not isinstance(self.durable, bool):
            raise TypeError(f"MemoryBudget(durable=) is True or False, got {self.durable!r}")
        if self.durable and self.nvme_path is None:
            raise ValueError("MemoryBudget(durable=True) needs nvme_path=, the directory for the store")

    def bytes_of(self, tier: Tier) -> int | None:
        """The declared bytes of ``tier``; None where they were left out."""
        size = getattr(self, tier.value)
        return None if size is None else parse_bytes(size)

    def paths_of(self, tier: Tier) -> tuple[str | Path, ...]:
        """The directories over which the file of ``tier`` is striped; none where there is no such tier."""
        given: Any = getattr(self, f"{tier.value}_path")
        return () if given is None else given if isinstance(given, tuple) else (given,)


def _paths_in(given: Any, name: str, title: str) -> Any:
    """The path or paths that a budget was given as ``name``, with "~" replaced. Raises as :class:`MemoryBudget`."""
    if given is None:
        return None
    several = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(path, (str, os.PathLike)) for path in several):
        raise TypeError(f"MemoryBudget({name}=) is a path or a list of paths, got {given!r}")
    if not several or not all(map(str, several)):
        raise ValueError(f"MemoryBudget({name}={given!r}) names no directory; leave it out for no {title} tier")
    paths = [Path(os.path.expanduser(path)) if str(path).startswith("~") else path for path in several]
    twice = [path for number, path in enumerate(paths) if Path(path) in map(Path, paths[:number])]
    if twice:
        raise ValueError(f"MemoryBudget({name}=) names {twice[0]} twice; name each directory once")
    return tuple(paths) if isinstance(given, (list, tuple)) else paths[0]
