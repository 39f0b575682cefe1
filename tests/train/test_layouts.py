"""Params of every memory layout and size, and classes of every layout: managed as torch has them."""

import copy
import pickle
import types
import warnings
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
import transformers
from torch import nn

import gemini
from tests.scaling import backward, make_step
from tests.train.helpers import (
    DTYPES,
    VOCAB,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    noise,
    snapshot,
    step_on,
    train,
    train_plain,
    wrap,
)
from tests.world import world_of

T = TypeVar("T")
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of 8 x 16 numbers; others: test_programs.py
    "gaps, transposed": lambda w: w[::2, ::2].t(),
    "expanded": lambda w: w[:, :1].expand(8, 8),
    "one number expanded": lambda w: w[0, 0].expand(8),
    "overlapping": lambda w: w.as_strided((7, 4), (2, 1)),
    "empty": lambda w: w[:0],
    "empty in the last dim": lambda w: w[:, :0],
}


class Net(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.odd = nn.Parameter(weight)
        self.even = nn.Linear(4, 4, dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.even(x).float().sum() * (self.odd.float() ** 2).sum()


def results(weight: torch.Tensor, precision: Any, folder: Path) -> list[torch.Tensor]:
    """All that can be read of a param after two steps, in every way."""
    torch.manual_seed(1)
    memory = gemini.MemoryBudget(cpu="8MiB", nvme="8MiB", nvme_path=folder)
    config = gemini.GeminiConfig(
        precision=precision, device="cpu", memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=0.5)
    )
    model: Any = gemini.GeminiDDP(Net(weight), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    scaler: Any = gemini.GradScaler(enabled=precision == "fp16")
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 4, dtype=DTYPES[precision]))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    found = [model.full_param("odd", torch.float32), model.state_dict()["odd"]]
    found += [optimizer.full_state("odd")[name] for name in ("exp_avg", "exp_avg_sq")]
    with model.gathered():
        found.append(model.odd.detach().clone())
    return [*found, gemini.release(model).odd.detach()]  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore:params are kept contiguous")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_param_has_the_values_of_a_contiguous_one(
    layout: str, precision: str, given: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 16, dtype=given)
    odd = LAYOUTS[layout](weight)
    even = odd.clone(memory_format=torch.contiguous_format)
    for mine, plain in zip(results(odd, precision, tmp_path), results(even, precision, tmp_path), strict=True):
        assert mine.shape == plain.shape and torch.equal(mine, plain)


def fail(*_: Any) -> None:
    raise RuntimeError("made to fail")


@pytest.mark.filterwarnings("ignore:params are kept contiguous")
@pytest.mark.parametrize("ends", ["released", "refused"])
def test_a_layout_comes_back(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model that is an ordinary one again, or that could not be wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 4, 2)).to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(4, 4, 2, 2).permute(1, 0, 3, 2))
    before = {name: (param.stride(), param.detach().clone()) for name, param in model.named_parameters()}
    config = gemini.GeminiConfig(precision="fp32", device="cpu")
    if ends == "released":
        gemini.release(gemini.GeminiDDP(model, config))
    else:
        monkeypatch.setattr("gemini.train.wrap.prepare_layers", fail)
        with pytest.raises(RuntimeError, match="made to fail"):
            gemini.GeminiDDP(model, config)
    for name, param in model.named_parameters():
        assert param.stride() == before[name][0] and torch.equal(param, before[name][1]), name


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", "Adafactor AdamW SGD Adagrad Adadelta RMSprop Rprop NAdam Adamax ASGD".split())
def test_adopted_optimizers_take_params_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch.optim, name)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(torch.randn(shape))

    plain = make()
    theirs = kind(plain.parameters(), lr=1e-2)
    rule = gemini.optim.adopt(kind, lr=1e-2)
    managed: Any = gemini.GeminiDDP(make(), gemini.GeminiConfig(precision="fp32", device="cpu", optimizer=rule))
    ours = gemini.HybridOptimizer(managed.parameters(), rule)
    for _ in range(3):
        for model, optimizer in ((plain, theirs), (managed, ours)):
            step_on(model(torch.ones(2, 4)), optimizer)
        ours.load_state_dict(ours.state_dict())
    for path, param in plain.named_parameters():
        assert torch.equal(managed.full_param(path), param.detach()), path


