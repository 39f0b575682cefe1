"""On a GPU: placement, budget, tiles and kernels never change the bits of 20 steps, those of the plain loop there.

The cases are those of ``tests/train/test_exactness.py``, with both loops on the GPU. The plain loop is torch and the
reference kernels alone; that it repeats itself to the bit is tested first, for nothing else means anything without it.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import gemini
from tests import kernel_settings, models
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import DEVICE, PLACEMENTS, TORCH
from tests.models import Recipe
from tests.plain import Plain
from tests.train.test_exactness import draw
from tests.world import world_of

DRAWN = [
    ("llama", Recipe("bf16"), 6),
    ("gpt2", Recipe("fp32", decoupled=False), 4),
    ("mixtral", Recipe("bf16", grouped=False, scheduled=False), 4),
    ("t5", Recipe("fp16", loss_scale=2.0**20), 4),  # the scale is too high at first: those steps are skipped
    ("tied", Recipe("bf16"), 4),
    ("frozen", Recipe("fp16"), 4),
]
FAMILIES = [pytest.param(family, recipe, id=f"{family}-{recipe.precision}") for family, recipe, _ in DRAWN]


@pytest.mark.parametrize(("family", "recipe"), FAMILIES)
def test_the_plain_loop_repeats_itself(family: str, recipe: Recipe) -> None:
    short = replace(recipe, num_steps=6)
    again = models.plain_loop.__wrapped__(family, short, TORCH)  # type: ignore[attr-defined]
    models.assert_same(again, models.plain_loop(family, short, TORCH))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_20_steps_of_a_small_llama(where: str, overlap: bool, tmp_path: Path) -> None:
    recipe = Recipe("bf16")
    plain = models.plain_loop("llama", recipe, TORCH)
    assert min(plain.coefficients) < 1, "no step was clipped: the test would not see how clipping is done"
    model = models.make_model("llama")
    model = gpu_cases.wrap(model, where, tmp_path, overlap=overlap, max_chunk=20000)
    run, num_evictions = models.managed_loop(model, recipe, each_step=world_of(model).check)
    models.assert_same(run, plain)
    assert num_evictions > 0 or where not in ("all on the host", "all on nvme")


@pytest.mark.parametrize(
    ("family", "recipe", "num_draws"), [pytest.param(*c, id=f"{c[0]}-{c[1].precision}") for c in DRAWN]
)
def test_drawn_placements(
    family: str,
    recipe: Recipe,
    num_draws: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    summary: Callable[[str], None],
) -> None:
    """A random home for every plane of every chunk, budgets that just hold it, small tiles, reference kernels."""
    num_evictions = 0
    for index in range(num_draws):
        made = recipe if index == 0 else replace(recipe, num_steps=6)
        seed = f"card-{family}-{recipe.precision}-{index}"
        model = models.make_model(family)
        drawn = draw(random.Random(seed), model, recipe.precision, (DEVICE,))
        try:
            with models.tiles_of(monkeypatch, drawn.tile), kernel_settings.use_isa(drawn.isa):
                model = gemini.GeminiDDP(model, drawn.config(recipe.precision, tmp_path))
                run, evicted = models.managed_loop(model, made, each_step=world_of(model).check)
            models.assert_same(run, models.plain_loop(family, made, TORCH))
        except BaseException:
            print(f"failed at draw {seed!r}: {drawn}")
            raise
        num_evictions += evicted
    summary(f"on {DEVICE}: {family} {recipe.precision}: {num_draws} placements, {num_evictions} evictions")
    assert num_evictions > 0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("where", ["all on the gpu", "all on nvme"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "tied"])
def test_gradients_are_torch_s_own(family: str, where: str, precision: str, tmp_path: Path) -> None:
    batch = models.on(TORCH, models.make_batches(1, 1)[0][0])
    plain = models.make_model(family).to(TORCH)
    Plain(plain, precision)  # casts it as forward is to read it
    plain(**batch).loss.backward()
    model = gpu_cases.wrap(models.make_model(family), where, tmp_path, precision=precision)
    model(**batch).loss.backward()
    for name, param in plain.named_parameters():
        models.assert_same_bits(model.full_grad(name), param.grad.cpu(), f"gradient of {name}")
