"""Pipelines: schedules over ranks, and breadth first in one process, against plain accumulation."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini.errors import RankMismatch
from gemini.optim import MuonRule
from gemini.planning.stages import balanced
from gemini.planning.trace import with_seconds
from gemini.train.params.by_name import ByName
from tests.ranks.parallel_cases import EPS, LR, config_for, llama, mesh_of, num_batches, planes_of, step_refused
from tests.ranks.pool import Failure, Pool
from tests.ranks.test_rank_export import rise_of_saving
from tests.ranks.test_slices import FAMILIES, small
from tests.train import helpers

Pools = Callable[[int], Pool]
deep = partial(llama, num_hidden_layers=8, tie_word_embeddings=False)
STEPS = 2
EIGHT = {"pp": 2, "dp": 2, "tp": 2}
BESIDE = ({"pp": 2, "dp": 2}, {"dp_replicate": 2, "pp": 2}, {"pp": 2, "tp": 2}, EIGHT)
"""Stages and what is beside them."""
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def ids_of(step: int, rank: int, rows: int = 16) -> torch.Tensor:
    return torch.randint(3, 128, (rows, 12), generator=torch.Generator().manual_seed(100 * step + rank))


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    fetched: int
    """Gathers of weights in the last step."""


def accumulated(num_batches: int, micro_batches: int, make: Callable[[], Any] = deep) -> Found:
    """One process of plain torch, the mean over micro-batches and over the batches of all ranks."""
    model: Any = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(num_batches):
            for part in ids_of(step, rank).chunk(micro_batches):
                loss = model(input_ids=part, labels=part).loss / micro_batches / num_batches
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, dict(model.state_dict()), 0)


def run(
    pipe: gemini.Pipeline, batch: Callable[[int], torch.Tensor], optimizer: Any
) -> tuple[list[float], list[float], int]:  # fmt: skip
    manager = pipe.model._gemini_engine.store.manager
    losses, norms, fetched = [], [], 0
    for step in range(STEPS):
        before, ids = manager.num_gathers, batch(step)
        losses.append(pipe.step(input_ids=ids, labels=ids).item())
        fetched = manager.num_gathers - before
        norms.append(float(pipe.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    pipe.model._gemini_engine.check_invariants()
    return losses, norms, fetched


def piped(
    sizes: dict[str, int], schedule: str, micro_batches: int, where: str, folder: str,
    make: Callable[[], Any] = deep, *, checkpointing: bool = False, stages: int | None = None, **settings: Any,
) -> Found:  # fmt: skip
    mesh, model = mesh_of(sizes), make().train()
    if checkpointing:
        model.activation_checkpointing_enable()
    pipe = gemini.Pipeline(
        model, config_for(where, folder, **settings), mesh=mesh, micro_batches=micro_batches, schedule=schedule,
        stages=stages,
    )  # fmt: skip
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms, fetched = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank), optimizer)
    return Found(losses, norms, pipe.model.state_dict(dtype=torch.float32), fetched)


def assert_close(found: list[Found], plain: Found) -> None:
    names: set[str] = set()
    for own in found:
        assert own.losses == pytest.approx(plain.losses, rel=1e-5)
        assert own.norms == pytest.approx(plain.norms, rel=1e-6) and own.norms == found[0].norms
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)
        assert 0 < len(own.state) < len(plain.state)
        names |= set(own.state)
    assert names == set(plain.state), "all of the model is somewhere, by its own names"


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "bfs"])
def test_schedules_compute_what_accumulation_does(
    schedule: str, size: int, micro_batches: int, where: str, pool_of: Pools, tmp_path: Any
) -> None:
    found = pool_of(size).run(piped, {"pp": size}, schedule, micro_batches, where, str(tmp_path))
    assert all(own.losses == found[0].losses for own in found), "the loss is the same on all ranks"
    assert_close(found, accumulated(1, micro_batches))


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "bfs"])
@pytest.mark.parametrize("where", ["ram", "disk", "serial"])
@pytest.mark.parametrize("sizes", BESIDE, ids=str)
def test_stages_and_shards(
    sizes: dict[str, int], where: str, schedule: str, checkpointing: bool, pool_of: Pools, tmp_path: Any
) -> None:
    do = partial(piped, checkpointing=checkpointing)
    found = pool_of(math.prod(sizes.values())).run(do, sizes, schedule, 4, where, str(tmp_path))
    plain = accumulated(num_batches(sizes), 4)
    means = [sum(own.losses[step] for own in found) / len(found) for step in range(STEPS)]
    assert means == pytest.approx(plain.losses, rel=1e-5)
    assert_close([own._replace(losses=plain.losses) for own in found], plain)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("schedule", ["1f1b", "bfs"])
@pytest.mark.parametrize("sizes", [{"pp": 2}, *BESIDE], ids=str)
def test_tied_embeddings_stay_the_same_on_both_ends(
    sizes: dict[str, int], schedule: str, pool_of: Pools, tmp_path: Any
) -> None:
    """Of an odd number of pages, so that it would be divided otherwise beside other params than alone."""
    num_ranks, make = math.prod(sizes.values()), partial(deep, tie_word_embeddings=True, vocab_size=160)
    found = pool_of(num_ranks).run(piped, sizes, schedule, 4, "disk", str(tmp_path), make)
    plain = accumulated(num_batches(sizes), 4, make)
    assert_close([own._replace(losses=plain.losses) for own in found], plain)
    ends = [value for own in found for name, value in own.state.items() if name in TIED]
    assert len(ends) == num_ranks and all(helpers.same_bits(value, ends[0]) for value in ends)


# ---- saving ----------------------------------------------------------------------------------------------------------

MESHES: tuple[dict[str, int], ...] = (
    {"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 2}, {}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2},
)  # fmt: skip
WAYS = [
    *itertools.product(MESHES, MESHES),
    *((EIGHT, other) for other in ({"dp": 8}, {"pp": 2, "tp": 4}, {}, {"pp": 4})),
    *((other, EIGHT) for other in ({"dp": 8}, {"pp": 2, "tp": 4}, {}, {"pp": 4})),
]


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


@pytest.mark.sweep(every=11)
@pytest.mark.parametrize(("tied", "schedule"), [(False, "1f1b"), (True, "interleaved")])
@pytest.mark.parametrize(("before", "after"), WAYS, ids=str)
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


def of_another_model(folder: str) -> None:
    make = partial(deep, num_hidden_layers=6)
    pipe = gemini.Pipeline(make(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=2, schedule="1f1b")
    gemini.load_checkpoint(f"{folder}/two", pipe.model, gemini.HybridAdam(pipe.parameters()))


def test_a_checkpoint_of_another_model_is_refused(pool_of: Pools, tmp_path: Any) -> None:
    pool_of(2).run(saved, {"pp": 2}, str(tmp_path), False, "1f1b")
    for outcome in pool_of(2).outcomes(of_another_model, str(tmp_path)):
        assert isinstance(outcome, Failure) and outcome.kind == "PlanMismatch", outcome


def exported(sizes: dict[str, int], folder: str, tied: bool) -> dict[str, torch.Tensor]:
    model, optimizer, backward = model_on(sizes, folder, tied, "interleaved")
    train(optimizer, backward, 1)
    model.save_pretrained(f"{folder}/exported")
    return model.state_dict()


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, EIGHT], ids=str)
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


def curve(sizes: dict[str, int], folder: str, steps: range, kill_in: int = -1) -> list[float]:
    """Losses of these steps, of batches that are divided over the mesh; after every third one a checkpoint, and where
    steps do not begin at 0, on from there. Rank 3 ends in step ``kill_in``.
    """
    model, optimizer, backward = model_on(sizes, folder, True, "1f1b")
    optimizer.param_groups[0]["lr"] = 2e-3  # at which roundings of bf16 do not grow over the steps
    if steps.start:
        gemini.load_checkpoint(f"{folder}/run", model, optimizer)
    rank, world = gemini.data_rank(mesh_of(sizes)) if sizes else (0, 1)
    losses = []
    for step in steps:
        if step == kill_in and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(backward(ids_of(step % 3, 0).chunk(world)[rank]))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if sizes and step % 3 == 2:
            gemini.save_checkpoint(f"{folder}/run", model, optimizer)
    return losses


def killed(folder: str) -> None:
    """Every process ends with its error, as programs do: those that wait for it are told by that."""
    error = ""
    try:
        curve(EIGHT, folder, range(20), 5)
    except Exception as e:
        error = type(e).__name__
    Path(folder, f"lost-{dist.get_rank()}").write_text(error)
    os._exit(1)


@pytest.mark.slow
def test_a_run_that_dies_goes_on_over_another_mesh(pool_of: Pools, tmp_path: Any) -> None:
    """Tied, in bf16, all planes on a drive, over stages, slices and shards. One of eight ranks is killed, and it goes
    on over slices and shards: the losses are those of one process.
    """
    assert all(outcome.kind == "Died" for outcome in pool_of(8).outcomes(killed, str(tmp_path)))
    assert {path.read_text() for path in tmp_path.glob("lost-*")} == {"RankLost"}
    assert len(list(tmp_path.glob("lost-*"))) == 7
    ways = {"before": (EIGHT, range(3)), "after": ({"dp": 4, "tp": 2}, range(3, 20)), "alone": ({}, range(20))}
    found = {}
    for name, (sizes, steps) in ways.items():
        folder = tmp_path if name == "after" else tmp_path / name
        folder.mkdir(exist_ok=True)
        each = pool_of(max(2, math.prod(sizes.values()))).run(curve, sizes, str(folder), steps)
        found[name] = [sum(losses) / len(each) for losses in zip(*each, strict=True)]
    assert found["before"] + found["after"] == pytest.approx(found["alone"], rel=5e-4)
    assert found["alone"][-1] < found["alone"][0] - 0.5


# ---- one process -----------------------------------------------------------------------------------------------------


def alone(where: str, folder: str, make: Callable[[], Any] = deep, **settings: Any) -> tuple[Found, Found]:
    """A pipeline, and the ordinary loop with the same model, budget and micro-batches."""
    config = partial(config_for, where, folder, gradients="accumulate", **settings)
    pipe = gemini.Pipeline(make().train(), config(), micro_batches=4, schedule="bfs")
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS)
    losses, norms, fetched = run(pipe, lambda step: ids_of(step, 0), optimizer)
    first = Found(losses, norms, pipe.model.state_dict(dtype=torch.float32), fetched)
    model: Any = gemini.GeminiDDP(make().train(), config())
    optimizer = gemini.HybridAdam(model.parameters(), lr=LR, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        before, parts = model._gemini_engine.store.manager.num_gathers, []
        for part in ids_of(step, 0).chunk(4):
            loss = model(input_ids=part, labels=part).loss / 4
            loss.backward()
            parts.append(loss.detach())
        fetched = model._gemini_engine.store.manager.num_gathers - before
        losses.append(torch.stack(parts).sum().item())
        norms.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return first, Found(losses, norms, model.state_dict(dtype=torch.float32), fetched)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_breadth_first_has_the_bits_of_accumulation(where: str, precision: str, tmp_path: Any) -> None:
    found, plain = alone(where, str(tmp_path), precision=precision)
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert all(helpers.same_bits(value, plain.state[name]) for name, value in found.state.items())
    assert found.state.keys() == plain.state.keys()


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_breadth_first_over_ranks_that_have_all_stages(
    sizes: dict[str, int], where: str, pool_of: Pools, tmp_path: Any
) -> None:
    found, plain = pool_of(2).run(piped, sizes, "bfs", 4, where, str(tmp_path)), accumulated(num_batches(sizes), 4)
    assert [sum(losses) / 2 for losses in zip(*(own.losses for own in found), strict=True)] == pytest.approx(
        plain.losses, rel=1e-5
    )
    for own in found:
        assert own.norms == pytest.approx(plain.norms, rel=1e-6) and own.state.keys() == plain.state.keys()
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("make", [deep, partial(llama, num_hidden_layers=8)], ids=["untied", "tied"])
def test_breadth_first_fetches_each_weight_twice(make: Callable[[], Any], tmp_path: Any) -> None:
    """In room for little more than a block: accumulation fetches it for each micro-batch, breadth first does not."""
    memory = gemini.MemoryBudget(cpu="800KiB", nvme="64MiB", nvme_path=tmp_path)
    found, plain = alone("disk", str(tmp_path), make, memory=memory, overlap=False)
    pipe = gemini.Pipeline(make(), config_for("disk", str(tmp_path), memory=memory), micro_batches=4, schedule="bfs")
    chunks = len(pipe.model._gemini_engine.store.chunks)
    ends = 2 * (make is not deep)  # a tied embedding is read at both ends
    assert found.fetched <= 2 * chunks + ends < plain.fetched, (found.fetched, chunks, plain.fetched)


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "t5"])
def test_families_breadth_first(kind: str, tmp_path: Any) -> None:
    found, plain = alone("disk", str(tmp_path), partial(small, kind))
    assert found.losses == pytest.approx(plain.losses, rel=1e-6) and found.norms == pytest.approx(plain.norms, rel=1e-6)


def test_stages_are_balanced() -> None:
    assert balanced([1, 1, 1, 1, 0], 2) == [(0, 2), (2, 4)]
    assert balanced([1, 1, 1, 1, 2], 2) == [(0, 3), (3, 4)]
    assert balanced([5, 1, 1, 1, 0], 2) == [(0, 1), (1, 4)]
    assert balanced([1, 1, 1, 0], 3) == [(0, 1), (1, 2), (2, 3)]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def nan_on_a_stage(sizes: dict[str, int], folder: str) -> tuple[str, bool]:
    mesh = mesh_of(sizes)
    pipe = gemini.Pipeline(deep().train(), config_for("ram", folder), mesh=mesh, micro_batches=4, schedule="1f1b")
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR)
    before = pipe.model.state_dict()
    if dist.get_rank() == 3:
        handle = pipe.model._gemini_engine.params.handles[-1]
        handle.param.register_hook(lambda grad: grad * float("nan"))
    ids = ids_of(0, gemini.data_rank(mesh).rank)
    pipe.step(input_ids=ids, labels=ids)
    return step_refused(optimizer, pipe.model, before)


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_nan_on_one_stage_is_found_on_all(sizes: dict[str, int], pool_of: Pools, tmp_path: Any) -> None:
    for rank, (said, is_as_before) in enumerate(pool_of(4).run(nan_on_a_stage, sizes, str(tmp_path))):
        assert is_as_before and ("holds inf or NaN" in said)
        assert ("another stage of this pipeline" in said) == (rank < 2)


class Skipping(nn.Module):
    """A stack whose second block reads what the first has made besides hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = kept = self.first(x)
        for block in self.blocks:
            x = block(x) + kept
        return (x - labels).square().mean()


