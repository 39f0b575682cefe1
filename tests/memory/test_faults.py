"""Every read, write, reservation, growth and page move fails in turn, and the world is looked at after each.

First a step is run with a counter in place of each such call, then once for each of them with that one raising. In
forward and backward nothing is lost: after ``zero_grad()`` the same step gives the bits of an undisturbed run. In an
update some bytes may have been written when the fault came; then every param must be wholly before or wholly after its
update, or the model must say, whenever it is used again, that its state is lost. The ledger never passes its budget.

Everything is done in turn here (``overlap=False``), so that each call belongs to one phase.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cases import Net, batch, make_net, masters, same, wrap

import gemini
from gemini import kernels
from gemini.errors import BudgetExceeded, GeminiError
from gemini.ledger import Ledger
from gemini.memory import nvme
from gemini.memory.devices.pages import Pages
from tests.world import world_of


class Faults:
    """Counts the calls of one kind; the ``chosen`` one (from 1) fails."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str):
        self.calls = 0
        self.chosen = 0
        self.phase = ""
        self.phases: list[str] = []
        """The phase of training in which each call came."""
        targets: dict[str, tuple[Any, str, Callable[[], BaseException]]] = {
            "read": (kernels.IoQueue, "submit_read", lambda: OSError(errno.EIO, "Input/output error")),
            "write": (kernels.IoQueue, "submit_write", lambda: OSError(errno.EIO, "Input/output error")),
            "torn write": (kernels.IoQueue, "submit_write", lambda: OSError(errno.EIO, "Input/output error")),
            "reserve": (Ledger, "reserve", lambda: BudgetExceeded("chosen to fail")),
            "allocate": (nvme.os, "posix_fallocate", lambda: OSError(errno.ENOSPC, "No space left on device")),
            "move pages": (Pages, "move_to", lambda: OSError(errno.ENOMEM, "Cannot allocate memory")),
        }
        owner, name, error = targets[kind]
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.phases.append(self.phase)
            if self.calls == self.chosen:
                if kind == "torn write":
                    queue, fd, address, nbytes, offset, urgent = args
                    queue.wait(real(queue, fd, address, max(4096, nbytes // 8192 * 4096), offset, urgent))
                raise error()
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    def start(self, chosen: int) -> None:
        self.calls, self.chosen, self.phases = 0, chosen, []


def one_step(model: Any, optimizer: gemini.HybridAdam, step: int, faults: Faults | None, micro: int) -> None:
    def enter(phase: str) -> None:
        if faults is not None:
            faults.phase = phase

    for number in range(micro):
        enter("forward")
        loss = model(batch(step + 10 * number))
        enter("backward")
        loss.backward()
    enter("clip")
    model.clip_grad_norm_(1.0)
    enter("update")
    optimizer.step()
    enter("")
    optimizer.zero_grad()


def make(directory: Path) -> tuple[Any, gemini.HybridAdam]:
    """All planes in the spill file; a budget in which chunks have to make room for each other; one step made."""
    model, optimizer = wrap(make_net(blocks=2), directory, cpu="116KiB", overlap=False)
    one_step(model, optimizer, 0, None, 1)
    return model, optimizer


def check(model: Any) -> None:
    world = world_of(model)
    world.check_windows()
    for tier in world.tiers:
        assert world.peak(tier) <= world.budget(tier)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini.planning.working.TILE", 4096)


def reference(directory: Path, micro: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Masters after one and after two undisturbed steps."""
    model, optimizer = make(directory)
    first = masters(model)
    one_step(model, optimizer, 1, None, micro)
    return first, masters(model)


def calls_in(faults: Faults, directory: Path, *phases: str, micro: int = 1) -> list[int]:
    """The numbers of the calls that a step makes in these phases."""
    model, optimizer = make(directory)
    faults.start(0)
    one_step(model, optimizer, 1, faults, micro)
    return [number for number, phase in enumerate(faults.phases, 1) if phase in phases]


def broken(faults: Faults, directory: Path, chosen: int) -> tuple[Any, gemini.HybridAdam]:
    """A model whose second step has broken off at a call."""
    faults.start(0)
    model, optimizer = make(directory)
    faults.start(chosen)
    with pytest.raises(GeminiError):
        one_step(model, optimizer, 1, faults, 1)
    faults.start(0)
    return model, optimizer


def says_it_is_lost(error: GeminiError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("lost", "incomplete", "half", "torn", "broke off")) and "checkpoint" in text


KINDS = ["read", "write", "reserve", "move pages", "allocate"]


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_forward_or_backward_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, micro: int, summary: Callable[[str], None]
) -> None:
    """With ``micro`` 2 gradients are promoted to fp32 sums between the backwards: that may fail as well."""
    _, after = reference(tmp_path, micro)
    faults = Faults(monkeypatch, kind)
    wanted = calls_in(faults, tmp_path, "forward", "backward", "clip", micro=micro)
    # With one backward nothing is promoted, and windows take over each other's frames: nothing is allocated.
    assert wanted or (kind in ("allocate", "reserve") and micro == 1), "there was nothing to fail"
    for chosen in wanted:
        faults.start(0)
        model, optimizer = make(tmp_path)
        faults.start(chosen)
        try:
            one_step(model, optimizer, 1, faults, micro)
        except GeminiError:
            assert faults.phase in ("forward", "backward", "clip")
        else:
            # Pages that cannot be parked at an eviction are given back to the system instead: nothing is lost by it.
            assert kind == "move pages", f"{kind} {chosen} failed and nobody said so"
            world_of(model).check()
            assert same(masters(model), after)
            continue
        faults.start(0)
        faults.phase = ""
        check(model)
        optimizer.zero_grad()
        world_of(model).check()
        one_step(model, optimizer, 1, None, micro)
        world_of(model).check()
        assert same(masters(model), after), f"{kind} {chosen} of {wanted[-1]}: the repeated step has other bits"
    summary(f"faults: {kind}, {micro} micro-batches: {len(wanted)} calls in forward and backward failed in turn")


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("kind", ["read", "write", "torn write", "reserve"])
def test_a_fault_in_an_update_is_whole_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, summary: Callable[[str], None]
) -> None:
    before, after = reference(tmp_path, 1)
    faults = Faults(monkeypatch, kind)
    wanted = calls_in(faults, tmp_path, "update")
    silently_torn: list[str] = []
    for chosen in wanted:
        model, optimizer = broken(faults, tmp_path, chosen)
        faults.phase = ""
        check(model)
        try:
            optimizer.zero_grad()
            world_of(model).check()
            found = masters(model)
            torn = [
                name for name, value in found.items()
                if not (torch.equal(value, before[name]) or torch.equal(value, after[name]))
            ]  # fmt: skip
            one_step(model, optimizer, 1, None, 1)
            check(model)
        except GeminiError as error:
            assert says_it_is_lost(error), f"{kind} {chosen}: {error}"
        else:
            silently_torn += [f"{kind} {chosen} of {wanted[0]} to {wanted[-1]}: {torn}"] if torn else []
    assert not silently_torn, "trained on with torn masters, silently:\n" + "\n".join(silently_torn)
    summary(f"faults: {kind}: {len(wanted)} calls in the update failed in turn")


def test_a_failed_update_is_not_applied_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user catches the error and calls ``step()`` again, with the gradients still there: exact, or refused."""
    _, after = reference(tmp_path, 1)
    faults = Faults(monkeypatch, "write")
    wanted = calls_in(faults, tmp_path, "update")
    wrong: list[int] = []
    for chosen in wanted:
        model, optimizer = broken(faults, tmp_path, chosen)
        try:
            optimizer.step()
        except GeminiError as error:
            assert says_it_is_lost(error), str(error)
        else:
            wrong += [] if same(masters(model), after) else [chosen]
    assert not wrong, f"after {len(wrong)} of {len(wanted)} failed writes the second step() gave other bits, silently"


@pytest.mark.parametrize("kind", ["read", "write", "allocate", "reserve"])
def test_a_fault_while_wrapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Construction fails with a clear error, and gives the file back."""
    faults = Faults(monkeypatch, kind)
    model, _ = wrap(make_net(), tmp_path)
    total = faults.calls
    del model
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for chosen in range(1, total + 1):
        faults.start(chosen)
        net = make_net()
        with pytest.raises(GeminiError) as caught:
            wrap(net, tmp_path)
        assert type(net) is Net, "not half a GeminiDDP"
        faults.start(0)
        del caught, net
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "spill files are still open"
