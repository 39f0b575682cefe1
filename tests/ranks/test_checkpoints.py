"""Checkpoints across ranks: saved by N, loaded by M, on other tiers, with every bit; written behind the training too.

The bits are compared by checksums of every master and state of every param, read whole from all ranks. A rank that
cannot write or read, and a damaged file, stop all ranks with the same news, and nothing hangs.

No thread of gloo is left when the interpreter ends: it may be the last to hold a tensor of a collective, and letting go
of that takes the interpreter, so the process is aborted if there is none any more.
"""

import contextlib
import errno
import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini.ranks import process_groups
from tests.ranks.pool import Pools
from tests.scaling import backward, make_step
from tests.train.helpers import VOCAB, gpt2, llama, mixtral, snapshot, t5
from tests.world import world_of

MODELS = {"gpt2": lambda: gpt2(dropout=0.1), "llama": lambda: llama(tied=True), "mixtral": mixtral, "t5": t5}


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Run:
    """A model on this rank, its optimizer in two groups, and a scheduler. ``mesh``: replicas x shards."""

    def __init__(
        self, where: str, folder: Path, *, model: str = "gpt2", precision: str = "bf16",
        mesh: tuple[int, int] | None = None, gradients: str = "retain", durable: bool = False, guesses: bool = False,
    ):  # fmt: skip
        self.rank, size = world()
        placement: Any = "auto"
        if where == "disk":
            placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
        elif where in ("mixed", "standin"):
            placement = gemini.StaticPlacement(weights_on_nvme=0.3, optimizer_on_nvme=0.5)
        memory: dict[str, Any] = {"cpu": size * 64 * 2**20}
        if where != "ram":
            memory.update(nvme=size * 32 * 2**20, nvme_path=folder, durable=durable)
        if where == "standin":
            memory["gpu"] = 4 * 2**20
        config = gemini.GeminiConfig(
            precision=precision, memory=gemini.MemoryBudget(**memory), placement=placement, gradients=gradients,
            device="standin" if where == "standin" else "cpu", max_chunk=16384,
        )  # fmt: skip
        made = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        self.model: Any = gemini.GeminiDDP(MODELS[model](), config, mesh=made)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = gemini.HybridAdam(
            [{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2,
            step_in_backward=gradients == "transient" or guesses, speculate=guesses,
        )  # fmt: skip
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=40)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            seed = 100 * self.step + 10 * self.rank + random.randrange(3)
            ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
            loss = self.model(input_ids=ids, labels=ids).loss
            backward(self.model, loss)
            make_step(self.model, self.optimizer)
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, **how: Any) -> Any:
        return gemini.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, {"at": self.step}, **how)

    def load(self, directory: Path) -> None:
        self.step = gemini.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)["at"]

    def digest(self) -> dict[str, Any]:
        """Checksums of every bit that a checkpoint keeps."""
        planes = {
            (name, kind): zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for name, kinds in snapshot(self.model).items()
            for kind, value in kinds.items()
        }
        world_of(self.model).check()
        return {"planes": planes, "scheduler": self.scheduler.state_dict(), "lr": self.optimizer.param_groups[0]["lr"]}


def seed(value: int) -> None:
    torch.manual_seed(value + world()[0])
    random.seed(value + world()[0])


