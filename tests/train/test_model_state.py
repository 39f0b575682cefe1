"""What ``state_dict()`` of a model has beside params comes back with a checkpoint, by the model's own ways of saving
and loading; what cannot be kept, or is not taken, is refused by name, and nothing has changed.
"""

import collections
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.train.params.by_name import ByName
from tests.train.helpers import DTYPES, adam, assert_same_snapshot, noise, same_bits, snapshot, train, wrap
from tests.train.test_checkpoint_values import rewrite


class Scaled(nn.Module):
    """A running maximum outside of params and buffers, as fp8 layers keep it, in every form of plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.top, self.seen = nn.Linear(16, 16), 1.0, b""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.top, self.seen = max(self.top, float(x.detach().abs().max())), self.seen + b"\xff"
        return self.fc(x / self.top)

    def get_extra_state(self) -> Any:
        top = torch.tensor([self.top], dtype=torch.float64)
        return {"top": top, 3: (self.seen, None, [True, float("inf")]), "bf16": top.bfloat16()}

    def set_extra_state(self, state: Any) -> None:
        assert state["bf16"].dtype is torch.bfloat16 and state[3][1:] == (None, [True, float("inf")])
        self.top, self.seen = float(state["top"]), state[3][0]


class Order(nn.Module):
    """A buffer that grows; the module loads one of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.empty(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.order = torch.cat([self.order, torch.tensor([len(self.order)])])
        return x

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.order = state[f"{prefix}order"].clone()
        super()._load_from_state_dict(state, prefix, *args)


class Packed(nn.Module):
    """Saves more than it has, and its weight in another layout under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.eye(16) + 0.01), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x @ self.weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = self.weight.detach().t().clone()
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}packed"].t())
        self.calls = int(state[f"{prefix}calls"])


class Hooked(nn.Module):
    """A hook adds to the state, another one takes it out again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.notes = nn.Linear(16, 16), [0]
        self.register_state_dict_post_hook(lambda own, state, prefix, _: state.update({f"{prefix}notes": own.notes}))
        self.register_load_state_dict_pre_hook(lambda own, state, prefix, *_: own.notes.__setitem__(
            slice(None), state.pop(f"{prefix}notes")))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(self.notes[-1] + self.training)
        return self.fc(x) * (1 + 0.1 * self.notes[-1])


class Net(nn.Module):
    """All of them, one twice, and a load_state_dict and state_dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scaled, self.order, self.packed, self.hooked = Scaled(), Order(), Packed(), Hooked()
        self.again, self.norm, self.epoch = self.scaled, nn.LayerNorm(16), 0
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.scaled(self.hooked(self.packed(self.order(x)))))
        if self.training:
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
            self.epoch += 1
        return self.norm(x) + self.mean.to(x.dtype) + 0.01 * self.epoch

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["epoch"] = self.epoch
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        state = collections.OrderedDict(state_dict)
        self.epoch = state.pop("epoch")
        return super().load_state_dict(state, strict)


def steps(model: Any, optimizer: Any, seeds: range, precision: str = "bf16") -> list[float]:
    def loss_of(model: Any, seed: int) -> torch.Tensor:
        return model((3 + seed) * noise(2, 3, 16, seed=seed, dtype=DTYPES[precision])).float().square().mean()

    return train(model, optimizer, seeds, loss_of, clip=None)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return bool(a == b)


def durable(path: Path) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(
        precision="bf16", device="cpu", placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1),
        memory=gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=path, durable=True),
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("how", ["checkpoint", "behind", "state dicts", "optimizer first"])
def test_a_resumed_run_has_the_same_bits(how: str, precision: str, where: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any]:
        model = wrap(Net(), where, tmp_path, precision=precision)
        return model, adam(model)

    (first, optimizer), (second, others) = start(), start()
    steps(first, optimizer, range(3), precision)
    if how in ("checkpoint", "behind"):
        pending = gemini.save_checkpoint(tmp_path / "c", first, optimizer, wait=how == "checkpoint")
        expected = copy.deepcopy(first.state_dict()) if how == "checkpoint" else None
        losses = steps(first, optimizer, range(3, 6), precision)  # what is in place changes, while it is written
        pending.wait()
        steps(second, others, range(1), precision)
        gemini.load_checkpoint(tmp_path / "c", second, others)
        assert expected is None or same(expected, second.state_dict())
    else:
        state, states = first.state_dict(), optimizer.state_dict()
        state = torch.load(_saved(state, tmp_path), weights_only=False)  # no part of a module is shared
        losses = steps(first, optimizer, range(3, 6), precision)
        if how == "optimizer first":
            others.load_state_dict(states)
        second.load_state_dict(state)
        others.load_state_dict(states)
    assert steps(second, others, range(3, 6), precision) == losses
    assert_same_snapshot(snapshot(first), snapshot(second))
    assert same(first.state_dict(), second.state_dict())


def test_loading_reads_no_weights(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is given its params as they are, and leaves them so."""
    model = wrap(nn.Sequential(Picky()), where, tmp_path)
    optimizer = adam(model)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    monkeypatch.setattr(ByName, "read", None)
    gemini.load_checkpoint(tmp_path / "c", model, optimizer)


def _saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def test_a_durable_store_has_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    model = gemini.GeminiDDP(Net(), durable(store))
    optimizer = adam(model)
    steps(model, optimizer, range(3))
    gemini.save_checkpoint(store, model, optimizer)
    state = model.state_dict()
    masters = {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}
    del model, optimizer
    again = wrap(Net(), "ram", tmp_path)
    gemini.load_checkpoint(store, again, adam(again))
    assert same(state, again.state_dict())
    assert all(same_bits(again.full_param(name, torch.float32), master) for name, master in masters.items())


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"what": object()}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(Odd(4, 4)), "ram", tmp_path)
    said = r"state_dict\(\)\.0\._extra_state\.what is a object, which a checkpoint cannot keep"
    with pytest.raises(TypeError, match=said):
        gemini.save_checkpoint(tmp_path / "c", model, adam(model))
    assert not (tmp_path / "c").exists()


