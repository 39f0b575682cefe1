"""Layouts of real models waste under one percent of physical pages; layouts of any model keep their promises.

The shapes are taken from configs built on the meta device, without weights. Padding is counted as the system counts it:
each rank's share of each plane of each chunk in whole 4 KiB pages, against the bytes of the params themselves.
"""

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.planning.layout import ALIGN, DEFAULT_MAX_CHUNK, Layout, ParamSpec, block_of, make_layout, part_of
from gemini.planning.planes import plane_specs

PAGE = 4096
NUM_PARAMS = {  # as published: if these differ, the config is not the model's
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
}


@cache
def specs_of(name: str) -> tuple[ParamSpec, ...]:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

    config = {
        "gpt2-xl": lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25),
        "llama2-7b": lambda: LlamaConfig(),
        "llama2-13b": lambda: LlamaConfig(
            hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
        ),
        "llama2-70b": lambda: LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        "mixtral-8x7b": lambda: MixtralConfig(),
        "qwen2-0.5b": lambda: Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    }[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return tuple(ParamSpec(name, param.numel(), True) for name, param in model.named_parameters())


def pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE)


def physical_padding(layout: Layout) -> float:
    """Wasted bytes over useful ones, in whole pages of each rank's share of every bf16 plane."""
    taken = useful = 0
    for chunk in layout.chunks:
        for spec in plane_specs("bf16", "retain", trainable=chunk.trainable).values():
            itemsize = spec.block_bytes
            taken += layout.ranks * pages(chunk.numel // layout.ranks * itemsize) * PAGE
            useful += chunk.payload * itemsize
    return taken / useful - 1


def check(layout: Layout, params: tuple[ParamSpec, ...] | list[ParamSpec], max_chunk: int) -> None:
    """What holds for every layout."""
    trainable = {p.name: p.trainable for p in params}
    found = [(slot.name, slot.numel) for chunk in layout.chunks for slot in chunk.slots]
    assert sorted(found) == sorted((p.name, p.numel) for p in params), "every param in exactly one slot"
    position = {p.name: i for i, p in enumerate(params)}
    for index, chunk in enumerate(layout.chunks):
        assert chunk.index == index
        assert chunk.numel % layout.ranks == 0 and (chunk.numel // layout.ranks) % ALIGN == 0
        assert chunk.numel * 2 % PAGE == 0, "whole pages of the narrowest plane"
        end = 0
        for slot in chunk.slots:
            assert slot.start >= end and slot.start % ALIGN == 0, "on a page of its own in every plane, no overlap"
            end = slot.stop
        assert end <= chunk.numel
        assert chunk.payload == sum(slot.numel for slot in chunk.slots) <= chunk.numel
        for slot in chunk.slots:
            parts = [part_of(slot, chunk.numel, layout.ranks, rank) for rank in range(layout.ranks)]
            kept = [part for part in parts if part.numel]
            assert [part.offset for part in kept] == list(accumulate([0, *(part.numel for part in kept[:-1])]))
            assert sum(part.numel for part in parts) == slot.numel, "every element on exactly one rank"
            for rank, part in enumerate(parts):
                assert part.start % ALIGN == 0 and 0 <= part.start <= part.stop <= chunk.numel // layout.ranks
                begin = rank * (chunk.numel // layout.ranks)
                assert not part.numel or begin + part.start == slot.start + part.offset
        assert {trainable[slot.name] for slot in chunk.slots} == {chunk.trainable}, "frozen and trained never share"
        assert len({block_of(slot.name) for slot in chunk.slots}) == 1, "blocks never share"
        order = [position[slot.name] for slot in chunk.slots]
        assert order == sorted(order), "in declaration order"
        assert len(chunk.slots) == 1 or end <= max_chunk, "only a single large param may pass max_chunk"
    assert layout.payload == sum(p.numel for p in params)
    assert layout.numel == sum(chunk.numel for chunk in layout.chunks)


# ---- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("name", list(NUM_PARAMS))
def test_padding_is_under_one_percent(name: str, ranks: int) -> None:
    params = specs_of(name)
    layout = make_layout(params, ranks=ranks)
    assert layout.payload == NUM_PARAMS[name]
    check(layout, params, DEFAULT_MAX_CHUNK)
    assert physical_padding(layout) < 0.01
    assert layout.numel / layout.payload < 1.01
    assert len({chunk.numel for chunk in layout.chunks}) <= 6


@pytest.mark.parametrize("name", list(NUM_PARAMS))
def test_same_layers_give_the_same_chunks(name: str) -> None:
    layout = make_layout(specs_of(name), ranks=8)
    by_block: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for chunk in layout.chunks:
        shape = tuple(slot.numel for slot in chunk.slots)
        by_block.setdefault(block_of(chunk.slots[0].name), []).append((shape, chunk.numel))
    layers = [forms for block, forms in by_block.items() if block]
    assert len(layers) >= 24
    assert all(forms == layers[0] for forms in layers)


def test_one_size_for_all_chunks_would_not_do() -> None:
    """The measure above can fail: with a single chunk size for everything, a Llama wastes far more."""
    layout = make_layout(specs_of("llama2-7b"))
    largest = max(chunk.numel for chunk in layout.chunks)
    assert largest * len(layout.chunks) / layout.payload - 1 > 0.1


# ---- any model -------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Some loose params, some repeated blocks, some loose params; a few of all of them frozen."""
    sizes = st.integers(1, 30_000)
    block = draw(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=6))
    before, after = (draw(st.lists(st.tuples(sizes, st.booleans()), max_size=3)) for _ in range(2))
    params = [ParamSpec(f"embed.{'abc'[i]}", n, t) for i, (n, t) in enumerate(before)]
    for layer in range(draw(st.integers(1, 4))):
        params += [ParamSpec(f"model.layers.{layer}.p{i}", n, t) for i, (n, t) in enumerate(block)]
    return params + [ParamSpec(f"head.{'abc'[i]}", n, t) for i, (n, t) in enumerate(after)]


@settings(max_examples=200, deadline=None)
@given(models(), st.sampled_from([1, 2, 3, 7, 8, 64]), st.sampled_from([1, 2048, 10_000, 50_000, DEFAULT_MAX_CHUNK]))
def test_every_layout_keeps_its_promises(params: list[ParamSpec], ranks: int, max_chunk: int) -> None:
    layout = make_layout(params, ranks=ranks, max_chunk=max_chunk)
    check(layout, params, max_chunk)
    assert layout == make_layout(list(params), ranks=ranks, max_chunk=max_chunk), "a pure function"
    forms: dict[str, list[tuple[int, ...]]] = {}
    for chunk in layout.chunks:
        shape = tuple(slot.numel for slot in chunk.slots)
        forms.setdefault(block_of(chunk.slots[0].name), []).append((*shape, chunk.numel, chunk.trainable))
    assert len({tuple(form) for block, form in forms.items() if block}) <= 1, "same blocks, same chunks"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=30))
