"""Context parallel: the loss and gradients of one process, whatever the model and where chunks live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini.ranks.agree import Point, Request, choose
from gemini.train.context import part_of
from tests.ranks.context_cases import FAMILIES, Case, Result, alone, batch, differences, divides, make, step
from tests.ranks.pool import Pools, failures


def assert_as_one_process(found: list[Result], case: Case, world: int) -> None:
    wanted = alone(case, world // case.cp)
    loss, grads = differences(found[0], wanted)
    assert loss <= 1e-6 and grads <= 1e-5, (case, loss, grads)
    assert found[0].norm == pytest.approx(wanted.norm, rel=1e-6)
    for other in found[1:]:
        assert all(torch.equal(grad, found[0].grads[name]) for name, grad in other.grads.items())


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize(("family", "cp"), [(name, cp) for name in FAMILIES for cp in (2, 4) if divides(cp, name)])
def test_parts_of_sequences_give_the_gradients_of_one_process(
    family: str, cp: int, where: str, checkpointing: bool, pool_of: Pools, tmp_path: Path
) -> None:
    case = Case(family, cp, checkpointing=checkpointing, nvme=str(tmp_path) if where == "disk" else "")
    found = pool_of(4).run(step, case)
    assert_as_one_process(found, case, 4)
    with torch.no_grad():
        for result, sample in zip(found, (rank // cp for rank in range(4)), strict=True):
            assert result.evaluated == pytest.approx(float(make(case)(**batch(case, sample)).loss), abs=1e-6)
    assert all(result.sent["context"] > 0 for result in found)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [name for name in FAMILIES if divides(8, name)])
def test_eight_ranks(family: str, checkpointing: bool, pool_of: Pools, tmp_path: Path) -> None:
    case = Case(family, 8, checkpointing=checkpointing, nvme=str(tmp_path) if checkpointing else "")
    assert_as_one_process(pool_of(8).run(step, case), case, 8)


def test_the_bits_are_the_same_wherever_chunks_live(pool_of: Pools, tmp_path: Path) -> None:
    case = Case()
    here, there = (pool_of(2).run(step, c)[0] for c in (case, replace(case, nvme=str(tmp_path), checkpointing=True)))
    assert here.loss == there.loss
    assert all(torch.equal(grad, there.grads[name]) for name, grad in here.grads.items())


def test_eager_attention_and_tiles_of_tokens(pool_of: Pools) -> None:
    """The head is computed in tiles inside of each part."""
    case = Case("odd_heads", 2, attention="eager", tile_tokens=16)
    assert_as_one_process(pool_of(2).run(step, case), case, 2)


# ---- different paths -------------------------------------------------------------------------------------------------


class OneOfTwo(nn.Module):
    """An MLP of which each rank uses another half."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.experts = nn.ModuleList([mlp, type(mlp)(mlp.config)])  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts[dist.get_rank() % 2](x)


