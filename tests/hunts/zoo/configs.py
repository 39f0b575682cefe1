"""Tiny configs: a config class with its sizes, layers and vocabularies shrunk, whatever its fields are called.

Only the fields that name a size are given, everything derived from them is left to the config. Fields are recognized
by name; what the rules get wrong for one model stands in ``overrides``.
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hunts.zoo.overrides import CLASS_CONFIGS, CONFIGS, Tiny

VOCAB = 128
FIRST_WORD = 40
"""Token ids from here on are words, those before it special."""

_LAYERS = re.compile(r"(num_|n_|encoder_|decoder_|^)(\w+_)?(layers?|depth|blocks)$")
_HEADS = re.compile(r"(^|_)(n_|num_)?(\w+_)?(heads?|nhead)$")
_KV_HEADS = re.compile(r"(key_value|kv)_heads$|multi_query_group_num|num_kv")
_TOKEN = re.compile(r"(\w*_)?token_(id|index)$|(\w+_)?(bos|eos|pad|boi|eoi|boa|eoa)_token_\w+")
_HEAD_DIM = re.compile(r"(^|_)(head_dim|head_size|d_kv|kv_channels|d_head|dim_head|attention_key_dim)$")
_WIDE = re.compile(r"intermediate|ffn|feedforward|feed_forward|mlp_dim|d_ff|d_inner|n_inner|(^|_)inner")
_SIZE = re.compile(
    r"hidden|d_model|n_embd|(^|_)dim$|(^|_)dims?$|embed|emb_dim|channels|_size$|width|units|features|rank$|num_filters|_filters$|"
    r"_dim_|hidden_dim|^dim|latent"
)  # fmt: skip
_KEEP = re.compile(
    r"kernel|stride|ratio|scale|patch|window|group|buckets|merge|sampling|sample|num_channels|pool|token_type|type_vocab|"
    r"^in_channels$|labels|temperature|num_embeddings_|chunk_size|block_size|eps|rate|dilation|ignore|step"
)
_INDICES = re.compile(r"(indices|indexes|index_list|layer_idx|layer_ids|feature_layers?|no_rope_layers)$")


def _token_id(name: str, seen: dict[str, int]) -> int:
    fixed = {"pad": 0, "bos": 1, "eos": 2, "unk": 3, "decoder_start": 1, "sep": 4, "cls": 5, "mask": 6}
    stem = re.sub(r"_token_(id|index)$", "", name)
    if stem in fixed:
        return fixed[stem]
    return seen.setdefault(stem, 8 + len(seen))


def _shrunk(name: str, value: Any, of: dict[str, Any], seen: dict[str, int]) -> Any:
    """The tiny value of a field, or None to leave it alone."""
    if isinstance(value, bool) or value is None:
        return None
    if _TOKEN.fullmatch(name):
        if isinstance(value, list):
            return [_token_id(name, seen)] if value and isinstance(value[0], int) else None
        return _token_id(name, seen) if isinstance(value, int) and value >= FIRST_WORD else None
    if isinstance(value, (list, tuple)):
        return _shrunk_list(name, list(value))
    if not isinstance(value, int):
        return None
    if "vocab_size" in name and "type" not in name:
        return min(value, VOCAB)
    if name in ("image_size", "input_size", "img_size", "pretrain_image_size", "crop_size"):
        return min(value, 64 if "depths" in of or "layers_per_stage" in of else 32)
    if name == "upsample_initial_channel":
        return 32
    if name.endswith("num_filters"):
        return min(value, 8)
    if name == "embed_dim" and "depths" in of:
        return 16
    if name == "patch_size":
        return 8 if value > 8 else None
    if _KV_HEADS.search(name):
        heads = of.get("num_attention_heads") or of.get("num_heads") or value
        return min(value, 2) if isinstance(heads, int) and value < heads else min(value, 4)
    if _HEADS.search(name) and value < 256:
        return min(value, 4)
    if _HEAD_DIM.search(name) or re.search(r"(rope|nope|v|k|qk|index)_head_dim", name):
        return min(value, 8)
    if _LAYERS.search(name) and value < 200 and name != "num_encoder_blocks":
        return min(value, 2)
    if re.search(r"(^|_)n_group$|topk_group", name):
        return 1
    if re.search(r"per_tok|top_?k(_|$)|moe_k", name):
        return min(value, 2)
    if re.search(r"experts$|routed_experts", name):
        return min(value, 4)
    if name == "max_source_positions":
        return min(value, 32)
    if "position" in name or name in ("n_ctx", "context_length", "max_seq_len", "max_length", "max_seq_length"):
        return min(value, 128) if value > 64 else None
    if name in ("sliding_window", "sliding_window_size", "attention_window"):
        return min(value, 8)
    if name in ("mask_time_length", "mask_feature_length"):
        return 2
    if name in ("num_queries", "num_query_tokens", "num_denoising", "train_num_points", "image_seq_length"):
        return min(value, 8)
    if name in ("codebook_size", "num_embeddings", "num_codevectors_per_group"):
        return min(value, 32)
    if name in ("num_mel_bins", "n_mels"):
        return min(value, 16)
    if _KEEP.search(name):
        return None
    if _WIDE.search(name):
        return min(value, 64)
    if _SIZE.search(name) and value > 32:
        return 32
    return None


def _shrunk_list(name: str, value: list[Any]) -> Any:
    if not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    if re.search(r"depths|layers_per_stage|num_block_repeats|num_blocks|num_layers|layer_repeats|^layers$", name):
        return [min(v, 1) for v in value]
    if _HEADS.search(name):
        return [1 << (max(1, v // (value[0] or 1)).bit_length() - 1) for v in value]
    if name in ("image_size", "input_size"):
        return [min(v, 64) for v in value]
    if _INDICES.search(name) and "conv" not in name and max(value) > 1:
        return list(range(min(len(value), 2)))
    if _KEEP.search(name):
        return None
    if max(value) >= 64 and (_SIZE.search(name) or _WIDE.search(name) or "conv_dim" in name):
        return [v if v <= 4 else max(8, -(-v // 128) * 8) for v in value]
    return None


def tiny(config_class: type[PreTrainedConfig], seen: dict[str, int] | None = None, **more: Any) -> PreTrainedConfig:
    """The smallest sensible config of a class: two layers or one of each kind, 32 wide, 128 words; sub-configs too."""
    seen = {} if seen is None else seen
    given = {**CONFIGS.get(config_class.model_type, {}), **more}
    full = config_class(**given.pop("__default__", {}))
    fields = {f.name: f.default for f in dataclasses.fields(config_class)}
    of = {name: _value(full, name) for name in fields}
    values: dict[str, Any] = {}
    for name, value in of.items():
        if isinstance(value, PreTrainedConfig):
            inner = given.pop(name, {})
            values[name] = tiny(type(value), seen, **{**_stages(value), **inner}) if isinstance(inner, dict) else inner
        elif name in given and isinstance(given[name], Tiny):
            values[name] = tiny(CONFIG_MAPPING[given[name].model_type], seen, **given.pop(name).fields)
        elif name in given or name.startswith("_"):
            continue
        elif value is None and name in _WHEN_NONE:
            values[name] = _WHEN_NONE[name]
        elif fields[name] is not None or _TOKEN.fullmatch(name):
            small = _shrunk(name, value, of, seen)
            if small is not None and small != value:
                values[name] = small
    values.update(_layer_types({**of, **given}, given))
    rope = of.get("rope_parameters")
    if "rope_parameters" not in given and isinstance(rope, dict) and _has_sections(config_class, rope):
        half = int(4 * rope.get("partial_rotary_factor", 1))
        part = half // 4 or half // 2
        values["rope_parameters"] = {**rope, "mrope_section": [half - 2 * part, part, part]}
    config = config_class(**{**values, **given})
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


_WHEN_NONE = {
    "head_dim": 8, "num_key_value_heads": 2, "vocab_size": VOCAB, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts": 4,
}  # fmt: skip


def _has_sections(config_class: type[PreTrainedConfig], rope: dict[str, Any]) -> bool:
    """Whether the model divides half a head's rotary dimensions among time, height and width."""
    if rope.get("rope_type") != "default":
        return False
    folder = Path(inspect.getfile(config_class)).parent
    return any("mrope_section" in path.read_text() for path in folder.glob("modeling_*.py"))


