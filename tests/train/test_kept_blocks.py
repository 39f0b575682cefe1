"""Blocks that a model which checkpoints keeps: the same bits, just their bytes, and a model that is as it was."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.errors import PlanMismatch
from gemini.memory.devices.device import Event
from gemini.memory.movement.transfers import Lane
from gemini.planning import working
from gemini.planning.trace import kept_among
from gemini.tiers import Tier
from gemini.train.activations.flights import IN_FLIGHT, Flight, Flights
from gemini.train.activations.kept import INSIDE, KeptBlocks
from tests.standin_device import StandinDevice
from tests.standins import RandomClock
from tests.train.helpers import least, llama, manage, t5
from tests.train.test_activations import HIDDEN, LAYERS, SHAPE, batch, enable, held, train
from tests.world import world_of

INPUT = SHAPE[0] * SHAPE[1] * HIDDEN * 2


def wrap(model: nn.Module, folder: Path, device: Any, offload: str | None, kept: int, **more: Any) -> Any:
    budget = {"cpu": "32MiB", "gpu": None if device == "cpu" else "32MiB", "nvme": "32MiB"}
    return manage(model, folder, device, **budget, **more, offload_activations=offload, kept_blocks=kept).train()


def recomputed(model: nn.Module, device: str = "cpu") -> int:
    """How many calls of blocks a backward makes."""
    calls = []
    inner = [own for block in KeptBlocks(model, 99).blocks for own in block.children() if hasattr(own, "q_proj")]
    hooks = [own.register_forward_pre_hook(lambda *_: calls.append(1)) for own in inner]
    loss = model(**batch()).loss
    calls.clear()
    loss.backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return len(calls)


@pytest.mark.parametrize("make", [lambda: llama(dropout=0.1), lambda: t5(dropout=0.1)], ids=["llama", "t5"])
@pytest.mark.parametrize(
    ("device", "offload"), [("cpu", None), ("cpu", "nvme"), ("standin", None), ("standin", "cpu"), ("standin", "nvme")]
)
def test_the_same_bits(make: Any, device: str, offload: str | None, tmp_path: Path) -> None:
    """Of dropout too, for no kept block, one, and all; the more are kept the more waits."""
    results = []
    for kept in (0, 1, 99):
        model = wrap(make(), tmp_path, device, offload, kept)
        enable(model)
        results.append(train(model))
    (plain, least, masters), *others = results
    for losses, waits, same_masters in others:
        assert losses == plain
        assert all(torch.equal(value, same_masters[name]) for name, value in masters.items())
        assert list(waits) == ([offload] if offload else []) and sum(waits.values()) >= sum(least.values())
        least = waits
    if offload:
        assert sum(others[1][1].values()) > sum(others[0][1].values()) > sum(results[0][1].values())


def test_kept_ones_are_spread_and_the_last_is_one_of_them() -> None:
    assert kept_among(8, 3) == [2, 5, 7] and kept_among(8, 1) == [7] and kept_among(3, 5) == [0, 1, 2]
    for of in range(1, 20):
        for number in range(of + 1):
            kept = kept_among(of, number)
            gaps = {after - before for before, after in zip([-1, *kept], kept, strict=False)}
            assert len(kept) == number and max(gaps, default=0) - min(gaps, default=0) <= 1
            assert not kept or kept[-1] == of - 1


@pytest.mark.parametrize("kept", [0, 1, 2, LAYERS])
def test_kept_ones_are_not_computed_again(kept: int, tmp_path: Path) -> None:
    """Also where checkpointing is switched on, and once more, after the wrap; released, all are again."""
    for number, model in enumerate([llama(), llama()]):
        if number:
            enable(model)
        managed = wrap(model, tmp_path, "cpu", None, kept)
        for _ in range(2):
            enable(managed)
            assert recomputed(managed) == LAYERS - kept
        gemini.release(managed)
        assert recomputed(managed.float()) == LAYERS
        assert not INSIDE.kept


@pytest.mark.parametrize("device", ["standin", "cpu"])
def test_what_waits_is_what_the_trace_says(device: str, tmp_path: Path) -> None:
    """To the page: by arithmetic of the trace in the ledger, and as often as it is brought back."""
    offload = "cpu" if device == "standin" else "nvme"
    for kept in (1, LAYERS):
        plain = llama()
        enable(plain)
        traced = gemini.trace(plain, batch(), target="cpu", kept_blocks=kept)
        # In turn: what has not left when it is asked for is brought from nowhere.
        model = wrap(plain, tmp_path, device, offload, kept, overlap=device == "standin")
        loss = model(**batch()).loss
        assert traced.kept_blocks == kept and held(model) == {offload: traced.checkpoint_bytes}
        assert sum(m.saved_bytes for m in traced.moments) == traced.checkpoint_bytes
        assert sum(m.restored_bytes for m in traced.moments) == traced.checkpoint_bytes
        loss.backward()
        assert held(model) == {}
        if device == "cpu":
            assert world_of(model).moved()["nvme->cpu"] == traced.checkpoint_bytes
        model.zero_grad()
        world_of(model).check()


def test_what_one_block_saves_is_on_its_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more: by the arithmetic of the plan, which counts it. No byte leaves before all of a block wants to."""
    monkeypatch.setattr(working, "FLIGHTS", dict.fromkeys(Tier, 0))
    plain = llama()
    enable(plain)
    most = working.flight_bytes(gemini.trace(plain, batch(), target="cpu", kept_blocks=LAYERS))
    is_full, seen, sizes, begin = threading.Event(), list[int](), list[int](), Flights._begin_save

    def watched(flights: Flights, flight: Flight, offloaded: Any, tensor: torch.Tensor) -> None:
        seen.append(flights._ledger.held(Tier.GPU, IN_FLIGHT))
        sizes.append(offloaded.num_bytes)
        if seen[-1] == most:
            is_full.set()
        begin(flights, flight, offloaded, tensor)

    monkeypatch.setattr(Flights, "_begin_save", watched)
    there = StandinDevice(gate=lambda stream: assert_(stream != "offload" or is_full.wait(30)))
    model = wrap(plain, tmp_path, there, "cpu", LAYERS)
    loss = model(**batch()).loss
    assert max(seen) == most > 2 * max(sizes)
    loss.backward()
    model.zero_grad()
    assert held(model) == {} and world_of(model).ledger.held(Tier.GPU, IN_FLIGHT) == 0
    world_of(model).check()


