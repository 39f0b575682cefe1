"""Moving averages of a model that ranks share: the bits of the plain fp32 loop over what each step leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from gemini.errors import GeminiError, RankMismatch
from gemini.optim import AveragedRule
from tests.ranks.parallel_cases import config_for, hybrid_adam, llama, mesh_of
from tests.ranks.pipeline_cases import deep, ids_of
from tests.ranks.pool import Pools
from tests.train.helpers import same_bits

DECAY = 0.9


def loss_of(model: Any, seed: int) -> torch.Tensor:
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}


def run(sizes: dict[str, int], where: str, precision: str, folder: Path, name: str, load: str | None) -> Any:
    """Averages after four steps; with a save in the middle, or from one on. Every rank has the same batches."""
    rule = AveragedRule(decay=DECAY)
    config = config_for(where, str(folder), precision=precision, max_chunk=6000, optimizer=rule)
    model: Any = gemini.GeminiDDP(llama(), config, **({"mesh": mesh_of(sizes)} if sizes else {}))
    optimizer, ema = hybrid_adam(model), gemini.EMA(model)
    if load is not None:
        gemini.load_checkpoint(folder / load, model, optimizer)
    averages = {name: ema.full_param(name) for name, _ in model.named_parameters()}
    for step in range(0 if load is None else 2, 4):
        loss_of(model, step).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for key, master in masters(model).items():
            averages[key].sub_((averages[key] - master) * (1 - DECAY))
        if name and step == 1:
            gemini.save_checkpoint(folder / name, model, optimizer)
    before = masters(model)
    assert all(same_bits(ema.full_param(key), value) for key, value in averages.items())
    with ema.swapped_in(), torch.no_grad():
        assert all(same_bits(value, averages[key]) for key, value in masters(model).items())
        evaluated = loss_of(model, 9)
    assert all(same_bits(value, before[key]) for key, value in masters(model).items())
    return averages, evaluated


@pytest.mark.parametrize("sizes", [{}, {"dp_replicate": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_keep_the_averages_of_their_parts(
    precision: str, where: str, sizes: dict[str, int], pool_of: Pools, tmp_path: Path
) -> None:
    """And checkpoints have them for any number of ranks."""
    found = pool_of(2).run(run, sizes, where, precision, tmp_path, "together", None)
    again = run({}, "ram", precision, tmp_path, "", "together")
    for averages, evaluated in found:
        assert same_bits(evaluated, found[0][1])
        if "tp" not in sizes:  # whose sums have another order
            assert all(same_bits(value, again[0][name]) for name, value in averages.items())
    if sizes:
        return
    alone = run({}, where, precision, tmp_path, "alone", None)
    assert all(same_bits(value, alone[0][name]) for name, value in found[0][0].items())
    for averages, evaluated in pool_of(2).run(run, {}, where, precision, tmp_path, "", "alone"):
        assert all(same_bits(value, averages[name]) for name, value in alone[0].items())
        assert same_bits(evaluated, alone[1])


def apart(folder: Path) -> list[str]:
    """One rank computes, then one rank trains, while the other one swaps."""
    config = config_for("ram", str(folder), optimizer=AveragedRule(decay=DECAY))
    model: Any = gemini.GeminiDDP(llama(), config)
    optimizer, told = hybrid_adam(model), []
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = masters(model)
    try:
        if dist.get_rank():
            with gemini.EMA(model).swapped_in():
                raise AssertionError("inside")
        else:
            gemini.save_checkpoint(folder / "saved", model, optimizer)
    except GeminiError as e:
        told.append(f"{type(e).__name__}: {e}")
    assert all(same_bits(value, before[name]) for name, value in masters(model).items())
    return told


def test_all_ranks_swap_or_none(pool_of: Pools, tmp_path: Path) -> None:
    for told in pool_of(2).run(apart, tmp_path):
        (words,) = told
        assert words.startswith(RankMismatch.__name__) and "swapped_in()" in words and "save_checkpoint" in words


def piped(folder: Path) -> tuple[bool, bool]:
    """Over two stages, each with the averages of its own params."""
    config = config_for("disk", str(folder), precision="bf16", optimizer=AveragedRule(decay=DECAY))
    pipe = gemini.Pipeline(deep(), config, mesh=mesh_of({"pp": 2}), micro_batches=4)
    optimizer, ema = hybrid_adam(pipe), gemini.EMA(pipe.model)
    averages = {name: ema.full_param(name) for name, _ in pipe.named_parameters()}
    for step in range(3):
        pipe.step(input_ids=ids_of(step, 0), labels=ids_of(step, 0))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, average in averages.items():
            average.sub_((average - pipe.model.full_param(name, torch.float32)) * (1 - DECAY))
    before = masters(pipe.model)
    are_alike = all(same_bits(ema.full_param(name), value) for name, value in averages.items())
    with ema.swapped_in():
        are_alike &= all(same_bits(value, averages[name]) for name, value in masters(pipe.model).items())
    return are_alike, all(same_bits(value, before[name]) for name, value in masters(pipe.model).items())


def test_stages_have_averages_of_their_own(pool_of: Pools, tmp_path: Path) -> None:
    assert pool_of(2).run(piped, tmp_path) == [(True, True)] * 2
