"""Out of memory at every allocation of a step: the same bits, or an error after which nothing of it counts."""

import contextlib
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gemini
from gemini.errors import GeminiError
from gemini.memory.devices.cuda import FRAGMENTS, CudaDevice, prefer_expandable_segments
from gemini.memory.devices.pages import PageWindow
from gemini.tiers import Tier
from tests.standin_device import StandinDevice
from tests.train.helpers import (
    Blocks,
    Chain,
    adam,
    assert_same_snapshot,
    failing,
    llama,
    make_config,
    manage,
    noise,
    on_batch,
    snapshot,
    squares,
    train,
)
from tests.train.moments import no_hang
from tests.world import world_of


class Refusing(TorchDispatchMode):
    """The ``at``-th allocation is refused (from 1; 0 for none): of a window, of a buffer, or of what an operation
    returns on the thread that trains."""

    def __init__(self, at: int = 0):
        super().__init__()
        self.at, self.count, self.refused = at, 0, ""

    def allocate(self, what: str) -> None:
        self.count += 1
        if self.count == self.at:
            self.refused = what
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable and not func.is_view and func.namespace == "aten":
            self.allocate(str(func))
        return func(*args, **(kwargs or {}))

    def _before(self, undo: contextlib.ExitStack, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.allocate(f"{owner.__name__}.{name}")
            return real(*args, **kwargs)

        undo.enter_context(mock.patch.object(owner, name, call))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            self._before(undo, PageWindow, "populate")
            self._before(undo, StandinDevice, "make_buffer")
            undo.enter_context(self)
            yield


class Dropping(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.3, training=self.training)
        return nn.functional.dropout(super().forward(x), 0.3, training=self.training)


def half_of_squares(output: torch.Tensor, part: Any) -> torch.Tensor:
    return output.float().square().mean() / 2


class Trial:
    """One step of two micro-batches from a state that is always the same, and the step after it."""

    by_blocks = False

    def __init__(self, model: Any, loss_of: Callable[[Any, int], torch.Tensor], path: Path, *, whole: bool, **how: Any):
        self.model, self.loss_of, self.path, self.whole = model, loss_of, path / "start", whole
        self.optimizer = adam(model, **how)
        train(model, self.optimizer, [0], loss_of)
        gemini.save_checkpoint(self.path, model, self.optimizer)
        self.errors: list[str] = []
        self.wanted = self.run(Refusing())

    def micro_batch(self, seed: int) -> None:
        (self.loss_of(self.model, seed) / 2).backward()

    def step(self) -> None:
        torch.manual_seed(7)
        self.is_updating = False
        if self.by_blocks:
            parts = [{"x": noise(2, 5, 32, seed=seed)} for seed in (1, 2)]
            gemini.train_step(self.model, parts, half_of_squares)
        for seed in () if self.by_blocks else (1, 2):
            if self.whole:
                self.model.micro_batch(lambda seed=seed: self.micro_batch(seed))
            else:
                self.micro_batch(seed)
        self.is_updating = True
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()

    def run(self, refusing: Refusing) -> Any:
        """What the model holds after the step, and after one more, where the program begins a step anew that failed."""
        gemini.load_checkpoint(self.path, self.model, self.optimizer)
        self.errors = []
        with no_hang(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with refusing.active():
                try:
                    self.step()
                except torch.OutOfMemoryError as e:
                    self.errors.append(f"{'update' if self.is_updating else 'backward'}: {e}")
                    # Who goes on as if nothing had been is told, unless nothing of it counts.
            world = world_of(self.model)
            world.check_ledger()
            if self.errors:
                self.optimizer.zero_grad()
                world.check()
                self.step()
            self.optimizer.zero_grad()
            world.check()
            after = snapshot(self.model)
            train(self.model, self.optimizer, [5], self.loss_of)
            return after, snapshot(self.model)

    def at(self, number: int) -> Refusing:
        refusing = Refusing(number)
        for found, wanted in zip(self.run(refusing), self.wanted, strict=True):
            assert_same_snapshot(found, wanted)
        return refusing


# ---- all of them -----------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "accumulate": {"gradients": "accumulate"},
    "retain": {"gradients": "retain", "slack": 2**16},  # it becomes sums in the second backward
    "resident": {"gradients": "accumulate", "slack": 2**20},
}  # fmt: skip


def make_trial(kind: str, path: Path, *, whole: bool, make: Callable[[], nn.Module] = Dropping) -> Trial:
    return Trial(
        gemini.GeminiDDP(make(), make_config(make(), "standin", path, **KINDS[kind])),
        on_batch if make is dropping_llama else squares,
        path,
        whole=whole,
    )


class ByBlocks(Trial):
    """The same step by ``train_step``."""

    by_blocks = True


def make_trial_by_blocks(kind: str, path: Path) -> Trial:
    config = make_config(Chain(), "standin", path, **{"slack": 2**16, **KINDS[kind]})
    return ByBlocks(gemini.GeminiDDP(Chain(), config), squares, path, whole=False)


def dropping_llama() -> nn.Module:
    return llama(dropout=0.1)


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "micro_batch"])
def test_a_sample_of_allocations(whole: bool, tmp_path: Path) -> None:
    """The program begins the step anew where it is told to; ``micro_batch`` leaves it nothing to do before the step."""
    trial = make_trial("accumulate", tmp_path, whole=whole)
    counted = Refusing()
    trial.run(counted)
    assert counted.count > 60
    told = 0
    # The last one is of what step() fetches ahead, when it has been made.
    for number in (*range(3, counted.count, counted.count // 9), counted.count):
        trial.at(number)
        told += bool(trial.errors)
        assert not (whole and "backward: " in "".join(trial.errors))
    assert not trial.errors, "a step that was made is not told of as one that failed"
    assert whole or told >= 3, "no backward ran out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("make", [Dropping, dropping_llama])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "micro_batch"])
def test_allocations_all_over_a_step(whole: bool, kind: str, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Every one of them: ``tests/hunts/allocation_hunt.py``."""
    trial = make_trial(kind, tmp_path, whole=whole, make=make)
    counted = Refusing()
    trial.run(counted)
    for number in range(1 + list(KINDS).index(kind), counted.count + 1, counted.count // 12):
        refused = trial.at(number).refused
        assert not (whole and "backward: " in "".join(trial.errors)), (number, refused, trial.errors)


@pytest.mark.parametrize("kind", KINDS)
def test_allocations_of_a_step_block_by_block(kind: str, tmp_path: Path) -> None:
    """A step that a stage breaks off leaves nothing behind, and begun anew has the same bits."""
    trial, told = make_trial_by_blocks(kind, tmp_path), 0
    counted = Refusing()
    trial.run(counted)
    assert counted.count > 40 and trial.model.__dict__["_gemini_courses"].stages
    for number in range(1 + list(KINDS).index(kind), counted.count + 1, counted.count // 9):
        trial.at(number)
        told += bool(trial.errors)
    assert told >= 3


# ---- a forward -------------------------------------------------------------------------------------------------------


def refuse_next(owner: Any, name: str, number: int = 1) -> Any:
    """The next call of a function, or the one so many later, runs out of memory, and those behind it do not."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has")
    return failing(owner, name, number, error, once=True)


def roomy(model: nn.Module, path: Path, **how: Any) -> Any:
    """With windows that have far more than a step needs at once."""
    return manage(model, path, "standin", gpu="1MiB", homes={"weights_on_nvme": 0.5}, activations=2**16, **how)


def test_a_forward_is_made_again_with_less_for_windows_and_it_is_said(tmp_path: Path) -> None:
    model, same = roomy(Dropping(), tmp_path), roomy(Dropping(), tmp_path)
    world = world_of(model)
    before, pool = world.held(Tier.GPU, "activations"), world.held(Tier.GPU, "pool")
    torch.manual_seed(3)
    # Behind the first random numbers.
    with refuse_next(torch, "tanh"), pytest.warns(UserWarning, match="made once more.* gathered weights have"):
        squares(model, 1).backward()
    draws = torch.rand(1)
    world.check()
    gave = world.held(Tier.GPU, "activations") - before
    assert 0 < gave <= pool // 2 and world.held(Tier.GPU, "pool") + world.held(Tier.GPU, "windows") == pool - gave
    torch.manual_seed(3)
    squares(same, 1).backward()
    assert torch.equal(draws, torch.rand(1)), "random numbers go on as if it had gone well at once"
    for name, _ in model.named_parameters():
        assert torch.equal(model.full_grad(name), same.full_grad(name))


def test_what_it_has_made_is_gone_before_it_is_made_again(tmp_path: Path) -> None:
    model, alive = roomy(Blocks(), tmp_path), list[Any]()

    def tanh(x: torch.Tensor, real: Any = torch.tanh) -> torch.Tensor:
        result = real(x)
        if len(alive) == 2:
            alive.append(None)
            raise torch.OutOfMemoryError("out of memory")
        if len(alive) == 3:
            assert alive[0]() is None and alive[1]() is None
        alive.append(weakref.ref(result))
        return result

    with mock.patch.object(torch, "tanh", tanh), pytest.warns(UserWarning, match="made once more"):
        squares(model, 1)
    assert len(alive) == 6


class Counting(Dropping):
    """It changes something beside its result, as ``what`` says."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.calls, self.seen = what, 0, list[int]()
        self.norm = nn.BatchNorm1d(32) if what == "buffer" else None
        self.generator = torch.Generator() if what == "generator" else None
        if what == "mean":
            self.register_buffer("running_mean", torch.zeros(32))

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.what == "attribute":
            self.calls += 1
        if self.what == "list":
            self.seen.append(1)
        if self.what == "input":
            x.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("mean", "a Counting has a running mean, which it may have changed"),
        ("buffer", "changed num_batches_tracked of a BatchNorm1d"),
        ("attribute", "changed calls of a Counting"), ("list", "changed seen of a Counting"),
        ("input", "written to what it was called with"), ("generator", "a Counting has random numbers of its own"),
        ("hook", "the program has hooked a Linear"), ("object", "called with a object, which it may have changed"),
        ("backward", "a backward has run in it"),
    ],
)  # fmt: skip
def test_a_forward_that_has_changed_something_is_not_made_again(what: str, why: str, tmp_path: Path) -> None:
    model = roomy(Counting(what), tmp_path, precision="fp32")
    if what == "hook":
        model.layers[0].register_forward_hook(lambda *_: None)
    if what == "backward":
        real = torch.tanh
        undo = mock.patch.object(torch, "tanh", lambda x: (torch.autograd.grad(real(x).sum(), x), real(x))[1])
    else:
        undo = contextlib.nullcontext()
    x, more = noise(2, 5, 32, dtype=torch.float32), (object(),) if what == "object" else ()
    with undo, refuse_next(torch, "tanh", 2), pytest.raises(torch.OutOfMemoryError, match=why) as raised:
        model(x, *more)
    assert len(raised.value.args) == 1 and str(raised.value).startswith("CUDA out of memory. Tried to allocate")
    world_of(model).check()
    optimizer = adam(model)
    model(noise(2, 5, 32, dtype=torch.float32)).square().mean().backward()
    optimizer.step()


def test_a_method_that_is_called_as_the_forward_is_not_made_again(tmp_path: Path) -> None:
    """The second call would run the model's own forward."""
    from gemini.integrations.lightning import call_as_forward

    model = roomy(Dropping(), tmp_path)
    with (
        refuse_next(nn.functional, "dropout"),
        pytest.raises(torch.OutOfMemoryError, match="changed forward of a Drop"),
    ):
        call_as_forward(model, lambda: model(noise(2, 5, 32)).sum() * 2)
    with refuse_next(nn.functional, "dropout"), pytest.warns(UserWarning, match="made once more"):
        model(noise(2, 5, 32))


# ---- a backward ------------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """In its first backward, while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.armed:
            Fails.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has")
        return grad


class FailsBetween(Blocks):
    """The gradients of its last layer have come when its backward fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[2](Fails.apply(torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))))))


def test_the_first_backward_of_a_step_that_fails_leaves_no_gradient(tmp_path: Path) -> None:
    model = roomy(FailsBetween(), tmp_path)
    optimizer, before = adam(model), snapshot(model)
    Fails.armed = True
    with pytest.raises(torch.OutOfMemoryError, match="states and gradients are as before it\nGathered weights have"):
        squares(model, 1).backward()
    world_of(model).check()
    optimizer.step()
    assert_same_snapshot(snapshot(model), before)
    train(model, optimizer, [1, 2], squares)
    plain = roomy(FailsBetween(), tmp_path)
    train(plain, adam(plain), [1, 2], squares)
    assert_same_snapshot(snapshot(model), snapshot(plain))


@pytest.mark.parametrize("use", ["step", "clip", "read", "backward"])
def test_a_sum_that_has_a_part_of_a_micro_batch_is_used_by_nobody(use: str, tmp_path: Path) -> None:
    model = roomy(FailsBetween(), tmp_path, gradients="accumulate")
    optimizer, before = adam(model), snapshot(model)
    squares(model, 1).backward()
    Fails.armed = True
    with pytest.raises(torch.OutOfMemoryError, match=r"call optimizer.zero_grad\(\) and begin the step anew"):
        squares(model, 2).backward()
    with pytest.raises(GeminiError, match="ran out of memory after a part of it had been added"):
        if use == "step":
            optimizer.step()
        elif use == "clip":
            model.clip_grad_norm_(1.0)
        elif use == "read":
            model.full_grad("layers.2.weight")
        else:
            squares(model, 3).backward()
    optimizer.zero_grad()
    world_of(model).check()
    assert_same_snapshot(snapshot(model), before)
    plain = roomy(FailsBetween(), tmp_path, gradients="accumulate")
    train(model, optimizer, [1, 2], squares)
    train(plain, adam(plain), [1, 2], squares)
    assert_same_snapshot(snapshot(model), snapshot(plain))


def test_one_that_fails_before_its_first_gradient_leaves_those_of_before(tmp_path: Path) -> None:
    model, plain = (roomy(Blocks(), tmp_path, gradients="accumulate") for _ in range(2))
    for one in (model, plain):
        squares(one, 1).backward()
    Fails.armed = True
    with pytest.raises(torch.OutOfMemoryError, match="gradients are as before it"):
        Fails.apply(squares(model, 2)).backward()
    for one in (model, plain):
        squares(one, 3).backward()
        adam(one).step()
    assert_same_snapshot(snapshot(model), snapshot(plain))


def test_updates_inside_a_backward_that_fails_are_told_of(tmp_path: Path) -> None:
    model = roomy(FailsBetween(), tmp_path, gradients="transient", max_chunk=1024)
    optimizer = adam(model, step_in_backward=True)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    before = snapshot(model)
    Fails.armed = True
    with pytest.raises(torch.OutOfMemoryError, match="Params were updated in it: load the last checkpoint"):
        model.micro_batch(lambda: squares(model, 1).backward())
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        squares(model, 1)
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert_same_snapshot(snapshot(model), before)


# ---- a micro-batch ---------------------------------------------------------------------------------------------------


def test_a_micro_batch_is_made_again_and_added_once(tmp_path: Path) -> None:
    model, plain = (roomy(FailsBetween(), tmp_path, gradients="accumulate") for _ in range(2))
    for one in (model, plain):
        squares(one, 1).backward()
        Fails.armed = one is model
        told = pytest.warns(UserWarning, match="a micro-batch ran out") if Fails.armed else contextlib.nullcontext()
        with told:
            assert one.micro_batch(lambda one=one: squares(one, 2).backward() or 5) == 5
        squares(one, 3).backward()
        one.clip_grad_norm_(1.0)
        adam(one).step()
    assert_same_snapshot(snapshot(model), snapshot(plain))


def test_one_that_fails_twice_leaves_an_error(tmp_path: Path) -> None:
    model = roomy(FailsBetween(), tmp_path, gradients="accumulate")
    squares(model, 1).backward()

    def always() -> None:
        Fails.armed = True
        squares(model, 2).backward()

    with pytest.warns(UserWarning), pytest.raises(torch.OutOfMemoryError, match="made twice.*begin the step anew"):
        model.micro_batch(always)
    with pytest.raises(GeminiError, match="ran out of memory after a part"):
        adam(model).step()


def test_a_sum_that_may_be_half_made_is_not_added_to_again(tmp_path: Path) -> None:
    model = roomy(Blocks(), tmp_path, gradients="accumulate")
    squares(model, 1).backward()
    with (
        refuse_next(world_of(model).gradients, "land"),
        pytest.raises(torch.OutOfMemoryError, match="a gradient was being added.*begin the step anew"),
    ):
        model.micro_batch(lambda: squares(model, 2).backward())


# ---- the margin of the first step ------------------------------------------------------------------------------------


def test_what_the_allocator_took_in_the_first_step_is_set_aside(tmp_path: Path) -> None:
    class Greedy(StandinDevice):
        asked = 0

        def reserved_beyond(self, known: int) -> int:
            self.asked += 1
            return 2**16 + self.asked * 2**20

    how: dict[str, Any] = {"homes": {"weights_on_nvme": 0.5}, "activations": 2**16}
    model = manage(Blocks(), tmp_path, Greedy(), gpu="1MiB", **how)
    optimizer, world = adam(model), world_of(model)
    train(model, optimizer, [0], squares)
    free, before = world.free(Tier.GPU), world.held(Tier.GPU, "activations")
    windows = world.held(Tier.GPU, "pool") + world.held(Tier.GPU, "windows")
    with pytest.warns(UserWarning, match="took .* more than was set aside for it; gathered weights have") as told:
        train(model, optimizer, [1, 2], squares)
    assert len([one for one in told if "set aside" in str(one.message)]) == 1, "said once"
    world.check()
    more = world.held(Tier.GPU, "activations") - before
    left = world.held(Tier.GPU, "pool") + world.held(Tier.GPU, "windows")
    assert more > free and windows - left == more - free
    plain = roomy(Blocks(), tmp_path)
    train(plain, adam(plain), [0, 1, 2], squares)
    assert_same_snapshot(snapshot(model), snapshot(plain))


def test_what_windows_give_up_is_the_activations_whatever_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = manage(Blocks(), tmp_path, "standin", gpu="1MiB", homes={"weights_on_nvme": 0.5}, activations=2**16)
    world = world_of(model)
    room, before = world.manager.room, world.held(Tier.GPU, "activations")
    shrink = room.shrink

    def interrupted(num_bytes: int) -> bool:
        done = shrink(num_bytes)
        signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(room, "shrink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model._gemini_engine.again.take(8192)
    assert world.held(Tier.GPU, "activations") == before + 8192
    world.check()


# ---- segments that grow ----------------------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch's allocator goes by: as torch does, whoever sets one thing puts the others back."""
    now: dict[str, Any] = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}

    def set_up(text: str) -> None:
        now.update({"PYTORCH_CUDA_ALLOC_CONF": text, "expandable_segments": text == "expandable_segments:True"})

    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_up)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": now})
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return now


