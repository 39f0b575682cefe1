"""Placement never changes the bits: the managed loop against the plain loop over drawn placements, budgets, devices.

Each case draws placements for one model family and precision: a random home for every plane of every chunk (one plane
of a chunk on the GPU and its neighbour in the spill file makes no sense to a user, and must work), a random largest
chunk, small or whole tiles, the CPU or the stand-in for a GPU to compute on, updates streamed through it or not,
retained or accumulated gradients, the best kernels or the reference ones. Budgets are what the placement needs and at
most a little more, so that windows are taken from chunks inside forward and backward. The draws are seeded: a failure
prints its own, and replays.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.memory.devices.device import make_device
from gemini.planning.layout import DEFAULT_MAX_CHUNK
from gemini.planning.placement import Placement, Problem, bytes_per_tier, can_stream
from gemini.planning.planes import ADAM as RULE
from gemini.planning.planes import GRAD, RESIDUAL, PlaneKind, compute_itemsize
from gemini.planning.working import device_staging_bytes, staging_bytes, staging_sets, tile_numel
from gemini.tiers import MemoryBudget, Tier
from gemini.train.setup.problem import structural_trace
from tests import kernel_settings, models
from tests.models import Recipe, working_set
from tests.plain import Plain
from tests.world import world_of

# 30 placements for each family, over its precisions; not the whole product, which would only take longer.
ADAM = {"decoupled": False}
KINDS = RULE.kinds
PLAIN_GROUP = {"grouped": False, "scheduled": False}
CASES: list[tuple[str, Recipe, int]] = [
    ("llama", Recipe("bf16"), 14),
    ("llama", Recipe("fp16", **ADAM), 8),
    ("llama", Recipe("fp32", **PLAIN_GROUP), 8),
    ("gpt2", Recipe("bf16"), 20),
    ("gpt2", Recipe("fp32", **ADAM), 10),
    ("mixtral", Recipe("bf16", **PLAIN_GROUP), 20),
    ("mixtral", Recipe("fp16"), 10),
    ("t5", Recipe("bf16", **ADAM), 20),
    ("t5", Recipe("fp16", loss_scale=2.0**20), 10),  # the scale is too high at first: those steps are skipped
    ("tied", Recipe("bf16"), 20),
    ("tied", Recipe("fp32"), 10),
    ("frozen", Recipe("bf16", **ADAM), 20),
    ("frozen", Recipe("fp16"), 10),
    ("mixed", Recipe("bf16"), 20),
    ("mixed", Recipe("fp16", **ADAM), 10),
]


QUICK = {
    ("llama", "bf16"),
    ("gpt2", "fp32"),
    ("mixtral", "fp16"),
    ("t5", "fp16"),
    ("tied", "bf16"),
    ("frozen", "fp16"),
    ("mixed", "bf16"),
}
"""The cases of which the quick suite makes some draws."""

NUM_QUICK = 3
"""Draws of each case in that run."""

SHORT = 6
"""Steps of two draws of three: the first is recorded, the second foretold from it, and the others are like it."""


def steps_of(index: int, recipe: Recipe) -> int:
    return recipe.num_steps if index % 3 == 0 else SHORT


def parts() -> Iterator[Any]:
    """The cases as ranges of draws: six families for the quick suite, all draws for the slow one; none cut short, which
    shows the same of longer runs, for the exhaustive one.
    """
    slow, exhaustive = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.exhaustive]
    for family, recipe, num_draws in CASES:
        name, quick = f"{family}-{recipe.precision}", (family, recipe.precision) in QUICK
        if quick:
            yield pytest.param(family, recipe, range(NUM_QUICK), True, id=name)
        rest = range(NUM_QUICK * quick, num_draws)
        yield pytest.param(family, recipe, rest, True, id=f"{name}-all", marks=slow)
        yield pytest.param(family, recipe, range(num_draws), False, id=f"{name}-whole", marks=exhaustive)


@dataclass(frozen=True)
class Draw:
    """One way to manage a model."""

    device: str
    max_chunk: int
    tile: int | None
    isa: str | None
    gradients: str
    homes: tuple[dict[PlaneKind, Tier], ...]
    budgets: dict[Tier, int]
    streamed: frozenset[int]

    def __str__(self) -> str:
        """Homes as one letter per plane: "gnncg" is weights, residual, exp_avg, exp_avg_sq, grad of one chunk."""
        homes = " ".join("".join(planes[kind].value[0] for kind in KINDS if kind in planes) for planes in self.homes)
        budgets = ", ".join(f"{tier.value} {num_bytes}" for tier, num_bytes in self.budgets.items())
        return (
            f"device={self.device}, max_chunk={self.max_chunk}, tile={self.tile}, isa={self.isa}, "
            f"gradients={self.gradients}, budgets: {budgets}; homes: {homes}; streamed: {sorted(self.streamed)}"
        )

    def config(self, precision: str, nvme_path: Path) -> gemini.GeminiConfig:
        sizes: dict[str, Any] = {tier.value: num_bytes for tier, num_bytes in self.budgets.items()}
        return gemini.GeminiConfig(
            precision=precision,
            memory=MemoryBudget(**sizes, nvme_path=nvme_path),
            placement=Placement(self.homes, self.streamed),
            gradients=self.gradients,
            device=self.device,
            max_chunk=self.max_chunk,
        )


def draw(rng: random.Random, model: nn.Module, precision: str, devices: tuple[str, ...] = ("cpu", "standin")) -> Draw:
    """A random placement and the budgets that just hold it."""
    device = rng.choice(devices)
    tile = rng.choice((None, 4096))
    isa = rng.choice((None, None, "reference"))
    gradients = rng.choice(("retain", "accumulate"))
    max_chunk = rng.choice((8000, 20000, DEFAULT_MAX_CHUNK))
    layout = structural_trace(model, precision).layout(max_chunk=max_chunk)
    tiers = [Tier.CPU, Tier.NVME] if device == "cpu" else list(Tier)
    largest = max(chunk.numel for chunk in layout.chunks)
    problem = Problem(
        layout=layout,
        precision=precision,
        gradients=gradients,
        budgets=dict.fromkeys(tiers, 0),
        compute=make_device(device).tier,
        working_set=working_set(model, layout, precision),
        staging=staging_bytes(min(tile or largest, tile_numel(largest)))
        * staging_sets(make_device(device).tier, precision, overlap=True),
        device_staging=device_staging_bytes(largest, overlap=True),
    )
    # Some placements lean to one tier, so that the corners (all on NVMe, all on one tier) come up as well.
    lean = rng.choice((None, None, None, *tiers))
    homes = tuple(
        {kind: lean if lean and rng.random() < 0.9 else rng.choice(tiers) for kind in problem.sizes[i]}
        for i in range(len(layout.chunks))
    )
    budgets = bytes_per_tier(problem, Placement(homes))
    # A second backward turns retained gradients into fp32 sums: old and new planes stand side by side for a moment.
    if gradients == "retain" and compute_itemsize(precision) == 2:
        for chunk, planes in zip(layout.chunks, homes, strict=True):
            if GRAD in planes:
                budgets[planes[GRAD]] += 4 * chunk.numel
    budgets[problem.compute] += rng.choice((0, 0, 4096, problem.working_set))
    able = [chunk.index for chunk in layout.chunks if chunk.trainable and can_stream(homes[chunk.index])]
    streamed = frozenset(i for i in able if rng.random() < 0.7 and problem.compute is Tier.GPU)
    budgets[problem.compute] += problem.device_staging if streamed else 0
    budgets[problem.compute] += make_device(device).beside_bytes()
    return Draw(device, max_chunk, tile, isa, gradients, homes, budgets, streamed)


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize(("family", "recipe", "draws", "cut_short"), list(parts()))
def test_20_steps_are_the_plain_loop_s_bits_for_every_placement(
    family: str,
    recipe: Recipe,
    draws: range,
    cut_short: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    summary: Callable[[str], None],
) -> None:
    plain = models.plain_loop(family, recipe)
    assert min(plain.coefficients) < 1, "no step was clipped: the test would not see how clipping is done"
    if recipe.loss_scale > 2.0**16:
        assert 0 < plain.num_skipped < recipe.num_steps // 2, "the loss scale was meant to be too high at first"
    num_evictions = num_with_evictions = 0
    on_nvme = dict.fromkeys(KINDS, 0)
    for index in draws:
        seed = f"{family}-{recipe.precision}-{index}"
        made = replace(recipe, num_steps=steps_of(index, recipe)) if cut_short else recipe
        model = models.make_model(family)
        drawn = draw(random.Random(seed), model, recipe.precision)
        try:
            with models.tiles_of(monkeypatch, drawn.tile), kernel_settings.use_isa(drawn.isa):
                model = gemini.GeminiDDP(model, drawn.config(recipe.precision, tmp_path))
                world = world_of(model)
                run, evicted = models.managed_loop(model, made, each_step=world.check)
            models.assert_same(run, models.plain_loop(family, made))
        except BaseException:
            print(f"failed at draw {seed!r}: {drawn}")
            raise
        num_evictions += evicted
        num_with_evictions += evicted > 0
        for kind in {kind for planes in drawn.homes for kind, tier in planes.items() if tier is Tier.NVME}:
            on_nvme[kind] += 1
    if recipe.precision != "bf16":
        del on_nvme[RESIDUAL]
    summary(
        f"{family} {recipe.precision}: {len(draws)} placements, {num_evictions} evictions in forward and backward ("
        f"{num_with_evictions} of them had some); on NVMe in: {', '.join(f'{k} {n}' for k, n in on_nvme.items())}"
    )
    assert num_evictions > 0 and num_with_evictions > len(draws) // 3
    assert all(on_nvme.values()), f"a plane never lived on NVMe: {on_nvme}"


def test_every_family_meets_at_least_30_placements() -> None:
    for family in models.FAMILIES:
        assert sum(num_draws for name, _, num_draws in CASES if name == family) >= 30, family


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", list(models.FAMILIES))
def test_gradients_of_the_first_backward_are_torch_s_own(
    family: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backward, no accumulation: ``full_grad`` shows the bits that torch leaves in ``p.grad``."""
    batch = models.make_batches(1, 1)[0][0]
    plain = models.make_model(family)
    Plain(plain, precision, fp32=models.fp32_in(family))  # casts it as forward is to read it
    plain(**batch).loss.backward()
    for index in range(4):
        model = models.make_model(family)
        drawn = draw(random.Random(f"gradients-{family}-{precision}-{index}"), model, precision)
        with models.tiles_of(monkeypatch, drawn.tile):
            model = gemini.GeminiDDP(model, drawn.config(precision, tmp_path))
            model(**batch).loss.backward()
            for name, param in plain.named_parameters():
                found = model.full_grad(name)
                assert (found is None) == (param.grad is None), name
                if found is not None:
                    # Declared accumulation keeps fp32; the values are those of the compute dtype all the same.
                    assert torch.equal(found, found.to(param.dtype).to(found.dtype)), name
                    models.assert_same_bits(found.to(param.dtype), param.grad, f"gradient of {name} in {drawn}")


