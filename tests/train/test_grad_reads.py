"""``p.grad`` of a managed model, which is None: whoever would do nothing with it is refused, or warned once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import PLACEMENTS, Blocks, adam, noise, same_bits, snapshot, squares, train, wrap

CLIPPING = {
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.1),
    "clip_grads_with_norm_": lambda params: nn.utils.clip_grads_with_norm_(params, 0.1, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_torchs_clipping_is_refused(name: str, where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path)
    squares(model, 0).backward()
    for params in (model.parameters(), list(model.parameters()), model.layers[1].weight):
        with pytest.raises(gemini.GeminiError, match=rf"nn.utils.{name} would .*clip_grad_norm_\(max_norm\)"):
            CLIPPING[name](params)


def reads(model: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for param in model.parameters():
            assert param.grad is None
    return told


@pytest.mark.parametrize("gradients", ["retain", "accumulate", "transient"])
def test_a_read_after_a_backward_warns_once(gradients: str, tmp_path: Path) -> None:
    model, other = (wrap(Blocks(), "disk", tmp_path, gradients=gradients) for _ in range(2))
    optimizer = adam(model, step_in_backward=gradients == "transient")
    squares(model, 0)
    assert reads(model) == []  # there is none to be missed
    squares(model, 0).backward()
    (told,) = reads(model)
    assert told.category is UserWarning and told.filename == __file__
    assert "p.grad of managed param 'layers.0.weight'" in str(told.message)
    assert "model.full_grad(name)" in str(told.message)
    optimizer.step()
    optimizer.zero_grad()
    squares(model, 0).backward()
    assert reads(model) == []
    keep = adam(other, step_in_backward=gradients == "transient")
    squares(other, 0).backward()
    assert len(reads(other)) == 1, "once per model"
    del keep


def test_torchs_norm_of_gradients_that_are_none_warns(tmp_path: Path) -> None:
    """It is given what ``p.grad`` was, and cannot know of the params."""
    model = wrap(Blocks(), "ram", tmp_path)
    squares(model, 0).backward()
    with pytest.warns(UserWarning, match="p.grad of managed param"):
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def test_nothing_of_ours_warns(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path)
    optimizer = adam(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(2), squares)
        for seed in range(2):  # a second backward finds gradients
            squares(model, seed).backward()
            model.full_grad("layers.0.weight")
            snapshot(model)
        repr(model)
        optimizer.step()
        gemini.save_checkpoint(tmp_path / "c", model, optimizer)
        optimizer.zero_grad()
        model.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        gemini.HybridAdam(model.parameters())


@pytest.mark.parametrize("where", PLACEMENTS)
def test_hooks_see_a_gradient_before_it_is_taken(where: str, tmp_path: Path) -> None:
    """``register_post_accumulate_grad_hook``, before wrapping and after it: both see and change ``param.grad``."""

    def grads(*, before: bool) -> list[torch.Tensor]:
        net = Blocks()
        model = net if before else wrap(net, where, tmp_path, precision="fp32")
        param, seen = model.layers[1].weight, []

        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            seen.append(param.grad.clone())
            param.grad.mul_(2.0)

        param.register_post_accumulate_grad_hook(hook)
        model = wrap(net, where, tmp_path, precision="fp32") if before else model
        model(noise(2, 5, 32, dtype=torch.float32)).square().mean().backward()
        return [*seen, model.full_grad("layers.1.weight")]

    (seen, kept), (other_seen, other_kept) = grads(before=True), grads(before=False)
    assert same_bits(seen, other_seen) and same_bits(kept, other_kept)
    assert same_bits(kept.view_as(seen), seen * 2.0)
