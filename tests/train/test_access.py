"""Params of a managed model outside of the ordinary loop: read, written, shown, left behind.

A param may be read by name, in ``gathered()``, in a module that is called on its own; it may be written in
``gathered(write=True)``; it may outlive its model. In every placement each of these gives the right values or a clear
error, never garbage and never a crash.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    batch,
    gpt2,
    llama,
    make_config,
    noise,
    on_batch,
    same_bits,
    snapshot,
    step_on,
    train,
    trainable,
    wrap,
)
from tests.world import world_of

Q = "model.layers.1.self_attn.q_proj.weight"


def test_reads_by_any_name(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(tied=True), where, tmp_path), Plain(llama(tied=True))
    on_batch(model, 0).backward()
    on_batch(plain.model, 0).backward()
    embedding = plain.model.model.embed_tokens.weight
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert same_bits(model.full_param(name), embedding.detach())
        assert same_bits(model.full_param(name, torch.float32), llama(tied=True).model.embed_tokens.weight.detach())
        assert same_bits(model.full_grad(name), embedding.grad)
    for read in (model.full_param, model.full_grad):
        with pytest.raises(KeyError, match=r"q_proj\.weight"):
            read("model.layers.1.self_attn.q_proj.wieght")
    model.full_param(Q).zero_()  # a copy
    assert same_bits(model.full_param(Q), plain.model.get_parameter(Q).detach())


def test_reads_are_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``p.device`` says: "meta" stands in for a GPU, on which a tensor of the CPU is as wrong."""
    model: Any = gemini.GeminiDDP(nn.Linear(4, 4), gemini.GeminiConfig(precision="fp32", device="cpu"))
    before = model.full_param("weight")
    monkeypatch.setattr(world_of(model).device, "torch_device", torch.device("meta"))
    average = torch.zeros(4, 4, device="meta")
    with torch.no_grad():
        assert average.lerp_(model.weight, 0.1).is_meta and (model.weight * torch.ones((), device="meta")).is_meta
        assert all(norm.is_meta for norm in torch._foreach_norm([model.weight, model.bias]))
        assert same_bits(model.weight.cpu(), before)
    assert not model.full_param("weight").is_meta and not model.state_dict()["weight"].is_meta


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gathered_shows_weights(precision: str, where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path, precision=precision, slack=2**20), Plain(llama(), precision)
    before = snapshot(model)
    with model.gathered():
        for name, param in model.named_parameters():
            assert same_bits(param.detach().clone(), plain.model.get_parameter(name).detach()), name
    p = model.get_parameter(Q)
    with model.gathered(p), torch.no_grad():  # one
        assert p[3, 4].item() == plain.model.get_parameter(Q)[3, 4].item() and p.t().shape == (32, 32)
    with model.gathered([p]), model.gathered([p]):  # nested
        assert same_bits(p.detach().clone(), plain.model.get_parameter(Q).detach())
    world_of(model).check()
    assert_same_snapshot(before, snapshot(model))


def test_forward_inside_gathered(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path, slack=2**20), Plain(llama())
    optimizer = adam(model)
    with model.gathered():
        loss = on_batch(model, 0)
        loss.backward()
    theirs = on_batch(plain.model, 0)
    plain.backward(theirs)
    assert loss.item() == theirs.item()
    optimizer.step()
    plain.step()
    assert_same_state(model, plain)


def test_gathered_refuses_what_it_cannot_show(where: str, tmp_path: Path) -> None:
    model, other = wrap(llama(), where, tmp_path), wrap(gpt2(), "ram", tmp_path)
    for wrong in (nn.Parameter(torch.ones(2)), next(other.parameters())):
        with pytest.raises(ValueError, match="not a managed param of this model"):
            model.gathered([wrong]).__enter__()
    if where != "ram":
        with pytest.raises(gemini.BudgetExceeded, match="fewer"), model.gathered():
            pass
    world_of(model).check()
    with pytest.raises(gemini.ParamAccessError, match="other memory"):
        with model.gathered(model.get_parameter(Q), write=True):
            model.get_parameter(Q).data = torch.zeros(32, 32, dtype=torch.bfloat16)
    world_of(model).check()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kept", ["nothing", "optimizer", "param", "loss", "part"])
