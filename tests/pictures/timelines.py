"""Timelines to draw: one of ten moments, and one as large as those of 70B models."""

import random
from dataclasses import replace

from gemini.planning.timeline import Sample, Span, Timeline, Track
from gemini.tiers import Tier

MIB, GIB = 2**20, 2**30


def toy(source: str = "predicted", slower: float = 1.0) -> Timeline:
    """Three layers whose weights come one by one, then an update from NVMe; a budget with one layer to spare."""
    spans, samples, now = [], [], 0.0
    planes = {Tier.CPU: {"weights": 3 * MIB, "exp_avg": 6 * MIB}, Tier.NVME: {"exp_avg_sq": 6 * MIB}}
    for phase in ("forward", "backward"):
        for layer in range(3):
            samples.append(Sample(now, len(samples), {**planes, Tier.GPU: {"windows": (1 + layer % 2) * MIB}}))
            spans.append(Span(Track.H2D, now, now + 0.0005, f"fetch chunk {layer}", len(samples) - 1, layer, MIB))
            begin = now + 0.0005
            now = begin + 0.001 * slower
            spans.append(Span(Track.COMPUTE, begin, now, f"{phase} layers.{layer}", len(samples) - 1))
    spans.append(Span(Track.NVME_READ, now, now + 0.002, "update chunk 0", -1, 0, 6 * MIB))
    spans.append(Span(Track.UPDATE, now + 0.001, now + 0.003, "update chunk 0", -1, 0))
    moments = tuple(span.name for span in spans if span.track is Track.COMPUTE)
    budgets = {Tier.GPU: 3 * MIB, Tier.CPU: 64 * MIB, Tier.NVME: 8 * MIB}
    return Timeline(
        source, "Toy <model> & co on standin", now + 0.003, 24, 10**9, tuple(spans),
        {"update": 0.003, "fetch from cpu": 0.003}, {"cpu->gpu": 6 * MIB, "nvme->cpu": 6 * MIB}, tuple(samples),
        budgets, moments,
    )  # fmt: skip


def large(layers: int = 80, parts: int = 14, seed: int = 0) -> Timeline:
    """Thousands of moments; moves run beside computing."""
    rng, spans, samples, moments, now = random.Random(seed), [], [], [], 0.0
    for phase in ("forward", "backward"):
        for layer in range(layers):
            spans.append(Span(Track.H2D, now, now + 0.1, f"fetch chunk {layer}", len(moments), layer, GIB))
            for part in range(parts):
                moments.append(f"{phase} model.layers.{layer}.part{part}")
                held = {Tier.GPU: {"weights": 6 * GIB, "activations": rng.randrange(10 * GIB)}}
                samples.append(Sample(now, len(moments) - 1, {**held, Tier.CPU: {"exp_avg": 50 * GIB}}))
                stop = now + rng.uniform(0.005, 0.02)
                spans.append(Span(Track.COMPUTE, now, stop, moments[-1], len(moments) - 1))
                now = stop
            now += 0.01
    budgets = {Tier.GPU: 24 * GIB, Tier.CPU: 96 * GIB}
    spans.sort(key=lambda span: span.start)
    return Timeline("predicted", "70B", now, 4096, 10**15, tuple(spans), {"fetch from cpu": 1.6},
                    {"cpu->gpu": 160 * GIB}, tuple(samples), budgets, tuple(moments))  # fmt: skip


def empty() -> Timeline:
    """No span, no sample, no time."""
    return replace(toy(), spans=(), samples=(), step_seconds=0.0, stalls={}, moved={}, moments=(), tokens=0, flops=0)
