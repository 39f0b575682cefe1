"""A batch of whole sequences as the part of it that one rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from gemini.ranks.group import checksum_of
from gemini.ranks.mesh import place_in, size_of

MARK = "sequence_part"
"""The entry of a batch that says which part it is: rank, number of parts, tokens of the whole, and two checksums."""
_INPUTS = ("input_ids", "inputs_embeds")
IGNORED = -100


def sequence_batch(batch: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """This rank's part of a batch for a causal language model, along ``cp`` of the mesh: ``model(**part)``.

    Labels are shifted before they are cut, so that the last token of a part is compared with the first one of the next.
    The mean of the ranks' losses is the mean over all labelled tokens of the batch (``labels`` of -100 do not count),
    however they are distributed over the parts, and the gradients are those of that mean.

    Args:
        batch: ``input_ids`` (batch x tokens) or ``inputs_embeds`` (batch x tokens x width), ``labels`` as transformers
            takes them (not shifted; or ``shift_labels``), and more tensors whose second dim is that of tokens. An
            ``attention_mask`` may have padding at the end, with labels of -100. ``num_items_in_batch`` is what the sum
            of losses is divided by, if that is not the number of rated tokens of this batch.
        mesh: without a dimension ``cp`` of two or more, or None, the batch comes back as it is.

    Returns:
        Tensors alone, so that the whole can be moved to a device: the parts, ``position_ids``, ``shift_labels``,
        ``num_items_in_batch`` and ``sequence_part``, by which the model recognizes a part.

    Raises:
        ValueError: for a length that ``cp`` does not divide, padding elsewhere, packed sequences (``position_ids`` that
            begin again), and tensors that cannot be cut.
    """
    size = 1 if mesh is None else size_of(mesh, "cp")
    if size == 1 or mesh is None:
        return dict(batch)
    return part_of(batch, place_in(mesh, "cp"), size)


def part_of(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Part ``rank`` of ``size`` parts of a batch (:func:`sequence_batch`)."""
    found = next((name for name in _INPUTS if isinstance(batch.get(name), torch.Tensor)), None)
    if found is None:
        raise ValueError(f"sequence_batch: the batch has neither of {' and '.join(_INPUTS)}, only {', '.join(batch)}")
    inputs = batch[found]
    tokens = inputs.shape[1]
    if tokens % size:
        raise ValueError(
            f"sequence_batch: {tokens} tokens cannot be cut into cp={size} parts: pad the sequences to "
            f"{-(-tokens // size) * size} (labels of {IGNORED} there), or cut them to {tokens // size * size}"
        )
    whole = {name: value for name, value in batch.items() if value is not None}
    shifted = whole.pop("shift_labels", None)
    labels, items = whole.pop("labels", None), whole.pop("num_items_in_batch", None)
    if shifted is None and labels is not None:
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    _refuse_padding(whole.pop("attention_mask", None), labels if labels is not None else shifted)
    positions = whole.pop("position_ids", None)
    expected = torch.arange(tokens, device=inputs.device)[None]
    if positions is not None and not bool((positions == expected).all()):
        raise ValueError(
            "sequence_batch: position_ids are not 0, 1, 2, ...: packed sequences are not cut. Give each its own row"
        )
    whole["position_ids"] = expected
    if shifted is not None:
        whole["shift_labels"] = shifted
    part = slice(rank * tokens // size, (rank + 1) * tokens // size)
    cut = {name: _cut(name, value, tokens, part) for name, value in whole.items()}
    if shifted is not None:
        cut["labels"] = cut["shift_labels"]
        rated = int((shifted != IGNORED).sum()) if items is None else float(items)
        cut["num_items_in_batch"] = torch.tensor(rated / size, dtype=torch.float32, device=inputs.device)
    sums = [checksum_of(inputs), 0 if shifted is None else checksum_of(shifted)]
    cut[MARK] = torch.tensor([rank, size, tokens, *sums], dtype=torch.int64)
    return cut


def _cut(name: str, value: Any, tokens: int, part: slice) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.dim() < 2 or value.shape[1] != tokens:
        raise ValueError(
            f"sequence_batch: {name!r} has shape {tuple(value.shape)}, and its second dimension should be the "
            f"{tokens} tokens, so it cannot be cut"
        )
    return value[:, part].contiguous()


def _refuse_padding(mask: Any, labels: torch.Tensor | None) -> None:
    """Tokens at the end that are not rated change nothing of those before them: no mask is needed for them."""
    if mask is None or bool(mask.bool().all()):
        return
    padding = ~mask.bool()
    at_the_end = mask.dim() == 2 and not bool((padding[:, :-1] & ~padding[:, 1:]).any())
    if not at_the_end or labels is None or bool((labels[padding] != IGNORED).any()):
        raise ValueError(
            "sequence_batch: attention_mask hides tokens. Padding may stand at the end of a sequence, with labels of "
            f"{IGNORED}; other masks are not cut"
        )
