"""A trace made ahead of time is the one that a real step records: same moments, same params, same bytes."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import gemini
from gemini.planning.trace import MemoryTrace, Moment, Phase, Product, Source
from gemini.tracing import ahead, meter
from gemini.tracing.ahead import fake_copy
from tests.models import FAMILIES, VOCAB, make_model

KINDS = (False, "non-reentrant", "reentrant")


def batch(size: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (size, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def recorded(model: nn.Module, inputs: dict[str, torch.Tensor], checkpointing: Any) -> MemoryTrace:
    if checkpointing:
        reentrant = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
    with gemini.MemoryTracer(model) as tracer:
        model(**inputs).loss.backward()
    return tracer.trace


def without_seconds(trace: MemoryTrace) -> list[Moment]:
    return [dataclasses.replace(moment, seconds=None) for moment in trace.moments]


def num_hooks(model: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", KINDS)
def test_it_equals_the_recorded_one(family: str, checkpointing: Any) -> None:
    model, inputs = make_model(family).float(), batch()
    ahead = gemini.trace(model, inputs, precision="fp32", target="cpu", checkpointing=checkpointing)
    real = recorded(model, inputs, checkpointing)
    assert without_seconds(ahead) == without_seconds(real)
    assert ahead == dataclasses.replace(real, source=Source.AHEAD, moments=ahead.moments)
    assert ahead.checkpointing == bool(checkpointing)
    assert ahead.checkpoint_bytes == 0  # inputs of 3 KiB are not worth a move
    assert MemoryTrace.from_json(ahead.to_json()) == ahead and str(ahead)
    complete = [index for moment in ahead.moments for index in moment.gradients]
    assert sorted(complete) == [i for i, param in enumerate(ahead.params) if param.trainable]
    for moment in ahead.moments:
        assert moment.peak_bytes >= moment.live_bytes >= 0 and moment.num_ops > 0
        assert set(moment.gradients) <= set(moment.params)
    recomputed = [m for m in ahead.moments if m.phase is Phase.RECOMPUTE]
    assert bool(recomputed) == bool(checkpointing)


class InPlace(nn.Module):
    """Operations that write into their arguments, change their form, give several results, or one of them back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = (x @ self.weight).mul_(2.0).clamp_(min=0.0)
            most, at = x.max(dim=-1, keepdim=True)
            low, high = torch.ops.aten.unsafe_chunk(x, 2, dim=-1)
            large = torch.empty_like(x.detach()).resize_(64, 64)
            values, order = torch.sort(torch.cat((high, low), dim=-1) + most, dim=-1)
            x = values.index_add_(0, order[:, 0].clamp(max=1), values.detach()) + large.sum() + at
        return x.sum()


