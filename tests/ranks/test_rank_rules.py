"""Update rules, from outside and of ``gemini.optim``, on a model that ranks share: the bits of one process, saved by
one number of ranks and loaded by another.

Every rank sees the same batches, so that the mean of their gradients is the gradient of one process to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.ranks.pool import Pool
from tests.train import test_update_rules as rules


def run(which: str, folder: Path, name: str, load: str | None) -> dict[str, Any]:
    """Train, save to ``folder / name``, train on: losses and states. ``load``: where the first half is, if it is."""
    rule = rules.EVERY[which]
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(
        precision="bf16", memory=memory, placement=placement, device="cpu", optimizer=rule, max_chunk=6000
    )
    model = gemini.GeminiDDP(rules.make_model(), config)
    optimizer = rules.make_optimizer(model, rule)
    losses = []
    if load is None:
        losses = rules.train(model, optimizer, range(2), None)
        gemini.save_checkpoint(folder / name, model, optimizer)
    else:
        gemini.load_checkpoint(folder / load, model, optimizer)
    losses += rules.train(model, optimizer, range(2, 4), None)
    states = {name: optimizer.full_state(name) for name, _ in model.named_parameters()}
    return {"losses": losses, "weights": model.state_dict(), "states": states, "bytes": model.memory_report()}


@pytest.mark.parametrize("which", [which for which, rule in rules.EVERY.items() if not rule.spec.whole])
def test_two_ranks_do_what_one_process_does(which: str, pool_of: Callable[[int], Pool], tmp_path: Path) -> None:
    alone = run(which, tmp_path, "alone", None)
    for found in pool_of(2).run(run, which, tmp_path, "together", None):
        assert found["losses"] == alone["losses"]
        for name, value in alone["weights"].items():
            assert torch.equal(found["weights"][name], value), name
        for name, state in alone["states"].items():
            assert all(torch.equal(found["states"][name][kind], value) for kind, value in state.items()), name
        padding = 4096 * 4 * 20  # chunks and planes of one page on either rank
        assert abs(found["bytes"]["bytes_per_param"] - alone["bytes"]["bytes_per_param"]) * 20_000 < padding
    again = run(which, tmp_path, "", "together")
    assert again["losses"] == alone["losses"][2:]
    for found in pool_of(2).run(run, which, tmp_path, "", "alone"):
        assert found["losses"] == alone["losses"][2:]


def refused(which: str, folder: Path) -> str:
    with pytest.raises(ValueError, match="updates whole params") as raised:
        run(which, folder, "never", None)
    return str(raised.value)


def test_a_rule_of_whole_params_is_refused_where_ranks_divide_one(
    pool_of: Callable[[int], Pool], tmp_path: Path
) -> None:
    for words in pool_of(2).run(refused, "normed", tmp_path):
        assert "would be divided among 2 ranks" in words and "gemini.optim" in words
