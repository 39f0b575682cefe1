"""An error or an interrupt between two changes that belong together leaves both or none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

import gemini
from gemini.errors import BudgetExceeded, StorageError
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.watching import Recorder
from gemini.planning.planes import GRAD
from gemini.train import wrap as wrapping
from gemini.train.checkpoint import saving
from gemini.train.observers import ChangedChunks, Observers
from gemini.train.optimizers.states import read_state
from gemini.train.params.handle import handle_of
from gemini.train.setup.adoption import Adoption
from gemini.train.slices import layers, slicing
from tests import models
from tests.train.helpers import Blocks, adam, assert_same_snapshot, make_config, snapshot, squares, train, wrap


def _interrupted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the first call of a method be followed by Ctrl-C."""
    real, called = getattr(owner, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if not called:
            called.append(True)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, method)


def _holders(model: Any) -> dict[str, Any]:
    ledger = model._gemini_engine.store.ledger
    return {tier.value: ledger.holders(tier) for tier in ledger.tiers}


def test_gradients_stay_where_sums_of_them_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(Blocks(), "standin", tmp_path, gradients="accumulate", slack=2**22)
    squares(model, 0).backward()
    engine = model._gemini_engine
    engine.drain()
    homes, chunks = engine.backward.gradients.homes, list(engine.store.chunks)
    handles = [handle for handle in engine.params.handles if handle.has_grad]
    assert handles and any(chunk.planes[GRAD].tier is not engine.store.device.tier for chunk in chunks)

    def widen(*_: Any) -> None:
        raise OSError("a drive that fails")

    before, held = [engine.by_names.read_plane(handle, GRAD) for handle in handles], _holders(model)
    monkeypatch.setattr(homes, "_widen", widen)
    with pytest.raises(OSError, match="a drive that fails"), homes.at_hand(chunks, None, rounds=False):
        pass
    assert all(handle.has_grad for handle in handles)
    for handle, value in zip(handles, before, strict=True):
        assert torch.equal(engine.by_names.read_plane(handle, GRAD), value)
    assert _holders(model) == held


def test_sums_go_home_from_an_interrupt_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes as each is about to be sent there."""
    model = wrap(Blocks(), "ram", tmp_path, slack=2**22)
    engine = model._gemini_engine
    chunks, before = list(engine.store.chunks), _holders(model)
    own = [chunk.planes[GRAD] for chunk in chunks]
    assert len(chunks) > 1
    _interrupted(monkeypatch, contextlib.ExitStack, "callback")
    with pytest.raises(KeyboardInterrupt):
        with engine.backward.gradients.homes.at_hand(chunks, engine.backward.gradients.land, rounds=True):
            squares(model, 0).backward()
    assert [chunk.planes[GRAD] for chunk in chunks] == own
    model.zero_grad()
    engine.recovery.forget_interrupted()
    after = _holders(model)
    after["cpu"].pop("pool", None)  # memory that waits for the next sums
    assert after == before and engine.store.manager.is_balanced()


def test_a_thread_that_the_system_refuses_leaves_no_gradient_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next backward asks for another one: one that never began was taken for a thread that would land."""
    models = [wrap(Blocks(), "standin", tmp_path, gradients="accumulate", slack=2**22) for _ in range(2)]
    real, refused = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if "landing" in thread.name and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        real(thread)

    for model in models:
        optimizer = adam(model)
        if model is models[1]:
            monkeypatch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                squares(model, 0).backward()
            assert refused and not any(handle.has_grad for handle in model._gemini_engine.params.handles)
        squares(model, 0).backward()
        optimizer.step()
    assert_same_snapshot(*map(snapshot, models))


