"""One model in several threads: forwards run at once, all else runs alone, and the bits are those of one thread."""

import copy
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from benchmarks._progress import PATIENCE
from gemini.errors import GeminiError
from gemini.train import step
from tests.train.helpers import ALL_PLACEMENTS, Blocks, adam, noise, same_bits, snapshot, squares, step_on, wrap
from tests.world import world_of


@pytest.fixture(autouse=True)
def _threads_alternate_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def evaluate(model: Any) -> float:
    with torch.no_grad():
        return squares(model, 5).item()


@contextmanager
def evaluated(model: Any, number: int, work: Callable[[Any], Any] = evaluate) -> Iterator[None]:
    """Evaluate, or do other work, in so many other threads, again and again, until the block ends."""
    is_over, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not is_over.is_set():
                work(model)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def run_beside(model: Any, function: Any) -> list[BaseException]:
    """Run ``function`` in another thread to its end: what it raised."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            function(model)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def assert_same(ours: Any, theirs: Any) -> None:
    for model in (ours, theirs):
        world_of(model).settle()
        world_of(model).check()
    wanted = snapshot(theirs)
    for name, planes in snapshot(ours).items():
        assert all(same_bits(value, wanted[name][kind]) for kind, value in planes.items()), name


def call_a_block(model: Any) -> None:
    """Call a module by itself: no forward of the model goes on in this thread."""
    with torch.no_grad():
        model.layers[1](noise(4, 32, seed=7))


def read_gathered(model: Any) -> None:
    """Read what nobody writes meanwhile."""
    with model.gathered():
        first = [param.detach().clone() for param in model.parameters()]
        time.sleep(0.002)
        assert all(same_bits(before, param.detach()) for before, param in zip(first, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("gradients", "work"),
    [("retain", evaluate), ("transient", evaluate), ("accumulate", evaluate), ("retain", call_a_block),
     ("retain", read_gathered)],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_training_has_its_bits_while_others_work(where: str, gradients: str, work: Any, tmp_path: Path) -> None:
    def train(model: Any) -> None:
        optimizer = adam(model, step_in_backward=gradients == "transient")
        for seed in range(6):
            squares(model, seed).backward()
            if gradients != "transient":
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    alone, model = (wrap(Blocks(), where, tmp_path, slack=2**16, gradients=gradients) for _ in range(2))
    train(alone)
    with evaluated(model, 2, work):
        train(model)
    assert_same(model, alone)


@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_what_reads_and_writes_the_model_has_its_bits_while_others_evaluate(where: str, tmp_path: Path) -> None:
    def read(model: Any) -> float:
        return float(next(model.parameters()).detach().float().sum())

    def write(model: Any) -> None:
        with model.gathered(write=True):
            for param in model.parameters():
                param.mul_(0.9)

    def work(model: Any, path: Path) -> list[Any]:
        optimizer, found, chosen = adam(model), list[Any](), random.Random(where)
        gemini.save_checkpoint(path, model, optimizer)
        ways = {
            "read": lambda: read(model), "write": lambda: write(model),
            "full": lambda: model.full_param("layers.0.weight").sum().item(),
            "report": lambda: model.memory_report() and 0,
            "state": lambda: [value.float().sum().item() for value in model.state_dict().values()],
            "save": lambda: gemini.save_checkpoint(path, model, optimizer) and 0,
            "save behind": lambda: gemini.save_checkpoint(path, model, optimizer, wait=False) and 0,
            "load": lambda: gemini.load_checkpoint(path, model, optimizer),
            "optimizer": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        }  # fmt: skip
        for seed in range(5):
            found += [ways[name]() for name in chosen.sample(sorted(ways), 4)]
            step_on(squares(model, seed), optimizer)
        return found

    alone, model = (wrap(Blocks(), where, tmp_path, slack=2**16) for _ in range(2))
    wanted = work(alone, tmp_path / "alone")
    with evaluated(model, 2):
        assert work(model, tmp_path / "beside") == wanted
    assert_same(model, alone)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_who_evaluates_needs_nobody_whose_backward_broke_off(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path, slack=2**16)
    wanted, optimizer = evaluate(model), adam(model)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("of the program")

    loss = squares(model, 0)
    hook = next(model.parameters()).register_hook(fail)
    with pytest.raises(RuntimeError, match="of the program"):
        loss.backward()
    hook.remove()
    found = list[float]()
    # This thread does not come back before: nobody but autograd knows that its backward is over.
    assert run_beside(model, lambda model: found.append(evaluate(model))) == [] and found == [wanted]
    squares(model, 0).backward()
    optimizer.step()
    world_of(model).check()


def test_who_waits_for_a_thread_that_waits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "GIVE_UP_LOOKS", 0.2)
    model, errors = wrap(Blocks(), "disk", tmp_path, slack=2**16), list[BaseException]()
    loss = squares(model, 0)
    next(model.parameters()).register_hook(lambda _: errors.extend(run_beside(model, evaluate)))
    loss.backward()
    (error,) = errors
    assert isinstance(error, GeminiError) and "MainThread" in str(error) and "runs alone" in str(error)
    evaluate(model)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_forward_may_wait_for_another_thread_s(where: str, tmp_path: Path) -> None:
    model, errors = wrap(Blocks(), where, tmp_path, slack=2**16), list[BaseException]()
    wanted, main = squares(model, 0).item(), threading.current_thread()

    def beside(*_: Any) -> None:
        if threading.current_thread() is main:
            errors.extend(run_beside(model, evaluate))

    hook = model.layers[1].register_forward_hook(beside)
    loss = squares(model, 0)
    hook.remove()
    assert errors == [] and loss.item() == wanted
    loss.backward()
    adam(model).step()
    world_of(model).check()


class BlockInThread(nn.Module):
    """A part of the forward runs in a thread, also when checkpointing computes it again inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        with ThreadPoolExecutor(1) as pool:
            x = x + pool.submit(enabled(self.second), x).result(PATIENCE)
        return torch.tanh(x)