FORMS: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, Any]]] = {
    **{family: (partial(make_model, family), batch(), {}) for family in ("llama", "gpt2", "mixtral", "t5")},
    "tiles": (partial(make_model, "llama"), batch(), {"tile_tokens": "head=4,mlp=8"}),
    "checkpointed": (partial(make_model, "llama"), batch(), {"checkpointing": True}),
    "in place": (InPlace, {"x": torch.ones(4, 8)}, {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_made_of_tensors_of_known_forms_is_not_asked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second trace asks torch for few operations, and both are the one in which it is asked for all."""
    make, inputs, how = FORMS[name]
    model, asked, ask = make(), list[Any](), FakeTensorMode.dispatch

    def counted(self: Any, func: Any, *rest: Any, **more: Any) -> Any:
        asked.append(func)
        return ask(self, func, *rest, **more)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    monkeypatch.setattr(ahead, "_KNOWN", {})
    numbers, traces = list[int](), list[MemoryTrace]()
    for _ in range(2):
        asked.clear()
        traces.append(gemini.trace(model, inputs, **how))
        numbers.append(len(asked))
    monkeypatch.setattr(ahead.FakeRunner, "_fake", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert numbers[1] < numbers[0] and traces == [gemini.trace(model, inputs, **how)] * 2


def test_a_config_gives_the_trace_of_its_model() -> None:
    model = make_model("llama")
    inputs = gemini.batch_for(model.config, 2, 12)
    assert inputs["input_ids"].is_meta
    of_config = gemini.trace(model.config, inputs, target="cpu")
    on_meta = gemini.trace(make_model("llama").to("meta"), inputs, target="cpu")
    assert of_config == gemini.trace(model, inputs, target="cpu") == on_meta
    assert of_config.tokens == 24 and of_config.precision == "bf16"
    assert of_config.batch == {"input_ids": (2, 12), "labels": (2, 12)}
    flops = 6 * 24 * (of_config.num_params - VOCAB * 32)  # the embedding multiplies nothing
    assert flops < of_config.flops < 1.1 * flops  # and attention


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_it_is_the_same_wherever_it_is_asked_for(around: Callable[[], AbstractContextManager[Any]]) -> None:
    """As where a model is made: ``with torch.device("meta"): model = ...; trace = gemini.trace(model, batch)``."""
    model, inputs = make_model("llama"), batch()
    of_config, of_model = gemini.trace(model.config, inputs), gemini.trace(model, inputs)
    with around():
        assert gemini.trace(model.config, inputs) == of_config
        assert gemini.trace(model, inputs) == of_model


def test_products_are_kept_by_their_shapes_and_attention_apart() -> None:
    """All work of a decoder has a shape or is attention, of which a causal mask spares a kernel half."""
    model = make_model("llama")
    trace = gemini.trace(model, gemini.batch_for(model.config, 2, 12), target="cuda")
    hidden, inner, tokens = model.config.hidden_size, model.config.intermediate_size, 24
    forward, backward = ([m for m in trace.moments if m.module == "model.layers.0.mlp.up_proj" and m.phase is phase]
                         for phase in (Phase.FORWARD, Phase.BACKWARD))  # fmt: skip
    assert [m.products for m in forward] == [(Product(1, tokens, inner, hidden),)]
    assert {(p.m, p.n, p.k) for m in backward for p in m.products} == {(tokens, hidden, inner), (inner, hidden, tokens)}
    for moment in trace.moments:
        assert sum(product.flops for product in moment.products) + moment.attention.counted == moment.flops
    done = [sum(each) for each in zip(*(moment.attention for moment in trace.moments), strict=True)]
    assert done[0] > 0 and done[0] == 2 * (done[1] + done[2]) and done[2] == 2.5 * done[1]
    ids = torch.ones(2, 12, dtype=torch.long)
    mask = torch.arange(12).expand(2, 12) < 8
    padded = gemini.trace(model, {"input_ids": ids, "labels": ids, "attention_mask": mask.long()}, target="cuda")
    for moment in padded.moments:
        assert moment.attention.forward + moment.attention.backward == moment.attention.counted


def test_params_are_cast_and_buffers_are_not() -> None:
    model = make_model("llama")
    half = gemini.trace(model, batch(), precision="bf16", target="cpu")
    full = gemini.trace(model, batch(), precision="fp32", target="cpu")
    assert half.buffer_bytes == full.buffer_bytes == sum(b.nbytes for b in model.buffers()) > 0
    assert half.peak_bytes < 0.8 * full.peak_bytes
    assert half.params == full.params and half.fingerprint == full.fingerprint


def test_the_model_is_left_as_it_was() -> None:
    model = make_model("frozen").eval()
    before = {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    flags = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()
    gemini.trace(model, batch(), target="cpu", checkpointing=True)
    after = {name: (id(t), t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert before.keys() == after.keys()
    assert all(before[n][0] == after[n][0] and torch.equal(before[n][1], after[n][1]) for n in before)
    assert [p.requires_grad for p in model.parameters()] == flags and all(p.grad is None for p in model.parameters())
    assert num_hooks(model) == 0 and not any(module.training for module in model.modules())
    assert not model.is_gradient_checkpointing and torch.equal(random, torch.get_rng_state())
    model(**batch()).loss.backward()


def test_a_tied_head_is_read_at_both_ends_and_complete_once() -> None:
    trace = gemini.trace(make_model("tied"), batch(), target="cpu")
    tied = next(i for i, param in enumerate(trace.params) if len(param.names) > 1)
    reading = [(m.phase, m.module) for m in trace.moments if tied in m.params]
    assert (Phase.FORWARD, "lm_head") in reading and (Phase.FORWARD, "model.embed_tokens") in reading
    assert (Phase.BACKWARD, "lm_head") in reading
    assert [m.module for m in trace.moments if tied in m.gradients] == ["model.embed_tokens"]


def test_encoder_and_decoder_both_count() -> None:
    model = make_model("t5")
    inputs = gemini.batch_for(model.config, 2, 12)
    inputs["labels"] = inputs["labels"][:, :5]
    trace = gemini.trace(model, inputs, target="cpu")
    assert trace.tokens == 2 * 12 + 2 * 5
    modules = [m.module for m in trace.moments if m.phase is Phase.FORWARD]
    first_of_decoder = next(i for i, module in enumerate(modules) if module.startswith("decoder"))
    assert not any(module.startswith("encoder") for module in modules[first_of_decoder:])


def test_checkpointing_trades_activations_for_recomputation() -> None:
    model = make_model("llama")
    inputs = gemini.batch_for(model.config, 8, 64)
    plain = gemini.trace(model, inputs, target="cpu", checkpointing=False)
    saving = gemini.trace(model, inputs, target="cpu", checkpointing=True)
    assert saving.peak_bytes < plain.peak_bytes and saving.flops > plain.flops
    block_input = 8 * 64 * 32 * 2
    assert saving.checkpoint_bytes == 2 * block_input and plain.checkpoint_bytes == 0
    assert [m.restored_bytes for m in saving.moments if m.restored_bytes] == [block_input] * 2


class Fused(nn.Module):
    """Reads the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.first(x), self.inner[0].weight).sum()


class Twice(nn.Module):
    """``how`` its forward was replaced, by what closes over its parts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        first, second, own, twice = self.first, self.second, self, type(self).twice
        call, weight, bias = first.forward, first.weight, first.bias

        def layers(self: Twice, x: torch.Tensor) -> torch.Tensor:
            return second(first(x)).sum() if x is not None else _nothing

        ways: dict[str, Any] = {
            "layers": MethodType(layers, self),
            "function": lambda x: own.twice(x),
            "method": MethodType(lambda self, x: self.second(call(x)).sum(), self),
            "param": MethodType(lambda self, x: self.second(functional.linear(x, weight, bias)).sum(), self),
        }
        self.forward = ways.get(how) or MethodType(twice, self)
        for _nothing in ():  # so that its cell has nothing in it
            pass

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


@pytest.mark.parametrize("how", ["layers", "function", "method", "param"])
def test_a_forward_in_place_of_its_own_is_traced_over_copies(how: str) -> None:
    model, batch = Twice(how), {"x": torch.zeros(4, 8)}
    found, plain = (gemini.trace(each, batch, target="cpu") for each in (model, Twice("")))
    assert all(param.grad is None for param in model.parameters())
    assert (found.flops, found.peak_bytes) == (plain.flops, plain.peak_bytes)
    assert {index for moment in found.moments for index in moment.gradients} == {0, 1, 2, 3}


def test_a_weight_that_is_read_elsewhere_is_needed_there() -> None:
    trace = gemini.trace(Fused(), {"x": torch.zeros(4, 8)}, target="cpu")
    borrowed = next(i for i, param in enumerate(trace.params) if param.name == "inner.0.weight")
    assert [(m.phase, m.module) for m in trace.moments if borrowed in m.params] == [
        (Phase.FORWARD, ""),
        (Phase.BACKWARD, ""),
    ]


class Blocks(nn.Module):
    """Checkpoints by hand, and gives no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_any_module_with_a_loss_given() -> None:
    inputs = {"x": torch.zeros(128, 64, requires_grad=True)}
    trace = gemini.trace(Blocks(), inputs, precision="fp32", target="cpu", loss=lambda out: out.square().mean())
    assert [m.module for m in trace.moments if m.phase is Phase.RECOMPUTE] == ["layers.2.0", "layers.1.0", "layers.0.0"]
    assert trace.checkpoint_bytes == 3 * 128 * 64 * 4
    with pytest.raises(gemini.GeminiError, match=r"gave no loss.*\(128, 64\).*loss="):
        gemini.trace(Blocks(), inputs, target="cpu")


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2)).train()
    ahead = gemini.trace(model, batch(), precision="fp32", target="cpu")
    assert without_seconds(ahead) == without_seconds(recorded(model, batch(), False))
    complete = {ahead.params[i].name for moment in ahead.moments for i in moment.gradients}
    assert len(complete) == 4 and all("lora" in name for name in complete)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x[x.sum(-1) > 0].sum()


