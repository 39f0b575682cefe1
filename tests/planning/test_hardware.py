"""The description of a machine: figures with units and sources, and words for what is missing or wrong."""

import json
from typing import Any

import pytest

from gemini.errors import GeminiError, MissingFigure, PlanMismatch
from gemini.planning.hardware import FIGURES, Figure, Hardware, human_figure
from gemini.tiers import Tier

BOX = Hardware(
    "a box",
    {
        "gpu_bytes": Figure(24 * 2**30, "data sheet"),
        "h2d": Figure(31.5e9, "PCIe 4.0 x16"),
        "update_cpu": Figure(0.29e-9, "derived"),
    },
)


def written(**changes: Any) -> str:
    """The file of BOX with some fields replaced, or left out where they are None."""
    body = {**json.loads(BOX.to_json()), **changes}
    return json.dumps({key: value for key, value in body.items() if value is not None})


def test_figures_come_back_from_a_file_as_they_were() -> None:
    assert Hardware.from_json(BOX.to_json()) == BOX
    assert Hardware.from_json(json.dumps(json.loads(BOX.to_json()), indent=4)) == BOX, "pretty-printed by a person"


def test_a_figure_is_a_number_with_its_unit_and_its_source() -> None:
    assert BOX.get("h2d", needed_for="the simulator") == 31.5e9
    assert BOX.has("h2d") and not BOX.has("d2h")
    faster = BOX.with_figures("overclocked", h2d=40e9, d2h=40e9)
    assert faster.figures["h2d"] == Figure(40e9, "overclocked") and faster.has("d2h")
    assert BOX.figures["h2d"].value == 31.5e9, "the value itself is not changed"


def test_capacity_is_in_bytes_and_none_where_there_is_no_such_tier() -> None:
    assert BOX.capacity(Tier.GPU) == 24 * 2**30
    assert BOX.capacity(Tier.NVME) is None
    assert all(f"{tier.value}_bytes" in FIGURES for tier in Tier)


def test_a_missing_figure_is_named_with_what_needs_it_and_the_remedy() -> None:
    with pytest.raises(MissingFigure) as caught:
        BOX.get("nvme_read", needed_for="a chunk on NVMe")
    for words in ("'a box'", "'nvme_read'", FIGURES["nvme_read"], "a chunk on NVMe", "gemini doctor --measure"):
        assert words in str(caught.value)
    assert isinstance(caught.value, GeminiError)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "24GiB", None])
def test_a_figure_must_be_a_positive_number(value: Any) -> None:
    with pytest.raises(ValueError, match="'mine': h2d must be a positive number, got"):
        Hardware("mine", {"h2d": Figure(value, "")})


def test_an_unknown_figure_is_refused_with_the_list_of_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown figure 'h2g'; the known ones are .*h2d, d2h"):
        Hardware("mine", {"h2g": Figure(1.0, "")})


@pytest.mark.parametrize(
    "text, words",
    [
        ("a plain text", "it is not JSON"),
        ("[1, 2]", 'it has no "gemini" field'),
        (written(gemini="plan"), "a hardware is needed, and this is a plan"),
        (written(version=7), "written in version 7, and version 1 is read here"),
        (written(name=None), "damaged: Object missing required field `name`"),
        (written(figures={"h2d": {"value": -3, "source": ""}}), "h2d must be a positive number, got -3"),
        (
            written(figures={"h2d": {"value": 3}}),
            "damaged: Object missing required field `source` - at `$.figures[...]`",
        ),
        (written(figures={"speed": {"value": 3, "source": ""}}), "unknown figure 'speed'"),
        (written(figures=[1]), "damaged"),
        (written(figures={"h2d": {"value": True, "source": ""}}), "got `bool` - at `$.figures[...].value`"),
        # What json itself lets through:
        (BOX.to_json().replace("31500000000.0", "NaN"), "h2d must be a positive number, got nan"),
        (BOX.to_json().replace("31500000000.0", "Infinity"), "h2d must be a positive number, got inf"),
    ],
)
def test_a_file_that_is_none_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(PlanMismatch) as caught:
        Hardware.from_json(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("num_gpus", 8, "8"),
        ("gpu_bytes", 24 * 2**30, "24 GiB"),
        ("h2d", 31.5e9, "31.5 GB/s"),
        ("gpu_bandwidth", 1.008e12, "1.008 TB/s"),
        ("nvme_write", 90e6, "90 MB/s"),
        ("gpu_flops_bf16", 165.2e12, "165.2 TFLOP/s"),
        ("cpu_flops_fp32", 180.4e9, "180.4 GFLOP/s"),
        ("gpu_op_seconds", 5e-6, "5 us"),
        ("update_cpu", 0.29e-9, "0.29 ns"),
    ],
)
def test_figures_are_said_as_people_and_data_sheets_say_them(key: str, value: float, said: str) -> None:
    assert human_figure(key, value) == said


def test_every_figure_has_a_way_to_be_said() -> None:
    assert all(human_figure(key, 1.0) for key in FIGURES)
    lines = str(BOX).splitlines()
    assert lines[0] == "a box" and len(lines) == 1 + len(BOX.figures)
    assert lines[2].split() == ["h2d", "31.5", "GB/s", "PCIe", "4.0", "x16"]


def test_brackets_in_brackets_are_no_document() -> None:
    with pytest.raises(PlanMismatch, match="this is not a hardware: it is not JSON"):
        Hardware.from_json("[" * 200_000)
