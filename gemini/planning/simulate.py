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
    """Predict one optimizer step of ``plan`` on ``hardware``: step time, stalls by cause, bytes moved, memory.

    Ranks are alike, so one is played, with its part of what its machine has (host memory, drives and threads are
    divided among the ranks of a machine, ``num_gpus`` of them at most); what ranks send each other goes around a ring.

    Args:
        plan: what to do; its trace says how much work each moment is. Where the trace was recorded on the kind of
            device that the plan computes on, its seconds are taken as those of this machine.
        hardware: the machine. Figures whose source begins with "measured" are taken as they are, others as peaks.
        schedule: "serial": every move is waited for, and the update comes after backward; "overlapped": moves and
            updates run beside computing, and the time is that of a step among others like it.
        gpus: ranks that share the model; by default those of the plan. A plan of one rank is played as one in which
            ``gpus`` ranks divide every plane of every chunk, all homes and moves as they are; what it keeps on the GPU
            is then gathered from all ranks at each use.
        clipping: whether updates wait for the norm of all gradients (overlapped only); by default they do unless
            the plan's gradients are "transient".
        order: of updates beside computing: "next use", what the next forward reads first goes first, or "fifo", the
            order in which gradients became complete.
        update_threads: threads of an update beside computing on the host, as ``GeminiConfig(update_threads=...)``.
        efficiency: the share of specified peaks that is reached.
        mesh: how the ranks are arranged, where they share more than params: ``dp`` times ``cp`` are those of the plan.
            What slices and parts of sequences send each other is what the trace says; stages are not played together
            (:mod:`gemini.planning.parallel`).

    Returns:
        ``step_seconds`` and all else of one rank, ``tokens`` of all ranks, ``flops`` of one.

    Raises:
        MissingFigure: naming the figure of the hardware and what needs it.
        PlanMismatch: for a plan without moments or work in them, of a tier that the machine does not have or that is
            too small there, or of another number of ranks.
        ValueError: for an unknown schedule or order, or clipping with gradients that are not kept.
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
