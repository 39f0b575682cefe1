"""Sophia: its rules against the paper's, and estimates of the diagonal of the Hessian of a managed model.

Both rules are written down here again from the paper (Liu et al., 2023, arXiv:2305.14342), in fp64, in its variables.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import optim
from gemini.errors import GeminiError
from gemini.train.gradients.hutchinson import HessianProbe
from tests import models
from tests.train.test_optim import STEPS, drawn, gradients, loss_of, wrapped


def sophia(
    w: Tensor, lr: float, betas: tuple[float, float], gamma: float, decay: float, bs: float, every: int
) -> Tensor:
    """Liu et al., 2023, algorithm 3, with the Gauss-Newton-Bartlett estimate of algorithm 2."""
    (b1, b2), m, h = betas, torch.zeros_like(w), torch.zeros_like(w)
    for t, grad in enumerate(gradients()):
        if t % every == 0:
            h = b2 * h + (1 - b2) * (bs * estimate(t).double() ** 2)
        m = b1 * m + (1 - b1) * grad.double()
        w = w - lr * decay * w
        w = w - lr * (m / (gamma * h).clamp(min=1e-12)).clamp(-1, 1)
    return w


def estimate(t: int) -> Tensor:
    return drawn(500 + t, 1e-2)


def test_sophia_is_the_papers() -> None:
    begin, betas = drawn(0), (0.965, 0.99)
    param = nn.Parameter(begin.clone())
    optimizer = optim.SophiaG([param], lr=1e-2, rho=0.5, bs=1000.0)
    for t, grad in enumerate(gradients()):
        if t % 5 == 0:
            with optimizer.estimating_hessian():
                param.grad = estimate(t)
            assert param.grad is None
        param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    theirs = sophia(begin.double(), 1e-2, betas, 0.5, 0.1, 1000.0, every=5)
    torch.testing.assert_close(param.detach().double(), theirs, rtol=1e-5, atol=1e-5)
    clipped = (param.detach() - begin).abs() > 0.9 * STEPS * 1e-2
    assert 0.01 < clipped.float().mean() < 0.99, "some elements of the step were clipped, and some were not"


def settings_of(placed: str, tmp_path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if placed == "on nvme":
        settings["memory"] = gemini.MemoryBudget(cpu="1GiB", nvme="64MiB", nvme_path=tmp_path)
        settings["placement"] = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    elif placed == "transient":
        settings["gradients"] = "transient"
    elif placed == "streamed":
        settings |= {"device": "standin", "placement": gemini.StaticPlacement(updates_on_gpu=1)}
        settings["memory"] = gemini.MemoryBudget(cpu="1GiB", gpu="1GiB")
    return settings


@pytest.mark.parametrize("placed", ["in memory", "on nvme", "transient", "streamed"])
def test_estimates_of_the_hessian_have_the_bits_of_the_plain_loop(placed: str, tmp_path: Path) -> None:
    """Weights and momentum stay; the estimate is made of the gradients of its block alone."""
    rule, how = optim.SophiaGRule(), {"lr": 1e-3, "bs": 7.0}
    settings = settings_of(placed, tmp_path)
    config = gemini.GeminiConfig(
        **{"precision": "bf16", "device": "cpu", "optimizer": rule, "max_chunk": 6000} | settings
    )
    model = gemini.GeminiDDP(models.make_model("llama"), config)
    optimizer = optim.SophiaG(model.parameters(), **how, step_in_backward=placed == "transient")  # type: ignore[arg-type]
    plain = models.make_model("llama")
    masters = {name: param.detach().float().reshape(-1).clone() for name, param in plain.named_parameters()}
    states = {n: {"exp_avg": torch.zeros_like(m), "hessian": torch.zeros_like(m)} for n, m in masters.items()}
    for param in plain.parameters():
        param.data = param.data.bfloat16()
    group = {**rule.defaults, **how}
    for seed, estimates in enumerate([True, False, False, True, False]):
        if estimates:
            with optimizer.estimating_hessian():
                assert (loss := loss_of(model, seed)).backward() is None
        else:
            (loss := loss_of(model, seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (wanted := loss_of(plain, seed)).backward()
        assert loss.item() == wanted.item()
        scalars = rule.scalars({**group, "estimates_hessian": estimates}, seed + 1, 1.0)
        for name, param in plain.named_parameters():
            assert param.grad is not None
            rule.update(masters[name], param.grad.reshape(-1), states[name], scalars, None)
            param.data, param.grad = models.rounded(masters[name], "bf16").view(param.shape), None
    for name, master in masters.items():
        assert torch.equal(model.full_param(name, torch.float32).reshape(-1), master), name
        kept = optimizer.full_state(name)
        assert kept["step"] == 5, "an estimate counts as an update"
        for kind, state in states[name].items():
            assert torch.equal(kept[kind].reshape(-1), state), (name, kind)
    assert not optimizer.param_groups[0]["estimates_hessian"]


def test_an_estimate_takes_no_gradients_of_a_training_step() -> None:
    model = wrapped(optim.SophiaGRule())
    optimizer = optim.SophiaG(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(GeminiError, match="gradients of a training step are there"), optimizer.estimating_hessian():
        pass
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError), optimizer.estimating_hessian():
        loss_of(model, 1).backward()
        _ = 1 / 0
    assert not optimizer.param_groups[0]["estimates_hessian"]
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()  # the gradients of the block that broke off are gone
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


# ---- Sophia-H --------------------------------------------------------------------------------------------------------

PLACES = ["in memory", "on nvme", "transient", "streamed"]


def test_sophia_h_is_the_papers() -> None:
    """Algorithm 3 with the estimate of algorithm 1, on a loss whose Hessian is known, negative values included."""
    w, curvature = drawn(0)[:500], drawn(1)[:500]
    param, lr, (b1, b2), gamma = nn.Parameter(w.clone()), 1e-2, (0.965, 0.99), 0.3
    optimizer = optim.SophiaH([param], lr=lr, rho=gamma)

    def loss() -> Tensor:
        return (curvature * param * param).sum() / 2 + (param[1:] * param[:-1]).sum()

    matrix = torch.diag(curvature.double()) + torch.diag(torch.ones(499), 1) + torch.diag(torch.ones(499), -1)
    theirs, m, h, updates = w.double(), torch.zeros(500).double(), torch.zeros(500).double(), 0
    for t in range(STEPS):
        if t % 5 == 0:
            u = HessianProbe(updates, [param]).vector(0, param).double()
            optimizer.estimate_hessian(loss())
            assert param.grad is None
            h, updates = b2 * h + (1 - b2) * (u * (matrix @ u)), updates + 1
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        m, updates = b1 * m + (1 - b1) * (matrix @ theirs), updates + 1
        theirs = theirs - lr * 0.1 * theirs
        theirs = theirs - lr * (m / (gamma * h).clamp(min=1e-12)).clamp(-1, 1)
    torch.testing.assert_close(param.detach().double(), theirs, rtol=1e-5, atol=1e-5)
    assert 0.1 < (h < 0).double().mean() < 0.9


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_estimates_are_right_in_the_mean() -> None:
    """Of 2,000 estimates, within four times what the mean of so many scatters by."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(), torch.randn(8, 4).double()
    params, count = dict(net.named_parameters()), 2000

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, values, (x,)).square().mean()

    hessian: Any = torch.func.hessian(loss)(dict(params))
    found: dict[str, list[Tensor]] = {name: [] for name in params}
    for number in range(count):
        probe = HessianProbe(number, list(params.values()))
        torch.autograd.backward(loss(params), create_graph=True)
        for param in params.values():
            param.grad = probe.take(param, param.grad)  # type: ignore[arg-type]
        probe.product().backward()
        for name, param in params.items():
            assert param.grad is not None
            found[name].append(probe.take(param, param.grad))  # type: ignore[arg-type]
            param.grad = None
    far = 0
    for name, estimates in found.items():
        all_of_them = torch.stack(estimates).flatten(1)
        wanted = hessian[name][name].reshape(all_of_them[0].numel(), -1).diagonal()
        scatter = all_of_them.std(0) / count**0.5
        assert ((all_of_them.mean(0) - wanted).abs() < 4 * scatter).all(), name
        far += int((wanted.abs() > 8 * scatter).sum())
    assert far >= 4, "for some elements 0 would be twice as far off as is allowed"


