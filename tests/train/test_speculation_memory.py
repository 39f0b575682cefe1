"""Guessed updates of what has no second slot: copies in memory, which nobody needs more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.errors import GeminiError, StorageError
from gemini.memory.nvme import SpillFile
from gemini.tiers import Tier
from gemini.train.update.guess import HOLDER
from tests.plain import Plain
from tests.train.guesses import ALWAYS, NEVER, counts, guess_always, guessing, let_guesses_end, plainly, train
from tests.train.helpers import (
    Blocks,
    assert_same_snapshot,
    assert_same_state,
    noise,
    snapshot,
    squares,
    train_plain,
)
from tests.world import world_of


def held(model: Any) -> int:
    """Bytes of copies."""
    return world_of(model).held(Tier.CPU, HOLDER)


class LooksAgain(Blocks):
    """Its graph has a node that reads weights and gives them no gradient, and runs after all that do."""

    before_it = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x @ self.layers[0].weight.detach()
        early.register_hook(lambda grad: self.before_it())
        return super().forward(x.detach()) + early


@pytest.mark.parametrize("where", ["memory", "spill file", "store"])
def test_weights_that_a_graph_looks_at_are_those_of_its_forward(where: str, tmp_path: Path) -> None:
    """The gradient of the input is made of them, behind the guess of their update."""
    runs = [guessing(tmp_path, where, make=LooksAgain, slack=1 << 20), plainly(tmp_path, LooksAgain)]
    model, begun = runs[0][0], []

    def wait() -> None:
        let_guesses_end(model)
        begun.append(len(world_of(model).updates_in_flight))

    model.before_it = wait
    for number in range(3):
        inputs = []
        for net, optimizer in runs:
            inputs.append(noise(2, 5, 32, seed=number).bfloat16().requires_grad_())
            net(inputs[-1]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert_same_snapshot(*(snapshot(net) for net, _ in runs))
    assert begun == [3] * 3 and counts(model) == (9, 0)


@pytest.mark.parametrize("clip", [NEVER, ALWAYS])
@pytest.mark.parametrize("where", ["memory", "half in memory", "spill file", "GPU"])
def test_copies_go_with_the_step(where: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guessing(tmp_path, where)
    guess_always(model, monkeypatch)
    for number in range(2):
        squares(model, number).backward()
        let_guesses_end(model)
        assert held(model)
        model.clip_grad_norm_(clip)
        optimizer.step()
        assert not held(model)
        optimizer.zero_grad()
    squares(model, 2).backward()
    optimizer.zero_grad()
    assert not held(model)


@pytest.mark.parametrize("where", ["memory", "spill file", "GPU"])
def test_who_needs_the_memory_has_guesses_undone(where: str, tmp_path: Path) -> None:
    """And the step makes its own update."""
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    ledger = world_of(model).ledger
    squares(model, 0).backward()
    before, wanted = held(model), ledger.free(Tier.CPU) + 1
    ledger.reserve(Tier.CPU, wanted, "what is needed")
    assert 0 < held(model) < before
    optimizer.step()
    optimizer.zero_grad()
    ledger.release(Tier.CPU, wanted, "what is needed")
    train_plain(plain, [0], squares, clip=NEVER)
    assert_same_state(model, plain)
    assert counts(model) == (2, 1)


def test_a_spill_file_that_takes_nothing_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an update that counts breaks off."""
    model, optimizer = guessing(tmp_path, "spill file")
    squares(model, 0).backward()
    let_guesses_end(model)

    def refuse(self: SpillFile, source: torch.Tensor, offset: int) -> Any:
        raise StorageError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(SpillFile, "begin_write", refuse)
        with pytest.raises(StorageError, match="the drive is gone"):
            optimizer.zero_grad()
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        train(model, optimizer, 1, NEVER)
    world_of(model).forget_updates()
    assert not held(model)
