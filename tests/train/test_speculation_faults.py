"""Guessed updates and what may go wrong: gradients that are not finite, drives that fail, Ctrl-C."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gemini
from gemini import kernels
from gemini.errors import GeminiError, NonFiniteGradient, StorageError
from gemini.jobs.doctor import doctor
from gemini.jobs.settings import DoctorSettings
from gemini.memory.nvme import SpillFile
from gemini.tiers import Tier
from gemini.train.update.guess import HOLDER, Guess, GuessRecord
from tests.plain import Plain
from tests.scaling import backward, clip_grads, make_step, scaler_of
from tests.train import helpers, test_durable
from tests.train.guesses import (
    ALWAYS,
    GUESSES,
    NEVER,
    THRESHOLDS,
    OwnLoss,
    counts,
    guess_always,
    guessing,
    let_guesses_end,
    plainly,
    train,
)
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_snapshot,
    assert_same_state,
    noise,
    snapshot,
    squares,
    step_on,
    train_plain,
)
from tests.train.test_interrupts import at_call, wait_for_ctrl_c
from tests.world import world_of

# ---- gradients that are not finite -----------------------------------------------------------------------------------


def spoiled(model: Any, number: int, *, layer: int, value: float = float("nan")) -> None:
    """A backward in which one layer gets bad gradients."""
    hook = model.layers[layer].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: grad * value) and None
    )
    out = model(noise(2, 5, 32, seed=number, dtype=model.layers[0].weight.dtype))
    backward(model, out if out.dim() == 0 else out.float().square().mean())
    hook.remove()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("where", ["store", "memory", "half in memory", "GPU"])
def test_a_nan_found_late_is_undone(where: str, layer: int, clips: bool, tmp_path: Path) -> None:
    """As without guesses: an error, nothing changed, and the run goes on."""
    runs = [guessing(tmp_path, where), plainly(tmp_path)]
    said = []
    for model, optimizer in runs:
        train(model, optimizer, 0, NEVER)
        before = snapshot(model)
        spoiled(model, 1, layer=layer)
        norm = model.clip_grad_norm_(NEVER) if clips else None
        with pytest.raises(NonFiniteGradient) as refusal:
            optimizer.step()
        said.append((str(refusal.value), None if norm is None else torch.isnan(norm).item()))
        optimizer.zero_grad()
        assert_same_snapshot(snapshot(model), before)
        train(model, optimizer, 2, NEVER)
    assert said[0] == said[1]
    assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    assert counts(runs[0][0])[1] > 0


def test_error_if_nonfinite_leaves_nothing_behind(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    before = snapshot(model)
    spoiled(model, 1, layer=0)
    with pytest.raises(NonFiniteGradient):
        model.clip_grad_norm_(NEVER, error_if_nonfinite=True)
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("where", ["store", "half in a store", "memory", "half in memory", "GPU"])
def test_a_step_that_fp16_skips_is_undone(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"precision": "fp16", "make": OwnLoss}
    runs = [guessing(tmp_path, where, **how), plainly(tmp_path, **how)]
    guess_always(runs[0][0], monkeypatch)
    for number, clip in enumerate([NEVER, NEVER, ALWAYS, NEVER]):
        for model, optimizer in runs:
            spoiled(model, number, layer=1, value=float("inf") if number == 1 else 1.0)
            clip_grads(model, optimizer, clip)
            make_step(model, optimizer)
            optimizer.zero_grad()
        scales = [scaler_of(model).get_scale() for model, _ in runs]
        assert scales[0] == scales[1]
        assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    kept, undone = counts(runs[0][0])
    assert kept and undone


# ---- faults and interrupts -------------------------------------------------------------------------------------------


def failing(patch: pytest.MonkeyPatch, *, since: int, until: int) -> list[int]:
    """The drive refuses some of the writes of updates; the list grows with all of them."""
    real, calls = kernels.IoQueue.submit_write, list[int]()

    def submit_write(self: kernels.IoQueue, fd: int, address: int, nbytes: int, offset: int, urgent: bool) -> int:
        if threading.current_thread().name == "gemini-update":
            calls.append(offset)
            if since <= len(calls) < until:
                raise OSError("the drive is full")
        return real(self, fd, address, nbytes, offset, urgent)

    patch.setattr(kernels.IoQueue, "submit_write", submit_write)
    return calls


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("since", [1, 3, 7, 12])
def test_a_guess_that_fails_costs_nothing(since: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step makes its own."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    train(model, optimizer, 0, NEVER, tmp_path)
    train_plain(plain, [0], squares, clip=NEVER)
    with monkeypatch.context() as patch:
        squares(model, 1).backward()
        let_guesses_end(model)
        optimizer.zero_grad()
        calls = failing(patch, since=since, until=since + 1)
        squares(model, 1).backward()
        let_guesses_end(model)
        assert len(calls) >= since
    model.clip_grad_norm_(NEVER)
    optimizer.step()
    optimizer.zero_grad()
    train_plain(plain, [1], squares, clip=NEVER)
    assert_same_state(model, plain)
    for number in (2, 3):
        train(model, optimizer, number, NEVER, tmp_path)
        train_plain(plain, [number], squares, clip=NEVER)
    assert_same_state(model, plain)
    world_of(model).close()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("where", ["memory", "half in memory", "GPU"])
def test_a_guess_whose_kernel_fails_costs_nothing(
    where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has written all of its tile."""
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    real, calls = kernels.update, list[int]()

    def fail(*args: Any) -> bool:
        done = real(*args)
        calls.append(1)
        if len(calls) == number:
            raise MemoryError("no memory for a thread")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "update", fail)
        squares(model, 0).backward()
        let_guesses_end(model)
    assert len(calls) >= number
    optimizer.step()
    optimizer.zero_grad()
    train_plain(plain, [0], squares, clip=NEVER)
    train(model, optimizer, 1, NEVER)
    train_plain(plain, [1], squares, clip=NEVER)
    assert_same_state(model, plain)


