"""Checkpoints and exports of pipelines and slices: from any mesh into any other.

And pipelines from files, of which a rank reads what its stages need.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from gemini.train.params.by_name import ByName
from tests.ranks.parallel_cases import EPS, LR, config_for, llama, mesh_of, planes_of
from tests.ranks.pipeline_cases import EIGHT, deep, half, ids_of, piped, run
from tests.ranks.pool import Pools, failures
from tests.ranks.test_rank_export import rise_of_saving
from tests.train import helpers
from tests.world import world_of

MESHES: tuple[dict[str, int], ...] = (
    {"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 2}, {}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"tp": 4},
)  # fmt: skip
WAYS: list[tuple[dict[str, int], dict[str, int]]] = [
    *((mesh, MESHES[(number + step) % len(MESHES)]) for step in (1, 4) for number, mesh in enumerate(MESHES)),
    (EIGHT, {"pp": 2, "tp": 4}), (EIGHT, {}), ({"dp": 8}, EIGHT),
]  # fmt: skip
"""A checkpoint has one form, whichever mesh it is of: each goes into two others, and two go into it."""
QUICK: tuple[tuple[dict[str, int], dict[str, int]], ...] = (({"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}), ({}, {"pp": 4}))


Backward = Callable[[torch.Tensor], float]


def model_on(sizes: dict[str, int], folder: str, tied: bool, schedule: str) -> tuple[Any, Any, Backward]:
    """The managed model, its optimizer, and what makes forward and backward of a batch."""
    make = partial(deep, tie_word_embeddings=tied)
    config = config_for("disk", folder, precision="bf16")
    if "pp" in sizes:
        pipe = gemini.Pipeline(make(), config, mesh=mesh_of(sizes), micro_batches=4, schedule=schedule)
        optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS)
        return pipe.model, optimizer, lambda ids: pipe.step(input_ids=ids, labels=ids).item()
    group = None if sizes else dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model: Any = gemini.GeminiDDP(make(), config, mesh=mesh_of(sizes) if sizes else None, process_group=group)

    def backward(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach())

    return model, gemini.HybridAdam(model.parameters(), lr=LR, eps=EPS), backward


def train(optimizer: Any, backward: Backward, steps: int) -> None:
    for step in range(steps):
        backward(ids_of(step, 0))
        optimizer.step()
        optimizer.zero_grad()


def saved(sizes: dict[str, int], folder: str, tied: bool, schedule: str) -> dict[str, torch.Tensor]:
    if not sizes and dist.get_rank():
        return {}
    model, optimizer, backward = model_on(sizes, folder, tied, schedule)
    train(optimizer, backward, 2)
    gemini.save_checkpoint(f"{folder}/two", model, optimizer, wait=False).wait()
    return planes_of(model)


def went_on(sizes: dict[str, int], folder: str, tied: bool, schedule: str) -> dict[str, torch.Tensor]:
    model, optimizer, backward = model_on(sizes, folder, tied, schedule)
    gemini.load_checkpoint(f"{folder}/two", model, optimizer)
    found = planes_of(model)
    train(optimizer, backward, 1)
    return found


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("tied", "schedule"), [(False, "1f1b"), (True, "interleaved")])
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*way, marks=[pytest.mark.slow] * (way not in QUICK)) for way in WAYS],
    ids=str,
)
def test_a_checkpoint_of_any_mesh_goes_into_any(
    before: dict[str, int], after: dict[str, int], tied: bool, schedule: str, pool_of: Pools, tmp_path: Any
) -> None:
    first, second = (pool_of(max(2, math.prod(sizes.values()))) for sizes in (before, after))
    wanted: dict[str, torch.Tensor] = {}
    for own in first.run(saved, before, str(tmp_path), tied, schedule):
        assert all(helpers.same_bits(value, wanted.setdefault(name, value)) for name, value in own.items())
    names: set[str] = set()
    for found in second.run(went_on, after, str(tmp_path), tied, schedule):
        assert all(helpers.same_bits(value, wanted[name]) for name, value in found.items())
        names |= found.keys()
    assert names == wanted.keys()


def exported(sizes: dict[str, int], folder: str, tied: bool) -> dict[str, torch.Tensor]:
    model, optimizer, backward = model_on(sizes, folder, tied, "interleaved")
    train(optimizer, backward, 1)
    model.save_pretrained(f"{folder}/exported")
    return model.state_dict()


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "tp": 2},
        {"dp": 2, "tp": 2},
        pytest.param(EIGHT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_stages_are_exported_as_one_model(sizes: dict[str, int], tied: bool, pool_of: Pools, tmp_path: Any) -> None:
    found = pool_of(math.prod(sizes.values())).run(exported, sizes, str(tmp_path), tied)
    from transformers import LlamaForCausalLM

    opened, info = LlamaForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    state = opened.state_dict()
    for own in found:
        assert all(helpers.same_bits(value, state[name]) for name, value in own.items())
    assert set().union(*found) == set(state)


def rise_while_exporting(sizes: dict[str, int], folder: str) -> tuple[int, int, int]:
    """Memory that save_pretrained takes on this rank, the bytes of the largest param and those of all."""
    make = partial(llama, hidden_size=768, intermediate_size=3072, num_hidden_layers=8, vocab_size=8192)
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="8GiB", nvme_path=folder)
    config = config_for("disk", folder, precision="bf16", memory=memory)
    whole = make()
    bytes_of = [2 * param.numel() for param in whole.parameters()]
    pipe = gemini.Pipeline(whole, config, mesh=mesh_of(sizes), micro_batches=4, schedule="1f1b")
    rise = rise_of_saving(lambda: pipe.model.save_pretrained(f"{folder}/exported"))
    return rise, max(bytes_of), sum(bytes_of)


@pytest.mark.slow
def test_an_export_of_stages_and_slices_takes_the_memory_of_one_param(pool_of: Pools, tmp_path: Any) -> None:
    for rise, largest, whole in pool_of(8).run(rise_while_exporting, EIGHT, str(tmp_path)):
        print(f"export: {rise:,} bytes more, the largest param {largest:,}, all weights {whole:,}")
        assert rise <= largest + 2**26 < whole


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
    found = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank))
    names = [name for name, _ in pipe.model.named_parameters()]
    assert set(written) == {handle.name for handle in world_of(pipe.model).handles}
    return found.losses, found.norms, names


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
    for text in failures(pool_of(2).outcomes(lacking, str(tmp_path)), "ValueError"):
        assert "lack 1 of this LlamaForCausalLM's weights, for example 'lm_head.weight'" in text
