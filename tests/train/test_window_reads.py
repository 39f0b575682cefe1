"""Updates inside backward that read the weights in their windows: until they are over, nobody else has that memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.chunks.states import Use
from tests import models
from tests.train.test_updates import Held, adam, backward, same
from tests.world import world_of

ON_NVME = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)


def wrap(folder: Path, cpu: str = "1MiB", placement: Any = ON_NVME, **how: Any) -> Any:
    memory = gemini.MemoryBudget(cpu=cpu, nvme="64MiB", nvme_path=folder)
    how = {"max_chunk": 4096, "update_threads": 1, "gradients": "transient", **how}
    config = gemini.GeminiConfig(memory=memory, device="cpu", placement=placement, **how)
    return gemini.GeminiDDP(models.make_model("llama"), config)


def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        losses.append(backward(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reference(folder: Path) -> tuple[Any, Any]:
    model = wrap(folder, "64MiB", "auto", gradients="retain", overlap=False)
    return model, adam(model)


@pytest.mark.parametrize("cpu", ["1MiB", "0.4MiB"], ids=["room", "no room"])
def test_windows_stay_until_their_updates_are_over(cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update waits until somebody waits for one: who needs the room, or the weights, or the next step."""
    model, (other, its) = wrap(tmp_path, cpu), reference(tmp_path)
    optimizer, held = adam(model, step_in_backward=True), Held(monkeypatch)
    world, most = world_of(model), [0]
    updates, manager = world.updates, world.manager
    await_one, begin = updates._await, manager.begin_update

    def await_now(job: Any) -> None:
        most[0] = max(most[0], sum(chunk.use is Use.UPDATING for chunk in world.chunks))
        held.gate.set()
        await_one(job)
        held.gate.clear()

    def began(chunk: Any) -> None:
        begin(chunk)
        world.check_windows()

    monkeypatch.setattr(updates, "_await", await_now)
    monkeypatch.setattr(manager, "begin_update", began)
    assert steps(model, optimizer, range(4)) == steps(other, its, range(4))
    assert same(model, other)
    assert most[0] > (3 if cpu == "1MiB" else 0), "no window was read by an update"
    world.check_windows()
    assert not any(chunk.use is Use.UPDATING for chunk in world.chunks)


def test_a_window_that_somebody_looks_into_stays_theirs(tmp_path: Path) -> None:
    """A view taken in forward sees the old weights until the step, and the new ones after it, as in torch."""
    model, (other, its) = wrap(tmp_path), reference(tmp_path)
    optimizer, views = adam(model, step_in_backward=True), list[torch.Tensor]()
    block = model.model.layers[1].mlp

    def look(module: Any, args: Any) -> None:
        views.append(module.weight.view(-1)[5:9])

    handle = block.up_proj.register_forward_pre_hook(look)
    steps(model, optimizer, range(1))
    handle.remove()
    steps(other, its, range(1))
    name = "model.layers.1.mlp.up_proj.weight"
    now = other.state_dict(dtype=torch.bfloat16)[name].view(-1)[5:9]
    assert torch.equal(views[0].detach(), now)
    assert steps(model, optimizer, range(1, 3)) == steps(other, its, range(1, 3))
    assert same(model, other)
