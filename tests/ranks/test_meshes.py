"""A mesh by the names of its dims: who shares what, whose budget is whose, and models whose slices were cut by hand.

And parts of sequences beside slices and stages: the loss, gradients and norm of one process.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import gemini
from gemini.memory.system import available_bytes
from gemini.planning.working import MARGIN
from gemini.ranks import group
from gemini.ranks.group import names_of, ranks_along
from gemini.ranks.wire import Tag
from gemini.tiers import Tier
from tests.ranks.context_cases import Case, Result, batch, differences, make
from tests.ranks.parallel_cases import config_for, mesh_of, num_batches
from tests.ranks.pool import Failure, Pools
from tests.ranks.schedules import delayed
from tests.train import helpers
from tests.world import world_of

MIB = 2**20


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """``as_rank(5, 8)``: this process is one of many, which are not there."""

    def join(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- names -----------------------------------------------------------------------------------------------------------


def test_ranks_that_differ_in_some_dims_alone(as_rank: Any) -> None:
    as_rank(13, 16)  # 13 = 1 (dp_replicate), 1 (dp), 0 (cp), 1 (tp)
    mesh = mesh_of({"dp_replicate": 2, "dp": 2, "cp": 2, "tp": 2})
    assert ranks_along(mesh, "tp") == [12, 13]
    assert ranks_along(mesh, "dp", "cp") == [9, 11, 13, 15]
    assert ranks_along(mesh, "dp_replicate", "dp", "cp") == [1, 3, 5, 7, 9, 11, 13, 15]
    assert gemini.data_rank(mesh) == (3, 4)
    assert gemini.data_rank(mesh["cp"]) == (0, 1) and gemini.data_rank(mesh["dp", "tp"]) == (1, 2)
    assert gemini.data_rank(init_device_mesh("cpu", (4, 4))) == gemini.data_rank() == (13, 16)
    assert gemini.data_rank(mesh_of({"dp_shard": 4, "sp": 4})) == (3, 4), "accelerate's names"


def test_every_rank_has_a_part_of_the_data_with_its_neighbours(as_rank: Any) -> None:
    parts = []
    for rank in range(8):
        as_rank(rank, 8)
        parts.append(gemini.data_rank(mesh_of({"pp": 2, "dp": 2, "tp": 2})))
    assert parts == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
    dist.destroy_process_group()
    assert gemini.data_rank() == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 2, "tensor": 4}, "called 'tensor': name its dimensions any of pp, dp_replicate, dp, cp, tp, ep"),
        ({"dp": 2, "fsdp": 4}, "two of which mean the same"),
    ],
)
def test_names_that_mean_nothing(sizes: dict[str, int], says: str, as_rank: Any) -> None:
    as_rank(0, 8)
    with pytest.raises(ValueError, match=says):
        names_of(mesh_of(sizes))
    with pytest.raises(ValueError, match="3 dimensions without names"):
        gemini.data_rank(init_device_mesh("cpu", (2, 2, 2)))
    with pytest.raises(ValueError, match="mesh has ep=4 and tp=2: ep cannot be combined with tp"):
        gemini.data_rank(mesh_of({"tp": 2, "ep": 4}))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no plan of transformers for dividing experts"):
        gemini.GeminiDDP(helpers.llama(), gemini.GeminiConfig(device="cpu"), mesh=mesh_of({"dp": 2, "ep": 4}))


# ---- budgets ---------------------------------------------------------------------------------------------------------


def budgets(sizes: dict[str, int], part: tuple[str, ...] = ()) -> dict[str, Any]:
    mesh = mesh_of(sizes)
    given = mesh[part] if part else mesh
    make: Callable[[], Any] = Net if "tp" in sizes else helpers.llama
    config = gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
    world = world_of(gemini.GeminiDDP(make(), config, mesh=given))
    declared = world.budget(Tier.CPU)
    free = available_bytes()
    config = gemini.GeminiConfig(precision="fp32", device="cpu")
    measured = world_of(gemini.GeminiDDP(make(), config, mesh=given)).budget(Tier.CPU)
    return {"declared": declared, "share": measured / (free * MARGIN), "is_divided": world.ranks.shares_params}


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"tp": 4}, ()), ({"dp": 2, "tp": 2}, ()), ({"pp": 2, "dp_replicate": 2}, ()), ({"dp": 2, "cp": 2}, ()),
        ({"dp": 2, "tp": 2}, ("dp",)), ({"pp": 2, "dp": 1, "cp": 2}, ()),
    ],
)  # fmt: skip
def test_the_budget_of_a_machine_is_divided_among_all_processes_of_the_job(
    sizes: dict[str, int], part: tuple[str, ...], pool_of: Pools
) -> None:
    found = pool_of(4).run(budgets, sizes, part)
    assert sum(rank["declared"] for rank in found) <= 64 * MIB
    assert all(rank["declared"] == 16 * MIB for rank in found)
    assert sum(rank["share"] for rank in found) < 1.2, "what is free is divided as well"
    assert all(rank["is_divided"] == (sizes != {"tp": 4}) for rank in found)


# ---- a model that was sliced by hand ---------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """The input of a slice: its gradient is the sum over slices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Sum(torch.autograd.Function):
    """The output: the sum over slices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Net(nn.Module):
    """Two layers, whole or a slice of each; the first norm is whole on every slice."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None):
        super().__init__()
        torch.manual_seed(3)
        self.norm, up, down = nn.LayerNorm(16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        mine = slice(rank * 32 // size, (rank + 1) * 32 // size)
        self.up = nn.Parameter(up.weight.detach()[mine].clone())
        self.down = nn.Parameter(down.weight.detach()[:, mine].clone())
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x if self.group is None else Copy.apply(x, self.group)
        x = torch.tanh(x @ self.up.T) @ self.down.T
        return x if self.group is None else Sum.apply(x, self.group)


def sample(rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def sliced(folder: str = "", wrong: str = "") -> dict[str, torch.Tensor]:
    mesh = mesh_of({"dp": 2, "tp": 2})
    here, group = mesh.get_local_rank("tp"), mesh.get_group("tp")
    config = gemini.GeminiConfig(
        precision="fp16" if wrong == "fp16" else "fp32", device="cpu", memory=gemini.MemoryBudget(cpu="16MiB")
    )
    model: Any = gemini.GeminiDDP(Net(here, 2, group), config, mesh=mesh)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2, eps=1e-4)
    for _ in range(4):
        x = sample(dist.get_rank() if wrong == "batch" else gemini.data_rank(mesh).rank)
        model(x).square().mean().backward()
        if wrong == "clip":
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if wrong == "folder":
        gemini.save_checkpoint(folder, model, optimizer)
    own = model.state_dict()
    gemini.save_checkpoint(f"{folder}/slice-{here}", model, optimizer)
    with model.gathered(write=True), torch.no_grad():
        model.up.zero_()
    gemini.load_checkpoint(f"{folder}/slice-{here}", model, optimizer)
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    return {name: value.clone() for name, value in own.items()}


def test_a_model_in_slices_trains(pool_of: Pools, tmp_path: Path) -> None:
    found = pool_of(4).run(sliced, str(tmp_path))
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
    for _ in range(4):
        for rank in range(2):
            (plain(sample(rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, own in enumerate(found):
        mine = slice(rank % 2 * 16, rank % 2 * 16 + 16)
        wanted = {"norm.weight": plain.norm.weight, "up": plain.up[mine], "down": plain.down[:, mine]}
        for name, value in wanted.items():
            torch.testing.assert_close(own[name], value.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} on rank {rank}")


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ("batch", "RankMismatch", "the first batch of rank [13] has another argument 0 than that of rank [02]"),
        ("clip", "GeminiError", "clip_grad_norm_ of a model that was sliced by hand"),
        ("folder", "ValueError", "slices tp 0 and tp 1 of the model, which would overwrite each other"),
        ("fp16", "ValueError", 'precision="fp16" with a model in slices'),
    ],
)
def test_what_slices_cannot_do_is_refused(wrong: str, kind: str, says: str, pool_of: Pools, tmp_path: Path) -> None:
    for outcome in pool_of(4).outcomes(sliced, str(tmp_path), wrong):
        assert isinstance(outcome, Failure) and outcome.kind == kind and re.search(says, outcome.text), outcome


MESHES: tuple[dict[str, int], ...] = (
    {"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cp": 2},
    {"pp": 2, "cp": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2, "tp": 2},
)  # fmt: skip


def trained(sizes: dict[str, int], case: Case, where: str, folder: str, seed: int) -> Result:
    """A step of a rank, while messages are late by chance (``seed``)."""
    mesh, model = mesh_of(sizes), make(case)
    config = config_for(where, folder, max_chunk=8000)
    whole = batch(case, gemini.data_rank(mesh).rank)
    with delayed(seed):
        if "pp" in sizes:
            pipe = gemini.Pipeline(model, config, mesh=mesh, micro_batches=2, schedule="1f1b")
            managed, loss = pipe.model, pipe.step(**whole)
        else:
            managed = gemini.GeminiDDP(model, config, mesh=mesh)
            loss = managed(**gemini.sequence_batch(whole, mesh)).loss
            loss.backward()
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, float(loss.detach()))
        found = Result(sum(losses) / len(losses))
        for handle in world_of(managed).handles:
            found.grads[handle.whole_name] = managed.full_grad(handle.name).clone()
        found.norm = float(managed.clip_grad_norm_(1e9))
        gemini.HybridAdam(managed.parameters()).step()
        world_of(managed).check()
    return found


def alone(sizes: dict[str, int], case: Case) -> Result:
    """One process of plain torch: the mean over the batches, and in a pipeline over micro-batches of one row each."""
    model, total = make(case), 0.0
    for which in range(num_batches(sizes)):
        rows = [slice(0, 1), slice(1, 2)] if "pp" in sizes else [slice(0, 2)]
        for row in rows:
            part = {name: value[row] for name, value in batch(case, which).items()}
            loss = model(**part).loss / len(rows) / num_batches(sizes)
            loss.backward()
            total += loss.item()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))
    return Result(total, grads, float(norm))