def sophia_h(placed: str, precision: str, tmp_path: Path) -> tuple[gemini.GeminiDDP, optim.SophiaH]:
    settings = settings_of(placed, tmp_path)
    config = {"precision": precision, "device": "cpu", "optimizer": optim.SophiaHRule(), "max_chunk": 6000}
    model = gemini.GeminiDDP(twice_differentiable(), gemini.GeminiConfig(**(config | settings)))
    return model, optim.SophiaH(model.parameters(), lr=1e-3, step_in_backward=placed == "transient")


def twice_differentiable() -> Any:
    model = models.make_model("llama")
    model.set_attn_implementation("eager")
    return model


def train(model: Any, optimizer: optim.SophiaH, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        if seed % 2 == 0:
            optimizer.estimate_hessian(loss_of(model, seed))
        (loss := loss_of(model, seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("placed", PLACES)
def test_hutchinsons_estimates_have_the_bits_of_the_plain_model(
    placed: str, checkpointing: bool, tmp_path: Path
) -> None:
    plain = twice_differentiable()
    alone = optim.SophiaH(plain.parameters(), lr=1e-3)
    wanted = train(plain, alone, range(4))
    model, optimizer = sophia_h(placed, "fp32", tmp_path)
    if checkpointing:
        model.activation_checkpointing_enable()
    assert train(model, optimizer, range(4)) == wanted
    for name, param in plain.named_parameters():
        kept = optimizer.full_state(name)
        assert kept["step"] == 6 and kept["hessian"].abs().max() > 0, "an estimate counts as an update"
        assert torch.equal(kept["hessian"].view_as(param), alone.state[param]["hessian"]), name
        assert torch.equal(model.full_param(name), param), name


def test_hutchinsons_estimates_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = sophia_h("in memory", "bf16", tmp_path)
    train(model, optimizer, range(3))
    gemini.save_checkpoint(tmp_path / "there", model, optimizer)
    rest = train(model, optimizer, range(3, 6))
    other, its = sophia_h("transient", "bf16", tmp_path)
    gemini.load_checkpoint(tmp_path / "there", other, its)
    assert train(other, its, range(3, 6)) == rest


def test_a_hessian_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """And nothing is changed: the model trains on."""
    model, optimizer = sophia_h("in memory", "bf16", tmp_path)
    with pytest.raises(GeminiError, match="no gradient of this loss depends on a param"):
        optimizer.estimate_hessian(sum(param.float().sum() for param in model.parameters()))
    loss_of(model, 0).backward()
    with pytest.raises(GeminiError, match="gradients of a training step are there"):
        optimizer.estimate_hessian(loss_of(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    model.set_attn_implementation("sdpa")
    with pytest.raises(GeminiError, match="attn_implementation='eager'"):
        optimizer.estimate_hessian(loss_of(model, 0))
    assert not optimizer.param_groups[0]["estimates_hessian"]
    loss_of(model, 1).backward()
    optimizer.step()
    model, optimizer = sophia_h("in memory", "fp16", tmp_path)
    with pytest.raises(GeminiError, match="no scale of fp16 fits both"):
        optimizer.estimate_hessian(loss_of(model, 0))
