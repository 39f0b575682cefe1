"""Updates in flight that fail, are interrupted, or whose model goes: the error comes out where somebody waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from benchmarks._progress import PATIENCE
from gemini.errors import GeminiError, NonFiniteGradient, StorageError
from gemini.memory.movement import transfers
from gemini.memory.movement.transfers import Job, JobThread, Lane
from gemini.memory.nvme import SpillFile
from gemini.train.update import worker as update_worker
from tests.train.helpers import failing
from tests.train.test_updates import PLACES, Held, adam, backward, wrap
from tests.world import world_of


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("reader", ["forward", "state_dict", "full_param", "step", "save"])
def test_an_error_comes_out_where_somebody_waits(reader: str, tmp_path: Path) -> None:
    model = wrap("nvme", tmp_path)
    optimizer = adam(model)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    reference = {name: value.clone() for name, value in model.state_dict(dtype=torch.float32).items()}
    backward(model, 1)

    name = next(iter(reference))
    look: dict[str, Callable[[], Any]] = {
        "forward": lambda: backward(model, 2),
        "state_dict": model.state_dict,
        "full_param": lambda: [model.full_param(n) for n in reference],
        "step": lambda: (model.memory_report(), optimizer.step()),
        "save": lambda: gemini.save_checkpoint(tmp_path / "other", model, optimizer),
    }
    full = failing(SpillFile, "begin_write", 1, StorageError("no space left"))
    with full, pytest.raises(StorageError, match="no space left"):
        optimizer.step()
        look[reader]()
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        backward(model, 2)
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert torch.equal(model.full_param(name, dtype=torch.float32), reference[name])
    backward(model, 1)
    optimizer.step()
    world_of(model).check()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("where", "gradients"), [("ram", "transient"), ("standin", "accumulate")])
def test_a_gradient_that_is_not_finite_breaks_the_step_off_wherever_it_is_found(
    where: str, gradients: str, overlap: bool, tmp_path: Path
) -> None:
    model = wrap(where, tmp_path, gradients=gradients, overlap=overlap)
    optimizer = adam(model, step_in_backward=True)
    backward(model, 0)
    optimizer.step()
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    reference = {name: value.clone() for name, value in model.state_dict(dtype=torch.float32).items()}

    def spoil(module: Any, args: Any, output: Any) -> None:
        output.register_hook(lambda grad: grad * float("nan"))

    hook = model.model.layers[0].mlp.register_forward_hook(spoil)
    with pytest.raises(NonFiniteGradient, match="holds inf or NaN"):
        backward(model, 1)
        world_of(model).settle()
    hook.remove()
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        backward(model, 2)
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict(dtype=torch.float32).items())


def test_an_error_before_the_first_tile_reaches_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap("ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)

    def fails(segments: Any) -> None:
        raise MemoryError("no memory to look at a gradient")

    monkeypatch.setattr(update_worker, "check_finite", fails)
    backward(model, 0)
    world = world_of(model)
    job = world.updates_in_flight[0]
    with pytest.raises(MemoryError):
        job.wait()
    with pytest.raises(GeminiError, match="MemoryError"):
        optimizer.step()
    with pytest.raises(MemoryError):
        world.settle()
    world.check()


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupt_between_handing_over_and_noting_leaves_no_update_behind(
    in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody knows of would go on while a checkpoint is loaded."""
    model = wrap("ram", tmp_path)
    optimizer, held = adam(model, step_in_backward=in_backward), Held(monkeypatch)
    updates, put, jobs = world_of(model).updates, JobThread.put, list[Job]()

    def interrupted(self: JobThread, *given: Job) -> None:
        put(self, *given)
        jobs.extend(given)
        assert given[0].worker is self
        while not held.threads:
            time.sleep(0.001)  # the first one is under way
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JobThread, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(model, 0)
            optimizer.step()
    assert {job for job in jobs if not job.is_complete()} == set(updates.pending.values())
    threading.Timer(0.1, held.gate.set).start()
    updates.forget()
    assert all(job.is_complete() for job in jobs)
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        backward(model, 1)


def test_a_model_may_end_on_the_lane_that_updates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector runs anywhere. A fetch that waits for that very update must not be waited for."""
    model = wrap("nvme", tmp_path)
    optimizer = adam(model)
    for number in range(2):  # then it is known what to fetch ahead
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    world = world_of(model)
    world.settle()
    monkeypatch.setattr(transfers, "_END_SECONDS", 3.0)
    fetches, go, ended, found = world.transfers.thread(Lane.FETCH), threading.Event(), threading.Event(), list[bool]()

    class Ends:
        def before_updates(self) -> None: ...

        def before_write(self, chunk: Any) -> None:
            if not found:
                assert go.wait(PATIENCE)
                found.append(any(not fetch.is_complete() for fetch in list(world.manager.ahead.values())))
                world.close()
                found.append(fetches.is_alive)
                ended.set()

        def close(self) -> None:
            pass

    backward(model, 2)
    world.write_observers.append(Ends())
    optimizer.step()
    go.set()
    assert ended.wait(PATIENCE)
    assert found == [True, False], "a fetch was waiting, and the end waited for it in vain"


@pytest.mark.parametrize("where", PLACES)
def test_a_model_may_go_in_the_middle_of_its_updates(where: str, tmp_path: Path) -> None:
    model = wrap(where, tmp_path)
    optimizer = adam(model)
    backward(model, 0)
    optimizer.step()
    world = world_of(model)
    worker = world.update_worker
    del world, model, optimizer
    gc.collect()
    assert not worker.is_alive
