"""The CUDA kernels as NVRTC compiles them: all of them, and the machine code that nvcc makes of the same text.

Marked ``gpu``, and skipped on a real one, where kernels are run: ``make test-fakegpu``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import cuda_code
from gemini import kernels
from gemini.kernels import nvrtc
from tests.gpu.gpu_cases import ON_FAKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_FAKE, reason="not on the runtime in host memory"),
]
SOME = [
    "join_kernel",
    "clip_kernel",
    "grad_kernel<gemini::cuda::Doing::copy, gemini::Dtype::bf16, true>",
    "update_kernel<gemini::Adam<true>, gemini::Dtype::bf16, true, true>",
    "compact_kernel<gemini::Lion, gemini::Dtype::f16, false>",
]


def test_it_says_what_it_uses() -> None:
    report = kernels.capabilities()
    assert report.cuda == f"compiled by NVRTC {nvrtc.compiler().version}" and report.cuda in str(report)


@pytest.mark.parametrize("architecture", ["89", "90"])
def test_the_code_is_nvcc_s(architecture: str, tmp_path: Path) -> None:
    nvcc = cuda_code.find_nvcc()
    release = "" if nvcc is None else subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if nvcc is None or f"release {nvrtc.compiler().version}," not in release:
        pytest.skip(f"there is no nvcc {nvrtc.compiler().version}")
    cuda_code.examine(nvcc, None, architecture, tmp_path, SOME)
    other, worse = cuda_code.others(tmp_path, nvrtc.compiler(), architecture, SOME)
    assert worse == [] and set(other) <= {SOME[2]}, "of a gradient's kernel addresses are computed in other widths"


def test_a_card_for_games_does_one_operation_on_doubles_for_each_square() -> None:
    """In PTX of a gradient that is copied; a card with quick doubles multiplies them."""

    def counted(target: str) -> tuple[int, int]:
        _, text = nvrtc.compiler().compile(SOME[2], target)
        return len(re.findall(rb"\bmul\.rn\.f64", text)), len(re.findall(rb"\bcvt\.f64\.f32", text))

    assert counted("compute_89") == counted("compute_120") == (0, 0)
    assert counted("compute_90") == counted("compute_80") == (8, 8), "one for each of a lane's eight elements"


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    for kernel in cuda_code.all_kernels():
        assert nvrtc.compiler().compile(kernel, "sm_90")[1]


def test_what_the_compiler_says_is_in_the_error() -> None:
    with pytest.raises(RuntimeError, match=r"cannot compile no_kernel: .*error"):
        nvrtc.compiler().compile("no_kernel", "sm_90")


def test_the_driver_s_refusal_is_in_the_error() -> None:
    driver = nvrtc.Driver()
    with pytest.raises(RuntimeError, match="starting join_kernel: invalid argument"):
        driver.launch(0, 0, "join_kernel", 0)
    assert torch.cuda.is_available()
