"""What a placement asks for is what stands where, and what cannot be is refused before anything is touched."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import StorageError
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


# ---- fractions -------------------------------------------------------------------------------------------------------

FRACTIONS = [(0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1), (0.5, 0.25, 0.25, 0.5), (0.3, 0, 0.7, 0.1), (0, 0.6, 0.1, 0.4)]


@pytest.mark.parametrize("fractions", FRACTIONS)
def test_fractions_are_honoured_to_one_chunk(fractions: tuple[float, ...], tmp_path: Path) -> None:
    static = gemini.StaticPlacement(*fractions)
    model = wrap(
        models.make_model("llama"),
        memory=plenty("standin", tmp_path),
        placement=static,
        device="standin",
        max_chunk=8192,
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


@pytest.mark.parametrize(("weights", "states"), [(0, 0), (1, 1), (0.5, 0), (0, 0.5), (0.25, 0.75)])
def test_fractions_without_a_gpu(weights: float, states: float, tmp_path: Path) -> None:
    static = gemini.StaticPlacement(weights_on_nvme=weights, optimizer_on_nvme=states)
    model = wrap(
        models.make_model("gpt2"), memory=plenty("cpu", tmp_path), placement=static, device="cpu", max_chunk=8192
    )
    for kinds, fraction in (((WEIGHTS,), weights), (STATES, states)):
        found = bytes_on(model, kinds)
        assert abs(found[Tier.NVME] - fraction * sum(found.values())) <= largest_chunk(model, kinds)
        assert found[Tier.GPU] == 0
    train_one_step(model)


def test_fractions_on_a_gpu_that_is_not_there_warn_once_and_are_left_out(tmp_path: Path) -> None:
    static = gemini.StaticPlacement(weights_on_gpu=0.5, optimizer_on_gpu=0.5, optimizer_on_nvme=0.5)
    with pytest.warns(UserWarning, match="no effect without a GPU") as warnings:
        model = wrap(models.make_model("llama"), memory=plenty("cpu", tmp_path), placement=static, device="cpu")
    assert len(warnings) == 1
    assert bytes_on(model, STATES)[Tier.NVME] > 0 and bytes_on(model, ADAM.kinds)[Tier.GPU] == 0
    train_one_step(model)


# ---- auto ------------------------------------------------------------------------------------------------------------


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


def test_report_says_where_everything_is(tmp_path: Path) -> None:
    static = gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=0.5)
    model = wrap(models.make_model("llama"), memory=plenty("cpu", tmp_path), placement=static, device="cpu")
    report = model.memory_report()
    assert set(report["nvme"]["holders"]) == set(ADAM.kinds)
    for tier in (Tier.CPU, Tier.NVME):
        for kind in ADAM.kinds:
            assert report[tier.value]["holders"].get(kind, 0) == bytes_on(model, (kind,))[tier]
        assert report[tier.value]["used"] == sum(report[tier.value]["holders"].values())
        assert report[tier.value]["used"] <= report[tier.value]["peak"] <= report[tier.value]["budget"]


# ---- refused, and nothing touched ------------------------------------------------------------------------------------


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], kind: type[nn.Module]) -> None:
    assert type(model) is kind
    assert not [name for name in vars(model) if name.startswith("_gemini")]
    assert not [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter, name
        assert not [key for key in vars(param) if key.startswith("_gemini")], name
        assert not param._post_accumulate_grad_hooks, name
        models.assert_same_bits(param.detach(), before[name], name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**models.make_batches(1, 1)[0][0]).loss.backward()
    optimizer.step()
    assert any(not torch.equal(param, before[name]) for name, param in model.named_parameters()), "it still trains"


CPU_ONLY, NO_ROOM = MemoryBudget(cpu="800KiB"), {"cpu": "400KiB", "nvme": "100KiB"}


@pytest.mark.parametrize(
    ("settings", "tier", "remedy"),
    [
        ({"memory": CPU_ONLY, "device": "cpu"}, "cpu", "nvme_path="),
        ({"memory": NO_ROOM, "device": "cpu", "max_chunk": 8192}, "nvme", "raise the nvme budget to"),
        ({"memory": MemoryBudget(cpu="10KiB"), "device": "cpu"}, "cpu", "raise the cpu budget to at least"),
        (
            {"memory": MemoryBudget(gpu="10KiB", cpu=PLENTY), "device": "standin"},
            "gpu",
            "raise the gpu budget to at least",
        ),
        (
            {"memory": MemoryBudget(gpu="1MiB", cpu=PLENTY), "device": "standin", "activations": "1020KiB"},
            "gpu",
            "raise the gpu budget to at least",
        ),
    ],
)
def test_a_budget_too_small_names_the_gap_and_the_change(
    settings: dict[str, Any], tier: str, remedy: str, tmp_path: Path
) -> None:
    model = models.make_model("llama")
    before, kind = {n: p.detach().clone() for n, p in model.named_parameters()}, type(model)
    if settings["memory"] is NO_ROOM:
        settings = settings | {"memory": MemoryBudget(**NO_ROOM, nvme_path=tmp_path)}
    with pytest.raises(gemini.BudgetExceeded) as error:
        wrap(model, **settings)
    text = str(error.value)
    assert re.search(rf"[\d.]+ [KM]?i?B missing on {tier} \(needs .*, budget .*\)", text), text
    assert remedy in text and "Cheapest change: " in text
    assert_untouched(model, before, kind)
    assert not list(tmp_path.iterdir())


def test_the_advice_is_right(tmp_path: Path) -> None:
    """Raise the budget to what the error says, and it fits."""
    sizes = {"cpu": "400KiB", "nvme": "100KiB"}
    with pytest.raises(gemini.BudgetExceeded) as error:
        wrap(models.make_model("llama"), memory=MemoryBudget(**sizes, nvme_path=tmp_path), device="cpu", max_chunk=8192)
    found = re.search(r"raise the nvme budget to ([\d.]+ [KMGi]*B)", str(error.value))
    assert found is not None
    sizes["nvme"] = found[1]
    memory = MemoryBudget(**sizes, nvme_path=tmp_path)
    train_one_step(wrap(models.make_model("llama"), memory=memory, device="cpu", max_chunk=8192))


def full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["missing directory", "full disk", "meta param", "integer param"])
def test_any_refusal_leaves_the_model_as_it_was(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that can be refused is refused before the first byte of the model moves, also for its last param."""
    model = models.make_model("llama")
    before, kind = {n: p.detach().clone() for n, p in model.named_parameters()}, type(model)
    path, extra = tmp_path, None
    if what == "missing directory":
        path, error = tmp_path / "nowhere", StorageError
    elif what == "full disk":
        error = StorageError
        monkeypatch.setattr("os.posix_fallocate", full_disk)
    elif what == "meta param":
        extra, error = nn.Parameter(torch.empty(10, device="meta")), ValueError
    else:
        extra, error = nn.Parameter(torch.zeros(10, dtype=torch.int32), requires_grad=False), TypeError
    if extra is not None:
        model.last = nn.Module()  # a child's params come after all others, a root's own before them
        model.last.register_parameter("weight", extra)
    memory = MemoryBudget(cpu=PLENTY, nvme=PLENTY, nvme_path=path)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    with pytest.raises(error):
        wrap(model, memory=memory, placement=placement, device="cpu")
    gc.collect()  # the half-made engine ends here, not inside another test
    if extra is not None:
        del model.last
    assert_untouched(model, before, kind)
    assert not list(tmp_path.iterdir())


def test_after_a_refusal_the_same_model_can_be_wrapped_with_more() -> None:
    model = models.make_model("llama")
    with pytest.raises(gemini.BudgetExceeded):
        wrap(model, memory=MemoryBudget(cpu="10KiB"), device="cpu")
    model = wrap(model, memory=MemoryBudget(cpu=PLENTY), device="cpu")
    for name, param in models.make_model("llama").named_parameters():
        models.assert_same_bits(model.full_param(name, dtype=torch.float32), param.detach(), name)
    train_one_step(model)


# ---- what the budget promises afterwards -----------------------------------------------------------------------------


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
