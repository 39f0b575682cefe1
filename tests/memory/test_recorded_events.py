"""Transfers that run by themselves are recorded once, when their end is noticed, however they end."""

from __future__ import annotations

import pytest

from gemini.errors import GeminiError
from gemini.memory.devices.device import CpuDevice, Event
from gemini.memory.movement.mover import Mover
from gemini.memory.watching.recorder import RecordedEvent, Recorder
from gemini.planning.timeline import Span, Track
from gemini.tiers import Ledger, Tier


def test_an_end_is_told_when_it_is_seen_and_once() -> None:
    event, told = Event(), list[str]()
    recorded = RecordedEvent(event, lambda: told.append("over"))
    assert not recorded.is_complete() and not told
    with pytest.raises(GeminiError, match="did not complete within 0 s"):
        recorded.wait(0)
    assert not told, "it is still under way"
    event.finish()
    assert not told, "nobody has looked"
    assert recorded.is_complete() and told == ["over"]
    recorded.wait()
    recorded.wait_on_device()
    assert told == ["over"]


def test_a_failure_is_told_and_raised() -> None:
    event, told = Event(), list[str]()
    recorded = RecordedEvent(event, lambda: told.append("over"))
    event.finish(OSError("the disk is gone"))
    with pytest.raises(GeminiError, match="the disk is gone"):
        recorded.wait()
    assert told == ["over"]


def test_what_is_under_way_is_counted_and_recorded_where_somebody_does() -> None:
    now = [10.0]
    mover = Mover(CpuDevice(), 1024, Ledger({Tier.CPU: 2**20}))
    first, second = Event(), Event()
    assert mover.under_way(Tier.NVME, Tier.CPU, 8, lambda: first, "update chunk 1", 1) is first, "nobody records"
    recorder = mover.watch.recorder = Recorder(clock=lambda: now[0])
    recorder.begin_step({})
    found = mover.under_way(Tier.NVME, Tier.CPU, 16, lambda: second, "update chunk 2", 2)
    assert mover.under_way(Tier.CPU, Tier.CPU, 4, lambda: first, "", 3) is first, "no track is busy"
    now[0] = 13.0
    second.finish()
    found.wait()
    step = recorder.end_step()
    assert step.spans == [Span(Track.NVME_READ, 0.0, 3.0, "update chunk 2", -1, 2, 16)] and not step.stalls
    assert mover.watch.moved.counts() == {"nvme->cpu": 24}