@pytest.mark.parametrize("interrupts", [False, True])
def test_planes_of_what_becomes_trained_are_in_the_books(
    interrupts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Blocks()
    first = raw.layers[0]
    first.requires_grad_(False)
    model = wrap(raw, "ram", tmp_path, slack=2**22)
    first.requires_grad_(True)
    if interrupts:
        with monkeypatch.context() as patched:
            _interrupted(patched, Chunk, "change_planes")
            with pytest.raises(KeyboardInterrupt):
                squares(model, 0)
    squares(model, 0).backward()
    engine = model._gemini_engine
    engine.drain()
    held = sum(engine.store.ledger.held(tier, GRAD) for tier in engine.store.ledger.tiers)
    assert held == sum(chunk.planes[GRAD].num_bytes for chunk in engine.store.chunks)


def test_a_recording_that_could_not_begin_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    hooks = len(model._forward_pre_hooks)
    with monkeypatch.context() as patched:
        _interrupted(patched, Observers, "record")
        with pytest.raises(KeyboardInterrupt), model.recording():
            pass
    assert len(model._forward_pre_hooks) == hooks
    with model.recording():
        squares(model, 0).backward()


@pytest.mark.parametrize("owner, name", [(Observers, "record"), (Recorder, "close")])
def test_a_recording_ends_whole(owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    hooks = len(model._forward_pre_hooks)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), model.recording():
        _interrupted(patched, owner, name)
    engine = model._gemini_engine
    assert len(model._forward_pre_hooks) == hooks
    assert not engine.forward.observers.recordings
    assert engine.store.mover.watch.recorder is None and engine.store.ledger.on_change is None


@pytest.mark.parametrize("ends", [False, True])
def test_a_tracer_that_is_interrupted_leaves_no_hook(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        if ends:
            with gemini.MemoryTracer(model):
                _interrupted(patched, RemovableHandle, "remove")
        else:
            _interrupted(patched, torch.nn.Module, "register_forward_pre_hook")
            with gemini.MemoryTracer(model):
                pass
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def _durable(path: Path) -> Any:
    """A model with a durable store, whose chunks live in memory."""
    raw = Blocks()
    config = make_config(raw, "ram", path)
    memory = {**vars(config.memory), "nvme": "128MiB", "nvme_path": path, "durable": True}
    return gemini.GeminiDDP(raw, gemini.GeminiConfig(memory=gemini.MemoryBudget(**memory), placement=config.placement))


def test_a_store_knows_what_a_commit_without_staging_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _durable(tmp_path)
    optimizer = adam(model)
    squares(model, 0).backward()
    optimizer.step()
    engine = model._gemini_engine
    engine.drain()
    changed = next(one for one in engine.write_observers if isinstance(one, ChangedChunks))
    before = changed.take()

    def scratch(*_: Any) -> None:
        raise BudgetExceeded("no room for staging")

    with monkeypatch.context() as patched:
        patched.setattr(engine.store.mover, "scratch", scratch)
        with pytest.raises(BudgetExceeded, match="no room for staging"):
            gemini.save_checkpoint(tmp_path, model, optimizer)
    assert before and changed.take() == before


@pytest.mark.parametrize(("owner", "name"), [(ChangedChunks, "take"), (saving, "_home_of")])
def test_a_store_knows_what_an_interrupted_commit_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    model = _durable(tmp_path)
    optimizer = adam(model)
    for seed in range(2):
        squares(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not seed:
            gemini.save_checkpoint(tmp_path, model, optimizer)
    with monkeypatch.context() as patched:
        _interrupted(patched, owner, name)
        with pytest.raises(KeyboardInterrupt):
            gemini.save_checkpoint(tmp_path, model, optimizer)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    before = snapshot(model)
    gemini.load_checkpoint(tmp_path, model, optimizer)
    assert_same_snapshot(snapshot(model), before)


def test_states_of_an_optimizer_come_along_where_an_interrupt_ends_the_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Blocks()
    optimizer = adam(raw)
    raw(torch.ones(2, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: optimizer.state[param]["exp_avg"].clone() for name, param in raw.named_parameters()}
    _interrupted(monkeypatch, Adoption, "keep")
    with pytest.raises(KeyboardInterrupt):
        wrap(raw, "ram", tmp_path)
    params = dict(raw.named_parameters())
    for name, value in before.items():
        handle = handle_of(params[name])
        assert handle is not None
        assert torch.equal(read_state(handle)["exp_avg"], value)


def test_params_are_whole_where_an_interrupt_ends_their_cutting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = models.make_model("llama")
    before = {name: param.clone() for name, param in raw.named_parameters()}
    sliced = slicing._make_slices(raw, layers.ImaginedSlices(2, Counter()))
    monkeypatch.setattr(wrapping, "slices_if_whole", lambda *_, **__: sliced)
    _interrupted(monkeypatch, slicing, "SET_DATA")
    with pytest.raises(KeyboardInterrupt):
        wrap(raw, "ram", tmp_path)
    assert sliced.params
    for name, param in raw.named_parameters():
        assert torch.equal(param, before[name]), name


def _load_optimizer(model: Any, optimizer: Any) -> None:
    state = optimizer.state_dict()
    optimizer.load_state_dict(
        {**state, "state": {key: {**of, "step": of["step"] + 7} for key, of in state["state"].items()}}
    )


def _write_gathered(model: Any, optimizer: Any) -> None:
    with model.gathered(write=True):
        for param in model.parameters():
            param.add_(1)


def _multiply(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        _load_optimizer,
        lambda model, _: model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}),
        _write_gathered,
        _multiply,
        lambda _, optimizer: optimizer.state.clear(),
    ],
    ids=["optimizer's state", "state of the model", "gathered", "one param", "states anew"],
)
def test_what_a_drive_has_let_be_written_by_half_trains_no_further(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(Blocks(), "disk", tmp_path, slack=2**22)
    optimizer = adam(model)
    train(model, optimizer, [0], squares, clip=None)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    before, mover, stored = snapshot(model), model._gemini_engine.store.mover, []

    def store(*args: Any) -> None:
        stored.append(args)
        if len(stored) == 2:
            raise StorageError("a drive that fails")
        real(*args)

    real = mover.store
    with monkeypatch.context() as patched:
        patched.setattr(mover, "store", store)
        with pytest.raises(StorageError, match="a drive that fails"):
            change(model, optimizer)
    with pytest.raises(gemini.GeminiError, match="broke off"):
        squares(model, 1)
    gemini.load_checkpoint(tmp_path / "c", model, optimizer)
    assert_same_snapshot(before, snapshot(model))
    train(model, optimizer, [1], squares, clip=None)


def test_what_one_param_cannot_take_is_written_to_none(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path, slack=2**22)
    before = snapshot(model)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    state["layers.1.weight"] = state["layers.1.weight"].to(torch.uint8)
    with pytest.raises(ValueError, match="'layers.1.weight' is not quantized"):
        model.load_state_dict(state)
    assert_same_snapshot(before, snapshot(model))
    with pytest.raises(gemini.ParamAccessError, match=r"'layers.1.weight' was given other memory"):
        with model.gathered(write=True):
            for param in model.parameters():
                param.add_(1)
            model.layers[1].weight.data = torch.zeros(32, 32, dtype=torch.bfloat16)
    assert_same_snapshot(before, snapshot(model))
    squares(model, 0).backward()


def test_a_call_that_cannot_begin_keeps_nothing_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that fails for what modules inside it read, behind what it reads itself."""
    model = wrap(Blocks(), "disk", tmp_path)
    calls, (own, inside, *_) = model._gemini_engine.forward.calls, model._gemini_engine.store.chunks
    acquire = calls._acquire

    def fail_inside(chunk: Chunk) -> None:
        if chunk is inside:
            raise StorageError("a drive that fails")
        acquire(chunk)

    monkeypatch.setattr(calls, "_acquire", fail_inside)
    with pytest.raises(StorageError, match="a drive that fails"):
        calls.begin(model, (own,), (inside,))
    assert not own.pins
