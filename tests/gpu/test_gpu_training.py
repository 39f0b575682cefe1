"""On a GPU: what programs do in their loops, the same bits wherever chunks live: precisions, accumulation, updates in
backward, two optimizers, skipped steps, evaluation and generation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import PLACEMENTS, TORCH
from tests.train import helpers
from tests.train.helpers import adam, assert_same_snapshot, assert_same_state, llama, snapshot

SCALE = 2.0**16


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_every_precision_is_the_plain_loop(precision: str, where: str, tmp_path: Path) -> None:
    """Weights, residuals, states and steps after clipped and unclipped steps."""
    plain = gpu_cases.plain(llama, precision, scale=SCALE if precision == "fp16" else None)
    model = gpu_cases.wrap(llama(), where, tmp_path, precision=precision)
    optimizer = adam(model)
    for clip in (1.0, None):
        losses = gpu_cases.train(model, optimizer, range(3), clip=clip)
        assert losses == helpers.train_plain(plain, range(3), gpu_cases.on_batch, clip=clip)
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_scaled_loss_outside_the_model(where: str, tmp_path: Path) -> None:
    """fp16: refused without a scaler, and with one the bits of the plain loop that is scaled at its loss."""

    def loss_of(model: Any, seed: int) -> torch.Tensor:
        ids = gpu_cases.batch(seed)["input_ids"]
        return torch.nn.functional.cross_entropy(model(ids).logits.float().flatten(0, 1), ids.flatten())

    plain = gpu_cases.plain(llama, "fp16", scale=SCALE)
    model = gpu_cases.wrap(llama(), where, tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler(TORCH, init_scale=SCALE)
    with pytest.raises(gemini.GeminiError, match=r"gemini\.GradScaler"):
        loss_of(model, 0).backward()
    for seed in range(2):
        scaler.scale(loss_of(model, seed)).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plain.backward(loss_of(plain.model, seed))
        assert norm == torch.tensor(plain.clip(1.0))
        plain.step()
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_accumulation(gradients: str, where: str, tmp_path: Path) -> None:
    """Three micro-batches per step; "retain" turns its gradients into fp32 sums at the second."""
    plain = gpu_cases.plain(llama)
    model = gpu_cases.wrap(llama(), where, tmp_path, gradients=gradients)
    optimizer = adam(model)
    for step in range(3):
        for micro in range(3):
            seed = 3 * step + micro
            loss, wanted = gpu_cases.on_batch(model, seed), gpu_cases.on_batch(plain.model, seed)
            assert loss.item() == wanted.item()
            (loss / 3).backward()
            plain.backward(wanted / 3)
        assert float(model.clip_grad_norm_(0.5)) == float(torch.tensor(plain.clip(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("gradients", ["transient", "retain"])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_updates_in_backward(gradients: str, where: str, tmp_path: Path) -> None:
    plain = gpu_cases.plain(llama)
    model = gpu_cases.wrap(llama(), where, tmp_path, gradients=gradients)
    optimizer = adam(model, step_in_backward=True)
    losses = gpu_cases.train(model, optimizer, range(4), clip=None)
    assert losses == helpers.train_plain(plain, range(4), gpu_cases.on_batch, clip=None)
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("where", ["all on the gpu", "mixed"])
def test_two_optimizers(where: str, tmp_path: Path) -> None:
    """One for the embeddings, which steps every second time; without clipping, which would be over both."""
    plain, model = gpu_cases.plain(llama), gpu_cases.wrap(llama(), where, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    tables = [name for name in names if "embed" in name or "lm_head" in name]
    params = dict(model.named_parameters())
    often = gemini.HybridAdam([params[n] for n in names if n not in tables], lr=1e-2, weight_decay=0.1)
    seldom = gemini.HybridAdam([params[n] for n in tables], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        loss, wanted = gpu_cases.on_batch(model, step), gpu_cases.on_batch(plain.model, step)
        assert loss.item() == wanted.item()
        loss.backward()
        plain.backward(wanted)
        often.step()
        if step % 2:
            seldom.step()
        else:  # its gradients are forgotten
            plain.grads = {name: grad for name, grad in plain.grads.items() if name not in tables}
        plain.step()
        model.zero_grad()
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_step_with_overflow_is_skipped(where: str, tmp_path: Path) -> None:
    model = gpu_cases.wrap(llama(), where, tmp_path, precision="fp16")
    optimizer = adam(model)
    gpu_cases.train(model, optimizer, range(2))
    before = snapshot(model)
    with model.lm_head.register_forward_hook(lambda module, args, out: out * float("inf")):
        gpu_cases.train(model, optimizer, [2], clip=None)
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_evaluation_and_generation(where: str, tmp_path: Path) -> None:
    """Between two steps, without a trace on the training."""
    plain, model = gpu_cases.plain(llama), gpu_cases.wrap(llama(), where, tmp_path)
    optimizer = adam(model)
    losses = gpu_cases.train(model, optimizer, [0, 1])
    wanted = helpers.train_plain(plain, [0, 1], gpu_cases.on_batch)
    prompt = gpu_cases.batch(7)["input_ids"]
    for each in (model, plain.model):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=prompt).logits, plain.model(input_ids=prompt).logits)
        told = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, plain.model)]
    assert torch.equal(*told) and told[0].shape[1] > prompt.shape[1] and told[0].device.type == TORCH
    for each in (model, plain.model):
        each.train()
    losses += gpu_cases.train(model, optimizer, [2, 3])
    assert losses == wanted + helpers.train_plain(plain, [2, 3], gpu_cases.on_batch)
    assert_same_state(model, gpu_cases.bring_home(plain))


@pytest.mark.skipif(gpu_cases.ON_FAKE or gpu_cases.ON_STANDIN, reason="products that cards alone have")
@pytest.mark.parametrize("where", [where for where in PLACEMENTS if where != "all on the gpu"])
def test_products_in_float8_are_the_same_wherever_chunks_live(where: str, tmp_path: Path) -> None:
    """By the card's own products, whose factors have sides of multiples of 16."""
    pytest.importorskip("torchao", reason="pip install '.[float8]'")
    models = [gpu_cases.wrap(llama(), name, tmp_path, float8=True) for name in ("all on the gpu", where)]
    runs = [gpu_cases.train(model, adam(model), range(3), loss_of=of_16_tokens) for model in models]
    assert runs[0] == runs[1]
    assert_same_snapshot(*(snapshot(model) for model in models))


def of_16_tokens(model: Any, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(**gpu_cases.batch(seed, length=16)).loss
    return loss
