"""Parts that stay in fp32 beside bf16 or fp16: the bits of the plain program of the same dtypes, wherever chunks live.

The plain program is the model with its params in those dtypes, and nothing else: where torch takes bf16 beside fp32 by
itself (batch norms) it is left to, and where a program casts (a head that is given ``x.float()``) it does so.
"""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

import gemini
from gemini.train.modules.mixed import cast_floats, kept_in_fp32
from tests.integrations.mixed_cases import Declares, resnet
from tests.plain import DTYPES, Plain
from tests.train import helpers
from tests.train.helpers import (
    PLACEMENTS,
    adam,
    assert_same_state,
    noise,
    same_bits,
    squares,
    train,
    train_plain,
    trainable,
    wrap,
)
from tests.world import world_of

HALF = ("bf16", "fp16")


class Normed(nn.Module):
    """Convolutions and batch norms, as a ResNet has them; and an instance norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)
        )
        self.last = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.last(x).mean((2, 3)))


class Reward(nn.Module):
    """A body in half precision, and a norm and a head in fp32, which are given fp32."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16)).to(dtype)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x.flatten(1)[:, :12].to(self.body[0].weight.dtype))
        return self.head(self.norm(hidden.float()))


class Timed(nn.Module):
    """It adds fp32 values that it makes, as programs for autocast do: positions in a buffer, a time, noise.

    Args:
        casts: whether it says itself where autocast would cast.
    """

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.casts = casts
        self.enter, self.time, self.conv = nn.Linear(6, 16), nn.Linear(8, 16), nn.Conv1d(16, 16, 3, padding=1)
        self.register_buffer("positions", torch.randn(18, 16))
        self.norm, self.rnn = nn.LayerNorm(16), nn.GRU(16, 16, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.head.weight.dtype) if self.casts else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(self.cast(torch.arange(8.0).sin().expand(len(x), 8)))
        x = self.enter(x.flatten(2).reshape(len(x), 18, 6)) + self.positions
        x = self.norm(self.cast(x)) + torch.linspace(0, 1, 16)
        x = self.conv(self.cast(x.mT)).mT + time[:, None].float()
        x = self.rnn(self.cast(x))[0] + self.positions
        seen = self.attention(self.cast(x), self.cast(x), value=self.cast(x))[0]
        return self.head(self.cast(seen + self.positions))


def images(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int) -> torch.Tensor:
    """Managed models are given fp32, and plain ones what FSDP2's policy would give them."""
    x, param = images(seed), next(p for name, p in model.named_parameters() if "norm" not in name and p.dim() > 1)
    plain = x if isinstance(model, gemini.GeminiDDP) else x.to(getattr(model, "takes", param.dtype))
    return model(plain).float().square().mean()


def fp32_of(model: nn.Module, *words: str) -> list[str]:
    return [name for name, _ in model.named_parameters() if any(word in name for word in words)]


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("precision", HALF)
def test_fp32_values_that_a_program_makes_are_cast_as_by_autocast(precision: str, where: str, tmp_path: Path) -> None:
    """Norms, heads and parametrizations that stay in fp32 are parts of drawn programs: ``test_programs.py``."""
    plain = Plain(Timed(casts=True), precision, scale=2.0**16 if precision == "fp16" else None)
    plain.model.takes = DTYPES[precision]
    model, optimizer = trainable(Timed(), where, tmp_path, precision=precision)
    assert train(model, optimizer, range(3), loss_of, clip=0.1) == train_plain(plain, range(3), loss_of, clip=0.1)
    assert_same_state(model, plain)


def config(**how: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(
        **{"precision": "bf16", "memory": gemini.MemoryBudget(cpu="64MiB"), "device": "cpu", **how}
    )


def fp32_in(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.dtype is torch.float32}


# ---- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("kind", ["declares", "t5"])
def test_what_a_class_declares_stays_as_transformers_loads_it(kind: str, precision: str, tmp_path: Path) -> None:
    made = Declares(transformers.PretrainedConfig()) if kind == "declares" else helpers.t5()
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path, dtype=DTYPES[precision])
    assert fp32_in(loaded) == fp32_in(gemini.GeminiDDP(made, config(precision=precision)))
    assert bool(fp32_in(loaded)) == (kind == "declares" or precision == "fp16")
    streamed = gemini.from_pretrained(tmp_path, config(precision=precision), model_class=type(made))
    assert fp32_in(streamed) == fp32_in(loaded)
    for name, value in streamed.state_dict().items():
        assert same_bits(value, loaded.state_dict()[name]), name