def _value(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # differs from layer to layer: the config derives it
        return None


def _layer_types(of: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, where layers are of several kinds."""
    names = ("layer_types", "mlp_layer_types", "layers_block_type")
    lists = {n: list(dict.fromkeys(of[n])) for n in names if isinstance(of.get(n), (list, tuple)) and of[n]}
    depth = next((n for n in ("num_hidden_layers", "num_layers", "n_layer") if n in of), None)
    if not lists or depth is None:
        return {}
    num = given.get(depth, max(2, *map(len, lists.values())))
    chosen = {n: (kinds * num)[:num] for n, kinds in lists.items()}
    return {depth: num, **{n: kinds for n, kinds in chosen.items() if n not in given}}


def _stages(backbone: PreTrainedConfig) -> dict[str, Any]:
    """As many outputs of a backbone as its model takes, from as many layers where a layer is a stage."""
    names = getattr(backbone, "_out_features", None)
    if not names or CONFIGS.get(backbone.model_type, {}).get("out_indices"):
        return {}
    if any(hasattr(backbone, n) for n in ("depths", "stage_num_blocks", "layers_per_stage", "block_configs")):
        return {"out_features": list(names)}
    depth = max(2, len(names))
    return {"num_hidden_layers": depth, "out_features": [f"stage{i + 1}" for i in range(depth - len(names), depth)]}


def tiny_config(model_type: str, class_name: str) -> PreTrainedConfig:
    """The tiny config for one class; the config it is listed under need not be the one that it takes."""
    more = dict(CLASS_CONFIGS.get(class_name, {}))
    config_class = more.pop("config_class", None) or getattr(getattr(transformers, class_name), "config_class", None)
    if isinstance(config_class, str):
        config_class = getattr(transformers, config_class)
    return tiny(config_class or CONFIG_MAPPING[model_type], **more)
