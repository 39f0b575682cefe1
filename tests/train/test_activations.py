"""Offload of checkpointed activations: the same bits, just the bytes of the blocks' inputs, and nothing left over."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.planning.working import staging_bytes
from gemini.tiers import Tier
from gemini.train.activations import store as activations
from tests.train import helpers
from tests.train.helpers import llama, manage, t5
from tests.world import world_of

SHAPE = (4, 128)
HIDDEN, LAYERS = 32, 3
INPUTS = LAYERS * SHAPE[0] * SHAPE[1] * HIDDEN * 2
"""Bytes of the inputs of all blocks, in bf16: a multiple of a page."""


def wrap(model: nn.Module, folder: Path, offload: str | None, device: str = "cpu", **changes: Any) -> Any:
    budget = {"cpu": "16MiB", "gpu": "16MiB" if device == "standin" else None, "nvme": "16MiB", **changes}
    return manage(model, folder, device, **budget, offload_activations=offload).train()


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 96, SHAPE, generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def enable(model: Any, *, reentrant: bool = False) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})


def held(model: Any) -> dict[str, int]:
    world_of(model).activations.parked.trim()
    ledger = world_of(model).ledger
    # Not on the GPU: there the first step sets more aside, if torch's allocator took more than was foretold.
    below = [tier for tier in ledger.tiers if tier is not Tier.GPU]
    return {tier.value: n for tier in below if (n := ledger.held(tier, "activations"))}


def test_buffers_of_host_memory_stay_for_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has memory page-locked for each that is made; who needs the bytes gets them."""
    model, made = wrap(llama(), tmp_path, "cpu", "standin"), list[int]()
    enable(model)
    world, real = world_of(model), world_of(model).device.make_host_buffer
    monkeypatch.setattr(world.device, "make_host_buffer", lambda size: made.append(size) or real(size))
    for step in range(2):
        made.clear()
        model(**batch(step)).loss.backward()
        model.zero_grad()
    assert not made and world.ledger.held(Tier.CPU, "activations") == INPUTS
    assert world.ledger.make_room(Tier.CPU, world.ledger.free(Tier.CPU) + INPUTS)
    assert not world.ledger.held(Tier.CPU, "activations")


def hooks_are_open() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def train(model: Any, batch: Any = batch) -> tuple[list[float], dict[str, int], dict[str, torch.Tensor]]:
    """Losses, what activations held after each forward, which is the same, and the masters."""
    after_forward: list[dict[str, int]] = []

    def loss_of(model: Any, step: int) -> torch.Tensor:
        loss = model(**batch(step)).loss
        after_forward.append(held(model))
        return loss

    torch.manual_seed(1)  # dropout
    losses = helpers.train(model, helpers.adam(model), range(3), loss_of)
    world_of(model).check()
    assert held(model) == {} and not hooks_are_open()
    assert after_forward == after_forward[:1] * 3
    return losses, after_forward[0], model.state_dict(dtype=torch.float32)


@pytest.mark.parametrize("make", [lambda: llama(dropout=0.1), lambda: t5(dropout=0.1)], ids=["llama", "t5"])
@pytest.mark.parametrize(("device", "offload"), [("cpu", "nvme"), ("standin", "cpu"), ("standin", "nvme")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bits(make: Any, device: str, offload: str, reentrant: bool, tmp_path: Path) -> None:
    results = []
    for wish in (None, offload):
        model = wrap(make(), tmp_path, wish, device)
        enable(model, reentrant=reentrant)
        results.append(train(model))
    (plain, nothing, masters), (moved, activations_held, same_masters) = results
    assert moved == plain
    assert nothing == {} and list(activations_held) == [offload]
    assert all(torch.equal(value, same_masters[name]) for name, value in masters.items())


@pytest.mark.parametrize(("device", "offload"), [("cpu", "nvme"), ("standin", "cpu")])
def test_just_the_inputs_of_the_blocks_are_in_the_ledger(device: str, offload: str, tmp_path: Path) -> None:
    model = wrap(llama(), tmp_path, offload, device)
    enable(model)
    loss = model(**batch()).loss
    assert held(model) == {offload: INPUTS}
    world_of(model).check_ledger()
    loss.backward()
    assert held(model) == {}
    model.zero_grad()


def test_what_several_blocks_were_given_is_stored_once(tmp_path: Path) -> None:
    """The encoder's output goes into both decoder blocks: 2 inputs of encoder blocks, 2 of decoder blocks, and it."""
    model = wrap(t5(), tmp_path, "nvme")
    enable(model)
    model(**batch())
    hidden = SHAPE[0] * SHAPE[1] * HIDDEN * 2
    bias = 2 * SHAPE[1] * SHAPE[1] * 2  # position biases, which second blocks are given: encoder, decoder, and between
    assert held(model)["nvme"] == 5 * hidden + 3 * bias


def test_without_checkpointing_nothing_moves(tmp_path: Path) -> None:
    model = wrap(llama(), tmp_path, "nvme")
    model(**batch()).loss.backward()
    assert world_of(model).held(gemini.Tier.NVME, "activations") == 0
    assert "cpu->nvme" not in world_of(model).moved()


@pytest.mark.parametrize("offload", [None, "nvme"])
def test_the_inputs_leave_the_computing_tier(offload: str | None, tmp_path: Path) -> None:
    model = wrap(llama(), tmp_path, offload)
    enable(model)
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].untyped_storage()._weak_ref()))
    loss = model(**batch()).loss
    assert torch.UntypedStorage._expired(seen[0]) == (offload is not None)
    loss.backward()