CASES = [
    *((sizes, family) for sizes in MESHES for family in ("llama", "gpt2")),
    *((sizes, "odd_heads") for sizes in MESHES if "tp" not in sizes),
]
"""Every two of a mesh and a family. Of those of eight ranks, stages are slow."""


@pytest.mark.sweep(every=8)
@pytest.mark.parametrize(("where", "checkpointing"), [("ram", False), ("disk", False), ("disk", True)])
@pytest.mark.parametrize(
    ("sizes", "family"),
    [pytest.param(*case, marks=[pytest.mark.slow] * ("pp" in case[0] and len(case[0]) > 2)) for case in CASES],
    ids=str,
)
def test_any_mesh_computes_what_one_process_does(
    sizes: dict[str, int], family: str, where: str, checkpointing: bool, pool_of: Pools, tmp_path: Path
) -> None:
    case = Case(family, checkpointing=checkpointing)
    found = pool_of(math.prod(sizes.values())).run(trained, sizes, case, where, str(tmp_path), 1)
    wanted = alone(sizes, case)
    names: set[str] = set()
    for own in found:
        here = Result(wanted.loss, {name: wanted.grads[name] for name in own.grads}, wanted.norm)
        loss, grads = differences(own, here)
        assert loss <= 1e-6 and grads <= 1e-5, (loss, grads)
        assert own.norm == pytest.approx(wanted.norm, rel=1e-6)
        names |= own.grads.keys()
    assert names == wanted.grads.keys()


