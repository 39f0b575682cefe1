"""A Trainer whose states are durable goes on from its last step, whichever file of its own it had written then."""

from pathlib import Path
from typing import Any

import pytest
from gemini.integrations.callbacks import LinesCallback
from transformers import TrainerCallback

import gemini
from tests.integrations.trainer_cases import Sentences, assert_same_run, llama, make
from tests.world import world_of


class Death(BaseException):
    """What SIGKILL is to a program, as far as its files are concerned."""


class Die(TrainerCallback):
    """In the middle of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Death


def trainer(folder: Path, store: Path, **changes: Any) -> Any:
    store.mkdir(exist_ok=True)
    memory = gemini.MemoryBudget(cpu="640KiB", nvme="64MiB", nvme_path=store, durable=True)
    how = {"train_dataset": Sentences(8), "gemini_config": gemini.GeminiConfig(memory=memory), "bf16": True}
    made, _ = make(folder, model=llama(tied=True, dropout=0.2), **(how | changes))
    return made


def die(made: Any, step: int) -> None:
    made.add_callback(Die(step))
    with pytest.raises(Death):
        made.train(resume_from_checkpoint=False)
    world_of(made.model).close()


@pytest.mark.parametrize("changes", [{}, {"fp16": True, "bf16": False}, {"optim": "lion_32bit"}], ids=str)
@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_run_goes_on_from_its_last_step(step: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """After step 1 there is no checkpoint, after 3 there is one: the store is newer. Dropout, shuffled rows, epochs."""
    whole = trainer(tmp_path / "whole", tmp_path / "other", **changes)
    whole.train()
    die(trainer(tmp_path / "run", tmp_path / "store", **changes), step)
    again = trainer(tmp_path / "run", tmp_path / "store", **changes)
    begun: list[int] = []
    again.add_callback(
        type("Begin", (TrainerCallback,), {"on_step_begin": lambda *a, **k: begun.append(a[2].global_step)})()
    )
    again.train(resume_from_checkpoint=True)
    assert begun[0] == step, "not from checkpoint-3, and not from the beginning"
    assert_same_run(whole, again)
    assert [row for row in again.state.log_history if "loss" in row][:-1] == [
        row for row in whole.state.log_history if "loss" in row
    ][:-1]


def test_auto_begins_and_goes_on_where_the_model_has_the_store_already(tmp_path: Path) -> None:
    """It is managed before it is trained, since it is evaluated."""
    whole = trainer(tmp_path / "whole", tmp_path / "other")
    said: list[str] = []
    whole.add_callback(LinesCallback(said.append))
    whole.train(resume_from_checkpoint="auto")
    dying = trainer(tmp_path / "run", tmp_path / "store")
    dying.add_callback(LinesCallback(said.append))
    die(dying, 4)
    assert said and not any("resuming" in line for line in said)
    again = trainer(tmp_path / "run", tmp_path / "store", eval_dataset=Sentences(4))
    again.add_callback(LinesCallback(said.append))
    again.evaluate()
    again.train(resume_from_checkpoint="auto")
    assert Path(again.args.resume_from_checkpoint).name == "checkpoint-4"
    assert f"resuming from the store in {tmp_path / 'store'} after step 4" in said
    assert_same_run(whole, again)


def test_the_scale_of_fp16_goes_on(tmp_path: Path) -> None:
    """One that grows every second step: the run goes on with the scale and the count of its last step."""

    def growing(folder: str, store: str) -> Any:
        made = trainer(tmp_path / folder, tmp_path / store, fp16=True, bf16=False)

        def begin(*args: Any, **kwargs: Any) -> None:
            made.accelerator.scaler.set_growth_interval(2)

        made.add_callback(type("Growing", (TrainerCallback,), {"on_train_begin": begin})())
        return made

    whole = growing("whole", "other")
    whole.train()
    die(growing("run", "store"), 5)
    again = growing("run", "store")
    again.train(resume_from_checkpoint=True)
    assert whole.accelerator.scaler.get_scale() != 2.0**16, "it did not grow"
    assert again.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert_same_run(whole, again)
