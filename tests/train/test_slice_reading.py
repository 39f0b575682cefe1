"""What of a checkpoint's tensors a slice is made of: the operations of transformers over slices against slices of what
they make."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import core_model_loading as conversions

from gemini.train.loading.stored_model import Made, reading_of
from gemini.train.params.tensor_slice import TensorSlice

CONVERSIONS: dict[str, tuple[list[Any], tuple[int, ...], int, int]] = {
    "as it is": ([], (8, 4), 1, 1),
    "stacked": ([conversions.MergeModulelist(dim=0)], (4, 8), 1, 4),
    "stacked side by side": ([conversions.MergeModulelist(dim=0), conversions.Concatenate(dim=1)], (4, 8), 2, 4),
    "side by side": ([conversions.Concatenate(dim=0)], (8, 4), 2, 1),
    "interleaved": ([conversions.Interleave(dim=1)], (4, 8, 4), 1, 1),
    "transposed": ([conversions.Transpose(0, 1)], (8, 4), 1, 1),
}
"""Operations, the shape of each tensor, how many patterns there are and how many tensors of each."""


def converted(operations: list[Any], by_pattern: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    values: Any = by_pattern
    patterns = list(by_pattern)
    for operation in operations:
        values = operation.convert(values, source_patterns=patterns, target_patterns=["made"], config=None)
    (made,) = values.values()
    return made[0] if isinstance(made, list) else made


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_slices_of_sources_make_the_slice(kind: str) -> None:
    operations, shape, num_patterns, of_each = CONVERSIONS[kind]
    tensors = torch.arange(num_patterns * of_each * torch.Size(shape).numel()).view(num_patterns, of_each, *shape)
    patterns = {f"p{at}": list(tensors[at]) for at in range(num_patterns)}
    whole = converted(operations, {name: list(found) for name, found in patterns.items()})
    made = Made((), tuple(operations), shape, (of_each,) * num_patterns)
    ways = {}
    for dim, groups, rank in itertools.product(range(whole.dim()), (1, 2), range(2)):
        cut = TensorSlice(tuple(whole.shape), dim, groups, rank, 2)
        reading = reading_of(cut, made)
        ways[dim, groups] = reading is not None
        if reading is None:
            continue
        read = {
            name: [
                part
                for number, tensor in enumerate(found)
                if (part := reading.read(tensor, number, whole.dtype)) is not None
            ]
            for name, found in patterns.items()
        }
        assert sum(part.numel() for found in read.values() for part in found) == cut.of(whole).numel()
        assert torch.equal(converted(operations, read), cut.of(whole))
    assert [way for way, is_read in ways.items() if is_read] == {
        "as it is": [(0, 1), (0, 2), (1, 1), (1, 2)],
        "stacked": [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)],
        "stacked side by side": [(0, 1), (1, 2), (2, 1), (2, 2)],
        "side by side": [(0, 2), (1, 1), (1, 2)],
        "interleaved": [(0, 1), (0, 2), (2, 1), (2, 2)],
        "transposed": [],
    }[kind]


@pytest.mark.parametrize(
    "made",
    [Made((), None, (8,), ()), Made((), (), (8, 8), ()), Made((), (conversions.MergeModulelist(dim=0),), (4,), (3,))],
    ids=["one of several", "another shape", "fewer experts"],
)
def test_what_is_not_understood_is_read_whole(made: Made | None) -> None:
    assert reading_of(TensorSlice((8, 4), 0, 1, 0, 2), made) is None
