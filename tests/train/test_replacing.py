"""A new checkpoint takes the place of an old one: killed anywhere, again and again, one of them is there to be loaded.

A kill is played by functions of the system that stop the program at one call and do nothing from then on; what is left
is what SIGKILL would leave. From every state that a kill leaves the next program starts, saves, and is killed anywhere
in turn, until no new state comes. Beside that: links, folders that cannot be renamed, and whose a leftover is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.train import replacing
from tests.train.helpers import adam, wrap

CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Killed(BaseException):
    """Nothing catches it."""


class Machine:
    """A folder in which programs save checkpoints, each with a number in its weights and in ``extra``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model: Any = wrap(torch.nn.Linear(1, 1), "ram", folder, precision="fp32")
        self.optimizer = adam(self.model)

    def save(self, number: int, monkeypatch: pytest.MonkeyPatch, killed_at: int) -> int:
        """What a program does that is killed before its n-th call; how many calls it made."""
        with self.model.gathered(write=True), torch.no_grad():
            for param in self.model.parameters():
                param.fill_(number)
        calls = 0

        def until_killed(real: Callable[..., Any], harmless: bool) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > killed_at:
                    raise Killed
                return None if harmless else real(*args, **kwargs)

            return call

        replacing._WRITTEN_HERE.clear()  # another program, even if it has the same number
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, until_killed(getattr(os, name), name == "fsync"))
            try:
                gemini.save_checkpoint(self.folder / "ckpt", self.model, self.optimizer, extra=number)
            except Killed:
                pass
        return calls

    def load(self) -> int | None:
        """The number of the checkpoint that is found, and whole."""
        try:
            number = gemini.load_checkpoint(self.folder / "ckpt", self.model, self.optimizer)
        except gemini.StorageError as error:
            assert "there is no checkpoint" in str(error)
            return None
        assert all((self.model.full_param(name) == number).all() for name, _ in self.model.named_parameters())
        return number

    def state(self) -> str:
        """Names without the numbers of processes; and of files, but for what is never looked into, only removed."""
        found = []
        for path in sorted(self.folder.iterdir()):
            name, new, _ = path.name.partition(".new-")
            content = "" if new else sorted(file.name for file in path.iterdir())
            found.append((name + new, path.suffix == ".old", content))
        return repr(found)


def test_killed_again_and_again_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = tmp_path / "folder", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    machine = Machine(folder)
    never = 10**9
    states: dict[str, tuple[Path, int | None]] = {}
    number = 1000
    to_do: list[tuple[Path, int | None]] = []

    def note() -> None:
        """Look at what is there; a state that has not been seen is one to start from."""
        key = machine.state()
        if key not in states:
            states[key] = (Path(shutil.copytree(folder, kept / str(len(states)))), machine.load())
            to_do.append(states[key])

    note()
    while to_do:
        start, before = to_do.pop()
        killed_at, calls = 0, never
        while killed_at <= calls:
            shutil.rmtree(folder)
            shutil.copytree(start, folder)
            number += 1
            made = machine.save(number, monkeypatch, killed_at)
            found = machine.load()
            assert found == number or found == before, (start.name, killed_at, os.listdir(folder))
            if made <= killed_at:
                assert found == number and [path.name for path in folder.iterdir()] == ["ckpt"]
                calls = made
            note()
            killed_at += 1
    assert len(states) >= 6, states.keys()
    assert any(".old" in key and "'ckpt'" not in key for key in states), "none was killed between the renames"
