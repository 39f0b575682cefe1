"""Plays a plan on a machine, one optimizer step from its first moment to the first moment of the next: a Timeline.

    timeline = gemini.simulate(plan, hardware, schedule="overlapped")
    print(timeline)

Nothing of a model is needed, no torch, no GPU: a plan, the figures of a machine, and a fluid model of what they share.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import PlanMismatch, human_bytes
from gemini.planning.costs import Costs, Efficiency
from gemini.planning.hardware import Hardware
from gemini.planning.mesh import Grid, MeshSizes
from gemini.planning.outcome import timeline_of
from gemini.planning.plan import Moves, Plan
from gemini.planning.planes import WEIGHTS
from gemini.planning.schedules import overlapped, serial
from gemini.planning.timeline import Timeline
from gemini.planning.work import Work
from gemini.tiers import Tier

SCHEDULES = ("serial", "overlapped")
ORDERS = ("next use", "fifo")


def simulate(
    plan: Plan,
    hardware: Hardware,
    *,
    schedule: str = "overlapped",
    gpus: int | None = None,
    clipping: bool | None = None,
    order: str = "next use",
    update_threads: int | None = None,
    efficiency: Efficiency | None = None,
    mesh: MeshSizes | None = None,
) -> Timeline:
    """Predict one optimizer step of ``plan`` on ``hardware``: its time, stalls by cause, moved bytes and memory.

    One rank is simulated, as all do the same. The ranks of one machine (at most its ``num_gpus``) share its host
    memory, drives and CPU threads equally. Communication among ranks uses rings.

    Args:
        plan: what to simulate. Its trace has the work of each module. If the trace was recorded on the kind of device
            that the plan computes on, the recorded seconds are used.
        hardware: the machine. Measured values (those whose source begins with "measured") are used as they are; all
            others are peaks and are multiplied by ``efficiency``.
        schedule: "overlapped": moves and updates run at the same time as computing, and the time is that of one step in
            a long run. "serial": every move is waited for, and updates run after backward.
        gpus: the number of ranks that share the model. By default that of the plan. A plan for one rank can be
            simulated for more: ``gpus`` ranks then divide every chunk, and homes and moves stay the same.
        clipping: whether updates wait for the norm of all gradients (only "overlapped"). By default True, except with
            ``gradients="transient"``.
        order: which updates run first during computing: "next use", those that the next forward needs first, or "fifo",
            in the order in which gradients are complete.
        update_threads: CPU threads for updates during computing, as in ``GeminiConfig(update_threads=...)``.
        efficiency: which share of the peak values is reached, between 0 and 1 each.
        mesh: the sizes of all mesh dimensions; ``dp`` times ``cp`` must be the number of ranks of the plan.
            Communication of tensor and context parallel is taken from the trace. For pipeline stages use
            :mod:`gemini.planning.parallel`.

    Returns:
        A :class:`Timeline`. Its times (seconds), bytes and ``flops`` are those of one rank; its ``tokens`` are those of
        all.

    Raises:
        MissingFigure: if the hardware lacks a value; the message names it and what needs it.
        PlanMismatch: if the plan's trace has no work in it, the plan needs a tier or more memory than the machine has,
            or is for another number of ranks.
        ValueError: for an unknown schedule or order, or for clipping with gradients that are not kept.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: choose one of {', '.join(map(repr, ORDERS))}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    if clipping and plan.problem.gradients == "transient":
        raise ValueError('clipping needs the gradients of the whole model, and gradients="transient" keeps none')
    plan = _shared_by(plan, gpus)
    ranks = plan.layout.ranks
    mesh = MeshSizes(dp=ranks) if mesh is None else mesh
    if mesh.shards != ranks:
        raise PlanMismatch(f"the plan is for {ranks} ranks that share params, and a mesh of {mesh} has {mesh.shards}")
    local_ranks = _ranks_of_one_machine(plan, hardware, mesh.ranks)
    _check(plan, hardware, local_ranks)
    costs = Costs(
        hardware,
        efficiency or Efficiency(),
        compute=plan.problem.compute,
        precision=plan.problem.precision,
        local_ranks=local_ranks,
        beside=schedule == "overlapped",
        update_threads=update_threads,
    )
    recorded_here = (plan.trace.target == "cpu") == (plan.problem.compute is Tier.CPU)
    work = Work(plan, costs, Grid(mesh, local_ranks), measured=recorded_here and plan.trace.seconds is not None)
    if schedule == "serial":
        graph = serial(work)
    else:
        clips = plan.problem.gradients != "transient" if clipping is None else clipping
        graph = overlapped(work, clipping=clips, order=order)
    title = f"{plan.trace.model} on {f'{ranks} x ' if ranks > 1 else ''}{hardware.name}, {schedule}"
    return timeline_of(graph, title=title, is_serial=schedule == "serial")


