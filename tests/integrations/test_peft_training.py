"""Adapters on a managed base: the same bits as the plain loop on the same PeftModel, and two bytes per frozen param."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from gemini.planning.planes import WEIGHTS
from tests.integrations.peft_cases import CAUSAL, CONFIGS, llama, maker, move_adapters, seeded
from tests.train import helpers
from tests.train.helpers import PLACEMENTS, Plain, adam, compare, wrap
from tests.world import world_of

BASES = {"experts": helpers.mixtral, "lora bias": helpers.gpt2}


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(
    ("method", "where", "precision"),
    [
        *((name, "disk", "bf16") for name in CONFIGS if name not in ("vera", "unilora", "oft coft")),
        *((name, where, "bf16") for name in ("lora", "dora", "prompt", "experts") for where in ("ram", "standin")),
        *((name, "disk", precision) for name in ("dora", "prefix") for precision in ("fp16", "fp32")),
    ],
)
def test_the_bits_of_the_plain_loop(method: str, where: str, precision: str, tmp_path: Path) -> None:
    """Also all on NVMe, with room for one module: whatever a method reads must be gathered, and fit."""
    compare(maker(method, BASES.get(method, llama)), where, tmp_path, seeded, precision=precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("method", ["vera", "unilora"])
def test_random_projections(method: str, precision: str, tmp_path: Path) -> None:
    """They are buffers, and have to be in the dtype that the adapters are computed in; indices are what they are."""
    plain_model, model = maker(method)(), maker(method)()
    projections = [b for n, b in plain_model.named_buffers() if ".vera_" in n or ".unilora_scales" in n]
    assert projections
    for projection in projections:
        projection.data = projection.data.to(helpers.DTYPES[precision])
    plain = Plain(plain_model, precision, scale=2.0**16 if precision == "fp16" else None)
    model = wrap(model, "disk", tmp_path, precision=precision)
    assert helpers.train(model, adam(model), range(3)) == helpers.train_plain(plain, range(3))
    helpers.assert_same_state(model, plain)


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rotations_that_bound_themselves(precision: str, checkpointing: bool, where: str, tmp_path: Path) -> None:
    """OFT with ``coft=True`` writes to its params in each forward: what it writes is the master from then on."""
    plain = Plain(maker("oft coft")(), precision)
    model = wrap(maker("oft coft")(), where, tmp_path, precision=precision)
    optimizer, bounded = adam(model), 0
    if checkpointing:
        for each in (plain.model, model):
            each.enable_input_require_grads()
            each.gradient_checkpointing_enable()
            each.train()
    for seed in range(3):
        loss, theirs = seeded(model, seed), seeded(plain.model, seed)
        assert loss.item() == theirs.item()
        plain.backward(theirs)
        loss.backward()
        for name, param in plain.model.named_parameters():
            state, now = plain.states[name], param.detach().reshape(-1)
            changed = now.view(torch.uint8) != state["weights"].view(torch.uint8)
            bounded += int(changed.any())
            if state["residual"] is not None:
                state["residual"][changed.view(now.numel(), -1).any(-1)] = 0
            if param.requires_grad:
                state["weights"].copy_(now)
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
    assert bounded
    helpers.assert_same_state(model, plain)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_bf16_base_with_adapters_of_either_dtype(autocast: bool, tmp_path: Path) -> None:
    """PEFT makes fp32 adapters on a bf16 base: every bit of them becomes the master, and all is computed in bf16."""

    def make() -> Any:
        torch.manual_seed(1)
        base = llama().bfloat16()
        model = peft.get_peft_model(base, CONFIGS["lora"](), autocast_adapter_dtype=autocast)
        move_adapters(model)
        return model

    adapter = next(p for p in make().parameters() if p.requires_grad)
    assert adapter.dtype is (torch.float32 if autocast else torch.bfloat16)
    compare(make, "disk", tmp_path)


TIED: dict[str, Callable[[], peft.PeftConfig]] = {
    "embedding": lambda: peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **CAUSAL),
    "head": lambda: peft.LoraConfig(target_modules=["q_proj", "lm_head"], **CAUSAL),
    "trained head": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], **CAUSAL),
    "trained both": lambda: peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True, **CAUSAL
    ),
    "tokens": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2], **CAUSAL),
}


@pytest.mark.parametrize("what", TIED)
def test_tied_embeddings(what: str, tmp_path: Path) -> None:
    compare(maker(TIED[what], tied=True), "disk", tmp_path)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["rslora with dropout", "dora"])
def test_gradient_checkpointing(method: str, reentrant: bool, tmp_path: Path) -> None:
    def make() -> Any:
        model = maker(method)()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    compare(make, "disk", tmp_path, seeded)


def pages(params: list[nn.Parameter], itemsize: int) -> int:
    """Bytes of a plane of ``itemsize``: each param starts on a page of 4 KiB of the narrowest plane."""
    return sum(-(-param.numel() // 2048) * 2048 * itemsize for param in params)


@pytest.mark.parametrize("method", ["lora", "dora", "prompt", "prefix", "ia3"])
def test_a_frozen_base_has_its_weights_and_nothing_else(method: str, tmp_path: Path) -> None:
    model = maker(method)()
    base = [p for p in model.parameters() if not p.requires_grad]
    adapters = [p for p in model.parameters() if p.requires_grad]
    model = wrap(model, "ram", tmp_path)
    helpers.train(model, adam(model), range(1))
    report = model.memory_report()
    assert report["cpu"]["holders"] == {
        "weights": pages(base, 2) + pages(adapters, 2), "residual": pages(adapters, 2), "grad": pages(adapters, 2),
        "exp_avg": pages(adapters, 4), "exp_avg_sq": pages(adapters, 4),
    }  # fmt: skip
    assert report["trained_params"] == sum(p.numel() for p in adapters)
    for handle in world_of(model).handles:
        frozen = handle.chunk.planes.keys() == {WEIGHTS}
        assert frozen == (not handle.param.requires_grad), handle.name


def test_a_frozen_base_on_the_drive_is_read_and_never_written(tmp_path: Path) -> None:
    model = wrap(maker("lora")(), "disk", tmp_path)
    optimizer = adam(model)
    helpers.train(model, optimizer, range(2))
    adapters = sum(pages([p], 2) for p in model.parameters() if p.requires_grad)
    written = model.memory_report()["moved"]["cpu->nvme"]
    assert written == (1 + 1 + 1 + 2 + 2) * adapters  # gradient, weights, residual, two states


@pytest.mark.parametrize("method", ["dora", "prompt", "prefix"])
def test_generate(method: str, tmp_path: Path) -> None:
    model, plain = wrap(maker(method)(), "disk", tmp_path).eval(), Plain(maker(method)()).model.eval()
    ids = torch.tensor([[5, 7, 11]])
    how = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**how), plain.generate(**how))


class Held(nn.Module):
    """Reads what a ParameterList and a ParameterDict hold, which are never called themselves.

    They are trained and the rest is not, so they live in another chunk than what is called.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(32, 32).requires_grad_(False)
        self.held = nn.ParameterList([torch.randn(32, 32) * 0.1 for _ in range(3)])
        self.scales = nn.ParameterDict({"a": torch.ones(32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.held:
            x = torch.tanh(x @ weight.T)
        return self.wide(x) * self.scales["a"]


@pytest.mark.parametrize("where", PLACEMENTS)
def test_what_containers_hold_is_counted_and_gathered(where: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Held(), Held())

    compare(make, where, tmp_path, helpers.squares)