# ---- given gradients: against stock torch ---------------------------------------------------------------------------


class GivenGradient(nn.Module):
    """A loss whose gradient with respect to each weight is just what was passed in."""

    def __init__(self, numel: int):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(numel, 3) for _ in range(2))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum(layer(grad).diagonal().sum() for layer, grad in zip(self.layers, grads, strict=True))


def given_gradients(numel: int, step: int) -> list[torch.Tensor]:
    """Of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(3, numel, generator=generator) for _ in range(2)]
    sizes = [10.0 ** torch.randint(-6, 3, g.shape, generator=generator) for g in grads]
    return [g * size * (torch.rand(g.shape, generator=generator) > 0.1) for g, size in zip(grads, sizes, strict=True)]


@pytest.mark.parametrize("placement", ["auto", gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=0.5)])
@pytest.mark.parametrize(("decoupled", "stock"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_one_update_agrees_with_stock_torch(decoupled: bool, stock: Any, placement: Any, tmp_path: Path) -> None:
    def wrap(model: nn.Module) -> Any:
        memory = MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
        return gemini.GeminiDDP(model, gemini.GeminiConfig("fp32", memory=memory, placement=placement, device="cpu"))

    assert_updates_agree(wrap, decoupled, stock)


def assert_updates_agree(wrap: Callable[[nn.Module], Any], decoupled: bool, stock: Any, device: str = "cpu") -> None:
    """From zero moments, and from the moments that torch has after a few steps: one update each, rtol 1e-6 in fp32."""
    numel, hyper = 1500, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    plain = GivenGradient(numel).to(device)
    theirs = stock(plain.parameters(), **hyper, foreach=False)
    for step in range(4):
        model: Any = GivenGradient(numel)
        model.load_state_dict(plain.state_dict())
        model = wrap(model)
        ours = gemini.HybridAdam(model.parameters(), **hyper, decoupled=decoupled)
        if step:
            ours.load_state_dict(theirs.state_dict())
        grads = [grad.to(device) for grad in given_gradients(numel, step)]
        model(grads).backward()
        plain(grads).backward()
        before = {
            name: (param.detach().cpu().clone(), param.grad.cpu().clone(), moment_of(theirs, param).cpu())
            for name, param in plain.named_parameters()
        }
        for name in before:
            models.assert_same_bits(model.full_grad(name), before[name][1], f"gradient of {name}")
        assert torch.equal(model.full_grad("layers.0.weight"), grads[0].cpu()), "not the gradient that was given"
        ours.step()
        theirs.step()
        theirs.zero_grad()
        state = ours.state_dict()["state"]
        for index, (name, param) in enumerate(plain.named_parameters()):
            weight, grad, moment = before[name]
            where = f"{name} after step {step}"
            exp_avg, exp_avg_sq = (theirs.state[param][kind].cpu() for kind in ("exp_avg", "exp_avg_sq"))
            assert float(state[index]["step"]) == step + 1
            close(model.full_param(name), param.detach().cpu(), where, weight)
            close(state[index]["exp_avg"].cpu(), exp_avg, f"exp_avg of {where}", moment, grad)
            square = grad.square() * (1 - hyper["betas"][1])  # in Adam, grad + wd * weight may cancel
            close(state[index]["exp_avg_sq"].cpu(), exp_avg_sq, f"exp_avg_sq of {where}", square)


def moment_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> torch.Tensor:
    return optimizer.state[param]["exp_avg"].clone() if optimizer.state[param] else torch.zeros_like(param)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str, *terms: torch.Tensor) -> None:
    """Within 1e-6 of each element's own size, or of the ``terms`` it is a sum of (which may cancel)."""
    size = torch.stack([wanted.abs(), *(term.abs() for term in terms)]).max(dim=0).values
    excess = (found - wanted).abs() / size.clamp(min=1e-30)
    assert found.shape == wanted.shape and float(excess.max()) <= 1e-6, f"{what} is off by {float(excess.max()):.2e}"
