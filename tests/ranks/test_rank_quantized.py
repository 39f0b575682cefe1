"""A base of 4-bit codes that ranks share: each keeps its part of the codes, and all compute as one process does.

Every rank sees the same batches, so that the mean of their gradients is the gradient of one process to the bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from tests.ranks.pool import Pools
from tests.train import helpers

pytest.importorskip("bitsandbytes", reason="pip install '.[quantized]'")

from tests.integrations.quantized_cases import adam_of, losses_of, quantized, save_base  # noqa: E402
from tests.world import world_of  # noqa: E402


def adapt(folder: Path, on: str) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Losses and weights of a managed run, bytes of codes at home on this rank, and the params' own."""
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    share = 1.0 if on == "nvme" else 0.0
    placement = gemini.StaticPlacement(weights_on_nvme=share, optimizer_on_nvme=share)
    config = gemini.GeminiConfig(memory=memory, placement=placement, device="cpu")
    model: Any = quantized(folder / "base")
    if dist.is_initialized() and dist.get_rank():  # every rank starts from what the first one has
        for param in model.parameters():
            if hasattr(param, "quant_state"):
                param.data.bitwise_not_()
                param.quant_state.absmax.zero_()
                param.quant_state.state2.absmax.zero_()
    model = gemini.GeminiDDP(model, config)
    losses = losses_of(model, adam_of(model))
    world = world_of(model)
    world.check()
    coded = [chunk for chunk in world.chunks if chunk.spec.coded]
    own = sum(chunk.weights.num_bytes for chunk in coded)
    return losses, model.state_dict(), own, sum(chunk.spec.numel for chunk in coded)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("on", ["cpu", "nvme"])
def test_two_ranks_share_codes(on: str, pool_of: Pools, tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    wanted = adapt(tmp_path, on)
    assert wanted[2] == wanted[3]
    for losses, state, own, whole in pool_of(2).run(adapt, tmp_path, on):
        assert losses == wanted[0]
        assert 2 * own == whole
        assert state.keys() == wanted[1].keys()
        assert all(helpers.same_bits(state[name], value) for name, value in wanted[1].items())
