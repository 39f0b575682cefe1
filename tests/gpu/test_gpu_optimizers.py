"""On a GPU: sums of gradients in 24 bits are the same bits wherever chunks live."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import kernels
from gemini.planning import rules as spec_rules
from tests import kernel_settings, models
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import PLACEMENTS, TORCH


def small_llama() -> Any:
    model = models.make_model("llama")
    model.set_attn_implementation("eager")  # products alone, whose backward is the same in every run
    return model


def loss_of(model: Any, seed: int) -> torch.Tensor:
    ids = torch.randint(2, models.VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed)).to(TORCH)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("where", PLACEMENTS)
def test_sums_in_bf16(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums of torch's own gradients by the reference kernels, and updates alike in every placement."""
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)

    def run(where: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        how: dict[str, Any] = {"gradients": "accumulate_bf16", "states": "compact", "max_chunk": 20000}
        model = gpu_cases.wrap(small_llama(), where, tmp_path, **how)
        optimizer = gemini.HybridAdam(model.parameters(), lr=2e-3)
        losses = []
        for step in range(3):
            for micro in range(3):
                (loss := loss_of(model, 3 * step + micro)).backward()
                losses.append(loss.item())
            if step == 0:
                assert_sums(model)
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return losses, model.state_dict(dtype=torch.float32)

    def assert_sums(model: Any) -> None:
        plain = small_llama().to(TORCH)
        for name, param in plain.named_parameters():
            param.data = model.full_param(name, torch.bfloat16).to(TORCH)
        halves: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for micro in range(3):
            loss_of(plain, micro).backward()
            for name, param in plain.named_parameters():
                grad, param.grad = param.grad.reshape(-1).cpu(), None
                new = torch.empty_like(grad), torch.empty(grad.numel(), dtype=torch.int8)
                with kernel_settings.use_isa("reference"):
                    kernels.sum_grad24(*halves.setdefault(name, new), grad, adding=micro > 0)
        for name, (upper, _) in halves.items():
            assert torch.equal(model.full_grad(name).reshape(-1), upper), name

    losses, weights = run(where)
    wanted, there = run("all on the gpu")
    assert losses == wanted
    assert all(torch.equal(weights[name], value) for name, value in there.items())
