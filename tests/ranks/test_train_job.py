"""``gemini sft`` in several processes: the same run as in one, refused, stopped and resumed as one.

What can be asked of the job itself runs on a pool of ranks; signals, deaths and what each process prints need torchrun.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from benchmarks._progress import PATIENCE, Progress, finish, run
from gemini.ranks.process_groups import fresh_part
from tests.ranks.pool import Failure, Pools

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a tiny model's config, with and without dropout, and some text."""
    model: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 2}
    model |= {"n_head": 2, "bos_token_id": 256, "eos_token_id": 256}
    (tmp_path / "dropout.json").write_text(json.dumps(model))
    model |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (tmp_path / "plain.json").write_text(json.dumps(model))
    lines = [f"{n} times two is {2 * n}.\n" for n in range(250)]
    (tmp_path / "text.txt").write_text("".join(lines)[:4000])
    text = "".join(lines)[:4000]  # rows that are full sequences of 32 with the token that ends them
    rows = [{"text": text[begin : begin + 31]} for begin in range(0, len(text), 31)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def options_of(folder: Path, **more: Any) -> dict[str, Any]:
    values = {"model_name_or_path": folder / "plain.json", "dataset_name": folder / "text.txt", "max_length": 16}
    values |= {"learning_rate": 4e-3, "bf16": False, "max_steps": 10, "save_strategy": "no", "logging_steps": 1}
    values |= {"lr_scheduler_type": "constant", "gradient_checkpointing": False, "use_cpu": True, "weight_decay": 0.1}
    values |= {"per_device_train_batch_size": 1, "packing": "chats" not in str(more.get("dataset_name", ""))}
    return values | {"packing_strategy": "wrapped", "adam_beta2": 0.95} | more


def every(steps: int, keep: int = 2) -> dict[str, Any]:
    """A checkpoint every so many steps."""
    return {"save_strategy": "steps", "save_steps": steps, "save_total_limit": keep}


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Any]
    output: str
    state: dict[str, Any]


def train_here(options: dict[str, Any], of_rank: dict[int, dict[str, Any]] | None = None) -> Trained:
    """A whole run in this process, or with the other ranks of its pool. ``of_rank``: what a rank has otherwise."""
    import torch.distributed as dist

    from gemini.jobs.train import Run, join
    from gemini.jobs.train_options import Parser, options_of

    rank = dist.get_rank() if dist.is_initialized() else 0
    output = io.StringIO()
    with join(60, cuda=False) as wire:
        given = options | (of_rank or {}).get(rank, {})
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        asked = options_of(Parser("sft").read(words), wire.size)
        run = Run(asked, Console(file=output, markup=False, soft_wrap=True), wire)
        run.steps()
        rows, begun_at = run.trainer.state.log_history, run.position.begun_at
        losses = [row["loss"] for row in rows if "loss" in row and row["step"] > begun_at]
        names = [name for name, _ in run.model.named_parameters()]
        weights = {name: run.model.full_param(name) for name in names}
        return Trained(losses, weights, output.getvalue(), run.position.identity)


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the run ---------------------------------------------------------------------------------------------------------