def test_deleting_the_model_gives_everything_back(kept: str, where: str, tmp_path: Path) -> None:
    wrap(llama(), where, tmp_path)
    gc.collect()
    before = num_open_files()
    model, optimizer = trainable(llama(), where, tmp_path)
    train(model, optimizer, [0])
    keep: Any = {
        "nothing": None, "optimizer": optimizer, "param": model.get_parameter(Q), "loss": on_batch(model, 1),
        "part": model.model.layers[1],
    }[kept]  # fmt: skip
    manager = world_of(model).reference()
    del model, optimizer
    gc.collect()
    assert manager() is None
    assert num_open_files() == before
    assert not any(tmp_path.iterdir())
    uses = {
        "optimizer": [lambda: keep.step(), lambda: keep.zero_grad(), lambda: keep.state_dict()],
        "param": [lambda: keep.sum(), lambda: keep.detach().tolist(), lambda: keep + 1, lambda: keep.copy_(keep)],
        "loss": [lambda: keep.backward()],
        "part": [lambda: keep.mlp(noise(2, 5, 32)), lambda: keep.mlp.up_proj.weight.sum()],
    }.get(kept, [])
    for use in uses:
        with pytest.raises(gemini.GeminiError, match="deleted"):
            use()
    if kept == "param":
        assert keep.shape == (32, 32) and keep.dtype is torch.bfloat16


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_model_with_a_scalar_param_goes_quietly(where: str, tmp_path: Path) -> None:
    raw = nn.Linear(4, 4)
    raw.scale = nn.Parameter(torch.tensor(0.5))
    model = wrap(raw, where, tmp_path)
    kept = model.scale
    del model, raw
    gc.collect()
    with torch.no_grad(), pytest.raises(gemini.GeminiError, match="deleted"):
        kept * 2


@pytest.mark.slow
def test_the_interpreter_ends_quietly_with_models_alive(tmp_path: Path) -> None:
    script = """
import sys
from tests.train.helpers import *
models = [wrap(nn.Linear(4, 4), where, Path(sys.argv[1])) for where in PLACEMENTS]
optimizers = [adam(model) for model in models]
"""
    here = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("kept", ["optimizer", "param"])
def test_memory_goes_with_the_model_while_something_is_kept(kept: str, where: str, tmp_path: Path) -> None:
    def resident() -> int:
        gc.collect()
        return psutil.Process().memory_info().rss

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(4)))

    raw = make()
    config = make_config(raw, where, tmp_path)
    if where == "standin":  # the whole state in memory
        config = gemini.GeminiConfig(device="standin", memory=gemini.MemoryBudget(gpu="16MiB", cpu="1GiB"))
    model = gemini.GeminiDDP(raw, config)
    del raw
    optimizer = adam(model)
    model(noise(2, 1024)).float().square().mean().backward()
    optimizer.step()
    keep = optimizer if kept == "optimizer" else next(model.parameters())
    report = model.memory_report()["cpu"]
    held = report["used"] - report["holders"].get("staging", 0)  # of which not all was touched
    full = resident()
    del model, optimizer
    freed = full - resident()
    assert held > 2**20 and freed > 0.8 * held, (freed, held)
    assert keep is not None


def test_data_loader_workers_leave_the_spill_file_alone(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)
    data = [batch(seed, rows=1) for seed in range(6)]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for item, same in zip(loader, data, strict=True):
        loss = model(**item).loss
        step_on(loss, optimizer)
        theirs = plain.model(**same).loss
        plain.backward(theirs)
        plain.step()
        assert loss.item() == theirs.item()
    assert_same_state(model, plain)


def test_a_model_that_was_released_can_be_wrapped_with_other_budgets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    x, kept = torch.randn(3, 8), {}
    for cpu in ("1MiB", "2MiB"):
        managed = gemini.GeminiDDP(
            model, gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu=cpu), device="cpu")
        )
        assert "managed by Gemini in fp32 (cpu " in repr(managed) and f"of {cpu[0]} MiB): Sequential(" in repr(managed)
        optimizer = gemini.HybridAdam(managed.parameters(), lr=0.1)
        managed(x).sum().backward()
        optimizer.step()
        kept = managed.state_dict()
        out = managed(x).detach().clone()
        assert gemini.release(managed) is model and type(model) is nn.Sequential and "managed" not in repr(model)
        assert torch.equal(model(x), out) and all(torch.equal(p, kept[n]) for n, p in model.named_parameters())
        model(x).sum().backward()
        assert model[0].weight.grad is not None, "an ordinary model again"
        model.zero_grad()


def test_what_is_not_managed_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a model that GeminiDDP manages, and this Linear is none"):
        gemini.release(nn.Linear(2, 2))
