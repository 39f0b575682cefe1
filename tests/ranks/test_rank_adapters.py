"""Adapters on a base that ranks share: the same run as one process, saved once, merged on every rank alike.

Every rank sees the same batches, so that the mean of their gradients is the gradient of one process to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import gemini
from gemini.errors import GeminiError
from tests.integrations.peft_cases import cast_params, llama, logits, maker
from tests.ranks.pool import Pools
from tests.train import helpers


def wrapped(method: str, folder: Path) -> Any:
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    return gemini.GeminiDDP(maker(method)(), gemini.GeminiConfig(memory=memory, placement=placement, device="cpu"))


def adapt(method: str, folder: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train, save to ``folder / name``, merge: losses, weights before, weights merged."""
    model = wrapped(method, folder)
    optimizer = helpers.adam(model)
    losses = helpers.train(model, optimizer, range(2))
    model.save_pretrained(folder / name)
    losses += helpers.train(model, optimizer, range(2, 3))
    trained = model.state_dict()
    if method != "prompt":
        model.merge_adapter(safe_merge=True)
        model.unmerge_adapter()
        model.merge_adapter()
        return losses, trained, {**model.state_dict(), **model.merge_and_unload().state_dict()}
    return losses, trained, {}


def disable_merged(method: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits without the merged adapter and with it again, and the weights then."""
    model = wrapped(method, folder)
    helpers.train(model, helpers.adam(model), range(2))
    model.eval()
    model.merge_adapter()
    with model.disable_adapter():
        without = logits(model)
    return without, logits(model), model.state_dict()


@pytest.mark.parametrize("method", ["lora", "oft coft"])
def test_a_merged_adapter_is_disabled(method: str, pool_of: Pools, tmp_path: Path) -> None:
    wanted = disable_merged(method, tmp_path)
    for without, again, state in pool_of(2).run(disable_merged, method, tmp_path):
        assert torch.equal(without, wanted[0]) and torch.equal(again, wanted[1])
        assert all(helpers.same_bits(state[name], value) for name, value in wanted[2].items())


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("method", ["dora", "modules to save", "prompt"])
def test_two_ranks_do_what_one_process_does(method: str, pool_of: Pools, tmp_path: Path) -> None:
    wanted = adapt(method, tmp_path, "alone")
    for losses, trained, merged in pool_of(2).run(adapt, method, tmp_path, "together"):
        assert losses == wanted[0]
        for found, state in ((trained, wanted[1]), (merged, wanted[2])):
            assert found.keys() == state.keys()
            assert all(helpers.same_bits(found[name], value) for name, value in state.items())
    files = [sorted(f.name for f in (tmp_path / name).iterdir()) for name in ("alone", "together")]
    assert files[0] == files[1]
    opened = [
        cast_params(peft.PeftModel.from_pretrained(llama(), tmp_path / name), "bf16") for name in ("alone", "together")
    ]
    assert torch.equal(logits(opened[0]), logits(opened[1]))


def save_onto_a_full_disk(folder: Path) -> Any:
    model = wrapped("lora", folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    error: Exception | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.peft_model, "safe_save_file", full)  # the first rank alone gets there
        try:
            model.save_pretrained(folder / "full")
        except (OSError, GeminiError) as e:
            error = e
    losses = helpers.train(model, helpers.adam(model), range(1))
    return str(error), losses


def test_a_failure_to_save_is_raised_on_all(pool_of: Pools, tmp_path: Path) -> None:
    (first, losses), (second, other_losses) = pool_of(2).run(save_onto_a_full_disk, tmp_path)
    assert "no space left" in first and "no space left" in second
    assert losses == other_losses
