"""On a GPU: every figure of a GPU is measured, and is at least of the right order."""

import torch

from gemini.machines.measure import Sizes, measure_gpu
from gemini.planning.hardware import FIGURES
from tests.gpu.gpu_cases import takes_time


@takes_time
def test_the_figures_of_a_card() -> None:
    figures = dict(measure_gpu(torch.device("cuda", 0), Sizes()))
    assert set(figures) - {"interconnect"} == {
        key for key in FIGURES if "gpu" in key and not key.endswith("_share")
    } | {"h2d", "d2h", "link_mixed", "copy_seconds"}
    assert figures["gpu_bytes"].value == torch.cuda.mem_get_info(0)[1]
    assert figures["gpu_flops_bf16"].value > 1e12 and figures["gpu_bandwidth"].value > figures["h2d"].value > 1e9
