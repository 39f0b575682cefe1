"""``save_pretrained`` and ``state_dict``: what leaves a managed model opens anywhere, and what enters it is exact.

Saved directories open with plain transformers and give equal logits, from every placement and precision; full state
dicts round-trip, fp32 masters with every bit.
"""

import errno
import gc
import json
import mmap
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import modeling_utils

import gemini
from gemini.train.checkpoint import export
from tests.train.helpers import (
    DTYPES,
    MODELS,
    PLACEMENTS,
    adam,
    assert_same_snapshot,
    batch,
    failing,
    llama,
    make_config,
    mixtral,
    same_bits,
    snapshot,
    train,
    trainable,
    wrap,
)
from tests.world import world_of

Q = "model.layers.1.self_attn.q_proj.weight"


def trained(make: Any, where: str, path: Path, **how: Any) -> Any:
    model = wrap(make(), where, path, **how)
    train(model, adam(model), range(2))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch(9)).logits


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_models_open_with_plain_transformers(name: str, precision: str, where: str, tmp_path: Path) -> None:
    model = trained(MODELS[name], where, tmp_path, precision=precision)
    before = snapshot(model)
    model.save_pretrained(tmp_path / "out")
    assert_same_snapshot(before, snapshot(model))
    world_of(model).check()
    plain = type(MODELS[name]()).from_pretrained(tmp_path / "out", dtype=DTYPES[precision])
    assert type(plain) is type(MODELS[name]())
    assert same_bits(logits(plain), logits(model))
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name_, value in model.state_dict().items():
        assert same_bits(plain.state_dict()[name_], value), name_
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert "model.safetensors" in files and "config.json" in files
    assert not [f for f in files if f.startswith(".") or f.startswith("tmp")]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(DTYPES[precision])[6:]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("make", [lambda: llama(tied=True), mixtral])
def test_masters_are_saved_with_every_bit(make: Any, precision: str, where: str, tmp_path: Path) -> None:
    model = trained(make, where, tmp_path, precision=precision)
    before = snapshot(model)
    model.save_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same_snapshot(before, snapshot(model))
    plain = type(make()).from_pretrained(tmp_path / "out")  # in the dtype that its config says
    masters = model.state_dict(dtype=torch.float32)
    assert {value.dtype for value in masters.values()} == {torch.float32}
    for name, value in plain.state_dict().items():
        assert same_bits(value, masters[name]), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    again = wrap(type(make()).from_pretrained(tmp_path / "out"), where, tmp_path, precision=precision)
    assert all(same_bits(value, masters[name]) for name, value in again.state_dict(dtype=torch.float32).items())


def test_dtypes_that_cannot_be_saved(tmp_path: Path) -> None:
    model = trained(llama, "ram", tmp_path)
    model.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"dtype=torch.float16\): weights are there in torch.bfloat16 and"):
        model.save_pretrained(tmp_path / "half", dtype=torch.float16)
    with pytest.raises(ValueError, match="takes dtype= or state_dict=, not both"):
        model.save_pretrained(tmp_path / "half", state_dict=model.state_dict(), dtype=torch.float32)
    assert not (tmp_path / "half").exists()


def test_a_hub_is_sent_the_dtype_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent = trained(llama, "ram", tmp_path), list[str]()
    for name in ("hf_api", "create_and_tag_model_card"):
        monkeypatch.setattr(modeling_utils, name, mock.MagicMock())

    def send(self: Any, folder: Path, *args: Any, **kwargs: Any) -> None:
        sent.append(json.loads((folder / "config.json").read_text())["dtype"])

    monkeypatch.setattr(type(model), "_upload_modified_files", send)
    model.save_pretrained(tmp_path / "out", push_to_hub=True, dtype=torch.float32)
    assert sent == ["float32"] and model.config.dtype == "bfloat16"


def test_a_state_may_be_none_at_its_place(tmp_path: Path) -> None:
    """As ``accelerate`` and others hand it on; weights are written from where they are then too."""
    model = trained(llama, "ram", tmp_path)
    with mock.patch.object(export, "_views", side_effect=export._views) as views:
        model.save_pretrained(tmp_path / "out", True, None, dtype=torch.float32)
    assert views.call_count == 1 and (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("make", [lambda: llama(tied=True), mixtral])
def test_shards(make: Any, where: str, tmp_path: Path) -> None:
    model = trained(make, where, tmp_path)
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2 and all((tmp_path / "out" / shard).exists() for shard in shards)
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, framework="pt") as file:
            assert all(index["weight_map"][name] == shard for name in file.keys())  # noqa: SIM118 - no mapping
    plain = type(make()).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert same_bits(logits(plain), logits(model))


def test_the_same_files_as_plain_transformers_writes(where: str, tmp_path: Path) -> None:
    model = trained(mixtral, where, tmp_path)
    model.save_pretrained(tmp_path / "ours")
    plain = mixtral().bfloat16()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    ours, theirs = ((tmp_path / d / "model.safetensors").read_bytes() for d in ("ours", "theirs"))
    assert ours == theirs


def test_weights_of_any_number_take_one_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = trained(llama, "disk", tmp_path), list[int]()
    new = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda file, num_bytes: made.append(num_bytes) or new(file, num_bytes))
    model.save_pretrained(tmp_path / "out")
    assert len(made) == 1 and made[0] >= sum(p.nbytes for p in llama().bfloat16().parameters())


