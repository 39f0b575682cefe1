"""Guessed updates on a durable store: its slots, its sums, and what a crash leaves."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import gemini
from gemini.jobs.doctor import doctor
from gemini.train.update.guess import Guess, GuessRecord
from tests.plain import Plain
from tests.train import test_durable
from tests.train.guesses import (
    ALWAYS,
    GUESSES,
    NEVER,
    THRESHOLDS,
    counts,
    guess_always,
    guessing,
    let_guesses_end,
    model_of,
    train,
)
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_state,
    squares,
    train_plain,
)
from tests.train.test_speculation_faults import failing
from tests.world import world_of


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
    assert doctor(console, store=tmp_path) == 0, console.export_text()
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


# ---- by itself -------------------------------------------------------------------------------------------------------


def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every step waited for updates half of its time."""
    note = GuessRecord.note_step
    monkeypatch.setattr(
        GuessRecord, "note_step", lambda self, *, is_plain, waiting: note(self, is_plain=is_plain, waiting=0.5)
    )


@pytest.mark.parametrize(
    ("how", "clip", "waiting", "guesses"),
    [
        ({}, NEVER, True, True),
        ({}, NEVER, False, False),
        ({}, ALWAYS, True, False),
        ({"speculate": False}, NEVER, True, False),
    ],
)
def test_an_optimizer_begins_to_guess_when_eight_steps_say_that_it_pays(
    how: dict[str, bool], clip: float, waiting: bool, guesses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of them clipped nothing, and waited for updates. A pickled optimizer begins anew."""
    if waiting:
        waits(monkeypatch)
    else:
        monkeypatch.setattr("gemini.train.update.guess._WAITING", 2.0)
    model, plain = model_of(tmp_path), Plain(Blocks())
    optimizer = adam(model, **how)
    for number in range(11):
        train(model, optimizer, number, clip, tmp_path)
        train_plain(plain, [number], squares, clip=clip)
        assert number > 8 or counts(model) == (0, 0)
    assert_same_state(model, plain)
    assert counts(model) == ((6, 0) if guesses else (0, 0))
    assert optimizer.speculate is guesses and not optimizer.__getstate__()["speculate"]
    train(model, optimizer, 11, ALWAYS)
    train_plain(plain, [11], squares, clip=ALWAYS)
    assert_same_state(model, plain)
    world_of(model).close()


def test_in_memory_nothing_is_guessed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits(monkeypatch)
    model = model_of(tmp_path, "memory")
    optimizer = adam(model)
    for number in range(10):
        train(model, optimizer, number, NEVER)
    assert counts(model) == (0, 0) and not optimizer.speculate


def test_what_is_wrong_again_and_again_is_tried_ever_less() -> None:
    """Micro-batches outside of ``no_sync()``: each backward undoes the guesses of the one before."""
    record, tried = GuessRecord(), []
    for number in range(400):
        if record.pays:
            record.num_undone += 1
            tried.append(number)
        record.note_step(is_plain=True)
    assert len(tried) < 20 and tried[-1] - tried[-2] > 100, tried
