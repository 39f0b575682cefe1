"""What a placement asks for is what stands where, and what cannot be is refused before anything is touched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.planning.planes import ADAM, GRAD, WEIGHTS, PlaneKind
from gemini.tiers import MemoryBudget, Tier
from tests import models
from tests.world import world_of

STATES = (*ADAM.states, GRAD)
PLENTY = "64MiB"


def wrap(model: nn.Module, **settings: Any) -> nn.Module:
    return gemini.GeminiDDP(model, gemini.GeminiConfig(**settings))


def plenty(device: str, nvme_path: Path) -> MemoryBudget:
    return MemoryBudget(gpu=PLENTY if device == "standin" else None, cpu=PLENTY, nvme=PLENTY, nvme_path=nvme_path)


def train_one_step(model: nn.Module) -> None:
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    model(**models.make_batches(1, 1)[0][0]).loss.backward()
    optimizer.step()
    world_of(model).check()


def bytes_on(model: nn.Module, kinds: tuple[PlaneKind, ...]) -> dict[Tier, int]:
    """Bytes of some planes by tier, asked of the chunks themselves."""
    found = dict.fromkeys(Tier, 0)
    for chunk in world_of(model).chunks:
        for kind in kinds:
            if kind in chunk.planes:
                found[chunk.planes[kind].tier] += chunk.planes[kind].num_bytes
    return found


def largest_chunk(model: nn.Module, kinds: tuple[PlaneKind, ...]) -> int:
    return max(sum(chunk.planes[k].num_bytes for k in kinds if k in chunk.planes) for chunk in world_of(model).chunks)


FRACTIONS = [(0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1), (0.5, 0.25, 0.25, 0.5), (0.3, 0, 0.7, 0.1), (0, 0.6, 0.1, 0.4)]


@pytest.mark.parametrize(
    ("device", "fractions"),
    [
        *(("standin", fractions) for fractions in FRACTIONS),
        *(("cpu", (0, 0, *nvme)) for nvme in ((0.25, 0.75), (1, 1))),
    ],
)
def test_fractions_are_honoured_to_one_chunk(device: str, fractions: tuple[float, ...], tmp_path: Path) -> None:
    static = gemini.StaticPlacement(*fractions)
    model = wrap(
        models.make_model("llama"), memory=plenty(device, tmp_path), placement=static, device=device, max_chunk=8192
    )
    for kinds, on_gpu, on_nvme in (
        ((WEIGHTS,), static.weights_on_gpu, static.weights_on_nvme),
        (STATES, static.optimizer_on_gpu, static.optimizer_on_nvme),
    ):
        found, slack = bytes_on(model, kinds), largest_chunk(model, kinds)
        total = sum(found.values())
        for tier, fraction in ((Tier.GPU, on_gpu), (Tier.NVME, on_nvme), (Tier.CPU, 1 - on_gpu - on_nvme)):
            # The rest on the CPU has two ends, each of them off by at most half a chunk.
            assert abs(found[tier] - fraction * total) <= slack, (kinds, tier)
            assert fraction > 0.01 or found[tier] == 0, "nothing was asked for there"
    train_one_step(model)


@pytest.mark.parametrize("on_gpu", [{"weights_on_gpu": 0.5, "optimizer_on_gpu": 0.5}, {"updates_on_gpu": 1.0}])
def test_fractions_on_a_gpu_that_is_not_there_warn_once_and_are_left_out(on_gpu: Any, tmp_path: Path) -> None:
    static = gemini.StaticPlacement(**on_gpu, optimizer_on_nvme=0.5)
    with pytest.warns(UserWarning, match="no effect without a GPU") as warnings:
        model = wrap(models.make_model("llama"), memory=plenty("cpu", tmp_path), placement=static, device="cpu")
    assert len(warnings) == 1
    assert bytes_on(model, STATES)[Tier.NVME] > 0 and bytes_on(model, ADAM.kinds)[Tier.GPU] == 0
    assert not any(chunk.streamed for chunk in world_of(model).chunks)
    train_one_step(model)


def test_auto_takes_the_fastest_tier_alone_if_all_fits(tmp_path: Path) -> None:
    for device, fastest in (("cpu", Tier.CPU), ("standin", Tier.GPU)):
        model = wrap(models.make_model("llama"), memory=plenty(device, tmp_path), device=device)
        found = bytes_on(model, ADAM.kinds)
        assert found[fastest] == sum(found.values()) > 0
        train_one_step(model)
        assert world_of(model).num_gathers == 0, "nothing has to be gathered"


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_auto_fills_the_fastest_first(device: str, share: float, tmp_path: Path) -> None:
    """What is not in the computing tier would not have fitted there: its room is used to within one chunk's planes."""
    whole = wrap(models.make_model("llama"), memory=plenty(device, tmp_path), device=device, max_chunk=8192)
    compute = Tier.CPU if device == "cpu" else Tier.GPU
    total = world_of(whole).used(compute)
    sizes = {"cpu": int(total * share)} if device == "cpu" else {"gpu": int(total * share), "cpu": PLENTY}
    memory = MemoryBudget(**sizes, nvme=PLENTY, nvme_path=tmp_path)
    model = wrap(models.make_model("llama"), memory=memory, device=device, max_chunk=8192)
    world = world_of(model)
    found = bytes_on(model, ADAM.kinds)
    assert 0 < found[compute] < sum(found.values()) == total
    spoken_for = max(chunk.spec.numel * 2 for chunk in world.chunks) * 2 + world.held(compute, "staging")
    left = world.budget(compute) - found[compute] - spoken_for
    assert left <= largest_chunk(model, STATES), "room was left though planes had to go below"
    homes = [chunk.planes[WEIGHTS].tier for chunk in world.chunks]
    if found[Tier.NVME]:
        assert homes == sorted(homes, key=list(Tier).index), "weights in order of use, the fastest tier first"
    train_one_step(model)


CPU_ONLY, NO_ROOM = MemoryBudget(cpu="800KiB"), {"cpu": "400KiB", "nvme": "100KiB"}


@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_gathered_weights_give_way_to_the_sums_of_a_second_backward(device: str, tmp_path: Path) -> None:
    """Windows that nobody reads are room: turning retained gradients into fp32 sums may take it, as gathering may."""
    budgets = {"cpu": "2MiB"} if device == "cpu" else {"gpu": "2MiB", "cpu": PLENTY}
    roomy = MemoryBudget(**budgets, nvme=PLENTY, nvme_path=tmp_path)
    model = models.make_model("llama")
    static = gemini.StaticPlacement(weights_on_nvme=1)
    batch = models.make_batches(1, 1)[0][0]
    model = wrap(model, memory=roomy, placement=static, device=device, max_chunk=8192)
    world = world_of(model)
    compute, grads = world.device.tier, [c.planes.get(GRAD) for c in world.chunks]
    # All that anyone may need at once: what is held now, one module's weights, and new sums beside the old gradients.
    sums = sum(2 * plane.num_bytes for plane in grads if plane is not None and plane.tier is compute)
    needed = world.used(compute) + 2 * 2 * max(chunk.spec.numel for chunk in world.chunks) + sums
    exact = MemoryBudget(**(budgets | {compute.value: needed}), nvme=PLENTY, nvme_path=tmp_path)
    model = wrap(models.make_model("llama"), memory=exact, placement=static, device=device, max_chunk=8192)
    world = world_of(model)
    for _ in range(2):
        model(**batch).loss.backward()
        world.check()
    assert all(c.planes[GRAD].dtype is torch.float32 for c in world.chunks)
