"""What concerns the whole process: no native library, flush-to-zero mode, fork, exit, and the machine code itself."""

import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gemini import kernels
from gemini.kernels import native as kernels_native
from tests.native.native_cases import NATIVE_ISAS, in_subprocess

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")


def test_without_the_native_library() -> None:
    code = """
import os, tempfile, torch
from gemini import kernels
from tests import kernel_settings
from tests.native.native_cases import adam, adam_update
report = kernels.capabilities()
assert (report.native, report.isa, report.isas, report.cuda) == (False, "reference", ("reference",), None)
weights, residual = torch.ones(100).bfloat16(), torch.zeros(100, dtype=torch.int16)
m, v = torch.zeros(100), torch.zeros(100)
adam_update(weights, residual, m, v, torch.ones(100).half(), adam(lr=0.1, weight_decay=0.0))
assert torch.allclose(weights.float(), torch.tensor(0.9), rtol=1e-2)
assert kernels.sum_squares(torch.ones(100)) == [100.0]
kernel_settings.set_num_threads(2)
assert kernels.get_num_threads() == 2
kernels.limit_threads(1)
kernels.limit_threads(None)
queue = kernels.IoQueue()
with tempfile.TemporaryFile() as file:
    queue.wait(queue.submit_write(file.fileno(), m.data_ptr(), 400, 0, False))
    queue.wait(queue.submit_read(file.fileno(), v.data_ptr(), 400, 0, False))
queue.close()
assert torch.equal(m, v)
print(report)
"""
    assert "torch reference only, GEMINI_NATIVE=0 is set" in in_subprocess(code, GEMINI_NATIVE="0")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        INTERFACE = 0

    monkeypatch.delenv("GEMINI_NATIVE", raising=False)
    monkeypatch.setattr(kernels_native.importlib, "import_module", lambda name: Old)
    native, reason = kernels_native.load()
    assert native is None and reason is not None and "build it again" in reason


@needs_native
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch flushes denormals on x86 only")
def test_workers_follow_the_callers_flush_to_zero_mode() -> None:
    # Gradients whose moments are subnormal: kept in one mode, zero in the other, in every element whoever computes it.
    code = """
import torch
from gemini import kernels
from tests import kernel_settings
from tests.native.native_cases import adam, adam_update
n, scalars = 1_500_000, adam(weight_decay=0.0)
kernel_settings.set_num_threads(4)
grad = torch.full((n,), 1e-38)

def moment():
    m = torch.zeros(n)
    adam_update(torch.zeros(n), None, m, torch.zeros(n), grad, scalars)
    return m.view(torch.int32).min().item(), m.view(torch.int32).max().item()

def sums():
    return kernels.total(kernels.sum_squares(torch.full((n,), 2, dtype=torch.int32).view(torch.float32)))

for turn in range(5):
    kept, kept_sum = moment(), sums()
    assert kept[0] == kept[1] != 0, kept
    assert kept_sum > 0
    assert torch.set_flush_denormal(True)
    assert moment() == (0, 0)
    assert sums() == 0
    torch.set_flush_denormal(False)
    assert (moment(), sums()) == (kept, kept_sum)
print("done")
"""
    assert "done" in in_subprocess(code)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch flushes denormals on x86 only")