def test_what_follows_from_values_is_refused_and_says_what_to_do() -> None:
    model = Chooses()
    with pytest.raises(gemini.GeminiError, match=r"forward of Chooses cannot run.*aten.*MemoryTracer"):
        gemini.trace(model, {"x": torch.zeros(3, 4)}, target="cpu")
    assert num_hooks(model) == 0
    with gemini.MemoryTracer(model) as tracer:
        model(torch.ones(3, 4)).backward()
    assert tracer.trace.batch == {"x": (3, 4)}
    config = make_model("mixtral").config
    config._experts_implementation = "eager"
    with pytest.raises(gemini.GeminiError, match="MixtralForCausalLM cannot run.*nonzero"):
        gemini.trace(config, gemini.batch_for(config, 1, 8), target="cpu")


def test_bad_arguments() -> None:
    import transformers

    model = make_model("llama")
    bads: list[dict[str, Any]] = [{"precision": "int8"}, {"target": "tpu"}, {"checkpointing": "sometimes"}]
    for bad in [*bads, {"context_parallel": 0}, {"tensor_parallel": -1}]:
        with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
            gemini.trace(model, batch(), **bad)
    with pytest.raises(TypeError, match=r"keep_fp32= is .* a list of names .*, got 'lm_head'"):
        gemini.trace(model, batch(), keep_fp32="lm_head")
    with pytest.raises(ValueError, match="no gradient_checkpointing_enable"):
        gemini.trace(Fused(), {"x": torch.zeros(4, 8)}, checkpointing=True)
    with pytest.raises(gemini.GeminiError, match="gave no loss"):
        gemini.trace(model, {"input_ids": batch()["input_ids"]}, target="cpu")
    with pytest.raises(gemini.GeminiError, match="no param that requires gradients"):
        gemini.trace(make_model("llama").requires_grad_(False), batch(), target="cpu")
    with pytest.raises(ValueError, match="no model class with a loss"):
        gemini.trace(transformers.CLIPTextConfig(), batch(), target="cpu")
    managed = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="1GiB"), device="cpu"))
    with pytest.raises(gemini.GeminiError, match="before it is wrapped"):
        gemini.trace(managed, batch())


