"""Where nothing moves, hooks look once and have nothing to do: how often they are entered, and when they must not be
skipped.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import kernels
from gemini.interrupts import call_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, Event, copy_each
from gemini.planning.planes import GRAD
from gemini.train.params.handle import handles_of
from tests.standin_device import StandinDevice
from tests.train.helpers import Blocks, Plain, adam, noise, squares, step_on, train, train_plain, wrap
from tests.train.test_kept_weights import WIDTH, Net, in_turn
from tests.world import world_of

ROOT = str(Path(gemini.__file__).parent)


def calls_in(do: Callable[[], Any]) -> list[str]:
    """The files of the functions of Gemini that this thread enters."""
    found: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return found


def stack(num_blocks: int, path: Path) -> Any:
    torch.manual_seed(0)
    config = gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=path), overlap=False)
    return gemini.GeminiDDP(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(num_blocks))), config)


def test_a_module_that_moves_nothing_costs_two_calls(tmp_path: Path) -> None:
    """And one for each of torch's layers in half precision, which may be given fp32."""
    x, counts = torch.zeros(1, 16, dtype=torch.bfloat16), []
    for num_blocks in (4, 12):
        model = stack(num_blocks, tmp_path)
        with torch.no_grad():
            model(x)
            counts.append(len(calls_in(lambda model=model: model(x))))
    assert counts[1] - counts[0] <= (2 + 1) * 8


def entered_in_a_step(path: Path) -> dict[str, list[str]]:
    """The files that a whole step of eight params enters where nothing moves, phase by phase, once for each call."""
    model, x = stack(4, path), torch.ones(2, 16, dtype=torch.bfloat16)
    optimizer = gemini.HybridAdam(model.parameters())
    held: dict[str, torch.Tensor] = {}

    def forward() -> None:
        held["loss"] = model(x).float().sum()

    entered: dict[str, list[str]] = {}
    assert kernels.capabilities().native, "what the torch lines of a rule call is no part of a step"
    for _ in range(2):
        entered["forward"] = calls_in(forward)
        entered["backward"] = calls_in(lambda: held["loss"].backward())
        entered["step"] = calls_in(optimizer.step)
        entered["zero_grad"] = calls_in(optimizer.zero_grad)
        entered["drain"] = calls_in(model._gemini_engine.drain)
    return entered


@pytest.mark.slow
def test_a_step_that_moves_nothing_stays_in_few_files(tmp_path: Path) -> None:
    # In a process of its own: where something scales losses or steps in backward, every backward looks into more files.
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        entered = pool.submit(entered_in_a_step, tmp_path).result(timeout=300)
    # A forward looks at the dtype of inputs (a call at the root, one a layer). What an interrupt may not cut in two
    # costs a file.
    # A sink of gradients and a group of one are a file and a call each. That no other thread is in the model costs a
    # file and 8 calls of a backward, and 7 of a step; that sums may still be made as gradients land costs it another.
    # That out of memory a forward may be made once more costs a file and 3 calls, and a file and a call of a backward.
    # That averages may stand in the place of masters, which none may train, costs a call of a backward, and of a step.
    # That arguments of all kernels are checked by one function costs a file of a backward, and no call.
    limits = {"forward": (12, 65), "backward": (10, 90), "step": (18, 241), "zero_grad": (8, 34), "drain": (9, 31)}
    for name, (most, calls) in limits.items():
        assert len(set(entered[name])) <= most, sorted(set(entered[name]))
        assert len(entered[name]) <= calls, (name, len(entered[name]))


def test_nothing_is_looked_for_after_a_step_that_ended_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    optimizer, world = adam(model), world_of(model)
    swept: list[int] = []
    abandon = world.forward.abandon
    monkeypatch.setattr(world.forward, "abandon", lambda: (swept.append(1), abandon()))
    train(model, optimizer, (0, 1), squares)
    assert not swept
    squares(model, 2)  # its backward never comes
    squares(model, 3).backward()
    assert len(swept) == 1


