"""The machines that come with Gemini: whole, with sources, and not at odds with physics; read by name or by path."""

import re
from pathlib import Path

import pytest
import tomllib

from gemini.errors import PlanMismatch
from gemini.planning.hardware import FIGURES, Figure, Hardware, load_hardware, machine_names
from gemini.tiers import Tier

ROOT = Path(__file__).resolve().parents[2]
NAMES = machine_names()
# What a plan for a machine with GPUs may ask for; the ring only matters where there are several, and what landing takes
# and Adam on a GPU take has to be measured: without it memory's speed is taken (and no update is streamed). Threads
# beside each other matter where the host computes.
_OTHERS = (
    "cpu_flops_bf16", "cpu_flops_fp32", "cpu_op_seconds", "interconnect", "land_cpu", "torch_threads", "update_cpu_one",
    "cpu_contention", "nvme_mixed", "update_gpu", "update_cpu_compact", "network", "nvme_write_sustained",
    "gpu_matrix_share", "gpu_attention_share", "gpu_attention_backward_share", "link_mixed",
    "gpu_flops_fp16_accumulation", "gpu_flops_float8",
)  # fmt: skip
NEEDED = set(FIGURES) - set(_OTHERS)
ADAM_BYTES = 26  # per param: read 14 with a bf16 gradient, written 12


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_has_what_a_plan_asks_for_and_says_from_where(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name, "its name is how it is asked for"
    assert set(hardware.figures) >= NEEDED
    assert hardware.has("interconnect") == (hardware.figures["num_gpus"].value > 1)
    for key, figure in hardware.figures.items():
        assert len(figure.source) > 10, f"{key} of {name} does not say where it comes from"
        assert not figure.source.startswith("measured"), "which would be taken as reached, not as a peak"
        if key.startswith(("gpu_flops", "gpu_bandwidth")):
            said = [f"{figure.value / unit:.4g}" for unit in (1e9, 1e12)]
            assert any(f" {number}" in figure.source.replace(",", "") for number in said), f"{key} of {name}"
        assert "peak" in figure.source or not key.startswith(("gpu_flops", "gpu_band", "h2d", "d2h", "dram"))


@pytest.mark.parametrize("name", NAMES)
def test_derived_figures_are_what_they_are_derived_from(name: str) -> None:
    figures = load_hardware(name).figures
    adam, dram = figures["update_cpu"], figures["dram_bandwidth"]
    assert adam.value == pytest.approx(ADAM_BYTES / dram.value, rel=1e-4)
    factors = re.search(r"peak: ((?:[\d.]+ \w+ x )+)(\d+) MT/s", dram.source)
    assert factors, dram.source
    product = float(factors[2]) * 1e6
    for factor in factors[1].split(" x ")[:-1]:
        product *= float(factor.split()[0])
    assert dram.value == product
    link = re.search(r"PCIe (\d\.0) x(8|16)\b", figures["h2d"].source)
    assert link, figures["h2d"].source
    lanes = {"4.0": 16e9, "5.0": 32e9}[link[1]] * int(link[2])
    assert figures["h2d"].value == figures["d2h"].value == pytest.approx(lanes * 128 / 130 / 8, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_no_machine_is_at_odds_with_itself(name: str) -> None:
    """A slip of a power of ten shows here."""
    value = {key: figure.value for key, figure in load_hardware(name).figures.items()}
    assert value["gpu_bandwidth"] > value["dram_bandwidth"] > value["h2d"]
    assert value["nvme_write"] <= value["nvme_read"] < value["dram_bandwidth"]
    assert 1.5 <= value["gpu_flops_bf16"] / value["gpu_flops_fp32"] <= 16
    is_geforce = name.startswith("rtx") or name == "lohan"
    assert ("gpu_flops_fp16_accumulation" in value) == is_geforce
    if is_geforce:
        assert value["gpu_flops_fp16_accumulation"] == pytest.approx(2 * value["gpu_flops_bf16"], rel=1e-3)
    assert ("gpu_flops_float8" in value) == ("a100" not in name and "3090" not in name), "Ampere has no float8"
    assert value.get("gpu_flops_float8", 2 * value["gpu_flops_bf16"]) == pytest.approx(
        2 * value["gpu_flops_bf16"], rel=0.02
    )
    assert value["gpu_bytes"] < value["cpu_bytes"] < value["nvme_bytes"]
    assert 0.8e12 < value["gpu_flops_bf16"] / value["gpu_sms"] < 8e12
    assert all(0.3 < figure < 1 for key, figure in value.items() if key.endswith("_share"))
    assert 5e-11 < value["update_cpu"] * value["cpu_threads"] < 5e-8 and 1e-6 <= value["gpu_op_seconds"] <= 1e-5


def test_the_published_box_is_the_published_one() -> None:
    """12 drives of 6.5 and 3.4 GB/s by specification, 768 GB, 52 cores, one RTX 4090 as the workstation's."""
    lohan, box = load_hardware("lohan").figures, load_hardware("rtx4090").figures
    assert (lohan["nvme_read"].value, lohan["nvme_write"].value) == (12 * 6.5e9, 12 * 3.4e9)
    assert lohan["cpu_bytes"].value == 768 * 2**30 and lohan["cpu_threads"].value == 2 * 26
    for key in FIGURES:
        if key.startswith("gpu_") and key in box:
            assert lohan[key] == box[key]


def test_a_machine_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(PlanMismatch) as caught:
        load_hardware("rtx9090")
    assert "'rtx9090'" in str(caught.value) and all(name in str(caught.value) for name in NAMES)
    assert "gemini doctor --measure" in str(caught.value)


def test_a_file_is_read_by_its_path_and_its_faults_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Hardware("mine", {"h2d": Figure(1e9, "a guess")})
    path = tmp_path / "mine.json"
    path.write_text(mine.to_json())
    assert load_hardware(path) == load_hardware(str(path)) == mine
    monkeypatch.chdir(tmp_path)
    assert load_hardware("mine.json") == mine
    path.write_text(mine.to_json().replace('"version":1', '"version":2'))
    with pytest.raises(PlanMismatch, match=r"mine\.json: this hardware was written in version 2"):
        load_hardware(path)
    with pytest.raises(PlanMismatch, match="cannot be read"):
        load_hardware(tmp_path)


def test_a_name_means_the_machine_even_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lohan").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_hardware("lohan").name == "lohan"


def test_a_machine_may_have_more_or_less_than_the_named_one(tmp_path: Path) -> None:
    mine = load_hardware("rtx4090,cpu=128GiB,nvme=1TB")
    assert (mine.capacity(Tier.CPU), mine.capacity(Tier.NVME)) == (128 * 2**30, 10**12)
    assert mine.figures["cpu_bytes"].source == "as given" and mine.with_figures("as given") == mine
    assert mine.figures["h2d"] == load_hardware("rtx4090").figures["h2d"]
    path = tmp_path / "mine.json"
    path.write_text(mine.to_json())
    assert load_hardware(path) == mine and load_hardware(f"{path},cpu=1GiB").capacity(Tier.CPU) == 2**30
    for wrong in ("rtx4090,", "rtx4090,cpu", "rtx4090,cpu=", "rtx4090,ram=1GiB", "rtx4090,cpu=-1GiB", "rtx4090,cpu=0"):
        with pytest.raises(PlanMismatch, match="behind a machine stands what it has of gpu, cpu or nvme"):
            load_hardware(wrong)
    with pytest.raises(PlanMismatch, match="'none' is neither a machine"):
        load_hardware("none,cpu=1GiB")


def test_the_machines_are_part_of_the_package() -> None:
    """Files that are no modules go into a wheel only where pyproject.toml says so."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gemini"]
    shipped = {path for pattern in patterns for path in (ROOT / "gemini").glob(pattern)}
    assert {path.stem for path in shipped if path.parent.name == "machines"} == set(NAMES) and len(NAMES) >= 8