class Stack(nn.Module):
    """Not of transformers: its forward gives the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return (self.down(x) - labels).square().mean()


def test_a_model_of_ones_own(tmp_path: Any) -> None:
    batch = {"x": torch.randn(8, 4), "labels": torch.randn(8, 4)}
    config = config_for("disk", str(tmp_path))
    pipe = gemini.Pipeline(Stack(), config, micro_batches=2, schedule="bfs", stages=3, example=batch)
    loss = pipe.step(**batch)
    plain = Stack()
    expected = plain(**batch)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(pipe.model.full_grad("up.weight"), plain.up.weight.grad)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"schedule": "1f1b"}, "in one process: stages take turns there"),
        ({"schedule": "zero-bubble"}, "gradients of weights apart from those of inputs"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"stages": 9}, "9 stages .* which has 8 blocks"),
        ({"model": "t5"}, "is an encoder-decoder"),
        ({"model": Skipping}, r"hands on something with gradients \(first\..* past blocks.1"),
        ({"model": Stack, "example": None}, "give it an example= batch"),
        ({"gradients": "transient"}, 'gradients="transient" in a pipeline'),
        ({"rows": 15}, "input_ids has 15 samples, which micro_batches=4 does not divide: give a batch of 16"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_a_pipeline_is_refused(how: dict[str, Any], says: str, tmp_path: Any) -> None:
    how = {"schedule": "bfs", "micro_batches": 4, **how}
    config = config_for("ram", str(tmp_path), gradients=how.pop("gradients", "retain"))
    make, rows = how.pop("model", deep), how.pop("rows", 16)
    if make is Skipping:
        how["example"] = {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}
    model = small("t5") if make == "t5" else make()
    with pytest.raises(ValueError, match=says):
        ids = ids_of(0, 0, rows)
        gemini.Pipeline(model, config, **how).step(input_ids=ids, labels=ids)
    assert all(param.numel() for param in model.parameters())


def refused(how: str, folder: str) -> None:
    mesh = mesh_of(
        {"tp": 2} if how == "cut" else {"pp": 2, "tp": 2} if how in ("plain", "plan", "whole") else {"pp": 2}
    )
    settings: dict[str, Any] = {"schedule": "1f1b", "micro_batches": 4}
    config, model = config_for("ram", folder), deep()
    if how == "fp16":
        config = config_for("ram", folder, precision="fp16")
    elif how == "interleaved":
        settings = {"schedule": "interleaved", "micro_batches": 3}
    elif how == "few":
        settings["micro_batches"] = 1
    elif how == "many":
        settings |= {"schedule": "bfs", "stages": 5}
    elif how == "one":
        settings["stages"] = 2
    elif how == "cut":
        settings["schedule"] = "bfs"
        gemini.slice_tensors(model, mesh)
    elif how == "plan":
        model, settings["example"] = Stack(), {"x": torch.randn(8, 4), "labels": torch.randn(8, 4)}
    elif how == "whole":
        config = config_for("ram", folder, optimizer=MuonRule())
    elif how == "budget":
        config = config_for("ram", folder, memory=gemini.MemoryBudget(cpu="128KiB"))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    try:
        if how == "plain":
            gemini.GeminiDDP(model, config, mesh=mesh)
        else:
            gemini.Pipeline(model, config, mesh=mesh, **settings)
    except BaseException:
        after = dict(model.named_parameters())
        assert before.keys() == after.keys() and all(torch.equal(after[name], was) for name, was in before.items())
        raise


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fp16", 'precision="fp16" in a pipeline'),
        ("interleaved", "takes a multiple of 2 micro-batches, got 3"),
        ("few", "'1f1b' over 2 ranks takes 2 micro-batches or more, got 1"),
        ("many", "10 stages (5 on each of 2 ranks)"),
        ("one", "has one stage on each rank, got stages=2"),
        ("budget", "cpu"),
        ("cut", "that is in slices: give it the whole model"),
        ("plain", "gemini.Pipeline makes stages (pp) as well"),
        ("plan", "has no plan for tensor parallel"),
        ("whole", "looks at whole params"),
    ],
)
def test_what_cannot_be_over_ranks_is_refused(how: str, says: str, pool_of: Pools, tmp_path: Any) -> None:
    """And the model is what it was."""
    for outcome in pool_of(4 if how in ("plain", "plan", "whole") else 2).outcomes(refused, how, str(tmp_path)):
        assert isinstance(outcome, Failure) and says in outcome.text, outcome
        assert outcome.kind == ("BudgetExceeded" if how == "budget" else "ValueError")


def differing(how: str, folder: str) -> list[str]:
    """What each of three steps says: the first is right, the second is not on rank 1, the third is."""
    pipe = gemini.Pipeline(deep(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=4, schedule="1f1b")
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR)
    said = []
    for step in range(3):
        rows = 16
        if step == 1 and dist.get_rank() == 1:
            rows = {"another shape": 8, "refused": 15}[how]
        ids = ids_of(0, 0, rows)
        try:
            said.append(f"loss {pipe.step(input_ids=ids, labels=ids).item()}")
            optimizer.zero_grad()
        except (RankMismatch, ValueError) as e:
            said.append(f"{type(e).__name__}: {e}")
    return said


@pytest.mark.parametrize("how", ["another shape", "refused"])
def test_a_batch_that_one_stage_cannot_take_is_refused_by_all(how: str, pool_of: Pools, tmp_path: Any) -> None:
    """And none of them waits for what does not come: the next step is a step as before."""
    first, second = pool_of(2).run(differing, how, str(tmp_path))
    assert first[0] == second[0] == first[2] == second[2] and first[0].startswith("loss ")
    if how == "refused":
        assert second[1].startswith("ValueError: input_ids has 15 samples")
        assert first[1].startswith("RankMismatch: rank 1 refuses its batch: input_ids has 15 samples")
    else:
        words = "RankMismatch: the batch of rank 1 has another input_ids than that of rank 0 (['(8, 12) int64'] against"
        assert first[1] == second[1] and first[1].startswith(words)


def another_first(folder: str) -> None:
    pipe = gemini.Pipeline(deep(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=4, schedule="1f1b")
    ids = ids_of(0, dist.get_rank())
    pipe.step(input_ids=ids, labels=ids)


def test_stages_begin_with_the_same_batch(pool_of: Pools, tmp_path: Any) -> None:
    for outcome in pool_of(2).outcomes(another_first, str(tmp_path)):
        assert isinstance(outcome, Failure) and outcome.kind == "RankMismatch", outcome
        assert "the first batch of rank 1 has another input_ids than that of rank 0" in outcome.text


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
    assert set(written) == {handle.name for handle in pipe.model._gemini_engine.params.handles}
    return losses, norms, names


@pytest.mark.parametrize(
    ("sizes", "where", "tied"),
    [({"pp": 2}, "ram", True), pytest.param({"pp": 2, "tp": 2}, "disk", False, marks=pytest.mark.slow)],
    ids=str,
)
def test_stages_from_files(sizes: dict[str, int], where: str, tied: bool, pool_of: Pools, tmp_path: Any) -> None:
    """The same bits as of stages of a whole model; what other ranks run is written nowhere here."""
    make = partial(deep, tie_word_embeddings=tied)
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
    model = deep()
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path / "model", state_dict=state)
    for outcome in pool_of(2).outcomes(lacking, str(tmp_path)):
        assert isinstance(outcome, Failure) and outcome.kind == "ValueError"
        assert "lack 1 of this LlamaForCausalLM's weights, for example 'lm_head.weight'" in outcome.text


def sent(sizes: dict[str, int], schedule: str, no_sync: bool, folder: str) -> tuple[list[float], list[float], int]:
    """Losses, norms, and the bytes of gradients that a rank sends in a step of four micro-batches."""
    mesh = mesh_of(sizes)
    pipe = gemini.Pipeline(
        deep().train(), config_for("ram", folder), mesh=mesh, micro_batches=4, schedule=schedule, no_sync=no_sync
    )
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms, _ = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank), optimizer)
    return losses, norms, pipe.model.memory_report()["sent"]["reduce_scatter"]


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"pp": 2, "dp": 2}, "1f1b"),
        pytest.param({"pp": 2, "dp": 2}, "interleaved", marks=pytest.mark.slow),
        pytest.param({"dp": 2}, "bfs", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_divided_once_per_step(
    sizes: dict[str, int], schedule: str, pool_of: Pools, tmp_path: Any
) -> None:
    """A quarter of the bytes of four micro-batches, and the same sums but for their rounding."""
    pool = pool_of(math.prod(sizes.values()))
    each, once = (pool.run(sent, sizes, schedule, no_sync, str(tmp_path)) for no_sync in (False, True))
    for (losses, norms, num_bytes), (other_losses, other_norms, other_bytes) in zip(each, once, strict=True):
        assert num_bytes == 4 * other_bytes > 0
        assert other_losses == pytest.approx(losses, rel=1e-6) and other_norms == pytest.approx(norms, rel=1e-6)


def timed(model: nn.Module, slow: int) -> Any:
    """A measured trace in which block ``slow`` takes five times as long as another one."""
    ids = ids_of(0, 0)
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
    slow_part = f"layers.{slow}."
    return with_seconds(
        tracer.trace, [5.0 if slow_part in f"{moment.module}." else 1.0 for moment in tracer.trace.moments]
    )


@pytest.mark.parametrize("slow", [0, 7])
def test_stages_are_balanced_by_measured_seconds(slow: int, tmp_path: Any) -> None:
    """By operations alone all blocks are the same."""
    config = config_for("ram", str(tmp_path))
    assert gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)._ranges == [(0, 4), (4, 8)]
    config = replace(config, trace=timed(deep().train(), slow))
    ((_, cut), _) = gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)._ranges
    assert cut < 4 if slow == 0 else cut > 4


def test_a_trace_of_another_model_balances_nothing(tmp_path: Any) -> None:
    config = replace(config_for("ram", str(tmp_path)), trace=timed(llama(num_hidden_layers=3).train(), 0))
    with pytest.raises(ValueError, match="with 3 blocks, and this LlamaForCausalLM has 8: trace the model"):
        gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)


def balanced_over_ranks(folder: str) -> list[tuple[int, int]]:
    config = replace(config_for("ram", folder), trace=timed(deep().train(), 7 * dist.get_rank()))
    pipe = gemini.Pipeline(deep(), config, mesh=mesh_of({"pp": 2}), micro_batches=2)
    pipe.step(input_ids=ids_of(0, 0), labels=ids_of(0, 0))
    return pipe._ranges


@pytest.mark.slow
def test_stages_over_ranks_are_balanced_by_the_first_ones_seconds(pool_of: Pools, tmp_path: Any) -> None:
    for (_, cut), _ in pool_of(2).run(balanced_over_ranks, str(tmp_path)):
        assert cut < 4
