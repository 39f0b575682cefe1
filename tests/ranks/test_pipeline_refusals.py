"""What cannot be a pipeline, and steps that go wrong on one stage: all ranks say so, and none waits.

And which blocks a stage has: by operations, and by seconds that were measured.
"""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini.errors import RankMismatch
from gemini.optim import MuonRule
from gemini.planning.parallel import balanced
from gemini.tiers import Tier
from tests.ranks.parallel_cases import LR, config_for, mesh_of, step_refused
from tests.ranks.pipeline_cases import Stack, deep, half, ids_of
from tests.ranks.pool import Failure, Pools, failures
from tests.ranks.test_slices import small
from tests.world import world_of


def nan_on_a_stage(sizes: dict[str, int], folder: str) -> tuple[str, bool]:
    mesh = mesh_of(sizes)
    pipe = gemini.Pipeline(half().train(), config_for("ram", folder), mesh=mesh, micro_batches=4, schedule="1f1b")
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR)
    before = pipe.model.state_dict()
    if dist.get_rank() == 3:
        handle = world_of(pipe.model).handles[-1]
        handle.param.register_hook(lambda grad: grad * float("nan"))
    ids = ids_of(0, gemini.data_rank(mesh).rank)
    pipe.step(input_ids=ids, labels=ids)
    return step_refused(optimizer, pipe.model, before)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_nan_on_one_stage_is_found_on_all(sizes: dict[str, int], pool_of: Pools, tmp_path: Any) -> None:
    for rank, (said, is_as_before) in enumerate(pool_of(4).run(nan_on_a_stage, sizes, str(tmp_path))):
        assert is_as_before and ("holds inf or NaN" in said)
        assert ("another stage of this pipeline" in said) == (rank < 2)


class Chain(nn.Module):
    """A chain of blocks, but for something that no gradient shows: what goes before them is frozen."""

    def __init__(self, but: str) -> None:
        super().__init__()
        self.but, self.kept, self.steps = but, None, nn.Buffer(torch.zeros(1))
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        if but == "reads first":
            self.blocks = nn.ModuleList([_ReadsMore() for _ in range(4)])
        if but == "keeps in a block":
            self.blocks[0].register_forward_hook(lambda module, _, output: setattr(module, "said", output))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = kept = self.first(x)
        for block in self.blocks:
            x = block(x, kept) if self.but == "reads first" else block(x)
            x = x + 1 if self.but == "residual" else x
            kept = x.detach() if block is self.blocks[1] else kept
        x = x + kept if self.but == "reads the way" else x
        x = x * self.blocks[0].bias if self.but == "weight of another" else x
        if self.but == "keeps":
            self.kept = x.detach()
        if self.but == "counts":
            self.steps += 1
        return (x - labels).square().mean()


class _ReadsMore(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return super().forward(x + more)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"schedule": "1f1b"}, "needs several ranks: pass a mesh with a dimension pp"),
        ({"schedule": "zero-bubble"}, "gradients of weights apart from those of inputs"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"stages": 9}, "9 stages .* which has 8 blocks"),
        ({"model": "t5"}, "pipeline stages pass on hidden states alone"),
        ({"model": partial(Chain, "residual")}, "blocks.1 is given something else than what the block before it gives"),
        (
            {"model": partial(Chain, "reads first")},
            r"blocks.0 is given or gives is read in blocks.1, and .* hidden states alone",
        ),
        (
            {"model": partial(Chain, "reads the way")},
            r"blocks.2 is given or gives is read in what comes after",
        ),
        ({"model": partial(Chain, "weight of another")}, r"something of blocks.0 is read outside of it"),
        ({"model": partial(Chain, "keeps")}, r"it keeps something that a forward has made"),
        ({"model": partial(Chain, "keeps in a block")}, r"blocks.0 keeps something that a forward has made"),
        ({"model": partial(Chain, "counts")}, r"it writes to what is there before it, outside of its blocks"),
        ({"model": Stack, "example": None}, "give it an example= batch"),
        ({"gradients": "transient"}, 'gradients="transient" in a pipeline'),
        ({"rows": 15}, "input_ids has 15 samples, which micro_batches=4 does not divide"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_a_pipeline_is_refused(how: dict[str, Any], says: str, tmp_path: Any) -> None:
    how = {"schedule": "bfs", "micro_batches": 4, **how}
    config = config_for("ram", str(tmp_path), gradients=how.pop("gradients", "retain"))
    make, rows = how.pop("model", deep), how.pop("rows", 16)
    if isinstance(make, partial) and make.func is Chain:
        how["example"] = {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}
    model = small("t5") if make == "t5" else make()
    with pytest.raises(ValueError, match=says):
        ids = ids_of(0, 0, rows)
        gemini.Pipeline(model, config, **how).step(input_ids=ids, labels=ids)
    assert all(param.numel() for param in model.parameters())


def test_a_plan_that_retains_gradients_is_no_pipeline_s(tmp_path: Any) -> None:
    """Which adds them up, though the config says what the plan does."""
    plan = gemini.plan(
        gemini.trace(deep(), {"input_ids": ids_of(0, 0, 4), "labels": ids_of(0, 0, 4)}), None, {Tier.CPU: 2**30}
    )
    config = gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="1GiB"), device="cpu", placement=plan)
    with pytest.raises(ValueError, match="make the plan with gradients='accumulate'"):
        gemini.Pipeline(deep(), config, micro_batches=4, schedule="bfs")


