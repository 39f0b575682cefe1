"""Numbers that no plan and no trace has are refused in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import gemini
from gemini.errors import PlanMismatch
from gemini.planning.trace import MemoryTrace
from tests.planning.stacks import stack_trace

BUDGETS = {gemini.Tier.GPU: 2**40, gemini.Tier.CPU: 2**40}


@pytest.mark.parametrize("name", ["max_chunk", "accumulate", "ranks", "local_ranks"])
def test_of_what_there_must_be_some_there_are_none(name: str) -> None:
    for count in (-1, 0):
        if (name, count) != ("local_ranks", 0):  # all
            with pytest.raises(ValueError, match=f"{name}={count}: it is at least 1"):
                gemini.plan(stack_trace(2), None, BUDGETS, **{name: count})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["params", "gradients"])
def test_a_param_before_the_first_is_damage(field: str) -> None:
    trace = stack_trace(2)
    assert MemoryTrace.from_json(trace.to_json()) == trace
    wrong: dict[str, Any] = {field: (-1,)}
    damaged = replace(trace, moments=(replace(trace.moments[0], **wrong), *trace.moments[1:]))
    with pytest.raises(PlanMismatch, match="damaged"):
        MemoryTrace.from_json(damaged.to_json())