def on_ranks(pool_of: Pools, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return pool_of(size).run(function, *args) if size > 1 else [function(*args)]


# ---- any number of ranks ---------------------------------------------------------------------------------------------

CASES = {1: ("standin", "mixtral", "bf16"), 2: ("mixed", "gpt2", "bf16"), 4: ("disk", "t5", "fp16")}


def save_it(where: str, model: str, precision: str, folder: Path, mesh: Any, wait: bool) -> dict[str, Any]:
    run = Run(where, folder, model=model, precision=precision, mesh=mesh)
    seed(3)
    run.train(2)
    twin = random.Random()
    twin.setstate(random.getstate())
    expected = {**run.digest(), "rng": twin.random()}
    pending = run.save(folder / "ckpt", wait=wait)
    if not wait:
        run.train(1)
        pending.wait()
    return expected


def load_it(where: str, model: str, precision: str, folder: Path, mesh: Any) -> dict[str, Any]:
    run = Run(where, folder, model=model, precision=precision, mesh=mesh)
    seed(50)
    run.train(1)
    run.load(folder / "ckpt")
    return {**run.digest(), "rng": random.random()}


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_saved_by_n_loaded_by_m(saved_by: int, pool_of: Pools, tmp_path: Path) -> None:
    where, model, precision = CASES[saved_by]
    expected = on_ranks(pool_of, saved_by, save_it, where, model, precision, tmp_path, None, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
    for loaded_by, other in ((1, "disk"), (2, "standin"), (4, "mixed")):
        found = on_ranks(pool_of, loaded_by, load_it, other, model, precision, tmp_path, None)
        for rank, digest in enumerate(found):
            rng = digest.pop("rng")
            assert digest == {key: value for key, value in expected[0].items() if key != "rng"}, (loaded_by, rank)
            if rank < saved_by:
                assert rng == expected[rank]["rng"], "each rank goes on with its own random numbers"


@pytest.mark.slow
def test_replicas_and_shards(pool_of: Pools, tmp_path: Path) -> None:
    """Two replicas of two shards: one of them writes, all of them read; and any other division of the same ranks."""
    for number, (saved, loaded) in enumerate((((2, 2), None), (None, (2, 2)), ((4, 1), (2, 2)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = on_ranks(pool_of, 4, save_it, "mixed", "llama", "bf16", folder, saved, number != 1)
        found = on_ranks(pool_of, 4, load_it, "ram", "llama", "bf16", folder, loaded)
        assert found == expected
        size = sum(path.stat().st_size for path in (folder / "ckpt").glob("params-*"))
        params = sum(p.numel() for p in {id(p): p for p in llama(tied=True).parameters()}.values())
        assert 12 * params <= size < 12.5 * params + 2**16, "every part is written once, not once per replica"


# ---- behind the training ---------------------------------------------------------------------------------------------


def save_behind(where: str, gradients: str, change: str, folder: Path) -> tuple[Any, Any, Any, list[int]]:
    """The model goes on to change while the disk is slow: what is saved is the moment of the call.

    Returns the state at the call, what the checkpoint holds, and how often the training overtook the writing.
    """
    from gemini.train.checkpoint import format as tensor_file

    run = Run(where, folder, gradients=gradients)
    world = world_of(run.model)
    seed(1)
    run.train(1)
    run.model.full_param("lm_head.weight")
    expected = run.digest()
    moments = run.optimizer.state_dict()
    for state in moments["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
    real, waits = os.pwrite, []
    until = time.monotonic() + 20

    def slow(fd: int, data: Any, position: int) -> int:
        behind = threading.current_thread() is not threading.main_thread()
        while behind and not waits and time.monotonic() < until:  # as slow as it takes to be overtaken
            time.sleep(0.002)
        return real(fd, data, position)

    def counted(chunk: Any) -> None:
        if chunk.spec.index in saver._unsaved:
            waits.append(chunk.spec.index)
        type(saver).before_write(saver, chunk)

    tensor_file.os.pwrite = slow
    held = world.used(gemini.Tier.CPU)
    try:
        pending = run.save(folder / "ckpt", wait=False)
        saver = world.write_observers[-1]
        saver.before_write = counted
        during = world.holders(gemini.Tier.CPU).get("checkpoint", 0)
        assert not pending.done()
        if change == "gathered":
            with run.model.gathered(write=True), torch.no_grad():
                for param in run.model.parameters():
                    param.mul_(2)
        elif change == "by name":
            run.model.load_state_dict({name: value * 2 for name, value in run.model.state_dict().items()})
        elif change == "moments":
            run.optimizer.load_state_dict(moments)
        else:
            run.train(2)
        pending.wait()
        assert pending.done()
    finally:
        tensor_file.os.pwrite = real
    assert world.holders(gemini.Tier.CPU).get("checkpoint", 0) == 0
    assert during <= world.tile * 4 and held <= world.budget(gemini.Tier.CPU)
    changed = run.digest()
    other = Run("ram", folder, gradients=gradients)
    other.load(folder / "ckpt")
    return expected, other.digest(), changed, waits


@pytest.mark.parametrize(
    ("size", "where", "gradients", "change"),
    [(1, "ram", "retain", "steps"), (1, "ram", "retain", "gathered"), (1, "ram", "retain", "by name"),
     (1, "disk", "transient", "steps"), (1, "disk", "retain", "moments"), (1, "standin", "retain", "steps"),
     (1, "standin", "retain", "gathered"), (2, "mixed", "retain", "steps"), (2, "mixed", "retain", "by name"),
     (2, "standin", "transient", "steps")],
)  # fmt: skip
@pytest.mark.sweep(every=3)
def test_written_behind_the_training_is_one_moment(
    size: int, where: str, gradients: str, change: str, pool_of: Pools, tmp_path: Path
) -> None:
    for expected, found, changed, waits in on_ranks(pool_of, size, save_behind, where, gradients, change, tmp_path):
        assert found == expected
        assert changed["planes"] != expected["planes"], "nothing went on while it was written: the test tests nothing"
        assert waits, "the training never overtook the writing: the test tests nothing"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def failing_disk(folder: Path, failing: int, wait: bool) -> Any:
    run = Run("mixed", folder)
    run.train(1)
    run.save(folder / "ckpt")
    good = run.digest()
    run.train(1)
    real = os.pwrite
    if run.rank == failing:

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        os.pwrite = full
    try:
        with pytest.raises(gemini.StorageError, match=f"rank {failing}.*No space left"):
            run.save(folder / "ckpt", wait=wait).wait()
    finally:
        os.pwrite = real
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    run.train(1)
    if not wait:  # and if nobody waits for it, the next one says so, on every rank
        os.pwrite = full if run.rank == failing else real
        pending = run.save(folder / "ckpt", wait=False)
        while not pending.done():
            pass
        os.pwrite = real
        if run.rank == 0:
            with pytest.raises(gemini.StorageError, match="No space left"):
                pending.wait()
        run.train(1)
        with pytest.raises(gemini.StorageError, match="No space left"):
            run.save(folder / "ckpt")
    old = Run("ram", folder)
    old.load(folder / "ckpt")
    kept = old.digest()
    run.save(folder / "ckpt")
    old.load(folder / "ckpt")
    return kept == good, left, old.digest() == run.digest()


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("failing", "wait"), [(0, True), (1, True), (1, False)])
def test_a_disk_that_fails_on_one_rank(failing: int, wait: bool, pool_of: Pools, tmp_path: Path) -> None:
    for kept, left, saved in pool_of(2).run(failing_disk, tmp_path, failing, wait):
        assert kept, "the old checkpoint is still there"
        assert left == ["ckpt"]
        assert saved, "and saving works again when there is room"


def load_damaged(folder: Path, spoil: str) -> Any:
    run = Run("mixed", folder)
    run.train(1)
    run.save(folder / "ckpt")
    run.train(1)
    before, rng = run.digest(), random.getstate()
    path = folder / "ckpt" / spoil
    good = path.read_bytes()
    first = 8 + int.from_bytes(good[:8], "little") if path.suffix == ".safetensors" else 20
    for place in (first, (first + len(good)) // 2, len(good) - 3):  # in the shares of different ranks
        dist.barrier()
        if run.rank == 0:
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        dist.barrier()
        with pytest.raises(gemini.StorageError, match="damaged|cannot be read|not that of"):
            run.load(folder / "ckpt")
    dist.barrier()
    if run.rank == 0:
        path.write_bytes(good)
    dist.barrier()
    assert run.digest() == before and random.getstate() == rng
    run.load(folder / "ckpt")
    return True


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    "spoil", ["params-00000-00000.safetensors", "params-00001-00000.safetensors", "values.safetensors", "manifest.json"]
)
def test_damage_is_found_by_all_ranks_before_anything_changes(spoil: str, pool_of: Pools, tmp_path: Path) -> None:
    assert pool_of(2).run(load_damaged, tmp_path, spoil) == [True, True]


def refuse(folder: Path) -> list[str]:
    run = Run("ram", folder)
    run.train(1)
    said = []

    def attempt(function: Callable[[], Any]) -> None:
        with pytest.raises((gemini.GeminiError, TypeError)) as caught:
            function()
        said.append(f"{type(caught.value).__name__}: {caught.value}")

    extra = object() if run.rank == 1 else {"at": 1}
    attempt(lambda: gemini.save_checkpoint(folder / "ckpt", run.model, run.optimizer, run.scheduler, extra))
    attempt(lambda: run.save(folder / f"ckpt-{run.rank}"))
    run.save(folder / "ckpt")
    scheduler = run.scheduler if run.rank == 0 else None
    attempt(lambda: gemini.load_checkpoint(folder / "ckpt", run.model, run.optimizer, scheduler))
    attempt(lambda: gemini.load_checkpoint(folder / "nowhere", run.model, run.optimizer, run.scheduler))
    attempt((lambda: run.save(folder / "ckpt")) if run.rank == 0 else (lambda: run.load(folder / "ckpt")))
    run.load(folder / "ckpt")
    run.train(1)
    return said


def test_what_one_rank_refuses_no_rank_does(pool_of: Pools, tmp_path: Path) -> None:
    one, two = pool_of(2).run(refuse, tmp_path)
    assert "rank 1 refused save_checkpoint" in one[0] and "extra" in one[0] and two[0].startswith("TypeError: extra")
    assert "another directory on rank 1" in one[1] and one[1] == two[1]
    assert "rank 1 refused load_checkpoint" in one[2] and "scheduler" in one[2] and two[2].startswith("PlanMismatch")
    assert all("no checkpoint at" in said[3] for said in (one, two))
    assert "rank 0 is at save_checkpoint" in one[4] and one[4] == two[4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def num_threads() -> int:
    """Threads of gloo that work on collectives of a group."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since it was listed
            names.append(task.joinpath("comm").read_text().strip())
    return names.count("pt_gloo_runloop")


def threads_of_a_save(folder: Path) -> tuple[int, int, int]:
    """Before the first checkpoint, with one written and its handle kept, and when the program's end has begun."""
    config = gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu=64 * 2**20), device="cpu")
    model = gemini.GeminiDDP(torch.nn.Linear(32, 32), config)
    optimizer = gemini.HybridAdam(model.parameters())
    before = num_threads()
    handles = [gemini.save_checkpoint(folder / str(wait), model, optimizer, wait=wait) for wait in (True, False)]
    for handle in handles:
        handle.wait()
    saved = num_threads()
    process_groups.end_all()
    deadline = time.monotonic() + 10
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined may be listed a moment longer
    return before, saved, num_threads()


def test_the_threads_of_checkpoints_end_before_the_interpreter(pool_of: Pools, tmp_path: Path) -> None:
    """Nothing may follow in the same default group: one made after another has ended may get its dead addresses."""
    for before, saved, ended in pool_of(2).run(threads_of_a_save, tmp_path):
        assert saved > before, "no thread was seen: this test looks for the wrong name"
        assert ended <= before
