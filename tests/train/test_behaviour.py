"""The ordinary training loop on a managed model does what it does on a plain one, bit for bit, in every placement.

Each test drives a behaviour of the loop (generation, checkpointing, clipping, optimizers made before or after) on a
model whose chunks live in RAM, on disk, or on the stand-in GPU, and compares with the plain loop of ``helpers``. Kinds
of models and habits of loops are in ``test_programs.py``, reads and writes of params in ``test_access.py``.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.train.setup import adoption
from tests.scaling import backward, scaler_of
from tests.train.helpers import (
    Blocks,
    Plain,
    adam,
    assert_same_state,
    assert_trains_alike,
    batch,
    failing,
    gpt2,
    llama,
    on_batch,
    pair,
    same_bits,
    squares,
    step_on,
    t5,
    train,
    train_plain,
    trainable,
    wrap,
)
from tests.world import world_of


def test_a_gradient_in_only_one_micro_batch_counts(where: str, tmp_path: Path) -> None:
    model, optimizer, plain = pair(Blocks, where, tmp_path)
    for path in ((0, 2), (0, 1, 2), (0, 2)):
        model.path = plain.model.path = path
        squares(model, 0).backward()
        plain.backward(squares(plain.model, 0))
    optimizer.step()
    plain.step()
    assert_same_state(model, plain)


@pytest.mark.parametrize("make", [llama, t5])
def test_generate(make: Any, where: str, tmp_path: Path) -> None:
    model, optimizer, plain = pair(make, where, tmp_path)
    for step in range(2):
        ids = batch(7)["input_ids"]
        how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(model.eval().generate(ids, **how), plain.model.eval().generate(ids, **how))
        model.train(), plain.model.train()
        assert train(model, optimizer, [step]) == train_plain(plain, [step])
    assert_same_state(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [lambda: llama(tied=True), gpt2, t5])
def test_gradient_checkpointing(make: Any, reentrant: bool, where: str, tmp_path: Path) -> None:
    model, optimizer, plain = pair(make, where, tmp_path)
    without = on_batch(plain.model, 0).item()
    for checkpointed in (model, plain.model):  # T5 sums its gradients in another order when it is checkpointed
        checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert on_batch(model, 0).item() == without
    assert_trains_alike(model, optimizer, plain, range(2))
    assert where == "ram" or world_of(model).num_evictions > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_clipping_returns_the_true_norm_and_clips(precision: str, where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(llama(tied=True), where, tmp_path, precision=precision)
    backward(model, on_batch(model, 0))
    scaler_of(model).unscale_(optimizer)
    names = [name for name, _ in model.named_parameters()]
    true = math.sqrt(sum(model.full_grad(n).double().square().sum().item() for n in names))
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(true, rel=1e-6)
    assert model.clip_grad_norm_(true / 4).item() == pytest.approx(true, rel=1e-6)
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(true / 4, rel=1e-5)  # as torch: it is clipped now
    model.zero_grad()
    assert model.clip_grad_norm_(1.0).item() == 0.0


def test_plain_steps_before_wrapping(where: str, tmp_path: Path) -> None:
    raw = llama().bfloat16()
    plain = Plain(llama().bfloat16())
    optimizer = adam(raw)
    train(raw, optimizer, range(2), clip=None)
    train_plain(plain, range(2), clip=None)
    model = wrap(raw, where, tmp_path)
    masters = {name: model.full_param(name, torch.float32).view(-1) for name in plain.states}  # before any further step
    assert not [name for name, master in masters.items() if not same_bits(master, plain.master(name))]
    assert_trains_alike(model, optimizer, plain, range(2, 4))


def test_loading_after_plain_steps_and_wrapping_is_not_undone(where: str, tmp_path: Path) -> None:
    raw, other = llama().half(), {name: value + 1 for name, value in llama().state_dict().items()}
    optimizer = adam(raw, lr=0.0, weight_decay=0.0)
    for param in raw.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # gives every param an fp32 master of its own
    optimizer.zero_grad()
    model = wrap(raw, where, tmp_path, precision="fp16")
    model.load_state_dict(other)
    train(model, optimizer, [0])  # a step with lr=0
    assert not [n for n, v in other.items() if not same_bits(model.full_param(n, torch.float32), v.float())]


def test_what_is_trained_later_is_so_whole_or_not_at_all() -> None:
    """Memory that fails in the middle: nothing stays reserved, and the next forward tries again."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[0].requires_grad_(False)
    model = gemini.GeminiDDP(
        net, gemini.GeminiConfig(precision="bf16", memory=gemini.MemoryBudget(cpu="8MiB"), device="cpu")
    )
    before = model.memory_report()["cpu"]["used"]
    model[0].requires_grad_(True)
    fails = failing(adoption, "make_plane", 2, MemoryError("no more"))
    with fails as made, pytest.raises(MemoryError, match="no more"):
        model(torch.ones(2, 64))
    assert len(made) == 2 and model.memory_report()["cpu"]["used"] == before
    model(torch.ones(2, 64)).square().mean().backward()
    assert model.full_grad("0.weight") is not None


def test_what_is_trained_later_leaves_room_for_the_staging_of_a_drive(tmp_path: Path) -> None:
    def run(cpu: int, nvme: str = "8MiB") -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        net[:4].requires_grad_(False)
        memory = gemini.MemoryBudget(cpu=cpu, nvme=nvme, nvme_path=str(tmp_path))
        model = gemini.GeminiDDP(net, gemini.GeminiConfig(precision="fp32", memory=memory, device="cpu"))
        optimizer = gemini.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            if step == 1:
                model[:4].requires_grad_(True)
                optimizer.add_param_group({"params": [*model[:4].parameters()]})
            step_on(model(torch.ones(2, 64)).square().mean(), optimizer)
        return model.state_dict()

    expected = run(2**23)
    for cpu in range(170 * 2**10, 540 * 2**10, 20 * 2**10):
        try:
            assert all(map(same_bits, run(cpu).values(), expected.values())), cpu
        except gemini.BudgetExceeded as e:
            assert "became trained" in str(e) or "raise the cpu budget" in str(e), (cpu, e)
    # On a drive without room nothing is staged: what fits in memory (four chunks of 72 KiB more) is trained there.
    assert all(map(same_bits, run((480 + 4 * 72) * 2**10, nvme="64KiB").values(), expected.values()))
