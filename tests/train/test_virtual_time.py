"""The clock of the stand-in: what takes which time, who waits for whom, and that it is the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.movement.transfers import Worker
from tests import models
from tests.virtual_time import Rates, TimedStandin, VirtualClock
from tests.world import world_of

RATES = Rates(h2d=1e6, d2h=5e5, latency=0.01, call=0.001)


def test_a_copy_takes_a_latency_and_its_bytes_over_the_rate_of_its_engine() -> None:
    clock = VirtualClock(RATES)
    device, a, b = TimedStandin(clock), torch.ones(1000), torch.zeros(1000)  # of 4,000 bytes
    with clock.running():
        first, second = device.copy(b, a, "evict"), device.copy(b, a, "offload")
        other = device.copy(b, a, "fetch")
        assert b.equal(a) and not first.is_complete()
        other.wait()
        assert clock.now == pytest.approx(0.003 + 0.01 + 0.004), "the engine of the other direction was free"
        second.wait()
        assert clock.now == pytest.approx(0.001 + 2 * (0.01 + 0.008)), "one after the other, whatever their streams"
    assert first.is_complete() and clock.rate("d2h") == pytest.approx(8000 / 0.036)
    assert [what for *_, what in clock.blocked(0, 1)] == ["a copy", "a copy"]


def test_a_copy_comes_behind_computing_and_the_device_may_run_out_of_work() -> None:
    clock = VirtualClock(RATES)
    device, a = TimedStandin(clock), torch.ones(1000)
    with clock.running():
        clock.kernel(1.0)
        copied = device.copy(a.clone(), a, "evict")
        beside = device.copy(a.clone(), a, "offload", behind_computing=False)
        beside.wait()
        assert clock.now < 0.1
        copied.wait()
        assert clock.now == pytest.approx(0.001 + 1.0 + 0.018) and clock.starved == 0
        clock.kernel(1.0)
        assert clock.starved == pytest.approx(0.019), "the wait for the copy, and a call"
        clock.kernel(1.0)
        device.mark().wait()
        assert clock.starved == pytest.approx(0.019)
        clock.spend(0.5)
        copied.wait_on_device()
        assert clock.starved == pytest.approx(0.019), "what is over already is nothing to wait for"
        device.copy(a.clone(), a, "offload").wait_on_device()
        assert clock.starved == pytest.approx(0.52), "until it was told to wait it had nothing"
        clock.kernel(1.0)
    assert clock.starved == pytest.approx(0.52)


def test_threads_meet_in_the_order_of_their_times() -> None:
    clock, order = VirtualClock(RATES), list[tuple[str, float]]()

    def work(name: str, seconds: float) -> None:
        for _ in range(3):
            clock.spend(seconds)
            order.append((name, round(clock.now, 6)))

    with clock.running():
        workers = {name: Worker(name) for name in ("quick", "slow")}
        jobs = [workers[name].submit(lambda n=name, s=s: work(n, s)) for name, s in (("slow", 0.3), ("quick", 0.2))]
        work("launcher", 0.25)
        assert not jobs[0].is_complete()
        for job in jobs:
            job.wait()
        assert clock.now == pytest.approx(0.9)
        for worker in workers.values():
            worker.close()
    assert [at for _, at in order] == sorted(at for _, at in order) and len(order) == 9
    assert clock.num_lost == 0


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
@pytest.mark.parametrize(
    "how", [{}, {"step_in_backward": True}, {"step_in_backward": True, "speculate": True}], ids=str
)
def test_backward_waits_for_no_gradient_and_takes_the_same_time_each_time(
    gradients: Any, how: dict[str, Any], tmp_path: Path
) -> None:
    """The link is slow, and the host that adds up slower: landings are not over when backward is."""

    def run() -> list[float]:
        clock = VirtualClock(Rates(h2d=1e9, d2h=1e7, latency=1e-4, call=1e-5, host=1e7))
        memory = gemini.MemoryBudget(gpu="64MiB", cpu="64MiB", nvme="1MiB", nvme_path=tmp_path)
        homes = gemini.StaticPlacement(weights_on_gpu=1.0)
        told, ids = list[float](), torch.arange(32).view(2, 16)
        with clock.running():
            device = TimedStandin(clock)
            config = gemini.GeminiConfig(
                memory=memory, placement=homes, gradients=gradients, device=device, max_chunk=4096
            )
            model = gemini.GeminiDDP(models.make_model("llama"), config)
            optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, **how)
            for _ in range(2):
                with model.no_sync():
                    backward(model, clock, ids, told) if gradients == "accumulate" else None
                backward(model, clock, ids, told)
                assert world_of(model).gradients.landing, "nothing is still on its way"
                optimizer.step()
                optimizer.zero_grad()
                told.append(clock.now)
            world_of(model).settle()
        assert clock.num_lost == 0
        return [*told, clock.now]

    assert run() == run()


def test_an_update_on_the_host_does_not_wait_for_what_the_device_was_given_since(tmp_path: Path) -> None:
    """Its weights are on the device: they leave, and come back, behind the backward and nothing that came after it."""
    clock = VirtualClock(Rates(h2d=1e9, d2h=1e9, latency=1e-4, call=1e-5, host=1e9))
    memory = gemini.MemoryBudget(gpu="64MiB", cpu="64MiB", nvme="1MiB", nvme_path=tmp_path)
    ids = torch.arange(32).view(2, 16)
    with clock.running():
        config = gemini.GeminiConfig(
            memory=memory, placement=gemini.StaticPlacement(weights_on_gpu=1.0), device=TimedStandin(clock)
        )
        model = gemini.GeminiDDP(models.make_model("llama"), config)
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        clock.kernel(10.0)  # of something else, as of the blocks whose updates are over
        world_of(model).settle()
    assert clock.num_lost == 0 and clock.now < 5.0


def backward(model: Any, clock: VirtualClock, ids: torch.Tensor, told: list[float]) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    since = clock.now
    loss.backward()
    assert not clock.blocked(since, clock.now)
    told.append(clock.now)
