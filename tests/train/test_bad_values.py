"""Bad input to the train room: each is a clear error that comes before anything changed, or a defined result.

Budgets that cannot hold the model, sizes and settings that make no sense, directories that cannot be written, params
that belong elsewhere, gradients with NaN. After every refusal the model at hand is as it was.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import (
    Plain,
    adam,
    assert_same_snapshot,
    assert_trains_alike,
    llama,
    make_config,
    on_batch,
    same_bits,
    snapshot,
    train,
    train_plain,
    wrap,
)
from tests.world import is_managed, world_of

Q = "model.layers.1.self_attn.q_proj.weight"


def assert_untouched(model: nn.Module, like: nn.Module) -> None:
    """Still the ordinary model it was: class, params, hooks, values."""
    assert type(model) is type(like) and not is_managed(model)
    for (name, param), (_, expected) in zip(model.named_parameters(), like.named_parameters(), strict=True):
        assert type(param) is nn.Parameter and same_bits(param.detach(), expected.detach()), name
        assert handle_is_gone(param), name
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def handle_is_gone(param: nn.Parameter) -> bool:
    return getattr(param, "_gemini", None) is None


def cpu(**budget: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(device="cpu", memory=gemini.MemoryBudget(**budget))


# ---- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_budget_too_small_names_the_gap_and_the_cheapest_change(precision: str, tmp_path: Path) -> None:
    everything = world_of(wrap(llama(), "ram", tmp_path, precision=precision)).used(gemini.Tier.CPU)
    model, half = llama(), everything // 2
    config = gemini.GeminiConfig(device="cpu", precision=precision, memory=gemini.MemoryBudget(cpu=half))
    with pytest.raises(gemini.BudgetExceeded, match=r"does not fit: .*missing on cpu.*Cheapest change: ") as error:
        gemini.GeminiDDP(model, config)
    assert_untouched(model, llama())
    match = re.search(r"nvme=([\d.]+ [KM]iB)", str(error.value))
    assert match is not None, error.value
    remedy = gemini.MemoryBudget(cpu=half, nvme=match[1], nvme_path=tmp_path)  # what the error said is enough
    wrapped = gemini.GeminiDDP(model, gemini.GeminiConfig(device="cpu", precision=precision, memory=remedy))
    train(wrapped, adam(wrapped), [0])


def test_budget_below_the_working_set(tmp_path: Path) -> None:
    for budget in ({"cpu": "1kB"}, {"cpu": 0}, {"cpu": "100KiB", "nvme": "64MiB", "nvme_path": tmp_path}):
        model = llama()
        with pytest.raises(gemini.BudgetExceeded, match="missing on cpu") as error:
            gemini.GeminiDDP(model, cpu(**budget))
        assert_untouched(model, llama())
        match = re.search(r"raise the cpu budget to at least ([\d.]+ [KM]iB)", str(error.value))
        if match is not None and "nvme" in budget:
            gemini.GeminiDDP(model, cpu(**{**budget, "cpu": match[1]}))
    model = llama()
    small = gemini.GeminiConfig(device="standin", memory=gemini.MemoryBudget(gpu="10KiB", cpu="1GiB"))
    with pytest.raises(gemini.BudgetExceeded, match=r"missing on gpu.*raise the gpu budget"):
        gemini.GeminiDDP(model, small)
    assert_untouched(model, llama())
    tiny_disk = cpu(cpu="800KiB", nvme="4KiB", nvme_path=tmp_path)
    with pytest.raises(gemini.BudgetExceeded, match=r"missing on nvme.*raise the nvme budget to"):
        gemini.GeminiDDP(model, tiny_disk)
    assert_untouched(model, llama())


def test_the_named_gap_is_the_gap(tmp_path: Path) -> None:
    """With just the bytes it asks for the model fits, with a page less it does not."""
    used = world_of(wrap(llama(), "ram", tmp_path)).used(gemini.Tier.CPU)
    with pytest.raises(gemini.BudgetExceeded):
        gemini.GeminiDDP(llama(), cpu(cpu=used - 4096))
    gemini.GeminiDDP(llama(), cpu(cpu=used))


@pytest.mark.parametrize("size", ["20 Gigs", "GiB", "1.2.3MiB", "20XB", "", "nan", "1e", "²"])
def test_unknown_units(size: str) -> None:
    with pytest.raises(ValueError, match=r"cpu=.*(unit|read)"):
        gemini.MemoryBudget(cpu=size)


@pytest.mark.parametrize("size", [-1, "-20GiB", float("inf"), float("nan"), " -1 kB"])
def test_negative_and_endless_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match=r"gpu=.*(negative|finite)"):
        gemini.MemoryBudget(gpu=size)


@pytest.mark.parametrize("size", [True, b"1GiB", [1], object()])
def test_sizes_of_wrong_type(size: Any) -> None:
    with pytest.raises(TypeError, match="nvme="):
        gemini.MemoryBudget(nvme=size, nvme_path="/tmp")


def test_disk_budget_without_a_directory() -> None:
    with pytest.raises(ValueError, match="nvme_path="):
        gemini.MemoryBudget(nvme="1GiB")
    with pytest.raises(ValueError, match=r"nvme.*nvme_path="):
        config = gemini.GeminiConfig(device="cpu", placement=gemini.StaticPlacement(weights_on_nvme=0.5))
        gemini.GeminiDDP(llama(), config)


# ---- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"precision": "bfloat16"}, "bf16.*fp16.*fp32"),
        ({"precision": torch.bfloat16}, "bf16.*fp16.*fp32"),
        ({"precision": "fp8"}, "bf16"),
        ({"gradients": "keep"}, "transient.*retain.*accumulate"),
        ({"placement": "fast"}, "auto"),
        ({"placement": 0.5}, "StaticPlacement"),
        ({"memory": "20GiB"}, "MemoryBudget"),
        ({"memory": None}, "MemoryBudget"),
        ({"max_chunk": 0}, "max_chunk"),
        ({"max_chunk": 1.5}, "max_chunk"),
        ({"activations": "lots"}, "activations"),
        ({"activations": -5}, "activations"),
        ({"gradients": "transient", "precision": "fp16"}, "retain"),
    ],
)
def test_config_values(values: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        gemini.GeminiConfig(**values)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps", "meta", 3.5, "cpu:", "standin0"])
def test_devices(device: Any) -> None:
    model = llama()
    with pytest.raises(ValueError, match="device"):
        gemini.GeminiDDP(model, gemini.GeminiConfig(device=device))
    assert_untouched(model, llama())


@pytest.mark.parametrize("fraction", [-0.1, 1.1, "half", None, float("nan")])
def test_fractions(fraction: Any) -> None:
    with pytest.raises(ValueError, match="weights_on_nvme"):
        gemini.StaticPlacement(weights_on_nvme=fraction)
    with pytest.raises(ValueError, match="more than 1"):
        gemini.StaticPlacement(weights_on_gpu=0.6, weights_on_nvme=0.6)


def test_things_that_are_not_models_or_configs() -> None:
    for thing in (None, "gpt2", [llama()], llama().state_dict(), nn.Linear):
        with pytest.raises(TypeError, match="nn.Module"):
            gemini.GeminiDDP(thing)
    for config in ("bf16", {"precision": "bf16"}, gemini.MemoryBudget()):
        with pytest.raises(TypeError, match="GeminiConfig"):
            gemini.GeminiDDP(llama(), config)
    for empty in (nn.Module(), nn.Sequential(nn.ReLU(), nn.Dropout())):
        with pytest.raises(ValueError, match="no params"):
            gemini.GeminiDDP(empty)


def test_a_warning_when_a_setting_has_no_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"gpu=.*no effect"):
        gemini.GeminiDDP(llama(), cpu(gpu="1GiB", cpu="1GiB"))
    placement = gemini.StaticPlacement(weights_on_gpu=1.0)
    with pytest.warns(UserWarning, match="no effect"):
        gemini.GeminiDDP(llama(), gemini.GeminiConfig(device="cpu", placement=placement))


# ---- the spill directory ---------------------------------------------------------------------------------------------


def test_directories_that_cannot_hold_a_spill_file(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("x")
    for path in (tmp_path / "missing", a_file, a_file / "below", "/proc", "/proc/self", "/dev/full"):
        model = llama()
        budget = gemini.MemoryBudget(cpu="600KiB", nvme="4MiB", nvme_path=path)
        with pytest.raises(gemini.StorageError, match=re.escape(str(path))):
            gemini.GeminiDDP(model, gemini.GeminiConfig(device="cpu", memory=budget))
        assert_untouched(model, llama())
    assert a_file.read_text() == "x"


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    model = llama()
    with pytest.raises(gemini.StorageError, match=r"No space left.*nvme"):
        gemini.GeminiDDP(model, make_config(llama(), "disk", tmp_path))
    assert_untouched(model, llama())


def test_a_disk_that_fails_while_the_model_moves_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails halfway through wrapping leaves the model as it was."""
    from gemini.memory.nvme import FileTransfer, SpillFile

    write, num_writes = SpillFile.begin_write, 0

    def failing(self: SpillFile, source: torch.Tensor, offset: int) -> FileTransfer:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 9:
            raise gemini.StorageError("the disk is gone")
        return write(self, source, offset)

    monkeypatch.setattr(SpillFile, "begin_write", failing)
    model = llama()
    with pytest.raises(gemini.StorageError, match="gone"):
        gemini.GeminiDDP(model, make_config(llama(), "disk", tmp_path))
    assert_untouched(model, llama())


