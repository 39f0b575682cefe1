"""``torch.compile`` of parts of a managed model: the bits of the compiled plain loop wherever chunks live, or refused.

Dynamo and autograd's ahead-of-time half do all their work here; what they make is run operation by operation, because
inductor's own code takes a minute to make (``make test-slow``). One model is compiled for many tests: compiled code is
kept by what it was made of, not by the module.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.planning.layout import ParamSpec, make_layout
from gemini.planning.working import staging_bytes, staging_sets, tile_numel
from gemini.tiers import Tier
from gemini.train.modules.changing import compile_blocks, hook_around
from gemini.train.modules.reading import compiled_part
from gemini.train.passes import hooks
from gemini.train.setup.problem import collect_params, structural_trace
from tests.models import working_set
from tests.train.helpers import (
    PLACEMENTS,
    Blocks,
    Plain,
    adam,
    assert_same_state,
    assert_trains_alike,
    batch,
    llama,
    make_config,
    noise,
    on_batch,
    squares,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of

CUT = 4000
"""Elements of the largest chunk: a block of the tiny Llama is several."""

ran: list[int] = []
"""The length of each compiled forward that ran, in operations."""


def counted(graph: Any, inputs: Any) -> Any:
    """A backend that says when its code runs."""
    compiled = lookup_backend("aot_eager")(graph, inputs)

    def run(*args: Any) -> Any:
        ran.append(len(graph.graph.nodes))
        return compiled(*args)

    return run


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # all of transformers' blocks have one wrapped forward
        yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


def small() -> Any:
    return llama(layers=2)


def checkpointed() -> Any:
    model = small()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def by_call(model: Any) -> Any:
    compile_blocks(model, backend=counted, fullgraph=True)
    return model


def by_forward(model: Any) -> Any:
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=counted, fullgraph=True)
    return model


def of_parts(model: Any) -> Any:
    for block in model.model.layers:
        block.mlp.compile(backend=counted, fullgraph=True)
    return model


WAYS: dict[str, Callable[[Any], Any]] = {"call": by_call, "forward": by_forward, "parts": of_parts}


def cut_config(model: Any, where: str, path: Path) -> gemini.GeminiConfig:
    """As tight as it can be for blocks of several chunks."""
    named = collect_params(model)
    layout = make_layout([ParamSpec(n.names[0], n.param.numel()) for n in named], max_chunk=CUT)
    gathered, config = working_set(model, layout, "bf16"), make_config(model, where, path)
    staging = staging_bytes(tile_numel(max(chunk.numel for chunk in layout.chunks)))
    if where == "standin":
        config = replace(config, memory=replace(config.memory, gpu=gathered))
    elif where == "disk":
        staging *= staging_sets(Tier.CPU, "bf16", overlap=True)
        config = replace(config, memory=replace(config.memory, cpu=gathered + staging))
    return replace(config, max_chunk=CUT)


def assert_same_run(model: Any, plain_model: Any, loss_of: Callable[[Any, int], Any] = on_batch) -> None:
    """Three steps of each: the same losses, weights, masters and states; the compiled code ran in all of them."""
    plain, optimizer = Plain(plain_model), adam(model)
    ran.clear()
    losses = train(model, optimizer, range(3), loss_of)
    managed = list(ran)
    assert losses == train_plain(plain, range(3), loss_of)
    assert_same_state(model, plain)
    assert managed and ran == 2 * managed


# ---- the bits --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(
    ("way", "where"), [*((way, where) for way in ("call", "forward") for where in PLACEMENTS), ("parts", "disk")]
)
def test_the_bits_of_the_plain_loop(way: str, where: str, tmp_path: Path) -> None:
    model = WAYS[way](small())
    model = gemini.GeminiDDP(model, cut_config(model, where, tmp_path))
    assert_same_run(model, WAYS[way](small()))
    assert where == "ram" or world_of(model).num_evictions > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "standin"])
@pytest.mark.parametrize("way", ["call", "forward"])
def test_recomputation_is_compiled_too(way: str, where: str, tmp_path: Path) -> None:
    """And the inputs that it starts from wait on NVMe, as those of blocks that are not compiled do."""
    held: list[int] = []

    def long(model: Any, seed: int) -> torch.Tensor:
        loss = model(**batch(seed, rows=4, length=64)).loss
        if isinstance(model, gemini.GeminiDDP):
            held.append(world_of(model).held(Tier.NVME, "activations"))
        return loss

    model = WAYS[way](checkpointed())
    config = make_config(model, where, tmp_path, slack=2**20)
    model = gemini.GeminiDDP(model, replace(config, offload_activations="nvme"))
    assert_same_run(model, WAYS[way](checkpointed()), long)
    assert held == [2 * 4 * 64 * 32 * 2] * 3  # blocks, rows, positions, width, bytes


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_compiled_after_wrapping(where: str, tmp_path: Path) -> None:
    model = small()
    model = gemini.GeminiDDP(model, cut_config(by_call(small()), where, tmp_path))
    optimizer = adam(model)
    train(model, optimizer, range(1))  # the engine has foreseen steps that are no more
    assert ran == []
    model.compile(backend=counted, fullgraph=True)
    plain = Plain(small())
    train_plain(plain, range(1))
    by_call(plain.model)
    assert_trains_alike(model, optimizer, plain, range(1, 3))
    assert len(ran) == 2 * 2 * 2
    for block in [*model.model.layers, *plain.model.model.layers]:
        block._compiled_call_impl = None  # and no longer
    ran.clear()
    assert_trains_alike(model, optimizer, plain, range(3, 5))
    assert ran == []


def test_compiled_code_of_others_may_call_modules_with_hooks(where: str, tmp_path: Path) -> None:
    """A function inside of a model: dynamo runs the hooks as they are, and compiles what is between them."""

    def with_function(model: Any) -> Any:
        for block in model.model.layers:
            mlp = block.mlp
            inside = torch.compile(lambda x, mlp=mlp: mlp.up_proj(x) * mlp.act_fn(mlp.gate_proj(x)), backend=counted)
            mlp.forward = lambda x, mlp=mlp, inside=inside: mlp.down_proj(inside(x))
        return model

    model, plain = wrap(with_function(small()), where, tmp_path), Plain(with_function(small()))
    assert_trains_alike(model, adam(model), plain, range(2))
    assert ran
    assert torch._dynamo.trace_rules.check_file(hooks.__file__).skipped


@pytest.mark.parametrize("way", ["call", "forward"])
def test_hooks_are_outside_of_compiled_code(way: str) -> None:
    """Else dynamo looks at every frame of whatever they call; torch's own hooks are inside of ``module.compile()``."""
    module, seen = Blocks(), []

    def active() -> bool:
        return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None

    if way == "call":
        module.compile(backend=counted)
    else:
        module.forward = torch.compile(module.forward, backend=counted)

    def hook(name: str, result: Any = None) -> list[Any]:
        return hook_around(
            module,
            lambda m, args: seen.append((name, "pre", active())),
            lambda m, args, out: seen.append((name, "post" if out is not None else "failed", active())) or result,
        )

    x = torch.ones(2, 32)
    inner, outer = hook("inner"), hook("outer", result=x)
    assert module(x) is x and len(ran) == 1
    order = [("outer", "pre"), ("inner", "pre"), ("inner", "post"), ("outer", "post")]
    assert seen == [(*moment, False) for moment in order]
    seen.clear()
    with pytest.raises(Exception, match=r"."):
        module(torch.ones(2, 3))
    assert [moment[1] for moment in seen] == ["pre", "pre", "failed", "failed"]
    seen.clear()
    for handle in inner:
        handle.remove()
    module(x)
    assert {moment[0] for moment in seen} == {"outer"}
    for handle in outer:
        handle.remove()
    seen.clear()
    assert module(x) is not x and seen == [] and compiled_part(module) is not None


