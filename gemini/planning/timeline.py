"""A step laid out in time, a value: the simulator predicts one, a real run records one, and the pictures draw both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gemini.errors import human_bytes, listed
from gemini.planning.document import Document
from gemini.tiers import BOUNDARIES, FILED, Tier


class Track(Enum):
    """A unit that works on one thing at a time: what computes, a copy direction, a drive, a kind of communication."""

    _ignore_ = "_tier _way"
    COMPUTE = "compute"
    UPDATE = "update"
    H2D = "host to gpu"
    D2H = "gpu to host"
    for _tier in FILED:  # NVME_READ = "nvme read", and so on
        for _way in reversed(_tier.spec.ways):
            vars()[_way.track.upper().replace(" ", "_")] = _way.track
    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    EXCHANGE = "exchange"


TRACKS = {boundary: Track(boundary.way.track) for boundary in BOUNDARIES}
"""Where a move over a boundary shows."""


class Span(NamedTuple):
    """One piece of work of a track: its start and end (seconds since the step began), its name ("forward
    model.layers.0", "fetch chunk 3"), the index of its moment in the trace and of its chunk (-1 for none), and the
    bytes that it moved.
    """

    track: Track
    start: float
    stop: float
    name: str
    moment: int = -1
    chunk: int = -1
    num_bytes: int = 0


class Sample(NamedTuple):
    """Contents of the tiers from ``seconds`` on: bytes by tier and by holder ("weights", "windows", "exp_avg", ...)."""

    seconds: float
    moment: int
    held: Mapping[Tier, Mapping[str, int]]

    def total(self, tier: Tier) -> int:
        return sum(self.held.get(tier, {}).values())


@dataclass(frozen=True)
class Timeline(Document, kind="timeline"):
    """One optimizer step, predicted (:func:`gemini.simulate`) or measured (``model.recording()``).

    Attributes:
        source: "predicted" or "measured".
        title: a heading: what ran where.
        step_seconds: seconds from the start of a step to the start of the next one.
        tokens: tokens of one step, of all micro-batches and all ranks.
        flops: floating point operations of one step on one rank.
        spans: all pieces of work, in the order of their starts.
        stalls: seconds that computing waited, by cause ("fetch from nvme", "update", ...).
        moved: bytes moved between two tiers, named as in ``memory_report()["moved"]`` ("cpu->gpu").
        samples: what the tiers hold, one sample for every change, in the order of time.
        budgets: bytes per tier.
        moments: the label of each moment of the trace, by index.
    """

    source: str
    title: str
    step_seconds: float
    tokens: int
    flops: int
    spans: tuple[Span, ...]
    stalls: Mapping[str, float]
    moved: Mapping[str, int]
    samples: tuple[Sample, ...]
    budgets: Mapping[Tier, int]
    moments: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def busy(self) -> dict[Track, float]:
        """Seconds that each track worked. Spans of one track that overlap are counted once."""
        found: dict[Track, float] = {}
        for track in Track:
            end, total = 0.0, 0.0
            for span in sorted(s for s in self.spans if s.track is track):
                total += max(0.0, span.stop - max(span.start, end))
                end = max(end, span.stop)
            if total:
                found[track] = total
        return found

    @property
    def peaks(self) -> dict[Tier, int]:
        """The most bytes each tier held."""
        return {tier: max((s.total(tier) for s in self.samples), default=0) for tier in self.budgets}

    @property
    def bound_by(self) -> Track:
        """The track that is busiest. To make a step faster, speed this up first."""
        return max(self.busy.items(), key=lambda item: item[1], default=(Track.COMPUTE, 0.0))[0]

    @property
    def summary(self) -> str:
        """Step time and rates."""
        summary = f"{self.source} step {human_seconds(self.step_seconds)}" if self.step_seconds else "an empty step"
        if self.step_seconds and self.tokens:
            summary += f", {self.tokens_per_second:,.0f} tokens/s"
        if self.step_seconds and self.flops:  # a recorded step knows them only with a trace
            summary += f", {self.flops / self.step_seconds / 1e12:.4g} TFLOP/s per rank"
        return summary

    def __str__(self) -> str:
        """Step time, what bounds it, where it waited, what moved, and each tier's peak."""
        lines = [f"{self.title}: {self.summary}"]
        busy = {track.value: seconds for track, seconds in self.busy.items()}
        lines.append(f"busy: {listed(busy, human_seconds)}")
        lines.append(f"computing waited for: {listed(self.stalls, human_seconds)}")
        lines.append(f"moved: {listed(self.moved)}")
        for tier, peak in self.peaks.items():
            lines.append(f"{tier.value}: peak {human_bytes(peak)} of {human_bytes(self.budgets[tier])}")
        return "\n".join(lines)


def human_seconds(seconds: float) -> str:
    """Seconds in the unit a person would choose: ``human_seconds(0.0125) == "12.5 ms"``."""
    if seconds >= 99.5:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