class Slotted:
    __slots__ = ("slot",)


class Empty:
    __slots__ = ()


BASES: dict[str, tuple[Any, ...]] = {
    "generic": (Generic[T], nn.Module),
    "generic last": (nn.Module, Generic[T]),
    "abstract": (ABC, nn.Module),
    "both": (ABC, Generic[T], nn.Module),
    "slots": (Slotted, nn.Module),
    "slots last": (nn.Module, Slotted),
    "empty slots": (Empty, nn.Module),
    "a list": (Generic[T], nn.ModuleList),
}


def class_with(bases: tuple[Any, ...]) -> Any:
    def body(namespace: dict[str, Any]) -> None:
        def __init__(self: Any) -> None:
            super(Made, self).__init__()
            self.part, self.calls = nn.Linear(4, 4), 0

        def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super(Made, self).state_dict(*args, **kwargs)

        namespace |= {"__init__": __init__, "state_dict": state_dict, "forward": lambda self, x: self.part(x)}

    Made: Any = types.new_class("Made", bases, {}, body)
    return Made


@pytest.mark.parametrize("bases", BASES)
def test_classes_of_any_bases_are_managed(bases: str) -> None:
    kind = class_with(BASES[bases])
    torch.manual_seed(0)
    made = kind()
    wanted = copy.deepcopy(made)(torch.ones(2, 4))
    model: Any = gemini.GeminiDDP(made, gemini.GeminiConfig(precision="fp32", device="cpu"))
    assert model is made and isinstance(model, kind) and isinstance(model, gemini.GeminiDDP)
    assert type(model).__name__ == "Made" and type(model).__mro__.index(gemini.GeminiDDP) < type(model).__mro__.index(
        kind
    )
    assert torch.equal(model(torch.ones(2, 4)), wanted)
    model(torch.ones(2, 4)).sum().backward()
    optimizer = gemini.HybridAdam(model.parameters())
    optimizer.step()
    model.load_state_dict(model.state_dict())
    assert model.calls  # the class's own method, between ours and torch's
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(gemini.GeminiError, match="managed"):
            use(model)
    assert type(type(model)()) is kind  # the class makes ordinary models
    again = gemini.release(model)
    assert again is made and type(again) is kind
    gemini.GeminiDDP(again, gemini.GeminiConfig(precision="bf16", device="cpu"))


loud = pytest.mark.filterwarnings("error", "ignore:Initializing zero-element tensors")


