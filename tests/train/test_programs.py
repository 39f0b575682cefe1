"""Programs off the beaten path: the plain loop's bits, or a clear error, wherever chunks live.

What leaves a block otherwise than in its output, second derivatives, views that outlive a call, weights that are read
outside of forward, several threads, ``torch.func``. Each of these once gave other numbers without a word, or an error
of somebody else's, where weights move.
"""

import collections
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import gemini
from gemini.train.modules.calls import CallRecord
from tests.train.helpers import (
    ALL_PLACEMENTS,
    DTYPES,
    Plain,
    adam,
    assert_same_state,
    compare,
    noise,
    same_bits,
    squares,
    wrap,
)
from tests.world import world_of

WIDTH = 32


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 6)


class Block(nn.Module):
    """A block that reads params of its own beside a layer; ``way`` is how one of its results leaves it."""

    def __init__(self, way: str = ""):
        super().__init__()
        self.way = way
        self.inner = weight(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.router = weight(WIDTH, WIDTH)  # read last, as its chunk is the last that is let go

    def forward(self, x: torch.Tensor, results: list[torch.Tensor] | None = None) -> Any:
        y = torch.tanh(self.layer(x) @ self.inner)
        kept = torch.sin(torch.sin(y @ self.router) @ self.router)
        if self.way == "attribute":
            self.kept = kept.float().square().mean()
        elif self.way == "view":
            self.transposed = self.router.t()
        elif self.way == "list":
            assert results is not None
            results.append(kept)
        elif self.way:
            return WAYS[self.way](y + kept)
        return y


class Unknown:
    def __init__(self, value: torch.Tensor):
        self.value = value


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "object": Unknown,
    "set": lambda y: {y},
    "userdict": lambda y: collections.UserDict(value=y),
    "distribution": lambda y: torch.distributions.Normal(y.float(), 1.0),
}


def opened(found: Any) -> torch.Tensor:
    if isinstance(found, Unknown):
        return found.value
    if isinstance(found, set):
        return next(iter(found))
    if isinstance(found, collections.UserDict):
        return found["value"]
    return found.mean.to(torch.get_default_dtype()) if isinstance(found, torch.distributions.Normal) else found


class Net(nn.Module):
    def __init__(self, way: str = "", frozen: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(way) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        if frozen:
            for block in self.layers:
                block.router.requires_grad_(False)
                block.inner.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        results: list[torch.Tensor] = []
        for block in self.layers:
            x = opened(block(x, results)).to(x.dtype)
        if results:
            return self.head(x), results
        return self.head(x)


def loss_of(model: Any, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    found = model(noise(4, WIDTH, seed=seed, dtype=dtype))
    out, results = found if isinstance(found, tuple) else (found, [])
    loss = out.float().square().mean() + sum(r.float().square().mean() for r in results)
    way = model.layers[0].way
    if way == "attribute":
        loss = loss + sum(block.kept for block in model.layers)
    return loss


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", ["attribute", "list", *WAYS])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_results_leave_a_block_in_any_way(way: str, frozen: bool, where: str, tmp_path: Path) -> None:
    compare(lambda: Net(way, frozen), where, tmp_path, loss_of, precision="fp32" if frozen else "bf16")


class Skips(Net):
    """A U-Net, whose skips go through attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            block.skip = x @ block.router
            x = block(x)
        for block in reversed(self.layers):
            x = torch.tanh(x + block.skip)
        return self.head(x)


class Forces(Net):
    """Forces are minus the gradient of an energy, inside of forward, and are trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).float().square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


class Views(Net):
    """Views of weights outlive the calls that made them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.layers:
            x = torch.tanh(x @ block.transposed)
        return x


class Checkpointed(Net):
    def __init__(self, way: str = "", reentrant: bool = False):
        super().__init__(way)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.layers:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class OwnParam(Net):
    """Returns a param of its own, as CLIP does with its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = weight(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), [self.scale * 1.0, self.scale]


class Multiplication(torch.autograd.Function):
    """Keeps its weight for backward, as autograd knows it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w.t())
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, transposed = ctx.saved_tensors
        return grad @ transposed, x.t() @ grad


class Custom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = Multiplication.apply(block(x), block.router)
        return self.head(x)


class FusedLoss(torch.autograd.Function):
    """Head and loss at once, as in Liger: gradients are made in forward, kept, and scaled in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = x @ w.t()
        ctx.save_for_backward(2 * out @ w, 2 * out.t() @ x)
        return out.float().square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(kept.mul_(grad) for kept in ctx.saved_tensors)


class Fused(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return FusedLoss.apply(x, self.head.weight) / x.numel() + self.head.bias.float().sum()


def the_loss(model: Any, seed: int) -> torch.Tensor:
    return model(noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype))


def penalized(model: Any, seed: int) -> torch.Tensor:
    """A gradient penalty, which takes the gradient of a gradient."""
    x = noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    return model(x).float().mean() + (grad.float().norm() - 1).square()


def second_derivative(model: Any, seed: int) -> torch.Tensor:
    """What a physics-informed net minimizes."""
    x = noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype).requires_grad_()
    (first,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x, create_graph=True)
    return (second.float() + first.float()).square().mean()


