"""The state of ``HybridAdam``: torch's form in and out, by name, copied, looked at and forgotten; moments keep fp32."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import (
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_trains_alike,
    llama,
    noise,
    same_bits,
    snapshot,
    train,
    wrap,
)
from tests.train.test_optimizer import Q, give_gradients, params


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_state_dict_has_torchs_form_and_keeps_fp32(precision: str, where: str, tmp_path: Path) -> None:
    model = wrap(llama(tied=True), where, tmp_path, precision=precision)
    optimizer = adam(model)
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    stock = torch.optim.AdamW(llama(tied=True).parameters())
    assert state.keys() == stock.state_dict().keys()
    assert state["param_groups"][0]["params"] == stock.state_dict()["param_groups"][0]["params"]
    for index, param in enumerate(model.parameters()):
        entry = state["state"][index]
        assert entry["step"].item() == 2 and {"step", "exp_avg", "exp_avg_sq"} <= entry.keys()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert entry[kind].dtype is torch.float32 and entry[kind].shape == param.shape
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = wrap(llama(tied=True), where, tmp_path, precision=precision)
    fresh.load_state_dict(model.state_dict(dtype=torch.float32))
    other = adam(fresh, lr=0.5)
    other.load_state_dict(loaded)
    assert_same_snapshot(snapshot(model), snapshot(fresh))
    assert train(model, optimizer, [2, 3]) == train(fresh, other, [2, 3])
    assert_same_snapshot(snapshot(model), snapshot(fresh))


def test_plain_bf16_params_keep_fp32_moments_through_a_round_trip() -> None:
    one, two = params(torch.bfloat16), params(torch.bfloat16)
    a, b = gemini.HybridAdam(one, lr=1e-2), gemini.HybridAdam(two, lr=1e-2)
    give_gradients(one, 1)
    a.step()
    b.load_state_dict(a.state_dict())
    for x, y in zip(one, two, strict=True):
        y.data.copy_(x.data)
        assert all(same_bits(a.state[x][k], b.state[y][k]) for k in ("step", "exp_avg", "exp_avg_sq", "residual"))
    give_gradients(one, 2)
    give_gradients(two, 2)
    a.step()
    b.step()
    assert all(same_bits(x.detach(), y.detach()) for x, y in zip(one, two, strict=True))


def test_loads_the_state_of_torchs_adamw(where: str, tmp_path: Path) -> None:
    raw = llama()
    stock = torch.optim.AdamW(raw.parameters(), lr=1e-2, weight_decay=0.1)
    train(raw, stock, range(2), clip=None)
    saved, weights = stock.state_dict(), {n: p.detach().clone() for n, p in raw.named_parameters()}
    plain = Plain(raw, "fp32")
    for name, state in zip(plain.states, saved["state"].values(), strict=True):
        plain.states[name].update(step=2, exp_avg=state["exp_avg"].view(-1), exp_avg_sq=state["exp_avg_sq"].view(-1))
    model = wrap(llama(), where, tmp_path, precision="fp32")
    model.load_state_dict(weights)
    optimizer = adam(model)
    optimizer.load_state_dict(saved)
    assert_trains_alike(model, optimizer, plain, [2])


def test_a_state_of_other_groups_is_refused(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer = adam(model)
    train(model, optimizer, [0])
    before, good = snapshot(model), optimizer.state_dict()
    every = list(model.parameters())
    others = [nn.Parameter(torch.zeros_like(param)) for param in every]
    with pytest.raises(ValueError, match="groups"):
        gemini.HybridAdam([{"params": others[:3]}, {"params": others[3:]}]).load_state_dict(good)
    with pytest.raises(ValueError, match="groups"):
        gemini.HybridAdam(others[:-1]).load_state_dict(good)
    wrong = optimizer.state_dict()
    wrong["state"][3]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(wrong)
    assert_same_snapshot(before, snapshot(model))


def test_loading_an_empty_state_starts_anew(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer = adam(model)
    empty = optimizer.state_dict()
    train(model, optimizer, range(2))
    optimizer.load_state_dict(empty)
    fresh = wrap(llama(), where, tmp_path)
    fresh.load_state_dict(model.state_dict(dtype=torch.float32))
    assert_same_snapshot(snapshot(model), snapshot(fresh))


def test_full_state_by_name(where: str, tmp_path: Path) -> None:
    model = wrap(llama(tied=True), where, tmp_path)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        state = optimizer.full_state(name)
        assert same_bits(state["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
        assert float(state["step"]) == 2
    with pytest.raises(KeyError):
        optimizer.full_state("no.such.param")


def test_torchs_tools_for_state_dicts(where: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = wrap(llama(), where, tmp_path)
    optimizer = adam(model)
    train(model, optimizer, [0])
    expected = model.state_dict()
    found = get_model_state_dict(model)
    assert found.keys() == expected.keys() and all(same_bits(found[n], expected[n]) for n in expected)
    states = get_optimizer_state_dict(model, optimizer)
    assert same_bits(states["state"][Q]["exp_avg"], snapshot(model)[Q]["exp_avg"])
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        fresh = wrap(llama(), where, tmp_path)
        fresh.load_state_dict(model.state_dict(dtype=torch.float32))
        set_optimizer_state_dict(fresh, adam(fresh), states, options=options)
        assert_same_snapshot(snapshot(model), snapshot(fresh))


def test_a_copy_of_an_optimizer_of_plain_params() -> None:
    ours = params(torch.float32)
    optimizer = gemini.HybridAdam(ours, lr=1e-2)
    give_gradients(ours, 1)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    theirs = twin.param_groups[0]["params"]
    for one, some in ((optimizer, ours), (twin, theirs)):
        give_gradients(some, 2)
        one.step()
    assert all(same_bits(a.detach(), b.detach()) and a is not b for a, b in zip(ours, theirs, strict=True))


def test_a_plain_model_is_pickled_and_copied_with_its_optimizer(tmp_path: Path) -> None:
    """As with torch's own; the copy is as good as the first one, managed too."""
    raw = Blocks()
    optimizer = gemini.HybridAdam(raw.parameters(), lr=1e-2)
    noise_of = noise(2, 5, 32, dtype=torch.float32)
    raw(noise_of).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, twin = copied((raw, optimizer))
        assert twin.step_in_backward is False and twin.state.keys() == set(model.parameters())
        model = wrap(model, "ram", tmp_path, precision="fp32")
        assert twin.full_state("layers.0.weight")["step"] == 1
        model(noise_of).square().mean().backward()
        twin.step()
    torch.save(raw, tmp_path / "raw.pt")
    shallow = copy.copy(optimizer)
    raw(noise_of).square().mean().backward()
    optimizer.step()
    assert shallow.state_dict()["state"][0]["step"] == 2
    assert all(same_bits(p.detach(), model.full_param(name)) for name, p in raw.named_parameters())


