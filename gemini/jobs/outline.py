"""The model and the batch that ``gemini trace`` traces, from a config: shapes without values.

Models for text are built here: those that predict the next token, turn one text into another, or fill in what is
masked. What else there is can be traced in Python, where its batch is at hand.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from gemini.jobs.errors import JobError
from gemini.jobs.models import ModelSource, checkpoint_activations, first_line, hush, name_the_loss
from gemini.jobs.plan_settings import MOST_POSITIONS, TraceSettings
from gemini.memory.chunk import COMPUTE_DTYPES
from gemini.train.from_config import skeleton_from_config

_KINDS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
)


def outline(source: ModelSource, settings: TraceSettings) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model of a config as it trains, its params without values, and a batch of zeros for it.

    Raises:
        JobError: if its batch is not text, it has too few positions, or transformers cannot build it.
    """
    hush()
    model_class = _class_of(source)
    seq_len = _seq_len(source, settings.seq_len)
    options = {"attn_implementation": settings.attention} if settings.attention else {}
    try:
        dtype = COMPUTE_DTYPES[settings.precision]
        model: Any = skeleton_from_config(source.config, model_class=model_class, dtype=dtype, **options).model
        name_the_loss(model)
        model.config.use_cache = False
        model.train()
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
    except Exception as e:
        # Whatever transformers trips over here comes from the config and the options it was given.
        raise JobError(f"{source.label} cannot be built: {first_line(e)}") from e
    ids = torch.zeros(settings.batch_size, seq_len, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def _class_of(source: ModelSource) -> Any:
    """What the config names where that is a model for text, else the first kind of those that there is for it."""
    config = source.config
    names = getattr(config, "architectures", None) or ()
    found = [(getattr(transformers, mapping), auto) for mapping, auto in _KINDS]
    for mapping, _ in found:
        classes = mapping.get(type(config), ())
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            if model_class.__name__ in names:
                return model_class
    for mapping, auto in found:
        if type(config) in mapping:
            return getattr(transformers, auto)
    raise JobError(
        f"{source.label} is of type {config.model_type!r}, which transformers has no model for that takes a batch of "
        "text alone. Trace it in Python with a batch of its own: gemini.trace(model, batch), then "
        "trace.to_json() for --trace."
    )


def _seq_len(source: ModelSource, asked: int | None) -> int:
    text = source.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if asked is None:
        return min(positions or MOST_POSITIONS, MOST_POSITIONS)
    if positions is not None and asked > positions:
        raise JobError(f"--seq-len {asked} is more than the model's {positions} positions.")
    return asked
