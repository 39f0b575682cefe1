"""The phases of a step: a table, and nothing beside it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import gemini
from gemini.train.step import PHASES, PhaseChange, StepPhase, StepState
from tests.world import world_of

LEGAL = {
    (StepPhase.REST, PhaseChange.BEGIN_FORWARD),
    (StepPhase.REST, PhaseChange.BEGIN_BACKWARD),
    (StepPhase.FORWARD, PhaseChange.END_FORWARD),
    (StepPhase.FORWARD, PhaseChange.BEGIN_BACKWARD),
    (StepPhase.BACKWARD, PhaseChange.END_BACKWARD),
    (StepPhase.BACKWARD, PhaseChange.BEGIN_FORWARD),
    (StepPhase.NESTED, PhaseChange.END_FORWARD),
    (StepPhase.NESTED, PhaseChange.END_BACKWARD),
}


@pytest.mark.parametrize(("phase", "event"), product(StepPhase, PhaseChange))
def test_what_the_table_does_not_have_is_refused_and_changes_nothing(phase: StepPhase, event: PhaseChange) -> None:
    state = StepState()
    state.phase = phase
    if (phase, event) in LEGAL:
        state.change(event)
        assert state.phase is PHASES[phase, event]
    else:
        with pytest.raises(gemini.IllegalTransition, match=rf"in phase {phase.value} only .* not {event.value}"):
            state.change(event)
        assert state.phase is phase


def test_an_end_undoes_its_beginning() -> None:
    ends = {PhaseChange.BEGIN_FORWARD: PhaseChange.END_FORWARD, PhaseChange.BEGIN_BACKWARD: PhaseChange.END_BACKWARD}
    for (phase, event), after in PHASES.items():
        if event in ends:
            assert PHASES[after, ends[event]] is phase


def test_a_step_goes_through_its_phases() -> None:
    """A recomputation is a forward inside a backward; what ends in order leaves nothing to look for."""
    seen: list[tuple[str, StepPhase]] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(("forward", state.phase))
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Looks(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False).sum()

    config = gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu="64MiB"))
    model = gemini.GeminiDDP(Net(), config)
    state = world_of(model).state
    loss = model(torch.ones(2, 4))
    assert state.phase is StepPhase.REST and state.num_open == 1, "its backward is still to come"
    loss.backward()
    assert seen == [("forward", StepPhase.FORWARD), ("forward", StepPhase.NESTED)]
    assert state.phase is StepPhase.REST and state.num_open == 0 and state.backward_number == 1
    with pytest.raises(RuntimeError), torch.no_grad():
        model(torch.ones(2, 5))
    assert state.phase is StepPhase.REST