def _shared_by(plan: Plan, gpus: int | None) -> Plan:
    """The plan with its planes divided among so many ranks."""
    ranks = plan.layout.ranks
    if gpus is None or gpus == ranks:
        return plan
    if gpus < 1:
        raise ValueError(f"gpus={gpus}: a model needs at least one rank")
    if ranks > 1:
        raise PlanMismatch(
            f"the plan is for {ranks} ranks, and gpus={gpus} were asked for: make a plan for {gpus} ranks, or leave "
            "gpus out"
        )
    layout = plan.trace.layout(ranks=gpus, max_chunk=plan.problem.max_chunk, rule=plan.problem.rule)
    problem = replace(plan.problem, layout=layout)
    stood = {
        index
        for index, homes in enumerate(plan.placement.homes)
        if not plan.problem.needs_window(index, homes[WEIGHTS])
    }

    def with_those(moves: tuple[Moves, ...]) -> tuple[Moves, ...]:
        found, before = [], frozenset[int]()
        for access, planned in zip(plan.accesses, moves, strict=True):
            now = frozenset(access.chunks) & stood
            found.append(Moves((*planned.evict, *sorted(before - now)), (*planned.fetch, *sorted(now - before))))
            before = now
        return tuple(found)

    again = with_those(plan.again) if plan.again else ()
    return replace(plan, problem=problem, moves=with_those(plan.moves), again=again)


def _ranks_of_one_machine(plan: Plan, hardware: Hardware, ranks: int) -> int:
    if ranks == 1 or plan.problem.compute is Tier.CPU:
        return ranks
    return min(ranks, int(hardware.get("num_gpus", needed_for=f"dividing a machine among {ranks} ranks")))


_FIGURES_OF = {
    Tier.GPU: ("gpu_bytes", "gpu_flops_bf16", "gpu_flops_fp32", "gpu_bandwidth"),
    Tier.CPU: (),
    Tier.NVME: ("nvme_bytes", "nvme_read", "nvme_write"),
}


def _check(plan: Plan, hardware: Hardware, local_ranks: int) -> None:
    """Refuse what cannot be played."""
    moments = plan.trace.moments
    if not moments:
        raise PlanMismatch(
            f"the trace of {plan.trace.model} has no moments: there is no step to simulate. Trace it anew"
        )
    if not any(moment.seconds or moment.flops or moment.touched_bytes for moment in moments):
        raise PlanMismatch(
            f"the trace of {plan.trace.model} says what is read in each moment, but not how much work it is: make one "
            "with gemini.trace, or record one with gemini.MemoryTracer"
        )
    for tier, num_bytes in plan.bytes_per_tier.items():
        if not num_bytes:
            continue
        figures = _FIGURES_OF[tier]
        if figures and not any(hardware.has(figure) for figure in figures):
            raise PlanMismatch(
                f"the plan uses {human_bytes(num_bytes)} of {tier.value}, and hardware {hardware.name!r} has none: "
                f"make a plan for this machine, or give it {', '.join(figures)}"
            )
        whole = hardware.capacity(tier)
        needed = num_bytes * (1 if tier is Tier.GPU else local_ranks)
        if whole is not None and needed > 1.01 * whole:  # a GPU of "24 GiB" has 23.99
            raise PlanMismatch(
                f"the plan needs {human_bytes(needed)} of {tier.value} on one machine, and hardware "
                f"{hardware.name!r} has {human_bytes(whole)}: make a plan for this machine"
            )
