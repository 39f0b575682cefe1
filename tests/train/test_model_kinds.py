"""Any model: ties, shared and repeated modules, frozen and unused params, odd outputs, adapters, recurrent layers.

Each kind of model trains a few steps in RAM, on disk and on the stand-in GPU, and gives the bits of the plain loop.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemini
from tests.scaling import backward, make_step
from tests.train.helpers import (
    DTYPES,
    MODELS,
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    batch,
    compare,
    llama,
    make_config,
    noise,
    on_batch,
    pair,
    same_bits,
    snapshot,
    squares,
    train,
    wrap,
)
from tests.world import world_of


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "bf16") for name in MODELS), ("tied", "fp16"), ("tied", "fp32")]
)
def test_models_train_as_in_the_plain_loop(name: str, precision: str, where: str, tmp_path: Path) -> None:
    model, _, _ = compare(MODELS[name], where, tmp_path, precision=precision)
    assert where == "ram" or world_of(model).num_evictions > 0


def test_module_called_twice(where: str, tmp_path: Path) -> None:
    compare(lambda: Blocks((0, 1, 0, 2, 0)), where, tmp_path, squares)


def test_frozen_params(where: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = llama()
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1" not in name and "embed" not in name and "norm" not in name)
        return model

    model, _, plain = compare(make, where, tmp_path)
    for name, param in make().named_parameters():
        if not param.requires_grad:
            assert world_of(model).by_names[name].num_steps == 0
            assert same_bits(model.full_param(name), param.bfloat16()), name


def test_params_without_gradient_are_skipped_as_none_is(where: str, tmp_path: Path) -> None:
    def loss_of(model: Any, seed: int) -> torch.Tensor:
        model.path = (0, 1, 2) if seed % 2 else (0, 2)
        return squares(model, seed)

    model, _, _ = compare(Blocks, where, tmp_path, loss_of, steps=5)
    counts = {h.name: h.num_steps for h in world_of(model).handles}
    assert counts["layers.0.weight"] == 5 and counts["layers.1.weight"] == 2


def test_a_gradient_in_only_one_micro_batch_counts(where: str, tmp_path: Path) -> None:
    model, optimizer, plain = pair(Blocks, where, tmp_path)
    for path in ((0, 2), (0, 1, 2), (0, 2)):
        model.path = plain.model.path = path
        squares(model, 0).backward()
        plain.backward(squares(plain.model, 0))
    optimizer.step()
    plain.step()
    assert_same_state(model, plain)


def test_buffers_keep_dtype_and_values(where: str, tmp_path: Path) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Blocks()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float32))
            self.register_buffer("scratch", torch.full((2,), 1 / 3), persistent=False)
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1 / 3
            self.count += 1
            return self.inner(x) * self.scratch[0]

    model, _, plain = compare(Buffered, where, tmp_path, squares)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.model.named_buffers(), strict=True):
        assert same_bits(ours, theirs), name
    assert {"seen", "count"} <= model.state_dict().keys() and "scratch" not in model.state_dict()
    rotary = wrap(llama(), where, tmp_path).model.rotary_emb
    assert same_bits(rotary.inv_freq, llama().model.rotary_emb.inv_freq)


def test_outputs_of_any_kind(where: str, tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class Out:
        hidden: torch.Tensor
        extra: Any = None

    kinds = {
        "tuple": (lambda h: (h, None), lambda out: out[0]),
        "nested": (lambda h: {"a": [h, 1], "b": {"c": "text"}}, lambda out: out["a"][0]),
        "dataclass": (lambda h: Out(h), lambda out: out.hidden),
    }
    for give, take in kinds.values():

        class Kind(Blocks):
            def forward(self, x: torch.Tensor, give: Any = give) -> Any:
                return give(super().forward(x))

        def loss_of(model: nn.Module, seed: int, take: Any = take) -> torch.Tensor:
            return take(model(noise(2, 5, 32, seed=seed))).float().square().mean()

        def half(model: nn.Module, take: Any = take) -> torch.Tensor:
            return take(model(noise(2, 5, 32, dtype=torch.float16))).float().square().mean()

        compare(Kind, where, tmp_path, loss_of)
        model, plain = wrap(Kind(), where, tmp_path, precision="fp16"), Plain(Kind(), "fp16", scale=2.0**16)
        scaler = gemini.GradScaler("cpu")
        scaler.scale(half(model)).backward()
        scaler.unscale_(adam(model))
        plain.backward(half(plain.model))
        assert model.clip_grad_norm_(1.0).item() == pytest.approx(plain.clip(1.0), rel=1e-6)


def test_sequential_root_and_model_with_params_of_its_own(where: str, tmp_path: Path) -> None:
    class Patches(nn.Module):
        """As a ViT: the root owns params and has children."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
            self.position = nn.Parameter(torch.randn(1, 6, 32))
            self.encoder = nn.ModuleDict({"0": Blocks(), "1": nn.LayerNorm(32)})
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position
            return self.encoder["1"](self.encoder["0"](x)) * self.scale

    compare(Patches, where, tmp_path, squares)

    def sequential() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 32), nn.Tanh()), Blocks())

    compare(sequential, where, tmp_path, squares)


