"""Pipelines from files: a rank reads what its stages need."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.train.params.by_name import ByName
from tests.ranks.parallel_cases import EPS, LR, config_for, mesh_of
from tests.ranks.pipeline_cases import Pools, half, ids_of, piped, run
from tests.ranks.pool import Failure
from tests.world import world_of


def streamed(sizes: dict[str, int], folder: str, where: str) -> tuple[list[float], list[float], list[str]]:
    """Losses and norms of a pipeline from files, and the params that were written on this rank."""
    mesh, written = mesh_of(sizes), list[str]()
    write = ByName.write

    def noted(homes: ByName, handle: Any, value: torch.Tensor) -> None:
        written.append(handle.name)
        write(homes, handle, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByName, "write", noted)
        pipe = gemini.Pipeline.from_pretrained(
            Path(folder) / "model", config_for(where, folder), mesh=mesh, micro_batches=4, dtype=torch.float32
        )
    pipe.model.train()
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms, _ = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank), optimizer)
    names = [name for name, _ in pipe.model.named_parameters()]
    assert set(written) == {handle.name for handle in world_of(pipe.model).handles}
    return losses, norms, names


@pytest.mark.parametrize(
    ("sizes", "where", "tied"),
    [({"pp": 2}, "ram", True), pytest.param({"pp": 2, "tp": 2}, "disk", False, marks=pytest.mark.slow)],
    ids=str,
)
def test_stages_from_files(sizes: dict[str, int], where: str, tied: bool, pool_of: Pools, tmp_path: Any) -> None:
    """The same bits as of stages of a whole model; what other ranks run is written nowhere here."""
    make = partial(half, tie_word_embeddings=tied)
    make().save_pretrained(tmp_path / "model")
    pool = pool_of(math.prod(sizes.values()))
    whole = pool.run(piped, sizes, "1f1b", 4, where, str(tmp_path), make)
    found = pool.run(streamed, sizes, str(tmp_path), where)
    for (losses, norms, names), other in zip(found, whole, strict=True):
        assert losses == other.losses and norms == other.norms
        assert set(names) <= set(other.state) < set(make().state_dict())


def lacking(folder: str) -> None:
    gemini.Pipeline.from_pretrained(Path(folder) / "model", mesh=mesh_of({"pp": 2}), micro_batches=2)


def test_files_that_lack_weights_are_refused(pool_of: Pools, tmp_path: Any) -> None:
    model = half()
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "model", state_dict=state)
    for outcome in pool_of(2).outcomes(lacking, str(tmp_path)):
        assert isinstance(outcome, Failure) and outcome.kind == "ValueError"
        assert "lack 1 of this LlamaForCausalLM's weights, for example 'lm_head.weight'" in outcome.text
