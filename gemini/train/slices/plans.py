"""Plans of our own, for models for which transformers has none: which module is cut how, by the ends of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Plan(NamedTuple):
    """``styles``: ends of the names of modules to styles. ``counts``: ends of those whose attributes count heads or
    columns of this slice, to these attributes.
    """

    styles: Mapping[str, str]
    counts: Mapping[str, tuple[str, ...]] = {}


_HEAD = {"lm_head": "colwise_gather_output"}
_GPT2 = Plan(
    {
        "attn.c_attn": "packed_colwise:3", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise",
        **_HEAD,
    },
    {"attn": ("split_size", "num_heads"), "attn.c_attn": ("nf",), "mlp.c_fc": ("nf",)},
)  # fmt: skip
_OPT = Plan(
    {
        "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise", **_HEAD,
    },
    {"self_attn": ("num_heads",)},
)  # fmt: skip
_BLOOM = Plan(
    {
        "self_attention.query_key_value": "colwise", "self_attention.dense": "rowwise",
        "mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise", "self_attention": "alibi", **_HEAD,
    },
    {"self_attention": ("num_heads",)},
)  # fmt: skip
_BERT = Plan(
    {
        "attention.self.query": "colwise", "attention.self.key": "colwise", "attention.self.value": "colwise",
        "attention.output.dense": "rowwise", "intermediate.dense": "colwise", "output.dense": "rowwise",
    }
)  # fmt: skip
_T5 = Plan(
    {
        "SelfAttention.q": "colwise", "SelfAttention.k": "colwise", "SelfAttention.v": "colwise",
        "SelfAttention.o": "rowwise", "EncDecAttention.q": "colwise", "EncDecAttention.k": "colwise",
        "EncDecAttention.v": "colwise", "EncDecAttention.o": "rowwise",
        "relative_attention_bias": "columns", "DenseReluDense.wi": "colwise", "DenseReluDense.wi_0": "colwise",
        "DenseReluDense.wi_1": "colwise", "DenseReluDense.wo": "rowwise", **_HEAD,
    },
    {"SelfAttention": ("n_heads",), "EncDecAttention": ("n_heads",)},
)  # fmt: skip

PLANS = {"gpt2": _GPT2, "opt": _OPT, "bloom": _BLOOM, "bert": _BERT, "t5": _T5}
"""By ``config.model_type``."""


def of_end(name: str, by_end: Mapping[str, object]) -> str | None:
    """The longest of the ends that ``name`` has."""
    found = [end for end in by_end if name == end or name.endswith(f".{end}")]
    return max(found, key=len) if found else None
