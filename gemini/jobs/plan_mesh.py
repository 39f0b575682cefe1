"""``gemini plan`` over a mesh: the step of each stage with slices and parts of sequences, or the best mesh there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console

import gemini
from gemini.errors import BudgetExceeded, GeminiError
from gemini.jobs.errors import JobError
from gemini.jobs.plan_machine import Machine
from gemini.jobs.plan_report import MeshReport, PlanReport, RunnerUp, StageReport, report_of
from gemini.jobs.plan_screen import screen
from gemini.jobs.plan_settings import PlanSettings
from gemini.jobs.step_files import say, stdout_closed_to_others, write_all
from gemini.jobs.trace import params_of, take_trace
from gemini.planning.hardware import Hardware
from gemini.planning.mesh import MeshSizes
from gemini.planning.parallel import MeshOutcome, least_seconds, play_mesh
from gemini.planning.plan import Plan
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier

RUNNERS_UP = 4
"""Meshes that ``--parallel auto`` shows beside the best one."""

MOST_PLAYED = 8
"""Meshes that it plays at most: those whose steps take least by their computing and bubble alone."""


_WHOLE = "which looks at whole params, and slices leave a part of each on a rank"


class Candidate(NamedTuple):
    """A mesh, the micro-batches of a step on it, and no more seconds than a step can take."""

    sizes: MeshSizes
    micro_batches: int
    trace: MemoryTrace
    least: float


def plan_over_mesh(settings: PlanSettings, machine: Machine, console: Console) -> int:
    """Plan and say it; returns the exit code, of :attr:`PlanReport.exit_code`."""
    if machine.hardware is None:
        raise JobError("A plan over a mesh needs the speeds of a machine and of its wires: --machine NAME or FILE.")
    over = _OverMesh(settings, machine, machine.hardware)
    with Console(stderr=True).status("playing steps over meshes"):
        found, refusal = over.best() if settings.parallel else over.as_asked()
    report = over.report(found, refusal)
    if settings.json:
        print(report.to_json())
    else:
        say(console, screen(report))
    if found:
        write_all(settings, "", found[0].slowest.timeline, console)
    return report.exit_code


class _OverMesh:
    """What was asked, and the traces that were taken for it."""

    def __init__(self, settings: PlanSettings, machine: Machine, hardware: Hardware):
        from gemini.jobs.models import find_config

        assert settings.config is not None
        self._settings, self._machine, self._hardware = settings, machine, hardware
        config = find_config(settings.config, settings.layers).config
        self._config, self._in_two = config.get_text_config(), bool(getattr(config, "is_encoder_decoder", False))
        self._traces: dict[tuple[int, int], MemoryTrace] = {}
        self._whole = params_of(settings.config, settings.layers, settings.precision or "bf16")
        self._refused = ""

    def as_asked(self) -> tuple[list[MeshOutcome], BudgetExceeded | None]:
        """The step over the mesh that was asked for."""
        settings = self._settings
        own = settings.pp * settings.cp * settings.tp
        if settings.gpus % own:
            raise JobError(
                f"--gpus {settings.gpus} with {_options(settings)}, which are {own} GPUs together: a multiple of {own}."
            )
        sizes = MeshSizes(settings.pp, settings.gpus // own, settings.cp, settings.tp)
        if settings.accumulate < sizes.pp:
            raise JobError(
                f"--pp {sizes.pp} with --accumulate {settings.accumulate}: a pipeline takes a micro-batch for each of "
                f"its stages at least, --accumulate {sizes.pp}."
            )
        if sizes.pp > 1 and self._in_two:
            raise JobError(
                f"--pp {sizes.pp}: this model is an encoder-decoder, whose decoder reads in every block what the "
                "encoder gives, which a pipeline does not hand on. Use --tp, or data parallel alone."
            )
        rule = settings.rule_in(settings.precision or "bf16")
        if sizes.tp > 1 and rule.whole:
            raise JobError(f"--tp {sizes.tp} with --optimizer {settings.optimizer}, {_WHOLE}.")
        try:
            return [self._play(sizes, settings.accumulate)], None
        except BudgetExceeded as e:
            self._refused = str(sizes)
            return [], e
        except ValueError as e:
            raise JobError(f"{_options(settings)}: {e}.") from e

    def best(self) -> tuple[list[MeshOutcome], BudgetExceeded | None]:
        """The meshes whose steps are the shortest, of those on which it fits. Meshes are played in the order of what
        their steps take at least, until no other one can be among the best, or ``MOST_PLAYED`` are.
        """
        candidates = sorted(self._candidates(), key=lambda candidate: candidate.least)
        if not candidates:
            raise JobError(f"--parallel auto: no mesh of {self._settings.gpus} GPUs goes with this model.")
        found: list[MeshOutcome] = []
        refusal: BudgetExceeded | None = None
        unsuited: ValueError | None = None
        for candidate in candidates:
            is_known = len(found) > RUNNERS_UP and candidate.least > found[RUNNERS_UP].step_seconds
            if is_known or len(found) == MOST_PLAYED:
                break
            try:
                found.append(self._play(candidate.sizes, candidate.micro_batches, ends=True))
                found.sort(key=lambda outcome: outcome.step_seconds)
            except BudgetExceeded as e:
                refusal, self._refused = refusal or e, self._refused or str(candidate.sizes)
            except ValueError as e:
                unsuited = e
        if unsuited is not None and not found and refusal is None:
            raise JobError(f"--parallel auto: {unsuited}.") from unsuited
        if found and found[0].sizes.pp > 2:
            found[0] = self._play(found[0].sizes, found[0].micro_batches)
        return found, None if found else refusal

    def _candidates(self) -> Iterator[Candidate]:
        """Every mesh of the powers of two (and what is left) that the model goes with; a step has the sequences that
        all GPUs would take without slices, parts and stages.
        """
        gpus, machine = self._settings.gpus, self._machine
        whole = self._settings.rule_in(self._settings.precision or "bf16").whole
        for tp in _powers(1 if whole else min(gpus, machine.sharing)):
            for cp in _powers(gpus // tp):
                try:
                    trace = self._trace(tp, cp)
                except (JobError, GeminiError, ValueError):
                    continue  # heads or lengths that do not divide, attention that has no parts
                most = 1 if self._in_two else getattr(self._config, "num_hidden_layers", 1)
                for pp in _powers(min(gpus // (tp * cp), most)):
                    if gpus % (tp * cp * pp):
                        continue
                    sizes = MeshSizes(pp, gpus // (tp * cp * pp), cp, tp)
                    micro_batches = self._settings.accumulate * pp * cp * tp
                    least = least_seconds(trace, self._hardware, sizes, micro_batches, per_machine=machine.sharing)
                    yield Candidate(sizes, micro_batches, trace, least)

    def _trace(self, tp: int, cp: int) -> MemoryTrace:
        if (tp, cp) not in self._traces:
            traced = self._settings.traced(target=self._machine.target)
            self._traces[tp, cp] = take_trace(replace(traced, tp=tp, cp=cp))
        return self._traces[tp, cp]

    def _play(self, sizes: MeshSizes, micro_batches: int, *, ends: bool = False) -> MeshOutcome:
        """``ends``: of stages, only the first and the last."""
        settings, machine = self._settings, self._machine
        offload = None if settings.offload_activations == "no" else settings.offload_activations

        def make(trace: MemoryTrace, accumulate: int, order: str) -> Plan:
            in_parts = sizes.pp > 1 or accumulate > 1
            with stdout_closed_to_others():
                return gemini.plan(
                    trace, self._hardware, machine.budgets,
                    gradients=settings.gradients or ("accumulate" if in_parts else "retain"),
                    optimizer=settings.rule_in(trace.precision), compute=machine.compute,
                    # Of 1F1B some micro-batches wait at once, whose inputs no plan of one knows.
                    offload_activations=None if order == "1f1b" else offload,
                    accumulate=accumulate, ranks=sizes.shards, local_ranks=machine.sharing, schedule=settings.schedule,
                )  # fmt: skip

        return play_mesh(
            self._trace(sizes.tp, sizes.cp), self._hardware, sizes, make, micro_batches=micro_batches,
            width=self._config.hidden_size, per_machine=machine.sharing, schedule=settings.schedule,
            ends=ends,
        )  # fmt: skip

    # ---- what is said --------------------------------------------------------------------------------------------

    def report(self, found: list[MeshOutcome], refusal: BudgetExceeded | None) -> PlanReport:
        settings = self._settings
        best = found[0] if found else None
        plan = None if best is None else best.slowest.plan
        trace = next(iter(self._traces.values())) if plan is None else plan.trace
        timeline = None if best is None else best.slowest.timeline
        report = report_of(settings, self._machine, trace, plan, timeline, refusal=refusal)
        step = report.step
        if best is not None and step is not None:
            waited = {**step.waited, "other stages": best.bubble} if best.bubble else step.waited
            longer = best.step_seconds / best.slowest.timeline.step_seconds
            report = replace(report, step=replace(
                step, seconds=best.step_seconds, tokens_per_second=best.tokens_per_second,
                flops_per_second=best.slowest.timeline.flops / best.step_seconds, waited=waited,
                mfu=None if step.mfu is None else step.mfu / longer,
            ))  # fmt: skip
        return replace(
            report, batch=self._batch(), tokens=report.tokens if best is None else best.tokens,
            mesh=self._mesh_report(best, found[1 : RUNNERS_UP + 1]),
        )  # fmt: skip

    def _batch(self) -> dict[str, tuple[int, ...]]:
        """Of a micro-batch, whole."""
        trace = next(iter(self._traces.values()))
        samples, length = next(shape for shape in trace.batch.values() if len(shape) > 1)
        return {"input_ids": (samples, length * trace.context_parallel)}

    def _mesh_report(self, best: MeshOutcome | None, others: list[MeshOutcome]) -> MeshReport:
        if best is None:
            whole = self._whole.num_params
            return MeshReport(self._refused, self._settings.gpus, whole, "", self._settings.accumulate)
        stages = tuple(
            StageReport(
                *stage.blocks, stage.plan.trace.num_params,
                {tier.value: n for tier, n in stage.plan.bytes_per_tier.items()},
                stage.timeline.step_seconds,
            )
            for stage in best.stages
        )  # fmt: skip
        return MeshReport(
            str(best.sizes), best.sizes.ranks, self._whole.num_params, best.order, best.micro_batches,
            stages if best.sizes.pp > 1 else (), best.bubble, dict(best.sent), tuple(map(self._runner_up, others)),
            chosen=bool(self._settings.parallel),
        )  # fmt: skip

    def _runner_up(self, outcome: MeshOutcome) -> RunnerUp:
        most = max(outcome.stages, key=lambda stage: stage.plan.bytes_per_tier.get(Tier.GPU, 0)).plan
        used = most.bytes_per_tier.get(self._machine.compute, 0)
        return RunnerUp(str(outcome.sizes), outcome.order, outcome.micro_batches, outcome.tokens_per_second, used)


def _options(settings: PlanSettings) -> str:
    return " ".join(f"--{name} {size}" for name in ("tp", "pp", "cp") if (size := getattr(settings, name)) > 1)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
