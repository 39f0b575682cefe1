"""Embeddings with ``max_norm`` rewrite weights inside a forward: the bits of the plain loop, wherever weights are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemini
from tests.scaling import backward, make_step
from tests.train.helpers import DTYPES, Plain, adam, assert_same_state, make_config, train, trainable, wrap
from tests.world import world_of


class Own(nn.Module):
    """A module of a program's own, with weights that are not all rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.max_norm = 1.0
        self.weight, self.other = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, max_norm=self.max_norm) @ self.other


class Net(nn.Module):
    """The embedding deep inside, where nothing else is hooked, and tied to the head."""

    def __init__(self, embed: Callable[[], nn.Module], *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(embed(), nn.Tanh())])
        self.head = nn.Linear(8, 24)
        self.again = again
        if tied:
            self.head.weight = self.layers[0][0].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        x = checkpoint(layer, ids, use_reentrant=False) if self.again else layer(ids)
        return self.head(x).float().square().mean()


def ids_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 24, (2, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return model(ids_of(seed))


RENORMALIZED: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0)),
    "1-norm, tied": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=2, norm_type=1.0), tied=True),
    "bag": lambda: Net(lambda: nn.EmbeddingBag(24, 8, max_norm=1.0)),
    "frozen": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0).requires_grad_(False)),
    "recomputed": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0), again=True),
    "own": lambda: Net(Own),
}


def note_rewritten(plain: Plain) -> None:
    """The plain loop's masters become what a forward has written into its weights."""
    for name, param in plain.model.named_parameters():
        state, now = plain.states[name], param.detach().reshape(-1)
        changed = now != state["weights"].to(now.dtype)
        state["weights"][changed] = now[changed].to(state["weights"].dtype)
        if state["residual"] is not None:
            state["residual"][changed] = 0


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", RENORMALIZED)
def test_the_same_bits_as_the_plain_loop(kind: str, precision: str, where: str, tmp_path: Path) -> None:
    model, plain = (
        wrap(RENORMALIZED[kind](), where, tmp_path, precision=precision),
        Plain(RENORMALIZED[kind](), precision),
    )
    if precision == "fp16":
        plain.scale = 2.0**16
    optimizer, num_rewritten = adam(model, lr=0.1), 0
    plain.lr = 0.1
    for seed in range(3):
        before = {name: param.detach().clone() for name, param in plain.model.named_parameters()}
        wanted = loss_of(plain.model, seed)
        num_rewritten += sum(not torch.equal(before[name], p) for name, p in plain.model.named_parameters())
        note_rewritten(plain)
        loss = loss_of(model, seed)
        assert loss.item() == wanted.item()
        backward(model, loss)
        plain.backward(wanted)
        note_rewritten(plain)  # of a recomputation
        make_step(model, optimizer)
        optimizer.zero_grad()
        plain.step()
        assert_same_state(model, plain)
    assert num_rewritten >= 1
    model.eval()
    with torch.no_grad():
        assert loss_of(model, 9).item() == loss_of(plain.model, 9).item()
    note_rewritten(plain)
    assert_same_state(model, plain)


def test_as_the_same_program_on_plain_params(where: str, tmp_path: Path) -> None:
    """fp32, with updates beside the training; and the embedding as the whole model."""
    for make in (RENORMALIZED["embedding"], lambda: nn.Embedding(24, 8, max_norm=1.0)):
        torch.manual_seed(1)
        plain = make()
        torch.manual_seed(1)
        model = gemini.GeminiDDP(make(), make_config(plain, where, tmp_path, precision="fp32"))
        losses = [
            train(each, adam(each, lr=0.1), range(4), lambda m, seed: loss_of(m, seed).square().mean(), clip=None)
            for each in (plain, model)
        ]
        assert losses[0] == losses[1]
        assert all(torch.equal(model.full_param(name), param) for name, param in plain.named_parameters())


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_checkpoint_that_is_being_written_is_of_its_moment(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(RENORMALIZED["embedding"](), where, tmp_path, slack=2**16)
    names = [name for handle in world_of(model).handles for name in handle.names]
    before = {name: model.full_param(name, torch.float32) for name in names}
    pending = gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, wait=False)
    loss_of(model, 0)
    pending.wait()
    assert any(not torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert all(torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())


def test_a_lookup_that_fails_leaves_masters_that_are_the_weights(tmp_path: Path) -> None:
    model = wrap(RENORMALIZED["embedding"](), "ram", tmp_path)
    model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    name, plain = "layers.0.0.weight", RENORMALIZED["embedding"]().state_dict()["layers.0.0.weight"]
    weights, master = model.full_param(name).float(), model.full_param(name, torch.float32)
    rewritten = weights != plain.bfloat16().float()
    assert rewritten.any() and torch.equal(master, torch.where(rewritten, weights, plain))
    world_of(model).check()
