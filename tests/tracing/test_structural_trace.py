"""The trace that is made of the modules' order alone: its working set is the one the engine reserves."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini.planning.layout import ChunkSpec
from gemini.planning.planes import compute_itemsize
from gemini.planning.trace import MemoryTrace, Phase, Source, accesses
from gemini.train.modules.reading import Structure, params_read_by
from gemini.train.setup.problem import collect_params, structural_trace
from tests.models import FAMILIES


class Holder(nn.Module):
    """Params in containers that are never called, a shared module, and a module without params around others."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(5000)), "b": nn.Parameter(torch.ones(3))})
        shared = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.ReLU(), nn.Linear(64, 64)) for _ in range(3))


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(target_modules=["q_proj"], r=2))


def reserved_without_a_trace(model: nn.Module, chunk_of: Callable[[nn.Parameter], ChunkSpec], itemsize: int) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it.

    A module that owns params may read its leaf children's weights itself (``out_proj.weight`` in an attention module
    that calls a fused op), so theirs count too.
    """
    largest = 0

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        nonlocal largest
        own = [chunk_of(p) for p in params_read_by(module)]
        inside = around | {chunk.index for chunk in own}
        leaves = [p for child in module.children() if not any(child.children()) for p in child._parameters.values()]
        read = own + [chunk_of(p) for p in leaves if p is not None and own]
        for chunk in read:
            sizes[chunk.index] = chunk.numel * itemsize
        largest = max(largest, sum(sizes[index] for index in inside | {chunk.index for chunk in read}))
        for child in module.children():
            visit(child, inside)

    sizes: dict[int, int] = {}
    visit(model, frozenset())
    return largest


class Twice(nn.Module):
    """A module under two names of one parent, and none under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = self.encoder
        self.register_module("bridge", None)


MODELS = {**FAMILIES, "holder": Holder, "lora": lora, "linear": lambda: nn.Linear(3, 4), "twice": Twice}


@pytest.mark.parametrize("name", MODELS)
def test_params_have_all_their_names(name: str) -> None:
    model = MODELS[name]()
    found = [name for param in Structure(model).params for name in param.names]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_chunk", [4096, 2**26])
def test_its_largest_moment_is_the_working_set_of_the_engine(name: str, max_chunk: int) -> None:
    model = MODELS[name]()
    trace = structural_trace(model, "bf16")
    assert trace.source is Source.STRUCTURE and trace.peak_bytes == trace.flops == 0
    layout = trace.layout(max_chunk=max_chunk)
    place = {slot.name: chunk for chunk in layout.chunks for slot in chunk.slots}
    chunk_of = {id(n.param): place[n.names[0]] for n in collect_params(model)}
    itemsize = compute_itemsize("bf16")
    largest = max(
        sum(layout.chunks[index].numel * itemsize for index in access.chunks) for access in accesses(trace, layout)
    )
    assert largest == reserved_without_a_trace(model, lambda p: chunk_of[id(p)], itemsize)
    assert MemoryTrace.from_json(trace.to_json()) == trace


def test_backward_is_forward_reversed_and_completes_every_gradient_once() -> None:
    model = FAMILIES["frozen"]()
    trace = structural_trace(model, "fp32")
    forward = [m for m in trace.moments if m.phase is Phase.FORWARD]
    backward = [m for m in trace.moments if m.phase is Phase.BACKWARD]
    assert [(m.module, m.params) for m in backward] == [(m.module, m.params) for m in reversed(forward)]
    complete = [index for moment in backward for index in moment.gradients]
    assert sorted(complete) == [i for i, param in enumerate(trace.params) if param.trainable]
    assert all(set(m.gradients) <= set(m.params) for m in backward)


def test_a_tied_weight_is_one_param_that_is_complete_at_the_embedding() -> None:
    model = FAMILIES["gpt2"]()
    trace = structural_trace(model, "bf16")
    tied = next(i for i, param in enumerate(trace.params) if len(param.names) > 1)
    reading = [m.module for m in trace.moments if m.phase is Phase.BACKWARD and tied in m.params]
    complete = next(m.module for m in trace.moments if tied in m.gradients)
    assert reading[0] == "lm_head" and complete == reading[-1] == "transformer.wte"
