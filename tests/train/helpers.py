"""What the tests of the train room share: tiny models, three placements, and the plain loop that defines the bits.

``Plain`` is the ordinary training loop on an unmanaged model, written with the torch reference of the kernels: masters
in fp32 (split in two halves for bf16), gradients summed in fp32, the norm over fp64 sums, AdamW. A managed model must
equal it bit for bit wherever its chunks live. The placements are as tight as a budget can be, so that every step
evicts and fetches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may look for a hub

import torch
import transformers
from torch import nn

import gemini
from gemini import kernels_reference as reference
from gemini.kernels import AdamHyper
from gemini.planning.layout import ParamSpec, make_layout
from gemini.planning.working import staging_bytes, staging_sets, tile_numel
from gemini.tiers import Tier
from gemini.train.setup.problem import collect_params
from gemini.train.setup.structure import working_set

transformers.logging.set_verbosity_error()

PLACEMENTS = ("ram", "disk", "standin")
ALL_PLACEMENTS = (*PLACEMENTS, "serial", "small", "half")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCAB = 96


# ---- models ----------------------------------------------------------------------------------------------------------


def llama(tied: bool = False, layers: int = 3, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, attention_dropout=dropout,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=layers, n_head=2, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "tied": lambda: llama(tied=True), "gpt2": gpt2, "mixtral": mixtral, "t5": t5,
}  # fmt: skip


def batch(seed: int = 0, rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Token ids with themselves as labels: for every model above."""
    ids = torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Blocks(nn.Module):
    """A stack of linear layers; ``path`` says which are called, in which order (shared, skipped, repeated)."""

    def __init__(self, path: tuple[int, ...] = (0, 1, 2)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.path:
            x = torch.tanh(self.layers[i](x))
        return x


def squares(model: nn.Module, seed: int) -> torch.Tensor:
    return model(noise(2, 5, 32, seed=seed)).float().square().mean()


# ---- placements ------------------------------------------------------------------------------------------------------


def tight_bytes(model: nn.Module, precision: str) -> tuple[int, int]:
    """The working set of gathered weights, and host staging of all workers: what the budgets must leave."""
    named = collect_params(model)
    layout = make_layout([ParamSpec(n.names[0], n.param.numel(), n.param.requires_grad) for n in named])
    largest = max(chunk.numel for chunk in layout.chunks)
    sets = staging_sets(Tier.CPU, precision, overlap=True)
    return working_set(model, layout, precision), sets * staging_bytes(tile_numel(largest))


def make_config(
    model: nn.Module, where: str, path: Path, *, precision: str = "bf16", gradients: str = "retain", slack: int = 0
) -> gemini.GeminiConfig:
    """``ram``: all in place. ``disk``: all on NVMe, memory for one module. ``standin``: a GPU with room for one.

    ``serial``: as disk, in turn. ``small``: as disk, in chunks of 64 elements. ``half``: half of everything on NVMe.
    """
    gathered, staging = tight_bytes(model, precision)
    gathered += slack
    kind = {"serial": "disk", "small": "disk"}.get(where, where)
    more: dict[str, Any] = {"serial": {"overlap": False}, "small": {"max_chunk": 64}}.get(where, {})
    if where == "ram":
        memory, device = gemini.MemoryBudget(cpu="1GiB"), "cpu"
        placement: Any = "auto"
    elif where == "half":
        memory, device = gemini.MemoryBudget(cpu="1GiB", nvme="64MiB", nvme_path=path), "cpu"
        placement = gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=0.5)
    elif kind == "disk":
        memory, device = gemini.MemoryBudget(cpu=gathered + staging, nvme="64MiB", nvme_path=path), "cpu"
        placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    else:
        memory = gemini.MemoryBudget(gpu=gathered, cpu="64MiB", nvme="64MiB", nvme_path=path)
        device, placement = "standin", gemini.StaticPlacement(weights_on_nvme=0.3, optimizer_on_nvme=0.5)
    return gemini.GeminiConfig(
        precision=precision, gradients=gradients, memory=memory, device=device, placement=placement, **more
    )


def wrap(model: nn.Module, where: str, path: Path, **how: Any) -> Any:
    return gemini.GeminiDDP(model, make_config(model, where, path, **how))


def engine_of(model: Any) -> Any:
    return model._gemini_engine


# ---- the plain loop --------------------------------------------------------------------------------------------------


