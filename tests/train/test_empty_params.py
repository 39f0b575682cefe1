"""Params without elements (a zero in the shape) are params like any other: trained, read, written, saved and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gemini
from tests.train.helpers import (
    DTYPES,
    VOCAB,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    noise,
    snapshot,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of

pytestmark = pytest.mark.filterwarnings("error", "ignore:Initializing zero-element tensors")


class Net(nn.Module):
    """Empty params beside others, in blocks of their own, frozen; all but one are computed with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch initializes nothing and says so
            self.nothing = nn.Parameter(torch.empty(0, 32))
            self.first, self.narrow = nn.Linear(32, 32), nn.Linear(32, 0)
            self.blocks = nn.ModuleList([nn.Linear(0, 0), nn.Linear(32, 32), nn.Linear(0, 0)])
            self.frozen = nn.Parameter(torch.empty(3, 0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        parts = self.blocks[1](x), self.blocks[0](self.narrow(x)), x @ self.nothing.t()
        return (torch.cat(parts, -1) + self.frozen.sum()).float().square().mean()


def loss_of(model: Any, seed: int) -> torch.Tensor:
    dtype = (model.first.weight if isinstance(model, Net) else model).dtype
    return model(noise(2, 5, 32, seed=seed, dtype=dtype))


@pytest.mark.parametrize("where", ["ram", "disk", "standin", "small"])
@pytest.mark.parametrize("precision", DTYPES)
def test_they_train_and_come_back(precision: str, where: str, tmp_path: Path) -> None:
    """The same bits as the plain loop; then everything that reads and writes by name."""
    model = wrap(Net(), where, tmp_path, precision=precision, slack=2**16)
    plain, optimizer = Plain(Net(), precision, scale=2.0**16 if precision == "fp16" else None), adam(model)
    assert train(model, optimizer, range(2), loss_of) == train_plain(plain, range(2), loss_of)
    loss_of(model, 2).backward()
    grad = model.full_grad("narrow.weight")
    assert grad is not None and grad.shape == (0, 32) and model.full_grad("blocks.2.weight") is None
    optimizer.step()
    optimizer.zero_grad()
    train_plain(plain, [2], loss_of, clip=None)
    assert_same_state(model, plain)
    assert model.full_param("nothing").shape == (0, 32) and world_of(model).by_names["nothing"].num_steps == 3
    with model.gathered(write=True), torch.no_grad():
        for param in model.parameters():
            param.copy_(param + 0)
    weights, states = model.state_dict(), optimizer.state_dict()
    assert weights["nothing"].shape == (0, 32) and weights["frozen"].dtype is DTYPES[precision]
    assert states["state"][0]["exp_avg"].shape == (0, 32) and len(states["param_groups"][0]["params"]) == 12
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    other = wrap(Net(), "ram", tmp_path, precision=precision)
    for wait in (True, False):
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, wait=wait).wait()
        gemini.load_checkpoint(tmp_path / "ckpt", other, adam(other))
        assert_same_snapshot(snapshot(model), snapshot(other))
    if precision != "fp16":
        model.frozen.requires_grad_(True)
        loss_of(model, 4).backward()
        assert model.full_grad("frozen") is not None
    world_of(model).check()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_updates_in_backward(where: str, tmp_path: Path) -> None:
    model, plain = wrap(Net(), where, tmp_path, gradients="transient"), Plain(Net())
    train(model, adam(model, step_in_backward=True), range(2), loss_of, clip=None)
    train_plain(plain, range(2), loss_of, clip=None)
    assert_same_state(model, plain)


def test_a_plan_counts_them(tmp_path: Path) -> None:
    x = noise(2, 5, 32, dtype=torch.float32)
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(precision="fp32", memory=memory, trace=gemini.trace(Net(), {"x": x}))
    model = gemini.GeminiDDP(Net(), config)
    train(model, adam(model), [0], loss_of)


class Odd(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any):
        super().__init__(config)
        self.extra = nn.Linear(32, 0)
        self.post_init()


@pytest.mark.filterwarnings("default")
def test_pretrained(tmp_path: Path) -> None:
    hf_config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None
    )
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(precision="fp32", memory=memory)
    drawn = gemini.from_config(hf_config, config, model_class=Odd)
    drawn.save_pretrained(tmp_path / "saved")
    loaded = gemini.from_pretrained(tmp_path / "saved", config, model_class=Odd)
    plain, wanted = Odd.from_pretrained(tmp_path / "saved").state_dict(), drawn.state_dict()
    assert wanted["extra.weight"].shape == (0, 32)
    for state in (plain, loaded.state_dict()):
        assert state.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in state.items())
