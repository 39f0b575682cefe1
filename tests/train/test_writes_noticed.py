"""A write to an ordinary param that its master does not know of is refused, and leaves nothing behind.

Wherever weights are gathered copies, the refusal also undoes the write: the copy is dropped, nobody stays pinned.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

import gemini
from tests.train.helpers import llama, on_batch, wrap


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_writes_in_gathered_without_write(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path, slack=2**20)
    before = {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}
    loss = on_batch(model, 0).item()
    params = [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight]
    with pytest.raises(gemini.ParamAccessError, match="written"), torch.no_grad():
        with model.gathered(params):
            for param in params:
                param.zero_()
    model._gemini_engine.check_invariants()
    assert on_batch(model, 0).item() == loss, "the written copies were dropped"
    assert all(torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())


def test_a_graph_does_not_keep_the_engine(tmp_path: Path) -> None:
    """Hooks on the results of operations that read another module's weights refer to the engine weakly."""

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.part.weight

    model = wrap(Reader(), "disk", tmp_path, slack=2**20)
    out = model(torch.ones(2, 8, dtype=torch.bfloat16))
    engine = weakref.ref(model._gemini_engine)
    del model
    gc.collect()
    assert engine() is None and out.grad_fn is not None
