"""A block keeps gathered what the modules inside it read: what that changes is time, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.errors import ParamAccessError
from tests.train.helpers import Plain, adam, assert_trains_alike, least, manage, noise, same_bits, trainable, wrap
from tests.world import world_of

WIDTH = 64
MOVING = ["disk", "standin", "serial", "half"]


class Block(nn.Module):
    """Three layers that are laid out together; ``how`` computes with them in another way than in turn."""

    def __init__(self, how: Callable[[Block, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.left: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.how(self, x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, how: Callable[[Block, torch.Tensor], torch.Tensor], num_blocks: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(how) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_turn(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.inside(x)


def checkpointed(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The modules are called again outside of their block's forward."""
    return checkpoint(block.inside, x, use_reentrant=False)


def checkpointed_in_part(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(torch.tanh(checkpoint(block.norm, block.up(x), use_reentrant=False)))


def read_by_the_block(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Between two modules, where the guard stands."""
    return block.inside(x) @ block.up.weight


def view_left_behind(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = block.inside(x)
    block.left = [block.down.weight.t()]
    return x @ block.left.pop()


def other_hooks(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return block.inside(x)


def error_inside(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The end of the first call is an exception that the block catches."""
    try:
        block.norm(x[..., :3])
    except RuntimeError:
        return block.inside(x)
    raise AssertionError("a layer norm of another width")


def thread_inside(block: Block, x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(block.inside(x)))
    thread.start()
    thread.join()
    return found[0]


def gradient_inside(block: Block, x: torch.Tensor) -> torch.Tensor:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        force = torch.autograd.grad(block.inside(at).sum(), at, create_graph=create_graph)[0]
    return force + block.inside(x)


def transformed(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(block.inside)(x)


def read_beside_another(block: Block, x: torch.Tensor) -> torch.Tensor:
    """In one operation two weights, neither by its module."""
    return torch.addmm(block.down.bias, x.reshape(-1, WIDTH), block.up.weight).view(x.shape) + block.inside(x)


def pushed_forward(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(block.inside, (x,), (torch.ones_like(x),))[1]


def without_and_with_gradients(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = block.inside(x)
    return y + block.inside(x)


def within_itself(block: Block, x: torch.Tensor) -> torch.Tensor:
    if x.size(0) == 1:
        return block.inside(x)
    return torch.cat([block(part) for part in x.split(1)])


WAYS = [
    in_turn,
    checkpointed,
    checkpointed_in_part,
    read_by_the_block,
    view_left_behind,
    other_hooks,
    error_inside,
    thread_inside,
    gradient_inside,
    transformed,
    read_beside_another,
    pushed_forward,
    without_and_with_gradients,
    within_itself,
]


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return model(noise(2, 3, WIDTH, seed=seed, dtype=torch.float32)).square().mean()


@pytest.mark.parametrize("where", MOVING)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_the_bits_are_those_of_the_plain_loop(how: Any, where: str, tmp_path: Path) -> None:
    plain = Plain(Net(how), "fp32")
    model, optimizer = trainable(Net(how), where, tmp_path, precision="fp32", slack=2**18)
    for seed in range(3):
        assert_trains_alike(model, optimizer, plain, [seed], loss_of)
        with torch.no_grad():
            assert same_bits(loss_of(model, 9), loss_of(plain.model, 9))


def test_a_transform_inside_closes_the_hooks_of_the_block(tmp_path: Path) -> None:
    """torch takes no derivatives where saved-tensor hooks are open, and a block keeps them open for others alone."""
    top, is_open = torch._C._autograd._top_saved_tensors_default_hooks, list[bool]()  # type: ignore[attr-defined]

    def differentiated(block: Block, x: torch.Tensor) -> torch.Tensor:
        x = torch.func.grad(lambda y: block.inside(y).square().sum())(x)
        is_open.append(top(False) is not None)
        return x

    model = wrap(Net(differentiated), "disk", tmp_path, precision="fp32", slack=2**18)
    assert loss_of(model, 0).item() == loss_of(Net(differentiated), 0).item()
    assert is_open == [True] * 3 + [False] * 3 and top(False) is None, "they are open again behind it"


def write(module: nn.Module, *_: Any) -> None:
    module.weight.data.mul_(2)


@pytest.mark.parametrize("where", ["disk", "standin", "serial"])
def test_a_write_inside_is_refused_and_undone(where: str, tmp_path: Path) -> None:
    model = wrap(Net(in_turn), where, tmp_path, precision="fp32", slack=2**18)
    wanted = loss_of(model, 0).item()
    hook = model.blocks[1].down.register_forward_hook(write)
    with pytest.raises(ParamAccessError, match=r"blocks\.1\.down\.weight"):
        loss_of(model, 0)
    hook.remove()
    assert loss_of(model, 0).item() == wanted
    world_of(model).check()


class Reads(nn.Module):
    """A block whose forward multiplies by the weight of another one, which is no smaller than all of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.other = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.block = Block(lambda block, x: block.down(F.linear(block.up(x), self.other.weight)[..., :WIDTH]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def test_what_is_kept_goes_where_something_else_needs_the_room(tmp_path: Path) -> None:
    """As between two modules without a block around them: there is room for one chunk at a time."""
    how: dict[str, Any] = {"homes": {}, "precision": "fp32", "overlap": False, "max_chunk": 6 * WIDTH**2}

    def make(gpu: int) -> Any:
        return manage(Reads(), tmp_path, "standin", gpu=gpu, **how)

    model = make(least(make, 1024))
    assert len(world_of(model).chunks) == 2
    assert all(not chunk.resident for chunk in world_of(model).chunks)
    assert_trains_alike(model, adam(model), Plain(Reads(), "fp32"), range(2), loss_of)


def test_a_graph_inside_a_forward_without_gradients_lends_no_window(tmp_path: Path) -> None:
    """The block has opened no hooks then, so modules inside open their own."""

    def graph_inside(block: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            block.left = [block.inside(x.detach().requires_grad_())]
        return block.left[0].detach()

    model = wrap(Net(graph_inside), "disk", tmp_path, precision="fp32", slack=2**18)
    with torch.no_grad():
        loss_of(model, 0)
    assert all(block.left[0].grad_fn is not None for block in model.blocks)
    assert not any(chunk.is_lent for chunk in world_of(model).chunks)


def test_modules_on_another_stream_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows must know of every stream that reads them."""
    model = wrap(Net(in_turn), "standin", tmp_path, precision="fp32", slack=2**18)
    device, stream, begun = world_of(model).device, [0], list[int]()
    monkeypatch.setattr(device, "stream_number", lambda: stream[0])
    monkeypatch.setattr(device, "computes_here", lambda: begun.append(stream[0]))
    model.blocks[1].norm.register_forward_pre_hook(lambda *_: stream.insert(0, 1), prepend=True)
    model.blocks[1].norm.register_forward_hook(lambda *_: stream.pop(0) * 0 or None, always_call=True)
    with torch.no_grad():
        loss_of(model, 0)
    assert begun.count(1) == 1 and begun.count(0) >= 3


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_modules_inside_gather_nothing(where: str, tmp_path: Path) -> None:
    model = wrap(Net(in_turn), where, tmp_path, precision="fp32", slack=2**18)
    manager = world_of(model).manager
    acquired: list[int] = []
    acquire = manager.acquire
    world_of(model).calls._acquire = lambda chunk: (acquired.append(chunk.spec.index), acquire(chunk))[1]
    with torch.no_grad():
        loss_of(model, 0)
    assert len(acquired) == len(set(acquired)) == 3
