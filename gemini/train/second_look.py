"""The second look at a step that was chosen (``GeminiConfig(step="fastest")``): its third is recorded, figures of the
machine are corrected by it, and the number of kept blocks is chosen again by these, with homes as they are.
"""

from __future__ import annotations

import datetime
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.errors import BudgetExceeded, GeminiError, warn
from gemini.memory.movement.foresight import Schedule
from gemini.planning import working
from gemini.planning.costs import Speeds
from gemini.planning.hardware import FIGURES, Hardware
from gemini.planning.plan import Plan
from gemini.planning.planner import Planner
from gemini.planning.quickest import quickest_kept
from gemini.planning.simulate import simulate, step_seconds
from gemini.planning.timeline import TRACKS, Timeline, Track, human_seconds
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier
from gemini.train.activations.kept import KeptBlocks
from gemini.train.engine import Engine, engine_of
from gemini.train.report import Recording

PAYS = 0.05  # the part of a step that another number of blocks has to save
AFTER = 2  # steps before the one that is recorded


class SecondLook:
    """Keeps the blocks of one model, which it does not hold, and looks once."""

    def __init__(self) -> None:
        self._kept: KeptBlocks | None = None
        self._begun, self._batches = -1, 0  # steps that params had made at first; batches of the one that is recorded
        self._opened, self._recording = ExitStack(), list[Recording]()
        self._handle: Any = None

    def keep(self, model: nn.Module, number: int) -> None:
        """Keep so many blocks from here on."""
        self.take_away()
        if number:
            self._kept = KeptBlocks(model, number)
            self._kept.keep(model)
            model.__dict__["_gemini_hooks"] += self._kept.handles

    def take_away(self) -> None:
        """Let the model checkpoint as it did."""
        if self._kept is not None:
            self._kept.take_away()
            self._kept = None

    def watch(self, model: nn.Module) -> None:
        """Look when the time has come."""
        self._handle = model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.__dict__["_gemini_hooks"].append(self._handle)

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        engine, trains = engine_of(model), torch.is_grad_enabled()
        made = max(handle.num_steps for handle in engine.params.handles)
        self._begun = made if self._begun < 0 else self._begun
        if trains and made - self._begun == AFTER:
            if not (self._recording or engine.forward.observers.recordings):
                self._recording.append(self._opened.enter_context(Recording(engine, model, None).opened(model)))
            self._batches += 1
        elif trains and made - self._begun > AFTER:
            self._handle.remove()
            self._opened.close()
            try:
                if engine.ranks.smallest([len(self._recording)])[0]:  # else the program records by itself, on some rank
                    self._look(model, engine, self._recording[0].timeline)
            except (GeminiError, ValueError) as e:  # of a step that is not the one which was traced
                warn(f'step="fastest": what was recorded cannot be compared with the plan ({e})')

    def _look(self, model: nn.Module, engine: Engine, measured: Timeline) -> None:
        """Compare, correct, choose again, and keep another number of blocks if that pays and has room."""
        decision, config = engine.decision, engine.config
        choice, hardware, there, batches = decision.choice, config.hardware, decision.problem, self._batches
        assert choice is not None and hardware is not None and decision.plan is not None
        speeds, away = Speeds.of(hardware, there.budgets), decision.plan.offload_activations
        schedule = "overlapped" if config.overlap else "serial"
        room = there.activations + engine.ranks.smallest([engine.store.ledger.free(there.compute)])[0]

        def plan(step: MemoryTrace) -> Plan:
            problem = replace(there, offloaded=step.checkpoint_bytes if there.offload_to else 0)
            if there.compute is Tier.GPU:
                flights = working.flight_bytes(step) if there.flights else 0
                takes = working.activation_bytes(step, offloaded=there.offload_to is not None)
                problem = replace(problem, activations=takes, flights=flights)
                if takes + flights - there.flights > room:
                    raise BudgetExceeded("activations have no more room while others are where they are")
            planner = Planner(step, speeds, accumulate=batches, schedule=schedule, hardware=hardware)
            return planner.with_moves(problem, decision.placement, away)

        now = plan(decision.trace)
        predicted = simulate(now, hardware, schedule=schedule)
        corrected = corrected_by(measured, predicted, hardware, engine)
        was = step_seconds(now, corrected, schedule)
        best, seconds = quickest_kept(choice, corrected, schedule, plan)
        found = {"measured": measured.step_seconds, "predicted": predicted.step_seconds, "corrected": was}
        engine.decision = decision._replace(compared={**found, "hardware": corrected})
        took, told = (human_seconds(found[name]) for name in ("measured", "predicted"))
        said = f'step="fastest": a step took {took} as it was recorded, and {told} was predicted. '
        if seconds < (1 - PAYS) * was:
            self._switch(model, engine, best)
            kept = f"{best.trace.kept_blocks} blocks are kept in place of {decision.kept_blocks}"
            said += f"From here on {kept}, which is to take {seconds / was:.0%} of the time. "
        warn(f"{said}memory_report()['step']['hardware'] is the machine by that step, for other runs")

    def _switch(self, model: nn.Module, engine: Engine, plan: Plan) -> None:
        """Keep the blocks of ``plan``. Between two steps nothing is saved, so nothing has to move."""
        ledger, problem, kept = engine.store.ledger, plan.problem, plan.trace.kept_blocks
        ledger.release(problem.compute, engine.decision.problem.activations, "activations")
        ledger.reserve(problem.compute, problem.activations, "activations")
        moving = problem.moving(plan.placement)
        engine.store.manager.foresight.schedule = Schedule(plan.accesses, plan.moves, moving, plan.again)
        self.keep(model, kept)
        engine.decision = engine.decision._replace(trace=plan.trace, problem=problem, plan=plan, kept_blocks=kept)


def corrected_by(measured: Timeline, predicted: Timeline, hardware: Hardware, engine: Engine) -> Hardware:
    """The machine on which each track would have taken what it took, on the slowest rank."""
    kind = engine.decision.problem.compute.value
    memory = "gpu_bandwidth" if kind == "gpu" else "dram_bandwidth"
    figures = {track: [hardware.sustained(boundary.way.figure)] for boundary, track in TRACKS.items()} | {
        Track.COMPUTE: [f"{kind}_flops_bf16", f"{kind}_flops_fp32", f"{kind}_op_seconds", memory],
        Track.UPDATE: ["update_cpu", "update_cpu_one", "update_gpu"],
    }
    both = measured.busy.keys() & predicted.busy.keys()
    times = [measured.busy[track] / predicted.busy[track] if track in both else 0.0 for track in figures]
    slowest = engine.ranks.smallest([int(-1e6 * each) for each in times])
    for keys, by in zip(figures.values(), slowest, strict=True):
        for key in keys if by else ():
            if hardware.has(key):
                old, power = hardware.figures[key], -1 if "/s" in FIGURES[key] else 1
                # A figure that was measured is measured now; of a peak the same share is reached as before.
                source = f"{old.source}, corrected by a step on {datetime.date.today()}"
                hardware = hardware.with_figures(source, **{key: old.value * (by / -1e6) ** power})
    return hardware
