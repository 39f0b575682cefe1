"""Which models can compute a part of a sequence: those in which attention alone looks at other tokens, and asks
transformers for it by name. All others are refused by the name of what stands in the way.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from gemini.errors import GeminiError
from gemini.train.modules.reading import compiled_part

_ALONG_THE_SEQUENCE = re.compile(
    r"Mamba|SSM|RWKV|Rwkv|LinearAttention|DeltaNet|ShortConv|Recurrent|RetNet|XLSTM|Hyena|Lightning\w*Attention"
)
_FULL = ("full_attention", "attention")


def transformer_in(model: nn.Module) -> Any:
    """The outermost model of transformers in ``model`` (also inside of an adapter), with its own loss.

    Raises:
        GeminiError: naming why there is none that can be divided.
    """
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    why = _no_transformer(model) if found is None else next(_obstacles(found), None)
    if why is not None:
        raise GeminiError(f"context parallel (a mesh with a dimension cp): {why}. Use a mesh without cp")
    return found


def _no_transformer(model: nn.Module) -> str:
    return f"{type(model).__name__} is no model of transformers, whose attention could be divided"


def _obstacles(model: Any) -> Iterator[str]:
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name} has an encoder and a decoder, whose sequences are two"
    parts = [part for part in getattr(config, "sub_configs", None) or () if getattr(config, part, None) is not None]
    if parts:
        yield f"{name} is made of several models ({', '.join(parts)}), whose sequences are others"
    if not model._can_set_attn_implementation():
        yield f"{name} does not ask transformers for its attention by name"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield f"the forward of {name} takes no position_ids, so that a part would begin at position 0"
    kernel = config._attn_implementation
    if kernel not in ("eager", "sdpa") and "flash" not in str(kernel):
        yield f"attn_implementation={kernel!r} is not one it goes around (eager, sdpa, flash_attention_2)"
    yield from _layers(config, name, knows_windows="flash" in str(kernel))
    for path, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield f"positions of {name} begin after its padding token, and those of a part at 0, 1, 2, ..."
        if isinstance(module, (nn.Conv1d, nn.RNNBase)) or _ALONG_THE_SEQUENCE.search(type(module).__name__):
            kind = type(module).__name__
            yield f"{path} ({kind}) has a state along the sequence, which would begin anew in each part"
    if any(compiled_part(module) is not None for module in model.modules()):
        yield f"parts of {name} are compiled, and ranks meet inside its attention, where nothing can be compiled"
    for rope in _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope in ("dynamic", "longrope"):
            yield f"rotary positions of type {rope!r} depend on the length of the sequence, of which a rank sees a part"


def _layers(config: Any, name: str, *, knows_windows: bool) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention"] if windowed else []
    for kind in sorted(set(kinds) - set(_FULL)):
        if kind not in ("sliding_attention", "chunked_attention"):
            yield f"{name} has layers of type {kind!r}, which look along the sequence otherwise than by full attention"
        elif kind == "chunked_attention" or not knows_windows:
            yield (
                f"{name} has layers of type {kind!r}, a window that its kernel "
                f"({config._attn_implementation}) knows from a mask of the whole sequence alone; flash_attention_2 "
                "takes a sliding window as a number, and sliding_window=None in the config turns it off"
            )


def _rope_types(rope: Any) -> Iterator[str]:
    if isinstance(rope, dict):
        for key, value in rope.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)
