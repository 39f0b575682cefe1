"""Offloaded activations whose writes or reads fail, or that are interrupted: nothing is left."""

import gc
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.devices.device import Event
from gemini.memory.movement.transfers import Job
from gemini.memory.nvme import SpillFile
from gemini.planning import working
from gemini.tiers import Tier
from gemini.train.activations.flights import Offloaded
from tests.train.test_activation_overlap import (  # noqa: F401
    INPUT,
    LAYERS,
    WAYS,
    Gate,
    adam,
    held,
    noise,
    nothing_is_left,
    same,
    train,
    worker_of_now,
    wrap,
)
from tests.world import world_of


def test_a_write_that_fails_in_flight_is_told_with_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward, in backward, or at the next report: wherever the training thread comes next, once."""
    texts = []
    for when in ("forward", "backward", "report", "next forward"):
        with monkeypatch.context() as patches:
            writes = Gate(patches, "write", "gemini-offload")
            model = wrap(tmp_path)
            spill = world_of(model).spill
            writes.error = [None, spill.failed("write", 0, INPUT, 0, OSError(28, "No space left on device"))]
            if when == "forward":
                writes.open.set()
                patches.setattr(working, "FLIGHTS", dict.fromkeys(Tier, 0))  # waits for the last but one
            with pytest.raises(gemini.StorageError) as caught:
                loss = model(noise())
                assert when != "forward"
                writes.open.set()
                if when == "backward":
                    spill_over(model)
                    loss.backward()
                elif when == "report":
                    model.memory_report()
                else:
                    spill_over(model)
                    model(noise())
            texts.append(str(caught.value))
            assert isinstance(caught.value.__cause__, OSError)
            del caught
            loss = None
            gc.collect()
            model.zero_grad()
            nothing_is_left(model)
            same(train(model), train(wrap(tmp_path, offload=None)))
    assert len(set(texts)) == 1 and "could not write 16 KiB at 0 of the spill file" in texts[0], texts


def spill_over(model: Any) -> None:
    """Until every write is over, without a look at how they ended."""
    for flight in world_of(model).activation_workers.saving.values():
        flight.outcome()


@pytest.mark.parametrize("always", [False, True])
def test_a_read_that_fails_ahead_is_tried_again_by_who_needs_it(
    always: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(wrap(tmp_path, offload=None), steps=1)
    model = wrap(tmp_path)
    real, failed = SpillFile.read, list[str]()

    def read(spill: SpillFile, into: torch.Tensor, offset: int) -> None:
        if worker_of_now() == "gemini-restore" or always:
            failed.append(worker_of_now())
            raise spill.failed("read", 0, into.nbytes, offset, OSError(5, "Input/output error"))
        real(spill, into, offset)

    monkeypatch.setattr(SpillFile, "read", read)
    loss = model(noise())
    world_of(model).settle()
    if always:
        with pytest.raises(gemini.StorageError, match=r"could not read .* of the spill file .*Input/output error"):
            loss.backward()
        assert {"gemini-restore", "MainThread"} <= set(failed)
        del loss
        gc.collect()
        model.zero_grad()
        monkeypatch.setattr(SpillFile, "read", real)
        nothing_is_left(model)
        loss = model(noise())
    loss.backward()
    assert [loss.item(), float(model.clip_grad_norm_(1.0))] == plain[0]
    model.zero_grad()
    nothing_is_left(model)
    assert "gemini-restore" in failed


@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_an_interrupt_anywhere_leaves_nothing(device: str, offload: str, tmp_path: Path) -> None:
    """At every wait of the training thread, and beside every entry in the books, in forward and backward."""
    plain = train(wrap(tmp_path, offload=None))
    model = wrap(tmp_path, device, offload)
    optimizer, ledger = adam(model), world_of(model).ledger
    fired = 0
    for chosen in range(3, 120, 19):
        calls, patches = [], pytest.MonkeyPatch()
        for owner, name in ((Event, "wait"), (Job, "wait"), (type(ledger), "reserve"), (type(ledger), "release")):
            real = getattr(owner, name)

            def call(*args: Any, real: Any = real, calls: list[int] = calls, chosen: int = chosen, **how: Any) -> Any:
                result = real(*args, **how)
                if worker_of_now() == "MainThread":
                    calls.append(1)
                    if len(calls) == chosen:
                        raise KeyboardInterrupt
                return result

            patches.setattr(owner, name, call)
        try:
            model(noise()).backward()
        except KeyboardInterrupt:
            fired += 1
        finally:
            patches.undo()
        gc.collect()
        model.zero_grad()
        nothing_is_left(model)
    assert fired >= 2
    same(train(model, optimizer), plain)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("device", "offload"), WAYS)
def test_an_interrupt_whose_error_is_kept_gives_a_place_back_once(
    device: str, offload: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of the error keep a tensor that was just given its place; ``again``: one that another had before."""
    plain = train(wrap(tmp_path, offload=None))
    model = wrap(tmp_path, device, offload)
    optimizer, real, calls = adam(model), Offloaded.__init__, list[int]()
    if again:
        model(noise()).backward()
        model.zero_grad()

    def init(*args: Any) -> None:
        real(*args)
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    kept: BaseException | None = None
    with monkeypatch.context() as patches:
        patches.setattr(Offloaded, "__init__", init)
        try:
            model(noise()).backward()
        except KeyboardInterrupt as e:
            kept = e
    assert kept is not None
    loss = model(noise(0))  # ends what was interrupted
    kept = None
    gc.collect()
    (loss + model(noise(1))).backward()
    model.zero_grad()
    nothing_is_left(model)
    same(train(model, optimizer), plain)


def test_a_deleted_model_ends_its_lanes_with_writes_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = threading.active_count()
    writes = Gate(monkeypatch, "write", "gemini-offload")
    model = wrap(tmp_path)
    loss = model(noise())
    threading.Timer(0.05, writes.open.set).start()
    del model
    gc.collect()
    del loss
    for _ in range(200):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name in ("gemini-offload", "gemini-restore")]
