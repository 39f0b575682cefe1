"""The plan: made by the planner, executed by ``GeminiDDP``, played by the simulator, printed by ``gemini plan``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from gemini.errors import PlanMismatch, human_bytes, listed
from gemini.planning.document import Document, read
from gemini.planning.layout import Layout
from gemini.planning.placement import Placement, Problem, bytes_per_tier
from gemini.planning.planes import ADAM, GRADS, RuleSpec
from gemini.planning.trace import Access, MemoryTrace, accesses
from gemini.planning.traffic import Traffic, step_traffic, update_tier
from gemini.tiers import DRIVE, Tier

SCHEDULES = ("serial", "overlapped")
"""One thing at a time, or whatever may run beside computing."""


class Moves(NamedTuple):
    """The moves at the beginning of a moment: drop the gathered weights of the chunks in ``evict``, then gather those
    of the chunks in ``fetch``.
    """

    evict: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan(Document, kind="plan"):
    """The places where everything is stored, and what moves when. Made by :func:`gemini.plan`.

    Attributes:
        trace: the step that it is for.
        problem: layout, precision, budgets, and the bytes that are reserved for other uses.
        placement: the home tier of every plane of every chunk.
        moves: one :class:`Moves` per moment of the trace, for the first micro-batch of a step. At its beginning,
            gathered weights of frozen chunks are still there from the step before; those of trained chunks are not, as
            the update has changed them.
        again: the same for all further micro-batches of a step, where gathered weights of trained chunks are still
            there too. Empty if it equals ``moves``.
        offload_activations: where the inputs of checkpointed blocks are kept: None (where they are), "cpu" or "nvme".
        accumulate: micro-batches per optimizer step.
    """

    trace: MemoryTrace
    problem: Problem
    placement: Placement
    moves: tuple[Moves, ...]
    offload_activations: str | None = None
    accumulate: int = 1
    again: tuple[Moves, ...] = ()

    def moves_of(self, batch: int) -> tuple[Moves, ...]:
        """The moves of one micro-batch of a step, counted from 0."""
        return self.again or self.moves if batch else self.moves

    @property
    def layout(self) -> Layout:
        return self.problem.layout

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The chunks that each moment of the trace needs."""
        return accesses(self.trace, self.layout)

    @property
    def bytes_per_tier(self) -> dict[Tier, int]:
        """Bytes of each tier at its fullest: planes, gathered weights, staging, activations."""
        return bytes_per_tier(self.problem, self.placement)

    @property
    def held(self) -> dict[Tier, dict[str, int]]:
        """By tier, what ``bytes_per_tier`` is made of: planes, then what is spoken for besides."""
        return self.problem.held(self.placement)

    @property
    def bytes_per_param(self) -> float:
        """Persistent bytes (weights, residual, moments) per trained param."""
        trained = [i for i, chunk in enumerate(self.layout.chunks) if chunk.trainable]
        states = (n for i in trained for k, n in self.problem.sizes[i].items() if k not in GRADS)
        payload = sum(self.layout.chunks[i].payload for i in trained)
        return (sum(states) * self.layout.ranks + self.problem.factors) / payload if payload else 0.0

    @property
    def committed_bytes(self) -> int:
        """Bytes that a commit to a durable store writes beside its record: trained planes that do not live on NVMe."""
        return sum(
            num_bytes
            for index, homes in enumerate(self.placement.homes)
            for kind, num_bytes in self.problem.durable_bytes(index).items()
            if homes[kind] is not DRIVE and self.layout.chunks[index].trainable
        )

    def update_tier(self, index: int) -> Tier:
        """The tier on which the update of a chunk runs."""
        return update_tier(self.problem, self.placement.homes[index], streamed=index in self.placement.streamed)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes over each boundary in one optimizer step (of offloaded activations: not in here)."""
        fetched = [i for batch in range(self.accumulate) for moves in self.moves_of(batch) for i in moves.fetch]
        return step_traffic(self.problem, self.placement, fetched, backwards=self.accumulate)

    def _to_body(self) -> dict[str, Any]:
        """Write of the problem what the trace does not say: its layout is cut anew when the plan is read."""
        problem = {field.name: getattr(self.problem, field.name) for field in fields(self.problem)}
        del problem["layout"]
        spoken_for = {name: problem.pop(name) for name in _SPOKEN_FOR}
        return msgspec.to_builtins(  # type: ignore[no-any-return]
            {
                **problem,
                "trace": self.trace.to_json(),
                "ranks": self.layout.ranks,
                "rule": self.problem.rule.to_body(),
                "spoken_for": spoken_for,
                "homes": self.placement.homes,
                "streamed": sorted(self.placement.streamed),
                "moves": self.moves,
                "again": self.again,
                "offload_activations": self.offload_activations,
                "accumulate": self.accumulate,
            },
            str_keys=True,
        )

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Plan:
        trace = MemoryTrace.from_json(body["trace"])
        rule = RuleSpec.from_body(body["rule"]) if "rule" in body else ADAM  # older plans are Adam's
        layout = trace.layout(ranks=body["ranks"], max_chunk=body["max_chunk"], rule=rule)
        problem = read({**body, **body["spoken_for"], "rule": rule, "layout": layout}, Problem)
        placement = read(body, Placement)
        plan = super()._from_body({**body, "trace": trace, "problem": problem, "placement": placement})
        per_moment = {len(plan.moves), len(plan.again or plan.moves)}
        if len(placement.homes) != len(layout.chunks) or per_moment != {len(trace.moments)}:
            raise ValueError("it does not have one home per chunk, or one list of moves per moment")
        return plan

    def check_settings(self, **settings: Any) -> None:
        """Refuse a plan made for other settings (``precision=``, ``gradients=``, ``ranks=``, ``max_chunk=``). Raises
        PlanMismatch naming the setting and both values.
        """
        ours = {"ranks": self.layout.ranks, **vars(self.problem)}
        for name, value in settings.items():
            if ours[name] != value:
                was, here = (of.name if isinstance(of, RuleSpec) else of for of in (ours[name], value))
                raise PlanMismatch(
                    f"the plan was made for {name}={was!r}, and here it is {here!r}: make a plan with "
                    f"{name}={here!r}, or set {name}={was!r} here as well"
                )

    def __str__(self) -> str:
        """Bytes that each tier holds, against the budgets."""
        lines = [f"{self.trace.model}, {self.trace.num_params:,} params: {self.bytes_per_param:.2f} bytes each"]
        for tier, used in self.bytes_per_tier.items():
            lines.append(
                f"{tier.value:<5}{human_bytes(used):>11} of {human_bytes(self.problem.budgets[tier]):>10}  "
                f"{listed(self.held.get(tier, {}))}"
            )
        on_gpu = sum(self.update_tier(i) is Tier.GPU for i, c in enumerate(self.layout.chunks) if c.trainable)
        trained = sum(chunk.trainable for chunk in self.layout.chunks)
        if on_gpu:
            streamed = len(self.placement.streamed)
            note = f", {streamed} of them streamed" if streamed else ""
            lines.append(f"{self.problem.rule.name} runs on the GPU for {on_gpu} of {trained} chunks{note}")
        lines.append(f"moved in a step: {listed(self.traffic)}")
        if self.problem.durable:
            behind = self.committed_bytes
            what = f"{human_bytes(behind)} that live in memory" if behind else "nothing but its record"
            lines.append(f"a commit to the durable store writes {what}")
        return "\n".join(lines)


_COUNTS = ("max_chunk", "sharing")
_SPOKEN_FOR = [field.name for field in fields(Problem) if field.type == "int" and field.name not in _COUNTS]
"""Fields of a problem that are bytes; they stand together in a file."""


def window_room(problem: Problem, placement: Placement) -> int:
    """Bytes of the computing tier that gathered weights may take at once."""
    free = problem.budgets[problem.compute] - bytes_per_tier(problem, placement).get(problem.compute, 0)
    gathers = bool(problem.moving(placement))
    room = max(free - problem.waiting_in(placement), 0) + problem.for_windows(gathers=gathers)
    # On a GPU windows have memory of their own: what another model needs stays with it, if there is as much.
    return max(room - problem.others, problem.working_set) if problem.compute is Tier.GPU and gathers else room


def standing(plan: Plan) -> tuple[int, ...]:
    """Frozen chunks whose gathered weights stay from one step to the next."""
    return there_before(plan.accesses, plan.moves, plan.problem.moving(plan.placement))


def there_before(accesses: Sequence[Access], moves: Sequence[Moves], among: Container[int]) -> tuple[int, ...]:
    """The chunks that moves count on when they begin: those let go or used before a fetch."""
    seen: set[int] = set()
    stay: list[int] = []
    for access, now in zip(accesses, moves, strict=True):
        seen |= set(now.fetch)
        new = [i for i in dict.fromkeys((*now.evict, *access.chunks)) if i not in seen and i in among]
        stay += new
        seen.update(new)
    return tuple(stay)
