"""A new ``HybridAdam`` on params that had one before starts anew, as in torch; the one before says what it has lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.train.helpers import (
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    assert_trains_alike,
    llama,
    same_bits,
    snapshot,
    squares,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of


def forget(plain: Plain) -> None:
    """What a new optimizer is to the plain loop: masters stay."""
    for state in plain.states.values():
        state["step"] = 0
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_new_optimizer_has_the_bits_of_a_loop_with_a_new_one(where: str, precision: str, tmp_path: Path) -> None:
    plain = Plain(llama(), precision, scale=2.0**16 if precision == "fp16" else None)
    model = wrap(llama(), where, tmp_path, precision=precision)
    for first in (0, 2):  # each with updates in flight that the one before has handed over
        optimizer = adam(model)
        assert optimizer.state_dict()["state"] == {}
        forget(plain)
        assert train(model, optimizer, [first, first + 1]) == train_plain(plain, [first, first + 1])
    assert_same_state(model, plain)
    del optimizer
    forget(plain)  # nobody has them any more, and they are there all the same
    optimizer = adam(model)
    assert_same_state(model, plain)
    assert_trains_alike(model, optimizer, plain, [4])


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_it_is_a_new_optimizer_on_a_plain_model(where: str, tmp_path: Path) -> None:
    """In fp32, where the master is the weight: HybridAdam itself, unmanaged, and torch's own."""
    model, raw, stock = wrap(llama(), where, tmp_path, precision="fp32"), llama(), llama()
    for seeds in ([0, 1], [2]):
        ours, theirs = adam(model), adam(raw)
        torchs = torch.optim.AdamW(stock.parameters(), lr=1e-2, weight_decay=0.1)
        train(model, ours, seeds, clip=None)
        train(raw, theirs, seeds, clip=None)
        train(stock, torchs, seeds, clip=None)
    for name, param in raw.named_parameters():
        assert same_bits(model.full_param(name), param.detach()), name
        far = ~torch.isclose(param.detach(), stock.get_parameter(name).detach(), rtol=1e-4, atol=1e-4)
        assert far.float().mean() < 1e-2, name  # where a gradient is about eps its update turns on the last bits


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_gradients_that_are_there_are_for_the_new_one(where: str, tmp_path: Path) -> None:
    model, plain = wrap(Blocks(), where, tmp_path), Plain(Blocks())
    train(model, adam(model), [0], squares, clip=None)
    train_plain(plain, [0], squares, clip=None)
    squares(model, 1).backward()
    plain.backward(squares(plain.model, 1))
    forget(plain)
    adam(model).step()
    plain.step()
    assert_same_state(model, plain)


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_a_new_one_that_steps_in_backward(gradients: str, tmp_path: Path) -> None:
    model, plain = wrap(Blocks(), "disk", tmp_path, gradients=gradients), Plain(Blocks())
    for seed in range(3):
        optimizer = adam(model, step_in_backward=True)
        forget(plain)
        train(model, optimizer, [seed], squares, clip=None)
        train_plain(plain, [seed], squares, clip=None)
    assert_same_state(model, plain)


