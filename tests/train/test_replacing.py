"""A new checkpoint takes the place of an old one: killed anywhere, again and again, one of them is there to be loaded.

A kill is played by functions of the system that stop the program at one call and do nothing from then on; what is left
is what SIGKILL would leave. From every state that a kill leaves the next program starts, saves, and is killed anywhere
in turn, until no new state comes. Beside that: links, folders that cannot be renamed, and whose a leftover is.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import replacing
from tests.train.helpers import adam, failing, wrap

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


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def save(machine: Machine, directory: Any, number: int, **how: Any) -> Any:
    return gemini.save_checkpoint(directory, machine.model, machine.optimizer, extra=number, **how)


def load(machine: Machine, directory: Any) -> int:
    return gemini.load_checkpoint(directory, machine.model, machine.optimizer)


def test_a_link_stays_a_link_and_the_data_land_where_it_points(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "small").mkdir()
    link = tmp_path / "small" / "latest"
    link.symlink_to("../big/latest")
    for number in range(3):  # the first one makes what the link points to
        save(machine, link, number)
        assert link.is_symlink() and (tmp_path / "big" / "latest" / "manifest.json").exists()
        assert load(machine, link) == load(machine, tmp_path / "big" / "latest") == number
        assert os.listdir(tmp_path / "small") == os.listdir(tmp_path / "big") == ["latest"]
    os.rename(tmp_path / "big" / "latest", tmp_path / "big" / ".latest.old")  # as a death between two renames would
    assert load(machine, link) == 2
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(gemini.StorageError, match="leads back to itself"):
        save(machine, tmp_path / "round", 0)


def test_a_relative_path_is_that_of_the_call(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pending = save(machine, "ckpt", 4, wait=False)
    os.chdir(tmp_path / "there")
    pending.wait()
    assert load(machine, tmp_path / "here" / "ckpt") == 4 and os.listdir(tmp_path / "there") == []


@pytest.mark.parametrize("name", [".", "", "..", "../here", "/"])
def test_a_folder_that_we_stand_in_is_not_renamed(
    name: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(gemini.StorageError, match="the folder itself is renamed.*Give a folder in it.*checkpoint"):
        save(machine, name, 0)
    assert sorted(tmp_path.iterdir()) == before and os.listdir(tmp_path / "here") == []
    save(machine, "ckpt", 1)


@pytest.mark.parametrize("name", ["a\0b", "x" * 250, "x" * 300, b"bytes"])
def test_odd_names(name: str | bytes, machine: Machine, tmp_path: Path) -> None:
    path: Any = str(tmp_path / name) if isinstance(name, str) else os.fsencode(tmp_path) + b"/" + name
    if isinstance(name, bytes):
        gemini.save_checkpoint(path, machine.model, machine.optimizer, extra=7)
        assert gemini.load_checkpoint(path, machine.model, machine.optimizer) == 7
        return
    for call in (gemini.save_checkpoint, gemini.load_checkpoint):  # 250: with what is put around it, it is too long
        with pytest.raises(gemini.StorageError, match="null byte|name too long|there is no checkpoint"):
            call(path, machine.model, machine.optimizer)


def test_a_mount_point_is_not_renamed(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    with pytest.raises(gemini.StorageError, match="where a file system is mounted.*volume/checkpoint"):
        save(machine, tmp_path / "volume", 0)
    save(machine, tmp_path / "volume" / "checkpoint", 0)


def test_what_came_there_meanwhile_is_not_overwritten(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemini.train.checkpoint import write as checkpoint_write

    def write(*args: Any) -> None:
        (tmp_path / "ckpt").mkdir()
        (tmp_path / "ckpt" / "notes").write_text("a year's work")

    monkeypatch.setattr(checkpoint_write, "write_manifest", write)
    with pytest.raises(gemini.StorageError, match="is not a checkpoint: it will not be overwritten"):
        save(machine, tmp_path / "ckpt", 0)
    assert (tmp_path / "ckpt" / "notes").exists() and os.listdir(tmp_path) == ["ckpt"]


def test_a_disk_that_fails_at_the_end_leaves_the_old_one(machine: Machine, tmp_path: Path) -> None:
    """Every fsync and rename in turn: an error, and what was there; or no error, and the new one."""
    for name in ("fsync", "rename"):
        save(machine, tmp_path / "ckpt", 0)
        for number in range(1, 21):
            error, before = None, load(machine, tmp_path / "ckpt")
            with failing(os, name, number, OSError(5, "Input/output error"), once=True) as calls:
                try:
                    save(machine, tmp_path / "ckpt", number)
                except gemini.StorageError as e:
                    error = e
            assert load(machine, tmp_path / "ckpt") == (before if error else number), (name, number)
            assert not [path.name for path in tmp_path.iterdir() if "new" in path.name]
            if len(calls) < number:
                break
        else:
            raise AssertionError("it never came to the last call")


def test_a_number_that_lives_again_does_not_keep_a_leftover(machine: Machine, tmp_path: Path) -> None:
    """Writers are told by when they began, not by their number alone; odd characters in the name change nothing."""
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    zombie = subprocess.Popen(["true"])
    while replacing._stamp(zombie.pid) is not None:  # it has ended, but stays in the table until somebody waits for it
        time.sleep(0.01)
    for name in ("ckpt", "ckpt[1]*"):
        writing = f".{name}.new-{waiting.pid}-{replacing._stamp(waiting.pid)}-0"
        going = [f".{name}.new-{pid}-00000000-0" for pid in (1, waiting.pid, zombie.pid, os.getpid(), 10**17)]
        going += [f".{name}.new-{waiting.pid}", f"{going[0]}.old"]
        others = [f".{name}x.new-1-00000000-0", f".{name}.new-notes", f"x.{name}.new-1-00000000-0"]
        for path in (*going, writing, *others):
            (tmp_path / path).mkdir()
            (tmp_path / path / "params").write_text("")
        save(machine, tmp_path / name, 0)
        assert sorted(os.listdir(tmp_path)) == sorted([name, writing, *others])
        for path in (name, writing, *others):
            shutil.rmtree(tmp_path / path)
    waiting.communicate(b"\n")
    zombie.wait()
    assert replacing._stamp(waiting.pid) is None


def test_two_models_of_one_program_do_not_write_into_one_folder(machine: Machine, tmp_path: Path) -> None:
    first, second = replacing.begin(tmp_path / "ckpt"), replacing.begin(tmp_path / "ckpt")
    first.mkdir()
    assert first != second
    third = replacing.begin(tmp_path / "ckpt")
    assert first.is_dir(), "it is being written"
    for work in (first, second, third):
        replacing.end(work)
    assert os.listdir(tmp_path) == []
