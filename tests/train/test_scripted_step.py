"""A rank that leaves a script of collectives, with what it has offered and where others do not answer."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini.errors import RankLost
from gemini.memory.devices.device import DONE, CpuDevice
from gemini.memory.movement.transfers import Worker
from gemini.planning.script import Gather, Reduce, Script
from gemini.train.sharding.scripted import ScriptedStep

SCRIPT = Script((Gather(0, 0), Gather(1, 1)), (Reduce(0, 0),))
CHUNKS: list[Any] = [SimpleNamespace(spec=SimpleNamespace(index=number), name=f"chunk {number}") for number in range(2)]


class Echo:
    """All ranks say what this one does; or one of them is lost."""

    is_lost = False

    def swap(self, tag: Any, said: torch.Tensor, what: str) -> torch.Tensor:
        if self.is_lost:
            raise RankLost("rank 1 did not answer")
        return torch.stack([said, said])


@pytest.fixture
def step() -> Iterator[ScriptedStep]:
    workers = Worker("collectives"), Worker("reduce")
    channel: Any = SimpleNamespace(
        wire=Echo(),
        device=CpuDevice(),
        mover=SimpleNamespace(in_worker=False),
        fetch_ahead=lambda chunk: DONE,
        launch_gather=lambda chunk, ready: DONE,
    )
    manager: Any = SimpleNamespace(await_begun=lambda: None)
    yield ScriptedStep(SCRIPT, channel, manager, workers)
    for worker in workers:
        worker.close()


def test_one_order_of_both_kinds(step: ScriptedStep) -> None:
    added: list[int] = []
    assert SCRIPT.gathers_before == (2,) and step.gather(CHUNKS[0]) is not None
    job = step.reduce(1, lambda: added.append(1), lambda: DONE)
    assert not job.is_complete(), "a gather stands before it"
    assert step.gather(CHUNKS[1]) is not None
    job.wait()
    assert added == [1] and step.finish()


def test_who_waits_for_a_reduction_has_begun_what_stands_before_it(step: ScriptedStep) -> None:
    """Else nobody would ever launch it: this rank leaves, and what it has offered ends."""
    added: list[int] = []
    step.gather(CHUNKS[0])
    job = step.reduce(1, lambda: added.append(1), lambda: DONE)
    step.before_waiting_for(job)
    job.wait_until_over()
    assert step.is_parted and not added and step.gather(CHUNKS[1]) is None and not step.finish()


def test_behind_a_lost_rank_nothing_is_launched(step: ScriptedStep) -> None:
    step._channel.wire.is_lost = True  # type: ignore[attr-defined]
    with pytest.raises(RankLost):
        step.gather(CHUNKS[0])
    step._channel.wire.is_lost = False  # type: ignore[attr-defined]
    assert step.is_parted and step.gather(CHUNKS[1]) is None
    with pytest.raises(RankLost):
        step.finish()