def libraries(dims: list[str]) -> list[Any]:
    """Which ranks the library's collectives of a shard group are for, by mesh; they are not made."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "_collective", list)
        return [group.join(None, mesh_of({dim: 2}), cuda=True).wire.library for dim in dims]


def test_on_cuda_the_librarys_collectives_serve_whole_replicas_too(pool_of: Pools) -> None:
    """Their shard group is one rank, and by it sums over replicas stay on the device."""
    made = pool_of(2).run(libraries, ["dp", "dp_replicate", "ep"])
    assert made == [[[0, 1], [rank], [rank]] for rank in range(2)]


def small_sums(sizes: list[int]) -> list[bool]:
    wire = group.join(None, mesh_of({"dp_replicate": 4}), cuda=False).replicas
    right = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in sizes:
            tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
            own, scratch = tensors[wire.rank].clone(), torch.empty(8 * numel + 16, dtype=torch.uint8)
            wire.all_reduce(Tag.ALL_REDUCE, own, scratch, "a sum")
            right.append(torch.equal(own, sum(tensor.float() for tensor in tensors).to(dtype)))  # type: ignore[union-attr]
    return right


def test_sums_of_few_elements_over_many_ranks(pool_of: Pools) -> None:
    """Parts are rounded up: what is received of a small tensor takes more than the tensor."""
    for right in pool_of(4).run(small_sums, [1, 2, 3, 4, 5, 7, 64, 65]):
        assert right == [True] * 16
