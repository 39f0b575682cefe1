"""accelerate's ``ParallelismConfig``: sequences divided and layers sliced in its own loop and in the Trainer, as in one
process.
"""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig

import gemini
from tests.ranks.context_cases import Case, batch, make
from tests.ranks.pool import Pools, failures

CONFIG = gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))


def samples() -> list[dict[str, torch.Tensor]]:
    """Eight sequences, each with another number of rated tokens."""
    return [{name: value[number % 2] for name, value in batch(Case(), number).items()} for number in range(8)]


def forget_state() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def loop(sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    """accelerate's loop: norms, and losses over all ranks."""
    from gemini.integrations.accelerate import GeminiAccelerator

    parallelism = ParallelismConfig(**sizes) if sizes else None
    accelerator = GeminiAccelerator(cpu=True, parallelism_config=parallelism, gemini_config=CONFIG)
    try:
        model: Any = make(Case())
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = torch.utils.data.DataLoader(samples(), batch_size=1 if sizes.get("dp_shard_size") else 2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        norms, losses = [], []
        for whole in loader:
            loss = model(**accelerator.sequence_batch(whole)).loss
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            mine = whole["input_ids"].sum(1)
            assert accelerator.gather_for_metrics(mine).tolist() == mine.tolist()
            assert accelerator.gather_for_metrics(["text"]) == ["text"]
        return norms, losses
    finally:
        forget_state()


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("by", ["cp_size", "sp_size", "tp_size"])
def test_the_loop_of_accelerate(by: str, pool_of: Pools) -> None:
    norms, losses = pool_of(2).run(loop, {by: 2})[0]
    one = loop({})
    assert norms == pytest.approx(one[0], rel=1e-5) and losses == pytest.approx(one[1], rel=1e-6)


def test_sizes_that_cannot_be(pool_of: Pools) -> None:
    for sizes, says in (
        ({"cp_size": 2, "dp_shard_size": 4}, "is 8, and there are 2 processes: dp_shard_size=1 would do"),
        ({"tp_size": 3}, "x tp_size=3 is 3, and there are 2 processes"),
    ):
        for text in failures(pool_of(2).outcomes(loop, sizes), "ValueError"):
            assert says in text


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(samples())


def train(
    folder: str, sizes: dict[str, int], streamed: bool = False, order: str | None = None
) -> list[tuple[Any, Any, Any]]:
    import transformers
    from gemini.integrations.huggingface import GeminiTrainer

    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=2, report_to=[], gradient_accumulation_steps=2, per_device_eval_batch_size=2,
        per_device_train_batch_size=2 // sizes.get("dp_shard_size", 1),
        save_strategy="no", logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5, eval_strategy="steps", eval_steps=2,
        train_sampling_strategy="sequential", disable_tqdm=True,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
    )  # fmt: skip
    try:
        data: Any = Stream() if streamed else samples()
        number = 8 if streamed else 7  # which do not fill the last batch
        rows = {"train_dataset": data, "eval_dataset": samples()[:number]}
        trainer = GeminiTrainer(make(Case()), arguments, gemini_config=CONFIG, order=order, **rows)
        trainer.train()
        assert trainer.get_total_train_batch_size(arguments) == 4
        return [(line.get("loss"), line.get("grad_norm"), line.get("eval_loss")) for line in trainer.state.log_history]
    finally:
        forget_state()


def same(several: Any, one: Any) -> None:
    assert len(several[0]) == len(one) == 4
    for line, wanted in zip((line for found in several for line in found), len(several) * one, strict=True):
        for value, expected in zip(line, wanted, strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("by", ["cp_size", "tp_size"])
def test_the_trainer(by: str, pool_of: Pools, tmp_path: Path) -> None:
    """Tokens are counted over gradient accumulation; evaluation has whole sequences."""
    same(pool_of(2).run(train, str(tmp_path / "two"), {by: 2}, seconds=120), train(str(tmp_path / "one"), {}))


@pytest.mark.parametrize(
    "sizes", [{"cp_size": 2}, pytest.param({"tp_size": 2, "dp_shard_size": 2}, marks=pytest.mark.slow)], ids=str
)
def test_ranks_that_share_a_batch_read_the_same_of_a_stream(
    sizes: dict[str, int], pool_of: Pools, tmp_path: Path
) -> None:
    several = pool_of(math.prod(sizes.values())).run(train, str(tmp_path / "all"), sizes, True, seconds=120)
    same(several, train(str(tmp_path / "one"), {}, True))


def train_by_blocks(folder: str, sizes: dict[str, int]) -> tuple[list[str], Any]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = train(folder, sizes, order="bfs")
    return [text for each in warned if "one after another" in (text := str(each.message))], found


def test_several_ranks_compute_one_after_another(pool_of: Pools, tmp_path: Path) -> None:
    """``order="bfs"`` says so once, and logs the same numbers."""
    sizes = {"dp_shard_size": 2}
    wanted = pool_of(2).run(train, str(tmp_path / "dfs"), sizes, seconds=120)
    for (said, found), log in zip(
        pool_of(2).run(train_by_blocks, str(tmp_path), sizes, seconds=120), wanted, strict=True
    ):
        assert len(said) == 1 and said[0].endswith("there are several ranks")
        assert found == log


def dispatched(sizes: dict[str, int]) -> Any:
    from accelerate import DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from gemini.integrations.accelerate import GeminiAccelerator

    asked = DataLoaderConfiguration(dispatch_batches=True)
    try:
        return GeminiAccelerator(
            cpu=True, parallelism_config=ParallelismConfig(**sizes), dataloader_config=asked
        ).dataloader_config.dispatch_batches
    except ValueError as e:
        # What is refused leaves no mesh to the next accelerator of the process, whose state they share.
        raise (ValueError if getattr(AcceleratorState(), "device_mesh", None) is None else AssertionError)(
            str(e)
        ) from e
    finally:
        forget_state()


def test_batches_that_one_process_deals_out_are_refused_where_ranks_share_them(pool_of: Pools) -> None:
    assert pool_of(2).run(dispatched, {"dp_shard_size": 2}) == [True, True]
    for text in failures(pool_of(2).outcomes(dispatched, {"tp_size": 2}), "ValueError"):
        assert "dispatch_batches=True" in text
