"""``torch.compile`` of what cannot be served is refused; who looks on (a tracer, a recording) sees compiled parts."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gemini
from gemini.train.modules.compiled import compile_blocks
from gemini.train.modules.reading import compiled_part
from tests.train.helpers import (
    Blocks,
    Plain,
    adam,
    assert_same_state,
    assert_trains_alike,
    batch,
    make_config,
    noise,
    on_batch,
    squares,
    train,
    train_plain,
    wrap,
)
from tests.train.test_compiled import WAYS, by_call, counted, cut_config, fresh_compiler, nothing_ran, ran, small  # noqa: F401
from tests.world import world_of

# ---- refused ---------------------------------------------------------------------------------------------------------


def replaced_block(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def whole_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward)
    return model


def whole_call(model: Any) -> Any:
    nn.Module.compile(model)
    return model


def inner(model: Any) -> Any:
    model.model.compile()
    return model


def with_graphs(model: Any) -> Any:
    model.model.layers[0].compile(mode="reduce-overhead")
    return model


BEFORE = {
    "torch.compile(model)": (torch.compile, "^LlamaForCausalLM is compiled as a whole.*Compile its blocks"),
    "model.compile()": (whole_call, "^LlamaForCausalLM is compiled as a whole.*Compile its blocks"),
    "model.forward =": (whole_forward, "^LlamaForCausalLM is compiled as a whole.*Compile its blocks"),
    "model.model.compile()": (inner, "^'model' is compiled with all the blocks in it.*Compile its blocks"),
    "torch.compile(block)": (replaced_block, "^'model.layers.1' is what torch.compile.* module.compile"),
    "CUDA graphs": (with_graphs, "^'model.layers.0' is compiled with CUDA graphs.*max-autotune-no-cudagraphs"),
}


@pytest.mark.parametrize("how", BEFORE)
def test_refused_when_it_is_wrapped(how: str, tmp_path: Path) -> None:
    compile_it, message = BEFORE[how]
    model = small()
    config = make_config(model, "ram", tmp_path)
    with pytest.raises(gemini.GeminiError, match=message):
        gemini.GeminiDDP(compile_it(model), config)
    assert type(next(model.parameters())) is nn.Parameter  # nothing was changed


AFTER = {
    "torch.compile(model)": (torch.compile, "another module around this LlamaForCausalLM, which Gemini manages"),
    "torch.compile(block)": (replaced_block, "another module around this LlamaDecoderLayer, which Gemini manages"),
    "model.forward =": (whole_forward, "^LlamaForCausalLM is compiled as a whole.*Compile its blocks"),
    "model.model.compile()": (inner, "^'model' is compiled with all the blocks in it"),
    "CUDA graphs": (with_graphs, "^'model.layers.0' is compiled with CUDA graphs"),
}


@pytest.mark.parametrize("how", AFTER)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_refused_after_wrapping(how: str, where: str, tmp_path: Path) -> None:
    compile_it, message = AFTER[how]
    model = wrap(small(), where, tmp_path)
    before, optimizer = dict(model.__dict__), adam(model)
    for _ in range(2):
        with pytest.raises(gemini.GeminiError, match=message):
            compile_it(model)(**batch())
    for module in model.modules():
        module.__dict__.pop("_compiled_call_impl", None)
    model.__dict__.pop("forward", None)
    assert model.__dict__.keys() == before.keys()
    plain = Plain(small())
    assert_trains_alike(model, optimizer, plain, range(1))


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_compiled_function_that_calls_the_model_is_refused(where: str, tmp_path: Path) -> None:
    model = wrap(small(), where, tmp_path)
    step = torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend=counted)
    with pytest.raises(gemini.GeminiError, match="called inside of a function that torch.compile compiles"):
        step(batch()["input_ids"])
    world_of(model).check()
    model(**batch()).loss.backward()


def test_a_model_without_blocks_has_nothing_to_compile(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4)), "ram", tmp_path)
    assert compile_blocks(model, backend=counted) == 1  # "0" is a block
    with pytest.raises(gemini.GeminiError, match="Linear has no repeated blocks"):
        wrap(nn.Linear(4, 4), "ram", tmp_path).compile()


# ---- who looks on ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("way", ["call", "forward"])
def test_the_tracer_counts_a_step_as_python_and_times_the_others(way: str, managed: bool, tmp_path: Path) -> None:
    def traced(model: Any) -> tuple[gemini.MemoryTrace, int]:
        model = wrap(model, "disk", tmp_path, slack=2**15) if managed else Plain(model).model
        with gemini.MemoryTracer(model) as tracer:
            for seed in range(2):
                on_batch(model, seed).backward()
                model.zero_grad()
        return tracer.trace, len(tracer._timed)

    compiled, num_timed = traced(WAYS[way](small()))
    assert len(ran) == 2 and num_timed == 1  # the blocks of the second step
    plain, _ = traced(small())
    assert (compiled.peak_bytes, compiled.flops) == (plain.peak_bytes, plain.flops)
    blocks = [m for m in compiled.moments if m.module.startswith("model.layers.")]
    assert {m.module for m in blocks} == {"model.layers.0", "model.layers.1"}
    assert all(len(m.params) == 9 for m in blocks) and len(plain.moments) > len(compiled.moments)
    ran.clear()
    on_batch(Plain(WAYS[way](small())).model, 0)
    assert len(ran) == 2  # compiled code runs again


@pytest.mark.parametrize("way", ["call", "forward"])
def test_a_trace_ahead_of_a_compiled_model_touches_nothing_of_it(way: str) -> None:
    model = WAYS[way](small())
    found = gemini.trace(model, batch(), target="cpu")
    assert ran == [] and all(p.grad is None for p in model.parameters())
    assert found.peak_bytes == gemini.trace(small(), batch(), target="cpu").peak_bytes
    assert {len(m.params) for m in found.moments if m.module == "model.layers.1"} == {9}
    assert all(compiled_part(block) is not None for block in model.model.layers)


def test_a_recording_sees_compiled_blocks(tmp_path: Path) -> None:
    model = by_call(small())
    model = gemini.GeminiDDP(model, cut_config(model, "disk", tmp_path))
    plain, optimizer = Plain(by_call(small())), adam(model)
    with model.recording() as recording:
        train(model, optimizer, range(2))
    train_plain(plain, range(2))
    assert_same_state(model, plain)
    names = "\n".join(str(moment) for moment in recording.timeline.moments)
    for phase in ("forward", "backward"):
        assert f"{phase} model.layers.0" in names and f"{phase} model.layers.1" in names


def test_an_engine_may_be_collected_among_fake_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Garbage is collected in the middle of compiling, where torch's operations make fake tensors."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    model = wrap(Blocks(), "disk", tmp_path)
    squares(model, 0).backward()
    spill = world_of(model).spill
    with FakeTensorMode():
        del model
        gc.collect()
        assert noise(1).shape == (1,)
    assert said == [] and spill._fd == -1