@pytest.mark.parametrize("ends", ["in order", "by an exception", "by an interrupt"])
def test_a_block_is_no_call_of_its_own_inside_a_forward(ends: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    world_of(model).settle()
    state, running, seen = world_of(model).state, world_of(model).calls.running, []

    def look(*_: Any) -> None:
        seen.append([call.module is model for call in running[threading.get_ident()]])
        if ends != "in order":
            raise KeyboardInterrupt if ends == "by an interrupt" else ValueError

    hook = model.layers[1].register_forward_hook(look)
    if ends == "in order":
        squares(model, 0)
    else:
        with pytest.raises((KeyboardInterrupt, ValueError)):
            squares(model, 0)
    hook.remove()
    assert seen == [[True]] and not running
    model.layers[0](noise(2, 32))  # an entrance of its own begins and ends again
    assert not state.computing and not world_of(model).calls.running


def test_a_block_that_another_thread_calls_meanwhile_is_a_call_of_its_own(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    world, found = world_of(model), {}
    world.settle()

    def call() -> None:
        hook = model.layers[2].register_forward_pre_hook(
            lambda *_: found.update(running={t: len(s) for t, s in world.calls.running.items()})
        )
        with torch.no_grad():
            found["result"] = model.layers[2](noise(2, 32))
        hook.remove()

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    hook = model.layers[1].register_forward_hook(meanwhile)
    squares(model, 0)
    hook.remove()
    assert sorted(found["running"].values()) == [1, 1] and len(found["running"]) == 2
    with torch.no_grad():
        assert torch.equal(found["result"], model.layers[2](noise(2, 32)))
    assert not world.calls.running


def test_a_block_inside_a_forward_waits_for_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step inside ``gathered()``, where params are ordinary ones already: the blocks wait, each for its own."""
    memory = gemini.MemoryBudget(cpu="1GiB")
    config = gemini.GeminiConfig(memory=memory, device="cpu", update_threads=1, max_chunk=1024)
    model, plain = gemini.GeminiDDP(Blocks(), config), Plain(Blocks())
    optimizer, late, awaited = adam(model), world_of(model).forward.exposure.late, list[int]()
    squares(model, 0).backward()
    train_plain(plain, [0], squares, clip=None)
    update = kernels.update

    def slow(*args: Any) -> bool:
        time.sleep(0.1)
        return update(*args)

    monkeypatch.setattr(kernels, "update", slow)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: awaited.append(len(late)))
    with model.gathered(), torch.no_grad():
        optimizer.step()
        loss = squares(model, 1)
    assert awaited == [4, 2, 0], "each block waits for its own"
    with torch.no_grad():
        assert torch.equal(loss, squares(plain.model, 1))


def test_gradients_wait_for_an_update_that_begins_in_their_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that steps inside backward, by a hook of its own: the short way of gradients is not taken then."""
    model = wrap(Blocks(), "ram", tmp_path)
    updates, gradients = world_of(model).updates, world_of(model).gradients
    landed, waited = list[Any](), list[Any]()
    land = gradients.land

    def begins(handle: Any, grad: torch.Tensor, num_to_come: int = 0) -> None:
        land(handle, grad, num_to_come)
        landed.append(handle)
        updates.pending[-1] = None

    loss = squares(model, 0)
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "land", begins)
        patch.setattr(Chunk, "settle", lambda chunk: waited.append(chunk))
        loss.backward()
    del updates.pending[-1]
    assert len(landed) == 6 and waited == [handle.chunk for handle in landed[1:]]


def test_what_is_prepared_lasts_as_long_as_planes_do(tmp_path: Path) -> None:
    """Sums take the place of gradients between two steps, and those come back: nobody looks at memory of before."""
    model, plain = wrap(Blocks(), "ram", tmp_path), Plain(Blocks())
    optimizer, chunk = adam(model), world_of(model).chunks[1]
    step_on(squares(model, 0), optimizer)
    train_plain(plain, [0], squares, clip=None)
    kept, planes = dict(chunk.prepared), [weakref.ref(chunk.planes[GRAD]), weakref.ref(chunk.planes[GRAD].tensor)]
    assert len(kept) == 4  # two params land, and are updated, in a way that was looked for
    squares(model, 1).backward()
    assert chunk.prepared == kept
    del kept
    squares(model, 2).backward()
    assert [plane() for plane in planes] == [None, None] and len(chunk.prepared) == 2
    optimizer.step()
    for seed in (1, 2):
        plain.backward(squares(plain.model, seed))
    plain.step()
    assert torch.equal(squares(model, 3), squares(plain.model, 3))


def test_a_hyperparameter_that_changes_in_place_is_looked_at_again(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    optimizer = gemini.HybridAdam(model.parameters(), lr=torch.tensor(1e-3))
    for bad in (None, float("nan")):
        squares(model, 0).backward()
        if bad is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.param_groups[0]["lr"].fill_(bad)
            with pytest.raises(ValueError, match="lr of param group 0"):
                optimizer.step()


def test_views_of_a_plane_are_made_once_and_none_in_inference_mode(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path)
    plane = world_of(model).chunks[0].weights
    with torch.inference_mode():
        first = plane.host_view(0, 64)
    assert first is not None and plane.host_view(0, 64) is not first
    again = plane.host_view(0, 64)
    assert again is plane.host_view(0, 64) and torch.equal(again, first)


def test_two_tensors_are_checked_as_many_are() -> None:
    memory = torch.zeros(64)
    refused = [
        (memory[:32], torch.zeros(31)), (memory[::2], torch.zeros(32)),
        (memory[:32].to(torch.float16), torch.zeros(32)),
        (memory[:32].view(4, 8), torch.zeros(32)), (memory[:32], torch.zeros(32, dtype=torch.int32)),
    ]  # fmt: skip
    for into, source in refused:
        with pytest.raises(ValueError, match="copy_grad"):
            kernels.copy_grad(into, source)
    assert kernels.copy_grad(memory[:32], memory[32:]) == [0.0] and kernels.copy_grad(memory[:0], memory[:0]) == []


def test_what_a_block_of_moving_weights_costs(tmp_path: Path) -> None:
    """Calls of ours in the thread that launches, for a block of three layers that move together: most are its gather,
    and gradients that land. Where each of the layers looked for room, a forward had 474; where each took its guard
    away and put it back, 330. Some loss of the process was scaled: then each backward is asked for its scale, and no
    param.
    """
    gemini.GradScaler("cpu").scale(torch.ones((), requires_grad=True))

    def make(num_blocks: int) -> Any:
        (tmp_path / str(num_blocks)).mkdir()
        return wrap(Net(in_turn, num_blocks), "serial", tmp_path / str(num_blocks), precision="fp32", slack=2**18)

    each = calls_of_a_block(make)
    assert each["forward"] <= 139, each
    assert each["backward"] <= 322, each


class AtOnce(StandinDevice):
    """A stand-in whose copies are over when they have begun, so that nothing depends on another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[int] = []
        """Of how many gradients were copied together, one call after another."""

    def copy(self, into: torch.Tensor, source: torch.Tensor, *_: Any, **how: Any) -> Event:
        call_without_grad(copy_each, [(into, source)])
        return DONE

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str) -> Event:
        self.together.append(len(pairs))
        call_without_grad(copy_each, pairs)
        return DONE


def test_what_a_block_costs_whose_gradients_leave_a_gpu() -> None:
    """The same where weights come from host memory and gradients go there as they are: the way of most models. Where
    each gradient left by itself, a backward had 260.
    """

    each = calls_of_a_block(lambda num_blocks: on_standin(AtOnce(), num_blocks))
    assert each["forward"] <= 69, each
    assert each["backward"] <= 97, each


def on_standin(device: StandinDevice, num_blocks: int) -> Any:
    memory, placement = gemini.MemoryBudget(gpu="1MiB", cpu="64MiB"), gemini.StaticPlacement(weights_on_gpu=0)
    config = gemini.GeminiConfig(memory=memory, placement=placement, device=device, precision="fp32")
    return gemini.GeminiDDP(Net(in_turn, num_blocks), config)


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return model(noise(2, WIDTH, seed=seed, dtype=torch.float32)).sum()  # type: ignore[no-any-return]


def test_gradients_of_the_last_block_leave_as_they_come() -> None:
    """Behind it nothing is computed while they are copied. Which one comes last is known from the backward before."""
    device = AtOnce()
    model = on_standin(device, 3)
    optimizer = adam(model)
    for seed, last in ((0, [6]), (1, [1] * 6), (2, [1] * 6)):
        device.together.clear()
        step_on(loss_of(model, seed), optimizer)
        assert device.together == [1, 5, 6, *last]  # the first of a backward finds out what is to be done with the rest


class ThirdFails(StandinDevice):
    """A stand-in that refuses the third copy of each that are given together, once it is told to."""

    refuses = False

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: str, *how: Any, **more: Any) -> Event:
        if self.refuses and stream == "evict":
            if len(self.begun) == 2:
                raise RuntimeError("a copy that cannot be begun")
            self.begun.append(super().copy(into, source, stream, *how, **more))
            return self.begun[-1]
        return super().copy(into, source, stream, *how, **more)


def test_an_error_in_the_middle_of_copies_leaves_none_in_flight() -> None:
    """The third of five: the memory of the first two is given back with all others'."""
    device = ThirdFails(gate=lambda stream: time.sleep(0.05))
    model, other = on_standin(device, 3), on_standin(AtOnce(), 3)
    optimizer, plain = adam(model), adam(other)
    step_on(loss_of(model, 0), optimizer)
    step_on(loss_of(other, 0), plain)
    world = world_of(model)
    loss = loss_of(model, 1)
    device.begun, device.refuses = list[Event](), False
    world.chunks[2].settle()
    handles = [handle for handle in handles_of(model.parameters()) if handle.chunk is world.chunks[2]]

    def refuse(param: torch.Tensor) -> None:
        device.refuses = True  # from the second gradient of the first block on

    hook = handles[-1].param.register_post_accumulate_grad_hook(refuse)
    with pytest.raises(gemini.GeminiError, match=r"gradients of chunk 2 .* did not leave standin: a copy that cannot"):
        loss.backward()
    device.refuses = False
    hook.remove()
    assert len(device.begun) == 2 and all(copy.is_complete() for copy in device.begun)
    world.gradients.drain()  # that of the first gradient, which left by itself
    assert world.ledger.held(device.tier, "gradients in flight") == 0
    assert sum(handle.has_grad for handle in handles) <= 1
    optimizer.zero_grad()
    for seed in (1, 2):
        step_on(loss_of(model, seed), optimizer)
        step_on(loss_of(other, seed), plain)
    assert torch.equal(loss_of(model, 3), loss_of(other, 3))


def calls_of_a_block(make: Callable[[int], Any]) -> dict[str, float]:
    """Calls in a forward and in a backward, for one of the blocks of a model."""
    counts: dict[str, list[int]] = {"forward": [], "backward": []}
    for num_blocks in (4, 12):
        model = make(num_blocks)
        optimizer, held = adam(model), dict[str, torch.Tensor]()

        def forward(model: Any = model, held: dict[str, torch.Tensor] = held) -> None:
            held["loss"] = model(noise(2, WIDTH, dtype=torch.float32)).sum()

        found: dict[str, list[int]] = {"forward": [], "backward": []}
        for _ in range(12):
            found["forward"].append(len(calls_in(forward)))
            found["backward"].append(len(calls_in(lambda held=held: held["loss"].backward())))
            optimizer.step()
            optimizer.zero_grad()
        for name, calls in found.items():
            # The least: a wait for the drive looks again and again where others have the processor.
            counts[name].append(min(calls))
    return {name: (calls[1] - calls[0]) / 8 for name, calls in counts.items()}