def test_exported_values_do_not_follow_later_training(where: str, tmp_path: Path) -> None:
    model = trained(llama, where, tmp_path)
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    train(model, adam(model), [7])
    assert all(same_bits(state[name], kept[name]) for name in kept)


def test_targets_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    model = trained(llama, where, tmp_path)
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        with pytest.raises((gemini.StorageError, OSError)):
            model.save_pretrained(target)
    assert (tmp_path / "file").read_text() == "x"
    gc.collect()  # models of earlier tests
    fds = len(os.listdir("/proc/self/fd"))
    model.save_pretrained(tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_full_disk_is_an_error(where: str, tmp_path: Path) -> None:
    """Weights that are cast or copied pass through a mapped file, where writing into a hole would end the process."""

    model, optimizer = trainable(llama(), where, tmp_path, precision="fp16")
    full = failing(os, "posix_fallocate", 1, OSError(errno.ENOSPC, "No space left on device"))
    with full, pytest.raises(gemini.StorageError, match=r"save_pretrained\(.*No space left"):
        model.save_pretrained(tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # here the library that writes meets it
    try:
        with pytest.raises(gemini.StorageError, match=r"save_pretrained\(.*File too large"):
            wrap(llama(), "ram", tmp_path).save_pretrained(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    train(model, optimizer, [0])
    model.save_pretrained(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert same_bits(file.get_tensor(Q), model.full_param(Q))


def test_saving_between_backward_and_step(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(llama(), where, tmp_path)
    model(**batch(0)).loss.backward()
    model.save_pretrained(tmp_path / "out")
    model.state_dict()
    optimizer.step()
    other = wrap(llama(), where, tmp_path)
    train(other, adam(other), [0], clip=None)
    assert_same_snapshot(snapshot(model), snapshot(other))


def test_a_model_that_is_not_of_transformers_has_no_save_pretrained(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4)), "ram", tmp_path)
    with pytest.raises(AttributeError, match="save_checkpoint"):
        model.save_pretrained(tmp_path / "out")
    assert not hasattr(model, "resize_token_embeddings")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_bit_of_fp32_masters_survives_wrapping(precision: str, where: str, tmp_path: Path) -> None:
    raw = llama(tied=True)
    with torch.no_grad():
        for param in raw.parameters():
            param.add_(torch.randn_like(param) * 1e-6)  # bits that bf16 does not have
        raw.lm_head.weight.view(-1)[:4] = torch.tensor([1e-40, -0.0, 1.0 + 2**-23, -(2.0**-126)])
    given = {name: value.clone() for name, value in raw.state_dict().items()}
    model = gemini.GeminiDDP(raw, make_config(raw, where, tmp_path, precision=precision))
    masters = model.state_dict(dtype=torch.float32)
    assert masters.keys() == given.keys() and all(same_bits(masters[n], given[n]) for n in given)
    assert masters["lm_head.weight"].data_ptr() == masters["model.embed_tokens.weight"].data_ptr()
    assert model.full_param(Q).dtype is DTYPES[precision]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_masters_round_trip(precision: str, where: str, tmp_path: Path) -> None:
    model = trained(mixtral, where, tmp_path, precision=precision)
    masters, weights = model.state_dict(dtype=torch.float32), model.state_dict()
    for other_place in PLACEMENTS:
        other = wrap(mixtral(), other_place, tmp_path, precision=precision)
        result = other.load_state_dict(masters)
        assert not result.missing_keys and not result.unexpected_keys
        assert all(same_bits(other.full_param(n, torch.float32), masters[n]) for n in masters)
        assert all(same_bits(value, weights[n]) for n, value in other.state_dict().items())
        other.load_state_dict(weights)
        assert all(same_bits(other.full_param(n, torch.float32), weights[n].float()) for n in weights)
    assert all(value.device.type == "cpu" and value.is_contiguous() for value in weights.values())


def test_prefix_and_destination(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    target: dict[str, Any] = {"kept": 1}
    state = model.state_dict(destination=target, prefix="inner.")
    assert state is target and state["kept"] == 1
    assert {name for name in state if name != "kept"} == {f"inner.{n}" for n in model.state_dict()}
    assert same_bits(state[f"inner.{Q}"], model.full_param(Q))


def test_strict_errors_change_nothing(where: str, tmp_path: Path) -> None:
    model = trained(lambda: llama(tied=True), where, tmp_path)
    before, good = snapshot(model), llama(tied=True).state_dict()
    missing = {name: value for name, value in good.items() if name != Q}
    extra = {**good, "model.layers.9.weight": torch.ones(1)}
    misshapen = {**good, Q: torch.ones(3, 3)}
    one_tied_name = {name: value for name, value in good.items() if name != "lm_head.weight"}
    for state, match in (
        (missing, rf"Missing key.*{Q}"), (extra, r"Unexpected key.*layers\.9"), (misshapen, r"size mismatch.*q_proj"),
        (one_tied_name, r"Missing key.*lm_head"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(misshapen, strict=False)
    assert_same_snapshot(before, snapshot(model))
    result = model.load_state_dict({Q: good[Q], "other": torch.ones(1)}, strict=False)
    assert "other" in result.unexpected_keys and "model.norm.weight" in result.missing_keys
    assert same_bits(model.full_param(Q, torch.float32), good[Q])