class WithNothing(nn.Module):
    """Empty params beside others, in blocks of their own, frozen; all but one are computed with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch initializes nothing and says so
            self.nothing = nn.Parameter(torch.empty(0, 32))
            self.first, self.narrow = nn.Linear(32, 32), nn.Linear(32, 0)
            self.blocks = nn.ModuleList([nn.Linear(0, 0), nn.Linear(32, 32), nn.Linear(0, 0)])
            self.frozen = nn.Parameter(torch.empty(3, 0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        parts = self.blocks[1](x), self.blocks[0](self.narrow(x)), x @ self.nothing.t()
        return (torch.cat(parts, -1) + self.frozen.sum()).float().square().mean()


def loss_of(model: Any, seed: int) -> torch.Tensor:
    dtype = (model.first.weight if isinstance(model, WithNothing) else model).dtype
    return model(noise(2, 5, 32, seed=seed, dtype=dtype))


@loud
@pytest.mark.parametrize("where", ["ram", "disk", "standin", "small"])
@pytest.mark.parametrize("precision", DTYPES)
def test_they_train_and_come_back(precision: str, where: str, tmp_path: Path) -> None:
    """The same bits as the plain loop; then everything that reads and writes by name."""
    model = wrap(WithNothing(), where, tmp_path, precision=precision, slack=2**16)
    plain, optimizer = Plain(WithNothing(), precision, scale=2.0**16 if precision == "fp16" else None), adam(model)
    assert train(model, optimizer, range(2), loss_of) == train_plain(plain, range(2), loss_of)
    backward(model, loss_of(model, 2))
    grad = model.full_grad("narrow.weight")
    assert grad is not None and grad.shape == (0, 32) and model.full_grad("blocks.2.weight") is None
    make_step(model, optimizer)
    optimizer.zero_grad()
    train_plain(plain, [2], loss_of, clip=None)
    assert_same_state(model, plain)
    assert model.full_param("nothing").shape == (0, 32) and world_of(model).by_names["nothing"].num_steps == 3
    with model.gathered(write=True), torch.no_grad():
        for param in model.parameters():
            param.copy_(param + 0)
    weights, states = model.state_dict(), optimizer.state_dict()
    assert weights["nothing"].shape == (0, 32) and weights["frozen"].dtype is DTYPES[precision]
    assert states["state"][0]["exp_avg"].shape == (0, 32) and len(states["param_groups"][0]["params"]) == 12
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    other = wrap(WithNothing(), "ram", tmp_path, precision=precision)
    for wait in (True, False):
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, wait=wait).wait()
        gemini.load_checkpoint(tmp_path / "ckpt", other, adam(other))
        assert_same_snapshot(snapshot(model), snapshot(other))
    if precision != "fp16":
        model.frozen.requires_grad_(True)
        loss_of(model, 4).backward()
        assert model.full_grad("frozen") is not None
    world_of(model).check()


@loud
@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
@pytest.mark.parametrize("where", ["disk", "standin"])
def test_their_gradients_add_up_behind_backward(where: str, gradients: str, tmp_path: Path) -> None:
    """What adds to a gradient that never landed is an error; an empty one has no sums, and has landed."""
    model = wrap(WithNothing(), where, tmp_path, gradients=gradients, slack=2**16)
    optimizer = adam(model)
    for seed in range(2):
        for micro in range(3):
            loss_of(model, 3 * seed + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    world_of(model).check()
    assert world_of(model).by_names["nothing"].num_steps == 2


@loud
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_updates_in_backward(where: str, tmp_path: Path) -> None:
    model, plain = wrap(WithNothing(), where, tmp_path, gradients="transient"), Plain(WithNothing())
    train(model, adam(model, step_in_backward=True), range(2), loss_of, clip=None)
    train_plain(plain, range(2), loss_of, clip=None)
    assert_same_state(model, plain)


@loud
def test_a_plan_counts_them(tmp_path: Path) -> None:
    x = noise(2, 5, 32, dtype=torch.float32)
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(precision="fp32", memory=memory, trace=gemini.trace(WithNothing(), {"x": x}))
    model = gemini.GeminiDDP(WithNothing(), config)
    train(model, adam(model), [0], loss_of)


class Odd(transformers.GPT2LMHeadModel):
    def __init__(self, config: Any):
        super().__init__(config)
        self.extra = nn.Linear(32, 0)
        self.post_init()


@loud
@pytest.mark.filterwarnings("default")
def test_pretrained(tmp_path: Path) -> None:
    hf_config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None
    )
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(precision="fp32", memory=memory)
    drawn = gemini.from_config(hf_config, config, model_class=Odd)
    drawn.save_pretrained(tmp_path / "saved")
    loaded = gemini.from_pretrained(tmp_path / "saved", config, model_class=Odd)
    plain, wanted = Odd.from_pretrained(tmp_path / "saved").state_dict(), drawn.state_dict()
    assert wanted["extra.weight"].shape == (0, 32)
    for state in (plain, loaded.state_dict()):
        assert state.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in state.items())
