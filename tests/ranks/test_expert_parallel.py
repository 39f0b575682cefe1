"""Expert parallel beside chunks: training over ``ep`` and ``dp`` against one process over all batches."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini
from gemini.optim import MuonRule
from tests.ranks.expert_cases import KINDS, Case, ids_of, loss_of, moe, plainly, spread, tiny, worst_grad
from tests.ranks.parallel_cases import (
    EPS,
    LR,
    Found,
    assert_all_found_nan,
    assert_same_runs,
    config_for,
    llama,
    mesh_of,
    nan_on_one,
)
from tests.ranks.pool import Failure, Pools
from tests.train import helpers

FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3")


def assert_close(found: list[Found], plain: Found) -> None:
    for own in found:
        assert worst_grad(own, plain) < 1e-5
        assert own.norms == pytest.approx(plain.norms, rel=1e-6)
        assert own.norms == found[0].norms
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)
            assert helpers.same_bits(value, found[0].state[name]), f"{name} is not the same on all ranks"


SIZES: tuple[dict[str, int], ...] = ({"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2})
SLOW: list[tuple[dict[str, int], str, Case, str]] = [
    *((sizes, "disk", Case(idle=True), "retain") for sizes in ({"dp": 2, "ep": 4}, {"dp": 4, "ep": 2})),
    *(
        ({"dp": 2, "ep": 2}, "disk", Case(backwards=2, in_no_sync=in_no_sync), gradients)
        for gradients in ("retain", "accumulate")
        for in_no_sync in (False, True)
    ),
]


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    ("sizes", "where", "case", "gradients"),
    [
        ({"ep": 2}, "disk", Case(idle=True, checkpointing=True, kernel="eager"), "retain"),
        ({"dp": 2, "ep": 2}, "ram", Case(backwards=2), "retain"),
        ({"dp": 2, "ep": 2}, "disk", Case("mixtral", kernel="grouped_mm", balances=True), "retain"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_experts_over_ranks_train_as_one_process_does(
    sizes: dict[str, int], where: str, case: Case, gradients: str, pool_of: Pools, tmp_path: Path
) -> None:
    num_ranks, run = math.prod(sizes.values()), partial(spread, gradients=gradients)
    found = pool_of(num_ranks).run(run, sizes, where, str(tmp_path), case)
    assert_close(found, plainly(num_ranks * case.backwards, case))


@pytest.mark.slow
@pytest.mark.sweep(every=1, turns=2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernel", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kernel_of_experts(kind: str, kernel: str, checkpointing: bool, pool_of: Pools, tmp_path: Path) -> None:
    case = Case(kind, kernel=kernel, checkpointing=checkpointing)
    assert_close(pool_of(2).run(spread, {"ep": 2}, "disk", str(tmp_path), case), plainly(2, case))


def first_grads(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    mesh, memory = mesh_of({"ep": 2}), gemini.MemoryBudget(cpu="512MiB")
    model: Any = gemini.GeminiDDP(tiny(kind), config_for("ram", "", memory=memory), mesh=mesh)
    loss_of(model, 0, dist.get_rank()).backward()
    grads = {name: model.full_grad(name) for name, _ in model.named_parameters()}
    return float(model.clip_grad_norm_(1.0)), grads


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_other_families(kind: str, pool_of: Pools) -> None:
    model = tiny(kind)
    torch.stack([loss_of(model, 0, part) for part in range(2)]).mean().backward()
    plain = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    largest = max(float(grad.abs().max()) for grad in plain.values())
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in plain.values()))  # torch's own is in fp32
    for own, grads in pool_of(2).run(first_grads, kind):
        assert own == pytest.approx(norm, rel=1e-6)
        for name, grad in plain.items():
            assert float((grads[name] - grad).abs().max()) < 1e-5 * largest, name


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("where", ["ram", "disk", "serial", "standin"])
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
def test_updates_inside_backward(sizes: dict[str, int], where: str, pool_of: Pools, tmp_path: Path) -> None:
    case, num_ranks = Case(idle=True, kernel="eager"), math.prod(sizes.values())
    plain = plainly(num_ranks, case, max_norm=math.inf)
    for own in pool_of(num_ranks).run(partial(spread, gradients="transient"), sizes, where, str(tmp_path), case):
        for name, value in own.state.items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bits_depend_on_no_placement(precision: str, gradients: str, pool_of: Pools, tmp_path: Path) -> None:
    run, sizes = partial(spread, precision=precision, gradients=gradients), {"dp": 2, "ep": 2}
    runs = [pool_of(4).run(run, sizes, where, str(tmp_path), Case()) for where in ("ram", "disk", "serial", "standin")]
    assert_same_runs(runs)
    assert not torch.equal(runs[0][0].state["model.norm.weight"], moe(Case()).state_dict()["model.norm.weight"])


# ---- what one rank finds is found on all -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nan_on_one_rank_is_found_on_all(precision: str, cut: bool, pool_of: Pools) -> None:
    name = "model.layers.1.mlp.experts.down_proj" if cut else "model.norm.weight"
    found = pool_of(4).run(nan_on_one, {"dp": 2, "ep": 2}, partial(moe, Case()), loss_of, precision, name)
    assert_all_found_nan(found, precision)


def evaluating_alone() -> None:
    mesh = mesh_of({"ep": 2})
    model: Any = gemini.GeminiDDP(moe(Case()), config_for("ram", ""), mesh=mesh)
    loss = loss_of(model, 0, dist.get_rank())
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss_of(model, 1, 0)
    loss.backward()


def test_one_that_evaluates_alone_is_named(pool_of: Pools) -> None:
    for outcome in pool_of(2).outcomes(evaluating_alone):
        assert isinstance(outcome, Failure) and "RankMismatch" in outcome.kind
        assert "rank 0 is in the forward of model.layers.0.mlp.experts, before its experts (without" in outcome.text
        assert "rank 1 is in the backward of model.layers.1.mlp.experts, before its experts" in outcome.text


# ---- reading --------------------------------------------------------------------------------------------------------


def used(folder: str) -> list[str]:
    """Values in and out of a model with some of the experts, and what is done without gradients."""
    mesh, wrong = mesh_of({"dp": 2, "ep": 2}), []
    model, whole = moe(Case()), moe(Case())
    if mesh.get_local_rank("dp") == 1:  # all start from the weights of rank 0
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
    model = gemini.GeminiDDP(model, config_for("disk", folder), mesh=mesh)
    if not all(torch.equal(value, whole.state_dict()[key]) for key, value in model.state_dict().items()):
        wrong.append("the start")
    name = "model.layers.0.mlp.experts.down_proj"
    state = {key: value * 2 if "experts" in key else value for key, value in whole.state_dict().items()}
    model.load_state_dict(state)
    if not all(torch.equal(value, state[key]) for key, value in model.state_dict().items()):
        wrong.append("load_state_dict")
    param = model.get_parameter(name)
    with model.gathered([param], write=True):
        param.data.add_(1)
    if not torch.equal(model.full_param(name), state[name] + 1):
        wrong.append("gathered")
    with torch.no_grad():
        param.copy_(torch.full(tuple(param.shape), float(mesh.get_local_rank("ep"))))
    if [float(one.mean()) for one in model.full_param(name)] != [0.0, 0.0, 1.0, 1.0]:
        wrong.append("copy_")
    state[name] = model.full_param(name)
    whole.load_state_dict(state)
    whole.eval()
    model.eval()
    with torch.no_grad():
        own, plain = (loss_of(one, 0, dist.get_rank()) for one in (model, whole))
    if not torch.allclose(own, plain, rtol=1e-6):
        wrong.append(f"eval: {own} against {plain}")
    gemini.release(model)
    if not all(torch.equal(value, state[key]) for key, value in model.state_dict().items()):
        wrong.append("release")
    with torch.no_grad():
        if not torch.equal(loss_of(model, 0, dist.get_rank()), plain):
            wrong.append("after release")
    return wrong


def test_values_in_and_out(pool_of: Pools, tmp_path: Path) -> None:
    assert pool_of(4).run(used, str(tmp_path)) == [[]] * 4


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(moe(Case()), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def with_adapters(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    mesh = mesh_of({"ep": 2})
    model: Any = gemini.GeminiDDP(adapted(), config_for("disk", folder), mesh=mesh)
    optimizer = gemini.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS, weight_decay=0.1)
    for step in range(2):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(f"{folder}/adapter")
    state = model.state_dict()
    return state, model.merge_and_unload().state_dict()


def test_adapters_that_leave_experts_alone(pool_of: Pools, tmp_path: Path) -> None:
    from peft import PeftModel

    folder, plain = str(tmp_path), adapted()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, eps=EPS, weight_decay=0.1)
    for step in range(2):
        (torch.stack([loss_of(plain, step, part) for part in range(2)]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state, merged in pool_of(2).run(with_adapters, folder):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5, msg=name)
        again: Any = PeftModel.from_pretrained(moe(Case()), f"{folder}/adapter")
        for name, value in again.merge_and_unload().state_dict().items():
            assert torch.equal(merged[name], value), name


# ---- refused ---------------------------------------------------------------------------------------------------------


def refusal(how: str) -> str:
    """What is said; the model is as it was."""
    sizes = {how: 2, "ep": 2} if how == "tp" else {"tp": 1, "ep": 2}
    settings: dict[str, Any] = {
        "whole": {"optimizer": MuonRule()}, "tiles": {"tile_tokens": 8},
    }.get(how, {})  # fmt: skip
    model: Any = llama() if how == "dense" else moe(Case())
    if how == "trace":
        batch = {"input_ids": ids_of(0, 0), "labels": ids_of(0, 0)}
        settings["trace"] = gemini.trace(model.config, batch, precision="fp32", target="cpu")
    if how == "size":
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.detach()[:3])
    if how == "seed" and dist.get_rank() == 1:
        with torch.no_grad():
            model.model.norm.weight.add_(1)
    if how == "adapters":
        from peft import LoraConfig, get_peft_model

        experts = ["mlp.experts.gate_up_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=experts))
    before = {name: tuple(param.shape) for name, param in model.named_parameters()}
    said = ""
    try:
        gemini.GeminiDDP(model, config_for("ram", "", **settings), mesh=mesh_of(sizes))
    except (ValueError, gemini.RankMismatch) as e:
        said = str(e)
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    return said


def refusals(hows: list[str]) -> list[str]:
    return [refusal(how) for how in hows]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            2,
            {
                "size": "has 3 experts, which is not a multiple of 2",
                "dense": "LlamaForCausalLM has no plan of transformers for dividing experts",
                "adapters": "does not divide adapters of experts ('base_model.model.model.layers.0.mlp.experts')",
                "seed": "'model.norm.weight' is not the same on all ranks of ep",
                "whole": "looks at whole params, and a mesh with ep leaves",
                "trace": "made with gemini.trace includes all experts",
                "tiles": "tile_tokens=8 with a model in slices (ep)",
            },
        ),
        (
            4,
            {
                "tp": "ep=2 and tp=2: ep cannot be combined with tp. Use dp in place of one of them",
            },
        ),
    ],
)
def test_what_does_not_go_with_experts_over_ranks(ranks: int, said: dict[str, str], pool_of: Pools) -> None:
    for found in pool_of(ranks).run(refusals, list(said)):
        for says, own in zip(said.values(), found, strict=True):
            assert says in own
