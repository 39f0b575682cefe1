"""Two processes, a GPU each: collectives on its own device and on one stream, and the bits of two processes without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks._processes import Group
from tests.gpu import gpu_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="two devices, and NCCL's part played by gloo"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
HERE = Path(__file__).parent


def started() -> Group:
    path = os.pathsep.join([str(HERE / "site"), str(HERE.parents[1])])
    return Group(str(HERE / "two_ranks.py"), {}, 2, environment=lambda rank: {"PYTHONPATH": path})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Group]:
    group = started()
    yield group
    group.close()


@pytest.fixture(scope="module")
def wanted(ranks: Group) -> list[Any]:
    return ranks.order("train", where=None)


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("where", ["all on the gpu", "all on the host", "mixed", "all on nvme"])
def test_the_bits_of_two_ranks_without_a_gpu(where: str, tight: bool, ranks: Group, wanted: list[Any]) -> None:
    """From the second step on all collectives come from one thread and go to one stream, in one order on all ranks."""
    found = ranks.order("train", where=where, tight=tight)
    for rank, told in enumerate(found):
        assert told["numbers"] == wanted[rank]["numbers"] and not told["races"]
        assert told["device"] == f"cuda:{rank}" and wanted[rank]["device"] == "cpu"
        assert {device for _, device, _ in told["met"]} == {f"cuda:{rank}"}
        assert told["scripted"] == 3 and told["gathers"] == found[0]["gathers"]
        launched = [name for name, _, thread in told["met"] if thread == "gemini-collectives"]
        assert launched == [name for name, _, thread in found[0]["met"] if thread == "gemini-collectives"]
        assert set(launched) == {"all_gather", "reduce_scatter"} and len(launched) % 3 == 0
        (stream,) = told["streams"]["gemini-collectives"]
        assert all(stream not in other for name, other in told["streams"].items() if name != "gemini-collectives")


def test_parts_of_sequences(ranks: Group) -> None:
    for rank, told in enumerate(ranks.order("context")):
        loss, grads = told["numbers"]
        assert loss <= 1e-6 and grads <= 1e-5 and not told["races"]
        assert "all_to_all" in {name for name, _, _ in told["met"]}
        assert {device for _, device, _ in told["met"]} == {f"cuda:{rank}"}


def test_a_collective_that_does_not_wait_for_its_weights_is_a_race() -> None:
    group = started()
    try:
        assert all(group.order("train_without_waits", where="all on the host"))
    finally:
        group.close()