def with_weight(model: Any, seed: int) -> torch.Tensor:
    """A loss fused with the head, whose weight it reads itself."""
    hidden = model(noise(4, WIDTH, seed=seed, dtype=next(model.parameters()).dtype))
    return nn.functional.linear(hidden, model.head.weight).float().square().mean() + model.head.weight.float().norm()


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Skips, loss_of), (Forces, loss_of), (lambda: Views("view"), loss_of), (OwnParam, loss_of), (Custom, loss_of),
        (Checkpointed, loss_of), (lambda: Checkpointed("", True), loss_of), (lambda: Net("view"), loss_of),
        (Net, penalized), (Net, second_derivative), (Net, with_weight), (Fused, the_loss),
    ],
    ids=[
        "skips", "forces", "views", "own-param", "custom", "checkpointed", "reentrant", "kept-views", "penalty",
        "second-derivative", "weight-in-loss", "fused-loss",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("where", "precision"),
    [*((where, "fp32" if where == "half" else "bf16") for where in ALL_PLACEMENTS), ("disk", "fp32")],
)
def test_programs(make: Any, loss: Any, precision: str, where: str, tmp_path: Path) -> None:
    compare(make, where, tmp_path, loss, precision=precision, slack=2**17)


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_gradients_of_the_params_that_are_named(where: str, tmp_path: Path) -> None:
    """``loss.backward(inputs=...)``: nobody else's."""
    plain, model = Net(), wrap(Net(), where, tmp_path, precision="fp32")
    for net in (plain, model):
        loss_of(net, 0).backward(inputs=[block.router for block in net.layers])
    for name, param in plain.named_parameters():
        ours = model.full_grad(name)
        assert (ours is None) == (param.grad is None), name
        assert ours is None or same_bits(ours, param.grad), name
    model.zero_grad()
    world_of(model).check()


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_second_derivatives_need_no_more_room_than_a_step(where: str, tmp_path: Path) -> None:
    """What the first pass saves of weights is a place as well."""
    compare(Net, where, tmp_path, penalized, precision="fp32")


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_a_view_kept_over_steps_shows_the_new_weights(where: str, tmp_path: Path) -> None:
    model, plain = wrap(Net("view"), where, tmp_path, precision="fp32", slack=2**17), Plain(Net("view"), "fp32")
    optimizer = adam(model)
    loss_of(model, 0).backward()
    plain.backward(loss_of(plain.model, 0))
    views = [block.transposed for block in model.layers]
    optimizer.step()
    plain.step()
    world_of(model).settle()
    for view, block in zip(views, plain.model.layers, strict=True):
        assert same_bits(view.detach(), block.router.detach().t())


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    """A view that nobody but the program knows of keeps its window; where there is no room that is said."""
    with pytest.raises(gemini.BudgetExceeded, match="still has a view of .*'layers.0.router'"):
        loss_of(wrap(Views("view"), "disk", tmp_path, precision="fp32"), 0).backward()


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_a_graph_from_before_an_update_is_refused(where: str, tmp_path: Path) -> None:
    """As torch does, whose weights count their versions."""
    model = wrap(Net(), where, tmp_path)
    optimizer = adam(model)
    old = loss_of(model, 0)
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    del old
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    world_of(model).check()


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_what_torch_refuses_inside_of_hooks_is_refused(where: str, tmp_path: Path) -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.exp(self.layers[0](x) @ self.layers[0].router)
            y = self.head(x)
            x.add_(1)
            return y

    model = wrap(Writes(), where, tmp_path, precision="fp32")  # kept alive: a graph does not
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(noise(4, WIDTH, dtype=torch.float32)).sum().backward()


# ---- threads ---------------------------------------------------------------------------------------------------------


