"""Tiny models of every family, their data, and two loops that must agree bit for bit over all that a recipe draws.

``plain_loop`` trains with ``tests.plain.Plain``, ``managed_loop`` is the loop users write.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

import gemini
from gemini.planning.layout import Layout
from gemini.planning.working import gathered_at_once
from gemini.train.setup.problem import structural_trace
from tests.plain import DTYPES, Plain
from tests.world import world_of

VOCAB = 64
Batch = dict[str, torch.Tensor]


def llama(**changes: Any) -> nn.Module:
    """Its largest params are more than one small tile (4096 elements), and end in the middle of a page."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 144, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def _frozen() -> nn.Module:
    """Frozen embeddings, a whole frozen layer between trained ones, and one frozen weight inside a trained layer."""
    model = llama(num_hidden_layers=3)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].self_attn.q_proj.requires_grad_(False)
    return model


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
        "loss_type": "ForCausalLM",
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**(config | changes)))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 32,
        "use_cache": False, "output_router_logits": True,
    }  # fmt: skip
    return MixtralForCausalLM(MixtralConfig(**(config | changes)))


def t5(**changes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 1,
        "num_heads": 4, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return T5ForConditionalGeneration(T5Config(**(config | changes)))


def _mixed() -> nn.Module:
    """A body in half precision, and a head in fp32, which casts what it is given."""
    model = llama().bfloat16()
    model.lm_head.float().register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "t5": t5,
    "tied": lambda: llama(tie_word_embeddings=True),
    "frozen": _frozen,
    "mixed": _mixed,
}


def fp32_in(family: str) -> list[str]:
    """What stays in fp32 beside the rest."""
    return ["lm_head.weight"] if family == "mixed" else []


def make_model(family: str) -> nn.Module:
    """The same fp32 weights every time."""
    torch.manual_seed(17)
    return FAMILIES[family]().train()


