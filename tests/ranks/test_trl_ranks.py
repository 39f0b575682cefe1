"""TRL's trainers in two processes: the figures of the stock ones under DDP, and all models in one budget."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.pool import Pools

ALL = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation")
ONLINE = ("GRPO", "RLOO", "Distillation")


def train(kind: str, lora: bool, folder: Path, managed: bool, again: bool = False) -> dict[str, Any]:
    """On every rank: three steps, or ``again`` the last one of them from a checkpoint; what was logged, how long
    answers were here and, of managed models, what each holds.
    """
    import peft

    from tests.integrations import test_trl_beside as cases
    from tests.integrations.trainer_cases import masters
    from tests.world import is_managed, world_of

    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2} if managed else {}
    if kind in ("GRPO", "RLOO"):
        how["model"] = str(folder / "policy")
    if kind in ONLINE:
        # Of three tokens one ends an answer: ranks generate other numbers of them.
        how["generation_kwargs"] = {"suppress_tokens": [*range(2), *range(5, 96)]}
    if lora:
        task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
        how["peft_config"] = peft.LoraConfig(**{**cases.LORA, "task_type": task})
    memory = cases.budget(folder, shared=False, cpu="2MiB") if managed else None
    trainer, record = cases.make(kind, folder / str(managed), managed, memory, **how)
    lengths = list[int]()
    if kind in ONLINE:
        generate = trainer._generate_single_turn

        def counting(*args: Any, **kwargs: Any) -> Any:
            answers = generate(*args, **kwargs)
            lengths.append(max(map(len, answers[0] if isinstance(answers, tuple) else answers)))
            return answers

        trainer._generate_single_turn = counting
    trainer.train(resume_from_checkpoint=again)
    found: dict[str, Any] = {"logs": record.logs, "lengths": lengths}
    if not managed:
        return found
    beside = cases.beside(trainer)
    assert all(is_managed(model) for model in beside)
    held = []
    for model in (trainer.model, *beside):
        world = world_of(model)
        world.check()
        assert all(world.peak(tier) <= world.budget(tier) for tier in world.tiers)
        weights = sum(world.held(tier, "weights") for tier in world.tiers)
        held.append((weights, 4 * sum(chunk.numel for chunk in world.layout.chunks)))
    for row in world_of(trainer.model).config.memory.report().values() if beside else ():
        assert row["peak"] <= row["budget"]
    return {**found, "masters": masters(trainer.model), "held": held}


def train_all(asked: tuple[tuple[str, bool], ...], folder: str) -> list[tuple[Any, Any, Any]]:
    """Of each trainer: the stock one, ours, and ours from the checkpoint after two steps."""
    found = []
    for kind, lora in asked:
        own = Path(folder) / f"{kind}-{lora}"
        stock, ours = (train(kind, lora, own, managed) for managed in (False, True))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0 and (own / "True" / "checkpoint-3").is_dir():
            shutil.rmtree(own / "True" / "checkpoint-3")
        torch.distributed.barrier()
        found.append((stock, ours, train(kind, lora, own, True, again=True)))
    return found


CHOSEN = (("GRPO", False),)
OTHERS = tuple((kind, lora) for kind in ALL for lora in (False, True) if (kind, lora) not in CHOSEN)


@pytest.mark.parametrize(
    "asked", [pytest.param(CHOSEN, id="grpo"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_two_ranks_have_the_figures_of_the_stock_trainer(
    asked: tuple[tuple[str, bool], ...], pool_of: Pools, tmp_path: Path
) -> None:
    """Losses, norms, rewards; each rank holds half of every model. A resumed run has the same bits."""
    from tests.integrations.test_trl_beside import saved

    for kind, lora in asked:
        own = tmp_path / f"{kind}-{lora}"
        own.mkdir()
        if kind in ("GRPO", "RLOO"):
            saved(own / "policy")
    for which, one, two in zip(asked, *pool_of(2).run(train_all, asked, str(tmp_path), seconds=300), strict=True):
        stock, ours, again = one
        keys = {key for logs in stock["logs"] for key, value in logs.items() if isinstance(value, float)}
        keys -= {key for key in keys if "runtime" in key or "per_second" in key or "time" in key}
        assert {"loss", "grad_norm"} < keys, which
        for key in keys:
            wanted, found = ([logs[key] for logs in run["logs"] if key in logs] for run in (stock, ours))
            assert found == pytest.approx(wanted, rel=5e-4, abs=5e-5), (which, key)
        for number, run in enumerate((again, *two[1:])):
            for name, value in ours["masters"].items():
                assert torch.equal(value, run["masters"][name]), (which, number, name)
        for run in (*one[1:], *two[1:]):
            assert all(weights == whole // 2 for weights, whole in run["held"]), (which, run["held"])
        if which[0] in ONLINE:
            assert ours["lengths"] != two[1]["lengths"], which


def judge(kind: str, folder: str) -> list[float]:
    """On every rank: two steps whose reward is a function that asks the reference, on rank 1 more often."""
    from tests.integrations import test_trl_beside as cases

    own, times = Path(folder), 1 + 3 * torch.distributed.get_rank()

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        for number in range(times):
            trainer.ref_model(input_ids=torch.full((1, 4 + number), 3))
        return [float(len(completion)) for completion in completions]

    memory = cases.budget(own, shared=False, cpu="2MiB")
    how = {"model": str(own / "policy"), "reward_funcs": [reward], "reward_processing_classes": None, "max_steps": 2}
    trainer, record = cases.make(kind, own / "judged", True, memory, **how)
    trainer.train()
    return record.of("reward")  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["GRPO", pytest.param("RLOO", marks=pytest.mark.slow)])
def test_a_reward_may_ask_a_model_more_often_on_one_rank(kind: str, pool_of: Pools, tmp_path: Path) -> None:
    """What TRL gathers without the accelerator waits too until all have ended in the model."""
    from tests.integrations.test_trl_beside import saved

    saved(tmp_path / "policy")
    one, two = pool_of(2).run(judge, kind, str(tmp_path), seconds=100)
    assert one == two and len(one) == 2
