"""Durable stores of several ranks: all of them commit or none, whatever is killed and whatever the drives did.

A commit has two phases; between them a rank may have its record and another one not. The run then goes on from the step
before, which all have.
"""

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import gemini
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.durable.slots import SlotFile
from gemini.train.slices.alike import refuse_unsuited
from tests.crash_images import Judge, Log, content
from tests.ranks.pool import Failure, Pool, Pools
from tests.ranks.test_checkpoints import Run, on_ranks, seed, world
from tests.world import world_of


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def begin(where: str, store: Path, *, guesses: bool = False) -> Run:
    run = Run(where, store, durable=True, guesses=guesses)
    seed(3)
    return run


def end(run: Run) -> None:
    """As a killed process leaves it: nothing is committed."""
    world_of(run.model).close()
    meet()


def commit_steps(
    where: str, store: Path, steps: int, guesses: bool = False
) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Commit behind every step; the bits of the last commit, and what comes after it."""
    run = begin(where, store, guesses=guesses)
    for _ in range(steps):
        run.train(1)
        pending = run.save(store, wait=False)
    pending.wait()
    at_commit = run.digest()
    losses = run.train(2)
    after = run.digest()
    assert (run.model.memory_report()["speculation"]["kept"] > 0) == guesses
    end(run)
    return at_commit, losses, after


def go_on(where: str, store: Path, folder: Path | None) -> tuple[int, dict[str, Any], list[float], dict[str, Any]]:
    """A run on the store, or (with a ``folder``) on none, that loads it."""
    run = begin(where, store) if folder is None else Run(where, folder)
    run.load(store)
    at, found = run.step, run.digest()
    losses = run.train(2)
    after = run.digest()
    end(run)
    return at, found, losses, after


@pytest.mark.parametrize("where", ["disk", pytest.param("mixed", marks=pytest.mark.slow)])
def test_a_store_is_resumed_by_any_number_of_ranks(where: str, pool_of: Pools, tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    store.mkdir()
    other.mkdir()
    saved = on_ranks(pool_of, 2, commit_steps, where, store, 3)
    for size in (1, 3):
        for at, found, _, _ in on_ranks(pool_of, size, go_on, where, store, other):
            assert (at, found) == (3, saved[0][0]), "with other budgets and ranks"
    for rank, (at, *found) in enumerate(on_ranks(pool_of, 2, go_on, where, store, None)):
        assert (at, tuple(found)) == (3, saved[rank])


@pytest.mark.slow
def test_guesses_are_committed_when_their_step_keeps_them(pool_of: Pools, tmp_path: Path) -> None:
    stores = [tmp_path / "guessed", tmp_path / "plain"]
    for store in stores:
        store.mkdir()
    saved = pool_of(2).run(commit_steps, "disk", stores[0], 3, True)
    assert saved == pool_of(2).run(commit_steps, "disk", stores[1], 3)
    for rank, (at, *found) in enumerate(pool_of(2).run(go_on, "disk", stores[0], None)):
        assert (at, tuple(found)) == (3, saved[rank])


def killed(where: str, store: Path, phase: str) -> int:
    """Two commits; in the third one rank 1 dies, or only its record is not written."""
    run = begin(where, store)
    for _ in range(2):
        run.train(1)
        run.save(store)
    run.train(1)
    method = {"bring": (SlotFile, "sync"), "record": (StoreFolder, "commit")}[phase]

    def fail(*args: Any) -> Any:
        raise gemini.StorageError("the drive of rank 1 is gone")

    with mock.patch.object(*method, fail) if run.rank == 1 else mock.patch.object(*method, getattr(*method)):
        try:
            run.save(store)
        except gemini.StorageError as e:
            assert "rank 1" in str(e)
        else:
            raise AssertionError("a commit that one rank could not make was one")
    end(run)
    return content(store)[0]


@pytest.mark.parametrize("phase", ["bring", "record"])
def test_what_only_some_ranks_have_committed_is_none(phase: str, pool_of: Pools, tmp_path: Path) -> None:
    assert pool_of(2).run(killed, "disk", tmp_path, phase) == [2, 2]
    for at, *_ in pool_of(2).run(go_on, "disk", tmp_path, None):
        assert at == 2


def recorded(where: str, store: Path, folder: Path) -> tuple[Log, list[tuple[int, int, str]]]:
    """Four commits and one more step: what this rank wrote, and when which commit was over."""
    run = begin(where, store)
    run.train(1)
    run.save(store)
    meet()
    log, commits = Log(store), []
    meet()

    def committed() -> None:
        meet()
        commits.append((time.monotonic_ns(), *content(store)))
        meet()

    with log.recording():
        committed()
        for _ in range(3):
            run.train(1)
            pending = run.save(store, wait=False)
            pending.wait()
            committed()
        run.train(1)
    end(run)
    return log.over(), commits


def images(pool: Pool, path: Path, num: int, where: str) -> list[str]:
    """What is wrong with images of what two ranks have written."""
    store = path / "store"
    store.mkdir(parents=True)
    found = pool.run(recorded, where, store, path)
    log = Log.merged([log for log, _ in found])
    judge, rng, failures = Judge(log), random.Random(num), list[str]()
    for when, number, bits in found[0][1]:
        judge.has_committed(sum(entry.time <= when for entry in log.entries), number, bits)
    for number in range(num):
        (path / f"image-{number}").mkdir()
        if (failure := judge.failure(path / f"image-{number}", rng)) is not None:
            failures.append(failure)
        shutil.rmtree(path / f"image-{number}")
    return failures


def test_every_image_of_a_crash_opens_at_a_commit_of_all_ranks(pool_of: Pools, tmp_path: Path) -> None:
    assert images(pool_of(2), tmp_path, 40, "mixed") == []


def without_barrier(where: str, store: Path, folder: Path) -> Any:
    with mock.patch.object(SlotFile, "sync", lambda self: None) if world()[0] else mock.patch.object(random, "seed"):
        return recorded(where, store, folder)


def test_a_barrier_that_one_rank_leaves_out_is_found(
    pool_of: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(images.__globals__, "recorded", without_barrier)
    assert images(pool_of(2), tmp_path, 40, "mixed")


def test_replicas_are_refused(tmp_path: Path) -> None:
    config = gemini.GeminiConfig(memory=gemini.MemoryBudget(nvme_path=tmp_path, durable=True))
    with pytest.raises(ValueError, match="replicas of it"):
        refuse_unsuited(
            config, mock.Mock(**{"replicas.size": 2, "experts.size": 1}, slice_=""), is_cut=False, in_stages=False
        )


def test_a_rank_that_is_killed_leaves_a_commit(pool_of: Pools, tmp_path: Path) -> None:
    """SIGKILL at a random moment; the others lose it, and two new ranks go on from what all had."""
    died, other = Pool(2, timeout=60.0).outcomes(dies, tmp_path, random.Random(7).uniform(0.5, 2.0))
    assert isinstance(died, Failure) and died.kind == "Died" and isinstance(other, Failure)
    said = int((tmp_path / "said").read_text())
    for at, *_ in pool_of(2).run(go_on, "disk", tmp_path, None):
        assert at in (said, said + 1)


def dies(store: Path, seconds: float) -> None:
    run = begin("disk", store)
    run.train(1)
    run.save(store)
    if run.rank == 0:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        if run.rank == 1:
            (store / "saying").write_text(str(run.step))
            (store / "saying").replace(store / "said")
        run.train(1)
        run.save(store)
