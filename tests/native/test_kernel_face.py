"""The face of the kernels: what they refuse and how they say it, the report, the settings, and the thread pool."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks._progress import join
from gemini import kernels
from gemini.rules import ADAM
from tests import kernel_settings
from tests.native.native_cases import NATIVE_ISAS, adam, adam_update, in_subprocess

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")


def call_adam(**changes: torch.Tensor | None) -> None:
    arrays: dict[str, torch.Tensor | None] = {
        "weights": torch.zeros(8),
        "residual": None,
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.zeros(8),
    }
    adam_update(**(arrays | changes), how=adam())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weights": torch.zeros(8, dtype=torch.bfloat16)}, "weights: bfloat16 .*accepted: float32"),
        ({"residual": torch.zeros(8, dtype=torch.int16)}, "weights: float32 .*accepted: bfloat16"),
        (
            {"weights": torch.zeros(8, dtype=torch.bfloat16), "residual": torch.zeros(8, dtype=torch.int32)},
            "residual: int32 .*accepted: int16",
        ),
        ({"grad": torch.zeros(8, dtype=torch.float64)}, "grad: float64 .*accepted: float32, bfloat16, float16"),
        ({"grad": torch.zeros(9)}, r"grad: float32 of shape \(9,\)"),
        ({"exp_avg": torch.zeros(2, 4)}, r"exp_avg: float32 of shape \(2, 4\)"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, "exp_avg_sq: .* not contiguous"),
        ({"grad": torch.zeros(8, device="meta")}, "grad: .* on meta"),
    ],
)
def test_adam_refuses_and_says_what_it_takes(changes: dict[str, torch.Tensor], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call_adam(**changes)


def test_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="dst: float16 .*accepted: bfloat16, float32"):
        kernels.copy_grad(torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="dst: bfloat16 .*accepted: float32"):
        kernels.copy_grad(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.raises(ValueError, match="acc: bfloat16"):
        kernels.accumulate_grad(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.raises(ValueError, match="src: int32"):
        kernels.sum_squares(torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="lo: int16 of shape"):
        kernels.split_master(torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(5, dtype=torch.int16))
    with pytest.raises(ValueError, match="out: bfloat16"):
        kernels.join_master(torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int16), torch.zeros(4).bfloat16())


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}], ids=str
)
def test_hyperparameters_without_meaning_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ADAM.check_group({**ADAM.defaults, **bad}, "a group")


def test_tensors_of_autograd_are_written() -> None:
    for isa in kernels.capabilities().isas:
        with kernel_settings.use_isa(isa):
            weights = torch.ones(8, requires_grad=True)
            adam_update(weights, None, torch.zeros(8), torch.zeros(8), torch.ones(8), adam())
            assert (weights < 1).all()


def test_use_isa_chooses_and_restores() -> None:
    best = kernels.capabilities().isa
    assert best == kernels.capabilities().isas[-1]
    with pytest.raises(RuntimeError), kernel_settings.use_isa("reference"):
        assert kernels.capabilities().isa == "reference"
        with kernel_settings.use_isa(None):
            assert kernels.capabilities().isa == best
        assert kernels.capabilities().isa == "reference"
        raise RuntimeError
    assert kernels.capabilities().isa == best
    with (
        pytest.raises(ValueError, match="'sse9' cannot run here; there are reference"),
        kernel_settings.use_isa("sse9"),
    ):
        pass


def test_report_reads_well() -> None:
    report = kernels.capabilities()
    assert report.native == bool(NATIVE_ISAS) and (report.reason is None) == report.native
    assert report.isa in report.isas and report.isas[0] == "reference"
    assert report.isa in str(report) or not report.native


def test_threads_are_counted_and_torch_is_left_alone(threads_restored: None) -> None:
    before = torch.get_num_threads()
    kernel_settings.set_num_threads(3)
    assert kernels.get_num_threads() == kernels.capabilities().num_threads == 3
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="at least 1"):
        kernel_settings.set_num_threads(0)


# ---- the pool --------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_pool_covers_the_range_once(num_threads: int, threads_restored: None) -> None:
    kernel_settings.set_num_threads(num_threads)
    for n in (0, 1, 32_767, 32_768, 65_537, 3_000_001):
        for align in (1, 64, 4096):
            assert kernels._native.probe_pool(n, align, -1) == n


@needs_native
@pytest.mark.parametrize("fail_at", [0, 1_000_000, 2_999_999])
def test_an_exception_in_a_worker_reaches_the_caller(fail_at: int, threads_restored: None) -> None:
    kernel_settings.set_num_threads(3)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="told to fail"):
            kernels._native.probe_pool(3_000_000, 64, fail_at)
        assert kernels._native.probe_pool(3_000_000, 64, -1) == 3_000_000


@needs_native
def test_many_callers_at_once(threads_restored: None) -> None:
    kernel_settings.set_num_threads(3)
    src = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    expected = kernels.sum_squares(src)
    wrong: list[list[float]] = []

    def call() -> None:
        for number in range(30):
            if number % 10 == 0:
                kernel_settings.set_num_threads(2 + number // 10)
            sums = kernels.sum_squares(src)
            if sums != expected:
                wrong.append(sums)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        join(caller)
    assert not wrong


def on_thread(work: Callable[[], object]) -> object:
    """What `work` returns on a new thread."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(work).result()


