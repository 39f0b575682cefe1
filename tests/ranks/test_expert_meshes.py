"""Expert parallel beside ``cp``, ``pp`` and ``dp_replicate`` against one process over all batches."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.ranks.expert_cases import Case, ids_of, moe, plainly, spread
from tests.ranks.parallel_cases import (
    EPS,
    LR,
    Found,
    config_for,
    hybrid_adam,
    mesh_of,
    num_batches,
    planes_of,
    train,
)
from tests.ranks.pool import Pools
from tests.train import helpers
from tests.world import world_of


def made(sizes: dict[str, int], config: gemini.GeminiConfig, case: Case, schedule: str = "1f1b") -> tuple[Any, Any]:
    """A model over a mesh, and what makes forward and backward of a batch."""
    mesh = mesh_of(sizes) if sizes else None
    if "pp" in sizes:
        pipeline = gemini.Pipeline(moe(case), config, mesh=mesh, micro_batches=2, schedule=schedule)
        return pipeline.model, pipeline.step
    model: Any = gemini.GeminiDDP(moe(case), config, mesh=mesh)

    def step(**batch: Any) -> torch.Tensor:
        loss = model(**gemini.sequence_batch(batch, mesh)).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return model, step


def batch_of(step: int, mesh: Any) -> dict[str, torch.Tensor]:
    ids = ids_of(step, gemini.data_rank(mesh).rank)
    return {"input_ids": ids, "labels": ids}


def trained(
    sizes: dict[str, int], where: str, folder: str, case: Case, schedule: str = "1f1b", *, saves: bool = False
) -> Found:
    """Two steps; of the gradients those that are here. With ``saves`` the state is that of all planes."""
    mesh = mesh_of(sizes)
    model, step = made(sizes, config_for(where, folder), case, schedule)
    optimizer = hybrid_adam(model)
    found = train(model, optimizer, lambda number: float(step(**batch_of(number, mesh))), reads_grads=True)
    if saves:
        gemini.save_checkpoint(f"{folder}/checkpoint", model, optimizer)
        model.save_pretrained(f"{folder}/exported")
        return found._replace(state=planes_of(model))
    return found


def assert_close(found: list[Found], plain: Found) -> None:
    largest = max(float(grad.abs().max()) for grad in plain.grads.values())
    assert {name for own in found for name in own.grads} == plain.grads.keys()
    for own in found:
        for name, grad in own.grads.items():
            assert float((grad - plain.grads[name]).abs().max()) < 1e-5 * largest, name
            torch.testing.assert_close(own.state[name], plain.state[name], rtol=1e-4, atol=2e-5, msg=name)
        assert own.norms == pytest.approx(plain.norms, rel=1e-6)
        assert own.norms == found[0].norms


QUICK: list[tuple[dict[str, int], str, Case, str]] = [
    ({"cp": 2, "ep": 2}, "disk", Case(), "1f1b"),
    ({"dp_replicate": 2, "ep": 2}, "disk", Case(idle=True), "1f1b"),
    ({"pp": 2, "ep": 2}, "ram", Case("deepseek_v3", checkpointing=True), "gpipe"),  # its first stage has no experts
]
SLOW: list[tuple[dict[str, int], str, Case, str]] = [
    ({"pp": 2, "ep": 2}, "disk", Case(), "1f1b"),
    ({"ep": 2, "cp": 2}, "ram", Case(checkpointing=True), "1f1b"),
    ({"cp": 2, "ep": 2}, "standin", Case("mixtral", idle=True), "1f1b"),
    ({"dp": 2, "cp": 2, "ep": 2}, "disk", Case(), "1f1b"),
    ({"cp": 2, "ep": 4}, "disk", Case(idle=True), "1f1b"),
    ({"pp": 2, "ep": 2}, "standin", Case(idle=True, checkpointing=True), "gpipe"),
    ({"pp": 1, "ep": 2}, "serial", Case("mixtral"), "bfs"),
    ({"ep": 2, "pp": 2}, "disk", Case("qwen2_moe"), "1f1b"),
    ({"pp": 2, "dp": 2, "ep": 2}, "disk", Case(), "1f1b"),
    ({"pp": 2, "cp": 2, "ep": 2}, "disk", Case(), "1f1b"),
    ({"pp": 2, "ep": 4}, "ram", Case(idle=True), "1f1b"),
    ({"dp_replicate": 2, "dp": 2, "ep": 2}, "ram", Case(), "1f1b"),
    ({"ep": 2, "dp_replicate": 2, "cp": 2}, "standin", Case(), "1f1b"),
    ({"pp": 2, "dp_replicate": 2, "ep": 2}, "serial", Case(), "1f1b"),
]


def id_of(value: Any) -> str | None:
    return "_".join(f"{name}{size}" for name, size in value.items()) if isinstance(value, dict) else None


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    ("sizes", "where", "case", "schedule"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
    ids=id_of,
)
def test_meshes_train_as_one_process_does(
    sizes: dict[str, int], where: str, case: Case, schedule: str, pool_of: Pools, tmp_path: Path
) -> None:
    found = pool_of(math.prod(sizes.values())).run(trained, sizes, where, str(tmp_path), case, schedule)
    assert_close(found, plainly(num_batches(sizes) * sizes["ep"], case))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_replicas_after_several_backwards(
    in_no_sync: bool, gradients: str, where: str, pool_of: Pools, tmp_path: Path
) -> None:
    case, run = Case(backwards=2, in_no_sync=in_no_sync), partial(spread, gradients=gradients)
    found = pool_of(4).run(run, {"dp_replicate": 2, "ep": 2}, where, str(tmp_path), case)
    assert_close(found, plainly(8, case))


@pytest.mark.parametrize("where", ["ram", pytest.param("disk", marks=pytest.mark.slow)])
def test_replicas_that_update_inside_backward(where: str, pool_of: Pools, tmp_path: Path) -> None:
    case, sizes = Case(idle=True), {"dp_replicate": 2, "ep": 2}
    plain = plainly(4, case, max_norm=math.inf)
    for own in pool_of(4).run(partial(spread, gradients="transient"), sizes, where, str(tmp_path), case):
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)


MESHES = [
    {"pp": 2, "ep": 2},
    *(pytest.param({name: 2, "ep": 2}, marks=pytest.mark.slow) for name in ("cp", "dp", "dp_replicate")),
]


# ---- saving and loading ----------------------------------------------------------------------------------------------


def loaded(sizes: dict[str, int], folder: str) -> dict[str, torch.Tensor]:
    model, _ = made(sizes, config_for("ram", ""), Case())
    optimizer = gemini.HybridAdam(model.parameters(), lr=LR, eps=EPS)
    gemini.load_checkpoint(f"{folder}/checkpoint", model, optimizer)
    world_of(model).check()
    return planes_of(model)


OTHERS: tuple[list[dict[str, int]], ...] = (
    [{"cp": 2, "ep": 2}, {"ep": 4}, {"tp": 2}],
    [{"pp": 2, "ep": 2}, {"dp_replicate": 2, "ep": 2}, {"dp": 2}, {"pp": 2}, {"ep": 2}],
)


@pytest.mark.parametrize("others", [OTHERS[0], pytest.param(OTHERS[1], marks=pytest.mark.slow)], ids=["other", "near"])
@pytest.mark.parametrize("first", MESHES, ids=id_of)
def test_a_checkpoint_goes_into_any_other_mesh(
    first: dict[str, int], others: list[dict[str, int]], pool_of: Pools, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path)
    found = pool_of(4).run(partial(trained, saves=True), first, "disk", folder, Case())
    whole = {name: value for own in found for name, value in own.state.items()}
    for sizes in others:
        again: dict[str, torch.Tensor] = {}
        for own in pool_of(math.prod(sizes.values())).run(loaded, sizes, folder):
            again |= own
            assert all(helpers.same_bits(value, whole[name]) for name, value in own.items()), sizes
        assert again.keys() == whole.keys(), sizes
    alone = loaded({}, folder)
    assert alone.keys() == whole.keys()
    assert all(helpers.same_bits(value, whole[name]) for name, value in alone.items())
    exported = AutoModelForCausalLM.from_pretrained(f"{folder}/exported").state_dict()
    for name, value in exported.items():
        assert torch.equal(value, whole[f"weights/{name}"].view_as(value)), name


def streamed(sizes: dict[str, int], folder: str) -> dict[str, torch.Tensor]:
    mesh, config = mesh_of(sizes), config_for("disk", folder)
    if "pp" in sizes:
        model = gemini.Pipeline.from_pretrained(f"{folder}/model", config, mesh=mesh, micro_batches=2).model
    else:
        model = gemini.from_pretrained(f"{folder}/model", config, mesh=mesh)
    return {name: model.full_param(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("sizes", MESHES, ids=id_of)
def test_weights_from_files(sizes: dict[str, int], pool_of: Pools, tmp_path: Path) -> None:
    model = moe(Case("deepseek_v3"))
    model.save_pretrained(tmp_path / "model")
    found = pool_of(4).run(streamed, sizes, str(tmp_path))
    for name, value in model.named_parameters():
        assert all(torch.equal(own[name], value) for own in found if name in own), name
    assert {name for own in found for name in own} == {name for name, _ in model.named_parameters()}
