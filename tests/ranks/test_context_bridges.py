"""accelerate's ``ParallelismConfig``: sequences divided in its own loop and in the Trainer, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig

import gemini
from tests.ranks.context_cases import Case, batch, make
from tests.ranks.pool import Failure, Pool

Pools = Callable[[int], Pool]
CONFIG = gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))


def samples() -> list[dict[str, torch.Tensor]]:
    """Eight sequences, each with another number of rated tokens."""
    return [{name: value[number % 2] for name, value in batch(Case(), number).items()} for number in range(8)]


def forget_state() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def loop(sizes: dict[str, int]) -> tuple[list[float], list[float], str]:
    """accelerate's loop: norms, losses over all ranks, and the kind of attention."""
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
        return norms, losses, model._gemini_engine.config.context_attention
    finally:
        forget_state()


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("by", ["cp_size", "sp_size"])
def test_the_loop_of_accelerate(by: str, pool_of: Pools) -> None:
    norms, losses, kind = pool_of(2).run(loop, {by: 2})[0]
    one = loop({})
    assert norms == pytest.approx(one[0], rel=1e-5) and losses == pytest.approx(one[1], rel=1e-6)
    assert kind == ("ulysses" if by == "sp_size" else "auto")


def test_sizes_that_cannot_be(pool_of: Pools) -> None:
    for sizes, says in (
        ({"cp_size": 2, "dp_shard_size": 4}, "is 8, and there are 2 processes: dp_shard_size=1 would do"),
        ({"tp_size": 2}, "tp_size=2 slices the model"),
    ):
        for outcome in pool_of(2).outcomes(loop, sizes):
            assert isinstance(outcome, Failure) and outcome.kind == "ValueError" and says in outcome.text, outcome


def train(folder: str) -> list[tuple[Any, Any, Any]]:
    import transformers
    from gemini.integrations.huggingface import GeminiTrainer

    several = dist.is_initialized()
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to=[],
        save_strategy="no", logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5, eval_strategy="steps", eval_steps=2,
        train_sampling_strategy="sequential", disable_tqdm=True,
        parallelism_config=ParallelismConfig(cp_size=2) if several else None,
    )  # fmt: skip
    try:
        data: Any = samples()
        trainer = GeminiTrainer(make(Case()), arguments, train_dataset=data, eval_dataset=data, gemini_config=CONFIG)
        trainer.train()
        return [(line.get("loss"), line.get("grad_norm"), line.get("eval_loss")) for line in trainer.state.log_history]
    finally:
        forget_state()


def test_the_trainer(pool_of: Pools, tmp_path: Path) -> None:
    """Tokens are counted over gradient accumulation; evaluation has whole sequences."""
    found, other = pool_of(2).run(train, str(tmp_path / "two"), seconds=120)
    one = train(str(tmp_path / "one"))
    assert len(found) == len(one) == 4
    for line, wanted in zip(found + other, one + one, strict=True):
        for value, expected in zip(line, wanted, strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-5))
