"""Programs off the beaten path: the plain loop's bits, or a clear error, wherever chunks live.

Each row of the tables of ``tests/hunts`` is such a program: what leaves a block otherwise than in its output, second
derivatives, views that outlive a call, weights that are read outside of forward, several threads, ``torch.func``,
habits of loops, orders of loading, schedules. Most of them once gave other numbers without a word, or an error of
somebody else's, where weights move. What needs another look than the bits follows them.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.train.modules.calls import CallRecord
from tests.hunts.program_draw import Program, each_part
from tests.hunts.program_run import FAILURES, GOES_ON, run_managed, run_plain
from tests.hunts.program_sides import PLACEMENTS, STEPPING
from tests.hunts.program_source import source
from tests.train.helpers import ALL_PLACEMENTS, DTYPES, Plain, adam, assert_same_state, compare, noise, same_bits, wrap


def runs_of(program: Program) -> list[tuple[str, str]]:
    """Placement and precision, each in turn. In fp16 too what a gradient may go through on its way: there a backward
    has to find out whether its loss was scaled.
    """
    fit = [name for name in PLACEMENTS if name != "transient" or program.may_step_in_backward]
    runs = [(fit[program.seed % len(fit)], ("fp32", "bf16")[program.seed % 2])]
    if not (program.habits or program.adapter or program.schedule) and program.adam == "whole":
        fit = [name for name in PLACEMENTS if name not in STEPPING]
        runs.append((fit[program.seed % len(fit)], "fp16"))
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_part_of_a_program_ends_well(placement: str, tmp_path: Path, summary: Callable[[str], None]) -> None:
    """``python tests/hunts/program_hunt.py --replay SEED:PLACEMENT:PRECISION`` runs one of them again."""
    counts, findings = Counter[str](), list[str]()
    for program in each_part():
        for precision in (precision for where, precision in runs_of(program) if where == placement):
            folder = tmp_path / f"{program.seed} {precision}"
            folder.mkdir()
            plain = run_plain(source(program), program.seed, precision)
            result = run_managed(source(program), program.seed, precision, placement, folder, plain)
            counts[result.outcome] += 1
            if result.outcome in (*FAILURES, GOES_ON):
                findings.append(f"{program.seed}:{placement}:{precision} {program.features}: {result.detail}")
    assert not findings, "\n".join(findings)
    summary(f"parts of programs at {placement}: {dict(counts)}")


WIDTH = 32


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 6)


class Block(nn.Module):
    """A block that reads params of its own beside a layer, and may keep a view of one of them."""

    def __init__(self, keeps_view: bool) -> None:
        super().__init__()
        self.keeps_view = keeps_view
        self.inner = weight(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.router = weight(WIDTH, WIDTH)  # read last, as its chunk is the last that is let go

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x) @ self.inner)
        kept = torch.sin(torch.sin(y @ self.router) @ self.router)
        if self.keeps_view:
            self.transposed = self.router.t()
        return y + kept


class Net(nn.Module):
    def __init__(self, keeps_views: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(keeps_views) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return self.head(x)


class Views(Net):
    """Views of weights outlive the calls that made them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.layers:
            x = torch.tanh(x @ block.transposed)
        return x


class FusedLoss(torch.autograd.Function):
    """Head and loss at once, as in Liger: gradients are made in forward, kept, and scaled in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = x @ w.t()
        ctx.save_for_backward(2 * out @ w, 2 * out.t() @ x)
        return out.float().square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(kept.mul_(grad) for kept in ctx.saved_tensors)


class Fused(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return FusedLoss.apply(x, self.head.weight) / x.numel() + self.head.bias.float().sum()


def the_loss(model: Any, seed: int) -> torch.Tensor:
    return model(noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype))


def penalized(model: Any, seed: int) -> torch.Tensor:
    """A gradient penalty, which takes the gradient of a gradient."""
    x = noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    return model(x).float().mean() + (grad.float().norm() - 1).square()


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_a_loss_that_is_fused_with_the_head(where: str, tmp_path: Path) -> None:
    compare(Fused, where, tmp_path, the_loss, precision="fp32" if where == "half" else "bf16", slack=2**17)


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_second_derivatives_need_no_more_room_than_a_step(where: str, tmp_path: Path) -> None:
    """What the first pass saves of weights is a place as well."""
    compare(Net, where, tmp_path, penalized, precision="fp32")


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    """A view that nobody but the program knows of keeps its window; where there is no room that is said."""
    with pytest.raises(gemini.BudgetExceeded, match="still has a view of .*'layers.0.router'"):
        the_loss(wrap(Views(keeps_views=True), "disk", tmp_path, precision="fp32"), 0).sum().backward()


@pytest.mark.parametrize(("precision", "masked"), [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_fused_paths_of_torch_in_evaluation(where: str, precision: str, masked: bool, tmp_path: Path) -> None:
    """torch's encoder has a fused path that takes all weights of a layer, where every param is an ordinary one."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=masked)

    plain, model = Plain(make(), precision), wrap(make(), where, tmp_path, precision=precision, slack=2**20)
    optimizer, mask = adam(model), torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 3:] = mask[2, 4:] = True
    x, how = noise(3, 6, 32, dtype=DTYPES[precision]), {"src_key_padding_mask": mask} if masked else {}
    for _ in range(2):
        model.train()(x).square().mean().backward()
        plain.backward(plain.model.train()(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        with torch.no_grad():
            wanted = plain.model.eval()(x, **how)
            for _ in range(2):
                assert same_bits(model.eval()(x, **how), wanted)
    assert_same_state(model, plain)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_hook_inside_a_transform_reads_a_param(where: str, tmp_path: Path) -> None:
    """After its module's call: a copy is read, outside of the transform, or the remedy is said."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.read = weight(WIDTH, WIDTH), torch.Tensor.sum

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.w
            y.register_hook(lambda grad: grad + 0.01 * self.read(self.w).detach())
            return y

    x = noise(4, WIDTH, dtype=torch.float32)
    plain, model = Hooked(), wrap(Hooked(), where, tmp_path, precision="fp32", slack=2**17)
    model.load_state_dict(plain.state_dict())
    found = [torch.func.grad(lambda x, net=net: net(x).square().sum())(x) for net in (plain, model)]
    assert same_bits(found[1].detach(), found[0].detach())
    model.read = lambda w: w.detach()[0]
    with pytest.raises(gemini.GeminiError, match="full_param"):
        torch.func.grad(lambda x: model(x).square().sum())(x)


def test_what_a_call_was_given_is_not_awaited() -> None:
    """Its gradient arrives when the call before is being computed backward: no time to gather for this one."""
    begun: list[torch.Tensor] = []
    given = nn.Linear(4, 4)(torch.ones(2, 4))
    record = CallRecord(None, (), None, num_exchanges=0)
    view = given.view(8)
    record.on_gradient(view, begun.append)
    view[0] = 0
    given.sum().backward()
    assert not begun
    made = nn.Linear(4, 4)(torch.ones(2, 3, 4))
    record.on_gradient(made, begun.append)
    made[0] = 0
    made.sum().backward()
    assert len(begun) == 1