# ---- params that belong elsewhere ------------------------------------------------------------------------------------


def test_a_param_shared_by_two_wrapped_models(tmp_path: Path) -> None:
    first, second = llama(), llama()
    second.lm_head.weight = first.lm_head.weight
    wrapped = wrap(first, "disk", tmp_path)
    before = snapshot(wrapped)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*another GeminiDDP model"):
        gemini.GeminiDDP(second, cpu(cpu="1GiB"))
    assert_same_snapshot(before, snapshot(wrapped))
    assert all(type(p) is nn.Parameter for n, p in second.named_parameters() if n != "lm_head.weight")
    train(wrapped, adam(wrapped), [0])


def test_an_optimizer_with_params_of_two_models(tmp_path: Path) -> None:
    a, b = wrap(llama(), "ram", tmp_path), wrap(llama(), "disk", tmp_path)
    with pytest.raises(ValueError, match="two GeminiDDP models"):
        gemini.HybridAdam([*a.parameters(), *b.parameters()])
    optimizer = adam(a)
    with pytest.raises(ValueError, match="two GeminiDDP models"):
        optimizer.add_param_group({"params": list(b.parameters())})
    assert len(optimizer.param_groups) == 1
    plain = Plain(llama())
    assert train(a, optimizer, [0]) == train_plain(plain, [0])
    raw, other = llama(), llama()
    both = gemini.HybridAdam([*raw.parameters(), *other.parameters()])  # found out when both are wrapped
    raw, other = gemini.GeminiDDP(raw, cpu(cpu="1GiB")), gemini.GeminiDDP(other, cpu(cpu="1GiB"))
    on_batch(raw, 0).backward()
    with pytest.raises(ValueError, match="two GeminiDDP models"):
        both.step()


