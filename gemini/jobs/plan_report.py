"""What ``gemini plan`` answers: plain data for ``--json`` and the screen; docs/reference/cli.md explains its fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gemini.errors import BudgetExceeded, human_bytes, listed
from gemini.jobs.planner import Machine, problem_of
from gemini.jobs.screen import fact, human_count, human_rate, in_options, shown_bytes, table
from gemini.jobs.settings import MAIN, PlanSettings
from gemini.planning.parallel import MeshOutcome
from gemini.planning.placement import Problem
from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM
from gemini.planning.timeline import Timeline, human_seconds
from gemini.planning.together import LEFT, Together, kept_bytes, needed_bytes
from gemini.planning.trace import MemoryTrace, Phase, tile_words
from gemini.planning.traffic import by_name
from gemini.planning.working import beside_bytes
from gemini.tiers import Tier

VERSION = 3
Report = dict[str, Any]


def refused(settings: PlanSettings, machine: Machine, trace: MemoryTrace, refusal: BudgetExceeded) -> Report:
    """The answer where nothing fits. ``trace`` is one micro-batch on one rank."""
    problem = problem_of(settings, machine, trace)
    return _described(machine, trace, problem, settings.accumulate) | {"fits": False, "refusal": str(refusal)}


def planned(
    settings: PlanSettings,
    machine: Machine,
    plan: Plan,
    timeline: Timeline | None,
    *,
    best: MeshOutcome | None = None,
    together: Together | None = None,
    before: float = 0.0,
) -> Report:
    """The answer where a plan fits, with its time if the machine's speeds are known. Over a mesh (``best``) plan and
    timeline are of one rank of the slowest stage. ``together``: with models that compute in turn, which take ``before``
    seconds of a step.
    """
    report, update, layout = _described(machine, plan.trace, plan.problem, plan.accumulate), Counter[str](), plan.layout
    for index, chunk in enumerate(layout.chunks):
        if chunk.trainable:
            update[plan.update_tier(index).value] += chunk.payload
    report["activations"]["offloaded_to"] = plan.offload_activations
    return report | {
        "bytes_per_param": plan.bytes_per_param,
        "held": named(_beside(plan, together)),
        "models": _models(together) if together else {},
        "update": dict(update),
        "streamed": sum(layout.chunks[index].payload for index in plan.placement.streamed),
        "moved": by_name((together or plan).traffic),
        "step": _step(settings, machine, plan, timeline, best, before) if timeline else None,
    }


def _described(machine: Machine, trace: MemoryTrace, problem: Problem, accumulate: int) -> Report:
    """Every field of an answer, with what is known before anything is placed; ``accumulate``: micro-batches of a step,
    which a trace may have all of.
    """
    accumulate = max(accumulate // trace.micro_batches, 1)
    needs = Counter[str]()
    for sizes in problem.sizes:
        needs.update(sizes)
    top = max(trace.moments, key=lambda moment: moment.peak_bytes, default=None)
    return {
        "gemini": "plan report",
        "version": VERSION,
        "fits": True,
        "model": trace.model,
        "num_params": trace.num_params,
        "num_trained": sum(param.numel for param in trace.params if param.trainable),
        "precision": trace.arithmetic(trace.precision),
        "gradients": problem.gradients,
        "checkpointing": trace.checkpointing,
        "kept_blocks": trace.kept_blocks,
        "kernels": trace.kernels,
        "tile_tokens": trace.tile_tokens,
        "batch": dict(trace.batch),
        "tokens": trace.tokens * accumulate * problem.layout.ranks,
        "accumulate": accumulate * trace.micro_batches,
        "order": "bfs" if trace.micro_batches > 1 else "dfs",
        "ranks": problem.layout.ranks,
        "compute": machine.compute.value,
        "machine": None if machine.hardware is None else machine.hardware.name,
        "optimizer": problem.rule.name,
        "bytes_per_param": None,
        "needs": dict(needs),
        "budgets": named(machine.budgets_of_rank),
        "origins": named(machine.origins),
        "activations": {
            "peak_bytes": trace.peak_bytes,
            "peak_module": top.module if top else "",
            "peak_phase": top.phase.value if top else "",
            "checkpoint_bytes": trace.checkpoint_bytes,
            "offloaded_to": None,
        },
        "refusal": None,
        **{name: {} for name in ("held", "models", "update", "moved")},
        "streamed": 0,
        **dict.fromkeys(("step", "mesh", "fastest")),
        "alternatives": [],
    }


def named(of: Mapping[Tier, Any]) -> dict[str, Any]:
    """By the names of the tiers."""
    return {tier.value: value for tier, value in of.items()}


def _beside(plan: Plan, together: Together | None) -> dict[Tier, dict[str, int]]:
    """Bytes of each tier, of other models by their names; the context of a GPU is of all."""
    held = {tier: dict(of_tier) for tier, of_tier in plan.held.items()}
    if together is None:
        return held
    for name, other in together.plans.items():
        for tier, num_bytes in kept_bytes(other).items() if other is not plan else ():
            held[tier][name] = num_bytes
    compute = plan.problem.compute
    if context := beside_bytes(plan.trace.target, compute, plan.problem.rule):
        held[compute]["context"] = context
    return held


def _models(together: Together) -> Report:
    return {
        name: {
            "model": plan.trace.model,
            "num_params": plan.trace.num_params,
            "trained": any(param.trainable for param in plan.trace.params),
            "kept": named({tier: n for tier, n in kept_bytes(plan).items() if n}),
            "at_once": needed_bytes(plan),
            "moved": by_name(plan.traffic),
        }
        for name, plan in together.plans.items()
    }


def _step(
    settings: PlanSettings,
    machine: Machine,
    plan: Plan,
    timeline: Timeline,
    best: MeshOutcome | None,
    before: float,
) -> Report:
    """How long a step takes, as predicted. Over a mesh stages wait for each other, and the step is that long; and
    ``before`` it other models compute.
    """
    assert machine.hardware is not None
    figures, seconds = machine.hardware.figures, (best or timeline).step_seconds + before
    waited = {cause: waits for cause, waits in timeline.stalls.items() if waits > 0}
    if best is not None and best.bubble:
        waited["other stages"] = best.bubble
    written = by_name(plan.traffic).get("cpu->nvme", 0) * machine.sharing
    rated = figures.get("nvme_endurance")
    return {
        "schedule": settings.schedule,
        "seconds": seconds,
        "tokens_per_second": (best or timeline).tokens / seconds if seconds else 0.0,
        "seconds_of_others": before,
        "flops_per_second": timeline.flops / seconds if seconds else 0.0,
        "busy": {track.value: s for track, s in sorted(timeline.busy.items(), key=lambda item: -item[1])},
        "waited": waited,
        "mfu": _utilization(machine, plan.trace, timeline.flops / seconds) if seconds else None,
        "nvme_written": written,
        "steps_until_worn": None if rated is None or not written else int(rated.value / written),
    }


def _utilization(machine: Machine, trace: MemoryTrace, flops_per_second: float) -> float | None:
    """Model FLOPs utilization: the FLOP/s without what checkpointing computes again, as a share of the GPU's peak
    (Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311); None where no peak is known.
    """
    kind, figures = trace.arithmetic(trace.precision), machine.hardware.figures if machine.hardware else {}
    peak = figures.get(f"gpu_flops_{'bf16' if kind == 'fp16' else kind}")
    of_all = sum(moment.flops for moment in trace.moments)
    if machine.compute is not Tier.GPU or peak is None or peak.source.startswith("measured") or not of_all:
        return None
    again = sum(moment.flops for moment in trace.moments if moment.phase is Phase.RECOMPUTE)
    return flops_per_second * (1 - again / of_all) / peak.value


FEW_STEPS = 100_000
"""Fewer steps than this until drives are worn out are a warning; of ten times as many nothing is said."""


def screen(report: Report) -> list[RenderableType]:
    """The parts that ``say`` prints, with an empty line between them."""
    found: list[RenderableType] = []
    for part in (_head, _verdict, _mesh, _homes, _in_turn, _facts, _alternatives):
        lines = [*part(report)]
        found += ["", *lines] if lines and found else lines
    return found


def _head(report: Report) -> Iterator[RenderableType]:
    ranks, micro_batches, frozen = report["ranks"], report["accumulate"], report["num_params"] - report["num_trained"]
    of_them = f", {human_count(frozen)} of them frozen" if frozen else ""
    yield f"{report['model']}, {human_count(report['num_params'])} params{of_them}, {report['precision']}"
    but_kept = f" but for {report['kept_blocks']} blocks" if report["kept_blocks"] else ""
    shapes = sorted({"x".join(map(str, shape)) for shape in report["batch"].values()})
    step_words = {
        f"{', '.join(shapes) or 'a batch'} tokens": True,
        f"{micro_batches} micro-batches{' block by block' if report['order'] == 'bfs' else ''}": micro_batches > 1,
        f"gradient checkpointing{but_kept}": report["checkpointing"],
        f"tiles of {tile_words(report['tile_tokens'])}": report["tile_tokens"],
        f"{ranks} {'GPUs' if report['compute'] == 'gpu' else 'processes'}": ranks > 1,
        f"gradients {report['gradients']}": report["gradients"] != "retain",
        f"{report['tokens']:,} tokens a step": micro_batches * ranks > 1 and (report["fits"] or not report["mesh"]),
    }
    yield fact("step", "; ".join(words for words, holds in step_words.items() if holds))
    given = [f"{t} {human_bytes(n)} {report['origins'].get(t, '')}".rstrip() for t, n in report["budgets"].items()]
    given += [f"machine {report['machine']}"] if report["machine"] else []
    yield fact("given, each" if ranks > 1 else "given", "; ".join(given))
    if best := report["fastest"]:
        of_all = f"the quickest of {best['candidates']} ways" if report["step"] else "the largest that fits"
        yield fact("chosen", f"{best['options']} ({of_all}, {best['played']} planned)")


def _verdict(report: Report) -> Iterator[RenderableType]:
    if report["fits"]:
        rule = "" if report["optimizer"] == ADAM.name else f" with {report['optimizer']}"
        of_params = 0 if report["mesh"] else report["num_trained"]
        gradients = report["needs"].get("grad", 0) * report["ranks"] / of_params if of_params else 0
        more = f", and {gradients:.2f} for gradients until the update" if gradients else ""
        yield f"FITS: {report['bytes_per_param']:.2f} bytes per trained param{rule}{more}"
        return
    refusal, _, change = report["refusal"].partition(" Cheapest change: ")
    whose, _, missing = refusal.partition(" does not fit: ")
    whose = f"{whose.partition(LEFT)[0]}{LEFT}: " if LEFT in whose else ""
    yield f"DOES NOT FIT: {whose}{missing}" if missing else f"DOES NOT FIT: {refusal}"
    if change:
        yield fact("cheapest change", in_options(change, "--nvme"))
    needs = report["needs"]
    yield fact("it needs", f"{human_bytes(sum(needs.values()))} for states and gradients: {listed(needs)}")


def _mesh(report: Report) -> Iterator[RenderableType]:
    """The ranks of a mesh: its stages, and what a rank sends."""
    mesh = report["mesh"]
    if mesh is None:
        return
    rank = "a GPU" if report["compute"] == "gpu" else "a rank"
    yield fact("best mesh" if mesh["chosen"] else "mesh", mesh["mesh"])
    if stages := mesh["stages"]:
        rows = [
            (
                f"  {number}",
                f"{stage['first_block']}-{stage['stop_block'] - 1}",
                human_count(stage["num_params"]),
                *map(human_bytes, stage["held"].values()),
                human_seconds(stage["seconds"]),
            )
            for number, stage in enumerate(stages, 1)
        ]
        yield table((f"{rank} of stage", "blocks", "params", *stages[0]["held"], "works"), rows)
    if mesh["bubble"]:
        share = _percent(mesh["bubble"], report["step"]["seconds"])
        yield fact("bubble", f"{human_seconds(mesh['bubble'])} in which the slowest stage waits for others ({share})")
    if mesh["sent"]:
        rows = [(f"  {what}", *map(shown_bytes, both)) for what, both in mesh["sent"].items()]
        yield table((f"{rank} sends for", "in its machine", "to others"), rows)


def _homes(report: Report) -> Iterator[RenderableType]:
    """The homes: a row for each kind of content, a column for each tier."""
    held, update, budgets = report["held"], report["update"], report["budgets"]
    if not held:
        return
    kinds = dict.fromkeys((*report["needs"], *(kind for of_tier in held.values() for kind in of_tier)))
    rows = [
        (f"  {kind}", *(shown_bytes(of_tier.get(kind, 0)) for of_tier in held.values()))
        for kind in kinds
        if any(kind in of_tier for of_tier in held.values())
    ]
    used = {tier: sum(of_tier.values()) for tier, of_tier in held.items()}
    free = {tier: budgets[tier] - num_bytes for tier, num_bytes in used.items()}
    rows.append(("  in all", *map(human_bytes, used.values())))
    rows.append(("  free", *(f"{human_bytes(n)} {_percent(n, budgets[tier]):>4}" for tier, n in free.items())))
    if trained := sum(update.values()):
        rows.append(("  updates run on", *(_percent(update[t], trained) if t in update else "." for t in held)))
    if report["streamed"]:
        streamed = _percent(report["streamed"], trained)
        rows.append(("  of it streamed", *(streamed if tier == report["compute"] else "." for tier in held)))
    yield table(("who lives where", *held), rows, least=(20, *(13 for _ in held)))


def _in_turn(report: Report) -> Iterator[RenderableType]:
    """The models that compute in turn, and what they need room for."""
    models = report["models"]
    for name, each in models.items():
        if name != MAIN:
            kept = ", ".join(f"{human_bytes(n)} on {tier}" for tier, n in each["kept"].items())
            yield fact(
                f"with {name}",
                f"{each['model']}, {human_count(each['num_params'])} params, "
                f"{'trained' if each['trained'] else 'frozen'}; {kept}; gathers {human_bytes(each['at_once'])} at once",
            )
    if models:
        most = max(models, key=lambda name: models[name]["at_once"])
        largest = human_bytes(models[most]["at_once"])
        yield fact("in turn", f"room for the largest working set, {largest} of {most if most != MAIN else 'the model'}")
    if models and report["step"]:
        yield fact("", f"{human_seconds(report['step']['seconds_of_others'])} of a step for the others")


def _facts(report: Report) -> Iterator[RenderableType]:
    beside, step = report["activations"], report["step"]
    words = f"{human_bytes(beside['peak_bytes'])} at the peak"
    if beside["peak_phase"]:
        words += f" (in {beside['peak_phase']} of {beside['peak_module'] or 'the model itself'})"
    if beside["checkpoint_bytes"]:
        of_kept = " and what kept ones save" if report["kept_blocks"] else ""
        words += f", {human_bytes(beside['checkpoint_bytes'])} of it inputs of checkpointed blocks{of_kept}"
    if beside["offloaded_to"]:
        words += f", which wait on {beside['offloaded_to']}"
    yield fact("beside params", words if report["compute"] == "gpu" else f"{words}; on top of the cpu budget")
    if report["fits"]:
        yield fact("moved in a step", listed(report["moved"]))
    if step:
        yield from _time(report, step)
    elif report["fits"] and report["machine"] is None:
        measured = "measure this one with `gemini doctor --measure --json FILE` and give --machine FILE"
        yield fact("step time", f"not known without a machine: --machine NAME, or {measured}")


def _time(report: Report, step: Report) -> Iterator[RenderableType]:
    """How long a step takes, and why."""
    seconds, per_second = step["seconds"], step["tokens_per_second"]
    a_million = f" (a million in {timedelta(seconds=round(1e6 / per_second))})" if per_second else ""
    each = " each" if report["ranks"] > 1 else ""
    mfu = "" if step["mfu"] is None else f" (MFU {step['mfu']:.0%})"
    yield fact(
        "step time",
        f"{human_seconds(seconds)} predicted ({step['schedule']}), {human_rate(per_second)} tokens/s{a_million}, "
        f"{step['flops_per_second'] / 1e12:.3g} TFLOP/s{each}{mfu}",
    )
    busiest = list(step["busy"].items())[:2]
    bounds = (f"{track}, {human_seconds(s)} ({_percent(s, seconds)} of the step)" for track, s in busiest)
    yield fact("bound by", "; then ".join(bounds) or "nothing")
    waited = sorted(step["waited"].items(), key=lambda item: -item[1])[:3]
    if waited and waited[0][1] > 0.01 * seconds:
        yield fact("computing waits", ", ".join(f"{human_seconds(s)} for {cause}" for cause, s in waited))
    worn = step["steps_until_worn"]
    if worn is not None and worn < 10 * FEW_STEPS:
        written = f"{'WARNING: ' if worn < FEW_STEPS else ''}{human_bytes(step['nvme_written'])} written a step"
        yield fact("drives wear", f"{written}: {worn:,} steps until what the drives are rated for")


def _alternatives(report: Report) -> Iterator[RenderableType]:
    """Alternatives: of ``--fastest`` a line each, since all of them fit and compute the same."""
    if report["fastest"]:
        for number, other in enumerate(report["alternatives"] if report["step"] else ()):
            words = f"{other['options']}: {human_rate(other['tokens_per_second'])} tokens/s, {other['result']}"
            yield fact("" if number else "next to it", words)
        for title, lines in ("run it with", [report["fastest"]["command"]]), ("in Python", report["fastest"]["python"]):
            if any(lines):
                yield from ("", title)
                yield from map(Text, lines)
        return
    fits = {True: "yes", False: "no", None: "."}
    rows = [
        (other["options"], other["result"], fits[other["fits"]], human_rate(other["tokens_per_second"]))
        for other in report["alternatives"]
    ]
    if rows:
        yield table(("what else it could do", "result", "fits", "tokens/s"), rows, left=2)


def _percent(part: float, whole: float) -> str:
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}" if whole else "0%"