@needs_native
def test_a_limit_holds_for_the_thread_that_set_it(threads_restored: None) -> None:
    kernel_settings.set_num_threads(4)
    width = kernels._native.probe_width

    def widths() -> list[int]:
        found = []
        for limit in (1, 2, 3, 100, None):
            kernels.limit_threads(limit)
            found.append(max(width(4_000_000) for _ in range(3)))
        kernels.limit_threads(2)
        return found

    found = on_thread(widths)
    assert found == [1, 2, 3, 4, 4]
    assert on_thread(lambda: max(width(4_000_000) for _ in range(3))) == 4, "another thread is limited too"
    with pytest.raises(ValueError, match="at least 1 thread, not 0"):
        kernels.limit_threads(0)


@needs_native
def test_free_workers_do_not_break_anothers_limit(threads_restored: None) -> None:
    kernel_settings.set_num_threads(5)
    width = kernels._native.probe_width
    ended = threading.Event()

    def unlimited() -> int:
        return [width(1_000_000) for _ in range(40)][-1]  # short ones: workers come free all the time

    def limited() -> int:
        kernels.limit_threads(2)
        found = 0
        while not ended.is_set():
            found = max(found, width(8_000_000))
        return found

    with ThreadPoolExecutor(2) as both:
        one, other = both.submit(limited), both.submit(unlimited)
        try:
            assert other.result() >= 1
        finally:
            ended.set()
        assert one.result() == 2


@needs_native
def test_limited_callers_have_a_worker_each(threads_restored: None) -> None:
    # In a new process, where no worker was started yet; as often as it takes for all of them to be in at once.
    code = """
import os, threading
from gemini import kernels
from tests import kernel_settings
from gemini.rules import ADAM
kernel_settings.set_num_threads(5)
before = len(os.listdir("/proc/self/task"))
workers = 0
def count():
    global workers
    workers = len(os.listdir("/proc/self/task")) - before - 4
begin, end = threading.Barrier(4), threading.Barrier(4, action=count)
def call():
    kernels.limit_threads(2)
    for _ in range(100):
        begin.wait()
        kernels._native.probe_width(8_000_000)
        end.wait()
        if workers == 4:
            break
callers = [threading.Thread(target=call) for _ in range(4)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(workers)
"""
    assert in_subprocess(code) == "4\n"


@needs_native
def test_python_runs_on_while_a_kernel_works(threads_restored: None) -> None:
    kernel_settings.set_num_threads(1)
    src = torch.ones(8_000_000)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with kernel_settings.use_isa("scalar"):
            for _ in range(50):  # a busy machine may need a few tries
                begin = time.perf_counter()
                kernels.sum_squares(src)
                end = time.perf_counter()
                # Ticks well inside: one right after the call began could slip in before the kernel does.
                if sum(begin < at < end for at in list(ticks)) >= 3:
                    return
    finally:
        stop.set()
        ticker.join()
    pytest.fail("no other Python thread ran during 50 kernel calls: the GIL was held")
