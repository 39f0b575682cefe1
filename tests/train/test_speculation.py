"""Updates that begin inside backward as if the step clipped nothing: the bits of the plain loop, right or wrong."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gemini
from gemini import kernels
from gemini.errors import GeminiError, NonFiniteGradient, StorageError
from gemini.jobs.doctor import doctor
from gemini.memory.nvme import SpillFile
from gemini.train.update.guess import Guess, GuessRecord
from gemini.train.update.tiles import Tile
from tests.plain import Plain
from tests.train import test_durable
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_snapshot,
    assert_same_state,
    engine_of,
    make_config,
    noise,
    snapshot,
    squares,
    train_plain,
)
from tests.train.test_interrupts import at_call, wait_for_ctrl_c
from tests.train.test_updates import Held

ALWAYS, NEVER = 1e-6, 1e6
"""Thresholds that every step, and none, is clipped at."""
GUESSES = {"step_in_backward": True, "speculate": True}


class OwnLoss(Blocks):
    """It computes its loss itself, as fp16 asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


def model_of(
    path: Path, where: str = "disk", *, durable: bool = True, make: Callable[[], Any] = Blocks, **how: Any
) -> Any:
    """Blocks on a store."""
    raw = make()
    config = make_config(raw, where, path, **how)
    memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme": "64MiB", "nvme_path": path, "durable": durable})
    return gemini.GeminiDDP(raw, replace(config, memory=memory))


def guessing(path: Path, where: str = "disk", **how: Any) -> tuple[Any, Any]:
    model = model_of(path, where, **how)
    return model, adam(model, **GUESSES)


def train(model: Any, optimizer: Any, number: int, clip: float, store: Path | None = None) -> None:
    """One step of the ordinary loop, with a commit behind it perhaps."""
    squares(model, number).backward()
    model.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()
    if store is not None:
        gemini.save_checkpoint(store, model, optimizer, extra=number, wait=False)


def counts(model: Any) -> tuple[int, int]:
    """Updates that were kept, and undone."""
    found = model.memory_report()["speculation"]
    return found["kept"], found["undone"]


