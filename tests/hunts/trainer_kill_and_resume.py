"""Kills a GeminiTrainer run with SIGKILL at random moments and compares what comes out with a run nobody disturbed.

    python tests/hunts/trainer_kill_and_resume.py --out benchmarks/reports/trainer_kill_and_resume_<hardware>_<date>.md

The run is a script as users write it: transformers' Trainer with one line changed, bf16, dropout, accumulation,
clipping, a schedule, shuffled rows, evaluation, a checkpoint every few steps and ``save_total_limit``. In each
repetition its process gets SIGKILL a random moment after a random step, or (every other time) a random moment after a
save has begun. Then the same script is started again, with ``resume_from_checkpoint=True`` if there is a checkpoint.
The model's file and Gemini's part of the last checkpoint (masters, states, step counts, RNG states) must be the same
bytes as those of the undisturbed run, and nothing may be left over. The exit code is 1 unless all are the same.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.hunts.kills import PATIENCE_S, ROOT, Files, differing, hunt, make_parser, wait_for  # noqa: E402

SAVE_S = 0.15
"""Kills in a save come at most so long after its beginning; a save of the default model takes about as long."""


# ---- the script that is killed -------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """What a user would write; run in a process of its own."""
    import torch
    from gemini.integrations.huggingface import GeminiTrainer as Trainer
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    folder = args.worker

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    class Tell(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(f"begin {state.global_step}")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(f"step {state.global_step}")

    def tell(line: str) -> None:
        with open(folder / "progress", "a") as file:
            file.write(line + "\n")

    torch.manual_seed(0)
    shape = {"n_layer": args.layers, "n_embd": args.width, "n_head": 4}
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, use_cache=False, **shape)),
        args=TrainingArguments(
            output_dir=str(folder / "out"), max_steps=args.steps, save_steps=args.save_every, save_total_limit=2,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, warmup_steps=4, bf16=True,
            eval_strategy="steps", eval_steps=2 * args.save_every, use_cpu=True, report_to=[], disable_tqdm=True,
        ),
        train_dataset=Rows(),
        eval_dataset=torch.utils.data.Subset(Rows(), range(4)),
        callbacks=[Tell()],
    )  # fmt: skip
    there = (folder / "out").is_dir() and any((folder / "out").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if there else None)
    trainer.save_model(str(folder / "model"))
    tell("end")


# ---- the one who kills ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """When: a moment after ``step`` steps, or after the save of that step has begun."""

    step: int
    in_save: bool
    delay_s: float


@dataclass(frozen=True)
class Outcome:
    """What one disturbed run came to."""

    differing: tuple[str, ...]
    was_saving: bool


class Script:
    """One process of the script, its files in ``folder``."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.folder, self.out = folder, folder / "out"
        folder.mkdir(exist_ok=True)
        self.log = folder / "log"
        words = [sys.executable, __file__, "--worker", str(folder), "--steps", str(args.steps)]
        words += ["--save-every", str(args.save_every), "--layers", str(args.layers), "--width", str(args.width)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def said(self) -> list[str]:
        """The progress so far, of all processes of this run."""
        path = self.folder / "progress"
        return path.read_text().splitlines() if path.exists() else []

    def saving(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is being written now."""
        return (self.out / ".saving" / f"checkpoint-{step}").exists()

    def wait_for(self, what: str, there: Callable[[], bool]) -> None:
        wait_for(what, there, self.process, self.last_words)

    def last_words(self) -> str:
        return self.log.read_text()[-3000:]

    def finish(self) -> None:
        """Wait for the end, which must be a good one."""
        if self.process.wait(PATIENCE_S):
            raise RuntimeError(f"the script failed:\n{self.last_words()}")

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def results_in(folder: Path, steps: int) -> Files:
    """The model, the last checkpoint's weights and states, file by file; what is left over counts as well."""
    last = folder / "out" / f"checkpoint-{steps}"
    paths = [*(folder / "model").glob("*.safetensors"), *last.glob("*.safetensors"), *(last / "gemini").iterdir()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    names = sorted(path.name for path in (folder / "out").iterdir())
    return found | {f"in the folder: {name}": b"" for name in names}


def undisturbed(args: argparse.Namespace, folder: Path) -> tuple[Files, list[str]]:
    """What every other run has to come to, and its row."""
    began = time.perf_counter()
    script = Script(args, folder)
    try:
        script.finish()
    finally:
        script.kill()
    return results_in(folder, args.steps), ["never", "", "", f"{time.perf_counter() - began:.1f}"]


def disturbed(args: argparse.Namespace, folder: Path, kill: Kill, wanted: Files) -> tuple[Outcome, list[str]]:
    """Run the script, kill it, run it again, and compare."""
    began = time.perf_counter()
    script = Script(args, folder)
    try:
        if kill.in_save:
            script.wait_for(f"the save of step {kill.step}", lambda: script.saving(kill.step))
        else:
            script.wait_for(f"step {kill.step}", lambda: f"step {kill.step}" in script.said())
        time.sleep(kill.delay_s)
        was_saving = (script.out / ".saving").exists()
    finally:
        script.kill()
    script = Script(args, folder)
    try:
        script.finish()
    finally:
        script.kill()
    begins = [line.split()[1] for line in script.said() if line.startswith("begin")]
    when = f"{'in the save of' if kill.in_save else 'after'} step {kill.step}, + {1000 * kill.delay_s:.0f} ms"
    row = [when, "yes" if was_saving else "no", begins[-1], f"{time.perf_counter() - began:.1f}"]
    return Outcome(differing(results_in(folder, args.steps), wanted), was_saving), row


def kills(args: argparse.Namespace) -> Iterator[Kill]:
    """Every other one in a save; some before the first checkpoint, some in the last step."""
    rng = random.Random(args.seed)
    saves = range(args.save_every, args.steps + 1, args.save_every)
    for number in range(args.runs):
        in_save = number % 2 == 1
        step = rng.choice(saves) if in_save else rng.randrange(1, args.steps)
        yield Kill(step, in_save, rng.uniform(0, SAVE_S))


def main() -> int:
    parser = make_parser(__doc__, steps=24, save_every=4)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return 0
    import accelerate
    import transformers

    about = [
        "GeminiTrainer: kill and resume",
        f"GPT-2 shape, {args.layers} layers of {args.width}, bf16, dropout 0.1, two micro-batches per step, "
        f"{args.steps} steps, a checkpoint every {args.save_every}, two kept. The process gets SIGKILL and is started "
        f"again. transformers {transformers.__version__}, accelerate {accelerate.__version__}.",
        "Bits: the model's file and the last checkpoint's weights, masters, moments and RNG states against those of "
        "the undisturbed run.",
    ]
    columns = ["killed", "was saving", "went on after step", "both runs, s"]
    return hunt(about, columns, args.out, kills(args), partial(undisturbed, args), partial(disturbed, args))


if __name__ == "__main__":
    sys.exit(main())
