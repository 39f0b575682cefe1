"""A rank that leaves a script of collectives, with what it has offered and where others do not answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini.errors import RankLost
from gemini.memory.devices.device import DONE, CpuDevice
from gemini.memory.movement.transfers import Worker
from gemini.planning.script import Gather, Reduce, Script
from gemini.train.sharding.scripted import Parted, ScriptedStep

SCRIPT = Script((Gather(0, 0), Gather(1, 1)), (Reduce(0, 0),))


def chunk_of(number: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(index=number), name=f"chunk {number}")


CHUNKS: list[Any] = [chunk_of(number) for number in range(2)]


class Echo:
    """All ranks say what this one does; or one of them is lost."""

    is_lost = False

    def swap(self, tag: Any, said: torch.Tensor, what: str) -> torch.Tensor:
        if self.is_lost:
            raise RankLost("rank 1 did not answer")
        return torch.stack([said, said])


def check(is_so: bool) -> None:
    assert is_so


@contextmanager
def stepping(script: Script, swap: Any, launch_gather: Any) -> Iterator[ScriptedStep]:
    workers = Worker("collectives"), Worker("reduce")
    channel: Any = SimpleNamespace(
        wire=SimpleNamespace(swap=swap),
        device=CpuDevice(),
        mover=SimpleNamespace(in_worker=False),
        fetch_ahead=lambda chunk: DONE,
        launch_gather=launch_gather,
    )
    manager: Any = SimpleNamespace(await_begun=lambda: None)
    yield ScriptedStep(script, channel, manager, workers)
    for worker in workers:
        worker.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def step(echo: Echo) -> Iterator[ScriptedStep]:
    with stepping(SCRIPT, echo.swap, lambda chunk, ready: DONE) as step:
        yield step


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


def test_behind_a_lost_rank_nothing_is_launched(step: ScriptedStep, echo: Echo) -> None:
    echo.is_lost = True
    with pytest.raises(RankLost):
        step.gather(CHUNKS[0])
    echo.is_lost = False
    assert step.is_parted and step.gather(CHUNKS[1]) is None
    with pytest.raises(RankLost):
        step.finish()


def test_one_message_is_for_all_that_is_offered_when_it_is_sent() -> None:
    """Eight blocks of three chunks, gathered for forward and backward and reduced. Each of the 72 had a message of its
    own: nine for a block. With a launcher behind that a message finds sixteen at most, so there are five in all.
    """
    blocks, each, asked = 8, 3, list[list[int]]()
    moments = [*range(blocks), *reversed(range(blocks))]
    gathers = [Gather(n, each * block + m) for n, block in enumerate(moments) for m in range(each)]
    done = [Reduce(blocks + n, each * block + m) for n, block in enumerate(moments[blocks:]) for m in range(each)]
    script, began, launched, added = Script(tuple(gathers), tuple(done)), threading.Event(), list[Any](), list[int]()

    def swap(tag: Any, said: torch.Tensor, what: str) -> torch.Tensor:
        assert began.wait(60)
        asked.append(said.tolist())
        return torch.stack([said, said])

    def launch(name: Any) -> Any:
        launched.append(name)
        return DONE

    with stepping(script, swap, lambda chunk, ready: launch(("gather", chunk.spec.index))) as step:
        step._channel.mover.in_worker = True
        # It is late: all is offered when it comes to the first.
        step._launcher.submit(lambda: check(began.wait(60)), -1)
        for number, reduction in enumerate([*done, None]):
            before = script.gathers_before[number] if reduction else len(gathers)
            while step._gathered < before:
                assert step.gather(chunk_of(gathers[step._gathered].chunk)) is not None
            if reduction is not None:
                index = reduction.chunk
                step.reduce(2, lambda index=index: added.append(index), lambda index=index: launch(("sum", index)))
        began.set()
        assert step.finish()
    num = len(gathers) + len(done)
    assert len(launched) == num == 72 and added == [reduction.chunk for reduction in done]
    assert len(asked) == 5 <= blocks, f"{len(asked)} messages for {blocks} blocks"
    order = [("gather", gather.chunk) for gather in gathers]
    assert [kind for kind in launched if kind[0] == "gather"] == order
    assert sum(word != 0 for said in asked for word in said) == num, "nothing is said twice, and nothing is left out"


@pytest.mark.parametrize("agrees_behind", [False, True])
@pytest.mark.parametrize("parts_at", [0, 1, 2])
def test_what_another_rank_has_not_offered_is_asked_again(parts_at: int, agrees_behind: bool) -> None:
    """It takes part in so many and leaves then. Nothing else is launched, whatever it says of places behind."""
    asked, launched, began = list[list[int]](), list[int](), threading.Event()

    def swap(tag: Any, said: torch.Tensor, what: str) -> torch.Tensor:
        assert began.wait(60)
        other = torch.zeros_like(said)
        if not asked:
            other[:parts_at] = said[:parts_at]
            if agrees_behind:
                other[parts_at + 1 :] = said[parts_at + 1 :]
        asked.append(said.tolist())
        return torch.stack([said, other])

    def launch(chunk: Any, ready: Any) -> Any:
        launched.append(chunk.spec.index)
        return DONE

    with stepping(Script(tuple(Gather(n, n) for n in range(4)), ()), swap, launch) as step:
        step._channel.mover.in_worker = True
        step._launcher.submit(lambda: check(began.wait(60)), -1)
        ends = [step.gather(chunk_of(number)) for number in range(4)]
        began.set()
        for number, end in enumerate(ends):
            assert end is not None
            end.job.wait_until_over()
            assert isinstance(end.job.error, Parted) == (number >= parts_at)
        assert not step.finish()
    assert launched == list(range(parts_at)) and len(asked) == (1 if parts_at == 0 else 2)


def test_after_a_launch_that_failed_nothing_that_was_agreed_is_launched() -> None:
    launched, began = list[int](), threading.Event()

    def swap(tag: Any, said: torch.Tensor, what: str) -> torch.Tensor:
        assert began.wait(60)
        return torch.stack([said, said])

    def launch(chunk: Any, ready: Any) -> Any:
        launched.append(chunk.spec.index)
        if len(launched) == 2:
            raise ValueError("the library refuses")
        return DONE

    with stepping(Script(tuple(Gather(n, n) for n in range(4)), ()), swap, launch) as step:
        step._channel.mover.in_worker = True
        step._launcher.submit(lambda: check(began.wait(60)), -1)
        ends: list[Any] = [step.gather(chunk_of(number)) for number in range(4)]
        began.set()
        for end in ends:
            end.job.wait_until_over()
        assert [type(end.job.error) for end in ends] == [type(None), ValueError, Parted, Parted]
        assert launched == [0, 1] and not step.finish()
