"""Inputs of the right shapes for a transformers config, and which of its model classes has a loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch


def model_class_for(config: Any) -> Any:
    """The class of transformers to train a config with: what ``architectures`` names if it takes labels, else the
    sequence-to-sequence, masked, causal language model or image, audio or sequence classifier there is.

    Raises:
        ValueError: if there is none.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if named is not None and "labels" in inspect.signature(named.forward).parameters:
            return named
    masked = not getattr(config, "is_decoder", False)
    order = [
        ("SEQ_TO_SEQ_CAUSAL_LM", bool(getattr(config, "is_encoder_decoder", False))),
        ("SPEECH_SEQ_2_SEQ", bool(getattr(config, "is_encoder_decoder", False))),
        ("MASKED_LM", masked),
        ("CAUSAL_LM", True),
        ("IMAGE_CLASSIFICATION", True),
        ("CTC", True),
        ("AUDIO_CLASSIFICATION", True),
        ("SEQUENCE_CLASSIFICATION", True),
    ]
    for kind, applies in order:
        mapping = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", None)
        if applies and mapping is not None and type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ValueError(
        f"{type(config).__name__} has no model class with a loss in transformers {transformers.__version__} "
        f"(architectures={getattr(config, 'architectures', None)}): pass model_class="
    )


def batch_for(
    config: Any,
    batch_size: int = 1,
    seq_len: int = 1024,
    *,
    target_len: int | None = None,
    attention_mask: bool = False,
    dtype: torch.dtype = torch.float32,
    model_class: Any = None,
) -> dict[str, torch.Tensor]:
    """Inputs and labels for one step of the model of ``config``, on the meta device.

    Args:
        config: a transformers config object.
        batch_size: samples.
        seq_len: positions of each (of audio: samples of sound; without meaning for images, whose size the config has).
        target_len: positions of the decoder of an encoder-decoder model; by default ``seq_len``.
        attention_mask: whether a mask is passed, as with padded batches.
        dtype: of images and sounds; some models want them in the compute dtype.
        model_class: if not the one that :func:`model_class_for` finds.

    Raises:
        ValueError: for a model whose inputs cannot be guessed from its config.
    """
    model_class = model_class or model_class_for(config)
    name = model_class.__name__
    known = inspect.signature(model_class.forward).parameters

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device="meta")

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    batch: dict[str, torch.Tensor] = {}
    if "pixel_values" in known and "input_ids" not in known:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None)
        if size is None:
            raise ValueError(f"{type(config).__name__} says no image_size: make the batch yourself (pixel_values, ...)")
        height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
        batch["pixel_values"] = numbers(batch_size, getattr(vision, "num_channels", 3), height, width)
        batch["labels"] = ids(batch_size)
        return batch
    if "input_features" in known:
        length = 2 * getattr(config, "max_source_positions", 1500)
        batch["input_features"] = numbers(batch_size, getattr(config, "num_mel_bins", 80), length)
    elif "input_values" in known:
        batch["input_values"] = numbers(batch_size, seq_len)
    elif "input_ids" in known:
        batch["input_ids"] = ids(batch_size, seq_len)
    else:
        raise ValueError(
            f"what {name} takes is not known here ({', '.join(list(known)[1:6])}): make the batch yourself"
        )
    if attention_mask:
        batch["attention_mask"] = ids(*next(iter(batch.values())).shape[:2])
    one_each = name.endswith(("ForSequenceClassification", "ForAudioClassification", "ForImageClassification"))
    if one_each:
        batch["labels"] = ids(batch_size)
    elif getattr(config, "is_encoder_decoder", False):
        batch["labels"] = ids(batch_size, target_len or seq_len)
    else:
        batch["labels"] = ids(batch_size, seq_len)
    return batch


def check_named(batch: Any, forward: Any) -> None:
    """Refuse what is not named as forward names it.

    Raises:
        ValueError: with the names there are.
    """
    if not isinstance(batch, Mapping):
        names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        like = ", ".join(f'"{name}": ...' for name in [name for name in names if name != "self"][:3])
        raise ValueError(
            f"a batch has the arguments of forward by name, such as {{{like}}}; got a {type(batch).__name__}"
        )


def count_tokens(shapes: Mapping[str, tuple[int, ...]], model: Any = None) -> int:
    """Positions that a batch of these shapes has the model work on.

    Those of its inputs; of an encoder-decoder ``model`` those of the decoder as well. A decoder's labels are its inputs
    once more and do not count. Images, and what else has no positions, count as samples.
    """
    source = next((shapes[name] for name in ("input_ids", "inputs_embeds") if name in shapes), None)
    decoder = 0
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        names = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
        target = next((shapes[name] for name in names if name in shapes), ())
        decoder = target[0] * target[1] if len(target) > 1 else 0
    if source is not None:
        return decoder + (source[0] * source[1] if len(source) > 1 else source[0])
    first = next(iter(shapes.values()), ())
    return decoder or (first[0] if first else 0)
