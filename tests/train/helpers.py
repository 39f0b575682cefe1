"""What the tests of the train room share: tiny models, three placements, and comparisons with the plain loop.

A managed model must equal ``tests.plain.Plain`` bit for bit wherever its chunks live. The placements are as tight as a
budget can be, so that every step evicts and fetches.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may look for a hub

import torch
import transformers
from torch import nn

import gemini
from gemini.errors import parse_bytes
from gemini.planning.working import staging_bytes, staging_sets, tile_numel
from gemini.tiers import Tier
from gemini.train.setup.problem import structural_trace
from tests import models
from tests import standin_device as standin_device  # whose name is known from here on
from tests.models import working_set
from tests.plain import DTYPES as DTYPES
from tests.plain import Plain as Plain
from tests.scaling import backward, clip_grads, make_step
from tests.world import world_of

transformers.logging.set_verbosity_error()

PLACEMENTS = ("ram", "disk", "standin")
ALL_PLACEMENTS = (*PLACEMENTS, "serial", "small", "half")
VOCAB = 96
TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
POSITIONS = {"max_position_embeddings": 64, "use_cache": True}  # generation is tested too


# ---- models ----------------------------------------------------------------------------------------------------------


def llama(tied: bool = False, layers: int = 3, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": dropout}
    return models.llama(
        num_hidden_layers=layers, intermediate_size=64, tie_word_embeddings=tied, **heads, **POSITIONS, **TOKENS
    )


def gpt2(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return models.gpt2(n_layer=layers, n_positions=64, use_cache=True, **dropouts, **TOKENS)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return models.mixtral(**sizes, output_router_logits=False, **POSITIONS, **TOKENS)


def t5(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_decoder_layers": 2}
    return models.t5(dropout_rate=dropout, use_cache=True, eos_token_id=1, **sizes)


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


class Chain(Blocks):
    """Blocks that hand on nothing but what the next one is given: a model that can be cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(model: nn.Module, seed: int) -> torch.Tensor:
    return model(noise(2, 5, 32, seed=seed)).float().square().mean()


# ---- placements ------------------------------------------------------------------------------------------------------


def tight_bytes(model: nn.Module, precision: str, keep_fp32: Any = "auto") -> tuple[int, int]:
    """The working set of gathered weights, and host staging of all workers: what the budgets must leave."""
    layout = structural_trace(model, precision, keep_fp32).layout()
    largest = max(chunk.numel for chunk in layout.chunks)
    sets = staging_sets(Tier.CPU, precision, overlap=True)
    return working_set(model, layout, precision), sets * staging_bytes(tile_numel(largest))


def make_config(
    model: nn.Module,
    where: str,
    path: Path,
    *,
    precision: str = "bf16",
    gradients: str = "retain",
    slack: int = 0,
    keep_fp32: Any = "auto",
) -> gemini.GeminiConfig:
    """``ram``: all in place. ``disk``: all on NVMe, memory for one module. ``standin``: a GPU with room for one.

    ``serial``: as disk, in turn. ``small``: as disk, in chunks of 64 elements. ``half``: half of everything on NVMe.
    """
    gathered, staging = tight_bytes(model, precision, keep_fp32)
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
        precision=precision, gradients=gradients, memory=memory, device=device, placement=placement,
        keep_fp32=keep_fp32, **more,
    )  # fmt: skip


def wrap(model: nn.Module, where: str, path: Path, **how: Any) -> Any:
    return gemini.GeminiDDP(model, make_config(model, where, path, **how))


def trainable(model: nn.Module, where: str, path: Path, **how: Any) -> tuple[Any, gemini.HybridAdam]:
    """A managed model and its optimizer."""
    model = wrap(model, where, path, **how)
    return model, adam(model)


def manage(
    model: nn.Module, path: Path, device: Any = "cpu", *, gpu: Any = None, cpu: Any = "64MiB", nvme: Any = "64MiB",
    homes: dict[str, float] | None = None, **how: Any,
) -> Any:  # fmt: skip
    """Wrap with budgets of a test's own; ``homes`` are the fractions of a placement, else it is automatic."""
    memory = gemini.MemoryBudget(gpu=gpu, cpu=cpu, nvme=nvme, nvme_path=path if nvme is not None else None)
    if homes is not None:
        how["placement"] = gemini.StaticPlacement(**homes)
    return gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, device=device, **how))


def least(make: Callable[[int], Any], low: int) -> int:
    """The least budget with which ``make`` does not refuse."""
    for _ in range(60):
        try:
            make(low)
            return low
        except gemini.BudgetExceeded as refusal:
            named = re.search(r"budget to at least ([\d.]+ [KMG]iB)", str(refusal))
            low = max(low + 4096, parse_bytes(named[1], what="the error") if named else 0)
    raise AssertionError("no budget is enough")


# ---- what fails ------------------------------------------------------------------------------------------------------


@contextmanager
def failing(owner: Any, name: str, number: int, error: BaseException, *, once: bool = False) -> Iterator[list[int]]:
    """The ``number``-th call of a function (from 1) raises, and so does every later one, unless ``once``; the list
    grows with calls.
    """
    real, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == number or (calls[-1] > number and not once):
            raise error
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield calls


# ---- comparing and training ------------------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same_state(model: Any, plain: Plain) -> None:
    """Weights, masters, states and step counts of a managed model are those of the plain loop; nothing is pinned."""
    world = world_of(model)
    world.check()
    for name, param in plain.model.named_parameters():
        state, handle = plain.states[name], world.by_names[name]
        assert handle.num_steps == state["step"], name
        assert same_bits(model.full_param(name), param.detach()), name
        assert same_bits(model.full_param(name, torch.float32).view(-1), plain.master(name)), name
        for kind in ("exp_avg", "exp_avg_sq"):
            kept = snapshot(model, [name])[name].get(kind)
            if kept is not None:
                assert same_bits(kept.view(-1), state[kind]), (name, kind)


def snapshot(model: Any, names: Iterable[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Every persistent plane of every param, and its step count: what must not change when nothing should."""
    world = world_of(model)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for handle in [world.by_names[n] for n in names] if names is not None else world.handles:
        planes = {kind: kind for kind in handle.chunk.planes if kind != "grad"}
        found[handle.name] = {n: world.read_plane(handle, kind).clone() for n, kind in planes.items()}
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
    model: Any, optimizer: Any, steps: Iterable[int], loss_of: LossOf = on_batch, *, clip: float | None = 1.0,
    after: Callable[[int], Any] = lambda seed: None,
) -> list[float]:  # fmt: skip
    """The ordinary loop, with something ``after`` every step: the losses."""
    losses = []
    for seed in steps:
        loss = loss_of(model, seed)
        backward(model, loss)
        if clip is not None:
            clip_grads(model, optimizer, clip)
        make_step(model, optimizer)
        optimizer.zero_grad()
        after(seed)
        losses.append(loss.item())
    return losses


def step_on(loss: torch.Tensor, optimizer: Any) -> None:
    """The end of an ordinary loop's step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


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


def assert_trains_alike(model: Any, optimizer: Any, plain: Plain, steps: Iterable[int], *how: Any, **more: Any) -> None:
    """The same losses in these steps, and the same state after them."""
    steps = list(steps)
    assert train(model, optimizer, steps, *how, **more) == train_plain(plain, steps, *how, **more)
    assert_same_state(model, plain)


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