@pytest.mark.parametrize("kind", ["reference", *(["native"] if NATIVE_ISAS else [])])
def test_a_thread_takes_anothers_flush_to_zero_mode(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "reference":
        monkeypatch.setattr(kernels, "_native", None)
    subnormal, half = torch.tensor([1e-38]), torch.tensor([0.5])

    def flushes() -> bool:
        return (subnormal * half).view(torch.int32).item() == 0

    def lend() -> int:
        assert kernels.flush_mode() == 0 and not flushes()
        assert torch.set_flush_denormal(True)
        mode = kernels.flush_mode()
        with ThreadPoolExecutor(1) as other:
            other.submit(take, mode).result()
        assert kernels.flush_mode() == mode and flushes(), "the other thread changed this one"
        return mode

    def take(mode: int) -> None:
        for _ in range(2):
            kernels.set_flush_mode(mode)
            assert kernels.flush_mode() == mode and flushes()
            kernels.set_flush_mode(0)
            assert kernels.flush_mode() == 0 and not flushes()

    with ThreadPoolExecutor(1) as one:  # never in this thread: it has other tests to run
        assert one.submit(lend).result() != 0


FORK = """
import os, signal, sys, tempfile, torch
from gemini import kernels
from tests import kernel_settings
kernel_settings.set_num_threads(4)
if not kernels.capabilities().native:
    torch.set_num_threads(1)                             # torch's own threads do not survive a fork, and hang
src = torch.ones(3_000_000)
assert kernels.total(kernels.sum_squares(src)) == 3e6    # the workers are awake now
queue = kernels.IoQueue()
file = tempfile.TemporaryFile()
queue.wait(queue.submit_write(file.fileno(), src.data_ptr(), 1000, 0, False))
child = os.fork()
if child == 0:
    signal.alarm(20)                                     # a hang ends here, with a signal the parent sees
    assert kernels.total(kernels.sum_squares(src)) == 3e6
    m = torch.empty(3_000_000)
    kernels.copy_grad(m, src)
    read = lambda: queue.submit_read(file.fileno(), m.data_ptr(), 10, 0, False)
    for call in (read, lambda: queue.wait(1), queue.close):
        try:
            call()
        except RuntimeError as error:
            assert "did not follow the fork" in str(error), error
        else:
            raise AssertionError("a queue worked without its threads")
    del queue
    own = kernels.IoQueue()
    own.wait(own.submit_read(file.fileno(), m.data_ptr(), 1000, 0, False))
    own.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert kernels.total(kernels.sum_squares(src)) == 3e6
queue.close()
print("both fine")
"""


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("native", ["0", *(["1"] if NATIVE_ISAS else [])])
def test_a_forked_child_neither_hangs_nor_breaks_the_parent(native: str) -> None:
    assert "both fine" in in_subprocess(FORK, GEMINI_NATIVE=native)


@pytest.mark.slow
@needs_native
def test_forking_while_another_thread_is_in_the_pool() -> None:
    # The child inherits the pool's mutex as it stands: locked, once in a while.
    code = """
import os, signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)      # that forking with threads is risky is the point here
from gemini import kernels
from tests import kernel_settings
kernel_settings.set_num_threads(3)
probe = kernels._native.probe_pool
stop = threading.Event()
def hammer():
    while not stop.is_set():
        probe(40_000, 64, -1)
threads = [threading.Thread(target=hammer) for _ in range(2)]
for thread in threads: thread.start()
children = []
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if probe(40_000, 64, -1) == 40_000 else 1)
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
stop.set()
for thread in threads: thread.join()
assert statuses == [0] * 100, statuses
print("done")
"""
    assert "done" in in_subprocess(code)


def test_exit_with_work_behind_does_not_hang() -> None:
    code = """
import tempfile, torch
from gemini import kernels
from tests import kernel_settings
src = torch.ones(3_000_000)
kernels.sum_squares(src)
queue, file = kernels.IoQueue(), tempfile.TemporaryFile()
queue.submit_write(file.fileno(), src.data_ptr(), src.nbytes, 0, False)
print("leaving")
"""
    assert "leaving" in in_subprocess(code)


@needs_native
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 machine code")
def test_machine_code_is_vectorised_and_never_contracted() -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", kernels._native.__file__]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\bvfn?m(?:add|sub)\w*", code) == []
    # Every variant works on whole vectors of its own width; a lost target attribute shows here first.
    for register in ("zmm", "ymm", "xmm"):
        assert re.search(rf"\bv?sqrtps\s.*%{register}", code), f"no vector square root on {register}"
        assert re.search(rf"\bv?divps\s.*%{register}", code), f"no vector division on {register}"
