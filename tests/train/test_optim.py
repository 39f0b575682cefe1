"""``gemini.optim``: each rule against another implementation of it, and what its classes take.

Torch has SGD. Lion is written down here again from its paper, in fp64 and in the paper's own
variables, not in those of the kernels.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import optim
from tests import models
from tests.train.test_update_rules import loss_of
from tests.world import world_of

STEPS = 20


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(5_000, generator=torch.Generator().manual_seed(seed)) * scale


def gradients() -> list[Tensor]:
    """Of a weight: one part follows from step to step, so that momentum matters, another does not."""
    return [drawn(1, 1e-2) * math.cos(step / 3) + drawn(100 + step, 1e-2) for step in range(STEPS)]


def trained(make: Callable[..., torch.optim.Optimizer], begin: Tensor) -> Tensor:
    param = nn.Parameter(begin.clone())
    optimizer = make([param])
    for grad in gradients():
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_sgd_is_torchs(how: dict[str, Any]) -> None:
    begin = drawn(0)
    ours = trained(lambda params: optim.SGD(params, lr=0.1, **how), begin)
    theirs = trained(lambda params: torch.optim.SGD(params, lr=0.1, foreach=False, **how), begin)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def lion(w: Tensor, lr: float, betas: tuple[float, float], decay: float) -> Tensor:
    """Chen et al., 2023, algorithm 2."""
    (b1, b2), m = betas, torch.zeros_like(w)
    for g in gradients():
        c = b1 * m + (1 - b1) * g.double()
        w = w - lr * (c.sign() + decay * w)
        m = b2 * m + (1 - b2) * g.double()
    return w


def test_lion_is_the_papers() -> None:
    begin, betas = drawn(0), (0.9, 0.99)
    ours = trained(lambda params: optim.Lion(params, lr=1e-2, betas=betas, weight_decay=0.1), begin)
    torch.testing.assert_close(ours.double(), lion(begin.double(), 1e-2, betas, 0.1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(50, 100), (100, 50), (67, 67)])
def test_muon_is_torchs(shape: tuple[int, int], nesterov: bool, adjust: str) -> None:
    rows, columns = shape
    ours, theirs = (nn.Parameter(drawn(0)[: rows * columns].view(shape).clone()) for _ in range(2))
    how = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine = optim.Muon([ours], adjust_lr=adjust, **how)  # type: ignore[arg-type]
    stock = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **how)  # type: ignore[arg-type]
    for grad in gradients():
        for param, optimizer in ((ours, mine), (theirs, stock)):
            param.grad = grad[: rows * columns].view(shape).clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(40, 100), (5, 10, 40), (2000,)])
def test_adalomo_is_the_papers(shape: tuple[int, ...]) -> None:
    """Lv et al., 2023 (arXiv:2310.10195), algorithm 1, in fp64, with sums in the place of means."""
    size, lr, decay = math.prod(shape), 0.05, 0.1
    begin = drawn(0)[:size].view(shape)
    param = nn.Parameter(begin.clone())
    optimizer = optim.AdaLomo([param], lr=lr, weight_decay=decay)
    w = begin.double()
    rows, columns, second = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for t, grad in enumerate(gradients(), 1):
        param.grad = grad[:size].view(shape).clone() * (1 + 99 * (t % 3 == 0))  # steps that are clipped, and not
        optimizer.step()
        g = param.grad.double()
        beta = 1 - t**-0.8
        rows = beta * rows + (1 - beta) * (g**2).sum(-1, keepdim=True)
        second = beta * second + (1 - beta) * g**2
        if len(shape) > 1:
            columns = beta * columns + (1 - beta) * (g**2).sum(-2, keepdim=True)
            second = rows * columns / rows.sum(-2, keepdim=True)
        u = g / second.sqrt()
        u = u / max(1, (u**2).mean().sqrt().item())
        own = lr * max(1e-3, (w**2).mean().sqrt().item())
        w = w * (1 - own * decay) - own * u  # decay is not the paper's but its authors' code's
        if len(shape) == 1:
            continue
        second = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(param.detach().double(), w, rtol=2e-5, atol=2e-6)


def test_muon_leaves_to_adamw_what_is_no_hidden_matrix() -> None:
    model, other = models.make_model("llama"), models.make_model("llama")
    groups = optim.muon_groups(model, lr=1e-3, betas=(0.9, 0.99))
    of_adamw = {name for name, p in model.named_parameters() if any(p is one for one in groups[1]["params"])}
    assert of_adamw == {n for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n or "lm_head" in n}
    muon = optim.Muon(groups, lr=0.1)
    adam = gemini.HybridAdam(
        [p for n, p in other.named_parameters() if n in of_adamw], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1
    )
    for seed in range(3):
        for one in (model, other):
            for number, (_, param) in enumerate(one.named_parameters()):
                param.grad = drawn(seed * 100 + number)[: param.numel() % 5000 or 1].new_ones(param.shape) * 0.1
        muon.step()
        adam.step()
    for name, param in other.named_parameters():
        assert torch.equal(param, dict(model.named_parameters())[name]) == (name in of_adamw), name
    tied = models.make_model("tied")
    assert len(optim.muon_groups(tied)) == 2 and sum(len(g["params"]) for g in optim.muon_groups(tied)) == len(
        list(tied.parameters())
    )


# ---- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: optim.SGD(p, lr=-1.0), ValueError, "lr of SGD must be a finite number and not negative"),
        (lambda p: optim.SGD(p, lr=math.nan), ValueError, "lr of SGD must be a finite number"),
        (lambda p: optim.SGD(p, lr=1e39), ValueError, "lr of SGD must be a finite number .* got 1e\\+39"),
        (lambda p: optim.SGD(p, nesterov=True, momentum=0.9, dampening=0.1), ValueError, "nesterov of SGD needs"),
        (lambda p: optim.SGD(p, nesterov=True), ValueError, "nesterov of SGD is True, .* keeps no state"),
        (lambda p: optim.SGD(p, momentum=0.9, nesterov=1), TypeError, "nesterov of SGD must be True or False"),
        (lambda p: optim.SGD([{"params": p, "momentum": 0.9}]), ValueError, "momentum of param group 0 is 0.9"),
        (lambda p: optim.Lion(p, betas=(0.9, 1.0)), ValueError, r"betas of Lion must be two numbers in \[0, 1\)"),
        (lambda p: optim.Lion(p, betas=0.9), ValueError, "betas of Lion must be two numbers"),
        (lambda p: optim.Lion(p, betas=(0.9, "b")), TypeError, "betas of Lion must be a number"),
        (lambda p: optim.Lion(p, weight_decay="some"), TypeError, "weight_decay of Lion must be a number"),
        (lambda p: optim.Muon(p), ValueError, r"param group 0 has a param of shape \(3,\), and Muon is for matrices"),
        (lambda p: optim.Muon(p, momentum=1.0), ValueError, r"momentum of Muon must be in \[0, 1\)"),
        (lambda p: optim.Muon(p, betas=(0.9, 1.0)), ValueError, "betas of Muon must be two numbers"),
        (lambda p: optim.Muon(p, lr=-1.0), ValueError, "lr of Muon must be a finite number and not negative"),
        (lambda p: optim.Muon(p, ns_steps=0), ValueError, "ns_steps of Muon must be a whole number from 1"),
        (lambda p: optim.Muon(p, adjust_lr="no"), ValueError, "adjust_lr of Muon must be one of"),
        (lambda p: optim.Muon(p, nesterov=1), TypeError, "nesterov of Muon must be True or False"),
        (lambda p: optim.AdaLomo(p, lr=-1.0), ValueError, "lr of AdaLomo must be a finite number and not negative"),
        (lambda p: optim.AdaLomo(p, decay_rate=0.8), ValueError, "decay_rate of AdaLomo must be 0 or less"),
        (lambda p: optim.AdaLomo(p, clip_threshold=0.0), ValueError, "clip_threshold of AdaLomo must be positive"),
        (lambda p: optim.AdaLomo(p, eps=(1e-30, -1.0)), ValueError, "eps of AdaLomo must be two numbers of 0 or more"),
        (lambda p: optim.LOMO(p, lr=-1.0), ValueError, "lr of LOMO must be a finite number and not negative"),
    ],
)
def test_hyperparameters_without_meaning_are_refused(
    make: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make([nn.Parameter(torch.zeros(3))])


def test_the_names_are_there() -> None:
    assert gemini.optim is optim and optim.AdamW is gemini.HybridAdam
    assert dir(optim) == sorted(optim.__all__) and all(getattr(optim, name) for name in optim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Adagrad'"):
        _ = optim.Adagrad  # type: ignore[attr-defined]


# ---- with a model ----------------------------------------------------------------------------------------------------


def wrapped(rule: Any, **how: Any) -> gemini.GeminiDDP:
    config = gemini.GeminiConfig(precision="bf16", device="cpu", optimizer=rule, max_chunk=6000, **how)
    return gemini.GeminiDDP(models.make_model("llama"), config)


def test_sgd_without_momentum_keeps_nothing() -> None:
    """4 bytes per param, gradients used inside backward and never kept."""
    model = wrapped(optim.PlainSGDRule(), gradients="transient")
    optimizer = optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    before = {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}
    loss_of(model, 0).backward()
    optimizer.step()
    layout = world_of(model).layout
    assert model.memory_report()["bytes_per_param"] == 4 * layout.numel / layout.payload
    assert all(not torch.equal(model.full_param(name, torch.float32), old) for name, old in before.items())