def moe(folder: Path) -> Path:
    model = {"model_type": "qwen3_moe", "vocab_size": 258, "hidden_size": 32, "moe_intermediate_size": 16}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model |= {"num_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 256, "eos_token_id": 256}
    (folder / "moe.json").write_text(json.dumps(model))
    return folder / "moe.json"


def chats(folder: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n * n}" + n % 5 * "."}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "chats.jsonl"


MESHES = [
    ("moe", {"ep": 2}, "text.jsonl"),
    pytest.param("moe", {"tp": 2}, "text.jsonl", marks=pytest.mark.slow),
    pytest.param("plain", {"cp": 2}, "chats.jsonl", marks=pytest.mark.slow),
    pytest.param("moe", {"tp": 2, "cp": 2}, "chats.jsonl", marks=pytest.mark.slow),
    pytest.param("moe", {"ep": 2, "replicas": 2}, "text.jsonl", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "data"), MESHES, ids=str)
def test_a_mesh_trains_as_one_process(
    model: str, mesh: dict[str, int], data: str, pool_of: Pools, folder: Path
) -> None:
    """Layers in slices, sequences in parts, experts apart: losses, weights and evaluations agree within rounding, and
    one process goes on from the checkpoint of a mesh.
    """
    chats(folder)
    moe(folder)
    size, batch = math.prod(mesh.values()), mesh.get("ep", 1) * mesh.get("replicas", 1)
    options = options_of(
        folder, model_name_or_path=folder / f"{model}.json", dataset_name=folder / data, test_split_size=5
    )
    options |= {"max_length": 32, "gradient_accumulation_steps": 2, "max_steps": 6, **every(3, 9)}
    options |= {"eval_strategy": "steps", "eval_steps": 3}
    if mesh.keys() & {"ep", "cp"}:  # the loss for the balance of experts is of each rank's own tokens (docs/ranks.md)
        options["router_aux_loss_coef"] = 0.0
    one = train_here(options | {"per_device_train_batch_size": 4, "output_dir": folder / "one"})
    several = pool_of(size).run(
        train_here, options | mesh | {"per_device_train_batch_size": 4 // batch, "output_dir": folder / "mesh"}
    )
    for rank in several:
        assert rank.losses == pytest.approx(one.losses, rel=1e-5) and rank.state == one.state
        for name, weight in one.weights.items():
            assert (rank.weights[name] - weight).abs().max() < 1e-4, name
    found = [metrics(folder / out, "eval_loss") for out in ("one", "mesh")]
    assert len(found[0]) == 2 and (batch > 1 or found[1] == pytest.approx(found[0], rel=1e-5))
    norms = [metrics(folder / out, "grad_norm") for out in ("one", "mesh")]  # Adam and clipping hide a factor
    assert len(norms[0]) == 6 and norms[1] == pytest.approx(norms[0], rel=1e-4)
    resume = {"per_device_train_batch_size": 4, "output_dir": folder / "rest"}
    resume |= {"resume_from_checkpoint": folder / "mesh" / "checkpoint-3"}
    assert train_here(options | resume).losses == pytest.approx(one.losses[3:], rel=1e-5)


def metrics(out: Path, name: str) -> list[float]:
    rows = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    return [row[name] for row in rows if name in row]


def test_a_plan_of_two_ranks_runs_in_the_memory_that_it_was_made_for(pool_of: Pools, folder: Path) -> None:
    """Its budgets are of one rank, those of a job of all on a machine."""
    from gemini.cli import app

    made, sizes = str(folder / "plan.json"), ("--gpus", "2", "--cpu", "8MiB", "--seq-len", "16", "--precision", "fp32")
    assert app(["plan", str(folder / "plain.json"), "--compute", "cpu", *sizes, "--out", made]) == 0
    pool_of(2).run(train_here, options_of(folder, plan=made, max_steps=1, output_dir=folder / "out"))


def test_meshes_that_cannot_be(pool_of: Pools, folder: Path) -> None:
    for more, says in (
        ({"tp": 3}, "--tp 3 takes 3 processes or a multiple of that, and there are 2"),
        (
            {"tp": 2, "model_name_or_path": folder / "plain.json"},
            "257 elements along dim 0, which is not a multiple of 2",
        ),
        ({"ep": 2}, "has no plan of transformers for dividing experts"),
    ):
        outcomes = pool_of(2).outcomes(train_here, options_of(folder, output_dir=folder / "out") | more)
        assert all(isinstance(outcome, Failure) and outcome.kind == "JobError" for outcome in outcomes), outcomes
        assert says in outcomes[0].text, outcomes[0].text


def test_a_rule_of_whole_params_trains_in_replicas(pool_of: Pools, folder: Path) -> None:
    """As in one process with their batches together."""
    options = options_of(folder, optimizer="muon", max_steps=3)
    two = pool_of(2).run(train_here, options | {"replicas": 2, "output_dir": folder / "two"})
    one = train_here(options | {"per_device_train_batch_size": 2, "output_dir": folder / "one"})
    assert two[0].losses == pytest.approx(one.losses, rel=1e-5)


def deal_out(folder: Path) -> None:
    """A model for a rule of whole params, dealt out to ranks that divide them."""
    from gemini.jobs.train import Run, join
    from gemini.jobs.train_options import Parser
    from gemini.jobs.train_options import options_of as read
    from gemini.planning.rules import rule_named

    given = options_of(folder, output_dir=folder / "out")
    with join(60, cuda=False) as wire:
        asked = read(
            Parser("sft").read([word for name, value in given.items() for word in (f"--{name}", str(value))]), 2
        )
        asked = asked._replace(config=replace(asked.config, optimizer=rule_named("muon")))
        Run(asked, Console(quiet=True), wire)


def test_what_cannot_be_dealt_out_is_refused_without_a_mesh_too(pool_of: Pools, folder: Path) -> None:
    for outcome in pool_of(2).outcomes(deal_out, folder):
        assert isinstance(outcome, Failure) and outcome.kind == "JobError", outcome
        assert "The model cannot be dealt out: the rule 'Muon' updates whole params" in outcome.text


def one_wish() -> list[bool]:
    """Of the second of two ranks, to stop after the second step."""
    import torch.distributed as dist
    from gemini.integrations.callbacks import StopCallback

    stop, control, heeded = StopCallback(), SimpleNamespace(should_save=False), []
    stop.on_train_begin(None, None, control)
    for wanted in (False, True):
        stop.wanted = wanted and dist.get_rank() == 1
        stop.on_step_end(None, None, control)
        heeded += [stop.heeded, control.should_save]
    return heeded


def test_the_wish_of_one_rank_stops_all_in_a_script(pool_of: Pools) -> None:
    assert pool_of(2).run(one_wish) == [[False, False, True, True]] * 2


def test_dropout_differs_between_ranks(pool_of: Pools, folder: Path) -> None:
    """On one text of one window, all that ranks can differ in is dropout."""
    (folder / "one.txt").write_text("a text of 15 b.")
    options = options_of(folder, dataset_name=folder / "one.txt", max_steps=1, learning_rate=0.0)
    options["output_dir"] = folder / "out"
    with_dropout = pool_of(2).run(train_here, options | {"model_name_or_path": folder / "dropout.json"})
    alone = train_here(options | {"model_name_or_path": folder / "dropout.json"})
    assert with_dropout[0].losses == with_dropout[1].losses
    assert abs(with_dropout[0].losses[0] - alone.losses[0]) > 1e-4, "two times the same dropout has the same mean"
    without = pool_of(2).run(train_here, options)
    assert without[0].losses == pytest.approx(train_here(options).losses, rel=1e-6)


def test_a_resumed_run_is_the_uninterrupted_run(pool_of: Pools, folder: Path) -> None:
    """Dropout of every rank, accumulation and the order of the text included."""
    options = options_of(folder, model_name_or_path=folder / "dropout.json", bf16=True, **every(4, 9))
    options["gradient_accumulation_steps"] = 2
    whole = pool_of(2).run(train_here, options | {"output_dir": folder / "whole"})
    resume = str(folder / "whole" / "checkpoint-4")
    rest = pool_of(2).run(train_here, options | {"output_dir": folder / "rest", "resume_from_checkpoint": resume})
    assert rest[0].losses == whole[0].losses[4:]
    assert same_weights(rest[0].weights, whole[0].weights)


def test_a_run_goes_on_with_another_number_of_ranks(pool_of: Pools, folder: Path) -> None:
    """With as many windows in a step the run is the same within rounding, from one to two ranks and back."""
    options = options_of(folder, **every(4), output_dir=folder / "out")
    whole = train_here(options | {"per_device_train_batch_size": 4, "output_dir": folder / "whole", "max_steps": 12})
    losses = []
    for ranks, steps in ((1, 4), (2, 8), (1, 12)):
        more = options | {
            "per_device_train_batch_size": 4 // ranks,
            "max_steps": steps,
            "resume_from_checkpoint": "auto",
        }
        losses += (pool_of(2).run(train_here, more)[0] if ranks == 2 else train_here(more)).losses
    assert losses == pytest.approx(whole.losses, rel=1e-5) and len(losses) == 12


def test_a_run_that_explodes_stops_on_all_ranks_with_a_checkpoint(pool_of: Pools, folder: Path) -> None:
    options = options_of(folder, bf16=True, learning_rate=1e30, max_steps=100, output_dir=folder / "out")
    outcomes = pool_of(2).outcomes(train_here, options, seconds=60)
    assert all("The gradients of step 2 hold inf or NaN" in outcome.text for outcome in outcomes), outcomes
    assert [path.name for path in (folder / "out").glob("checkpoint-*")] == ["checkpoint-1"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_other_text_on_another_rank_is_refused(pool_of: Pools, folder: Path) -> None:
    (folder / "other.txt").write_text("other text " * 400)
    other = {"dataset_name": folder / "other.txt"}
    outcomes = pool_of(2).outcomes(train_here, options_of(folder, output_dir=folder / "out"), {1: other}, seconds=60)
    assert [outcome.kind for outcome in outcomes] == ["JobError"] * 2
    assert all("--dataset_name: rank 1 has other data than rank 0: " in outcome.text for outcome in outcomes)
    # Nobody is left waiting: the same ranks go on to the next job.
    pool_of(2).run(train_here, options_of(folder, max_steps=1, output_dir=folder / "out"))


def test_rank_0_chooses_where_to_go_on(pool_of: Pools, folder: Path) -> None:
    """Also for a rank that was given another folder."""
    options = options_of(folder, **every(4), output_dir=folder / "out")
    pool_of(2).run(train_here, options)
    elsewhere = {1: {"output_dir": folder / "elsewhere"}}
    (folder / "elsewhere" / "checkpoint-99").mkdir(parents=True)
    more = options | {"resume_from_checkpoint": "auto", "max_steps": 11, "save_strategy": "no"}
    runs = pool_of(2).run(train_here, more, elsewhere)
    assert [len(run.losses) for run in runs] == [1, 1]


def test_each_attempt_meets_in_a_part_of_the_store_of_its_own() -> None:
    """The store of torchrun keeps what dead processes wrote, greetings included."""
    import torch.distributed as dist

    store, timeout = dist.HashStore(), timedelta(seconds=20)
    for _attempt in range(3):
        parts: dict[int, Any] = {}

        def meet(rank: int, into: dict[int, Any] = parts) -> None:
            into[rank] = fresh_part(store, rank, 3, timeout)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 2, 1)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # rank 0 sees the greetings of the last attempt first
        for thread in threads:
            thread.join(PATIENCE)
        assert not parts[1].check(["address"]), "nothing of an earlier attempt"
        parts[0].set("address", "here")
        assert parts[1].get("address") == parts[2].get("address") == b"here"
    with pytest.raises(RuntimeError, match="after 0 s there is still no rank 1, 2"):
        fresh_part(store, 0, 3, timedelta(seconds=0.1))


# ---- under torchrun --------------------------------------------------------------------------------------------------


class Torchrun:
    """``torchrun -m gemini sft`` with two ranks, what each prints in a file of its own."""

    def __init__(self, folder: Path, *more: object, config: str = "plain.json", program: str = "-m gemini") -> None:
        self._logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
        torchrun = f"--standalone --nproc-per-node 2 --redirects 3 --log-dir {self._logs} {program} sft"
        given = options_of(folder, model_name_or_path=folder / config, ddp_timeout=60)
        words = " ".join(f"--{name} {value}" for name, value in given.items())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), *words.split(), *map(str, more)],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def said(self, rank: int, stream: str) -> str:
        found = sorted(self._logs.glob(f"*/attempt_*/{rank}/{stream}.log"))
        return "".join(path.read_text() for path in found)

    def wait_for(self, words: str, seconds: float = 240) -> None:
        progress = Progress([self.process.pid], "torchrun", patience=seconds)
        while words not in self.said(0, "stdout"):
            assert self.process.poll() is None, self.everything()
            progress.check()
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        import psutil

        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if child.environ().get("RANK") == str(rank))

    def end(self, seconds: float = 240) -> str:
        """What torchrun itself has to say at the end."""
        return finish(self.process, patience=seconds)[0]

    def everything(self) -> str:
        logs = [f"rank {rank} {name}: {self.said(rank, name)}" for rank in (0, 1) for name in ("stdout", "stderr")]
        return "\n".join(logs)