def test_what_is_no_model_and_no_schedule_is_said() -> None:
    with pytest.raises(TypeError, match="divides an nn.Module, got str"):
        gemini.Pipeline("gpt2", micro_batches=4, schedule="bfs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schedule=\['bfs'\] is not known"):
        gemini.Pipeline(deep(), micro_batches=4, schedule=["bfs"])  # type: ignore[arg-type]


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
    elif how == "head":
        config = config_for("ram", folder, precision="bf16", keep_fp32=["lm_head"])
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
        ("head", "params that stay in fp32 (the first is 'lm_head.weight', by keep_fp32=)"),
    ],
)
def test_what_cannot_be_over_ranks_is_refused(how: str, says: str, pool_of: Pools, tmp_path: Any) -> None:
    """And the model is what it was."""
    for outcome in pool_of(4 if how in ("plain", "plan", "whole") else 2).outcomes(refused, how, str(tmp_path)):
        assert isinstance(outcome, Failure) and says in outcome.text, outcome
        assert outcome.kind == ("BudgetExceeded" if how == "budget" else "ValueError")


def alone(folder: str) -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    gemini.Pipeline(deep(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=4)


def test_a_rank_that_does_not_come_to_its_stages_is_lost(pool_of: Pools, tmp_path: Any) -> None:
    first, _ = pool_of(2).outcomes(alone, str(tmp_path))
    assert isinstance(first, Failure) and first.kind == "RankLost", first


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
        assert first[1].startswith("RankMismatch: rank 1 refused the batch: input_ids has 15 samples")
    else:
        words = "RankMismatch: the batch of rank 1 has another input_ids than that of rank 0 (['(8, 12) int64'] against"
        assert first[1] == second[1] and first[1].startswith(words)


def mask_first(folder: str) -> list[float]:
    pipe = gemini.Pipeline(deep(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=4, schedule="1f1b")
    ids = ids_of(0, 0, 16)
    ahead = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    mask = torch.zeros(16, 1, *ahead.shape).masked_fill(ahead, float("-inf")).to(next(pipe.parameters()).dtype)
    losses = [pipe.step(**first, input_ids=ids, labels=ids).item() for first in ({"attention_mask": mask}, {})]
    with pytest.raises(ValueError, match="passes on sequences of tokens .input_ids., and got pixel_values"):
        pipe.step(pixel_values=torch.zeros(16, 3, 8, 8))
    return losses


def test_hidden_states_are_as_long_as_the_tokens_whatever_stands_first(pool_of: Pools, tmp_path: Any) -> None:
    """A mask of four dimensions before them made messages of another size: gloo ended the process."""
    for with_mask, without in pool_of(2).run(mask_first, str(tmp_path)):
        assert with_mask == without


def another_first(folder: str) -> None:
    pipe = gemini.Pipeline(deep(), config_for("ram", folder), mesh=mesh_of({"pp": 2}), micro_batches=4, schedule="1f1b")
    ids = ids_of(0, dist.get_rank())
    pipe.step(input_ids=ids, labels=ids)


def test_stages_begin_with_the_same_batch(pool_of: Pools, tmp_path: Any) -> None:
    for text in failures(pool_of(2).outcomes(another_first, str(tmp_path)), "RankMismatch"):
        assert "the first batch of rank 1 has another input_ids than that of rank 0" in text


def test_stages_are_balanced() -> None:
    assert balanced([1, 1, 1, 1, 0], 2) == [(0, 2), (2, 4)]
    assert balanced([1, 1, 1, 1, 2], 2) == [(0, 3), (3, 4)]
    assert balanced([5, 1, 1, 1, 0], 2) == [(0, 1), (1, 4)]
    assert balanced([1, 1, 1, 0], 3) == [(0, 1), (1, 2), (2, 3)]
