"""Kills ranks of a training job and compares what comes out, bit for bit, with a run that nobody disturbed.

    python tests/hunts/kill_and_resume.py --out benchmarks/reports/kill_and_resume_<hardware>_<date>.md

The job is the command line's own: ``torchrun --max-restarts 3 -m gemini train ... --resume auto`` on a small GPT-2 with
dropout, with a checkpoint every few steps. In each repetition one rank (they take turns) gets SIGKILL at a random step,
or a random moment after a save has begun; torchrun starts all ranks again, and they go on from the newest checkpoint by
themselves. Then the model's file and every file of the last checkpoint (masters, states, RNG states) must be
the same bytes as those of the undisturbed run, and no unfinished checkpoint may be left. Measured besides: how long
the other ranks live after the kill, and when the first step is done again. The exit code is 1 unless all are the same.
"""

from __future__ import annotations

import argparse
import json
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

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.hunts.kills import PATIENCE_S, ROOT, Files, differing, hunt, make_parser, wait_for  # noqa: E402


@dataclass(frozen=True)
class Kill:
    """Who is killed when: a moment after rank 0 has said step ``step``, or after its save has begun."""

    rank: int
    step: int
    in_save: bool
    delay_s: float


@dataclass(frozen=True)
class Outcome:
    """What one disturbed run came to."""

    differing: tuple[str, ...]
    was_saving: bool


class Job:
    """One ``torchrun`` of the training command, its files in ``folder``."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder, self.out, self.logs = folder, folder / "out", folder / "logs"
        self.num_ranks, self.num_steps = args.ranks, args.steps
        model = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_layer": args.layers, "n_head": 4}
        model |= {"n_embd": args.width, "bos_token_id": 256, "eos_token_id": 256}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model))
        (folder / "text.txt").write_text("".join(f"{n} times three is {3 * n}, they say.\n" for n in range(2000)))
        train = f"--model {folder}/config.json --data {folder}/text.txt --out {self.out} --resume auto --device cpu"
        train += f" --seq-len 64 --batch-size 2 --accumulate 2 --lr 1e-3 --warmup 4 --steps {args.steps} --log-every 1"
        train += f" --save-every {args.save_every}"
        torchrun = f"--standalone --nproc-per-node {args.ranks} --max-restarts 3 --redirects 3 --log-dir {self.logs}"
        words = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), "-m", "gemini", "train"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.began = time.perf_counter()
        with open(folder / "torchrun.log", "w") as log:
            self.process = subprocess.Popen([*words, *train.split()], cwd=ROOT, env=environment, stdout=log, stderr=log)

    def said(self, attempt: int, rank: int = 0, stream: str = "stdout") -> str:
        """What a rank has printed so far in one attempt of torchrun's."""
        found = list(self.logs.glob(f"*/attempt_{attempt}/{rank}/{stream}.log"))
        return found[0].read_text() if found else ""

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that run now."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                found[int(child.environ()["RANK"])] = child.pid
            except (psutil.Error, KeyError):
                continue
        return found

    def saving(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is being written now."""
        return (self.out / ".saving" / f"checkpoint-{step}").is_dir()

    def wait_for(self, what: str, there: Callable[[], bool], *, pause_s: float = 0.0005) -> None:
        wait_for(what, there, self.process, self.last_words, pause_s)

    def finish(self) -> float:
        """Wait for torchrun; the seconds from its start."""
        code = self.process.wait(PATIENCE_S)
        if code:
            raise RuntimeError(f"torchrun ended with {code}:\n{self.last_words()}")
        return time.perf_counter() - self.began

    def last_words(self) -> str:
        """The ends of all logs."""
        logs = [self.folder / "torchrun.log", *sorted(self.logs.rglob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())

    def end(self) -> None:
        """Leave no process behind."""
        for pid in [*self.pids().values(), self.process.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def results_in(out: Path) -> Files:
    """The model and the last checkpoint, file by file; what is left of unfinished ones counts as well."""
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    found = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    found |= {f"{last.name}/{path.name}": path.read_bytes() for path in last.rglob("*.safetensors")}
    return found | {f"left over: {path.name}": b"" for path in out.glob(".*")}


def undisturbed(args: argparse.Namespace, folder: Path) -> tuple[Files, list[str]]:
    """What every other run has to come to, and its row."""
    job = Job(args, folder)
    try:
        seconds = job.finish()
    finally:
        job.end()
    return results_in(job.out), ["none", "", "", "", "", "", f"{seconds:.1f}"]


def disturbed(args: argparse.Namespace, folder: Path, kill: Kill, wanted: Files) -> tuple[Outcome, list[str]]:
    """Run the job, kill a rank, let torchrun do its part, and compare."""
    job = Job(args, folder)
    try:
        if kill.in_save:
            job.wait_for(f"the save of step {kill.step}", lambda: job.saving(kill.step), pause_s=0.0002)
        else:
            job.wait_for(f"step {kill.step}", lambda: f"step {kill.step}/" in job.said(0))
        ranks = job.pids()
        time.sleep(kill.delay_s)
        was_saving = job.saving(kill.step)
        killed = time.perf_counter()
        os.kill(ranks[kill.rank], signal.SIGKILL)
        others = [pid for rank, pid in ranks.items() if rank != kill.rank]
        job.wait_for("the end of the other ranks", lambda: not any(map(runs, others)))
        others_end_s = time.perf_counter() - killed
        job.wait_for("a step after the restart", lambda: "\nstep " in job.said(1), pause_s=0.01)
        first_step_s = time.perf_counter() - killed
        run_s = job.finish()
        resumed = [line for line in job.said(1).splitlines() if line.startswith("resumed from ")]
    finally:
        job.end()
    resumed_after = int(resumed[0].rpartition(" ")[2]) if resumed else 0
    when = f"{'save of step' if kill.in_save else 'after step'} {kill.step} + {1000 * kill.delay_s:.0f} ms"
    row = [f"rank {kill.rank}", when, "yes" if was_saving else "no", str(resumed_after), f"{others_end_s:.2f}"]
    outcome = Outcome(differing(results_in(job.out), wanted), was_saving)
    return outcome, [*row, f"{first_step_s:.1f}", f"{run_s:.1f}"]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kills(args: argparse.Namespace) -> Iterator[Kill]:
    """Ranks take turns; after a round of kills at steps comes a round of kills in saves."""
    rng = random.Random(args.seed)
    saves = range(args.save_every, args.steps, args.save_every)
    for number in range(args.repetitions):
        in_save = number // args.ranks % 2 == 1
        step = rng.choice(saves) if in_save else rng.randrange(1, args.steps - 1)
        yield Kill(number % args.ranks, step, in_save, rng.uniform(0, 0.02 if in_save else 0.1))


def main() -> int:
    parser = make_parser(__doc__, steps=40, save_every=5)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    about = [
        "Kill and resume",
        f"GPT-2 shape, {args.layers} layers of {args.width}, bf16, dropout 0.1; {args.ranks} ranks on one machine, "
        f"{args.steps} steps, a checkpoint every {args.save_every}. One rank gets SIGKILL, torchrun starts all again.",
        "Bits: the model's file and every file of the last checkpoint against those of the undisturbed run. The others "
        "end: from the kill until no other rank runs. First step: from the kill to the first step after the restart.",
    ]
    columns = ["killed", "when", "was saving", "went on after step", "the others end, s", "first step, s", "run, s"]
    return hunt(about, columns, args.out, kills(args), partial(undisturbed, args), partial(disturbed, args))


if __name__ == "__main__":
    sys.exit(main())