class Picky(nn.Linear):
    """Takes its buffer, then refuses its extra state: what was taken is taken back."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(2))
        self.word = "first"

    def get_extra_state(self) -> Any:
        return self.word

    def set_extra_state(self, state: Any) -> None:
        if state == "second":
            raise RuntimeError("not this one")
        self.word = state


def test_what_a_model_does_not_take_changes_nothing(where: str, tmp_path: Path) -> None:
    """Neither in a checkpoint nor in load_state_dict, where more, less or another form of it was saved."""

    def start(**changes: Any) -> tuple[Any, Any]:
        model = wrap(nn.Sequential(Picky()), where, tmp_path)
        optimizer = adam(model)
        model(noise(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in changes.items():
            setattr(model[0], name, value)
        return model, optimizer

    less = wrap(nn.Sequential(nn.Linear(4, 4)), where, tmp_path)
    model, optimizer = start(word="kept", count=torch.ones(2))
    with torch.no_grad():
        model[0].bias.copy_(torch.ones(4))
    for saved, said in (
        (start(word="second", count=torch.full((2,), 7.0)), "load_state_dict says: not this one"),
        (start(word="third", count=torch.zeros(3)), r"other buffers.*'0\.count'.*size mismatch"),
        (start(word="third", count=torch.zeros(2, dtype=torch.int64)), r"other buffers.*'0\.count' \(saved"),
        ((less, adam(less)), r"2 differ, the first is '0\._extra_state' \(saved None, here plain values\)"),
    ):
        gemini.save_checkpoint(tmp_path / "c", *saved)
        before, state = snapshot(model), model.state_dict()
        with pytest.raises(gemini.PlanMismatch, match=f"(?s){said}"):
            gemini.load_checkpoint(tmp_path / "c", model, optimizer)
        loads = not said.endswith("saved")  # torch casts
        if loads:
            with pytest.raises(RuntimeError, match=r"not this one|size mismatch|Missing key"):
                model.load_state_dict(saved[0].state_dict())
        assert_same_snapshot(before, snapshot(model))
        assert same(state, model.state_dict()) and model[0].word == "kept"
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    other, its = wrap(nn.Sequential(nn.Linear(4, 4)), where, tmp_path), None
    its = adam(other)
    with pytest.raises(
        gemini.PlanMismatch, match=r"(?s)'0\._extra_state' \(saved plain values, here None\).*Unexpected"
    ):
        gemini.load_checkpoint(tmp_path / "c", other, its)


def test_checkpoints_from_before_still_load(tmp_path: Path) -> None:
    """They have buffers by their first names, and nothing of modules: that is said."""
    model = wrap(nn.Sequential(shared := nn.BatchNorm1d(4), Picky(), shared), "ram", tmp_path, precision="fp32")
    optimizer = adam(model)
    model(noise(3, 4, dtype=torch.float32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[1].word = "kept"
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["version"] == 4 and manifest["buffers"]["1._extra_state"] == "kept"
    numbers = [manifest["buffers"].pop(name) for name in list(manifest["buffers"]) if name.startswith("2.")]
    assert len(numbers) == 3
    del manifest["buffers"]["1._extra_state"]
    manifest["version"] = 3
    manifest["extra"] = numbers  # else nothing would refer to these tensors
    rewrite(tmp_path / "c", manifest)
    again = wrap(nn.Sequential(shared := nn.BatchNorm1d(4), Picky(), shared), "ram", tmp_path, precision="fp32")
    with pytest.warns(UserWarning, match=r"'1\._extra_state' of model\.state_dict\(\) are not in it"):
        gemini.load_checkpoint(tmp_path / "c", again, adam(again))
    state = again.state_dict()
    assert state.pop("1._extra_state") == "first" and model.state_dict().keys() - state.keys() == {"1._extra_state"}
    assert all(same_bits(value, model.state_dict()[name]) for name, value in state.items())
