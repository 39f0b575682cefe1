"""What ``state_dict()`` of a model has beside params comes back with a checkpoint, by the model's own ways of saving
and loading (each kind in each order: ``test_programs.py``); what cannot be kept, or is not taken, is refused by name,
and nothing has changed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.train.params.by_name import ByName
from tests.train.helpers import adam, assert_same_snapshot, noise, same_bits, snapshot, step_on, train, trainable, wrap
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


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return bool(a == b)


def test_loading_reads_no_weights(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is given its params as they are, and leaves them so."""
    model, optimizer = trainable(nn.Sequential(Picky()), where, tmp_path)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    monkeypatch.setattr(ByName, "read", None)
    gemini.load_checkpoint(tmp_path / "c", model, optimizer)


def test_a_durable_store_has_it(tmp_path: Path) -> None:
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path, durable=True)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    model = gemini.GeminiDDP(Scaled(), gemini.GeminiConfig(device="cpu", memory=memory, placement=placement))
    optimizer = adam(model)
    train(model, optimizer, range(3), lambda model, seed: model(noise(2, 16, seed=seed)).float().square().mean())
    gemini.save_checkpoint(tmp_path, model, optimizer)
    state = model.state_dict()
    del model, optimizer
    again = wrap(Scaled(), "ram", tmp_path)
    gemini.load_checkpoint(tmp_path, again, adam(again))
    assert again.seen == b"\xff" * 3 and same(state, again.state_dict())


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
        model, optimizer = trainable(nn.Sequential(Picky()), where, tmp_path)
        step_on(model(noise(2, 4)).square().mean(), optimizer)
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
    model, optimizer = trainable(
        nn.Sequential(shared := nn.BatchNorm1d(4), Picky(), shared), "ram", tmp_path, precision="fp32"
    )
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