def test_custom_function_that_saves_a_weight(where: str, tmp_path: Path) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)

    class Fused(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(x, self.weight) + self.bias

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Fused(32, 32) for _ in range(4)))

    compare(make, where, tmp_path, squares)


@pytest.mark.parametrize("kind", ["lstm", "gru", "weight norm", "lora", "batch norm"])
def test_layers_with_habits_of_their_own(kind: str, where: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from torch.nn.utils.parametrizations import weight_norm

    class Recurrent(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    kinds: dict[str, Any] = {
        "lstm": lambda: Recurrent(nn.LSTM(32, 32, 2, batch_first=True)),
        "gru": lambda: Recurrent(nn.GRU(32, 32, 2, batch_first=True, bidirectional=True)),
        "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(32, 32)), nn.Tanh(), weight_norm(nn.Linear(32, 8))),
        "lora": lambda: get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])),
        "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(5), nn.Linear(32, 8)),
    }

    def make() -> nn.Module:
        torch.manual_seed(0)
        return kinds[kind]()

    precision = "fp32" if kind == "batch norm" else "bf16"

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        return model(noise(2, 5, 32, seed=seed, dtype=DTYPES[precision])).float().square().mean()

    compare(make, where, tmp_path, on_batch if kind == "lora" else loss_of, precision=precision)


