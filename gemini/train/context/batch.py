"""A batch of whole sequences as the part of it that one rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from gemini.ranks.facts import checksum_of
from gemini.ranks.mesh import place_in, size_of

MARK = "sequence_part"
"""The entry of a batch that says which part it is: rank, number of parts, tokens of the whole, and two checksums."""
_INPUTS = ("input_ids", "inputs_embeds")
IGNORED = -100


def sequence_batch(batch: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """This rank's part of a batch for a causal language model, along ``cp`` of the mesh. Call ``model(**part)`` with
    it.

    Labels are shifted before they are cut, so the last token of a part still predicts the first token of the next part.
    The mean of the losses of all ranks is the mean over all labelled tokens of the batch (``labels`` of -100 do not
    count), however many are in each part. Gradients are those of this mean.

    Args:
        batch: ``input_ids`` (batch x tokens) or ``inputs_embeds`` (batch x tokens x width); ``labels`` as in
            transformers (not shifted), or ``shift_labels``; and any other tensors whose second dimension is the tokens.
            An ``attention_mask`` may only hide padding at the end, where labels must be -100. ``num_items_in_batch``:
            what the sum of the losses is divided by, if it is not the number of labelled tokens of this batch.
        mesh: None, or a mesh without a dimension ``cp`` of 2 or more, returns the batch unchanged.

    Returns:
        A dict of tensors: the parts, ``position_ids``, ``shift_labels``, ``num_items_in_batch``, and ``sequence_part``,
        by which the model recognizes a part.

    Raises:
        ValueError: if ``cp`` does not divide the number of tokens, for padding elsewhere than at the end, for packed
            sequences (``position_ids`` that start again), and for tensors that cannot be cut.
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
