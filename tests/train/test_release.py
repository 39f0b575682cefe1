"""``gemini.release``: a managed model becomes an ordinary one, and may be wrapped again otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gemini


def test_a_model_that_was_released_can_be_wrapped_with_other_budgets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    x, kept = torch.randn(3, 8), {}
    for cpu in ("1MiB", "2MiB"):
        managed = gemini.GeminiDDP(
            model, gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu=cpu), device="cpu")
        )
        assert "managed by Gemini in fp32 (cpu " in repr(managed) and f"of {cpu[0]} MiB): Sequential(" in repr(managed)
        optimizer = gemini.HybridAdam(managed.parameters(), lr=0.1)
        managed(x).sum().backward()
        optimizer.step()
        kept = managed.state_dict()
        out = managed(x).detach().clone()
        assert gemini.release(managed) is model and type(model) is nn.Sequential and "managed" not in repr(model)
        assert torch.equal(model(x), out) and all(torch.equal(p, kept[n]) for n, p in model.named_parameters())
        model(x).sum().backward()
        assert model[0].weight.grad is not None, "an ordinary model again"
        model.zero_grad()


def test_what_is_not_managed_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a model that GeminiDDP manages, and this Linear is none"):
        gemini.release(nn.Linear(2, 2))