def test_names_and_classes_are_kept_beside_what_stays_anyway() -> None:
    model = Normed()
    names = {name for name, param in model.named_parameters() if id(param) in kept_in_fp32(model, "bf16")}
    assert names == set(fp32_of(model, "norm.", "blocks.0.1.", "blocks.1.1.", "last"))
    for wanted, more in {"head": "head", "blocks.*.0": ".0.weight", nn.Linear: "head", "stem.weight": "stem"}.items():
        kept = kept_in_fp32(model, "bf16", (wanted,))
        assert {name for name, p in model.named_parameters() if id(p) in kept} == names | set(fp32_of(model, more))
    assert not kept_in_fp32(model, "fp32", ("head",)) and not kept_in_fp32(model, "bf16", None)


def test_adapters_in_fp32_are_cast_as_their_masters_are_exact_anyway() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(helpers.llama().bfloat16(), peft.LoraConfig(target_modules=["q_proj"]))
    assert all(param.dtype is torch.float32 for param in model.parameters() if param.requires_grad)
    assert not kept_in_fp32(model, "bf16")


@pytest.mark.parametrize("wanted", [["haed"], [nn.LSTM]])
def test_a_name_that_means_nothing_is_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match="Reward has no params there.*for example (body|LayerNorm)"):
        gemini.GeminiDDP(Reward(), config(keep_fp32=wanted))


@pytest.mark.parametrize("wanted", ["head", nn.Linear, [3], [""], 1])
def test_what_is_no_list_of_names_is_refused(wanted: Any) -> None:
    with pytest.raises(TypeError, match="keep_fp32= is"):
        config(keep_fp32=wanted)


def test_casting_down_is_said() -> None:
    assert not fp32_in(gemini.GeminiDDP(Reward(), config(keep_fp32=None)))
    with pytest.warns(UserWarning, match="weights are fp16, and no precision was given"):
        gemini.GeminiDDP(nn.Linear(4, 4).half(), config(precision=None))


def test_the_report_says_how_many_and_why() -> None:
    model = gemini.GeminiDDP(Normed(), config(keep_fp32=["head"]))
    assert model.memory_report()["fp32"] == {"by keep_fp32=": 2, "with running statistics": 8}
    assert "params that stay in fp32: 2 by keep_fp32=, 8 with running statistics" in str(model.memory_report())


# ---- what is named computes in fp32 ----------------------------------------------------------------------------------


def test_a_named_head_gives_fp32_and_a_named_norm_what_it_was_given() -> None:
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def watch(name: str) -> Any:
        return lambda m, args, out: seen.__setitem__(name, (args[0].dtype, out.dtype))

    model = helpers.llama(tied=True)
    model = gemini.GeminiDDP(model, config(keep_fp32=["lm_head", "norm"]))
    for name in ("lm_head", "model.norm", "model.embed_tokens", "model.layers.0"):
        model.get_submodule(name).register_forward_hook(watch(name))
    optimizer = adam(model)
    assert model(**helpers.batch()).logits.dtype is torch.float32
    half, full = torch.bfloat16, torch.float32
    assert seen["lm_head"] == (full, full) and seen["model.norm"] == (full, half)
    assert seen["model.embed_tokens"][1] is half and seen["model.layers.0"] == (half, half)
    assert all(torch.isfinite(torch.tensor(train(model, optimizer, range(3)))))
    world_of(model).check()


@pytest.mark.parametrize("wanted", ["blocks.0.0", "stem", "last", nn.Conv2d])
def test_a_part_in_the_middle_may_be_named(wanted: Any) -> None:
    model = gemini.GeminiDDP(Normed(), config(keep_fp32=[wanted]))
    assert model(images(0)).dtype is torch.bfloat16
    losses = train(model, adam(model), range(3), loss_of)
    plain = gemini.GeminiDDP(Normed(), config())
    torch.testing.assert_close(losses, train(plain, adam(plain), range(3), loss_of), rtol=0.05, atol=0)


