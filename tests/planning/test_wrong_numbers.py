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


@pytest.mark.parametrize("name", ["max_chunk", "accumulate", "ranks"])
@pytest.mark.parametrize("count", [-1, 2.0, 0])
def test_of_what_there_must_be_some_there_are_none(name: str, count: Any) -> None:
    trace, asked = stack_trace(2), {name: count}
    with pytest.raises(ValueError, match=f"{name}={count!r} must be a number of at least 1"):
        gemini.plan(trace, None, BUDGETS, **asked)
    with pytest.raises(ValueError, match=f"{name}={count!r} must be a number of at least 1"):
        gemini.plan_together({"policy": trace}, None, BUDGETS, **asked)


@pytest.mark.parametrize("field", ["params", "gradients"])
def test_a_param_before_the_first_is_damage(field: str) -> None:
    trace = stack_trace(2)
    assert MemoryTrace.from_json(trace.to_json()) == trace
    wrong: dict[str, Any] = {field: (-1,)}
    damaged = replace(trace, moments=(replace(trace.moments[0], **wrong), *trace.moments[1:]))
    with pytest.raises(PlanMismatch, match="damaged"):
        MemoryTrace.from_json(damaged.to_json())
