"""Tensor parallel beside chunks: training over ``tp`` and ``dp`` against one process, wherever chunks live."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini.optim import MuonRule
from tests import scaling
from tests.ranks.parallel_cases import (
    LR,
    Found,
    assert_all_found_nan,
    assert_same_runs,
    config_for,
    hybrid_adam,
    llama,
    mesh_of,
    nan_on_one,
    plain_adamw,
    planes_of,
    train,
)
from tests.ranks.pool import Failure, Pools, failures
from tests.ranks.test_slices import FAMILIES, small
from tests.train import helpers
from tests.world import world_of

MESHES = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2})
WHERE = ("ram", "disk", "serial", "standin")
STEPS = 3


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    sizes: dict[str, int], where: str, folder: str, make: Callable[[], Any] = llama, *, checkpointing: bool = False,
    steps: int = STEPS, **settings: Any,
) -> Found:  # fmt: skip
    mesh = mesh_of(sizes)
    model: Any = make()
    if checkpointing:
        model.activation_checkpointing_enable()
    model = gemini.GeminiDDP(model.train(), config_for(where, folder, **settings), mesh=mesh)
    rank = gemini.data_rank(mesh).rank
    found = train(model, hybrid_adam(model), partial(backward, model, rank), steps=steps, reads_grads=True)
    world = world_of(model)
    whole = {h.name: world.read(h, torch.float32) for h in world.handles if h.cut is None}
    assert whole and len(whole) < len(world.handles)
    return found._replace(whole=whole)


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    ids = ids_of(step, rank)
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def backward(model: Any, rank: int, step: int) -> float:
    loss = loss_of(model, step, rank)
    scaling.backward(model, loss)
    return float(loss.detach())


def plainly(num_batches: int, make: Callable[[], Any] = llama, steps: int = STEPS) -> Found:
    """The same in one process, with the mean over the batches of all ranks."""
    model: Any = make().train()

    def compute(step: int) -> float:
        loss = torch.stack([loss_of(model, step, rank) for rank in range(num_batches)]).mean()
        loss.backward()
        return float(loss.detach())

    return train(model, plain_adamw(model), compute, steps=steps, reads_grads=True)


def assert_close(found: list[Found], plain: Found, num_batches: int) -> None:
    for own in found:
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)
        assert own.norms == pytest.approx(plain.norms, rel=1e-6)
        for name, grad in plain.grads.items():
            assert float((own.grads[name] - grad).abs().max()) < 1e-6 * float(grad.abs().max() + 1), name
        assert own.norms == found[0].norms
        for name, value in own.whole.items():
            assert helpers.same_bits(value, found[0].whole[name]), f"{name} is not the same on all ranks"
        for name, value in own.state.items():
            assert helpers.same_bits(value, found[0].state[name]), name
    mean = [sum(losses) / len(found) for losses in zip(*(own.losses for own in found), strict=True)]
    assert mean == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "_".join(f"{n}{s}" for n, s in sizes.items()))
def test_slices_train_as_one_process_does(
    sizes: dict[str, int], where: str, checkpointing: bool, pool_of: Pools, tmp_path: Path
) -> None:
    num_ranks, num_batches = math.prod(sizes.values()), math.prod(sizes.values()) // sizes["tp"]
    run = partial(trained, checkpointing=checkpointing)
    found = pool_of(num_ranks).run(run, sizes, where, str(tmp_path))
    assert_close(found, plainly(num_batches), num_batches)


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bits_depend_on_no_placement(precision: str, pool_of: Pools, tmp_path: Path) -> None:
    sizes = {"dp": 2, "tp": 2}
    runs = [
        pool_of(4).run(partial(trained, precision=precision), sizes, where, str(tmp_path))
        for where in ("ram", "disk", "serial")
    ]
    assert_same_runs(runs)
    assert not torch.equal(runs[0][0].state["model.norm.weight"], llama().state_dict()["model.norm.weight"])


def first_norm(kind: str, folder: str) -> float:
    model: Any = gemini.GeminiDDP(small(kind), config_for("disk", folder), mesh=mesh_of({"tp": 2}))
    loss_of(model, 0, 0).backward()
    return float(model.clip_grad_norm_(0.5))


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_norm_of_every_family(kind: str, pool_of: Pools, tmp_path: Path) -> None:
    """Norms, experts, packed and biased layers; what ``test_slices.py`` compares, managed."""
    model = small(kind)
    loss_of(model, 0, 0).backward()
    plain = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    assert pool_of(2).run(first_norm, kind, str(tmp_path)) == pytest.approx([plain, plain], rel=1e-6)


# ---- what one rank finds is found on all -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp2", "dp2_tp2"])
def test_nan_on_one_rank_is_found_on_all(sizes: dict[str, int], precision: str, cut: bool, pool_of: Pools) -> None:
    name = "model.layers.1.mlp.up_proj.weight" if cut else "model.norm.weight"
    found = pool_of(math.prod(sizes.values())).run(nan_on_one, sizes, llama, loss_of, precision, name)
    assert_all_found_nan(found, precision)


def disagreeing(how: str) -> None:
    mesh = mesh_of({"dp": 2, "tp": 2})
    model: Any = gemini.GeminiDDP(llama(), config_for("ram", ""), mesh=mesh)
    second = mesh.get_local_rank("tp") == 1
    optimizer = gemini.HybridAdam(model.parameters(), lr=2 * LR if how == "lr" and second else LR)
    loss_of(model, 0, dist.get_rank() if how == "batch" else gemini.data_rank(mesh).rank).backward()
    if how == "gradient" and second:
        world_of(model).discard([world_of(model).by_names["model.norm.weight"]])
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("lr", "the ranks disagree about lr of param group 0: 0.01 on rank [02], 0.02 on rank [13]"),
        ("batch", "the first batch of rank [13] has another input_ids"),
        ("gradient", "'model.norm.weight' has a gradient on ranks .* and none on ranks"),
    ],
)  # fmt: skip
def test_slices_that_disagree(how: str, says: str, pool_of: Pools) -> None:
    for text in failures(pool_of(4).outcomes(disagreeing, how), "RankMismatch"):
        assert re.search(says, text), text


# ---- making models ---------------------------------------------------------------------------------------------------


def made(how: str, folder: str, where: str) -> dict[str, torch.Tensor]:
    mesh = mesh_of({"dp": 2, "tp": 2})
    config = config_for(where, folder)
    hf_config = llama().config
    torch.manual_seed(5 if dist.get_rank() == 0 else 6)  # all draw what the first one does
    if how == "from_pretrained":
        model = gemini.from_pretrained(f"{folder}/model", config, mesh=mesh)
    elif how == "slice_tensors":
        model = gemini.GeminiDDP(gemini.slice_tensors(whole_of(folder), mesh), config, mesh=mesh)
    else:
        model = gemini.from_config(hf_config, config, mesh=mesh)
    cuts = {h.name: h.cut.own_shape for h in world_of(model).handles if h.cut is not None}
    assert cuts["model.layers.0.self_attn.q_proj.weight"] == (32, 64) and cuts["model.embed_tokens.weight"] == (64, 64)
    model.train()
    loss = loss_of(model, 0, gemini.data_rank(mesh).rank)
    state = model.state_dict(dtype=torch.float32)
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    return {**state, "the norm": norm.double()}


def whole_of(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(f"{folder}/model").float()


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "slice_tensors"])
def test_models_are_made_in_slices(how: str, where: str, pool_of: Pools, tmp_path: Path) -> None:
    """The bits of the whole model, wherever it comes from."""
    from transformers import AutoModelForCausalLM

    config = llama().config
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path / "model")
    wanted = plain.state_dict()
    for rank in range(2):
        (loss_of(plain, 0, rank) / 2).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    for found in pool_of(4).run(made, how, str(tmp_path), where):
        assert float(found.pop("the norm")) == pytest.approx(norm, rel=1e-6)
        assert found.keys() == wanted.keys()
        assert all(helpers.same_bits(found[name], value) for name, value in wanted.items())


# ---- saving ----------------------------------------------------------------------------------------------------------


def saved(sizes: dict[str, int], folder: str, precision: str, states: str, where: str) -> dict[str, torch.Tensor]:
    """Two steps, then a checkpoint: every plane of whole params."""
    if dist.get_rank() >= math.prod(sizes.values()):
        return {}
    model, optimizer = managed(sizes, folder, precision, states, where)
    helpers.train(model, optimizer, range(2), lambda model, step: loss_of(model, step, 0), clip=None)
    gemini.save_checkpoint(
        f"{folder}/step-2", model, optimizer, extra={"ids": ids_of(0, 0)}, wait=where != "disk"
    ).wait()
    return planes_of(model)


def managed(sizes: dict[str, int], folder: str, precision: str, states: str, where: str) -> tuple[Any, Any]:
    mesh = mesh_of(sizes) if sizes else None
    config = config_for(where, folder, precision=precision, states=states)
    group = None if mesh is not None else dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model: Any = gemini.GeminiDDP(llama(), config, mesh=mesh, process_group=group)
    return model, gemini.HybridAdam(model.parameters(), lr=LR)


def went_on(sizes: dict[str, int], folder: str, precision: str, states: str, where: str) -> dict[str, torch.Tensor]:
    model, optimizer = managed(sizes, folder, precision, states, where)
    extra = gemini.load_checkpoint(f"{folder}/step-2", model, optimizer)
    assert torch.equal(extra["ids"], ids_of(0, 0))
    found = planes_of(model)
    loss_of(model, 2, 0).backward()
    optimizer.step()
    return found


def test_compact_states_go_into_the_same_slices_only(pool_of: Pools, tmp_path: Path) -> None:
    settings = (str(tmp_path), "bf16", "compact", "ram")
    wanted = pool_of(4).run(saved, {"dp": 2, "tp": 2}, *settings)[0]
    for found in pool_of(2).run(went_on, {"tp": 2}, *settings):
        assert all(helpers.same_bits(value, wanted[name]) for name, value in found.items())
    for text in failures(pool_of(4).outcomes(went_on, {"tp": 4}, *settings), "PlanMismatch"):
        assert "in slices of 2 ranks, and here are 4: compact states" in text


# ---- refusals --------------------------------------------------------------------------------------------------------


UNFIT = {
    "packed_colwise:5": "up_proj.weight has 96 elements along dim 0, which is not a multiple of 10",
    "packed_colwise:x": "'packed_colwise:x': known are colwise",
    "packed_colwise:0": "'packed_colwise:0': known are colwise",
    "replicate": "the plan cuts no param",
}


def refused(how: str, folder: str) -> None:
    mesh, settings, make = mesh_of({"tp": 2}), {}, llama
    if how == "transient":
        settings = {"gradients": "transient"}
    elif how == "whole":
        settings = {"optimizer": MuonRule()}
    elif how == "tiles":
        settings = {"tile_tokens": 8}
    elif how == "heads":
        make = partial(llama, num_key_value_heads=1)
    elif how == "words":
        make = partial(llama, vocab_size=129)
    elif how == "lora":
        import peft

        make = lambda: peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))  # noqa: E731
    elif how == "budget":
        settings = {"memory": gemini.MemoryBudget(cpu="64KiB")}
    model: Any = make()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    try:
        if how == "twice":
            gemini.slice_tensors(gemini.slice_tensors(model, mesh), mesh)
        elif how == "other mesh":
            gemini.GeminiDDP(gemini.slice_tensors(model, mesh), config_for("ram", folder), mesh=mesh_of({"dp": 2}))
        elif how == "no plan":
            gemini.slice_tensors(nn.Sequential(nn.Linear(4, 4)), mesh)
        elif how == "style":
            gemini.slice_tensors(model, mesh, {"lm_head": "sideways"})
        elif how in UNFIT:
            gemini.slice_tensors(model, mesh, {"model.layers.*.mlp.up_proj": how, "model.norm": "embedding_colwise"})
        elif how == "nothing":
            gemini.slice_tensors(model, mesh, {"encoder.*.up": "colwise"})
        elif how == "weights":
            with torch.no_grad():
                model.model.norm.weight[3] = dist.get_rank()
            gemini.slice_tensors(model, mesh)
        else:
            gemini.GeminiDDP(model, config_for("ram", folder, **settings), mesh=mesh)
    except BaseException:
        if how not in ("twice", "other mesh", "weights"):
            for name, param in model.named_parameters():
                assert torch.equal(param, before[name]), f"{name} is not what it was"
        raise


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("transient", 'gradients="transient" updates inside backward'),
        ("whole", "looks at whole params"),
        ("tiles", "tile_tokens=8 with a model in slices"),
        ("heads", "the model has num_key_value_heads=1, which is not a multiple of 2"),
        ("words", "has 129 elements along dim 0, which is not a multiple of 2"),
        ("lora", "tensor parallel does not slice adapters"),
        ("budget", "cpu"),
        ("twice", "is in slices already"),
        ("other mesh", "is in slices over tp=2, and the mesh has tp=1"),
        ("no plan", "has no plan for tensor parallel"),
        ("style", "'sideways': known are colwise"),
        ("nothing", "the plan cuts no param"),
        *UNFIT.items(),
        ("weights", "'model.norm.weight' is not the same on all ranks of tp"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changed(how: str, says: str, pool_of: Pools, tmp_path: Path) -> None:
    for outcome in pool_of(2).outcomes(refused, how, str(tmp_path)):
        assert isinstance(outcome, Failure) and says in outcome.text, outcome
        wanted = {"budget": "BudgetExceeded", "weights": "RankMismatch"}.get(how, "ValueError")
        assert outcome.kind == wanted
