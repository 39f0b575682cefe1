"""What checkpoints keep besides weights and states: tensors of every dtype and form that is plain numbers come back as
the same numbers, and everything else is refused before anything is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gemini
from tests.train.helpers import adam, same_bits, wrap
from tests.world import world_of

PLAIN = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


class Holder(nn.Module):
    """A model with one persistent buffer."""

    def __init__(self, buffer: torch.Tensor | None = None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("held", buffer)


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    data = torch.arange(1, numel * dtype.itemsize + 1, dtype=torch.uint8)
    return ((data % 2).bool() if dtype is torch.bool else data.view(dtype)).view(shape)


@pytest.mark.parametrize("wait", [True, False])
def test_every_plain_dtype_comes_back_bit_by_bit(wait: bool, tmp_path: Path) -> None:
    extra = {
        str(dtype): [
            of_dtype(dtype, 2, 3),
            of_dtype(dtype, 1).view(()),
            of_dtype(dtype, 0, 3),
            of_dtype(dtype, 2, 2).t(),
        ]
        for dtype in PLAIN
    }
    model = wrap(Holder(), "ram", tmp_path)
    optimizer = adam(model)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra, wait=wait).wait()
    found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    for name, values in extra.items():
        assert all(same_bits(a, b) for a, b in zip(values, found[name], strict=True)), name


@pytest.mark.parametrize("dtype", PLAIN)
def test_buffers_of_every_plain_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = wrap(Holder(of_dtype(dtype, 4)), "ram", tmp_path)
    optimizer = adam(model)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    kept = model.held.clone()
    model.held.copy_(torch.zeros_like(kept))
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert same_bits(model.held, kept)


def forms() -> dict[str, torch.Tensor]:
    number = torch.tensor([1 - 2j, 3 + 4j])
    negative = number.conj().imag
    assert number.conj().is_conj() and negative.is_neg()
    return {
        "conjugated": number.conj(), "negated": negative, "both": torch.view_as_complex(torch.ones(3, 2)).conj()[::2],
        "every other": torch.arange(9.0)[::2], "expanded": torch.tensor([2.0]).expand(3),
        "a part": torch.arange(9)[4:6],
        "a param": nn.Parameter(torch.ones(2)), "upside down": torch.arange(6).view(2, 3).t(),
    }  # fmt: skip


def test_views_come_back_as_the_numbers_they_show(tmp_path: Path) -> None:
    for name, value in forms().items():
        held = value.detach() if name != "expanded" else value.clone()
        model = wrap(Holder(held), "ram", tmp_path)
        optimizer = adam(model)
        shown = value.tolist()
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        with torch.no_grad():
            model.held.zero_()
        found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        assert found.tolist() == model.held.tolist() == shown, name
        assert world_of(model).corrupted_by is None


def impossible() -> dict[str, Any]:
    found = {
        "sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr(), "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }  # fmt: skip
    with FakeTensorMode():
        found["fake"] = torch.ones(2)
    return found


@pytest.mark.parametrize("name", impossible())
def test_tensors_that_are_not_plain_numbers_are_refused(name: str, tmp_path: Path) -> None:
    value = impossible()[name]
    model = wrap(Holder(), "ram", tmp_path)
    with pytest.raises(TypeError, match=r"extra\.odd is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model), extra={"odd": value})
    model = wrap(Holder(), "ram", tmp_path)
    model.held = value
    with pytest.raises(TypeError, match=r"state_dict\(\)\.held is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model))
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_read_back_are_refused(tmp_path: Path) -> None:
    model = wrap(Holder(), "ram", tmp_path)
    optimizer = adam(model)
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(30):
        deep = {1: (deep,)} if isinstance(deep, list) else [deep]
    for extra in (endless, 10**5000, {torch.ones(1): 1}):
        with pytest.raises(TypeError, match="which a checkpoint cannot keep"):
            gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra)
        assert list(tmp_path.iterdir()) == []
    for value in (deep, 10**3000, "\ud800", float("-inf"), [1, "a" * 10**5]):
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        assert gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer) == value
