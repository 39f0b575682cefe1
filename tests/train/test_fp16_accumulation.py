"""Products summed in fp16: torch's switch is on while a model that asks for it is managed, and as it was afterwards."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.errors import GeminiError, PlanMismatch
from gemini.machines import measure as measuring
from gemini.machines.measure import measure_gpu
from gemini.train import engine
from tests.memory.test_measure import TINY
from tests.train.helpers import adam, llama, manage
from tests.train.test_activations import batch

HALF: dict[str, Any] = {"precision": "fp16", "fp16_accumulation": True}


def is_on() -> bool:
    return bool(torch.backends.cuda.matmul.allow_fp16_accumulation)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    gc.collect()
    assert not is_on()
    yield
    gc.collect()
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


class Seen(nn.Module):
    """A block that is computed again in backward, and notes how the switch is whenever it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 1)
        self.seen: list[bool] = []
        self.error: BaseException | None = None

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(is_on())
        x = self.up(x)
        x.register_hook(lambda grad: self.seen.append(is_on()))
        if self.error is not None:
            raise self.error
        return x.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(checkpoint(self.inside, x, use_reentrant=False)).sum()  # type: ignore[no-any-return]


def wrap(folder: Path, model: nn.Module | None = None, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fp16_accumulation=True gains nothing")
        return manage(Seen() if model is None else model, folder, **how)


def step(model: Any) -> None:
    optimizer = adam(model)
    scaler = gemini.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8))).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("end", ["release", "gone"])
@pytest.mark.parametrize("before", [False, True])
def test_it_is_on_in_forward_backward_and_what_is_computed_again(end: str, before: bool, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_fp16_accumulation = before
    model = wrap(tmp_path, **HALF)
    step(model)
    assert model.seen == [True] * 3
    if end == "release":
        gemini.release(model)
        step_of = model(torch.ones(2, 8, dtype=torch.float16))
        assert step_of.isfinite() and model.seen[3:] == [before]
    del model
    gc.collect()
    assert is_on() is before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mine")], ids=["interrupt", "error"])
def test_an_error_in_between_leaves_it_on_for_the_next_step_and_off_in_the_end(
    error: BaseException, tmp_path: Path
) -> None:
    model = wrap(tmp_path, **HALF)
    model.error = error
    with pytest.raises(type(error)):
        step(model)
    model.error = None
    model.seen.clear()
    step(model)
    assert model.seen == [True] * 3
    gemini.release(model)
    assert not is_on()


def test_a_model_that_cannot_be_wrapped_leaves_it_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(gemini.BudgetExceeded):
        wrap(tmp_path, llama(), cpu="1KiB", nvme=None, **HALF)
    gc.collect()
    assert not is_on()
    gemini.release(wrap(tmp_path, precision="fp16"))  # nobody is taken for one who has it on


@pytest.mark.parametrize("first", [True, False])
def test_models_in_fp16_that_do_not_agree_are_refused(first: bool, tmp_path: Path) -> None:
    one = wrap(tmp_path, precision="fp16", fp16_accumulation=first)
    with pytest.raises(GeminiError, match=f"has fp16_accumulation={not first}, and another one .* has {first}"):
        wrap(tmp_path, precision="fp16", fp16_accumulation=not first)
    assert is_on() is first
    other = wrap(tmp_path, precision="bf16")  # no product of it is in fp16
    gemini.release(one)
    assert not is_on()
    assert not wrap(tmp_path, precision="fp16", fp16_accumulation=not first).error
    gemini.release(other)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_that_agree_the_last_one_puts_it_back(order: tuple[int, int], tmp_path: Path) -> None:
    both = [wrap(tmp_path, **HALF), wrap(tmp_path, **HALF)]
    gemini.release(both[order[0]])
    assert is_on()
    gemini.release(both[order[1]])
    assert not is_on()


def test_a_program_in_fp16_ends_without_a_word() -> None:
    """The switch goes back while Python is still whole: what the collector ends later finds no modules any more."""
    program = """
import gemini, torch
memory = gemini.MemoryBudget(cpu="64MiB")
model = gemini.GeminiDDP(torch.nn.Linear(8, 8), gemini.GeminiConfig(precision="fp16", device="cpu", memory=memory))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_is_refused_for_other_precisions(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        with pytest.raises(ValueError, match=f'fp16_accumulation=True with precision="{precision}": .* leave it out'):
            gemini.GeminiConfig(precision=precision, fp16_accumulation=True)
    with pytest.raises(ValueError, match='fp16_accumulation=True with precision="bf16"'):
        wrap(tmp_path, fp16_accumulation=True)  # where nothing is said it is bf16
    with pytest.raises(TypeError, match="fp16_accumulation= is True or False, got 'yes'"):
        gemini.GeminiConfig(precision="fp16", fp16_accumulation="yes")  # type: ignore[arg-type]


def test_a_trace_of_other_sums_is_refused(tmp_path: Path) -> None:
    trace = gemini.trace(llama(), batch(), precision="fp16", target="cpu", fp16_accumulation=True)
    assert trace.fp16_accumulation and trace.from_json(trace.to_json()) == trace and "fp16_accumulation" in str(trace)
    with pytest.raises(PlanMismatch, match="the trace has fp16_accumulation=True, and this run has False"):
        wrap(tmp_path, llama(), precision="fp16", trace=trace)
    gemini.release(wrap(tmp_path, llama(), trace=trace, **HALF))


@pytest.mark.parametrize(("card", "gains"), [("NVIDIA GeForce RTX 4090", True), ("NVIDIA H200", False)])
def test_a_card_that_gains_nothing_is_warned_of(card: str, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = SimpleNamespace(torch_device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sums = engine._sums(gemini.GeminiConfig(**HALF), device)
    assert [str(each.message) for each in said] == (
        []
        if gains
        else [f"fp16_accumulation=True gains nothing on {card}: GeForce cards alone are quicker by it. Leave it out"]
    )
    with sums:
        assert is_on()
    assert not is_on()


def test_it_is_on_where_products_are_measured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[torch.dtype, bool] = {}

    def product(size: Any, dtype: torch.dtype, device: torch.device) -> Any:
        return lambda: seen.update({dtype: is_on()})

    monkeypatch.setattr(measuring, "_product", product)
    keys = [key for key, _ in measure_gpu(torch.device("cpu"), TINY)]
    assert seen == {torch.bfloat16: False, torch.float32: False, torch.float16: True}
    assert "gpu_flops_fp16_accumulation" in keys and not is_on()