def segments_grow() -> bool:
    return CudaDevice.fragments_percent(mock.Mock()) == 0


def test_segments_grow_from_now_on_where_nobody_has_set_anything(settings: dict[str, Any]) -> None:
    assert not segments_grow()
    assert "which Gemini sets" in prefer_expandable_segments()
    assert segments_grow()
    # A second model, of a program that has set nothing either.
    assert prefer_expandable_segments() == "expandable_segments:True" and segments_grow()


@pytest.mark.parametrize("how", ["environment", "call"])
def test_what_the_program_has_set_stays(how: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    else:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    assert prefer_expandable_segments().endswith("max_split_size_mb:64")
    assert not segments_grow()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert segments_grow(), "the driver maps memory as it needs it"


class Fragmenting(StandinDevice):
    """Whose allocator takes segments of fixed sizes."""

    def fragments_percent(self) -> int:
        return FRAGMENTS


def test_fragments_have_room_beside_what_activations_were_declared_to_take(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="segments of fixed sizes") as told:
        model = manage(Blocks(), tmp_path, Fragmenting(), gpu="1MiB", homes={"weights_on_nvme": 0.5}, activations=2**16)
    assert len([one for one in told if "segments of fixed sizes" in str(one.message)]) == 1
    problem, world = world_of(model).decision.problem, world_of(model)
    assert problem.activations == 2**16 + FRAGMENTS * (2**16 + problem.in_flight) // 100
    assert world.held(Tier.GPU, "activations") == problem.activations
    plain = world_of(roomy(Blocks(), tmp_path))
    assert plain.held(Tier.GPU, "activations") == 2**16


def test_behind_a_backward_that_ran_out_what_torch_keeps_goes_back_and_windows_have_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    model = roomy(FailsBetween(), tmp_path)
    world, before = world_of(model), world_of(model).held(Tier.GPU, "activations")
    Fails.armed = True
    with pytest.raises(torch.OutOfMemoryError, match=r"micro_batch\(\), or make the micro-batch smaller"):
        squares(model, 1).backward()
    assert world.held(Tier.GPU, "activations") > before
    assert emptied == [1]
    squares(model, 1).backward()
    assert emptied == [1]