def different_paths() -> list[float]:
    """Each rank needs weights that the other does not, who stands in an exchange then; later one evaluates alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    case = Case()
    model: Any = make(case)
    for layer in model.model.layers:
        layer.mlp = OneOfTwo(layer.mlp)
    config = gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="8MiB"), max_chunk=2000)
    model = gemini.GeminiDDP(model, config, mesh=mesh)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    losses = []
    for number in range(3):
        loss = model(**gemini.sequence_batch(batch(case, number), mesh)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if number == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                model(**batch(case, 7))
    return losses


def test_ranks_may_take_different_paths_between_exchanges(pool_of: Pools) -> None:
    first, other = pool_of(2).run(different_paths, seconds=30)
    assert first != other and all(map(torch.isfinite, torch.tensor(first + other)))


def test_what_is_agreed_on_while_a_rank_stands_in_attention() -> None:
    waits, at_end = Request(Point.CONTEXT), Request(Point.END_BACKWARD)
    assert choose([waits, waits]) == (Point.CONTEXT, 0)
    assert choose([waits, Request(Point.GATHER, 3)]) == (Point.GATHER, 3)
    assert choose([waits, Request(Point.REDUCE, 3), Request(Point.REDUCE, 5)]) == (Point.REDUCE, 5)
    assert choose([waits, at_end]) is None and choose([at_end, at_end]) == (Point.END_BACKWARD, 0)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ("batch", "RankMismatch", "the part of a batch of rank 1 has another input than that of rank 0"),
        ("whole", "GeminiError", "was given a batch that is not cut"),
    ],
)
def test_wrong_batches_are_refused(wrong: str, kind: str, says: str, pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(step, Case(), wrong), kind):
        assert says in text


def test_parts_of_a_batch() -> None:
    ids = torch.arange(24).view(2, 12)
    labels = ids.clone()
    labels[:, :6] = -100
    mask = torch.ones_like(ids)
    mask[1, 10:], labels[1, 10:] = 0, -100
    whole = {"input_ids": ids, "labels": labels, "attention_mask": mask, "weights": torch.ones(2, 12, 3), "flag": True}
    parts = [part_of(whole, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), ids)
    shifted = torch.cat([part["shift_labels"] for part in parts], 1)
    assert torch.equal(shifted[:, :-1], labels[:, 1:]) and (shifted[:, -1] == -100).all()
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert [float(part["num_items_in_batch"]) for part in parts] == pytest.approx([(6 + 4) / 3] * 3)
    assert parts[0]["flag"] is True and parts[2]["weights"].shape == (2, 4, 3) and "attention_mask" not in parts[0]
    assert float(part_of({**whole, "num_items_in_batch": 30}, 0, 3)["num_items_in_batch"]) == 10
    assert gemini.sequence_batch(whole, None) == whole


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": torch.ones(1, 10, dtype=torch.int64)}, "10 tokens cannot be cut into cp=4 parts: pad .* to 12"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, "attention_mask hides tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])}, "attention_mask hides tokens"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}, "packed sequences are not cut"),
        ({"pixel_values": torch.ones(1, 3)}, r"'pixel_values' has shape \(1, 3\)"),
        ({"input_ids": None}, "neither of input_ids and inputs_embeds"),
    ],
)
def test_batches_that_cannot_be_cut(changes: dict[str, Any], says: str) -> None:
    ids = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=says):
        part_of({"input_ids": ids, "labels": ids, **changes}, 0, 4)


# ---- plans -----------------------------------------------------------------------------------------------------------


def recorded(case: Case) -> int:
    """The most bytes beside params of a real step on the stand-in for a GPU."""
    mesh = init_device_mesh("cpu", (case.cp,), mesh_dim_names=("cp",))
    config = gemini.GeminiConfig(
        precision="fp32", device="standin", memory=gemini.MemoryBudget(gpu="64MiB", cpu="128MiB"),
    )  # fmt: skip
    model: Any = gemini.GeminiDDP(make(case), config, mesh=mesh)
    part = gemini.sequence_batch(batch(case), mesh)
    with gemini.MemoryTracer(model) as tracer:
        model(**part).loss.backward()
    return tracer.trace.peak_bytes


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_trace_of_a_part_has_the_bytes_of_a_rank(family: str, pool_of: Pools, summary: Callable[[str], None]) -> None:
    case = Case(family, 4, tokens=96)
    found = pool_of(4).run(recorded, case)
    ahead = gemini.trace(make(case), batch(case), precision="fp32", target="cpu", context_parallel=4)
    whole = gemini.trace(make(case), batch(case), precision="fp32", target="cpu")
    assert ahead.peak_bytes == max(found) and ahead.context_parallel == 4 and ahead.tokens == whole.tokens // 4
    assert gemini.MemoryTrace.from_json(ahead.to_json()) == ahead and "one of 4 parts" in str(ahead)
    summary(f"{family}, cp 4: {ahead.peak_bytes / whole.peak_bytes:.3f} of a whole sequence's activations")


def wrong_trace(context_parallel: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    case = Case()
    trace = gemini.trace(make(case), batch(case), context_parallel=context_parallel)
    config = gemini.GeminiConfig(device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"), trace=trace)
    gemini.GeminiDDP(make(case), config, mesh=mesh)


def test_a_trace_of_other_parts_is_refused(pool_of: Pools) -> None:
    for text in failures(pool_of(2).outcomes(wrong_trace, 4), "PlanMismatch"):
        assert "the trace has context_parallel=4, and this run has 2" in text
