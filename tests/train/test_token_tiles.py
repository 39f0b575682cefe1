"""Parts of a model computed in tiles of tokens: the same losses, gradients within rounding, and far smaller peaks."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gemini
from gemini.train.modules.reading import Structure
from gemini.train.modules.tiled_logits import split_rows
from gemini.train.modules.token_tiles import tile_tokens
from gemini.train.wrap import unmanage
from tests import models
from tests.train.helpers import (
    ALL_PLACEMENTS,
    Blocks,
    Plain,
    adam,
    assert_same_state,
    batch,
    gpt2,
    llama,
    make_config,
    mixtral,
    noise,
    t5,
    train,
    train_plain,
)
from tests.world import is_managed

TOKENS = 8


def gemma2() -> nn.Module:
    """With a soft cap over its logits."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "t5": t5,  # with a CrossEntropyLoss of its own
    "gemma2": gemma2,
}


def long(model: Any, seed: int) -> torch.Tensor:
    return model(**batch(seed, rows=2, length=21)).loss  # type: ignore[no-any-return]


def tiled(model: Any, tokens: int | str = TOKENS) -> Any:
    tile_tokens(model, tokens)
    return model


def masked_batch(masked: bool) -> dict[str, Any]:
    given: dict[str, Any] = batch(0, rows=2, length=21)
    if masked:
        given["labels"][:, :5] = -100
        given["num_items_in_batch"] = torch.tensor(17)
    return given


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_has_its_bits_and_logits_are_there_without_labels(name: str, masked: bool) -> None:
    given = masked_batch(masked)
    whole, model = MODELS[name](), tiled(MODELS[name]())
    output = model(**given)
    assert torch.equal(output.loss, whole(**given).loss) and output.logits is None
    logits = [m.eval()(**given).logits for m in (whole, model)]
    assert torch.allclose(*logits, atol=1e-6) and logits[0].shape[-1] == whole.config.vocab_size


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_the_same_sums_in_another_order(name: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, so that the bound says "the same sums" on every processor: another order is 1e-15, a lost one not."""
    given = masked_batch(masked)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # norms and losses that compute in fp32 at least
    whole, model = MODELS[name]().double(), MODELS[name]().double()
    for each in (whole, model):  # torch multiplies the groups of experts in fp32 at most
        each.config._experts_implementation = "eager"
    tiled(model)(**given).loss.backward()
    whole(**given).loss.backward()
    for (param, wanted), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert (wanted.grad is None) == (got.grad is None), param
        if wanted.grad is not None and got.grad is not None:
            assert (wanted.grad - got.grad).abs().max() <= 1e-13 * wanted.grad.abs().max().clamp(min=1e-3), param


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_the_bits_are_those_of_the_plain_loop_of_the_tiled_model(
    where: str, precision: str, name: str, tmp_path: Path
) -> None:
    plain = Plain(tiled(MODELS[name]()), precision)
    config = make_config(MODELS[name](), where, tmp_path, precision=precision)
    model = gemini.GeminiDDP(MODELS[name](), replace(config, tile_tokens=TOKENS))
    assert train(model, adam(model), range(3), long) == train_plain(plain, range(3), long)
    assert_same_state(model, plain)


@pytest.mark.slow
def test_with_activation_checkpointing(tmp_path: Path) -> None:
    def make() -> Any:
        model: Any = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    plain = Plain(tiled(make()))
    model = gemini.GeminiDDP(make(), replace(make_config(make(), "disk", tmp_path), tile_tokens=TOKENS))
    assert train(model, adam(model), range(3), long) == train_plain(plain, range(3), long)
    assert_same_state(model, plain)


@pytest.mark.slow
def test_no_logits_and_no_inner_width_of_the_whole_sequence() -> None:
    def peak(tokens: int | None) -> int:
        config = models.llama(hidden_size=64, intermediate_size=512, vocab_size=4096, num_hidden_layers=2).config
        ids = torch.empty(1, 2048, dtype=torch.long, device="meta")
        given = {"input_ids": ids, "labels": ids}
        trace = gemini.trace(config, given, precision="fp32", target="cpu", checkpointing=True, tile_tokens=tokens)
        return max(moment.peak_bytes for moment in trace.moments)

    whole, small = peak(None), peak(64)
    assert whole > 2048 * 4096 * 4 > 2 * small


class Mixes(nn.Module):
    """An MLP by its parts, whose tokens see those before them."""

    def __init__(self, how: str):
        super().__init__()
        self.up, self.down, self.how = nn.Linear(16, 32), nn.Linear(32, 16), how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "mixes":
            x = x + x.roll(1, -2)
        y = self.down(torch.relu(self.up(x)))
        return (y, y.sum()) if self.how == "tuple" else y


class WithMlp(nn.Module):
    def __init__(self, how: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = Mixes(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()  # type: ignore[no-any-return]


def test_what_cannot_be_tiled_is_refused_by_name_or_left_whole(tmp_path: Path) -> None:
    def managed(model: nn.Module) -> Any:
        return gemini.GeminiDDP(model, replace(make_config(model, "disk", tmp_path), tile_tokens=TOKENS))

    x = noise(2, 30, 16)
    with pytest.raises(gemini.GeminiError, match=r"tile_tokens=8: 'mlp' \(Mixes\) gives a token another result"):
        managed(WithMlp("mixes"))(x)
    with pytest.raises(gemini.GeminiError, match=r"'mlp' \(Mixes\) gives a token another result"):
        managed(WithMlp("mixes"))(noise(1, 9, 16))
    small, zero = WithMlp("mixes"), WithMlp("mixes")
    with torch.no_grad():
        for factor, down in ((1e-3, small.mlp.down), (0.0, zero.mlp.down)):
            down.weight.mul_(factor)
            down.bias.zero_()
    with pytest.raises(gemini.GeminiError, match=r"'mlp' \(Mixes\) gives a token another result"):
        managed(small)(x)
    zero = managed(zero)
    zero(x)  # every token has the same until there are weights
    with torch.no_grad():
        zero.mlp.down.weight.fill_(1e-3)
    with pytest.raises(gemini.GeminiError, match=r"'mlp' \(Mixes\) gives a token another result"):
        zero(x)
    assert torch.equal(managed(WithMlp("tuple"))(x), WithMlp("tuple").bfloat16()(x))
    with pytest.raises(gemini.GeminiError, match="neither an MLP .* nor an output head.*Leave tile_tokens out"):
        managed(Blocks())
    for strange, named in {
        "mean": lambda logits: logits.float().mean(),
        "softmax": lambda logits: torch.softmax(logits, -1),
        "a part of the vocabulary": lambda logits: logits[..., :5],
        "mul_": lambda logits: (logits[:, 1:], logits.mul_(2)),
        "reshape": lambda logits: torch.reshape(input=logits, shape=(-1, logits.shape[-1])),
        "__setitem__": lambda logits: logits.__setitem__(0, 1.0),
        r"\(gt\)": lambda logits: logits > 0,
    }.items():
        model: Any = llama()
        model.loss_function = lambda logits, labels, of=named, **_: of(logits)
        with pytest.raises(gemini.GeminiError, match=f"tile_tokens=8: LlamaForCausalLM .*logits.*{strange}"):
            long(managed(model), 0)
    with pytest.raises(gemini.GeminiError, match="tile_tokens='head=8': this model has no output head .* Leave head="):
        tile_tokens(WithMlp(), "head=8")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(gemini.GeminiError, match=r"no output head with a loss \(an nn.Linear, no adapter on it\)"):
        tile_tokens(adapted, "head=8")
    for wrong in (0, 1, True, "some", 2.0, "head=1", "head=", "tail=8", "head=8,head=9", ""):
        with pytest.raises(ValueError, match='tile_tokens= is "auto" or a number of tokens, 2 or more'):
            gemini.GeminiConfig(tile_tokens=wrong)  # type: ignore[arg-type]


def test_nan_in_the_first_batch_is_no_refusal(tmp_path: Path) -> None:
    """Of a padded row, or where fp16 has overflowed."""
    x = noise(2, 30, 16)
    x[0, 10] = float("nan")
    model = gemini.GeminiDDP(WithMlp(), replace(make_config(WithMlp(), "disk", tmp_path), tile_tokens=TOKENS))
    assert model(x).isnan()


def test_a_loss_from_outside_of_the_model_is_said_to_need_whole_logits() -> None:
    """As the Trainer's label smoothing; once, and neither in evaluation nor of MLPs."""
    given = batch(0, rows=2, length=21)
    labels = given.pop("labels")
    model = tiled(llama(), "head=8").train()
    with pytest.warns(UserWarning, match="LlamaForCausalLM is called without labels.*label smoothing") as said:
        for _ in range(2):
            model(**given).logits.sum().backward()
    assert len([each for each in said if "without labels" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiled(llama(), "head=8").eval()(**given)
        tiled(llama(), "head=8").train()(**given, labels=labels)
        tiled(llama(), "mlp=8").train()(**given)


def test_a_short_batch_before_a_long_one_under_checkpointing(tmp_path: Path) -> None:
    """Both forwards come before their backwards, in which the first is computed again as it was."""
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = gemini.GeminiDDP(model.train(), replace(make_config(llama(), "ram", tmp_path), tile_tokens=f"mlp={TOKENS}"))
    short, longer = (model(**batch(0, rows=1, length=length)).loss for length in (11, 40))
    (short + longer).backward()


def test_a_model_is_as_it_was_when_wrapping_fails_or_ends(tmp_path: Path) -> None:
    model: Any = gemini.GeminiDDP(WithMlp(), replace(make_config(WithMlp(), "ram", tmp_path), tile_tokens=TOKENS))
    assert "forward" in model.mlp.__dict__ and str(inspect.signature(model.mlp.forward)) == "(x: torch.Tensor) -> Any"
    unmanage(model, "this test")
    assert "forward" not in model.mlp.__dict__
    failing = Blocks()
    with pytest.raises(gemini.GeminiError, match="Leave tile_tokens out"):
        gemini.GeminiDDP(failing, replace(make_config(failing, "ram", tmp_path), tile_tokens=TOKENS))
    assert not isinstance(failing, gemini.GeminiDDP) and not is_managed(failing)
    gemini.GeminiDDP(failing, make_config(failing, "ram", tmp_path))


def test_auto_is_the_planners(tmp_path: Path) -> None:
    """On where the step does not fit without, with what explicit tiles of that size give; else as the model is."""

    def make() -> Any:
        torch.manual_seed(0)
        return models.llama(hidden_size=32, intermediate_size=128, vocab_size=2000, num_hidden_layers=3)

    def step(model: Any, seed: int) -> torch.Tensor:
        return model(**batch(seed, rows=2, length=600)).loss  # type: ignore[no-any-return]

    trace = gemini.trace(make(), batch(0, rows=2, length=600), tile_tokens="auto")
    _, of_head, tiled = trace.forms
    assert [form.tile_tokens for form in trace.forms] == [None, "head=256", 256]
    assert gemini.MemoryTrace.from_json(trace.to_json()) == trace and "in tiles of 256 tokens" in str(trace)
    assert "in tiles of 256 tokens of the head: " in str(trace) and of_head.flops == trace.flops < tiled.flops
    room = (of_head.peak_bytes + tiled.peak_bytes) // 2 + 2**20
    base = gemini.GeminiConfig(
        device="standin", memory=gemini.MemoryBudget(gpu=room, cpu="64MiB"), trace=trace, tile_tokens="auto"
    )
    tight = gemini.GeminiDDP(make(), base)
    assert tight.memory_report()["tile_tokens"] == 256 and "256 tokens at a time" in str(tight.memory_report())
    explicit = gemini.GeminiDDP(make(), replace(base, tile_tokens=256, trace=None, activations=tiled.peak_bytes))
    assert train(tight, adam(tight), range(2), step) == train(explicit, adam(explicit), range(2), step)
    planned = gemini.plan(trace, None, {gemini.Tier.GPU: room, gemini.Tier.CPU: 2**26})
    assert planned.trace == tiled
    wider = (trace.peak_bytes + of_head.peak_bytes) // 2 + 2**20
    assert gemini.plan(trace, None, {gemini.Tier.GPU: wider, gemini.Tier.CPU: 2**26}).trace == of_head
    by_plan = gemini.GeminiDDP(make(), replace(base, trace=None, placement=planned))
    assert by_plan.memory_report()["tile_tokens"] == 256
    roomy = gemini.GeminiDDP(make(), replace(base, memory=gemini.MemoryBudget(gpu="64MiB", cpu="64MiB")))
    assert roomy.memory_report()["tile_tokens"] is None and "at a time" not in str(roomy.memory_report())
    assert roomy(**batch(0)).logits is not None
    with pytest.raises(gemini.BudgetExceeded):
        gemini.GeminiDDP(make(), replace(base, tile_tokens=None))
    with pytest.raises(gemini.PlanMismatch, match="the trace has tile_tokens=None, and this run has 512"):
        gemini.GeminiDDP(make(), replace(base, tile_tokens=512))
    with pytest.warns(UserWarning, match=r'tile_tokens="auto" has no effect: the size of the activations is not known'):
        gemini.GeminiDDP(make(), replace(base, trace=None))
    with pytest.warns(UserWarning, match='tile_tokens="auto" has no effect: .* may mix the logits of different tokens'):
        model = make()
        model.loss_function = lambda logits, labels, **_: logits.float().mean()
        assert gemini.trace(model, batch(0, rows=2, length=600), tile_tokens="auto").tiled is None


def test_a_tiled_mlp_reads_its_weights_together() -> None:
    """All of them for all tiles; nothing in it gathers on its own, once for each tile."""
    reads = {reader.path: len(reader.params) for reader in Structure(tiled(llama())).readers}
    assert reads["model.layers.0.mlp"] == 3 and not any(path.startswith("model.layers.0.mlp.") for path in reads)


class _Products(TorchDispatchMode):
    """Counts the multiplications of matrices with ``columns`` as one of their three sizes."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.num_flops = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            m, k, n = (*args[-2].shape, args[-1].shape[1])
            self.num_flops += 2 * m * k * n * (self.columns in (m, k, n))
        return func(*args, **(kwargs or {}))


def _step_flops(model: Any, columns: int) -> int:
    long(model, 0).backward()  # in the first one an MLP is looked at too
    with _Products(columns) as products:
        long(model, 0).backward()
    return products.num_flops


@pytest.mark.parametrize("columns", [96, 112], ids=["head", "mlp"])
def test_tiles_multiply_no_more_than_the_model_they_are_of(columns: int) -> None:
    """The head three times, and MLPs of a checkpointed block as often as without tiles: the same products in parts."""

    def make() -> Any:
        model: Any = models.llama(hidden_size=32, intermediate_size=112, vocab_size=96, num_hidden_layers=2)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        return model

    whole = _step_flops(make(), columns)
    for tokens in ("head=8", "mlp=8", "head=16,mlp=8", 8):
        assert _step_flops(tiled(make(), tokens), columns) == whole, tokens
    assert columns != 96 or whole == 3 * 2 * 42 * 32 * 96


def test_a_trace_counts_what_is_run() -> None:
    def make() -> Any:
        # torch's counter knows no fused attention of a CPU
        return models.llama(vocab_size=96, num_hidden_layers=2, attn_implementation="eager").train()

    model = tiled(make())
    with FlopCounterMode(display=False) as counted:
        long(model, 0).backward()
    added = 2 * 35 * model.lm_head.weight.numel()  # nor products that add in place: all tiles' but the first's
    trace = gemini.trace(make(), batch(0, rows=2, length=21), precision="fp32", tile_tokens=8)
    assert trace.flops == counted.get_total_flops() + added


def _scaled(loss: torch.Tensor) -> torch.Tensor:
    return loss * 3


def _twice(loss: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True)
    return 2 * loss


def _frozen(model: Any) -> None:
    model.get_output_embeddings().requires_grad_(False)


def _head_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


def _watched(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda layer, args, logits: None)


def _changed(model: Any) -> None:
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda layer, args: (args[0] * 0.7,))
    head.register_forward_hook(lambda layer, args, logits: logits.mul_(0.5) + 0.1)


def _with_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size).double())


def _learned_scale(model: Any) -> None:
    model.scale = nn.Parameter(torch.tensor(1.5).double())
    loss = model.loss_function
    model.loss_function = lambda logits, *args, **kwargs: loss(logits * model.scale, *args, **kwargs)


@pytest.mark.parametrize("change", [None, _frozen, _head_alone, _watched, _changed, _with_bias, _learned_scale])
@pytest.mark.parametrize("use", [None, _scaled, _twice])
def test_gradients_of_the_head_however_it_is_used(
    change: Callable[[Any], None] | None,
    use: Callable[[torch.Tensor], torch.Tensor] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float64, as above: what does not go by the quick way has the same gradients too."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    found = []
    for tokens in (None, "head=8"):
        torch.manual_seed(0)
        model: Any = models.llama(vocab_size=96, num_hidden_layers=1).double().train()
        if change is not None:
            change(model)
        if tokens is not None:
            tile_tokens(model, tokens)
        loss = model(**masked_batch(True)).loss
        (use or (lambda loss: loss))(loss).backward()
        found.append([param.grad for param in model.parameters()])
    for wanted, got in zip(*found, strict=True):
        assert (wanted is None) == (got is None)
        assert wanted is None or (wanted - got).abs().max() <= 1e-13 * wanted.abs().max().clamp(min=1e-3)


def test_a_second_derivative_goes_through_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    found = []
    for tokens in (None, "head=8"):
        torch.manual_seed(0)
        model: Any = models.llama(vocab_size=96, num_hidden_layers=1, attn_implementation="eager").double().train()
        if tokens is not None:
            tile_tokens(model, tokens)
        params = list(model.parameters())
        first = torch.autograd.grad(long(model, 0), params, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), params))
    for wanted, got in zip(*found, strict=True):
        assert (wanted - got).abs().max() <= 1e-12 * wanted.abs().max().clamp(min=1e-3)


def test_a_loss_in_bf16_is_multiplied_by_more_than_a_bf16() -> None:
    """A third has no bf16: rounded first it would be off by 0.13 % for all elements alike."""
    grads = []
    for part in (1.0, 1 / 3):
        model: Any = tiled(llama().bfloat16(), "head=8")
        (long(model, 0) * part).backward()
        grads.append(model.lm_head.weight.grad.float())
    assert abs((grads[1].norm() / grads[0].norm()).item() * 3 - 1) < 2e-4


class _Zeros(TorchDispatchMode):
    """Adds up the elements of what operations fill with zeros: the gradient of a slice is made so."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.slice_backward, torch.ops.aten.new_zeros):
            self.numel += result.numel()
        return result


@pytest.mark.parametrize("numel", [64, 61, 3])
def test_backward_of_tiles_makes_no_gradient_of_all_rows_for_each(numel: int) -> None:
    rows = torch.randn(numel, 4, requires_grad=True)
    parts = split_rows(rows, TOKENS)
    assert {len(part) for part in parts} <= {numel // len(parts), -(-numel // len(parts))}
    with _Zeros() as zeros:
        torch.cat([2 * part for part in parts]).sum().backward()
    assert zeros.numel == 0
    assert rows.grad is not None and torch.equal(rows.grad, torch.full_like(rows, 2.0))
