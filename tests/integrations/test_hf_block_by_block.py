"""``order="bfs"``: the Trainer's steps block by block have the bits and the logs of one after another."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.block_by_block import BlockByBlock
from gemini.integrations.huggingface import GeminiTrainer
from transformers import LlamaForCausalLM, TrainerCallback

from tests.integrations.trainer_cases import Sentences, assert_same_run, llama, make
from tests.world import steps_by_block

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
STEP = {"gradient_accumulation_steps": 4, "max_steps": 5, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def nothing_is_said() -> Iterator[None]:
    """A run in the ordinary order by mistake would pass all comparisons."""
    with warnings.catch_warnings(), steps_by_block():
        warnings.filterwarnings("error", message=".*one after another")
        yield


class Losses(TrainerCallback):
    """The loss that has come together so far, after each micro-batch and each step."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(f"substep of {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(f"step {state.global_step}")


def both(folder: Path, kind: type = GeminiTrainer, **how: Any) -> tuple[Any, Any]:
    """Trained block by block, and one after another: trainer, model and logs are the same."""
    runs, logs, calls, steps = [], [], [], []
    for order in ("bfs", "dfs"):
        seen = Losses()
        trainer, record = make(folder / order, kind, order=order, **(STEP | how))
        trainer.add_callback(seen)
        with steps_by_block() as by_block:
            trainer.train()
        runs.append(trainer)
        steps.append(by_block.call_count)
        logs.append([{key: value for key, value in log.items() if key not in TIMES} for log in record.logs])
        calls.append(seen.found)
    assert steps == [4, 0], "of five steps one has one micro-batch"
    assert logs[0] == logs[1] and calls[0] == calls[1]
    assert_same_run(*runs)
    return runs[0], runs[1]


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    losses: torch.Tensor = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


@pytest.mark.parametrize(
    "how",
    [
        {}, {"bf16": True}, {"label_smoothing_factor": 0.1}, {"compute_loss_func": smoothed},
        {"average_tokens_across_devices": False, "gradient_checkpointing": True},
    ],
    ids=["fp32", "bf16", "smoothing", "own loss", "checkpoints"],
)  # fmt: skip
def test_the_bits_and_logs_of_one_after_another(how: dict[str, Any], tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches: of 26 rows four, four, four and one."""
    both(tmp_path, train_dataset=Sentences(26), **how)


def test_labels_of_unequal_counts_are_a_mean_over_the_step(tmp_path: Path) -> None:
    """Each micro-batch has another number of labels, and a step another than the one before."""
    counts = {}
    for order in ("bfs", "dfs"):
        seen: list[tuple[int, int]] = []

        def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None, seen: Any = seen) -> torch.Tensor:
            if type(labels) is torch.Tensor:  # not without values
                seen.append((int((labels[:, 1:] != -100).sum()), int(num_items_in_batch)))
            return smoothed(outputs, labels, num_items_in_batch)

        trainer, record = make(tmp_path / order, order=order, compute_loss_func=summed, **STEP)
        trainer.train()
        counts[order] = seen, record.of("loss"), record.of("grad_norm")
    assert counts["bfs"] == counts["dfs"]
    assert len({labels for labels, _ in counts["bfs"][0]}) > 2 and len({total for _, total in counts["bfs"][0]}) > 2


def test_it_resumes_with_the_bits_of_a_run_that_was_not_interrupted(tmp_path: Path) -> None:
    how: dict[str, Any] = STEP | {"order": "bfs", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _ = make(tmp_path, **how)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    again, record = make(tmp_path, **how)
    with steps_by_block() as by_block:
        again.train(resume_from_checkpoint=True)
    assert by_block.call_count == len(record.of("loss")) == 2
    assert_same_run(whole, again)


# ---- what is computed one after another ------------------------------------------------------------------------------


class OwnLoss(GeminiTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnBatches(GeminiTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class OtherBatches(GeminiTrainer):
    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        return super().training_step(model, {**inputs}, *args)


class Middle(GeminiTrainer.__mro__[2]):  # type: ignore[misc]
    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)


class OwnStep(GeminiTrainer.__mro__[1], Middle):  # type: ignore[misc]
    pass


def of_library(compute: Any) -> type:
    """A trainer of TRL's whose loss is ``compute``."""
    compute.__module__ = "trl.experimental.another"
    return type("Another", (GeminiTrainer,), {"compute_loss": compute})


def draws(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return model(**inputs).loss * (1 + torch.rand(()))


def draws_before(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    scale = 1 + torch.rand(())
    return model(**inputs).loss * scale


def calls_twice(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return model(**inputs).loss + model(**inputs).loss


def calls_another(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return self.model(**inputs).loss


def without_names(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return model(inputs["input_ids"], labels=inputs["labels"]).loss


class Wandering(LlamaForCausalLM):
    """What it computes of one row reads a weight of the beginning."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        if input_ids.shape[0] == 1:
            output.loss = output.loss + self.model.embed_tokens.weight.float().mean()
        return output


def wandering() -> Any:
    torch.manual_seed(0)
    return Wandering(llama().config).train()


@pytest.mark.parametrize(
    "kind, how, why",
    [
        (GeminiTrainer, {"fp16": True}, "the loss scale may change"),
        (OwnLoss, {}, "OwnLoss has its own compute_loss, which would run twice .* compute_loss_func="),
        (OwnBatches, {}, "OwnBatches has its own _prepare_inputs"),
        (OwnStep, {}, "OwnStep has its own training_step"),
        (OtherBatches, {}, "given another batch than get_batch_samples"),
        (of_library(draws_before), {}, "draws random numbers before it calls the model"),
        (of_library(calls_twice), {}, "calls the model more than once"),
        (of_library(calls_another), {}, "does not call the model that it is given|has hooked"),
        (of_library(without_names), {}, "tensors without names"),
        (GeminiTrainer, {"model": lambda: llama(tied=True)}, "is also lm_head.weight"),
        (GeminiTrainer, {"model": lambda: llama(dropout=0.5)}, "draws random numbers .dropout."),
        (GeminiTrainer, {"model": wandering, "train_dataset": Sentences(7), "max_steps": 2}, "another way"),
    ],
    ids=["fp16", "own loss", "own batches", "own step", "other batches", "random", "twice", "another", "no names",
         "tied", "dropout", "strays"],
)  # fmt: skip
def test_why_one_after_another_is_said_once_and_the_bits_stay(
    kind: Any, how: dict[str, Any], why: str, tmp_path: Path
) -> None:
    runs, logs = [], []
    for order in ("bfs", "dfs"):
        own = {**how, "model": how["model"]()} if "model" in how else how
        trainer, record = make(tmp_path / order, kind, order=order, **(STEP | own))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.train()
        said = [str(each.message) for each in warned if "one after another" in str(each.message)]
        if order == "bfs":
            assert len(said) == 1, said
            with pytest.warns(match=why):
                warnings.warn(said[0], stacklevel=1)
        else:
            assert not said
        runs.append(trainer)
        logs.append([{key: value for key, value in log.items() if key not in TIMES} for log in record.logs])
    assert logs[0] == logs[1]
    assert_same_run(*runs)


@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_is_torn_leaves_nothing(error: Any, where: str, tmp_path: Path) -> None:
    """Once at the third micro-batch of the second step, then trained from there: as one after another."""
    runs = []
    for order in ("bfs", "dfs"):
        calls = 0

        def torn(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            loss = smoothed(*args, **kwargs)
            if loss.device.type == "meta" or type(loss) is not torch.Tensor:
                return loss
            calls += 1
            if calls == 4 + 3:
                if where == "loss":
                    raise error("torn")

                def hook(_: torch.Tensor) -> None:
                    raise error("torn")

                args[0]["logits"].register_hook(hook)
            return loss

        trainer, _ = make(tmp_path / order, order=order, compute_loss_func=torn, **STEP)
        with pytest.raises(error, match="torn"):
            trainer.train()
        if order == "bfs":
            steps: BlockByBlock = trainer._gemini_steps
            assert not steps._losses and not steps._samples
        trainer.train()
        runs.append(trainer)
    assert_same_run(*runs)


def test_refused() -> None:
    with pytest.raises(ValueError, match="order is one of None, 'dfs', 'bfs', got 'depth'"):
        make("unused", order="depth")
