"""``HybridAdam``: the update itself, on plain and managed params, closures, groups and schedulers.

Alone on a plain model it must give the bits of the reference and agree with torch's own Adam and AdamW. Its state is in
``test_optimizer_state.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gemini
from tests.plain import adam_update
from tests.train.helpers import (
    DTYPES,
    Blocks,
    Plain,
    adam,
    assert_same_state,
    assert_trains_alike,
    llama,
    noise,
    on_batch,
    same_bits,
    snapshot,
    squares,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of

Q = "model.layers.1.self_attn.q_proj.weight"


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    """Of odd sizes, one of them a transposed view, one a scalar."""
    given = [noise(33, 7, seed=1), noise(5000, seed=2), noise(8, 12, seed=3).t(), noise(seed=4), noise(1, 1, 3, seed=5)]
    return [nn.Parameter(value.to(dtype)) for value in given]


def give_gradients(to: list[nn.Parameter], seed: int) -> None:
    for i, param in enumerate(to):
        param.grad = noise(*param.shape, seed=100 * seed + i).to(param.dtype)


# ---- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_plain_params_have_the_bits_of_the_reference(precision: str, decoupled: bool) -> None:
    ours = params(DTYPES[precision])
    optimizer = gemini.HybridAdam(ours, lr=1e-2, weight_decay=0.1, eps=1e-6, decoupled=decoupled)
    states = []
    for param in ours:
        master = param.detach().float().contiguous().view(-1).clone()
        residual = torch.zeros_like(master, dtype=torch.int16) if precision == "bf16" else None
        weights = master.bfloat16() if precision == "bf16" else master
        states.append((weights, residual, torch.zeros_like(master), torch.zeros_like(master)))
    for step in range(1, 5):
        give_gradients(ours, step)
        if step == 3:
            ours[1].grad = None
        optimizer.step()
        for i, (param, state) in enumerate(zip(ours, states, strict=True)):
            if param.grad is not None:
                own = step - 1 if i == 1 and step > 3 else step
                how = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "decoupled": decoupled}
                adam_update(*state, param.grad.contiguous().view(-1), own, **how)
            assert same_bits(param.detach().contiguous().view(-1), state[0].to(param.dtype)), (step, i)
            assert same_bits(optimizer.state[param]["exp_avg"].view(-1), state[2])


@pytest.mark.parametrize("decoupled", [True, False])
def test_one_update_agrees_with_torch(decoupled: bool) -> None:
    ours, theirs = params(torch.float32), params(torch.float32)
    # L2 is added to the gradient and may cancel it; an eps that is not tiny keeps such an element from mattering.
    how: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8 if decoupled else 1e-3}
    stock = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **how)
    optimizer = gemini.HybridAdam(ours, decoupled=decoupled, **how)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        stock.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_adam_on_a_managed_model(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama(), decoupled=False)
    assert train(model, adam(model, decoupled=False), range(3)) == train_plain(plain, range(3))
    assert_same_state(model, plain)


def test_first_update_of_a_managed_model_agrees_with_torch(where: str, tmp_path: Path) -> None:
    model, raw = wrap(llama(), where, tmp_path, precision="fp32"), llama()
    train(model, adam(model), [0], clip=0.5)
    on_batch(raw, 0).backward()
    nn.utils.clip_grad_norm_(raw.parameters(), 0.5)
    torch.optim.AdamW(raw.parameters(), lr=1e-2, weight_decay=0.1).step()
    for name, param in raw.named_parameters():
        # Where a gradient is about eps, its update turns on the last bits of the norm: those elements are few.
        far = ~torch.isclose(model.full_param(name), param.detach(), rtol=1e-5, atol=1e-6)
        assert far.float().mean() < 1e-3, name


def test_closure_and_complex_uses() -> None:
    ours = params(torch.float32)
    optimizer = gemini.HybridAdam(ours, lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in ours)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    sparse = nn.Embedding(8, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(gemini.GeminiError, match="sparse=False"):
        gemini.HybridAdam(sparse.parameters()).step()


def test_closure_on_a_managed_model(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = on_batch(model, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == train_plain(plain, [0, 0, 0], clip=None)
    assert_same_state(model, plain)


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_groups_inside_one_chunk(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    fast = [(n, p) for n, p in model.named_parameters() if "q_proj" in n or "mlp.up" in n]
    still = [(n, p) for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if all(p is not q for _, q in fast + still)]
    assert len({world_of(model).by_names[n].chunk.spec.index for n, _ in fast + still}) < len(fast + still)
    optimizer = gemini.HybridAdam(
        [
            {"params": rest},
            {"params": [p for _, p in fast], "lr": 5e-2},
            {"params": [p for _, p in still], "weight_decay": 0.0},
        ],
        lr=1e-2, weight_decay=0.1,
    )  # fmt: skip
    plain.of = {n: {"lr": 5e-2} for n, _ in fast} | {n: {"weight_decay": 0.0} for n, _ in still}
    assert_trains_alike(model, optimizer, plain, range(3))


def test_params_left_out_of_the_optimizer_stay(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    before = snapshot(model)
    optimizer = gemini.HybridAdam([p for n, p in model.named_parameters() if "layers.1" in n], lr=1e-2)
    train(model, optimizer, range(2))
    after = snapshot(model)
    for name in before:
        changed = any(not same_bits(before[name][kind], after[name][kind]) for kind in before[name])
        assert changed == ("layers.1" in name), name


def test_what_no_optimizer_owns_stays_clipped(where: str, tmp_path: Path) -> None:
    """Its gradient waits after the step, and is read as torch's would be, until more is added to it."""
    model = wrap(Blocks(), where, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    left_out = names[0]
    optimizer = gemini.HybridAdam([p for n, p in model.named_parameters() if n != left_out], lr=1e-2)
    model(noise(3, 32)).square().sum().backward()
    before = model.full_grad(left_out)
    assert before is not None
    norm = float(model.clip_grad_norm_(0.5))
    assert same_bits(model.full_grad(left_out), before)
    optimizer.step()
    optimizer.zero_grad()
    clipped = model.full_grad(left_out)
    assert clipped is not None
    assert same_bits(clipped, before.float() * (0.5 / (norm + 1e-6)))
    model.clip_grad_norm_(0.25, params=[model.get_parameter(left_out)])
    optimizer.step()
    again = model.full_grad(left_out)
    assert again is not None
    assert float(again.float().norm()) == pytest.approx(0.25, rel=1e-3)


def told_of_no_optimizer(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in told if "no optimizer" in str(one.message)]


def test_gradients_without_an_optimizer_warn_once(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path)
    first, *others = model.parameters()
    optimizer = gemini.HybridAdam(others, lr=1e-2)
    (said,) = told_of_no_optimizer(lambda: train(model, optimizer, range(2), squares))
    assert said.startswith(f"1 of {len(others) + 1} params, for example 'layers.0.weight', have a gradient and no")


@pytest.mark.parametrize("how", ["all", "frozen", "frozen later", "two optimizers", "not used"])
def test_no_false_alarm_of_gradients_without_an_optimizer(how: str, tmp_path: Path) -> None:
    raw = Blocks()
    if how == "frozen":
        raw.layers[0].requires_grad_(False)
    if how == "not used":
        raw.spare = nn.Linear(8, 8)
    model = wrap(raw, "ram", tmp_path)
    if how == "frozen later":
        model.layers[0].requires_grad_(False)
    ours = [p for n, p in model.named_parameters() if p.requires_grad and "spare" not in n]
    half = len(ours) // 2 if how == "two optimizers" else len(ours)
    optimizers = [gemini.HybridAdam(part, lr=1e-2) for part in (ours[:half], ours[half:]) if part]

    def run() -> None:
        for seed in range(2):
            squares(model, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert told_of_no_optimizer(run) == []


def test_two_optimizers_on_one_model(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    named = list(model.named_parameters())
    first = gemini.HybridAdam([p for n, p in named if "layers" in n], lr=1e-2, weight_decay=0.1)
    second = gemini.HybridAdam([p for n, p in named if "layers" not in n], lr=3e-3, weight_decay=0.1)
    plain.of = {n: {"lr": 3e-3} for n, _ in named if "layers" not in n}
    for seed in range(3):
        loss, theirs = on_batch(model, seed), on_batch(plain.model, seed)
        loss.backward()
        plain.backward(theirs)
        model.clip_grad_norm_(0.5)
        plain.clip(0.5)
        first.step()
        second.step()  # clipped as well
        first.zero_grad()
        second.zero_grad()
        plain.step()
        assert loss.item() == theirs.item()
    assert_same_state(model, plain)


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=3e-2, total_steps=8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer, stock = adam(model), torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-2, weight_decay=0.1)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](stock)
    for seed in range(5):
        group = stock.param_groups[0]
        plain.lr = group["lr"]
        plain.hyper["betas"] = group["betas"]  # OneCycleLR moves them too
        assert train(model, optimizer, [seed]) == train_plain(plain, [seed])
        stock.step()
        ours.step()
        theirs.step()
        assert ours.get_last_lr() == theirs.get_last_lr()
    assert_same_state(model, plain)
