"""The second look at a step that was chosen (``GeminiConfig(step="fastest")``): its third is recorded, figures of the
machine are corrected by it, and the number of kept blocks is chosen again by these, with homes as they are.
"""

from __future__ import annotations

import datetime
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from gemini.train.setup.problem import Decision

PAYS = 0.05  # the part of a step that another number of blocks has to save
AFTER = 2  # steps before the one that is recorded


class SecondLook:
    """Looks once at the steps of one model, which it does not hold. ``kept``: the blocks that are kept at first."""

    def __init__(self, model: nn.Module, kept: KeptBlocks | None):
        self._kept = kept
        self._begun = -1  # steps that params had made at first
        self._opened, self._recording = ExitStack(), list[Recording]()
        self._handle = model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.__dict__["_gemini_hooks"].append([self._handle])

    def close(self) -> None:
        """End, and let the model checkpoint as it did."""
        self._opened.close()
        if self._kept is not None:
            self._kept.take_away()

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        engine = engine_of(model)
        made = max(handle.num_steps for handle in engine.params.handles)
        self._begun = made if self._begun < 0 else self._begun
        if engine.store.manager.foresight.is_scoped:
            self._opened.close()
            self._handle.remove()  # block by block: no step that was planned
        elif made - self._begun == AFTER:
            if not (self._recording or engine.forward.observers.recordings):
                self._recording.append(recording := Recording(engine, model, None))
                recording.gives_way = weakref.WeakMethod(self._opened.close)
                self._opened.enter_context(recording.opened(model))
        elif made - self._begun > AFTER:
            self._opened.close()
            self._handle.remove()
            batches = sum(recording.last.num_batches for recording in self._recording if recording.last)
            try:
                if engine.ranks.smallest([batches])[0]:  # else the program records by itself, on some rank
                    self._look(model, engine, self._recording[0].timeline, batches)
            except (GeminiError, ValueError) as e:  # of a step that is not the one which was traced
                warn(f'step="fastest": what was recorded cannot be compared with the plan ({e})')

    def _look(self, model: nn.Module, engine: Engine, measured: Timeline, batches: int) -> None:
        """Compare, correct, choose again, and keep another number of blocks if that pays and has room."""
        decision, hardware = engine.decision, engine.config.hardware
        assert decision.choice is not None and hardware is not None
        schedule = "overlapped" if engine.config.overlap else "serial"
        free = engine.ranks.smallest([engine.store.ledger.free(decision.problem.compute)])[0]
        plan = partial(_with_kept, decision, hardware, schedule, batches, free)
        now = plan(decision.trace)
        predicted = simulate(now, hardware, schedule=schedule)
        corrected = corrected_by(measured, predicted, hardware, engine)
        was = step_seconds(now, corrected, schedule)
        best, seconds = quickest_kept(decision.choice, corrected, schedule, plan)
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
        ledger, problem, number = engine.store.ledger, plan.problem, plan.trace.kept_blocks
        ledger.release(problem.compute, engine.decision.problem.activations, "activations")
        ledger.reserve(problem.compute, problem.activations, "activations")
        moving = problem.moving(plan.placement)
        engine.store.manager.foresight.schedule = Schedule(plan.accesses, plan.moves, moving, plan.again)
        if self._kept is not None:
            self._kept.take_away()
        self._kept = KeptBlocks(model, number) if number else None
        if self._kept is not None:
            model.__dict__["_gemini_hooks"].append(self._kept.handles)
            self._kept.keep(model)
        engine.decision = engine.decision._replace(trace=plan.trace, problem=problem, plan=plan, kept_blocks=number)


def _with_kept(
    decision: Decision, hardware: Hardware, schedule: str, batches: int, free: int, step: MemoryTrace
) -> Plan:
    """Plan ``step``, with another number of blocks kept, every home where it is. Raises BudgetExceeded if that takes
    more than there is and ``free`` bytes.
    """
    there, plan = decision.problem, decision.plan
    assert plan is not None
    problem = replace(there, offloaded=step.checkpoint_bytes if there.offload_to else 0)
    if there.compute is Tier.GPU:
        flights = working.flight_bytes(step) if there.flights else 0
        takes = working.activation_bytes(step, offloaded=there.offload_to is not None)
        problem = replace(problem, activations=takes, flights=flights)
        if takes + flights > there.activations + there.flights + free:
            raise BudgetExceeded("activations have no more room while others are where they are")
    speeds = Speeds.of(hardware, there.budgets)
    planner = Planner(step, speeds, accumulate=batches, schedule=schedule, hardware=hardware)
    return planner.with_moves(problem, decision.placement, plan.offload_activations)


def corrected_by(measured: Timeline, predicted: Timeline, hardware: Hardware, engine: Engine) -> Hardware:
    """The machine on which each track would have taken what it took, on the slowest rank."""
    kind = engine.decision.problem.compute.value
    memory = "gpu_bandwidth" if kind == "gpu" else "dram_bandwidth"
    figures = {track: [hardware.sustained(boundary.way.figure)] for boundary, track in TRACKS.items()} | {
        Track.COMPUTE: [*(key for key in FIGURES if key.startswith(f"{kind}_flops")), f"{kind}_op_seconds", memory],
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
