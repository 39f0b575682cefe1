"""Two backwards, of which the first measures: the bits of gradients that are kept and clipped, wherever chunks live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import GeminiError
from gemini.optim import AdaLomo, AdaLomoRule, Lion, LionRule, PlainSGDRule
from tests.train.helpers import (
    PLACEMENTS,
    adam,
    assert_same_snapshot,
    llama,
    make_config,
    on_batch,
    snapshot,
    step_on,
    train,
    wrap,
)
from tests.world import world_of

Make = Callable[[Any, bool], Any]
RULES: dict[str, tuple[Any, Make]] = {
    "adam": (None, lambda model, used: adam(model, step_in_backward=used)),
    "lomo": (
        PlainSGDRule(),
        lambda model, used: (
            gemini.optim.LOMO(model.parameters(), lr=0.1)
            if used
            else gemini.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
        ),
    ),
    "lion": (LionRule(), lambda model, used: Lion(model.parameters(), lr=1e-3, step_in_backward=used)),
    "adalomo": (AdaLomoRule(), lambda model, used: AdaLomo(model.parameters(), lr=1e-2, step_in_backward=used)),
}
MAX_NORM = 0.5


def two_passes(model: Any, optimizer: Any, seeds: range, *, again: bool) -> tuple[list[float], list[float]]:
    """Losses and norms; ``again``: the forward is computed twice, and no graph is kept."""
    losses, norms = [], []
    for seed in seeds:
        loss = on_batch(model, seed)
        with model.measuring_grad_norm(MAX_NORM) as measured:
            loss.backward(retain_graph=not again)
        if again:
            loss = on_batch(model, seed)
        step_on(loss, optimizer)
        losses.append(loss.item())
        norms.append(measured.norm)
    return losses, norms


@pytest.mark.parametrize(
    "again", [pytest.param(False, id="graph kept"), pytest.param(True, id="forward again", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_the_bits_of_clipping_what_is_kept(where: str, rule: str, again: bool, tmp_path: Path) -> None:
    own, make = RULES[rule]
    kept, model = (
        gemini.GeminiDDP(
            llama(tied=True),
            replace(make_config(llama(), where, tmp_path, slack=2**20, gradients=gradients), optimizer=own),
        )
        for gradients in ("retain", "transient")
    )
    wanted = train(kept, make(kept, False), range(3), clip=MAX_NORM)
    losses, norms = two_passes(model, make(model, True), range(3), again=again)
    assert losses == wanted and min(norms) > MAX_NORM
    assert_same_snapshot(snapshot(model), snapshot(kept))
    assert model.memory_report()["grad_bytes_per_param"] == 0
    world_of(model).check()


def test_a_backward_after_the_clipped_step_is_not_clipped(tmp_path: Path) -> None:
    kept = wrap(llama(), "ram", tmp_path)
    model = wrap(llama(), "ram", tmp_path, gradients="transient")
    of_kept, of_model = adam(kept), adam(model, step_in_backward=True)
    train(kept, of_kept, range(1), clip=MAX_NORM)
    two_passes(model, of_model, range(1), again=False)
    train(kept, of_kept, range(1, 3), clip=None)
    train(model, of_model, range(1, 3), clip=None)
    assert_same_snapshot(snapshot(model), snapshot(kept))


def test_inf_is_told_before_any_weight_changes(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    before = snapshot(model)
    loss = on_batch(model, 0)
    with pytest.raises(gemini.NonFiniteGradient), model.measuring_grad_norm(MAX_NORM):
        (loss * float("inf")).backward()
    assert_same_snapshot(snapshot(model), before)
    wanted = wrap(llama(), "ram", tmp_path)
    train(wanted, adam(wanted), range(2), clip=MAX_NORM)
    two_passes(model, optimizer, range(2), again=False)
    assert_same_snapshot(snapshot(model), snapshot(wanted))


def test_what_it_cannot_do_is_told(tmp_path: Path) -> None:
    kept = wrap(llama(), "ram", tmp_path)
    with pytest.raises(GeminiError, match="gradients='retain': one backward does"), kept.measuring_grad_norm(1.0):
        pass
    model = wrap(llama(), "ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)
    with pytest.raises(GeminiError, match="no backward gave a gradient"), model.measuring_grad_norm(1.0):
        pass
    with pytest.raises(ValueError, match="must not be negative"):
        model.measuring_grad_norm(-1.0)
    on_batch(model, 0).backward()
    with pytest.raises(GeminiError, match=r"call optimizer\.step\(\) before it"), model.measuring_grad_norm(1.0):
        pass
    optimizer.step()
    with pytest.raises(GeminiError, match="Run backward twice"):
        model.clip_grad_norm_(1.0)


def test_a_loop_that_fails_while_measuring_leaves_all_as_it_was(tmp_path: Path) -> None:
    model = wrap(llama(), "disk", tmp_path, gradients="transient")
    optimizer, before = adam(model, step_in_backward=True), snapshot(model)
    with pytest.raises(KeyError), model.measuring_grad_norm(1.0):
        on_batch(model, 0).backward()
        raise KeyError("the program's own")
    assert_same_snapshot(snapshot(model), before)
    losses, _ = two_passes(model, optimizer, range(1), again=True)
    assert torch.isfinite(torch.tensor(losses)).all()
    world_of(model).check()