def test_some_params_change_hands(tmp_path: Path) -> None:
    """A second training phase over a part: the rest goes on where it was."""
    model, plain = wrap(Blocks(), "disk", tmp_path), Plain(Blocks())
    named = dict(model.named_parameters())
    part = [name for name in named if "layers.1" in name]
    first = gemini.HybridAdam([p for n, p in named.items() if n not in part], lr=1e-2, weight_decay=0.1)
    first.add_param_group({"params": [named[name] for name in part]})
    train(model, first, [0, 1], squares, clip=None)
    train_plain(plain, [0, 1], squares, clip=None)
    before = snapshot(model)
    second = gemini.HybridAdam([named[name] for name in part], lr=1e-2, weight_decay=0.1)
    after = snapshot(model)
    for name in named:
        for kind, value in before[name].items():
            if name in part and kind in ("exp_avg", "exp_avg_sq", "step"):
                assert not after[name][kind].any(), (name, kind)
            else:
                assert same_bits(value, after[name][kind]), (name, kind)
    squares(model, 2).backward()
    world = snapshot(model)
    calls: list[Any] = [
        first.step, first.state_dict, lambda: first.load_state_dict({"state": {}, "param_groups": []}), first.owner,
        lambda: first.full_state(part[0]), lambda: first.state[named[part[0]]],
        lambda: gemini.save_checkpoint(tmp_path / "c", model, first),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(gemini.GeminiError, match="'layers.1.(weight|bias)'.* given to another HybridAdam"):
            call()
    assert_same_snapshot(world, snapshot(model))
    assert first.full_state("layers.0.weight")["step"] == 2  # this one is still its own
    second.step()
    assert second.full_state(part[0])["step"] == 1
    first.zero_grad()


def test_add_param_group_takes_over_too(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    params = list(model.parameters())
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    second = gemini.HybridAdam(params[:2])
    assert first.full_state("layers.2.weight")["step"] == 1
    second.add_param_group({"params": params[2:]})
    assert not snapshot(model)["layers.2.weight"]["exp_avg"].any()
    train(model, second, [1], squares, clip=None)
    assert second.full_state("layers.2.weight")["step"] == 1


def test_a_refused_one_takes_nothing_over(tmp_path: Path) -> None:
    model, other = wrap(Blocks(), "ram", tmp_path), wrap(Blocks(), "ram", tmp_path)
    optimizer = adam(model)
    train(model, optimizer, [0], squares, clip=None)
    before = snapshot(model)
    params = list(model.parameters())
    for wrong in (
        [{"params": params[:3]}, {"params": params[2:]}],
        [{"params": params}, {"params": other.parameters()}],
        [{"params": params}, {"params": [3]}],
    ):
        with pytest.raises((ValueError, TypeError)):
            gemini.HybridAdam(wrong)
    assert_same_snapshot(before, snapshot(model))
    squares(model, 1).backward()
    optimizer.step()


def test_a_checkpoint_goes_to_the_newest(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0, 1], squares, clip=None)
    gemini.save_checkpoint(tmp_path / "c", model, first)
    before = snapshot(model)
    second = adam(model, lr=0.5)
    train(model, second, [2], squares, clip=None)
    gemini.load_checkpoint(tmp_path / "c", model, second)
    assert_same_snapshot(before, snapshot(model))
    with pytest.raises(gemini.GeminiError, match="given to another"):
        gemini.load_checkpoint(tmp_path / "c", model, first)
    assert_same_snapshot(before, snapshot(model))


def test_after_an_update_broke_off_a_new_one_is_made_and_a_checkpoint_loaded(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    gemini.save_checkpoint(tmp_path / "c", model, first)
    before = snapshot(model)
    world_of(model).state.mark_corrupted(OSError("the disk"))
    second = adam(model)
    gemini.load_checkpoint(tmp_path / "c", model, second)
    assert_same_snapshot(before, snapshot(model))


def test_states_of_steps_before_the_wrap_are_adopted_from_the_last_owner(tmp_path: Path) -> None:
    raw = Blocks()
    first, second = gemini.HybridAdam(raw.parameters()), gemini.HybridAdam(raw.parameters())
    for optimizer in (first, second, second):
        squares(raw.bfloat16(), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = wrap(raw, "ram", tmp_path)
    assert second.full_state("layers.0.weight")["step"] == 2
    with pytest.raises(gemini.GeminiError, match="given to another"):
        first.step()
    train(model, second, [1], squares, clip=None)


def test_start_anew_takes_back(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    second = adam(model)
    train(model, second, [1], squares, clip=None)
    for touch in (lambda s, p: s.pop(p), lambda s, p: s.__setitem__(p, {}), lambda s, p: s.__delitem__(p)):
        with pytest.raises(gemini.GeminiError, match="given to another"):
            touch(first.state, model.layers[0].weight)
    first.state.clear()  # of what is its own, nothing
    assert second.full_state("layers.0.weight")["step"] == 1
    first.start_anew()
    assert first.state_dict()["state"] == {}
    train(model, first, [2], squares, clip=None)
    with pytest.raises(gemini.GeminiError, match="given to another"):
        second.step()