def test_a_drive_that_stays_broken_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="good")
    expected = snapshot(model)
    with monkeypatch.context() as patch:
        failing(patch, since=5, until=2**31)
        with pytest.raises(StorageError, match="the drive is full"):
            train(model, optimizer, 1, NEVER)
            snapshot(model)
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        train(model, optimizer, 2, NEVER)
    world_of(model).close()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == "good"
    assert_same_snapshot(snapshot(model), expected)
    train(model, optimizer, 1, NEVER)
    world_of(model).close()


def test_a_run_that_ends_with_open_guesses_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="committed")
    expected = snapshot(model)
    squares(model, 1).backward()
    assert any(job.is_undecided for job in world_of(model).updates_in_flight)
    world_of(model).close()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == "committed"
    assert_same_snapshot(snapshot(model), expected)
    world_of(model).close()


@pytest.mark.parametrize("where", ["store", "memory"])
def test_what_is_forgotten_is_undone(where: str, tmp_path: Path) -> None:
    """As a checkpoint that is about to be loaded does it."""
    model, _optimizer = guessing(tmp_path, where)
    before = snapshot(model)
    squares(model, 0).backward()
    assert world_of(model).updates_in_flight
    world_of(model).forget_updates()
    if where == "store":
        assert all(pair._before is None for pair in world_of(model).durable.slots.pairs.values())
    assert_same_snapshot(snapshot(model), before)


