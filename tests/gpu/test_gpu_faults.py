"""On a GPU: a copy that fails, at any moment of a step, is told with its cause, and the last checkpoint resumes to the
same bits in the same model.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import GeminiError
from tests.gpu import gpu_cases
from tests.train import helpers
from tests.train.helpers import assert_same_snapshot, llama, snapshot
from tests.world import world_of

STEPS = 3
PLACES = ["all on the host", "all on nvme", "mixed"]


class Broken(RuntimeError):
    """What the device reports instead of copying."""


class FailingCopies:
    """The copies of a device; the ``chosen`` one (from 1) raises instead."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch):
        device = world_of(model).device
        self.begun: list[str] = []  # the stream of each
        self.chosen = 0
        self.fired: str | None = None  # the stream of the one that failed
        self._lock, self._copy, self._copy_all = threading.Lock(), device.copy, device.copy_all
        monkeypatch.setattr(device, "copy", self.copy)
        monkeypatch.setattr(device, "copy_all", self.copy_all)

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: str, *args: Any, **kwargs: Any) -> Any:
        self._count(stream)
        return self._copy(into, source, stream, *args, **kwargs)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str) -> Any:
        self._count(stream)
        return self._copy_all(pairs, stream)

    def _count(self, stream: str) -> None:
        with self._lock:
            self.begun.append(stream)
            fails = len(self.begun) == self.chosen
        if fails:
            self.fired = stream
            raise Broken("an illegal address, say")


def one_step(model: Any, optimizer: Any, seed: int) -> None:
    gpu_cases.train(model, optimizer, [seed])
    world_of(model).settle()


def caused_by(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, Broken):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.mark.parametrize("where", PLACES)
def test_any_copy_may_fail(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: Any) -> None:
    whole = gpu_cases.wrap(llama(), where, tmp_path)
    optimizer = helpers.adam(whole)
    counting = FailingCopies(whole, monkeypatch)
    for seed in range(STEPS):
        one_step(whole, optimizer, seed)
        if seed == 0:
            gemini.save_checkpoint(tmp_path / "ckpt", whole, optimizer)
            counting.begun.clear()
    expected, begun = snapshot(whole), [*counting.begun]
    assert len(begun) > 4, "nothing moves here"
    told, tried = 0, set[int]()
    for fetches in (True, False):  # which most are, and are made again where they were ahead
        numbers = [number for number, stream in enumerate(begun, 1) if (stream == "fetch") is fetches]
        tried.update(numbers[:: max(len(numbers) // 4, 1)])
    for chosen in sorted(tried):
        model = gpu_cases.wrap(llama(), where, tmp_path)
        optimizer = helpers.adam(model)
        gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        copies, error = FailingCopies(model, monkeypatch), None
        copies.chosen = chosen
        try:
            for seed in range(1, STEPS):
                one_step(model, optimizer, seed)
        except (Broken, GeminiError) as e:
            error = e
        copies.chosen = 0
        world_of(model).check_ledger()
        if error is not None:
            assert copies.fired and caused_by(error), f"the cause is lost: {error!r}"
            told, error = told + 1, error.with_traceback(None)
            if world_of(model).corrupted_by is not None:
                with pytest.raises(GeminiError, match="Load the last checkpoint"):
                    model(**gpu_cases.batch(0))
            gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
            assert world_of(model).corrupted_by is None
            for seed in range(1, STEPS):
                one_step(model, optimizer, seed)
        else:  # what is fetched ahead may fail, and is fetched again when it is needed; or there were fewer this time
            assert copies.fired in (None, "fetch"), f"a copy on the stream {copies.fired} failed and nobody said so"
        assert_same_snapshot(snapshot(model), expected)
        world_of(model).check()
    summary(
        f"on {gpu_cases.DEVICE}, {where}: of {len(begun)} copies {len(tried)} failed, each by itself; {told} were told"
    )
    assert told > 4