def test_states_are_there_to_be_looked_at(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer, param = adam(model), model.get_parameter(Q)
    assert not optimizer.state[param]["exp_avg"].any()
    train(model, optimizer, [0])
    state = optimizer.state[param]
    assert set(state) == {"step", "residual", "residual_of", "exp_avg", "exp_avg_sq"} and state["step"] == 1
    assert all(same_bits(state[kind], snapshot(model)[Q][kind]) for kind in ("exp_avg", "exp_avg_sq"))
    assert param not in optimizer.state and "momentum_buffer" not in state
    with pytest.raises(RuntimeError, match="Inplace update"):  # to a copy, which nobody would look at
        state["exp_avg"].zero_()
    with pytest.raises(gemini.GeminiError, match="load_state_dict"):
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])  # type: ignore[index]


FORGET: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "assign": lambda o, p: setattr(o, "state", collections.defaultdict(dict)),
    "clear": lambda o, p: o.state.clear(),
    "pop": lambda o, p: o.state.pop(p)["exp_avg"].shape == p.shape or pytest.fail("not its state"),
    "del": lambda o, p: o.state.__delitem__(p),
    "set": lambda o, p: o.state.__setitem__(p, {}),
}


@pytest.mark.parametrize("way", FORGET)
def test_states_are_forgotten_as_in_torch(way: str, where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer, param = adam(model), model.get_parameter(Q)
    train(model, optimizer, [0])
    before = snapshot(model)
    FORGET[way](optimizer, param)
    left = optimizer.state_dict()["state"]
    assert len(left) == (0 if way in ("assign", "clear") else len(before) - 1)
    assert optimizer.full_state(Q)["step"] == 0 and not optimizer.full_state(Q)["exp_avg"].any()
    assert same_bits(snapshot(model)[Q]["weights"], before[Q]["weights"])
    with pytest.raises(gemini.GeminiError, match="load_state_dict"):
        optimizer.state[param] = {"step": torch.tensor(1.0)}
    with pytest.raises(gemini.GeminiError, match="load_state_dict"):
        optimizer.state = collections.defaultdict(dict, {param: {"step": torch.tensor(1.0)}})
    train(model, optimizer, [1])


def test_loaded_groups_are_the_optimizers_own(where: str, tmp_path: Path) -> None:
    """A scheduler fills a learning rate that is a tensor: not that of the optimizer the state came from."""
    model = wrap(llama(), where, tmp_path)
    first = gemini.HybridAdam([{"params": list(model.parameters()), "lr": torch.tensor(0.5), "tags": ["a"]}])
    state = first.state_dict()
    first.load_state_dict(state)
    first.param_groups[0]["lr"].fill_(9.0)
    first.param_groups[0]["tags"].append("b")
    assert state["param_groups"][0]["lr"] == 0.5 and state["param_groups"][0]["tags"] == ["a"]