def test_managed_and_plain_params_in_one_optimizer(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, head = wrap(llama(), where, tmp_path), nn.Linear(96, 4, dtype=torch.bfloat16)
    optimizer = gemini.HybridAdam([*model.parameters(), *head.parameters()], lr=1e-2)
    before = head.weight.detach().clone()
    head(model(torch.tensor([[1, 2, 3]])).logits).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(head.weight, before) and world_of(model).by_names[Q].num_steps == 1
    optimizer.zero_grad()
    assert head.weight.grad is None


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_bad_gradient_is_refused_before_anything_changed(
    bad: float, precision: str, where: str, tmp_path: Path
) -> None:
    model, plain = wrap(llama(), where, tmp_path, precision=precision), Plain(llama(), precision)
    optimizer = adam(model)
    assert train(model, optimizer, [0]) == train_plain(plain, [0])
    before = snapshot(model)
    with model.model.layers[2].register_forward_hook(lambda module, args, out: out * bad):
        on_batch(model, 1).backward()
    norm = model.clip_grad_norm_(1.0)
    assert not norm.isfinite()
    with pytest.raises(gemini.NonFiniteGradient, match="zero_grad"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(gemini.NonFiniteGradient, match=r"gradient of '[\w.]+' holds inf or NaN.*zero_grad"):
        optimizer.step()
    assert_same_snapshot(before, snapshot(model))
    optimizer.zero_grad()
    assert_trains_alike(model, optimizer, plain, [1])


def test_a_bad_gradient_in_fp16_skips_the_step(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path, precision="fp16")
    optimizer = adam(model)
    train(model, optimizer, [0])
    before, scale = snapshot(model), world_of(model).loss_scale.scale
    for skipped in (1, 2):
        with model.model.layers[2].register_forward_hook(lambda module, args, out: out * float("nan")):
            on_batch(model, 1).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert world_of(model).loss_scale.scale == scale / 2**skipped
        assert_same_snapshot(before, snapshot(model))
    plain = Plain(llama(), "fp16", scale=scale)
    train_plain(plain, [0])
    plain.scale = scale / 4
    assert_trains_alike(model, optimizer, plain, [1])


def test_hyperparameters(tmp_path: Path) -> None:
    params = list(wrap(llama(), "ram", tmp_path).parameters())
    for wrong, match in (
        ({"lr": -1.0}, "lr"), ({"lr": float("nan")}, "lr"), ({"eps": -1e-8}, "eps"), ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"), ({"weight_decay": -0.1}, "weight_decay"), ({"params": []}, "empty"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            gemini.HybridAdam(**{"params": params, **wrong})
    with pytest.raises(ValueError, match="max_norm"):
        wrap(llama(), "ram", tmp_path).clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match="2-norm"):
        wrap(llama(), "ram", tmp_path).clip_grad_norm_(1.0, norm_type=float("inf"))


def test_modes_that_do_not_go_together(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path, gradients="transient")
    before = snapshot(model)
    with pytest.raises(gemini.GeminiError, match="step_in_backward=True"):
        on_batch(model, 0).backward()
    with pytest.raises(gemini.GeminiError, match="step_in_backward=True"):
        train(model, adam(model), [0], clip=None)
    with pytest.raises(gemini.GeminiError, match="retain"):
        model.clip_grad_norm_(1.0)
    assert_same_snapshot(before, snapshot(model))
    other = wrap(llama(), where, tmp_path)
    with pytest.raises(gemini.GeminiError, match="leave step_in_backward out"):
        train(other, adam(other, step_in_backward=True), [0], clip=1.0)