class Plain:
    """The loop that defines the bits. ``hyper`` by param name may override lr and weight decay."""

    def __init__(
        self, model: nn.Module, precision: str = "bf16", *, lr: float = 1e-2, weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decoupled: bool = True,
        scale: float | None = None,
    ):  # fmt: skip
        self.model, self.precision, self.scale = model, precision, scale
        self.hyper: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "decoupled": decoupled}
        self.lr, self.weight_decay = lr, weight_decay
        self.of: dict[str, dict[str, Any]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.coefficient = 1.0
        for name, param in model.named_parameters():
            given = param.detach() if param.requires_grad else param.detach().to(DTYPES[precision])
            master = given.float().contiguous().view(-1).clone()  # of frozen params only the weights are kept
            state: dict[str, Any] = {"step": 0, "weights": master, "residual": None}
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            if precision == "bf16":
                state["weights"], state["residual"] = master.bfloat16(), torch.zeros_like(master, dtype=torch.int16)
                reference.split_master(master, state["weights"], state["residual"])
            self.states[name] = state
            self._show(name, param)

    def _show(self, name: str, param: nn.Parameter) -> None:
        param.data = self.states[name]["weights"].to(DTYPES[self.precision], copy=True).view(param.shape)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        scale = None if self.scale is None else torch.tensor(self.scale, dtype=loss.dtype, device=loss.device)
        loss.backward(scale, **kwargs)
        self.collect()

    def collect(self) -> None:
        """Take what autograd left in ``.grad`` (for backwards that were started elsewhere)."""
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                grad = param.grad.float().contiguous().view(-1)
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad
                param.grad = None

    def clip(self, max_norm: float) -> float:
        sums = [reference.total(reference.sum_squares(self.grads[n])) for n in self.states if n in self.grads]
        norm = math.sqrt(reference.total(sums)) * (1.0 if self.scale is None else 1.0 / self.scale)
        self.coefficient = min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self) -> None:
        if self.scale is not None and not all(grad.isfinite().all() for grad in self.grads.values()):
            self.grads, self.coefficient, self.scale = {}, 1.0, self.scale / 2  # fp16: the step is skipped
            return
        scale = self.coefficient * (1.0 if self.scale is None else 1.0 / self.scale)
        for name, param in self.model.named_parameters():
            if name not in self.grads:
                continue
            state, own = self.states[name], self.of.get(name, {})
            state["step"] += 1
            hyper = AdamHyper(
                lr=own.get("lr", self.lr), weight_decay=own.get("weight_decay", self.weight_decay), step=state["step"],
                grad_scale=scale, **self.hyper,
            )  # fmt: skip
            parts = (state["weights"], state["residual"], state["exp_avg"], state["exp_avg_sq"])
            reference.adam_update(*parts, self.grads[name], hyper)
            self._show(name, param)
        self.grads, self.coefficient = {}, 1.0

    def master(self, name: str) -> torch.Tensor:
        state = self.states[name]
        if state["residual"] is None:
            return state["weights"]
        out = torch.empty_like(state["exp_avg"])
        reference.join_master(state["weights"], state["residual"], out)
        return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same_state(model: Any, plain: Plain) -> None:
    """Weights, masters, states and step counts of a managed model are those of the plain loop; nothing is pinned."""
    engine = engine_of(model)
    engine.check_invariants()
    for name, param in plain.model.named_parameters():
        state, handle = plain.states[name], engine.by_names[name]
        assert handle.num_steps == state["step"], name
        assert same_bits(model.full_param(name), param.detach()), name
        assert same_bits(model.full_param(name, torch.float32).view(-1), plain.master(name)), name
        for kind in ("exp_avg", "exp_avg_sq"):
            kept = snapshot(model, [name])[name].get(kind)
            if kept is not None:
                assert same_bits(kept.view(-1), state[kind]), (name, kind)


def snapshot(model: Any, names: Iterable[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Every persistent plane of every param, and its step count: what must not change when nothing should."""
    engine = engine_of(model)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for handle in [engine.by_names[n] for n in names] if names is not None else engine.params.handles:
        planes = {kind: kind for kind in handle.chunk.planes if kind != "grad"}
        found[handle.name] = {n: engine.by_names.read_plane(handle, kind).clone() for n, kind in planes.items()}
        found[handle.name]["step"] = torch.tensor(handle.num_steps)
    return found


def assert_same_snapshot(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> None:
    assert a.keys() == b.keys()
    for name, planes in a.items():
        assert planes.keys() == b[name].keys(), name
        for kind, value in planes.items():
            assert same_bits(value, b[name][kind]), (name, kind)


LossOf = Callable[[Any, int], torch.Tensor]


def on_batch(model: Any, seed: int) -> torch.Tensor:
    return model(**batch(seed)).loss


def train(
    model: Any, optimizer: Any, steps: Iterable[int], loss_of: LossOf = on_batch, *, clip: float | None = 1.0
) -> list[float]:
    """The ordinary loop: the losses."""
    losses = []
    for seed in steps:
        loss = loss_of(model, seed)
        loss.backward()
        if clip is not None:
            model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(
    plain: Plain, steps: Iterable[int], loss_of: LossOf = on_batch, *, clip: float | None = 1.0
) -> list[float]:
    losses = []
    for seed in steps:
        loss = loss_of(plain.model, seed)
        plain.backward(loss)
        if clip is not None:
            plain.clip(clip)
        plain.step()
        losses.append(loss.item())
    return losses


def adam(model: Any, **how: Any) -> gemini.HybridAdam:
    return gemini.HybridAdam(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **how})


def compare(
    make: Callable[[], nn.Module], where: str, path: Path, loss_of: LossOf = on_batch, *, steps: int = 3,
    clip: float | None = 1.0, precision: str = "bf16", slack: int = 0,
) -> tuple[Any, Any, Plain]:  # fmt: skip
    """Train managed and plain, and demand the same bits: (model, its optimizer, plain loop) to go on with."""
    plain = Plain(make(), precision, scale=2.0**16 if precision == "fp16" else None)
    model = wrap(make(), where, path, precision=precision, slack=slack)
    optimizer = adam(model)
    losses = train(model, optimizer, range(steps), loss_of, clip=clip)
    assert losses == train_plain(plain, range(steps), loss_of, clip=clip)
    assert_same_state(model, plain)
    return model, optimizer, plain


def pair(make: Callable[[], nn.Module], where: str, path: Path, **how: Any) -> tuple[Any, Any, Plain]:
    """A managed model, its optimizer, and the plain loop of the same model."""
    model = wrap(make(), where, path, **how)
    return model, adam(model), Plain(make(), how.get("precision", "bf16"))