@pytest.mark.slow
@pytest.mark.parametrize("make", [small, checkpointed], ids=["plain", "checkpointed"])
def test_the_bits_of_inductor(where: str, make: Callable[[], Any], tmp_path: Path) -> None:
    def compiled() -> Any:
        model = make()
        compile_blocks(model, fullgraph=True)
        return model

    model, plain = wrap(compiled(), where, tmp_path), Plain(compiled())
    assert_trains_alike(model, adam(model), plain, range(3))


class Passing(nn.Module):
    """Blocks that pass on what an earlier one made, as T5's do with the bias of its positions."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32) / 8)
            self.back = nn.Parameter(torch.randn(32, 64) / 8)

        def forward(self, x: torch.Tensor, made: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = nn.functional.linear(x, self.weight)
            made = hidden.mean(-1, keepdim=True) if made is None else made
            return nn.functional.linear(torch.tanh(hidden), self.back) + made, made

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = None
        for block in self.blocks:
            x, made = block(x, made)
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_passed_on_is_nobody_s_result(where: str, compiled: bool, tmp_path: Path) -> None:
    """Its gradient says that the backward of the block that made it begins, and not that of those it went through."""

    def make() -> Any:
        model = Passing()
        if compiled:
            compile_blocks(model, backend=counted)
        return model

    model, plain = wrap(make(), where, tmp_path), Plain(make())
    assert_trains_alike(model, adam(model), plain, range(3), squares)
    assert len(ran) == (18 if compiled else 0)


def test_evaluation(tmp_path: Path) -> None:
    model, plain = Passing(), Plain(Passing()).model
    for each in (model, plain):
        compile_blocks(each, backend=counted)
    model = wrap(model, "disk", tmp_path).eval()
    with torch.no_grad():
        assert squares(model, 0) == squares(plain.eval(), 0)
    assert len(ran) == 6


class Around(nn.Module):
    """Blocks that are checkpointed from outside of their call, as those of older transformers are."""

    class Block(nn.Sequential):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().__call__, x, use_reentrant=self.reentrant)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self[1](torch.tanh(self[0](x)))

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(3))
        for block in self.blocks:
            block.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("where", ["disk", "standin"])
@pytest.mark.parametrize("way", ["call", "forward"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_around_compiled_blocks(reentrant: bool, way: str, where: str, tmp_path: Path) -> None:
    def make() -> Any:
        model = Around(reentrant)
        for block in model.blocks:
            if way == "call":
                block.compile(backend=counted)
            else:
                block.forward = torch.compile(block.forward, backend=counted)
        return model

    model, plain = wrap(make(), where, tmp_path), Plain(make())
    assert_trains_alike(model, adam(model), plain, range(2), squares)
    assert len(ran) == 2 * 2 * 3 * 2  # models, steps, blocks, forward and recomputation


# ---- room ------------------------------------------------------------------------------------------------------------


def test_a_compiled_block_is_read_as_a_whole() -> None:
    plain, compiled = small(), by_call(small())
    layout = make_layout([ParamSpec(n.names[0], n.param.numel()) for n in collect_params(plain)], max_chunk=CUT)
    block = sum(c.numel for c in layout.chunks if c.slots[0].name.startswith("model.layers.0."))
    assert working_set(plain, layout, "bf16") < working_set(compiled, layout, "bf16") == 2 * block
    paths = [moment.module for moment in structural_trace(compiled, "bf16").moments]
    assert "model.layers.0" in paths and not [path for path in paths if path.startswith("model.layers.0.")]


def test_what_has_no_room_after_wrapping_is_refused_until_it_has(tmp_path: Path) -> None:
    model = small()
    model = gemini.GeminiDDP(model, cut_config(model, "disk", tmp_path))
    plain, optimizer = Plain(small()), adam(model)
    model.compile(backend=counted)
    for _ in range(2):
        with pytest.raises(gemini.BudgetExceeded, match=r"model.layers.0.self_attn.* needs .* of cpu: budget"):
            model(**batch())
    for block in model.model.layers:
        block._compiled_call_impl = None
    assert_trains_alike(model, optimizer, plain, range(2))


def test_a_trace_of_modules_leaves_room_for_compiled_blocks(tmp_path: Path) -> None:
    trace = gemini.trace(small(), batch(), target="cpu")
    model = by_call(small())
    config = replace(cut_config(model, "disk", tmp_path), trace=trace)
    model = gemini.GeminiDDP(model, config)
    assert world_of(model).problem.working_set == working_set(model, world_of(model).layout, "bf16")
    assert_same_run(model, by_call(small()))


# ``torch.compile`` of what cannot be served is refused; who looks on (a tracer, a recording) sees compiled parts.


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
        return tracer.trace, len(tracer._recorder.timed)

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
    assert said == [] and spill._fds == [-1]