class Frozen(nn.Module):
    """A norm as detection models have it: its statistics and weights are buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.norm = nn.Module()
        for name in ("running_mean", "running_var", "weight"):
            self.norm.register_buffer(name, torch.rand(8) + 0.5)
        self.norm.forward = lambda x: (x - self.norm.running_mean[:, None, None]) * self.norm.weight[:, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(x)).mean((2, 3)))


def test_norms_that_others_write_hand_on_what_they_were_given() -> None:
    model = gemini.GeminiDDP(Frozen(), config())
    assert model(images(0)).dtype is torch.bfloat16


class InAutocast(nn.Module):
    """In a part of it autocast casts what is given to layers, to a dtype that is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.conv, self.rnn = nn.Linear(6, 16), nn.Conv1d(18, 18, 1), nn.LSTM(16, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 2), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.flatten(2).reshape(len(x), 18, 6))
        with torch.autocast("cpu", torch.float16 if x.dtype is torch.bfloat16 else torch.bfloat16):
            for layer in (self.conv, lambda x: self.rnn(x)[0], lambda x: self.attention(x, x, x)[0], self.head):
                x = layer(x.float() * 1.001)
        return x


@pytest.mark.parametrize("precision", HALF)
def test_what_autocast_casts_is_cast_once(precision: str) -> None:
    plain = InAutocast().to(DTYPES[precision])
    model = gemini.GeminiDDP(InAutocast(), config(precision=precision))
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # oneDNN has no fp16 LSTM for every CPU
        assert same_bits(model(images(0)), plain(images(0).to(DTYPES[precision])))


