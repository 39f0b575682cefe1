"""What a move or an update costs in seconds: the few speeds that decide between placements.

From a machine's figures, or typical ones where nobody has said which machine it is: then only their order matters
(host memory before a PCIe link before a drive), and that is the same on nearly every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemini.planning.costs import Efficiency
from gemini.planning.hardware import Hardware
from gemini.planning.planes import ADAM, RuleSpec
from gemini.planning.traffic import Boundary
from gemini.tiers import Tier


@dataclass(frozen=True)
class Speeds:
    """Bytes/s over each boundary, and seconds of one Adam update per param on either processor."""

    h2d: float
    d2h: float
    nvme_read: float
    nvme_write: float
    update_cpu: float
    update_gpu: float
    measured_update_gpu: bool = False
    """Whether ``update_gpu`` is a figure of the machine: without one no update is streamed through the GPU."""

    @classmethod
    def typical(cls) -> Speeds:
        """A PCIe 4.0 x16 link at four fifths of its 31.5 GB/s, a fast NVMe drive, eight channels of DDR4."""
        return cls(h2d=25e9, d2h=25e9, nvme_read=3e9, nvme_write=2e9, update_cpu=0.25e-9, update_gpu=0.03e-9)

    @classmethod
    def of(cls, hardware: Hardware, tiers: Mapping[Tier, int], *, sharing: int = 1) -> Speeds:
        """The figures of a machine whose host and drives ``sharing`` ranks share.

        Raises:
            MissingFigure: for one that a plan over ``tiers`` needs.
        """
        usual, shares = cls.typical(), Efficiency()

        def figure(key: str, tier: Tier, otherwise: float) -> float:
            if tier not in tiers:
                return otherwise
            return hardware.get(key, needed_for=f"a plan with a {tier.value} tier") * shares.of(hardware, key)

        measured = Tier.GPU in tiers and hardware.has("update_gpu")

        def update_gpu() -> float:
            if measured:
                return figure("update_gpu", Tier.GPU, usual.update_gpu)
            return ADAM.touched / figure("gpu_bandwidth", Tier.GPU, ADAM.touched / usual.update_gpu)

        return cls(
            h2d=figure("h2d", Tier.GPU, usual.h2d),
            d2h=figure("d2h", Tier.GPU, usual.d2h),
            nvme_read=figure("nvme_read", Tier.NVME, usual.nvme_read) / sharing,
            nvme_write=figure(hardware.nvme_write, Tier.NVME, usual.nvme_write) / sharing,
            update_cpu=figure("update_cpu", Tier.CPU, usual.update_cpu) * sharing,
            update_gpu=update_gpu(),
            measured_update_gpu=measured,
        )

    def update(self, tier: Tier, rule: RuleSpec) -> float:
        """Seconds per param of an update on ``tier``: Adam's, and of other rules as their bytes are to Adam's (and
        their arithmetic, where that is more).
        """
        share = rule.touched / ADAM.touched
        return self.update_gpu * share if tier is Tier.GPU else self.update_cpu * share * rule.beyond_bytes

    def seconds(self, boundary: Boundary, num_bytes: float) -> float:
        """Of moving so many bytes over a boundary that has it to itself."""
        return num_bytes * self.per_byte(boundary)

    def per_byte(self, boundary: Boundary) -> float:
        """Seconds per byte over a boundary."""
        if Tier.NVME in boundary:
            return 1 / (self.nvme_read if boundary.source is Tier.NVME else self.nvme_write)
        return 1 / (self.h2d if boundary.target is Tier.GPU else self.d2h)

    def cost(self, traffic: Mapping[Boundary, int]) -> float:
        """Seconds of all of it, one after the other."""
        return sum(self.seconds(boundary, num_bytes) for boundary, num_bytes in traffic.items())