def test_padding_is_less_than_a_page_for_each_param(sizes: list[int]) -> None:
    layout = make_layout([ParamSpec(f"layers.0.p{i}", n) for i, n in enumerate(sizes)])
    assert layout.numel - layout.payload < ALIGN * len(sizes)


def test_a_cut_block_is_cut_into_about_equal_pieces() -> None:
    layout = make_layout([ParamSpec(f"layers.0.p{i}", 2048) for i in range(12)], max_chunk=10 * 2048)
    assert [chunk.numel for chunk in layout.chunks] == [6 * 2048, 6 * 2048], "not 10 and 2"


def test_a_single_large_param_is_its_own_chunk() -> None:
    params = [ParamSpec("layers.0.a", 10), ParamSpec("layers.0.huge", 100_000), ParamSpec("layers.0.b", 10)]
    layout = make_layout(params, max_chunk=4096)
    assert [tuple(slot.name for slot in chunk.slots) for chunk in layout.chunks] == [
        ("layers.0.a",), ("layers.0.huge",), ("layers.0.b",),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_param_that_stands_apart_is_divided_alike_beside_any_others(ranks: int) -> None:
    """As ranks need it that have different params besides."""
    tied = ParamSpec("head.weight", 5 * ALIGN + 7, apart=True)
    parts = []
    for before, after in (([], []), ([ParamSpec("norm.weight", 3)], [ParamSpec("bias", 9 * ALIGN)])):
        layout = make_layout([*before, tied, *after], ranks=ranks)
        ((chunk, slot),) = [(c, s) for c in layout.chunks for s in c.slots if s.name == "head.weight"]
        assert len(chunk.slots) == 1
        parts.append([part_of(slot, chunk.numel, ranks, rank) for rank in range(ranks)])
    assert parts[0] == parts[1]


def test_lora_s_frozen_and_trained_params_in_turns_make_two_chunks_a_block() -> None:
    params = [ParamSpec(f"layers.{b}.p{i}", 4096, i % 2 == 1) for b in range(3) for i in range(6)]
    assert [chunk.trainable for chunk in make_layout(params).chunks] == [False, True] * 3


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.7.mlp.w", "model.layers.7"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("layers.0.experts.3.w", "layers.0"),
        ("encoder.block.2.layer.0.q.weight", "encoder.block.2"),
        ("3.weight", "3"),
        ("model.embed_tokens.weight", ""),
        ("conv1d.weight", ""),
        ("lm_head.weight", ""),
    ],
)
def test_blocks_by_name(name: str, block: str) -> None:
    assert block_of(name) == block


def test_a_param_without_elements_has_a_page_of_its_own() -> None:
    layout = make_layout([ParamSpec("a", 0), ParamSpec("b", 1), ParamSpec("layers.0.none", 0)])
    assert [(c.numel, [(s.name, s.start, s.numel) for s in c.slots]) for c in layout.chunks] == [
        (2 * ALIGN, [("a", 0, 0), ("b", ALIGN, 1)]), (ALIGN, [("layers.0.none", 0, 0)]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([], "no params"),
        ([ParamSpec("a", 1), ParamSpec("a", 1)], "twice"),
        ([ParamSpec("a", 1), ParamSpec("layers.0.less", -1)], "'layers.0.less' has -1 elements"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(params: list[ParamSpec], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_layout(params)