def test_a_checkpoint_is_loaded_over_open_guesses(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    expected = snapshot(model)
    train(model, optimizer, 1, NEVER)
    squares(model, 2).backward()
    gemini.load_checkpoint(tmp_path, model, optimizer)
    assert all(pair._before is None for pair in world_of(model).durable.slots.pairs.values())
    assert_same_snapshot(snapshot(model), expected)
    plain = Plain(Blocks())
    train_plain(plain, [0, 1], squares, clip=NEVER)
    train(model, optimizer, 1, NEVER)
    assert_same_state(model, plain)
    world_of(model).close()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("moment", ["take_grad", "kernel", "put"])
@pytest.mark.parametrize("where", ["store", "memory", "half in memory"])
def test_an_interrupted_backward_leaves_nothing_behind(
    where: str, moment: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = guessing(tmp_path, where)
    train(model, optimizer, 0, NEVER, tmp_path if where == "store" else None)
    before = snapshot(model)
    loss = squares(model, 1)
    world = world_of(model)
    owner, name = {
        "take_grad": (world.backward, "take_grad"),
        "kernel": (kernels, "update"),
        "put": (world.update_worker, "put"),
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, owner, name, number, once=True)
        loss.backward()
        let_guesses_end(model)
        wait_for_ctrl_c()
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)
    plain = Plain(Blocks())
    train_plain(plain, [0, 1], squares, clip=NEVER)
    train(model, optimizer, 1, NEVER)
    assert_same_state(model, plain)
    world.close()


@pytest.mark.parametrize("clip", [NEVER, ALWAYS])
@pytest.mark.parametrize("where", ["store", "memory", "spill file"])
def test_an_interrupted_step_is_whole(where: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    for number, name in enumerate(("keep", "drop", "undo")):
        squares(model, number).backward()
        model.clip_grad_norm_(clip)
        with monkeypatch.context() as patch:
            calls = at_call(patch, Guess, name, 2, once=True)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                assert calls
        optimizer.zero_grad()
        train_plain(plain, [number], squares, clip=clip)
        assert_same_state(model, plain)


# ---- copies in memory of what has no second slot ---------------------------------------------------------------------


def held(model: Any) -> int:
    """Bytes of copies."""
    return world_of(model).held(Tier.CPU, HOLDER)


class LooksAgain(Blocks):
    """Its graph has a node that reads weights and gives them no gradient, and runs after all that do."""

    before_it = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x @ self.layers[0].weight.detach()
        early.register_hook(lambda grad: self.before_it())
        return super().forward(x.detach()) + early


@pytest.mark.parametrize("where", ["memory", "spill file", "store"])
def test_weights_that_a_graph_looks_at_are_those_of_its_forward(where: str, tmp_path: Path) -> None:
    """The gradient of the input is made of them, behind the guess of their update."""
    runs = [guessing(tmp_path, where, make=LooksAgain, slack=1 << 20), plainly(tmp_path, LooksAgain)]
    model, begun = runs[0][0], []

    def wait() -> None:
        let_guesses_end(model)
        begun.append(len(world_of(model).updates_in_flight))

    model.before_it = wait
    for number in range(3):
        inputs = []
        for net, optimizer in runs:
            inputs.append(noise(2, 5, 32, seed=number).bfloat16().requires_grad_())
            step_on(net(inputs[-1]).float().square().mean(), optimizer)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert_same_snapshot(*(snapshot(net) for net, _ in runs))
    assert begun == [3] * 3 and counts(model) == (9, 0)


@pytest.mark.parametrize("clip", [NEVER, ALWAYS])
@pytest.mark.parametrize("where", ["memory", "half in memory", "spill file", "GPU"])
def test_copies_go_with_the_step(where: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guessing(tmp_path, where)
    guess_always(model, monkeypatch)
    for number in range(2):
        squares(model, number).backward()
        let_guesses_end(model)
        assert held(model)
        model.clip_grad_norm_(clip)
        optimizer.step()
        assert not held(model)
        optimizer.zero_grad()
    squares(model, 2).backward()
    optimizer.zero_grad()
    assert not held(model)


@pytest.mark.parametrize("where", ["memory", "spill file", "GPU"])
def test_who_needs_the_memory_has_guesses_undone(where: str, tmp_path: Path) -> None:
    """And the step makes its own update."""
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    ledger = world_of(model).ledger
    squares(model, 0).backward()
    before, wanted = held(model), 0
    while held(model) == before:  # windows that the plan fetches again anyway are asked first
        more = ledger.free(Tier.CPU) + 1
        ledger.reserve(Tier.CPU, more, "what is needed")
        wanted += more
    assert 0 < held(model) < before
    optimizer.step()
    optimizer.zero_grad()
    ledger.release(Tier.CPU, wanted, "what is needed")
    train_plain(plain, [0], squares, clip=NEVER)
    assert_same_state(model, plain)
    assert counts(model) == (2, 1)


def test_copies_go_when_a_guess_is_kept(tmp_path: Path) -> None:
    """And not with the end of its update: others find the room."""
    model, optimizer = guessing(tmp_path, "spill file")
    squares(model, 0).backward()
    jobs = list(world_of(model).updates.pending.values())
    let_guesses_end(model)
    for job in jobs:
        job.guess._is_over = False  # as if a tile were still on its way home
    assert held(model)
    optimizer.step()
    assert held(model) == sum(job.guess.num_bytes for job in jobs) == 0


def test_a_spill_file_that_takes_nothing_back_is_told(tmp_path: Path) -> None:
    """As when an update that counts breaks off."""
    model, optimizer = guessing(tmp_path, "spill file")
    squares(model, 0).backward()
    let_guesses_end(model)
    gone = helpers.failing(SpillFile, "begin_write", 1, StorageError("the drive is gone"))
    with gone, pytest.raises(StorageError, match="the drive is gone"):
        optimizer.zero_grad()
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        train(model, optimizer, 1, NEVER)
    world_of(model).forget_updates()
    assert not held(model)


# ---- a durable store: its slots, its sums, and what a crash leaves ---------------------------------------------------


def test_what_was_trained_since_a_commit_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step after a commit can be undone: its slots are free. The second one's are taken."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    guess_always(model, monkeypatch)
    kept = 0
    for number in range(6):
        squares(model, number).backward()
        let_guesses_end(model)
        model.clip_grad_norm_(NEVER)
        optimizer.step()
        optimizer.zero_grad()
        train_plain(plain, [number], squares, clip=NEVER)
        assert_same_state(model, plain)
        if number == 1 or number == 3:
            gemini.save_checkpoint(tmp_path, model, optimizer)
        kept += 3 if number in (0, 1, 2, 4) else 0
        assert counts(model)[0] == kept, number
    world_of(model).close()


def test_sums_of_a_store_are_those_of_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gemini doctor STORE`` reads all of it, behind steps that were right, wrong, and wrong before a fault."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    guess_always(model, monkeypatch)
    for number, clip in enumerate(THRESHOLDS["sometimes"]):
        with monkeypatch.context() as patch:
            if number == 3:
                failing(patch, since=4, until=5)
            squares(model, number).backward()
            let_guesses_end(model)
        model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        gemini.save_checkpoint(tmp_path, model, optimizer, extra=number)
        train_plain(plain, [number], squares, clip=clip)
    assert_same_state(model, plain)
    world_of(model).close()
    console = Console(record=True, width=300, file=io.StringIO())
    assert doctor(DoctorSettings(store=tmp_path), console) == 0, console.export_text()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == 5
    assert_same_state(model, plain)
    world_of(model).close()


def test_every_image_of_a_crash_opens_at_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_durable, "adam", lambda model: adam(model, **GUESSES))
    guesses, keep = list[bool](), Guess.keep
    monkeypatch.setattr(Guess, "keep", lambda self, params: guesses.append(keep(self, params)) or guesses[-1])
    monkeypatch.setattr(GuessRecord, "pays", True)
    assert test_durable.images(tmp_path, 16) == []
    assert guesses


def test_what_is_wrong_again_and_again_is_tried_ever_less() -> None:
    """Micro-batches outside of ``no_sync()``: each backward undoes the guesses of the one before."""
    record, tried = GuessRecord(), []
    for number in range(400):
        if record.pays:
            record.num_undone += 1
            tried.append(number)
        record.note_step(is_plain=True)
    assert len(tried) < 20 and tried[-1] - tried[-2] > 100, tried
