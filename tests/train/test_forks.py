"""A process that was forked from the one that wrapped a model, as workers of a DataLoader are: each use of the model is
refused in words, the parent's training never notices, and the child ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gemini
from benchmarks._progress import run as watched_run
from tests.train.helpers import VOCAB, adam, batch, llama, train, wrap

REFUSED = "in a process that was forked from the one that wrapped it"


def in_child(call: Callable[[], Any]) -> str:
    """What a forked child finds: the error of ``call``, or nothing; a signal that ended it is an error here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # as a last resort: nobody waits for ever
        try:
            call()
            said = "nothing"
        except BaseException as e:
            said = f"{type(e).__name__}: {e}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        said = told.read()
    assert os.waitpid(child, 0)[1] == 0, "it was ended by a signal"
    return said


@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_each_way_into_a_model_is_refused_in_a_forked_child(where: str, tmp_path: Path) -> None:
    plain = wrap(llama(), where, tmp_path)
    wanted = train(plain, adam(plain), range(3))
    model = wrap(llama(), where, tmp_path)
    optimizer, param = adam(model), next(model.parameters())
    losses, view = train(model, optimizer, range(2)), param.detach()
    name = next(name for name, _ in model.named_parameters())

    def gathered(write: bool) -> None:
        with model.gathered(write=write):
            pass

    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(**batch(0)),
        "a part": lambda: model.get_input_embeddings()(torch.zeros(1, 2, dtype=torch.long)),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "a read": lambda: param.sum(),
        "a view": lambda: view.sum(),
        "a write": lambda: param.data.zero_(),
        "full_param": lambda: model.full_param(name),
        "state_dict": model.state_dict,
        "gathered": lambda: gathered(False),
        "gathered to write": lambda: gathered(True),
        "a save": lambda: gemini.save_checkpoint(tmp_path / "c", model, optimizer),
        "release": lambda: gemini.release(model),
    }

    def all_of_them() -> None:
        found = {}
        for way, call in ways.items():
            try:
                call()
                found[way] = "nothing"
            except gemini.GeminiError as e:
                found[way] = "" if REFUSED in str(e) else str(e)
        assert not any(found.values()), found

    assert in_child(all_of_them) == "nothing"
    assert losses + train(model, optimizer, [2]) == wanted


def test_a_worker_that_calls_the_model_is_an_error_where_its_batch_is_asked_for(tmp_path: Path) -> None:
    model = wrap(llama(), "disk", tmp_path)

    def embedded(rows: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(input_ids=torch.stack(rows)).logits
        return result

    rows = [torch.full((5,), number) for number in range(4)]
    loader = DataLoader(rows, 2, collate_fn=embedded, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    with pytest.raises(gemini.GeminiError, match=REFUSED):
        next(iter(loader))
    found = next(iter(DataLoader(rows, 2, collate_fn=embedded)))  # type: ignore[arg-type]
    assert found.shape == (2, 5, VOCAB)


def test_a_child_has_models_of_its_own(tmp_path: Path) -> None:
    model = wrap(llama(), "ram", tmp_path)
    wanted = train(model, adam(model), range(1))

    def train_own() -> None:
        own = wrap(llama(), "disk", tmp_path)
        assert train(own, adam(own), range(1)) == wanted

    assert in_child(train_own) == "nothing"


def test_a_child_that_lets_go_of_the_model_and_ends_leaves_the_parent_all(tmp_path: Path) -> None:
    """By the end of an interpreter, which runs what is to be done at exit: nothing hangs, the parent loses nothing."""
    code = f"""
import gc, os, sys
from pathlib import Path
import torch, gemini
from tests.train.helpers import adam, llama, train
memory = gemini.MemoryBudget(cpu="8MiB", nvme="64MiB", nvme_path={str(tmp_path)!r}, durable=True)
placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
config = gemini.GeminiConfig(device="cpu", memory=memory, placement=placement)
model = gemini.GeminiDDP(llama(), config)
optimizer = adam(model)
train(model, optimizer, range(1))
gemini.save_checkpoint({str(tmp_path / "first")!r}, model, optimizer)
gemini.save_checkpoint({str(tmp_path / "second")!r}, model, optimizer, wait=False)
child = os.fork()
if child == 0:
    del model, optimizer
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
train(model, optimizer, range(1))
gemini.save_checkpoint({str(tmp_path / "third")!r}, model, optimizer)
for name in ("first", "second", "third"):
    assert (Path({str(tmp_path)!r}) / name / "manifest.json").exists(), name
    gemini.load_checkpoint(Path({str(tmp_path)!r}) / name, model, optimizer)
print("ends")
"""
    run = watched_run([sys.executable, "-c", code])
    assert run.returncode == 0 and run.stdout == "ends\n", run.stderr
