"""Updates that begin inside backward as if the step clipped nothing: the bits of the plain loop, right or wrong."""

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import GeminiError
from gemini.train.update.tiles import Tile
from tests.plain import Plain
from tests.train.guesses import (
    ALWAYS,
    GUESSES,
    NEVER,
    PLACES,
    THRESHOLDS,
    Large,
    counts,
    guess_always,
    guessing,
    model_of,
    plainly,
    train,
)
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_snapshot,
    assert_same_state,
    make_config,
    noise,
    snapshot,
    squares,
    train_plain,
)
from tests.train.test_updates import Held
from tests.world import world_of


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("which", THRESHOLDS)
@pytest.mark.parametrize("where", PLACES)
def test_the_bits_are_those_of_the_plain_loop(
    where: str, which: str, commits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, optimizer), plain = guessing(tmp_path, where), Plain(Blocks())
    guess_always(model, monkeypatch)
    for number, clip in enumerate(THRESHOLDS[which]):
        train(model, optimizer, number, clip, tmp_path if commits and "store" in where else None)
        train_plain(plain, [number], squares, clip=clip)
        assert_same_state(model, plain)
    kept, undone = counts(model)
    assert (kept > 0) == (which != "always") and (undone > 0) == (which != "never"), (kept, undone)
    world_of(model).close()


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
        assert not any(job.is_undecided for job in world_of(model).updates_in_flight)
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


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    ("where", "slack"),
    [("store", 0), ("store", 1 << 20), ("GPU and store", 1 << 20), ("memory", 0), ("half in memory", 0), ("GPU", 0)],
)
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
            world_of(model).check()
    assert sum(counts(runs[0][0])) > 0


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, (list, tuple)):
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first.detach().cpu(), second.detach().cpu())
    else:
        assert first == second


@pytest.mark.parametrize("where", ["store", "memory"])
def test_compact_states(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        guessing(tmp_path, where, make=Large, states="compact", slack=1 << 20),
        plainly(tmp_path, Large, states="compact"),
    ]
    guess_always(runs[0][0], monkeypatch)
    for clip in THRESHOLDS["sometimes"]:
        for model, optimizer in runs:
            model(noise(2, 256)).float().square().mean().backward()
            model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        assert_same_snapshot(snapshot(runs[0][0]), snapshot(runs[1][0]))
    assert counts(runs[0][0]) == (24, 12)


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


# ---- when there is no guess ------------------------------------------------------------------------------------------


def test_without_room_to_undo_it_nothing_is_guessed(tmp_path: Path) -> None:
    """Memory for one module, and a spill file: no copy of what is overwritten fits."""
    raw = Blocks()
    model, plain = gemini.GeminiDDP(raw, make_config(raw, "disk", tmp_path)), Plain(Blocks())
    optimizer = adam(model, **GUESSES)
    for number in range(2):
        train(model, optimizer, number, NEVER)
    train_plain(plain, range(2), squares, clip=NEVER)
    assert_same_state(model, plain)
    assert counts(model) == (0, 0) and "undone" not in str(model.memory_report())


def test_what_stages_of_a_pipeline_share_is_not_guessed(tmp_path: Path) -> None:
    """Other stages' gradients are added to it when backward is over."""
    model, optimizer = guessing(tmp_path, "memory")
    model.layers[1].weight._gemini_first = "layers.1.weight"  # as the pipeline marks such a param
    train(model, optimizer, 0, NEVER)
    assert counts(model) == (2, 0)


def test_guesses_end_where_steps_clip_and_come_back(tmp_path: Path) -> None:
    model, optimizer = guessing(tmp_path)
    found = []
    for number, clip in enumerate([NEVER, ALWAYS, ALWAYS, ALWAYS, ALWAYS, NEVER, NEVER, NEVER, NEVER]):
        before = sum(counts(model))
        train(model, optimizer, number, clip)
        found.append(sum(counts(model)) > before)
    assert found == [True, True, True, False, False, False, False, False, True]
    assert f"{counts(model)[0]} kept, {counts(model)[1]} undone" in str(model.memory_report())


def test_a_wrong_guess_ends_at_its_next_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is worked on until the step says so: no other one is begun for a guess."""
    model, optimizer = guessing(tmp_path, make=Large, slack=1 << 20)
    world_of(model).update_worker.slot_tile = 4096
    held = Held(monkeypatch)
    begun, begin = list[Tile](), Tile.begin
    monkeypatch.setattr(Tile, "begin", lambda self: begun.append(self) or begin(self))
    model(noise(2, 256)).float().square().mean().backward()
    while not held.threads:
        time.sleep(0.001)
    threading.Timer(0.1, held.gate.set).start()
    model.clip_grad_norm_(ALWAYS)
    optimizer.step()
    world_of(model).settle()
    num_tiles = 3 * -(-256 * 257 // 4096)
    assert counts(model) == (0, 3) and num_tiles < len(begun) < num_tiles + num_tiles // 3


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    model = model_of(tmp_path, gradients="transient")
    with pytest.raises(ValueError, match="needs step_in_backward=True"):
        adam(model, speculate=True)
    optimizer = adam(model, **GUESSES)
    assert optimizer.speculate
    with pytest.raises(GeminiError, match="keeps no gradients for a step that was guessed wrong"):
        squares(model, 0).backward()
    assert copy.deepcopy(adam(Blocks(), **GUESSES)).speculate