def enabled(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor, enabled: bool = torch.is_grad_enabled()) -> torch.Tensor:
        with torch.set_grad_enabled(enabled):
            return module(x)

    return call


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_backward_waits_for_the_thread_of_what_it_computes_again(where: str, tmp_path: Path) -> None:
    def grads(model: Any) -> list[torch.Tensor]:
        x = noise(4, 32, dtype=torch.float32)
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        names = [name for name, _ in model.named_parameters()]
        return [model.full_grad(n) if hasattr(model, "full_grad") else model.get_parameter(n).grad for n in names]

    torch.manual_seed(0)
    plain = BlockInThread()
    model = wrap(copy.deepcopy(plain), where, tmp_path, precision="fp32")
    assert all(map(same_bits, grads(model), grads(plain)))
    world_of(model).check()


class Forces(nn.Module):
    """Forces are gradients in forward, which may be taken in a thread of its own."""

    def __init__(self, in_thread: bool) -> None:
        super().__init__()
        self.in_thread = in_thread
        self.lift, self.energy = nn.Linear(32, 32), nn.Linear(32, 1)

    def forces(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().float().requires_grad_()
            energy = self.energy(torch.tanh(self.lift(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_thread:
            return self.forces(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_Call(self.forces), x).result(PATIENCE)


class _Call(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("num_others", [0, 1, 2])
@pytest.mark.parametrize("in_thread", [False, True])
def test_backwards_inside_of_forwards_in_several_threads(
    where: str, in_thread: bool, num_others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wants to be alone in the middle of its forward, and so does the training behind its own."""
    monkeypatch.setattr(step, "GIVE_UP_LOOKS", 30)
    results = []
    for how in ("plain", where):
        torch.manual_seed(0)
        model: Any = Forces(in_thread)
        if how != "plain":
            model = wrap(model, where, tmp_path, precision="fp32", slack=2**16)
        optimizer = adam(model)
        with nullcontext() if how == "plain" else evaluated(model, num_others):
            for number in range(4):
                loss = squares(model, number)
                step_on(loss, optimizer)
        results.append((loss.item(), squares(model, 9).item()))
    assert results[0] == results[1]
    world_of(model).check()


def test_a_transform_of_one_thread_keeps_its_weights_whatever_another_does(tmp_path: Path) -> None:
    """``torch.func.grad`` reads weights behind the calls of their modules."""
    model = wrap(Blocks(), "disk", tmp_path, precision="fp32", slack=2**16)
    x, errors = noise(4, 32, dtype=torch.float32), list[BaseException]()

    def compute(model: Any) -> None:
        with torch.no_grad():
            model(torch.ones(4, 32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        errors.extend(run_beside(model, compute))
        return y.square().mean()

    wanted = torch.func.grad(lambda x: model(x).square().mean())(x)
    assert same_bits(torch.func.grad(loss)(x), wanted) and errors == []


def test_each_thread_has_its_own_casts_around_a_norm_in_fp32(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model, inside = wrap(Net(), "ram", tmp_path, keep_fp32=["norm"]), list[torch.dtype]()
    main = threading.current_thread()

    def beside(*_: Any) -> None:
        if threading.current_thread() is main:
            run_beside(model, lambda model: inside.append(model.norm(torch.ones(2, 32)).dtype))

    # Behind the hook that casts what it is given, before the one that casts what it gives.
    model.norm.register_forward_pre_hook(beside)
    assert model(torch.ones(2, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16 and inside == [torch.float32]


def test_who_evaluates_needs_nobody_whose_backward_never_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while it waits for another forward, by an error that somebody keeps."""
    model, kept = wrap(Blocks(), "disk", tmp_path, slack=2**16), list[BaseException]()
    loss, is_inside, may_end = squares(model, 0), threading.Event(), threading.Event()
    main = threading.current_thread()

    def hold(*_: Any) -> None:
        if threading.current_thread() is not main:
            is_inside.set()
            may_end.wait(PATIENCE)

    def interrupt(_: float) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt

    hook = model.layers[1].register_forward_hook(hold)
    beside = threading.Thread(target=evaluate, args=(model,))
    beside.start()
    assert is_inside.wait(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(step, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
        try:
            loss.backward()
        except KeyboardInterrupt as e:
            kept.append(e)
    assert kept, "it waits"
    may_end.set()
    beside.join(PATIENCE)
    hook.remove()
    assert run_beside(model, evaluate) == []
    squares(model, 0).backward()
    adam(model).step()
    world_of(model).check()
