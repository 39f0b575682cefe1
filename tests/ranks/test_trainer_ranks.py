"""Trainer and Accelerate in two processes: the contract of one process with the whole batch, and nothing hangs."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from gemini.errors import GeminiError
from tests.ranks.pool import Failure, Pools

STEPS = 4


def train(folder: str, num_rows: int, source: Any = None) -> dict[str, Any]:
    """On every rank: train, save twice, evaluate, take the best model, save it; what came out."""
    from tests.integrations.trainer_cases import Sentences, make, masters

    trainer, record = make(
        folder, eval_dataset=Sentences(8), per_device_train_batch_size=num_rows, max_steps=STEPS, save_steps=2,
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_total_limit=2,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=source)
    metrics = trainer.evaluate()
    trainer.save_model(f"{folder}/out")
    return {
        "loss": record.of("loss"), "grad_norm": record.of("grad_norm"), "eval": metrics["eval_loss"],
        "masters": masters(trainer.model),
        "best": trainer.state.best_model_checkpoint, "sent": trainer.model.memory_report().get("sent"),
    }  # fmt: skip


def train_beside(folder: str, num_rows: int) -> dict[str, Any]:
    """On every rank: DPO with a reference that follows the policy; what came out, and what the reference holds here."""
    from tests.integrations.test_trl_beside import budget, make
    from tests.integrations.trainer_cases import masters
    from tests.world import world_of

    Path(folder).mkdir(exist_ok=True)
    trainer, record = make(
        "DPO", Path(folder), True, budget(Path(folder), False, "2MiB"), per_device_train_batch_size=num_rows,
        sync_ref_model=True, ref_model_sync_steps=1,
    )  # fmt: skip
    trainer.train()
    world = world_of(trainer.ref_model)
    held = sum(world.held(tier, "weights") for tier in world.tiers)
    return {
        "loss": record.of("loss"), "masters": masters(trainer.model), "held": held,
        "whole": 4 * sum(chunk.numel for chunk in world.layout.chunks), "reference": masters(trainer.ref_model),
    }  # fmt: skip


def lose_a_rank(folder: str, where: str) -> None:
    """Rank 1 ends where the Trainer's own code is about to ask all ranks for something."""
    from tests.integrations.trainer_cases import Sentences, make

    trainer, _ = make(folder, eval_dataset=Sentences(8), max_steps=3)
    asked = trainer.accelerator if where == "gather" else trainer
    theirs = getattr(asked, where)

    def end(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 1 and trainer.state.global_step == (1 if where == "gather" else 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return theirs(*args, **kwargs)

    setattr(asked, where, end)
    trainer.train()
    trainer.evaluate()


class Bigram(nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 96)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids[:, :-1])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())}


def train_bigram(folder: str) -> torch.Tensor:
    from tests.integrations.trainer_cases import make

    torch.manual_seed(0)
    trainer, _ = make(folder, model=Bigram(), max_steps=2, save_steps=1, per_device_train_batch_size=1)
    trainer.train()
    assert torch.distributed.get_rank() == trainer.args.process_index
    try:
        trainer.save_model(f"{folder}/checkpoint-1/trainer_state.json/nowhere")  # below a file
    except (OSError, GeminiError) as e:
        assert "trainer_state.json" in str(e)
    else:
        raise AssertionError("it cannot be written")
    return trainer.model.full_param("table.weight")


def loop(folder: str) -> list[float]:
    """accelerate's own loop, its state saved and loaded."""
    from gemini.integrations.accelerate import GeminiAccelerator
    from torch.utils.data import DataLoader

    from tests.integrations.trainer_cases import Sentences, llama, masters

    accelerator = GeminiAccelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Sentences(16), batch_size=1))

    def epoch() -> list[float]:
        norms = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        return norms

    first = epoch()
    accelerator.save_state(folder)
    second, ended = epoch(), masters(model)
    accelerator.load_state(folder)
    assert epoch() == second and first != second
    assert all(torch.equal(value, ended[name]) for name, value in masters(model).items())
    accelerator.save_model(model, f"{folder}/model")
    return first + second