class Branches(Net):
    """Two blocks run in threads of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grad = torch.is_grad_enabled()

        def run(block: nn.Module) -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return block(x)

        with ThreadPoolExecutor(2) as threads:
            left, right = threads.map(run, self.layers[:2])
        return self.head(self.layers[2](left) + self.layers[2](right))


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_branches_in_two_threads(where: str, tmp_path: Path) -> None:
    """Gradients are compared with a tolerance of rounding: autograd adds up branches in the order of their threads."""
    plain, model = Plain(Branches(), "fp32"), wrap(Branches(), where, tmp_path, precision="fp32", slack=2**16)
    for seed in range(3):
        ours, theirs = loss_of(model, seed), loss_of(plain.model, seed)
        assert ours.item() == theirs.item()
        ours.backward()
        plain.backward(theirs)
        for name, grad in plain.grads.items():
            torch.testing.assert_close(model.full_grad(name).view(-1), grad, rtol=1e-5, atol=1e-7)
        model.zero_grad()
        plain.grads = {}
    world_of(model).check()


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_several_threads_evaluate_one_model(where: str, tmp_path: Path) -> None:
    model = wrap(Net(), where, tmp_path, slack=2**16)
    with torch.no_grad():
        wanted = model(noise(4, WIDTH))
    found: list[Any] = []

    def evaluate() -> None:
        for _ in range(5):
            try:
                with torch.no_grad():
                    found.append(same_bits(model(noise(4, WIDTH)), wanted))
            except BaseException as e:
                found.append(e)

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15
    world_of(model).check()


# ---- state at rest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "masked"), [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_fused_paths_of_torch_in_evaluation(where: str, precision: str, masked: bool, tmp_path: Path) -> None:
    """torch's encoder has a fused path that takes all weights of a layer, where every param is an ordinary one."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=masked)

    plain, model = Plain(make(), precision), wrap(make(), where, tmp_path, precision=precision, slack=2**20)
    optimizer, mask = adam(model), torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 3:] = mask[2, 4:] = True
    x, how = noise(3, 6, 32, dtype=DTYPES[precision]), {"src_key_padding_mask": mask} if masked else {}
    for _ in range(2):
        model.train()(x).square().mean().backward()
        plain.backward(plain.model.train()(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        with torch.no_grad():
            wanted = plain.model.eval()(x, **how)
            for _ in range(2):
                assert same_bits(model.eval()(x, **how), wanted)
    assert_same_state(model, plain)


# ---- torch.func ------------------------------------------------------------------------------------------------------

TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(4, WIDTH))[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x[0]),
    "per sample": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_transforms(transform: str, where: str, tmp_path: Path) -> None:
    x = noise(4, WIDTH, dtype=torch.float32)
    plain, model = Plain(Net(), "fp32"), wrap(Net(), where, tmp_path, precision="fp32", slack=2**17)
    optimizer = adam(model)
    for _ in range(2):
        assert same_bits(TRANSFORMS[transform](model, x).detach(), TRANSFORMS[transform](plain.model, x).detach())
        loss_of(model, 0).backward()
        plain.backward(loss_of(plain.model, 0))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    world_of(model).check()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_hook_inside_a_transform_reads_a_param(where: str, tmp_path: Path) -> None:
    """After its module's call: a copy is read, outside of the transform, or the remedy is said."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.read = weight(WIDTH, WIDTH), torch.Tensor.sum

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.w
            y.register_hook(lambda grad: grad + 0.01 * self.read(self.w).detach())
            return y

    x = noise(4, WIDTH, dtype=torch.float32)
    plain, model = Hooked(), wrap(Hooked(), where, tmp_path, precision="fp32", slack=2**17)
    model.load_state_dict(plain.state_dict())
    found = [torch.func.grad(lambda x, net=net: net(x).square().sum())(x) for net in (plain, model)]
    assert same_bits(found[1].detach(), found[0].detach())
    model.read = lambda w: w.detach()[0]
    with pytest.raises(gemini.GeminiError, match="full_param"):
        torch.func.grad(lambda x: model(x).square().sum())(x)


@pytest.mark.parametrize("register", [False, True])
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_functional_call(where: str, register: bool, tmp_path: Path) -> None:
    """Other values take the place of params for one call; what was registered elsewhere meanwhile changes nothing."""
    plain, model = Net(), wrap(Net(), where, tmp_path, precision="fp32")
    values = {name: torch.randn_like(param).mul_(0.1).requires_grad_() for name, param in plain.named_parameters()}
    x, found = noise(4, WIDTH, dtype=torch.float32), []
    if register:
        nn.Linear(1, 1)
    for called in (plain, model):
        loss = torch.func.functional_call(called, values, (x,)).square().mean()
        found.append(
            [loss.detach(), *torch.autograd.grad(loss, [values[name] for name in ("head.weight", "layers.0.inner")])]
        )
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert all(model.full_grad(name) is None for name in values)


# ---- results of modules that are written to in place -----------------------------------------------------------------

# The gradient takes another way through the graph, and is awaited.


class Masked(nn.Module):
    """As SpecAugment does: some rows of a projection are replaced by a learned vector. The projection is a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.mask = nn.Parameter(torch.randn(32))

    def project(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = self.project(i, x)
            assert x._is_view()
            x[:, i] = self.mask.to(x.dtype)
            x = torch.tanh(x)
        return x


class MaskedElsewhere(Masked):
    """The same, by an operation that reads the weights of another module."""

    def project(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layers[i].weight, self.layers[i].bias)


@pytest.mark.parametrize("make", [Masked, MaskedElsewhere])
def test_results_written_to_in_place(make: type[nn.Module], where: str, tmp_path: Path) -> None:
    compare(make, where, tmp_path, squares)


def test_what_a_call_was_given_is_not_awaited() -> None:
    """Its gradient arrives when the call before is being computed backward: no time to gather for this one."""
    begun: list[torch.Tensor] = []
    given = nn.Linear(4, 4)(torch.ones(2, 4))
    record = CallRecord(None, (), None, num_exchanges=0)
    view = given.view(8)
    record.on_gradient(view, begun.append)
    view[0] = 0
    given.sum().backward()
    assert not begun
    made = nn.Linear(4, 4)(torch.ones(2, 3, 4))
    record.on_gradient(made, begun.append)
    made[0] = 0
    made.sum().backward()
    assert len(begun) == 1
