"""One of two ranks runs out of memory in a step: the same bits on both, or a clear error on both, and nobody hangs.

Nothing is made again by itself there (``docs/decisions/2026-11-27-out-of-memory.md``); what the program of that rank
does next is up to it.
"""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
import tests.standin_device  # noqa: F401 - "standin" is a device then
from tests.ranks.pool import Failure, Pools
from tests.ranks.test_rank_disagreements import Squares, bits
from tests.world import world_of


class Fails(torch.autograd.Function):
    """Runs out of memory at the place that is armed, once."""

    armed = ""

    @staticmethod
    def _pass(place: str) -> None:
        if Fails.armed == place:
            Fails.armed = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has")

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        Fails._pass(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        Fails._pass(f"backward {ctx.name}")
        return grad, None


class Failing(torch.nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fails.apply(x, self.name)  # type: ignore[no-any-return, no-untyped-call]


def make(gradients: str) -> tuple[Any, Any]:
    """A model of three layers in chunks of their own, which move; between them it may fail, in the order of forward."""
    torch.manual_seed(0)
    one, two, three = torch.nn.Linear(16, 256), torch.nn.Linear(256, 16), torch.nn.Linear(16, 4)
    model = Squares(one, Failing("early"), torch.nn.Tanh(), two, Failing("late"), torch.nn.Tanh(), three)
    memory = gemini.MemoryBudget(gpu="200KiB", cpu="16MiB")
    how: dict[str, Any] = {"precision": "bf16", "gradients": gradients, "device": "standin", "max_chunk": 5000}
    managed = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, **how))
    return managed, gemini.HybridAdam(managed.parameters(), lr=0.1)


def micro_batch(model: Any, seed: int) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    model(x.bfloat16()).backward()


def end_step(model: Any, optimizer: Any) -> None:
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def step(model: Any, optimizer: Any, seed: int) -> None:
    for number in (1, 2):
        micro_batch(model, 10 * seed + number)
    end_step(model, optimizer)


def run(where: str, then: str, gradients: str, path: str) -> int:
    """Three steps of two micro-batches; in the third rank 1 runs out of memory: a checksum of what this rank keeps.
    ``where``: "forward late in 2" is the second micro-batch of that step. ``then``: what its program does.
    """
    model, optimizer = make(gradients)
    for seed in range(2):
        step(model, optimizer, seed)
    place, _, number = where.rpartition(" in ")
    if number == "2":
        micro_batch(model, 21)
    Fails.armed = place if dist.get_rank() == 1 else ""
    try:
        micro_batch(model, 22 if number == "2" else 21)
        if number != "2":
            micro_batch(model, 22)
        end_step(model, optimizer)
    except torch.OutOfMemoryError:
        Path(path, "failed").touch()
        if then == "ends":
            os._exit(3)
        if then == "begins anew":
            optimizer.zero_grad()
            step(model, optimizer, 2)
        else:
            if number != "2":
                micro_batch(model, 22)
            try:
                end_step(model, optimizer)
            except gemini.GeminiError:
                world_of(model).close()
                alive = [thread.name for thread in threading.enumerate() if thread.name in ("reduce", "collectives")]
                assert not alive, "threads of its model wait for what never comes"
                raise
    return bits(model)


def outcomes(pool_of: Pools, tmp_path: Path, *args: str) -> list[Any]:
    pool = pool_of(2)
    # Longer than any of these takes: who waits for it would be found out by `seconds`.
    pool.renew(timeout=200)
    (tmp_path / "failed").unlink(missing_ok=True)
    return pool.outcomes(run, *args, str(tmp_path), seconds=100)


@pytest.mark.parametrize("gradients", ["accumulate", "retain"])
def test_a_step_that_the_rank_begins_anew_has_the_same_bits(gradients: str, pool_of: Pools, tmp_path: Path) -> None:
    """Others wait meanwhile: what this rank gathers again they have, or gather with it."""
    wanted = outcomes(pool_of, tmp_path, "nowhere in 1", "begins anew", gradients)
    assert not (tmp_path / "failed").exists()
    for where in ("forward early in 1", "forward late in 1", "backward late in 1"):
        assert outcomes(pool_of, tmp_path, where, "begins anew", gradients) == wanted
        assert (tmp_path / "failed").exists()


@pytest.mark.parametrize(
    ("where", "then"),
    [
        # Behind the sums of its last chunk, which zero_grad() drops on this rank alone.
        ("backward early in 1", "begins anew"),
        # A backward more than the other rank makes.
        ("backward late in 2", "begins anew"),
        pytest.param("forward late in 2", "begins anew", marks=pytest.mark.slow),
        # A backward less.
        ("backward late in 1", "goes on"),
        pytest.param("forward late in 1", "goes on", marks=pytest.mark.slow),
        pytest.param("forward late in 2", "goes on", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_makes_another_step_than_the_others_is_told_on_all(
    where: str, then: str, pool_of: Pools, tmp_path: Path
) -> None:
    found = outcomes(pool_of, tmp_path, where, then, "accumulate")
    assert (tmp_path / "failed").exists()
    assert [(type(one), one.kind) for one in found] == [(Failure, "RankMismatch")] * 2, found


def test_one_that_goes_on_in_the_middle_of_a_script_is_told_and_ends_at_once(pool_of: Pools, tmp_path: Path) -> None:
    """What it has offered behind a gather that never comes ends with its model, and the other hears that it went."""
    other, own = outcomes(pool_of, tmp_path, "backward late in 2", "goes on", "accumulate")
    assert own.kind == "GeminiError" and "a backward inside no_sync(), or one that failed" in own.text
    assert other.kind == "RankLost" and "rank 1 did not answer" in other.text


@pytest.mark.parametrize("where", ["forward late in 1", "backward early in 2"])
def test_one_that_ends_is_missed_by_the_others(where: str, pool_of: Pools, tmp_path: Path) -> None:
    other, own = outcomes(pool_of, tmp_path, where, "ends", "accumulate")
    assert own.kind == "Died"
    assert other.kind == "RankLost" and "rank 1 did not answer" in other.text
