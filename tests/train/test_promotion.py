"""A second backward turns retained gradients into fp32 sums: where they fit, and never in the room that steps need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.chunks.chunk import FilePlane
from gemini.memory.devices.pages import host_bytes
from gemini.memory.nvme import SpillFile
from gemini.planning.planes import ADAM
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    batch,
    llama,
    same_bits,
    snapshot,
)
from tests.world import world_of


@pytest.mark.slow
@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("nvme", ["64MiB", None])
def test_sums_leave_the_working_set_free(nvme: str | None, tmp_path: Path) -> None:
    """Every budget from the least on: it runs, or the second backward is refused as a whole; never in the middle."""
    ran = refused = 0
    for kib in range(340, 900, 24) if nvme else range(900, 2000, 40):
        memory = gemini.MemoryBudget(cpu=f"{kib}KiB", nvme=nvme, nvme_path=None if nvme is None else tmp_path)
        try:
            model = gemini.GeminiDDP(llama(), gemini.GeminiConfig(device="cpu", memory=memory))
        except gemini.BudgetExceeded:
            continue
        optimizer = gemini.HybridAdam(model.parameters())
        for _ in range(2):
            model(**batch()).loss.backward()
            try:
                model(**batch()).loss.backward()
                ran += 1
            except gemini.BudgetExceeded as e:
                assert "a second backward before optimizer.step() needs fp32 sums" in str(e)
                refused += 1
                break
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        world_of(model).check()
    assert ran and (refused == 0 if nvme else refused > 0)


def managed(cpu: int, nvme: int, path: Path) -> Any:
    memory = gemini.MemoryBudget(cpu=cpu * 2**10, nvme=nvme * 2**10, nvme_path=path)
    return gemini.GeminiDDP(llama(), gemini.GeminiConfig(device="cpu", memory=memory))


def holders(model: Any) -> dict[Any, dict[str, int]]:
    ledger = world_of(model).ledger
    return {tier: ledger.holders(tier) for tier in ledger.tiers}


@pytest.mark.parametrize("cpu", [1036, 1060, 1108, 1156, 1228])
@pytest.mark.parametrize("nvme", [2**16, 700, 200])
def test_every_budget_has_the_right_bits_or_the_documented_error(cpu: int, nvme: int, tmp_path: Path) -> None:
    """Where a plan has kept everything in memory: sums are kept there too, or refused; for them nothing goes to NVMe.

    A refused backward leaves gradients, ledger and spill file as they were, however often it is tried.
    """
    model, plain = managed(cpu, nvme, tmp_path), Plain(llama())
    optimizer = adam(model)
    refused = 0
    for step in range(3):
        model(**batch(0)).loss.backward()
        plain.backward(plain.model(**batch(0)).loss)
        before, grads = holders(model), {name: model.full_grad(name) for name in plain.states}
        try:
            model(**batch(1)).loss.backward()
            plain.backward(plain.model(**batch(1)).loss)
        except gemini.BudgetExceeded as e:
            refused += 1
            assert "a second backward before optimizer.step() needs fp32 sums" in str(e)
            assert holders(model) == before
            for name, grad in grads.items():
                assert same_bits(model.full_grad(name), grad), name  # type: ignore[arg-type]
            if step == 1:
                model.zero_grad()
                plain.grads = {}
                assert holders(model) == before
                continue
        model.clip_grad_norm_(1.0)
        plain.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        assert_same_state(model, plain)
    assert refused == (0 if cpu >= 896 + 256 else 3)  # weights, states and gradients, and the sums


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_a_failing_disk_loses_no_gradient(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of it: gradients in either form, and nothing is reserved for nothing."""
    model = managed(700, 2**16, tmp_path)
    world, optimizer = world_of(model), adam(model)
    model(**batch(0)).loss.backward()
    before, grads = snapshot(model), {h.name: model.full_grad(h.name) for h in world.handles}
    calls, real = [], SpillFile.begin_write

    def begin_write(self: SpillFile, source: torch.Tensor, offset: int) -> Any:
        calls.append(1)
        if len(calls) > number:
            raise gemini.StorageError("the disk is gone")
        return real(self, source, offset)

    with monkeypatch.context() as patch:
        patch.setattr(SpillFile, "begin_write", begin_write)
        with pytest.raises(gemini.StorageError, match="the disk is gone"):
            model(**batch(1)).loss.backward()
    world.forget_interrupted()
    assert_same_snapshot(before, snapshot(model))
    for name, grad in grads.items():
        found = model.full_grad(name)
        assert found is not None and grad is not None and torch.equal(found.float(), grad.float()), name
    for tier in world.tiers:
        for kind in ADAM.kinds:
            planes = [c.planes[kind] for c in world.chunks if kind in c.planes and c.planes[kind].tier is tier]
            assert world.held(tier, kind) == sum(plane.num_bytes for plane in planes), (tier, kind)
    model(**batch(1)).loss.backward()
    optimizer.step()
    world.check()


def test_a_slot_that_was_given_back_reads_as_zeros(tmp_path: Path) -> None:
    """What stood there was a gradient, and what comes there may be states of a param that becomes trained."""
    spill = SpillFile(tmp_path, 2**21 + 4096)
    numel = (2**21 + 4096) // 4
    plane, ones = FilePlane(spill, numel, torch.float32), host_bytes(4 * numel).view(torch.float32)
    plane.store(0, numel, ones.fill_(1.0))
    plane.give_back()
    again, found = FilePlane(spill, numel, torch.float32), host_bytes(4 * numel).view(torch.float32).fill_(2.0)
    again.load(0, numel, found)
    assert again._offset == plane._offset and not found.any()
    spill.close()