class Branches(nn.Module):
    """One chunk of two layers, of which a batch may use both or the first."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return torch.tanh(self.sometimes(x)) if both else x


@dataclass
class Output:
    loss: torch.Tensor


class SomeUnused(nn.Module):
    """Four blocks of which a batch chooses two, and how much of them; one is never taken. And a param of nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(Branches() for _ in range(4))
        self.head = nn.Linear(32, VOCAB)
        self.nothing = nn.Parameter(torch.empty(0, 32))
        self.paths = ((0, 1), (1, 2), (2, 0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x, kind = self.embed(input_ids), int(input_ids.sum())
        for index in self.paths[kind % 3]:
            x = self.layers[index](x, kind % 2 == 0)
        x = torch.cat((self.head(x), x @ self.nothing.t()), dim=-1)
        loss = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return Output(loss)


@cache
def make_batches(num_steps: int, num_micro: int) -> list[list[Batch]]:
    """Micro-batches of changing size and length, the same for all families."""
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    steps: list[list[Batch]] = []
    for _ in range(num_steps):
        sizes = [(rng.choice((1, 2)), rng.choice((7, 8, 12))) for _ in range(num_micro)]
        ids = [torch.randint(1, VOCAB, size, generator=generator) for size in sizes]
        steps.append([{"input_ids": i, "labels": i} for i in ids])
    return steps


@dataclass(frozen=True)
class Recipe:
    """Everything about a run that decides its bits. Where chunks live is not in here."""

    precision: str = "bf16"
    decoupled: bool = True
    grouped: bool = True
    """No weight decay on vectors, another learning rate for embeddings: groups that meet inside one chunk."""
    scheduled: bool = True
    num_steps: int = 20
    num_micro: int = 2
    max_norm: float = 1.0
    loss_scale: float = 2.0**16
    betas: tuple[float, float] = (0.9, 0.98)


@dataclass
class Run:
    """What came out: compared key by key, bit by bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    """Of clipping, in double: the norm in fp32 would hide the order in which its sums are added."""
    num_skipped: int = 0
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def param_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Groups in torch's form; frozen params are in them too, as in most people's programs."""
    params = list(model.parameters())
    if not recipe.grouped:
        return [{"params": params, "lr": 3e-3, "weight_decay": 0.1}]
    is_embedding = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    tables = [p for p in params if id(p) in is_embedding]
    vectors = [p for p in params if p.dim() == 1]
    rest = [p for p in params if p.dim() > 1 and id(p) not in is_embedding]
    return [
        {"params": rest, "lr": 3e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 3e-3, "weight_decay": 0.0},
        {"params": tables, "lr": 1e-2, "weight_decay": 0.01},
    ]


def make_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    if not recipe.scheduled:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_steps)


# ---- the plain loop --------------------------------------------------------------------------------------------------


def rounded(master: torch.Tensor, precision: str) -> torch.Tensor:
    """The weights that forward reads. In bf16 the upper half of the bits, rounded half away from zero."""
    if precision != "bf16":
        return master.to(DTYPES[precision])
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def on(device: torch.device | str, batch: Batch) -> Batch:
    """The batch on the device that computes."""
    return {name: value.to(device) for name, value in batch.items()}


@cache
def plain_loop(family: str, recipe: Recipe, device: str = "cpu") -> Run:
    """Train the plain loop on ``device``; what comes out is on the CPU."""
    model = make_model(family).to(device)
    scale = recipe.loss_scale if recipe.precision == "fp16" else None
    how: dict[str, Any] = {"betas": recipe.betas, "decoupled": recipe.decoupled, "fp32": fp32_in(family)}
    plain = Plain(model, recipe.precision, scale=scale, **how)
    # A stock optimizer holds groups and learning rates for the scheduler; it sees no gradient and updates nothing.
    groups = torch.optim.SGD(param_groups(model, recipe), lr=0.0)
    scheduler = make_scheduler(groups, recipe)
    names = {param: name for name, param in model.named_parameters()}
    run = Run()
    for micro_batches in make_batches(recipe.num_steps, recipe.num_micro):
        for batch in micro_batches:
            loss = model(**on(device, batch)).loss
            run.losses.append(float(loss.detach()))
            plain.backward(loss, 1 / recipe.num_micro)
        run.norms.append(float(torch.tensor(plain.clip(recipe.max_norm))))
        if math.isfinite(run.norms[-1]):
            run.coefficients.append(plain.coefficient)
        else:
            run.num_skipped += 1
        groups.step()
        for group in groups.param_groups:
            hyper = {name: group[name] for name in ("lr", "weight_decay")}
            plain.of |= {names[param]: hyper for param in group["params"]}
        plain.step()
        scheduler.step()
    for name, param in model.named_parameters():
        run.masters[name] = plain.master(name).view(param.shape).cpu()
        state = plain.states[name]
        if state["step"]:
            moments = {kind: state[kind].view(param.shape).cpu() for kind in ("exp_avg", "exp_avg_sq")}
            run.moments[name] = {"step": torch.tensor(float(state["step"])), **moments}
    return run


# ---- the managed loop ------------------------------------------------------------------------------------------------


def managed_loop(model: nn.Module, recipe: Recipe, *, each_step: Callable[[], None] = lambda: None) -> tuple[Run, int]:
    """The ordinary loop on a wrapped ``model``; also the number of evictions inside forwards and backwards."""
    optimizer = gemini.HybridAdam(param_groups(model, recipe), betas=recipe.betas, decoupled=recipe.decoupled)
    scheduler = make_scheduler(optimizer, recipe)
    world = world_of(model)
    scaler = gemini.GradScaler(init_scale=recipe.loss_scale, enabled=recipe.precision == "fp16")
    run, num_evictions = Run(), 0
    for micro_batches in make_batches(recipe.num_steps, recipe.num_micro):
        before = world.num_evictions  # an update also drops what it has overtaken: not counted
        for batch in micro_batches:
            loss = model(**on(world.device.torch_device, batch)).loss
            run.losses.append(float(loss.detach()))
            scaler.scale(loss / recipe.num_micro).backward()
        num_evictions += world.num_evictions - before
        scaler.unscale_(optimizer)
        run.norms.append(float(model.clip_grad_norm_(recipe.max_norm)))
        if math.isfinite(run.norms[-1]):
            world.state.clipping.fetch()
            run.coefficients.append(world.state.clipping.coefficient)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        each_step()
    run.masters = model.state_dict(dtype=torch.float32)
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    state = optimizer.state_dict()["state"]
    keys = ("step", "exp_avg", "exp_avg_sq")
    run.moments = {order[index]: {key: values[key] for key in keys} for index, values in state.items()}
    return run, num_evictions


def assert_same(run: Run, plain: Run) -> None:
    """Every loss, norm, master, state and step count, bit for bit."""
    assert_same_floats(run.losses, plain.losses, "loss")
    assert_same_floats(run.norms, plain.norms, "norm")
    assert_same_floats(run.coefficients, plain.coefficients, "clipping coefficient")
    for name, master in plain.masters.items():
        assert_same_bits(run.masters[name], master, f"master of {name}")
    assert run.moments.keys() == plain.moments.keys()
    for name, moments in plain.moments.items():
        for key, value in moments.items():
            assert_same_bits(run.moments[name][key], value, f"{key} of {name}")


def assert_same_floats(found: list[float], wanted: list[float], what: str) -> None:
    assert len(found) == len(wanted)
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a == b or (math.isnan(a) and math.isnan(b)), f"{what} {index} is {a!r}, the plain loop has {b!r}"


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (what, found.dtype, wanted.dtype)
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    a, b = (t.contiguous().view(-1).view(as_int) for t in (found, wanted))
    if not torch.equal(a, b):
        where = int((a != b).nonzero()[0])
        raise AssertionError(
            f"{what}: {int((a != b).sum())} of {a.numel()} elements differ, first at {where}: "
            f"{found.reshape(-1)[where].item()!r} instead of {wanted.reshape(-1)[where].item()!r}"
        )


@contextmanager
def tiles_of(monkeypatch: Any, numel: int | None) -> Iterator[None]:
    """Small tiles, so that tiny params take many. One norm block (4096) keeps the order of the norm's sums."""
    from gemini.planning import working

    with monkeypatch.context() as patch:
        if numel is not None:
            patch.setattr(working, "TILE", numel)
        yield


def working_set(model: nn.Module, layout: Layout, precision: str) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it."""
    return gathered_at_once(structural_trace(model, precision), layout, precision)