def test_the_memory_of_what_backward_took_while_it_left_goes_at_the_block_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of the last block are not over when backward uses it, and are waited for behind it: its bytes are in
    the ledger no more, and the block before it may have them.
    """
    is_last, is_open, left = threading.Event(), threading.Event(), list[bool]()
    there = StandinDevice(gate=lambda stream: assert_(stream != "offload" or not is_last.is_set() or is_open.wait(30)))
    model = wrap(llama(), tmp_path, there, "cpu", LAYERS)
    enable(model)
    flights, take, end = world_of(model).activations.flights, Flights.take, Flights._end_save

    def enter(*_: Any) -> None:
        for flight in flights.saving.values():
            flight.outcome()
        flights.reap()
        is_last.set()

    def watched(own: Flights, offloaded: Any) -> Any:
        flight = offloaded.flight
        values = take(own, offloaded)
        if flight is None or flight.lane is Lane.RESTORE:
            assert not any(other.taken for other in own.saving.values())
        return values

    monkeypatch.setattr(Flights, "take", watched)
    monkeypatch.setattr(Flights, "_end_save", lambda own, of: (left.append(of.taken), is_open.set(), end(own, of)))
    model.model.layers[-1].register_forward_pre_hook(enter)
    loss = model(**batch()).loss
    assert flights.saving and not left
    loss.backward()
    is_open.set()
    assert any(left) and not flights.saving
    model.zero_grad()
    assert held(model) == {} and world_of(model).ledger.held(Tier.GPU, IN_FLIGHT) == 0
    world_of(model).check()


@pytest.mark.sweep(every=2)
def test_in_any_room_and_at_any_speed_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the least budget on, with copies that take their time: what is not there in time is waited for."""
    monkeypatch.setattr(working, "FLIGHTS", dict.fromkeys(Tier, 0))
    plain = wrap(llama(), tmp_path, "cpu", None, 0)
    enable(plain)
    losses, _, masters = train(plain)

    def make(budget: int, kept: int = 2, gate: Any = None) -> Any:
        there = StandinDevice(gate=gate, poison=True)
        memory = {"cpu": "32MiB", "gpu": budget, "nvme": "32MiB"}
        return manage(llama(), tmp_path, there, **memory, offload_activations="cpu", kept_blocks=kept).train()

    low = least(make, 4096)
    for seed, slack in enumerate((0, INPUT, 3 * INPUT, 12 * INPUT, 40 * INPUT)):
        model = make(low + slack, 1 + seed % LAYERS, RandomClock(seed))
        enable(model)
        found, _, own = train(model)
        assert found == losses and all(torch.equal(value, own[name]) for name, value in masters.items())
        assert world_of(model).peak(Tier.GPU) <= low + slack
        world_of(model).check()


