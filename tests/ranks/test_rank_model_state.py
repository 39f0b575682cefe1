"""State that modules keep besides params and buffers, over ranks: saved by one mesh, loaded by another, those of stages
together; where one rank's module does not take it, no rank's does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from tests.ranks.parallel_cases import config_for, mesh_of
from tests.ranks.pipeline_cases import half
from tests.ranks.pool import Pools, failures
from tests.train.helpers import adam


class Marked(nn.Module):
    """A norm with a word, and a buffer of any length."""

    def __init__(self, norm: nn.Module, refuses: bool) -> None:
        super().__init__()
        self.norm, self.word, self.refuses = norm, "none", refuses
        self.register_buffer("grown", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def get_extra_state(self) -> Any:
        return {"word": self.word}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and state["word"] != "none":
            raise RuntimeError("not here")
        self.word = state["word"]

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.grown = state[f"{prefix}grown"].clone()
        super()._load_from_state_dict(state, prefix, *args)


def marks(sizes: dict[str, int], folder: str, save: bool, refusing: int = -1) -> dict[str, Any]:
    """The words and buffers of the modules that are here."""
    rank = dist.get_rank()
    if not sizes and rank:
        return {}
    model: Any = half()
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm = Marked(layer.input_layernorm, refusing == rank)
        if save:
            layer.input_layernorm.word = f"layer {number}"
            layer.input_layernorm.grown = torch.arange(float(number + 1))
    config = config_for("disk", folder, precision="bf16")
    if "pp" in sizes:
        model = gemini.Pipeline(model, config, mesh=mesh_of(sizes), micro_batches=2, schedule="1f1b").model
    else:
        group = None if sizes else dist.new_group([rank], use_local_synchronization=True)
        model = gemini.GeminiDDP(model, config, mesh=mesh_of(sizes) if sizes else None, process_group=group)
    if save:
        gemini.save_checkpoint(f"{folder}/marks", model, adam(model))
    else:
        try:
            gemini.load_checkpoint(f"{folder}/marks", model, adam(model))
        except gemini.PlanMismatch:
            assert {m.word for m in model.modules() if isinstance(m, Marked)} == {"none"}
            raise
    return {name: (m.word, m.grown.tolist()) for name, m in model.named_modules() if isinstance(m, Marked)}


MESHES: tuple[dict[str, int], ...] = ({"dp": 2}, {"pp": 2}, {"tp": 2}, {})


@pytest.mark.parametrize("after", MESHES, ids=str)
@pytest.mark.parametrize("before", MESHES, ids=str)
def test_from_any_mesh_into_any(before: dict[str, int], after: dict[str, int], pool_of: Pools, tmp_path: Any) -> None:
    pool, found = pool_of(2), dict[str, Any]()
    pool.run(marks, before, str(tmp_path), True)
    for own in pool.run(marks, after, str(tmp_path), False):
        found.update(own)
    assert len(found) == 4
    for number in range(4):
        name = f"model.layers.{number}.input_layernorm"
        assert found[name] == (f"layer {number}", [float(i) for i in range(number + 1)])


def test_what_one_rank_does_not_take_no_rank_has(pool_of: Pools, tmp_path: Any) -> None:
    pool_of(2).run(marks, {"dp": 2}, str(tmp_path), True)
    for text in failures(pool_of(2).outcomes(marks, {"dp": 2}, str(tmp_path), False, 1), "PlanMismatch"):
        assert "not here" in text