def test_autocast_and_forward_called_by_name(where: str, tmp_path: Path) -> None:
    def autocast(model: Any, seed: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return on_batch(model, seed)

    compare(llama, where, tmp_path, autocast, precision="fp32")
    compare(llama, where, tmp_path, lambda model, seed: model.forward(**batch(seed)).loss)


def test_user_hooks_that_read_weights_and_change_gradients(where: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Blocks()

        def look(module: nn.Module, *_: Any) -> None:
            assert module.weight.detach().float().norm().isfinite()

        for layer in model.layers:
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(look)
            layer.register_full_backward_hook(look)
            layer.weight.register_hook(lambda grad: grad * 2)
        return model

    compare(make, where, tmp_path, squares, slack=2**20)


@pytest.mark.parametrize("kind", ["max_norm", "clamp"])
def test_a_forward_that_writes_weights_is_refused_or_alike_everywhere(kind: str, where: str, tmp_path: Path) -> None:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        if kind == "clamp":
            return nn.Sequential(Clamped(32, 32), nn.Tanh(), Clamped(32, 32))
        return nn.Sequential(nn.Embedding(96, 32, max_norm=0.5), nn.Linear(32, 32))

    def run(place: str) -> Any:
        model = wrap(make(), place, tmp_path)
        data = noise(2, 5, 32) if kind == "clamp" else batch(0)["input_ids"]
        try:
            train(model, adam(model), range(3), lambda m, seed: m(data).float().square().mean())
        except gemini.GeminiError:
            return "refused"
        return snapshot(model)

    here, in_ram = run(where), run("ram")
    if isinstance(here, str) or isinstance(in_ram, str):
        assert here == in_ram == "refused"
    else:
        assert_same_snapshot(here, in_ram)


# ---- embeddings with max_norm ----------------------------------------------------------------------------------------

# They rewrite weights inside a forward: the bits of the plain loop, wherever weights are.


class Own(nn.Module):
    """A module of a program's own, with weights that are not all rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.max_norm = 1.0
        self.weight, self.other = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, max_norm=self.max_norm) @ self.other


class Net(nn.Module):
    """The embedding deep inside, where nothing else is hooked, and tied to the head."""

    def __init__(self, embed: Callable[[], nn.Module], *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(embed(), nn.Tanh())])
        self.head = nn.Linear(8, 24)
        self.again = again
        if tied:
            self.head.weight = self.layers[0][0].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        x = checkpoint(layer, ids, use_reentrant=False) if self.again else layer(ids)
        return self.head(x).float().square().mean()


def ids_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 24, (2, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return model(ids_of(seed))


RENORMALIZED: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0)),
    "1-norm, tied": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=2, norm_type=1.0), tied=True),
    "bag": lambda: Net(lambda: nn.EmbeddingBag(24, 8, max_norm=1.0)),
    "frozen": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0).requires_grad_(False)),
    "recomputed": lambda: Net(lambda: nn.Embedding(24, 8, max_norm=1.0), again=True),
    "own": lambda: Net(Own),
}


def note_rewritten(plain: Plain) -> None:
    """The plain loop's masters become what a forward has written into its weights."""
    for name, param in plain.model.named_parameters():
        state, now = plain.states[name], param.detach().reshape(-1)
        changed = now != state["weights"].to(now.dtype)
        state["weights"][changed] = now[changed].to(state["weights"].dtype)
        if state["residual"] is not None:
            state["residual"][changed] = 0


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", RENORMALIZED)
def test_the_same_bits_as_the_plain_loop(kind: str, precision: str, where: str, tmp_path: Path) -> None:
    model, plain = (
        wrap(RENORMALIZED[kind](), where, tmp_path, precision=precision),
        Plain(RENORMALIZED[kind](), precision),
    )
    if precision == "fp16":
        plain.scale = 2.0**16
    optimizer, num_rewritten = adam(model, lr=0.1), 0
    plain.lr = 0.1
    for seed in range(3):
        before = {name: param.detach().clone() for name, param in plain.model.named_parameters()}
        wanted = loss_of(plain.model, seed)
        num_rewritten += sum(not torch.equal(before[name], p) for name, p in plain.model.named_parameters())
        note_rewritten(plain)
        loss = loss_of(model, seed)
        assert loss.item() == wanted.item()
        backward(model, loss)
        plain.backward(wanted)
        note_rewritten(plain)  # of a recomputation
        make_step(model, optimizer)
        optimizer.zero_grad()
        plain.step()
        assert_same_state(model, plain)
    assert num_rewritten >= 1
    model.eval()
    with torch.no_grad():
        assert loss_of(model, 9).item() == loss_of(plain.model, 9).item()
    note_rewritten(plain)
    assert_same_state(model, plain)


def test_as_the_same_program_on_plain_params(where: str, tmp_path: Path) -> None:
    """fp32, with updates beside the training; and the embedding as the whole model."""
    for make in (RENORMALIZED["embedding"], lambda: nn.Embedding(24, 8, max_norm=1.0)):
        torch.manual_seed(1)
        plain = make()
        torch.manual_seed(1)
        model = gemini.GeminiDDP(make(), make_config(plain, where, tmp_path, precision="fp32"))
        losses = [
            train(each, adam(each, lr=0.1), range(4), lambda m, seed: loss_of(m, seed).square().mean(), clip=None)
            for each in (plain, model)
        ]
        assert losses[0] == losses[1]
        assert all(torch.equal(model.full_param(name), param) for name, param in plain.named_parameters())


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_checkpoint_that_is_being_written_is_of_its_moment(where: str, tmp_path: Path) -> None:
    model = wrap(RENORMALIZED["embedding"](), where, tmp_path, slack=2**16)
    optimizer = adam(model)
    names = [name for handle in world_of(model).handles for name in handle.names]
    before = {name: model.full_param(name, torch.float32) for name in names}
    pending = gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, wait=False)
    loss_of(model, 0)
    pending.wait()
    assert any(not torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert all(torch.equal(model.full_param(name, torch.float32), value) for name, value in before.items())


def test_a_lookup_that_fails_leaves_masters_that_are_the_weights(tmp_path: Path) -> None:
    model = wrap(RENORMALIZED["embedding"](), "ram", tmp_path)
    model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    name, plain = "layers.0.0.weight", RENORMALIZED["embedding"]().state_dict()["layers.0.0.weight"]
    weights, master = model.full_param(name).float(), model.full_param(name, torch.float32)
    rewritten = weights != plain.bfloat16().float()
    assert rewritten.any() and torch.equal(master, torch.where(rewritten, weights, plain))
    world_of(model).check()
