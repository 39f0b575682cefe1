"""BatchNorm nets, spectral norms, an fp32 head and a class that declares its fp32 parts, in bf16 by every road: the
losses of stock mixed precision, within its own spread.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.integrations.lightning_cases import alone  # noqa: F401 - a fixture for this module
from tests.integrations.mixed_cases import KINDS, ROADS, STEPS, loop, make


@pytest.fixture(autouse=True)
def no_accelerator_before() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@cache
def stock(kind: str) -> tuple[list[float], float]:
    """The losses of stock mixed precision, and how far apart its runs are that begin a rounding from each other."""
    runs = [loop(make(kind, nudge), kind, True, Path()) for nudge in range(6)]
    return runs[0], max(max(losses) - min(losses) for losses in zip(*runs, strict=True))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_stock_mixed_precision(kind: str, road: str, tmp_path: Path) -> None:
    wanted, spread = stock(kind)
    found = ROADS[road](make(kind), kind, False, tmp_path)
    assert len(found) == STEPS and found[-1] < found[0]
    for a, b in zip(found, wanted, strict=True):
        # A classifier in bf16 has a loss in bf16, which autocast would compute in fp32: that rounding is beside it.
        assert abs(a - b) <= spread + (2**-8 * b if kind == "resnet_half" else 0), (found, wanted, spread)


@pytest.mark.slow
@pytest.mark.parametrize("road", ["accelerate", "trainer", "lightning"])
@pytest.mark.parametrize("kind", KINDS)
def test_stock_roads_have_the_losses_of_the_stock_loop(kind: str, road: str, tmp_path: Path) -> None:
    """So that one of them stands for all."""
    torch.testing.assert_close(
        ROADS[road](make(kind), kind, True, tmp_path), stock(kind)[0], rtol=0, atol=1e-3 if "resnet" in kind else 1e-5
    )
