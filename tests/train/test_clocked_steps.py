"""The simulator and the engine, by one clock: a few of the steps of ``benchmarks/clocked.py``, with fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.memory.devices.device import Event
from gemini.tiers import Tier
from gemini.train.gradients.store import HOLDER, GradientStore
from tests.clocked_steps import CASES, GUESSED, INSIDE, RTX4090, Case, clocked
from tests.virtual_time import TimedEvent, TimedStandin


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[7], CASES[11]], ids=str)
def test_a_step_takes_what_the_simulator_says(case: Case, tmp_path: Path, summary: Any) -> None:
    """Of those with updates inside backward too, all of which was launched long before: they begin where gradients are
    there, though the one that is read first has the gradient that comes last. Nothing is queued for as long as that one
    lands and is updated, and then hardly ever: an update that has begun is not broken off for a more urgent one.
    """
    told = clocked(case._replace(layers=3), tmp_path)
    summary(f"{case}, 3 layers: {told.predicted:.3f} s predicted, {told.clocked:.3f} s clocked")
    assert told.predicted == pytest.approx(told.clocked, rel=0.05)
    assert told.blocked == 0 and told.landed >= 0.9
    assert told.starved <= told.foreseen + 0.03 * told.clocked


def test_a_step_block_by_block_takes_what_the_simulator_says(tmp_path: Path, summary: Any) -> None:
    """With four micro-batches of the step that ``gemini plan --fastest`` chooses."""
    told = clocked(CASES[-1]._replace(layers=3, batches=4), tmp_path)
    summary(f"block by block, 3 layers: {told.predicted:.3f} s predicted, {told.clocked:.3f} s clocked")
    assert told.predicted == pytest.approx(told.clocked, rel=0.05) and told.landed >= 0.9


def test_an_update_is_chosen_when_it_can_begin(tmp_path: Path, summary: Any) -> None:
    """Not while the one before it runs: of what is read first the gradient comes last, and it lands meanwhile."""
    told = clocked(CASES[2]._replace(layers=8), tmp_path)
    summary(f"nothing is queued for {told.starved:.3f} s of {told.clocked:.3f} s, {told.foreseen:.3f} s are foreseen")
    assert told.starved <= told.foreseen + 0.01 * told.clocked


@pytest.mark.parametrize("kept", [2, 8])
def test_a_kept_block_leaves_and_comes_back_while_others_compute(kept: int, tmp_path: Path, summary: Any) -> None:
    """Two blocks of eight are hidden as a whole, and nobody computes them again; of all, the link takes longer than
    computing, which waits for it, and the thread that launches does not.
    """
    case = Case("rtx4090", RTX4090, 8192, offload="cpu", how=INSIDE, layers=8)
    told, plain = clocked(case._replace(kept=kept), tmp_path), clocked(case, tmp_path)
    summary(f"{case}, {kept} of 8 kept: {told.predicted:.3f} s predicted, {told.clocked:.3f} s clocked")
    assert told.predicted == pytest.approx(told.clocked, rel=0.05)
    assert told.blocked == 0 and told.landed >= 0.9
    if kept == 2:
        assert told.clocked < plain.clocked and told.timeline.stalls.get("activation", 0.0) == 0
    else:
        assert told.timeline.stalls["activation"] > 0


@pytest.mark.parametrize(("batches", "how"), [(1, {}), (2, {}), (2, GUESSED)])
def test_without_room_for_all_gradients_of_a_backward_the_device_waits_for_those_before(
    batches: int, how: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of backward is launched at once, and the link is slower than it. On the device's time line gradients take no
    more than the budget has for them: what is computed next comes behind the copy of the oldest, also where the host
    adds them up.
    """
    copy, host_sums, leave = TimedStandin.copy, TimedStandin.host_sums, GradientStore._leave
    alive, held = list[tuple[float, float, int]](), [0]

    def note(computed: Event, left: Event, source: torch.Tensor) -> None:
        assert isinstance(left, TimedEvent) and isinstance(computed, TimedEvent)
        alive.append((computed.at, left.at, source.nbytes))

    def watched_copy(device: TimedStandin, into: torch.Tensor, source: torch.Tensor, stream: str, **how: Any) -> Event:
        computed = device.clock.mark()
        event: Event = copy(device, into, source, stream, **how)
        if stream == "evict":
            note(computed, event, source)
        return event

    def watched_sums(device: TimedStandin, areas: Sequence[torch.Tensor]) -> Any:
        land = host_sums(device, areas)
        assert land is not None

        def watched_land(source: torch.Tensor, *how: Any) -> Any:
            computed = device.clock.mark()
            begun = land(source, *how)
            note(computed, begun[0], source)
            return begun

        return watched_land

    def watched_leave(store: GradientStore, *args: Any) -> None:
        leave(store, *args)
        held[0] = max(held[0], store._ledger.held(Tier.GPU, HOLDER))

    monkeypatch.setattr(TimedStandin, "copy", watched_copy)
    monkeypatch.setattr(TimedStandin, "host_sums", watched_sums)
    monkeypatch.setattr(GradientStore, "_leave", watched_leave)
    told = clocked(Case("rtx4090", 8 * 2**30, 1024, batches, how, layers=3), tmp_path)
    assert told.blocked == 0 and told.predicted == pytest.approx(told.clocked, rel=0.05)
    whole = sum(num_bytes for *_, num_bytes in alive) // (3 * batches)
    at_once = max(sum(n for start, stop, n in alive if start <= at < stop) for at, *_ in alive)
    assert 0 < held[0] < whole, "there was room for all of them"
    assert at_once <= held[0]