def generate_apart(folder: str) -> tuple[list[int], int]:
    """One rank generates longer than the other one, which waits in a collective of accelerate meanwhile."""
    from gemini.integrations.accelerate import GeminiAccelerator

    import gemini
    from tests.integrations.trainer_cases import llama

    memory = gemini.MemoryBudget(cpu="560KiB", nvme="16MiB", nvme_path=folder)
    accelerator = GeminiAccelerator(cpu=True, gemini_config=gemini.GeminiConfig(memory=memory, max_chunk=4096))
    model, rank, ids = accelerator.prepare(llama()), accelerator.process_index, torch.tensor([[5, 9, 2]])
    found = []
    for length in (2 + 6 * rank, 8 - 6 * rank):
        with torch.no_grad():
            found.append(model.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=None))
        lengths = accelerator.gather(torch.tensor([found[-1].shape[1]])).tolist()
    return lengths, accelerator.pad_across_processes(found[0], dim=1).shape[1]


def test_a_trainer_of_two_ranks(pool_of: Pools, tmp_path: Path) -> None:
    """The whole batch in one process, within rounding; equal bits on both ranks; saving that ends; an exact resume."""
    folder = tmp_path / "two"
    one, two = pool_of(2).run(train, str(folder), 1, seconds=120)
    whole = train(str(tmp_path / "one"), 2)
    assert one["loss"] == pytest.approx(whole["loss"], rel=2e-5)
    assert one["grad_norm"] == two["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-5)
    assert one["eval"] == two["eval"] == pytest.approx(whole["eval"], rel=2e-5)
    assert max(one["grad_norm"]) > 0.5, "clipping was to bite"
    for name, value in one["masters"].items():
        assert torch.equal(value, two["masters"][name]), name
        torch.testing.assert_close(value, whole["masters"][name], rtol=1e-3, atol=2e-5)
    assert one["sent"]["reduce_scatter"] > 0 and one["best"] == two["best"] == str(folder / "checkpoint-4")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-4", "out"]
    out = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert all(torch.equal(param, one["masters"][name]) for name, param in out.named_parameters())
    shutil.rmtree(folder / "checkpoint-4")
    for rank, again in enumerate(pool_of(2).run(train, str(folder), 1, True, seconds=120)):
        assert again["grad_norm"] == one["grad_norm"][2:], rank
        assert all(torch.equal(value, again["masters"][name]) for name, value in one["masters"].items())


def test_a_model_that_is_not_of_transformers_is_saved_too(pool_of: Pools, tmp_path: Path) -> None:
    """And what one rank cannot write is raised on both."""
    one, two = pool_of(2).run(train_bigram, str(tmp_path / "run"), seconds=60)
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert torch.equal(saved["table.weight"], one) and torch.equal(one, two)


def test_a_plain_loop_of_two_ranks(pool_of: Pools, tmp_path: Path) -> None:
    one, two = pool_of(2).run(loop, str(tmp_path / "state"), seconds=120)
    assert one == two


def test_a_rank_that_waits_in_a_collective_serves_who_generates_longer(pool_of: Pools, tmp_path: Path) -> None:
    assert pool_of(2).run(generate_apart, str(tmp_path), seconds=120) == [([11, 5], 11)] * 2


@pytest.mark.parametrize("where", ["gather", "gather_function"])
def test_a_rank_is_lost_in_a_collective_of_the_trainer(where: str, pool_of: Pools, tmp_path: Path) -> None:
    """While tokens are counted in training, and while losses are gathered in evaluation."""
    other, died = pool_of(2).outcomes(lose_a_rank, str(tmp_path), where)
    assert isinstance(died, Failure) and died.kind == "Died"
    assert isinstance(other, Failure) and other.kind == "RankLost", other
    assert "rank 1 did not answer during a collective of the Trainer" in other.text


@pytest.mark.slow
def test_a_reference_is_divided_among_two_ranks(pool_of: Pools, tmp_path: Path) -> None:
    one, two = pool_of(2).run(train_beside, str(tmp_path / "two"), 1, seconds=120)
    whole = train_beside(str(tmp_path / "one"), 2)
    assert one["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert one["held"] == two["held"] == one["whole"] // 2 and whole["held"] == whole["whole"]
    for kind in ("masters", "reference"):
        for name, value in one[kind].items():
            assert torch.equal(value, two[kind][name]), name
            torch.testing.assert_close(value, whole[kind][name], rtol=2e-3, atol=1e-4)
