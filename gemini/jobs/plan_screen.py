"""The screen of ``gemini plan``: what a :class:`~gemini.jobs.plan_report.PlanReport` says, in at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from gemini.errors import human_bytes
from gemini.jobs.budgets import in_options
from gemini.jobs.plan_report import COMPUTE, PlanReport, StepReport
from gemini.jobs.step_files import LABEL
from gemini.planning.break_even import TOLERANCE
from gemini.planning.planes import ADAM
from gemini.planning.timeline import human_seconds

FEW_STEPS = 100_000
"""Fewer steps than this until drives are worn out are a warning; of ten times as many nothing is said."""

_TRACKS = {
    "compute": "computing",
    "update": "the update",
    "host to gpu": "the link from host to GPU",
    "gpu to host": "the link from GPU to host",
    "nvme read": "reading from NVMe",
    "nvme write": "writing to NVMe",
    "all-gather": "gathering between ranks",
    "reduce-scatter": "reducing between ranks",
    "exchange": "layers in slices and sequences in parts",
}
"""What keeps a step as long as it is, in words."""


def screen(report: PlanReport) -> list[str]:
    """The lines, as ``say`` takes them."""
    found: list[str] = []
    for part in (
        _head(report), _verdict(report), _mesh(report), _homes(report), _facts(report), _runners_up(report),
        _changes(report), _alternatives(report),
    ):  # fmt: skip
        lines = [*part]
        found += ["", *lines] if lines and found else lines
    return found


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _head(report: PlanReport) -> Iterator[str]:
    frozen = report.num_params - report.num_trained if report.mesh is None else 0
    yield (
        f"{report.model}, {human_count(report.num_params if report.mesh is None else report.mesh.num_params)} params"
        f"{f', {human_count(frozen)} of them frozen' if frozen else ''}, {report.precision}"
    )
    shapes = sorted({"x".join(map(str, shape)) for shape in report.batch.values()})
    ranks = report.ranks if report.mesh is None else report.mesh.ranks
    micro_batches = report.accumulate if report.mesh is None else report.mesh.micro_batches
    parts = [
        f"{', '.join(shapes) or 'a batch'} tokens",
        f"{micro_batches} micro-batches" if micro_batches > 1 else "",
        "gradient checkpointing" if report.checkpointing else "",
        _tiles(report),
        f"{ranks} {'GPUs' if report.compute == 'gpu' else 'processes'}" if ranks > 1 else "",
        f"gradients {report.gradients}" if report.gradients != "retain" else "",
        f"{report.tokens:,} tokens a step"
        if micro_batches * ranks > 1 and (report.fits or report.mesh is None)
        else "",
    ]
    yield _line("step", "; ".join(filter(None, parts)))
    budgets = [f"{tier} {human_bytes(n)} {report.origins.get(tier, '')}".rstrip() for tier, n in report.budgets.items()]
    each = ", each" if report.ranks > 1 else ""
    yield _line("given" + each, "; ".join(budgets) + (f"; machine {report.machine}" if report.machine else ""))


def _tiles(report: PlanReport) -> str:
    if report.tile_tokens is None:
        return ""
    without = report.activations.whole_peak_bytes
    chosen = "" if without is None else f" (auto: without them {human_bytes(without)} beside params, which do not fit)"
    return f"tiles of {report.tile_tokens:,} tokens{chosen}"


def _verdict(report: PlanReport) -> Iterator[str]:
    needs = ", ".join(f"{kind} {human_bytes(n)}" for kind, n in report.needs.items())
    if report.fits:
        gradients = report.needs.get("grad", 0) * report.ranks / max(1, report.num_trained)
        more = f", and {gradients:.2f} for gradients until the update" if gradients else ""
        rule = "" if report.optimizer == ADAM.name else f" with {report.optimizer}"
        if report.beyond:
            yield f"FITS, BUT {report.beyond}"
        verdict = "it takes" if report.beyond else "FITS"
        yield f"{verdict}: {report.bytes_per_param:.2f} bytes per trained param{rule}{more}"
        return
    refusal, _, change = (report.refusal or "").partition(" Cheapest change: ")
    yield "DOES NOT FIT: " + refusal.partition(" does not fit: ")[2] or refusal
    if change:
        yield _line("cheapest change", in_options(change, "--nvme"))
    yield _line("it needs", f"{human_bytes(sum(report.needs.values()))} for states and gradients: {needs}")


_ORDERS = {"1f1b": "one forward, one backward", "bfs": "breadth first"}
_STAGES_SHOWN = 8


def _mesh(report: PlanReport) -> Iterator[str]:
    """The ranks of a mesh: its stages, and what a rank sends."""
    mesh = report.mesh
    if mesh is None:
        return
    rank = "a GPU" if report.compute == "gpu" else "a rank"
    yield _line("best mesh" if mesh.chosen else "mesh", mesh.mesh + (f"; {_ORDERS[mesh.order]}" if mesh.order else ""))
    if mesh.stages:
        tiers = "".join(f"{tier:>11}" for tier in mesh.stages[0].held)
        yield f"{f'{rank} of stage':<15}{'blocks':>10}{'params':>9}{tiers}{'works':>9}"
        half, number = _STAGES_SHOWN // 2, len(mesh.stages)
        for at, stage in enumerate(mesh.stages, 1):
            if number <= _STAGES_SHOWN or at <= half or at > number - half:
                blocks, held = f"{stage.first_block}-{stage.stop_block - 1}", map(human_bytes, stage.held.values())
                cells = "".join(f"{size:>11}" for size in held)
                params, works = human_count(stage.num_params), human_seconds(stage.seconds)
                yield f"  {at:<13}{blocks:>10}{params:>9}{cells}{works:>9}"
            elif at == half + 1:
                yield f"  ... {number - _STAGES_SHOWN} more ..."
    if mesh.bubble and report.step is not None:
        share = _percent(mesh.bubble, report.step.seconds)
        yield _line("bubble", f"{human_seconds(mesh.bubble)} in which the slowest stage waits for others ({share})")
    if mesh.sent:
        yield f"{f'{rank} sends for':<32}{'in its machine':>16}{'to others':>16}"
        for what, both in mesh.sent.items():
            yield f"  {what:<30}" + "".join(f"{human_bytes(n) if n else '.':>16}" for n in both)


def _runners_up(report: PlanReport) -> Iterator[str]:
    """Other meshes that ``--parallel auto`` has tried."""
    mesh = report.mesh
    if mesh is None or not mesh.runners_up:
        return
    yield f"{'other meshes':<32}{'micro-batches':>14}{report.compute:>16}{'tokens/s':>14}"
    for other in mesh.runners_up:
        name = f"{other.mesh}{', ' + other.order if other.order else ''}"
        rate = human_rate(other.tokens_per_second)
        yield f"  {name:<30}{other.micro_batches:>14}{human_bytes(other.compute_bytes):>16}{rate:>14}"


def _homes(report: PlanReport) -> Iterator[str]:
    """Who lives where: a row for each kind of content, a column for each tier."""
    if not report.held:
        return
    tiers = list(report.held)
    found = dict.fromkeys(kind for held in report.held.values() for kind in held)
    kinds = [kind for kind in report.needs if kind in found] + [kind for kind in found if kind not in report.needs]
    yield f"{'who lives where':<20}" + "".join(f"{tier:>16}" for tier in tiers)

    def row(label: str, cells: list[str]) -> str:
        return f"{label:<20}" + "".join(f"{cell:>16}" for cell in cells)

    for kind in kinds:
        held = [report.held[tier].get(kind, 0) for tier in tiers]
        yield row(f"  {kind}", [human_bytes(n) if n else "." for n in held])
    used = [sum(report.held[tier].values()) for tier in tiers]
    budgets = [report.budgets[tier] for tier in tiers]
    yield row("  in all", [human_bytes(n) for n in used])
    yield row("  free", [f"{human_bytes(b - n)} {_percent(b - n, b):>4}" for n, b in zip(used, budgets, strict=True)])
    if report.update:
        trained = sum(report.update.values())
        cells = [_percent(report.update[tier], trained) if tier in report.update else "." for tier in tiers]
        yield row("  updates run on", cells)
        if report.streamed:
            cells = [_percent(report.streamed, trained) if tier == report.compute else "." for tier in tiers]
            yield row("  of it streamed", cells)


def _facts(report: PlanReport) -> Iterator[str]:
    activations = report.activations
    where = f" (in {activations.peak_phase} of {activations.peak_module or 'the model itself'})"
    yield _line(
        "beside params",
        f"{human_bytes(activations.peak_bytes)} at the peak{where if activations.peak_phase else ''}"
        + (f", {human_bytes(activations.checkpoint_bytes)} of it inputs of checkpointed blocks"
           if activations.checkpoint_bytes else "")
        + (f", which wait on {activations.offloaded_to}" if activations.offloaded_to else "")
        + ("" if report.compute == "gpu" else "; on top of the cpu budget"),
    )  # fmt: skip
    if report.fits:
        moved = ", ".join(f"{way} {human_bytes(n)}" for way, n in report.moved.items() if n)
        yield _line("moved in a step", moved or "nothing")
    step = report.step
    if step is None:
        if report.fits and report.machine is None:
            yield _line(
                "step time",
                "not known without a machine: --machine NAME, or measure this one with "
                "`gemini doctor --measure --json FILE` and give --machine FILE",
            )
        return
    yield _line(
        "step time",
        f"{human_seconds(step.seconds)} predicted ({step.schedule}), {human_rate(step.tokens_per_second)} tokens/s"
        f"{_million(step.tokens_per_second)}, "
        f"{step.flops_per_second / 1e12:.3g} TFLOP/s{' each' if report.ranks > 1 else ''}"
        f"{'' if step.mfu is None else f' (MFU {step.mfu:.0%})'}",
    )
    yield _line("bound by", _bounds(step))
    waited = sorted(step.waited.items(), key=lambda item: -item[1])[:3]
    if waited and waited[0][1] > 0.01 * step.seconds:
        yield _line("computing waits", ", ".join(f"{human_seconds(s)} for {cause}" for cause, s in waited))
    if step.steps_until_worn is not None and step.steps_until_worn < 10 * FEW_STEPS:
        alarm = "WARNING: " if step.steps_until_worn < FEW_STEPS else ""
        yield _line(
            "drives wear",
            f"{alarm}{human_bytes(step.nvme_written)} written a step: {step.steps_until_worn:,} steps until what the "
            "drives are rated for",
        )
    if report.mesh is None:
        yield _line("offload is free", _free(report, step))


def _bounds(step: StepReport) -> str:
    tracks = list(step.busy.items())[:2]
    phrases = [
        f"{_TRACKS.get(track, track)}, {human_seconds(seconds)} ({_percent(seconds, step.seconds)} of the step)"
        for track, seconds in tracks
    ]
    return "; then ".join(phrases) or "nothing"


def _free(report: PlanReport, step: StepReport) -> str:
    """From how many tokens per step on a step is as long as its computing alone."""
    within = f"within {TOLERANCE:.0%}"
    if COMPUTE not in step.busy:
        return "not known: the trace has no work in it"
    if step.break_even is not None and step.break_even <= report.tokens:
        return f"now: a step takes as long as its computing, {within}; it does from {_about(step.break_even)} tokens on"
    ways = []
    if step.break_even is not None:
        ways.append(f"from {_about(step.break_even)} tokens a step on in larger micro-batches")
    if step.break_even_accumulating is not None:
        ways.append(f"from {_about(step.break_even_accumulating)} in more micro-batches of this size")
    return f"{' or '.join(ways) or 'at no number of tokens'} ({within}; now {report.tokens:,})"


def _changes(report: PlanReport) -> Iterator[str]:
    for number, change in enumerate(report.changes):
        yield _line("what to change" if number == 0 else "", in_options(change, "--nvme"))


def _alternatives(report: PlanReport) -> Iterator[str]:
    """A row each; those that need something beside them to fit stand under it."""
    if not report.alternatives:
        return
    indents = ["    " if other.beside else "  " for other in report.alternatives]
    rows = [indent + other.options for indent, other in zip(indents, report.alternatives, strict=True)]
    width = max(map(len, rows))
    yield f"{'what else it could do':<{width}}{'fits':>6}{'tokens/s':>10}  result"
    beside = ""
    for row, other in zip(rows, report.alternatives, strict=True):
        if other.beside != beside:
            beside = other.beside
            yield f"  with {beside} and"
        fits = {True: "yes", False: "no", None: "."}[other.fits]
        rate = "." if other.tokens_per_second is None else human_rate(other.tokens_per_second)
        yield f"{row:<{width}}{fits:>6}{rate:>10}  {other.result}".rstrip()


def _million(rate: float) -> str:
    return f" (a million in {timedelta(seconds=round(1e6 / rate))})" if rate else ""


def _about(tokens: int) -> str:
    """Three digits, rounded up: more would promise what a prediction cannot hold."""
    unit = 10 ** max(0, len(str(tokens)) - 3)
    return f"{-(-tokens // unit) * unit:,}"


def _percent(part: float, whole: float) -> str:
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}" if whole else "0%"


def human_rate(rate: float) -> str:
    """So many a second: "25,600", "12.67"."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def human_count(number: int) -> str:
    """Params as people say them: "69.0 G", "124.4 M"."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number}"