def guess_always(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps before have shown."""
    monkeypatch.setattr(type(engine_of(model).updates.guesses), "pays", True)


THRESHOLDS = {
    "never": [NEVER] * 6,
    "always": [ALWAYS] * 6,
    "sometimes": [NEVER, ALWAYS, NEVER, NEVER, ALWAYS, NEVER],
}


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("which", THRESHOLDS)
@pytest.mark.parametrize("where", ["disk", "half", "standin"])
def test_the_bits_are_those_of_the_plain_loop(
    where: str, which: str, commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    guess_always(model, monkeypatch)
    for number, clip in enumerate(THRESHOLDS[which]):
        train(model, optimizer, number, clip, tmp_path if commits else None)
        train_plain(plain, [number], squares, clip=clip)
        assert_same_state(model, plain)
    kept, undone = counts(model)
    assert (kept > 0) == (which != "always") and (undone > 0) == (which != "never"), (kept, undone)
    engine_of(model).close()


# ---- what a program may do between backward and step -----------------------------------------------------------------


Program = Callable[[Any, Any, int], Any]


def read_weights(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    read = [model.full_param(name) for name, _ in model.named_parameters()][number % 2 :: 2]
    optimizer.step()
    return read


def evaluate(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    with torch.no_grad():
        loss = squares(model, 99)
    optimizer.step()
    return loss


def report(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    model.memory_report()
    optimizer.step()


def write_weights(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    param = model.layers[1].weight
    with model.gathered([param], write=True), torch.no_grad():
        param.mul_(0.5)
    optimizer.step()


def change_lr(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    optimizer.param_groups[0]["lr"] /= 2
    optimizer.step()


def add_up(model: Any, optimizer: Any, number: int) -> Any:
    """Without ``no_sync()``: the first backward is taken for the last."""
    losses = []
    for micro in range(3):
        losses.append(squares(model, 3 * number + micro))
        losses[-1].backward()
    norm = model.clip_grad_norm_(NEVER)
    optimizer.step()
    return losses, norm


def add_up_in_no_sync(model: Any, optimizer: Any, number: int) -> Any:
    with model.no_sync():
        squares(model, 2 * number).backward()
    squares(model, 2 * number + 1).backward()
    optimizer.step()


def twice_through_a_graph(model: Any, optimizer: Any, number: int) -> Any:
    loss = squares(model, number)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def drop_the_step(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    if number % 2:
        optimizer.zero_grad()
        assert not any(job.is_undecided for job in engine_of(model).updates.pending.values())
        return [model.full_param(name) for name, _ in model.named_parameters()]
    return optimizer.step()


def forget_zero_grad(model: Any, optimizer: Any, number: int) -> Any:
    """Gemini refuses it, where torch would add two steps' gradients up."""
    squares(model, number).backward()
    optimizer.step()
    squares(model, number + 1).backward()
    with pytest.raises(GeminiError, match="is not whole") as refusal:
        optimizer.step()
    return str(refusal.value)


def look_again(model: Any, optimizer: Any, number: int) -> Any:
    """Another forward with a graph, whose weights are fetched ahead."""
    squares(model, number).backward()
    loss = squares(model, 70 + number)
    optimizer.step()
    return loss


def clip_some(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    norm = model.clip_grad_norm_((ALWAYS, NEVER)[number % 2], params=model.layers[1].parameters())
    optimizer.step()
    return norm


def clip_twice(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    norms = [model.clip_grad_norm_(clip) for clip in (NEVER, (0.01, NEVER)[number % 2], NEVER)]
    optimizer.step()
    return norms


def load_states(model: Any, optimizer: Any, number: int) -> Any:
    squares(model, number).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def freeze(model: Any, optimizer: Any, number: int) -> Any:
    """A chunk gives no gradients now and then."""
    model.layers[2].requires_grad_(number % 2 == 0)
    squares(model, number).backward()
    optimizer.step()


def break_off(model: Any, optimizer: Any, number: int) -> Any:
    """The backward ends in an error when updates have begun."""
    hook = model.layers[0].register_forward_hook(lambda module, args, output: output.register_hook(_fail) and None)
    with pytest.raises(RuntimeError, match="of the user's"):
        squares(model, 50 + number).backward()
    hook.remove()
    optimizer.zero_grad()
    squares(model, number).backward()
    optimizer.step()


def _fail(*args: Any) -> None:
    raise RuntimeError("a hook of the user's")


PROGRAMS: list[Program] = [
    read_weights, evaluate, report, write_weights, change_lr, add_up, add_up_in_no_sync, twice_through_a_graph,
    drop_the_step, forget_zero_grad, look_again, clip_some, clip_twice, load_states, freeze,
    break_off,
]  # fmt: skip


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize(("where", "slack"), [("disk", 0), ("disk", 1 << 20), ("standin", 1 << 20)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_sees_no_guess(
    program: Program, where: str, slack: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for one module, and with memory to fetch ahead."""
    gradients = "accumulate" if "add_up" in program.__name__ else "retain"
    runs = [guessing(tmp_path, where, gradients=gradients, slack=slack), plainly(tmp_path, gradients=gradients)]
    guess_always(runs[0][0], monkeypatch)
    for number in range(4):
        seen = [program(*run, number) for run in runs]
        assert_same(*seen)
        if number % 2:  # a step that a guess may be right for
            for run in runs:
                run[1].zero_grad()
                train(*run, number, NEVER)
        for _, optimizer in runs:
            optimizer.zero_grad()
        assert_same_snapshot(*(snapshot(model) for model, _ in runs))
        for model, _ in runs:
            engine_of(model).check_invariants()
    assert sum(counts(runs[0][0])) > 0


def plainly(path: Path, make: Callable[[], Any] = Blocks, **how: Any) -> tuple[Any, Any]:
    """The same without updates inside backward, and without a store."""
    raw = make()
    model = gemini.GeminiDDP(raw, make_config(raw, "ram", path, **how))
    return model, adam(model)


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, (list, tuple)):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first.detach().cpu(), second.detach().cpu())
    else:
        assert first == second


def test_compact_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for where, guesses in (("disk", True), ("ram", False)):
        raw = Large()
        config = make_config(raw, where, tmp_path, slack=1 << 20)
        memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme": "64MiB", "nvme_path": tmp_path})
        memory = replace(memory, durable=guesses)
        model = gemini.GeminiDDP(raw, replace(config, memory=memory, states="compact"))
        runs.append((model, adam(model, **(GUESSES if guesses else {}))))
    guess_always(runs[0][0], monkeypatch)
    for clip in THRESHOLDS["sometimes"]:
        for model, optimizer in runs:
            model(noise(2, 256)).float().square().mean().backward()
            model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    assert counts(runs[0][0]) == (12, 6)


def test_groups_and_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers step in turn, the second one with two groups; one chunk is of both."""
    runs = []
    for managed, how in ((model_of(tmp_path), GUESSES), (plainly(tmp_path)[0], {})):
        layers = managed.layers
        first = gemini.HybridAdam([*layers[0].parameters(), layers[1].bias], lr=1e-2, **how)
        groups = [{"params": [layers[1].weight], "lr": 1e-3}, {"params": layers[2].parameters(), "weight_decay": 0.1}]
        runs.append((managed, first, gemini.HybridAdam(groups, lr=1e-2, **how)))
    guess_always(runs[0][0], monkeypatch)
    for number, clip in enumerate([NEVER, ALWAYS, NEVER, NEVER]):
        for managed, first, second in runs:
            squares(managed, number).backward()
            managed.clip_grad_norm_(clip)
            first.step()
            if number != 2:
                second.step()
            first.zero_grad()
            second.zero_grad()
        assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    assert counts(runs[0][0]) == (2 + 1 + 2, 2 + 1), "the chunk of both is never guessed"


def test_params_that_only_some_optimizers_guess(tmp_path: Path) -> None:
    """What is updated inside backward for good stays so."""
    model, (other, _) = model_of(tmp_path), plainly(tmp_path)
    for managed, how in ((model, GUESSES), (other, {})):
        one = gemini.HybridAdam(managed.layers[0].parameters(), lr=1e-2, **how)
        two = gemini.HybridAdam(
            [*managed.layers[1].parameters(), *managed.layers[2].parameters()], lr=1e-2, step_in_backward=bool(how)
        )
        for number in range(3):
            squares(managed, number).backward()
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
    assert_same_snapshot(snapshot(model), snapshot(other))
    assert counts(model) == (3, 0)


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def spoiled(model: Any, number: int, *, layer: int, value: float = float("nan")) -> None:
    """A backward in which one layer gets bad gradients."""
    hook = model.layers[layer].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: grad * value) and None
    )
    out = model(noise(2, 5, 32, seed=number, dtype=model.layers[0].weight.dtype))
    (out if out.dim() == 0 else out.float().square().mean()).backward()
    hook.remove()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_nan_found_late_is_undone(layer: int, clips: bool, tmp_path: Path) -> None:
    """As without guesses: an error, nothing changed, and the run goes on."""
    runs = [guessing(tmp_path), plainly(tmp_path)]
    said = []
    for model, optimizer in runs:
        train(model, optimizer, 0, NEVER)
        before = snapshot(model)
        spoiled(model, 1, layer=layer)
        norm = model.clip_grad_norm_(NEVER) if clips else None
        with pytest.raises(NonFiniteGradient) as refusal:
            optimizer.step()
        said.append((str(refusal.value), None if norm is None else torch.isnan(norm).item()))
        optimizer.zero_grad()
        assert_same_snapshot(snapshot(model), before)
        train(model, optimizer, 2, NEVER)
    assert said[0] == said[1]
    assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    assert counts(runs[0][0])[1] > 0


def test_error_if_nonfinite_leaves_nothing_behind(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    before = snapshot(model)
    spoiled(model, 1, layer=0)
    with pytest.raises(NonFiniteGradient):
        model.clip_grad_norm_(NEVER, error_if_nonfinite=True)
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("where", ["disk", "half"])
def test_a_step_that_fp16_skips_is_undone(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"precision": "fp16", "make": OwnLoss}
    runs = [guessing(tmp_path, where, **how), plainly(tmp_path, **how)]
    guess_always(runs[0][0], monkeypatch)
    for number, clip in enumerate([NEVER, NEVER, ALWAYS, NEVER]):
        for model, optimizer in runs:
            spoiled(model, number, layer=1, value=float("inf") if number == 1 else 1.0)
            model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        scales = [engine_of(model).backward.scaling.loss_scale.scale for model, _ in runs]
        assert scales[0] == scales[1]
        assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    kept, undone = counts(runs[0][0])
    assert kept and undone


# ---- faults and interrupts -------------------------------------------------------------------------------------------


def failing(patch: pytest.MonkeyPatch, *, since: int, until: int) -> list[int]:
    """The drive refuses some of the writes of updates; the list grows with all of them."""
    real, calls = SpillFile.begin_write, list[int]()

    def begin_write(self: SpillFile, source: torch.Tensor, offset: int) -> Any:
        if threading.current_thread().name == "gemini-update":
            calls.append(offset)
            if since <= len(calls) < until:
                raise StorageError("the drive is full")
        return real(self, source, offset)

    patch.setattr(SpillFile, "begin_write", begin_write)
    return calls


@pytest.mark.parametrize("since", [1, 3, 7, 12])
def test_a_guess_that_fails_costs_nothing(since: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step makes its own."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    train(model, optimizer, 0, NEVER, tmp_path)
    train_plain(plain, [0], squares, clip=NEVER)
    with monkeypatch.context() as patch:
        squares(model, 1).backward()
        for job in engine_of(model).updates.pending.values():
            job.wait_until_over()
        optimizer.zero_grad()
        calls = failing(patch, since=since, until=since + 1)
        squares(model, 1).backward()
        for job in engine_of(model).updates.pending.values():
            job.wait_until_over()
        assert len(calls) >= since
    model.clip_grad_norm_(NEVER)
    optimizer.step()
    optimizer.zero_grad()
    train_plain(plain, [1], squares, clip=NEVER)
    assert_same_state(model, plain)
    for number in (2, 3):
        train(model, optimizer, number, NEVER, tmp_path)
        train_plain(plain, [number], squares, clip=NEVER)
    assert_same_state(model, plain)
    engine_of(model).close()


def test_a_drive_that_stays_broken_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="good")
    expected = snapshot(model)
    with monkeypatch.context() as patch:
        failing(patch, since=5, until=2**31)
        with pytest.raises(StorageError, match="the drive is full"):
            train(model, optimizer, 1, NEVER)
            snapshot(model)
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        train(model, optimizer, 2, NEVER)
    engine_of(model).close()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == "good"
    assert_same_snapshot(snapshot(model), expected)
    train(model, optimizer, 1, NEVER)
    engine_of(model).close()


def test_a_run_that_ends_with_open_guesses_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="committed")
    expected = snapshot(model)
    squares(model, 1).backward()
    assert any(job.is_undecided for job in engine_of(model).updates.pending.values())
    engine_of(model).close()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == "committed"
    assert_same_snapshot(snapshot(model), expected)
    engine_of(model).close()


def test_what_is_forgotten_is_undone(tmp_path: Path) -> None:
    """As a checkpoint that is about to be loaded does it."""
    model, _ = guessing(tmp_path)
    before = snapshot(model)
    squares(model, 0).backward()
    engine_of(model).updates.forget()
    assert all(pair._before is None for pair in engine_of(model).store.durable.slots.pairs.values())
    assert_same_snapshot(snapshot(model), before)


def test_a_checkpoint_is_loaded_over_open_guesses(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    expected = snapshot(model)
    train(model, optimizer, 1, NEVER)
    squares(model, 2).backward()
    gemini.load_checkpoint(tmp_path, model, optimizer)
    assert all(pair._before is None for pair in engine_of(model).store.durable.slots.pairs.values())
    assert_same_snapshot(snapshot(model), expected)
    plain = Plain(Blocks())
    train_plain(plain, [0, 1], squares, clip=NEVER)
    train(model, optimizer, 1, NEVER)
    assert_same_state(model, plain)
    engine_of(model).close()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("moment", ["take_grad", "kernel", "put"])
def test_an_interrupted_backward_leaves_nothing_behind(
    moment: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = guessing(tmp_path)
    train(model, optimizer, 0, NEVER, tmp_path)
    before = snapshot(model)
    loss = squares(model, 1)
    engine = engine_of(model)
    owner, name = {
        "take_grad": (engine.backward, "take_grad"),
        "kernel": (kernels, "adam_update"),
        "put": (engine.updates._worker, "put"),
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, owner, name, number, once=True)
        loss.backward()
        engine.drain()
        wait_for_ctrl_c()
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)
    plain = Plain(Blocks())
    train_plain(plain, [0, 1], squares, clip=NEVER)
    train(model, optimizer, 1, NEVER, tmp_path)
    assert_same_state(model, plain)
    engine.close()


@pytest.mark.parametrize("clip", [NEVER, ALWAYS])
def test_an_interrupted_step_is_whole(clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    for number, name in enumerate(("keep", "drop", "undo")):
        squares(model, number).backward()
        model.clip_grad_norm_(clip)
        with monkeypatch.context() as patch:
            calls = at_call(patch, Guess, name, 2, once=True)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                assert calls
        optimizer.zero_grad()
        train_plain(plain, [number], squares, clip=clip)
        assert_same_state(model, plain)


# ---- when there is no guess ------------------------------------------------------------------------------------------


def test_what_was_trained_since_a_commit_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step after a commit can be undone: its slots are free. The second one's are taken."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    guess_always(model, monkeypatch)
    kept = 0
    for number in range(6):
        squares(model, number).backward()
        for job in list(engine_of(model).updates.pending.values()):
            job.wait_until_over()  # a guess that a step asks for before it has begun is an update like others
        model.clip_grad_norm_(NEVER)
        optimizer.step()
        optimizer.zero_grad()
        train_plain(plain, [number], squares, clip=NEVER)
        assert_same_state(model, plain)
        if number == 1 or number == 3:
            gemini.save_checkpoint(tmp_path, model, optimizer)
        kept += 3 if number in (0, 1, 2, 4) else 0
        assert counts(model)[0] == kept, number
    engine_of(model).close()


def test_without_a_store_nothing_is_guessed(tmp_path: Path) -> None:
    (model, optimizer), plain = guessing(tmp_path, durable=False), Plain(Blocks())
    for number in range(2):
        train(model, optimizer, number, NEVER)
    train_plain(plain, range(2), squares, clip=NEVER)
    assert_same_state(model, plain)
    assert counts(model) == (0, 0) and "undone" not in str(model.memory_report())


def test_guesses_end_where_steps_clip_and_come_back(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    found = []
    for number, clip in enumerate([NEVER, ALWAYS, ALWAYS, ALWAYS, ALWAYS, NEVER, NEVER, NEVER, NEVER]):
        before = sum(counts(model))
        train(model, optimizer, number, clip)
        found.append(sum(counts(model)) > before)
    assert found == [True, True, True, False, False, False, False, False, True]
    assert f"{counts(model)[0]} kept, {counts(model)[1]} undone" in str(model.memory_report())


def test_a_skipped_step_counts_as_wrong(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path, precision="fp16", make=OwnLoss)
    for number, value in enumerate([float("inf"), 1.0]):
        spoiled(model, number, layer=1, value=value)
        optimizer.step()
        optimizer.zero_grad()
    assert counts(model) == (0, 3)


class Large(Blocks):
    """Layers of several tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))


def test_a_wrong_guess_ends_at_its_next_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is worked on until the step says so: no other one is begun for a guess."""
    model, optimizer = guessing(tmp_path, make=Large, slack=1 << 20)
    engine_of(model).updates._worker.slot_tile = 4096
    held = Held(monkeypatch)
    begun, begin = list[Tile](), Tile.begin
    monkeypatch.setattr(Tile, "begin", lambda self: begun.append(self) or begin(self))
    model(noise(2, 256)).float().square().mean().backward()
    while not held.threads:
        time.sleep(0.001)
    threading.Timer(0.1, held.gate.set).start()
    model.clip_grad_norm_(ALWAYS)
    optimizer.step()
    engine_of(model).drain()
    num_tiles = 3 * -(-256 * 257 // 4096)
    assert counts(model) == (0, 3) and num_tiles < len(begun) < num_tiles + num_tiles // 3


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    model = model_of(tmp_path, gradients="transient")
    with pytest.raises(ValueError, match="goes with step_in_backward=True"):
        adam(model, speculate=True)
    optimizer = adam(model, **GUESSES)
    assert optimizer.speculate
    with pytest.raises(GeminiError, match="keeps no gradients for a step that was guessed wrong"):
        squares(model, 0).backward()
    assert copy.deepcopy(adam(Blocks(), **GUESSES)).speculate


# ---- the store -------------------------------------------------------------------------------------------------------


def test_sums_of_a_store_are_those_of_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gemini doctor STORE`` reads all of it, behind steps that were right, wrong, and wrong before a fault."""
    (model, optimizer), plain = guessing(tmp_path), Plain(Blocks())
    guess_always(model, monkeypatch)
    for number, clip in enumerate(THRESHOLDS["sometimes"]):
        with monkeypatch.context() as patch:
            if number == 3:
                failing(patch, since=4, until=5)
            squares(model, number).backward()
            for job in engine_of(model).updates.pending.values():
                job.wait_until_over()
        model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        gemini.save_checkpoint(tmp_path, model, optimizer, extra=number)
        train_plain(plain, [number], squares, clip=clip)
    assert_same_state(model, plain)
    engine_of(model).close()
    console = Console(record=True, width=300, file=io.StringIO())
    assert doctor(console, store=tmp_path) == 0, console.export_text()
    model, optimizer = guessing(tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == 5
    assert_same_state(model, plain)
    engine_of(model).close()


def test_every_image_of_a_crash_opens_at_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_durable, "adam", lambda model: adam(model, **GUESSES))
    guesses, keep = list[bool](), Guess.keep
    monkeypatch.setattr(Guess, "keep", lambda self, params: guesses.append(keep(self, params)) or guesses[-1])
    monkeypatch.setattr(GuessRecord, "pays", True)
    assert test_durable.images(tmp_path, 30) == []
    assert guesses