def test_a_forward_that_fails_closes_the_hooks(tmp_path: Path) -> None:
    model = wrap(llama(), tmp_path, "nvme")
    enable(model)
    with pytest.raises(Exception, match="boom"):
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        model(**batch())
    handle.remove()
    assert not hooks_are_open()
    gc.collect()
    model(**batch()).loss.backward()
    assert held(model) == {}


def test_evaluation_moves_nothing(tmp_path: Path) -> None:
    model = wrap(llama(), tmp_path, "nvme")
    enable(model)
    with torch.no_grad():
        model(**batch())
        assert held(model) == {} and not hooks_are_open()


def test_no_room_is_said_once_and_costs_no_bits(tmp_path: Path) -> None:
    plain = wrap(llama(), tmp_path, None)
    enable(plain)
    expected = train(plain)[0]
    model = wrap(llama(), tmp_path, "nvme", nvme=INPUTS // LAYERS)
    enable(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, after_forward, _ = train(model)
    said = [str(w.message) for w in caught if "offload_activations" in str(w.message)]
    assert losses == expected and after_forward == {"nvme": INPUTS // LAYERS}
    assert len(said) == 1 and "stay on cpu for lack of room" in said[0] and "Raise the nvme budget" in said[0]


def test_layout_and_views_come_back(tmp_path: Path) -> None:
    """Inputs that are transposed or a part of something larger, in a model that calls checkpoint itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
            self.strides: list[tuple[int, ...]] = []

        def block(self, x: torch.Tensor) -> torch.Tensor:
            self.strides.append(x.stride())
            return torch.tanh(self.b(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            first = checkpoint(self.block, y.t(), use_reentrant=False)
            second = checkpoint(self.block, y[:, :].contiguous()[16:80], use_reentrant=False)
            return first.float().sum() + second.float().pow(2).sum()

    gradients = []
    for offload in (None, "nvme"):
        torch.manual_seed(1)
        model = wrap(Model(), tmp_path, offload)
        model(torch.randn(128, 128, dtype=torch.bfloat16)).backward()
        assert model.strides == [(1, 128), (128, 1), (128, 1), (1, 128)]
        gradients.append([model.full_grad(name) for name, _ in model.named_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Spread(nn.Module):
    """Neighbours of a graph, which a checkpointed block is given beside the values of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def block(self, neighbours: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.sparse.mm(neighbours, x.float())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        neighbours = torch.eye(len(x), device=x.device).roll(1, 0).to_sparse()
        return checkpoint(self.block, neighbours, x, use_reentrant=False).sum()


def test_what_is_not_dense_stays(tmp_path: Path) -> None:
    gradients = []
    for offload in (None, "cpu"):
        torch.manual_seed(1)
        model = wrap(Spread(), tmp_path, offload, "standin", precision="fp32")
        model(torch.randn(256, 64)).backward()
        gradients.append([model.full_grad(name) for name, _ in model.named_parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_small_tensors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", INPUTS)
    model = wrap(llama(), tmp_path, "nvme")
    enable(model)
    model(**batch())
    assert held(model) == {}


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offload_activations='disk' is not known"):
        gemini.GeminiConfig(offload_activations="disk")
    with pytest.raises(ValueError, match="needs MemoryBudget\\(nvme_path="):
        gemini.GeminiConfig(offload_activations="nvme")
    with pytest.warns(UserWarning, match="no effect: forward and backward run on the cpu"):
        wrap(llama(), tmp_path, "cpu")


class Recomputed(nn.Module):
    """A block under activation checkpointing, of two layers that a budget has no room for together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False).float().pow(2).mean()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_weight_is_gathered_after_its_block_was_recomputed(retain_graph: bool, tmp_path: Path) -> None:
    """Backward asks for the weight of the last layer before its input, which only the whole block gives."""
    one_layer = 2 * 64 * 128
    memory = gemini.MemoryBudget(cpu=2 * staging_bytes(64 * 128) + one_layer, nvme="1MiB", nvme_path=tmp_path)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(device="cpu", memory=memory, placement=placement, max_chunk=64)
    model, x = gemini.GeminiDDP(Recomputed(), config), torch.ones(4, 64, dtype=torch.bfloat16)
    loss = model(x)
    loss.backward(retain_graph=retain_graph)
    if retain_graph:  # recomputed once more, in another backward
        model.zero_grad()
        loss.backward()
    plain = Recomputed().bfloat16()
    plain(x).backward()
    for name, param in plain.named_parameters():
        assert torch.equal(model.full_grad(name), param.grad)