class ReadAgain(nn.Module):
    """A bias is added to what autocast computes, in fp32, and read again outside of it: two gradients, each rounded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16 if x.dtype is torch.float16 else torch.float16):
            y = torch.tanh(x @ self.weight + self.bias)
        return y + 0.1 * self.bias.float().norm()


@pytest.mark.parametrize("precision", HALF)
def test_gradients_of_a_weight_inside_and_outside_of_autocast(precision: str) -> None:
    plain = ReadAgain().to(DTYPES[precision])
    model = gemini.GeminiDDP(ReadAgain(), config(precision=precision))
    scaler = gemini.GradScaler("cpu", init_scale=16.0, enabled=precision == "fp16")
    for own in (plain, model):
        scaler.scale(own(noise(4, 16, dtype=DTYPES[precision])).float().square().mean()).backward()
    scale = 16.0 if precision == "fp16" else 1.0
    for name, param in plain.named_parameters():
        assert same_bits(model.full_grad(name).float() * scale, param.grad.float()), name


# ---- inputs ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


@dataclass
class Held:
    x: torch.Tensor


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.given: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given = (args, kwargs)
        return self.fc(kwargs["x"])


@pytest.mark.parametrize("precision", DTYPES)
def test_inputs_are_cast_at_the_root(precision: str) -> None:
    model = gemini.GeminiDDP(Takes(), config(precision=precision))
    x, ids, dtype = torch.randn(2, 4, requires_grad=True), torch.arange(3), DTYPES[precision]
    nested = {"pair": Pair(x, ids), "held": Held(x), "list": [x.double(), "text"], "labels": x}
    out = model(x, ids, nested, transformers.BatchEncoding({"values": x}), x=x, labels=x)
    (gemini.GradScaler().scale(out.sum()) if precision == "fp16" else out.sum()).backward()
    args, kwargs = model.given
    own = (args[0], args[2]["pair"].x, args[2]["held"].x, args[3]["values"], kwargs["x"])
    assert {value.dtype for value in own} == {dtype}
    assert args[2]["list"][0].dtype is (torch.float64 if precision == "fp32" else dtype)
    assert args[1] is ids and args[2]["pair"].ids is ids and isinstance(args[2]["pair"], Pair)
    assert kwargs["labels"] is x and args[2]["labels"] is x, "what outputs are compared with stays exact"
    assert nested["pair"].x is x and nested["list"][1] == "text", "the batch of the caller is as it was"
    assert x.grad is not None and x.grad.dtype is torch.float32


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).float() if self.training else self.encoder(x))


def test_and_where_a_part_is_called_by_itself() -> None:
    model = gemini.GeminiDDP(Parts(), config())
    assert model.encoder(torch.randn(2, 4)).dtype is torch.bfloat16
    assert model.eval()(torch.randn(2, 4)).dtype is torch.bfloat16
    assert model.train()(torch.randn(2, 4)).dtype is torch.bfloat16
    named = gemini.GeminiDDP(Parts(), config(keep_fp32=["head"]))
    assert named.head(torch.randn(2, 4)).dtype is named.head(torch.randn(2, 4).bfloat16()).dtype is torch.float32


def test_in_fp32_nothing_is_cast() -> None:
    model = gemini.GeminiDDP(Timed(), config(precision="fp32"))
    with pytest.raises(RuntimeError, match="dtype"):
        model(images(0).double())


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_checkpoint_loads_exactly_whatever_stays_in_fp32(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(Reward(), where, tmp_path)
    train(model, optimizer, range(2), loss_of)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    for keep in ("auto", ("body.0",), None):
        other = gemini.GeminiDDP(Reward(torch.float32), config(keep_fp32=keep))
        moments = adam(other)
        gemini.load_checkpoint(tmp_path / "saved", other, moments)
        for name, master in model.state_dict(dtype=torch.float32).items():
            assert same_bits(other.full_param(name, torch.float32), master), (keep, name)
            for kind in ("exp_avg", "exp_avg_sq"):
                assert same_bits(moments.full_state(name)[kind], optimizer.full_state(name)[kind]), (keep, name)


def test_a_frozen_param_in_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    def frozen(**how: Any) -> tuple[Any, Any]:
        model = Reward()
        model.norm.requires_grad_(False)
        model = gemini.GeminiDDP(model, config(**how))
        return model, adam(model)

    gemini.save_checkpoint(tmp_path / "saved", *frozen())
    gemini.load_checkpoint(tmp_path / "saved", *frozen())
    other = frozen(keep_fp32=None)
    with pytest.raises(gemini.PlanMismatch, match=r"'norm.weight' was saved in fp32 .* and is in bf16 here"):
        gemini.load_checkpoint(tmp_path / "saved", *other)


def test_saved_models_and_the_way_back_keep_the_dtypes(tmp_path: Path) -> None:
    model = gemini.GeminiDDP(resnet(), config())
    kept = fp32_in(model)
    assert kept and all("normalization" in name for name in kept)
    values = model.state_dict()
    assert fp32_in(model) == {n for n, v in values.items() if v.dtype is torch.float32 and "running" not in n}
    model.save_pretrained(tmp_path)
    loaded = type(resnet()).from_pretrained(tmp_path)
    for (
        name,
        value,
    ) in loaded.state_dict().items():  # transformers reads all of it in one dtype: nothing was lost before
        assert same_bits(value, values[name].to(value.dtype)), name
    assert fp32_in(gemini.release(model)) == kept
    assert fp32_in(gemini.GeminiDDP(model, config())) == kept


# ---- traces and plans ------------------------------------------------------------------------------------------------


CASES: dict[str, Callable[[], nn.Module]] = {"norms": Normed, "head": Reward, "values": Timed}


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("case", CASES)
def test_a_plan_from_a_trace_ahead_of_time_is_the_run_s(case: str, precision: str) -> None:
    make, budget = CASES[case], gemini.MemoryBudget(cpu="64MiB")
    how: dict[str, Any] = {"precision": precision, "loss": lambda out: out.float().square().mean()}
    trace = gemini.trace(make(), {"x": images(0)}, target="cpu", **how)
    plan = gemini.Plan.from_json(gemini.plan(trace, None, budget).to_json())
    model = gemini.GeminiDDP(make(), config(precision=precision, placement=plan))
    assert {param.name for param in plan.trace.params if param.fp32} == fp32_in(model)
    world_of(model).check()
    with gemini.MemoryTracer(model) as tracer:
        loss = loss_of(model, 0)
        (loss if precision == "bf16" else gemini.GradScaler().scale(loss)).backward()
    assert tracer.trace.fingerprint == trace.fingerprint
    gemini.GeminiDDP(make(), config(precision=precision, trace=tracer.trace))


def test_a_plan_of_other_fp32_parts_is_refused_by_name() -> None:
    loss = {"loss": lambda out: out.float().square().mean()}
    trace = gemini.trace(Reward(), {"x": images(0)}, target="cpu", keep_fp32=["body"], **loss)
    plan = gemini.plan(trace, None, gemini.MemoryBudget(cpu="64MiB"))
    with pytest.raises(gemini.PlanMismatch, match=r"'body.0.weight' is \[16, 12\] kept in fp32 there"):
        gemini.GeminiDDP(Reward(), config(placement=plan))
    gemini.GeminiDDP(Reward(), config(keep_fp32=["body"], placement=plan))
    gemini.GeminiDDP(Reward(), config(trace=trace))  # of a trace only the step counts


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_compact_states_are_exact_where_params_stay_in_fp32() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(108, 640), nn.Linear(640, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x.flatten(1))))

    model = gemini.GeminiDDP(Wide(), config(states="compact", keep_fp32=["head"], gradients="accumulate_bf16"))
    train(model, adam(model), range(2), loss_of)
    planes = {h.name: h.chunk.planes for h in world_of(model).handles}
    assert planes["body.weight"]["residual"].dtype is torch.int8
    assert {kind: plane.dtype for kind, plane in planes["head.weight"].items()} == dict.fromkeys(
        ("weights", "exp_avg", "exp_avg_sq", "grad"), torch.float32
    )
    world_of(model).check()


@pytest.mark.parametrize("precision", HALF)
def test_the_compute_dtype_is_given_to_buffers_as_torch_gives_it(precision: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        masked, normed = prune.identity(nn.Linear(8, 8), "weight"), parametrizations.spectral_norm(nn.Linear(8, 8))
        model = nn.Sequential(masked, nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8), normed)
        model.gate = nn.Parameter(torch.ones(8))  # in fp32, as is no module below it
        return model

    model = make()
    plain = {name: buffer.dtype for name, buffer in make().to(DTYPES[precision]).named_buffers()}
    before = {name: buffer.dtype for name, buffer in model.named_buffers()}
    wrap(model, "ram", tmp_path, precision=precision, keep_fp32=["gate"])
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == before
    assert model.to(DTYPES[precision]) is model and model.to(device="cpu", dtype=DTYPES[precision]) is model
    stay = ("2.running_mean", "2.running_var", "3.parametrizations.weight.0._u", "3.parametrizations.weight.0._v")
    for name, buffer in model.named_buffers():
        assert buffer.dtype is (before if name in stay else plain)[name], name


# ---- a model that casts its own params inside forward, as some routers do --------------------------------------------


class CastsItself(nn.Module):
    """As the router of Switch Transformers: its layer computes in fp32 whatever the model is in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        return self.router(self.first(x.to(self.first.weight.dtype)).float())


