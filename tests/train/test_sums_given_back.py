"""Sums of gradients that an interrupt or an error cuts short give back what they took, and leave no chunk without."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import kernels
from gemini.memory import store
from gemini.planning.planes import GRAD
from gemini.tiers import Tier
from gemini.train.gradients import homes
from gemini.train.step import Occupancy
from tests.train.helpers import Blocks, adam, squares, wrap


def _held(model: Any) -> dict[str, int]:
    ledger = model._gemini_engine.store.ledger
    return {tier.value: ledger.held(tier, GRAD) for tier in ledger.tiers}


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_an_interrupt_while_sums_are_made(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(Blocks(), where, tmp_path, slack=2**22)
    optimizer = adam(model)
    squares(model, 0).backward()
    before, real, made = _held(model), store.make_plane, []

    def make_plane(*args: Any, **kwargs: Any) -> Any:
        if not made:
            signal.raise_signal(signal.SIGINT)
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(store, "make_plane", make_plane)
    with pytest.raises(KeyboardInterrupt):
        squares(model, 1).backward()
    assert made
    optimizer.zero_grad()
    model._gemini_engine.recovery.forget_interrupted()
    assert _held(model) == before


@pytest.mark.parametrize("place", ["in the making", "made"])
def test_an_interrupt_leaves_no_staging_behind(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nothing had reserved before the sums needed it."""
    model = wrap(Blocks(), "disk", tmp_path, slack=2**22)
    adam(model)
    squares(model, 0).backward()
    engine = model._gemini_engine
    staging, ledger = engine.store.mover.staging, engine.store.ledger
    if staging.is_reserved:
        staging.give_back()
    before, staged, real = _held(model), ledger.held(Tier.CPU, "staging"), homes.GradientHomes._make_wide

    def make_wide(*args: Any) -> None:
        if place == "in the making":
            monkeypatch.setattr(store, "make_plane", interrupted)
        real(*args)
        assert staging.is_reserved
        raise KeyboardInterrupt

    def interrupted(*_: Any, **__: Any) -> Any:
        assert staging.is_reserved
        raise KeyboardInterrupt

    monkeypatch.setattr(homes.GradientHomes, "_make_wide", make_wide)
    with pytest.raises(KeyboardInterrupt):
        engine.backward.gradients.homes.promote(list(engine.store.chunks))
    assert not staging.is_reserved and ledger.held(Tier.CPU, "staging") == staged and _held(model) == before


def test_a_landing_that_fails_keeps_no_other_chunk_away(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path, slack=2**22)
    engine = model._gemini_engine
    chunks, before = list(engine.store.chunks), _held(model)
    own = [chunk.planes[GRAD] for chunk in chunks]

    def land(*_: Any) -> None:
        raise OSError("a drive that fails")

    with pytest.raises(OSError, match="a drive that fails"):
        with engine.backward.gradients.homes.at_hand(chunks, land, rounds=True):
            squares(model, 0).backward()
            assert any(chunk.planes[GRAD] is not plane for chunk, plane in zip(chunks, own, strict=True))
    assert [chunk.planes[GRAD] for chunk in chunks] == own
    assert _held(model) == before


def test_memory_of_sums_waits_for_the_next_ones_and_goes_where_it_is_needed(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    engine = model._gemini_engine
    chunks, ledger, frames = list(engine.store.chunks), engine.store.ledger, engine.store.device.frames
    if frames is None:
        pytest.skip("pages cannot be moved here")
    before, waiting = ledger.used(Tier.CPU), sum(4 * chunk.planes[GRAD].numel for chunk in chunks)
    for seed in range(2):
        with engine.backward.gradients.homes.at_hand(chunks, engine.backward.gradients.land, rounds=True):
            squares(model, seed).backward()
            assert frames.parked_bytes == 0 and ledger.used(Tier.CPU) == before + waiting
            # As a second step finds it: no page of it is new.
            mapped = [chunk.planes[GRAD].device_view(0, 1).item() for chunk in chunks]
        assert frames.parked_bytes == waiting == ledger.held(Tier.CPU, "pool") and engine.store.manager.is_balanced()
        assert seed == 0 or any(mapped)
    ledger.reserve(Tier.CPU, ledger.free(Tier.CPU) + 1, "a test")
    assert frames.parked_bytes == 0 and engine.store.manager.is_balanced()


@pytest.mark.parametrize(
    "order", [(True, True, False), (True, False, False), (True, False, True)], ids=["once", "twice", "not last"]
)
@pytest.mark.parametrize("path", [(0, 1, 2), (0,)], ids=["all", "some"])
def test_a_sum_goes_home_as_it_was_last(path: tuple[int, ...], order: tuple[bool, ...], tmp_path: Path) -> None:
    """Rounded once, though the last micro-batch brings a gradient twice, or none, or is none."""
    found = []
    for gradients in ("retain", "accumulate"):
        model = wrap(Blocks(), "ram", tmp_path, gradients=gradients)
        engine = model._gemini_engine
        chunks, land = list(engine.store.chunks), engine.backward.gradients.land
        with engine.backward.gradients.homes.at_hand(chunks, land, rounds=True):
            for seed, more_to_come in enumerate(order):
                model.path = path if seed == 2 else (0, 1, 2)
                loss = squares(model, seed)
                engine.store.manager.more_to_come = more_to_come
                loss.backward()
        own = engine.backward.gradients.own_part
        found.append({handle.name: own(handle).bfloat16() for handle in engine.params.handles})
        norms = [kernels.sum_squares(found[-1][handle.name]) for handle in engine.params.handles]
        assert gradients == "accumulate" or norms == [handle.norm_sums for handle in engine.params.handles]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


class _Interrupted(dict[str, Any]):
    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        raise KeyboardInterrupt


def test_an_interrupt_behind_the_mark_of_who_is_alone() -> None:
    occupancy = Occupancy()
    occupancy._alone = _Interrupted()
    with pytest.raises(KeyboardInterrupt):
        occupancy.if_alone(lambda: None)
    assert not occupancy._alone and not occupancy.is_own
