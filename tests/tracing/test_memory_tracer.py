"""Recording real steps: of wrapped models and others, whole steps only, and nothing left behind."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, accesses
from gemini.tracing.meter import Meter
from gemini.tracing.observer import Observer
from tests.models import VOCAB, make_model
from tests.world import world_of

Inputs = dict[str, torch.Tensor]


@cache
def batch(size: int = 2, length: int = 12) -> Inputs:
    """Kept: a batch that goes away in the middle of a step is bytes that go away."""
    ids = torch.randint(3, VOCAB, (size, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def without_seconds(trace: MemoryTrace) -> list[Moment]:
    return [dataclasses.replace(moment, seconds=None) for moment in trace.moments]


def num_hooks(model: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def managed(family: str, place: str, folder: Path, **settings: Any) -> Any:
    budgets = {
        "ram": gemini.MemoryBudget(cpu="1GiB"),
        "disk": gemini.MemoryBudget(cpu="1GiB", nvme="1GiB", nvme_path=str(folder)),
        "standin": gemini.MemoryBudget(gpu="64MiB", cpu="1GiB"),
    }
    placements: dict[str, Any] = {
        "ram": "auto",
        "disk": gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0),
        "standin": gemini.StaticPlacement(weights_on_gpu=0.0, optimizer_on_gpu=0.0),
    }
    config = gemini.GeminiConfig(
        memory=budgets[place], placement=placements[place], device="standin" if place == "standin" else "cpu",
        max_chunk=8192, **settings,
    )  # fmt: skip
    return gemini.GeminiDDP(make_model(family), config)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("family", ["tied", "t5", "mixtral"])
@pytest.mark.parametrize("place", ["ram", "disk", "standin"])
def test_moving_chunks_leaves_no_mark_in_the_trace(family: str, place: str, tmp_path: Path) -> None:
    ahead = gemini.trace(make_model(family), batch(), target="cpu")
    model = managed(family, place, tmp_path)
    model(**batch())  # transformers hooks what it reports, at the first call
    hooks = num_hooks(model)
    optimizer = gemini.HybridAdam(model.parameters())
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(3):
            model(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert without_seconds(tracer.trace) == without_seconds(ahead)
    assert tracer.trace.fingerprint == ahead.fingerprint and tracer.trace.source is Source.RECORDED
    world = world_of(model)
    assert num_hooks(model) == hooks and not {"begin_call", "take_grad"} & {
        *vars(world.forward),
        *vars(world.backward),
    }
    assert world_of(model).calls._acquire == world_of(model).manager.acquire


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "t5", "tied", "frozen"])
def test_a_moment_needs_what_the_engine_keeps_gathered(
    family: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = managed(family, "disk", tmp_path)
    if checkpointing:
        model.gradient_checkpointing_enable()
    world = world_of(model)
    pinned: list[set[int]] = []
    now: set[int] = set()

    def run(self: Observer, func: Any = None) -> Meter:
        def look(func: Any, args: Any, kwargs: Any) -> Any:
            now.update(chunk.spec.index for chunk in world.chunks if chunk.pins)
            return func(*args, **kwargs)

        return made(self, look)

    def close(self: Observer) -> int | None:
        index = closed(self)
        if index is not None:
            pinned.append(set(now))
        now.clear()
        return index

    made, closed = Observer.make_meter, Observer._close
    monkeypatch.setattr(Observer, "make_meter", run)
    monkeypatch.setattr(Observer, "_close", close)
    with gemini.MemoryTracer(model) as tracer:
        model(**batch()).loss.backward()
    trace = tracer.trace
    moving = {chunk.spec.index for chunk in world.chunks if not chunk.resident}
    assert moving and len(pinned) == len(trace.moments)
    for moment, access, held in zip(trace.moments, accesses(trace, world.layout), pinned, strict=True):
        assert set(access.chunks) & moving == held, moment


def test_saved_inputs_are_those_that_offloading_moves(tmp_path: Path) -> None:
    inputs = batch(8, 64)
    model = managed("llama", "standin", tmp_path, offload_activations="cpu")
    model.gradient_checkpointing_enable()
    model(**inputs).loss.backward()
    optimizer = gemini.HybridAdam(model.parameters())
    optimizer.step()
    moved = dict(world_of(model).moved_last_step()) or dict(world_of(model).moved())
    trace = gemini.trace(make_model("llama"), inputs, target="cpu", checkpointing=True)
    plain = managed("llama", "standin", tmp_path)
    plain.gradient_checkpointing_enable()
    plain(**inputs).loss.backward()
    other = gemini.HybridAdam(plain.parameters())
    other.step()
    less = dict(world_of(plain).moved_last_step()) or dict(world_of(plain).moved())
    out, back = "gpu->cpu", "cpu->gpu"
    assert moved[out] - less.get(out, 0) == sum(m.saved_bytes for m in trace.moments) > 0
    assert moved[back] - less.get(back, 0) == sum(m.restored_bytes for m in trace.moments) > 0


def test_seconds_are_those_of_steps_that_are_not_counted() -> None:
    model = make_model("llama")
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(4):
            model(**batch()).loss.backward()
    assert len(tracer._recorder.timed) == 3 and all(not step.moments for step in tracer._recorder.timed)
    seconds = tracer.trace.seconds
    assert seconds is not None and 0 < seconds
    fastest = min(sum(step.times) for step in tracer._recorder.timed)
    slowest = max(sum(step.times) for step in tracer._recorder.timed)
    assert 0.1 * fastest < seconds < 2 * slowest
    assert all(moment.seconds is not None and moment.seconds >= 0 for moment in tracer.trace.moments)


def test_a_single_step_is_timed_as_it_was() -> None:
    model = make_model("gpt2")
    with gemini.MemoryTracer(model) as tracer:
        model(**batch()).loss.backward()
    assert tracer.trace.seconds is not None and tracer.trace.seconds > 0


def test_gradients_of_a_plain_model_are_left_to_the_user() -> None:
    model, twin = make_model("llama"), make_model("llama")
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(2):
            model(**batch()).loss.backward()
    for _ in range(2):
        twin(**batch()).loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    ahead = gemini.trace(twin, batch(), precision="fp32", target="cpu")
    assert without_seconds(tracer.trace) == without_seconds(ahead)
    with gemini.MemoryTracer(model) as again:  # there are gradients to add to
        model(**batch()).loss.backward()
    assert [(m.phase, m.module, m.params) for m in again.trace.moments] == [
        (m.phase, m.module, m.params) for m in ahead.moments
    ]


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_tensors_are_no_obstacle(sparse: bool) -> None:
    """They have no storage; ``gemini.trace`` sends whoever has what it cannot run to the tracer."""

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(64, 128, sparse=sparse), nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.embed(x)
            near = torch.eye(len(x), dtype=found.dtype).to_sparse()
            return checkpoint(lambda near, found: torch.sparse.mm(near, self.out(found)), near, found,
                              use_reentrant=False).sum()  # fmt: skip

    model, x = Neighbours(), torch.arange(64)
    with gemini.MemoryTracer(model) as tracer:
        model(x).backward()
    ahead = gemini.trace(model, {"x": x}, precision="fp32", target="cpu")
    for trace in (tracer.trace, ahead):
        assert {index for moment in trace.moments for index in moment.gradients} == {0, 1, 2}
        assert trace.checkpointing and trace.peak_bytes > 64 * 128 * 4
    assert num_hooks(model) == 0


def test_evaluations_are_no_steps_and_two_forwards_may_share_a_backward() -> None:
    model = make_model("llama")
    once = gemini.trace(model, batch(), precision="fp32", target="cpu")
    with gemini.MemoryTracer(model) as tracer:
        with torch.no_grad():
            model(**batch())
        model(**batch()).loss.backward()
    assert without_seconds(tracer.trace) == without_seconds(once)
    with gemini.MemoryTracer(model) as tracer:
        (model(**batch()).loss - model(**batch(1)).loss).backward()
    pair = tracer.trace
    assert pair.tokens == 36 and pair.flops > once.flops
    assert sum(m.phase is Phase.FORWARD for m in pair.moments) > 1.8 * sum(
        m.phase is Phase.FORWARD for m in once.moments
    )


def test_a_step_may_pass_before_it_and_a_loss_may_be_made_outside() -> None:
    model = make_model("llama")
    inputs = batch()
    model(**batch(1, 4)).loss.backward()
    with gemini.MemoryTracer(model) as tracer:
        logits = model(input_ids=inputs["input_ids"]).logits
        nn.functional.cross_entropy(logits.view(-1, VOCAB), inputs["labels"].view(-1)).backward()
    assert tracer.trace.batch == {"input_ids": (2, 12)}
    first = next(m for m in tracer.trace.moments if m.phase is Phase.BACKWARD)
    assert first.module == "" and first.num_ops > 0


def test_without_a_whole_step_there_is_no_trace() -> None:
    model = make_model("llama")
    tracer = gemini.MemoryTracer(model)
    with pytest.raises(gemini.GeminiError, match="no whole step of LlamaForCausalLM"):
        _ = tracer.trace
    with tracer:
        model(**batch())
        with pytest.raises(gemini.GeminiError, match="backward of its loss inside"):
            _ = tracer.trace
        with pytest.raises(gemini.GeminiError, match="recording already"), tracer:
            pass
    with pytest.raises(TypeError, match="nn.Module"):
        gemini.MemoryTracer("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no params"):
        gemini.MemoryTracer(nn.ReLU())


class Breaks(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.where == "forward":
            raise RuntimeError("broken")
        if self.where == "backward":
            x.register_hook(lambda grad: 1 / 0)
        return self.layers[1](x).sum()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_no_hook_and_no_mode(where: str) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model = Breaks(where)
    with pytest.raises((RuntimeError, ZeroDivisionError)), gemini.MemoryTracer(model):
        model(torch.ones(2, 4)).backward()
    assert num_hooks(model) == 0 and _get_current_dispatch_mode() is None
    model.where = ""
    model.zero_grad()
    with gemini.MemoryTracer(model) as tracer:
        model.where = where
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            model(torch.ones(2, 4)).backward()
        model.where = ""
        model(torch.ones(2, 4)).backward()
    modules = [(m.phase, m.module) for m in tracer.trace.moments]
    assert modules == [
        (Phase.FORWARD, "layers.0"), (Phase.FORWARD, "layers.1"), (Phase.FORWARD, ""),
        (Phase.BACKWARD, ""), (Phase.BACKWARD, "layers.1"), (Phase.BACKWARD, "layers.0"),
    ] or modules[-1] == (Phase.BACKWARD, "layers.0")  # fmt: skip
    assert torch.is_grad_enabled() and _get_current_dispatch_mode() is None
