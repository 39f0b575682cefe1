"""Adapters, a scaler and a recorder on a model that ranks share: the same run as one process.

Where every rank sees the same batches, the mean of their gradients is the gradient of one process to the bit.
"""

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini.errors import GeminiError
from gemini.planning.timeline import Timeline, Track
from tests.integrations.peft_cases import cast_params, llama, logits, maker
from tests.ranks.cases import Job, batches, config_of, make_model
from tests.ranks.pool import Pools
from tests.train import helpers
from tests.world import world_of


def wrapped(method: str, folder: Path) -> Any:
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    return gemini.GeminiDDP(maker(method)(), gemini.GeminiConfig(memory=memory, placement=placement, device="cpu"))


def adapt(method: str, folder: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train, save to ``folder / name``, merge: losses, weights before, weights merged."""
    model = wrapped(method, folder)
    optimizer = helpers.adam(model)
    losses = helpers.train(model, optimizer, range(2))
    model.save_pretrained(folder / name)
    losses += helpers.train(model, optimizer, range(2, 3))
    trained = model.state_dict()
    if method != "prompt":
        model.merge_adapter(safe_merge=True)
        model.unmerge_adapter()
        model.merge_adapter()
        return losses, trained, {**model.state_dict(), **model.merge_and_unload().state_dict()}
    return losses, trained, {}


def disable_merged(method: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits without the merged adapter and with it again, and the weights then."""
    model = wrapped(method, folder)
    helpers.train(model, helpers.adam(model), range(2))
    model.eval()
    model.merge_adapter()
    with model.disable_adapter():
        without = logits(model)
    return without, logits(model), model.state_dict()


@pytest.mark.parametrize("method", ["lora", "oft coft"])
def test_a_merged_adapter_is_disabled(method: str, pool_of: Pools, tmp_path: Path) -> None:
    wanted = disable_merged(method, tmp_path)
    for without, again, state in pool_of(2).run(disable_merged, method, tmp_path):
        assert torch.equal(without, wanted[0]) and torch.equal(again, wanted[1])
        assert all(helpers.same_bits(state[name], value) for name, value in wanted[2].items())


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("method", ["dora", "modules to save", "prompt"])
def test_two_ranks_do_what_one_process_does(method: str, pool_of: Pools, tmp_path: Path) -> None:
    wanted = adapt(method, tmp_path, "alone")
    for losses, trained, merged in pool_of(2).run(adapt, method, tmp_path, "together"):
        assert losses == wanted[0]
        for found, state in ((trained, wanted[1]), (merged, wanted[2])):
            assert found.keys() == state.keys()
            assert all(helpers.same_bits(found[name], value) for name, value in state.items())
    files = [sorted(f.name for f in (tmp_path / name).iterdir()) for name in ("alone", "together")]
    assert files[0] == files[1]
    opened = [
        cast_params(peft.PeftModel.from_pretrained(llama(), tmp_path / name), "bf16") for name in ("alone", "together")
    ]
    assert torch.equal(logits(opened[0]), logits(opened[1]))


def save_onto_a_full_disk(folder: Path) -> Any:
    model = wrapped("lora", folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    error: Exception | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.peft_model, "safe_save_file", full)  # the first rank alone gets there
        try:
            model.save_pretrained(folder / "full")
        except (OSError, GeminiError) as e:
            error = e
    losses = helpers.train(model, helpers.adam(model), range(1))
    return str(error), losses


def test_a_failure_to_save_is_raised_on_all(pool_of: Pools, tmp_path: Path) -> None:
    (first, losses), (second, other_losses) = pool_of(2).run(save_onto_a_full_disk, tmp_path)
    assert "no space left" in first and "no space left" in second
    assert losses == other_losses


def wrap(precision: str = "fp16", **how: object) -> gemini.GeminiDDP:
    config = gemini.GeminiConfig(precision=precision, device="cpu", memory=gemini.MemoryBudget(cpu="256MiB"))
    return gemini.GeminiDDP(helpers.llama(layers=1), config, **how)


def steps_with_inf(replicated: bool) -> list[tuple[int, float, float, float]]:
    """By step: updates made, the scale after it, the norm, and a plain param. One rank alone sees inf, in some steps.

    In step 1 in a gradient of the model, in step 2 in that of a plain param, which no rank shares.
    """
    model = wrap(**({"mesh": dist.init_device_mesh("cpu", (2, 1))} if replicated else {}))
    plain = nn.Parameter(torch.ones(()))
    optimizer = gemini.HybridAdam([*model.parameters(), plain], lr=1e-2)
    scaler, seen = gemini.GradScaler("cpu", init_scale=2.0**10), []
    for number in range(4):
        alone = dist.get_rank() == dist.get_world_size() - 1
        loss = model(**helpers.batch(number + 10 * dist.get_rank())).loss
        loss = loss * (float("inf") if number == 1 and alone else 1.0)
        loss = loss + plain * (float("inf") if number == 2 and alone else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((world_of(model).handles[0].num_steps, scaler.get_scale(), float(norm), float(plain)))
    return seen


@pytest.mark.parametrize("replicated", [False, True])
def test_all_ranks_skip_a_step_or_none(replicated: bool, pool_of: Pools) -> None:
    first, *others = pool_of(2).run(steps_with_inf, replicated)
    assert [row[:2] for row in first] == [(1, 2.0**10), (1, 2.0**9), (1, 2.0**8), (2, 2.0**8)]
    assert [math.isfinite(row[2]) for row in first] == [True, False, True, True]
    assert all(repr(other) == repr(first) for other in others)


def record(job: Job) -> tuple[Timeline, dict[str, int], dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(job.family)
    model = gemini.GeminiDDP(model, config_of(job, model))
    optimizer = gemini.HybridAdam(model.parameters(), lr=job.lr)
    with model.recording() as recording:
        for step in batches(job, rank, world):
            for batch in step:
                model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            world_of(model).settle()  # so that no step has bytes of the one before
    report = model.memory_report()
    return recording.timeline, report["moved"], report["stalls"]


@pytest.mark.parametrize("where", ["ram", "standin"])
def test_every_rank_has_its_own_view(where: str, pool_of: Pools, tmp_path: Path) -> None:
    job = Job(precision="bf16", where=where, num_steps=2, path=str(tmp_path))
    for timeline, moved, waited in pool_of(2).run(record, job):
        assert timeline.moved == moved and "1 of 2 ranks" in timeline.title
        tracks = {span.track for span in timeline.spans}
        assert {Track.COMPUTE, Track.GATHER, Track.REDUCE, Track.UPDATE} <= tracks
        assert {"other ranks", "all-gather", "reduce-scatter"} <= timeline.stalls.keys()
        assert "other ranks" in waited
        for track in (Track.COMPUTE, Track.UPDATE, Track.GATHER, Track.REDUCE):
            end = 0.0
            for span in timeline.spans:
                if span.track is track:
                    assert end <= span.start < span.stop
                    end = span.stop
        gathered = {s.name for s in timeline.spans if s.track is Track.GATHER}
        reduced = {s.name for s in timeline.spans if s.track is Track.REDUCE}
        assert all(name.startswith("all-gather chunk ") for name in gathered) and len(gathered) > 1
        assert all(name.startswith("reduce-scatter chunk ") for name in reduced) and len(reduced) > 1
        assert timeline.tokens == 8 * 7, "of all ranks"