def test_a_model_that_casts_itself_is_refused_in_half_precision(where: str, tmp_path: Path) -> None:
    model = wrap(CastsItself(), where, tmp_path)
    with pytest.raises(gemini.GeminiError, match="router.*float32, its weights are torch.bfloat16: the model changed"):
        squares(model, 0).backward()


@dataclass
class Padded:
    """A batch with a field that it makes itself, and something that no field keeps."""

    x: torch.Tensor
    mask: torch.Tensor = field(init=False)
    pad: InitVar[int]

    def __post_init__(self, pad: int) -> None:
        self.mask = torch.full((2, pad), 0.5)


class Double(tuple[torch.Tensor, torch.Tensor]):
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Double":
        return super().__new__(cls, (first, second))


def test_inputs_of_any_kind_are_cast_or_left() -> None:
    x = torch.ones(2, 4)
    batch = Padded(x, 3)
    cast = cast_floats(batch, torch.bfloat16)
    assert (type(cast), cast.x.dtype, cast.mask.dtype) == (Padded, torch.bfloat16, torch.bfloat16)
    assert batch.x is x and batch.mask.dtype is torch.float32, "that of the caller is as it was"
    for unknown in (MappingProxyType({"x": x}), Double(x, x), slice(x)):
        assert cast_floats(unknown, torch.bfloat16) is unknown
    values, indices = cast_floats(torch.max(x, 0), torch.bfloat16)
    assert values.dtype is torch.bfloat16 and indices.dtype is torch.int64
