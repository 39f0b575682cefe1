"""Trainer(devices=2): Lightning starts the second process, both share the model, and the bits are the plain loop's."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from lightning_cases import Tiny, alone, assert_same, clean_environment, config, loader, state_of, trainer  # noqa: F401

from benchmarks._progress import run

HERE = Path(__file__).resolve()
pytestmark = pytest.mark.slow  # two processes that import Lightning


@pytest.fixture(scope="module")
def job(tmp_path_factory: Any) -> Any:
    out = tmp_path_factory.mktemp("ranks")
    done = run(
        [sys.executable, str(HERE.with_name("lightning_cases.py")), str(out)], cwd=HERE.parents[2],
        env=clean_environment() | {"PYTHONPATH": str(HERE.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out, [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


def test_importing_alone_makes_the_name_known(job: Any) -> None:
    assert not job[1][0]["known before"]


def test_two_ranks_are_the_plain_loop_of_two(job: Any) -> None:
    """Accumulation inside no_sync, clipping, schedule; each rank has its own data."""
    first, second = job[1]
    assert first["losses"] != second["losses"]
    assert_same(first["lightning"], first["plain"])
    assert_same(second["lightning"], first["lightning"])


def test_one_rank_alone_may_look_at_the_norm_of_the_step_to_come(job: Any) -> None:
    first, second = job[1]
    assert first["norms"] == first["plain norms"] and len(set(first["norms"])) == 6 and not second["norms"]


def test_the_optimizer_of_each_rank_is_the_one_that_was_made(job: Any) -> None:
    assert all(rank["names"] == ["AdamW"] and rank["hooks"] == 6 for rank in job[1])


def test_backwards_of_an_accumulation_reduce_nothing_unless_told_to(job: Any) -> None:
    out, (first, _) = job
    assert (first["blocked"], first["blocked often"]) == (6, 0)
    half = torch.load(out / "two.ckpt")["state_dict"]
    for name, value in half.items():
        assert torch.allclose(first["often"][f"master/{name}"], value, atol=1e-3), name


def test_two_ranks_resume(job: Any) -> None:
    for rank in job[1]:
        assert_same(rank["resumed"], rank["lightning"])
        assert rank["resumed losses"] == rank["losses"][6:]


def test_two_ranks_end_with_the_averages_of_a_callback(job: Any) -> None:
    """Bit for bit those of the loop by hand with the same rule."""
    first, second = job[1]
    assert_same(second["averaged"], first["averaged"])
    for name, value in first["averaged by hand"].items():
        if name != "seen":
            assert torch.equal(first["averaged"][f"master/{name}"], value), name
            assert not torch.equal(value, first["half"][f"master/{name}"]), name


def test_ranks_may_ask_the_model_more_or_less_often(job: Any) -> None:
    """Before Lightning's own collectives all wait until they have ended in the model."""
    assert job[1][0]["asked"] == job[1][1]["asked"] > 0


def test_one_file_for_any_number_of_ranks(job: Any) -> None:
    out, (first, _) = job
    module = Tiny()
    run = trainer(GeminiStrategy(config("bf16")), max_epochs=1)
    run.fit(module, loader(), ckpt_path=out / "two.ckpt")
    assert run.global_step == 3 and not module.losses
    half = torch.load(out / "two.ckpt")["state_dict"]
    assert_same({f"master/{name}": value for name, value in half.items()},
                {name: value for name, value in state_of(module).items() if name.startswith("master")})  # fmt: skip
    assert state_of(module)["step/scale"] == 3 and first["lightning"]["step/scale"] == 6


def test_a_write_that_fails_is_reports_to_all(job: Any) -> None:
    first, second = job[1]
    assert "could not save" in first["refusal 0"]
    assert "rank 0 refused Trainer.save_checkpoint" in second["refusal 1"]
