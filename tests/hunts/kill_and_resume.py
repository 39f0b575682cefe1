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
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240
"""How long anything may take before it counts as hanging."""


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

    same: bool
    differing: tuple[str, ...]
    was_saving: bool
    others_end_s: float
    first_step_s: float
    resumed_after: int
    run_s: float


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
        return any((self.out / "checkpoints").glob(f".step-{step:08d}.new-*"))

    def wait_for(self, what: str, there: Callable[[], bool], *, pause_s: float = 0.0005) -> None:
        """Look again and again, in bounded time."""
        deadline = time.perf_counter() + PATIENCE_S
        while not there():
            if time.perf_counter() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{what}: it did not come. torchrun's last words:\n{self.last_words()}")
            time.sleep(pause_s)

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


def results_in(out: Path) -> dict[str, bytes]:
    """The model and the last checkpoint, file by file; what is left of unfinished ones counts as well."""
    last = max(path for path in (out / "checkpoints").iterdir() if path.name.startswith("step-"))
    found = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    found |= {f"{last.name}/{path.name}": path.read_bytes() for path in last.iterdir()}
    return found | {f"left over: {path.name}": b"" for path in (out / "checkpoints").glob(".*")}


def undisturbed(args: argparse.Namespace, folder: Path) -> tuple[dict[str, bytes], float]:
    """What every other run has to come to, and the seconds it took."""
    job = Job(args, folder)
    try:
        seconds = job.finish()
    finally:
        job.end()
    return results_in(job.out), seconds


def disturbed(args: argparse.Namespace, folder: Path, kill: Kill, wanted: dict[str, bytes]) -> Outcome:
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
    there = results_in(job.out)
    differing = tuple(sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name)))
    resumed_after = int(resumed[0].rpartition(" ")[2]) if resumed else 0
    return Outcome(not differing, differing, was_saving, others_end_s, first_step_s, resumed_after, run_s)


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


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0, help="draws the steps and moments of the kills")
    parser.add_argument("--out", type=Path, help="write the report here")
    return parser.parse_args()


def main() -> int:
    import torch

    args = parse()
    lines = [
        f"# Kill and resume, {time.strftime('%Y-%m-%d')}",
        "",
        f"GPT-2 shape, {args.layers} layers of {args.width}, bf16, dropout 0.1; {args.ranks} ranks on one machine, "
        f"{args.steps} steps, a checkpoint every {args.save_every}. One rank gets SIGKILL, torchrun starts all again.",
        f"{platform.system()} {platform.release()}, {processor()}, {len(os.sched_getaffinity(0))} CPUs, Python "
        f"{platform.python_version()}, torch {torch.__version__}, one thread per rank.",
        f"Command: `python {' '.join(sys.argv)}`",
        "",
        "Bits: the model's file and every file of the last checkpoint against those of the undisturbed run. The others "
        "end: from the kill until no other rank runs. First step: from the kill to the first step after the restart.",
        "",
    ]
    rows = [
        "| killed | when | was saving | went on after step | the others end, s | first step, s | run, s | bits |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    print(*lines, sep="\n")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gemini-kill-") as scratch:
        wanted, seconds = undisturbed(args, Path(scratch, "undisturbed"))
        rows.append(f"| none | | | | | | {seconds:.1f} | the measure |")
        print(*rows, sep="\n", flush=True)
        for number, kill in enumerate(kills(args)):
            outcome = disturbed(args, Path(scratch, str(number)), kill, wanted)
            outcomes.append(outcome)
            when = f"{'save of step' if kill.in_save else 'after step'} {kill.step} + {1000 * kill.delay_s:.0f} ms"
            bits = "the same" if outcome.same else "DIFFERENT: " + ", ".join(outcome.differing)
            rows.append(
                f"| rank {kill.rank} | {when} | {'yes' if outcome.was_saving else 'no'} | {outcome.resumed_after} | "
                f"{outcome.others_end_s:.2f} | {outcome.first_step_s:.1f} | {outcome.run_s:.1f} | {bits} |"
            )
            print(rows[-1], flush=True)
    num_same = sum(outcome.same for outcome in outcomes)
    verdict = [
        "",
        f"**{num_same} of {len(outcomes)}** came to the same bits; {sum(o.was_saving for o in outcomes)} kills fell "
        f"into a save. The other ranks ended within {max(o.others_end_s for o in outcomes):.2f} s.",
    ]
    print(*verdict, sep="\n")
    if args.out:
        args.out.write_text("\n".join([*lines, *rows, *verdict]) + "\n")
    return 0 if num_same == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
