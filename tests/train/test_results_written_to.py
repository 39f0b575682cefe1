"""Results of modules that are written to in place: the gradient takes another way through the graph, and is awaited."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.train.modules.calls import CallRecord
from tests.train.helpers import compare, squares


class Masked(nn.Module):
    """As SpecAugment does: some rows of a projection are replaced by a learned vector. The projection is a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.mask = nn.Parameter(torch.randn(32))

    def project(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = self.project(i, x)
            assert x._is_view()
            x[:, i] = self.mask.to(x.dtype)
            x = torch.tanh(x)
        return x


class MaskedElsewhere(Masked):
    """The same, by an operation that reads the weights of another module."""

    def project(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layers[i].weight, self.layers[i].bias)


@pytest.mark.parametrize("make", [Masked, MaskedElsewhere])
def test_results_written_to_in_place(make: type[nn.Module], where: str, tmp_path: Path) -> None:
    compare(make, where, tmp_path, squares)


def test_what_a_call_was_given_is_not_awaited() -> None:
    """Its gradient arrives when the call before is being computed backward: no time to gather for this one."""
    begun: list[torch.Tensor] = []
    given = nn.Linear(4, 4)(torch.ones(2, 4))
    record = CallRecord(None, (), None)
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