def test_what_a_node_saves_leaves_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a copy of it on the device: only what a checkpoint saves may be overwritten, and is copied."""
    copied, own, begin = list[int](), list[int](), Flights._begin_save

    def watched(flights: Flights, flight: Flight, offloaded: Any, tensor: torch.Tensor) -> None:
        begin(flights, flight, offloaded, tensor)
        assert flight.on_device is not None and flight.on_device.stride() == offloaded.stride
        (own if flight.on_device.data_ptr() == tensor.data_ptr() else copied).append(tensor.nbytes)

    monkeypatch.setattr(Flights, "_begin_save", watched)
    for kept in (0, LAYERS):
        model = wrap(llama(), tmp_path, "standin", "cpu", kept)
        enable(model)
        loss = model(**batch()).loss
        assert (sum(own) > 3 * sum(copied) and {*own} > {INPUT}) if kept else (copied and not own)
        copied.clear()
        loss.backward()
        model.zero_grad()


@pytest.mark.parametrize("is_away", [False, True])
def test_what_a_node_saved_is_not_overwritten_unnoticed(is_away: bool, tmp_path: Path) -> None:
    """While it leaves its copy may be torn: refused as torch refuses it. When it is away nobody reads it there."""
    gate = threading.Event()
    there = StandinDevice(gate=lambda stream: assert_(stream != "offload" or gate.wait(30)))
    model = manage(Own(1), tmp_path, there, cpu="32MiB", gpu="32MiB", offload_activations="cpu", kept_blocks=1).train()
    saved, flights = list[torch.Tensor](), world_of(model).activations.flights
    handle = model.blocks[0].up.register_forward_hook(lambda _, args, out: saved.append(args[0]))
    out = model(torch.randn(1024, 16).bfloat16().requires_grad_())
    handle.remove()
    assert flights.saving
    if is_away:
        gate.set()
        flights.drain()
    with torch.no_grad():
        saved[0].zero_()
    if is_away:
        out.sum().backward()
        assert model.full_grad("blocks.0.up.weight").any()
    else:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation: .* is at version"):
            out.sum().backward()
    gate.set()
    model.zero_grad()
    world_of(model).settle()
    assert world_of(model).ledger.held(Tier.GPU, IN_FLIGHT) == 0


def test_an_interrupt_anywhere_leaves_nothing(tmp_path: Path) -> None:
    """Beside every entry in the books and every wait, in forward and backward of blocks that are all kept."""
    model = wrap(llama(), tmp_path, "standin", "cpu", LAYERS)
    enable(model)
    ledger, fired = world_of(model).ledger, 0
    for chosen in range(5, 400, 41):
        calls, patches = [], pytest.MonkeyPatch()
        for owner, name in ((Event, "wait"), (type(ledger), "reserve_if_room"), (type(ledger), "release")):
            real = getattr(owner, name)

            def call(*args: Any, real: Any = real, calls: list[int] = calls, chosen: int = chosen, **how: Any) -> Any:
                result = real(*args, **how)
                if threading.current_thread() is threading.main_thread():
                    calls.append(1)
                    if len(calls) == chosen:
                        raise KeyboardInterrupt
                return result

            patches.setattr(owner, name, call)
        try:
            model(**batch()).loss.backward()
        except KeyboardInterrupt:
            fired += 1
        finally:
            patches.undo()
        gc.collect()
        model.zero_grad()
        world_of(model).settle()
        assert held(model) == {} and ledger.held(Tier.GPU, IN_FLIGHT) == ledger.held(Tier.CPU, IN_FLIGHT) == 0
        world_of(model).check()
    assert fired >= 4


def assert_(condition: bool) -> None:
    assert condition


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.gradient_checkpointing else self.inside(x)


class Own(nn.Module):
    def __init__(self, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


@pytest.mark.parametrize(("device", "offload"), [("cpu", "nvme"), ("standin", "cpu"), ("standin", None)])
def test_a_model_of_ones_own_with_flags(device: str, offload: str | None, tmp_path: Path) -> None:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    seen = []
    for kept in (0, 2):
        model = wrap(Own(), tmp_path, device, offload, kept)
        torch.manual_seed(1)
        loss = model(x.to(world_of(model).device.torch_device))
        waits = sum(held(model).values())
        loss.backward()
        norm = model.clip_grad_norm_(1.0).item()
        seen.append((loss.item(), norm, waits))
        assert [block.gradient_checkpointing for block in model.blocks] == [place < 3 - kept for place in range(3)]
        gemini.release(model)
        assert all(block.gradient_checkpointing for block in model.blocks)
    assert seen[0][:2] == seen[1][:2] and (seen[1][2] > seen[0][2]) is (offload is not None)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be told which of them to compute again"):
        wrap(nn.Sequential(nn.Linear(16, 16)), tmp_path, "cpu", None, 1)
    for wrong in (-1, True, "2"):
        with pytest.raises(ValueError, match="kept_blocks= is a number of blocks"):
            gemini.GeminiConfig(kept_blocks=wrong)  # type: ignore[arg-type]
    plain = llama()
    enable(plain)
    config = gemini.GeminiConfig(
        precision="bf16", device="cpu", trace=gemini.trace(plain, batch(), kept_blocks=1), kept_blocks=2
    )
    with pytest.raises(PlanMismatch, match="the trace has kept_blocks=1, and this run has 2"):
        gemini.GeminiDDP(plain, config)


def test_a_backward_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """In the middle of the products of one input, whose values are kept for the next of them."""
    model = wrap(llama(), tmp_path, "standin", "cpu", LAYERS)
    enable(model)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("broken off")

    def hooked(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(hooked)
    loss = model(**batch()).loss
    with pytest.raises(RuntimeError, match="broken off"):
        loss.backward()
    hook.remove()
    del loss
    model.zero_grad()
    model(**batch()).loss.backward()
    model.zero_grad()
    assert held(model) == {} and world_of(model).ledger.held(Tier.CPU, "activations in flight") == 0
    world_of(model).check()


def test_what_is_kept_waits_below_when_blocks_are_compiled_later(tmp_path: Path) -> None:
    """As where they were compiled before; else it would stay on the device that computes, which has no room for it."""
    waits = []
    for compiles in (lambda _: None, lambda model: model.compile(backend="eager")):
        model = wrap(llama(), tmp_path, "standin", "cpu", LAYERS)
        enable(model)
        compiles(model)
        for step in range(2):
            loss = model(**batch(step)).loss
            waits.append(held(model))
            loss.backward()
            model.zero_grad()
        released = gemini.release(model)
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in KeptBlocks(released, 99).blocks)
    assert waits[0]["cpu"] > 0 and waits == [waits[0]] * 4