def test_on_cuda_attention_with_dropout_makes_no_scores() -> None:
    config = make_model("gpt2").config
    config.attn_pdrop = config.resid_pdrop = 0.1
    config.n_positions = 1024
    inputs = gemini.batch_for(config, 1, 1024)
    cpu = gemini.trace(config, inputs, target="cpu")
    cuda = gemini.trace(config, inputs, target="cuda")
    scores = 2 * 1024**2 * 2  # of one layer: heads, positions, half precision
    workspaces = 2 * 32 * 2**20
    assert cpu.peak_bytes - (cuda.peak_bytes - workspaces) > 2 * scores
    assert [(m.phase, m.module, m.gradients) for m in cpu.moments if m.gradients] == [
        (m.phase, m.module, m.gradients) for m in cuda.moments if m.gradients
    ]
    assert cuda.target == "cuda"
    import torch.nn.functional as now

    assert now.dropout is functional.dropout and now.dropout.__module__ == "torch.nn.functional"


@pytest.mark.parametrize(
    "name", ["flash_attention_for_cpu", "flash_attention", "cudnn_attention", "efficient_attention"]
)
def test_grouped_attention_is_counted_by_the_heads_of_the_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas of torch before 2.12 know no query with more heads than the keys."""
    query, key, whole = (torch.empty(2, heads, 5, 8, device="meta") for heads in (6, 2, 6))
    grad = torch.empty_like(query)
    real, backward = meter.sdpa_flop_count, meter.sdpa_backward_flop_count

    def strict(q: Any, k: Any, v: Any) -> int:
        assert q[:2] == k[:2] == v[:2]
        return real(q, k, v)

    def strict_backward(g: Any, q: Any, k: Any, v: Any) -> int:
        assert q[:2] == k[:2] == v[:2]
        return backward(g, q, k, v)

    for at in (meter, flop_counter):
        monkeypatch.setattr(at, "sdpa_flop_count", strict)
        monkeypatch.setattr(at, "sdpa_backward_flop_count", strict_backward)
    forward_op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    backward_op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward").default
    flops = meter.flops_of(forward_op, (query, key, key), {}, None)
    assert flops == meter.flops_of(forward_op, (query, whole, whole), {}, None) == 2 * 2 * 2 * 6 * 5 * 5 * 8
    lasting = meter.flops_of(backward_op, (grad, query, key, key), {}, None)
    assert lasting == meter.flops_of(backward_op, (grad, query, whole, whole), {}, None) > flops


class NarrowValues(nn.Module):
    """Attention whose values are narrower than its keys, as DeepSeek's are."""

    def __init__(self, of_values: int) -> None:
        super().__init__()
        self.of_keys, self.of_values = nn.Linear(8, 4 * 24), nn.Linear(8, 4 * of_values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.of_keys, self.of_values))
        return functional.scaled_dot_product_attention(key, key, value, is_causal=True).sum()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_narrow_values_make_no_scores_on_cuda(precision: str) -> None:
    length = 2048
    narrow, even, odd = (
        gemini.trace(NarrowValues(width), {"x": torch.ones(1, length, 8)}, precision=precision, target="cuda")
        for width in (16, 24, 15)
    )
    # torch has a kernel for widths that are multiples of 8, and makes the scores of all others.
    scores = 4 * length**2
    assert odd.peak_bytes > scores > 4 * narrow.peak_bytes and narrow.peak_bytes < 1.5 * even.peak_bytes


class Tables(nn.Module):
    """Tensors that are no buffers, in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.tables, self.by_name = [torch.ones(8, 8)], {"a": (torch.ones(8),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) @ self.tables[0].to(x.dtype) + self.by_name["a"][0].to(x.dtype)).sum()


def test_tables_of_a_model_are_traced_with_it() -> None:
    model = Tables()
    assert gemini.trace(model, {"x": torch.ones(2, 8)}).num_params == 72
    copied = fake_copy(model, FakeTensorMode())
    assert isinstance(copied.tables[0], FakeTensor) and isinstance(copied.by_name["a"][0], FakeTensor)