@contextmanager
def torchrun(folder: Path, *more: object, **how: Any) -> Iterator[Torchrun]:
    job = Torchrun(folder, *more, **how)
    try:
        yield job
    finally:
        import psutil

        if job.process.poll() is None:
            for process in [*psutil.Process(job.process.pid).children(), job.process]:
                process.kill()
        job.process.communicate()


@pytest.mark.slow
def test_a_refusal_of_all_is_printed_once(folder: Path) -> None:
    """By the budget, which no rank knows before the model is there."""
    with torchrun(folder, "--output_dir", folder / "out", "--cpu_memory", "100KiB") as job:
        report = job.end()
        assert job.process.returncode != 0 and "exitcode  : 2" in report, report
        first, second = job.said(0, "stderr"), job.said(1, "stderr")
        assert first.startswith("gemini: ") and "KiB" in first and "KiB" not in report, report + job.everything()
        assert second == "" and job.said(1, "stdout") == "" and "Traceback" not in first


@pytest.mark.slow
def test_what_one_rank_cannot_find_stands_in_the_report(folder: Path) -> None:
    """Of torchrun, which ends the other one."""
    wrapper = folder / "wrapper.py"
    wrapper.write_text(
        "import os, sys\nfrom gemini.cli import main\n"
        f"sys.argv += ['--dataset_name', {str(folder / 'absent.txt')!r}] if os.environ['RANK'] == '1' else []\n"
        "raise SystemExit(main())\n"
    )
    with torchrun(folder, "--output_dir", folder / "out", program=str(wrapper)) as job:
        report = job.end()
        assert job.process.returncode != 0 and "exitcode  : 2" in report, report + job.everything()
        assert f"--dataset_name {folder / 'absent.txt'}: there is no such file or folder" in report, report
        assert job.said(1, "stderr") == "" and "Traceback" not in job.said(0, "stderr")


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "number"), [("rank 1", signal.SIGTERM), ("torchrun", signal.SIGINT)])
def test_a_wish_to_stop_stops_all_after_the_same_step(
    pool_of: Pools, folder: Path, whom: str, number: signal.Signals
) -> None:
    out, steps = folder / "out", 400
    with torchrun(folder, "--output_dir", out, "--max_steps", steps, config="dropout.json") as job:
        job.wait_for("\nstep 3/")
        os.kill(job.pid(1) if whom == "rank 1" else job.process.pid, number)
        report = job.end()
        said, errors = job.said(0, "stdout"), job.said(0, "stderr") + job.said(1, "stderr")
    stopped = re.search(rf"^Stopped after step (\d+) of {steps}\. To go on: (.*)$", said, re.MULTILINE)
    assert stopped is not None, said + errors + report
    step = int(stopped[1])
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert stopped[2].startswith("torchrun, as before, -m gemini sft --model_name_or_path")
    assert stopped[2].endswith("--resume_from_checkpoint auto")
    assert "Traceback" not in errors and "rank 0 " not in errors, errors
    if whom == "rank 1":
        assert "Another rank was asked to stop" in said and "exitcode  : 130" in report
    else:
        assert errors.count("Stopping after this step") == 1

    options = options_of(folder, model_name_or_path=folder / "dropout.json", max_steps=step + 2)
    options["output_dir"] = folder / "whole"
    whole = pool_of(2).run(train_here, options)
    rest = pool_of(2).run(train_here, options | {"output_dir": out, "resume_from_checkpoint": "auto"})
    assert len(rest[0].losses) == 2 and rest[0].losses == whole[0].losses[step:]
    assert same_weights(rest[0].weights, whole[0].weights)


@pytest.mark.slow
def test_killed_ranks_change_no_bit() -> None:
    """Two repetitions of the hunt: one rank killed at a step, the other during a save."""
    script = [sys.executable, "tests/hunts/kill_and_resume.py", "--repetitions", "2", "--steps", "20", "--width", "64"]
    result = run(script, cwd=ROOT, patience=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "**2 of 2** came to the same bits" in result.stdout
