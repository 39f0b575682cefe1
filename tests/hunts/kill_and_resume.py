"""Kills training runs with SIGKILL and compares what comes out, bit for bit, with a run that nobody disturbed.

    python tests/hunts/kill_and_resume.py --out benchmarks/reports/kill_and_resume_<hardware>_<date>.md

The run is the command line's own: ``torchrun --max-restarts 3 -m gemini sft ... --resume_from_checkpoint auto`` on a
small GPT-2 with dropout, with a checkpoint every few steps. In each repetition one rank (they take turns) gets SIGKILL
at a random step, or a random moment after a save has begun; torchrun starts all ranks again, and they go on from the
newest checkpoint by themselves. Measured besides: how long the other ranks live after the kill, and when the first step
is done again.

The model's file and every file of the last checkpoint (masters, states, step counts, RNG states) must be the same bytes
as those of the undisturbed run, and no unfinished checkpoint may be left. The exit code is 1 unless all are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks._report import add_out, head, publish, table  # noqa: E402

PATIENCE_S = 240
"""How long anything may take before it counts as hanging."""
Files = dict[str, bytes]
MOST_DELAY_S = 0.1, 0.02
"""After a step, and after a save has begun; a save of the default model takes about as long."""
COLUMNS = ["went on after step", "the others end, s", "first step, s"]
ABOUT = (
    "bf16, dropout 0.1; {args.ranks} ranks on one machine, {args.steps} steps, a checkpoint every "
    "{args.save_every}. One rank gets SIGKILL, torchrun starts all again. The others end: from the kill until no "
    "other rank runs. First step: from the kill to the first step after the restart."
)


class Kill(NamedTuple):
    """Who is killed when: a moment after ``step`` steps, or after the save of that step has begun."""

    rank: int
    step: int
    in_save: bool
    delay_s: float

    def __str__(self) -> str:
        return f"{'save of step' if self.in_save else 'after step'} {self.step} + {1000 * self.delay_s:.0f} ms"


class Run:
    """One ``torchrun`` of the training command in a folder of its own, which is killed once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        folder.mkdir()
        self.args, self.folder, self.out = args, folder, folder / "out"
        self.began = time.perf_counter()
        self.process = self.start()

    def start(self) -> subprocess.Popen[Any]:
        args, folder, self.logs = self.args, self.folder, self.folder / "logs"
        model = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_layer": args.layers, "n_head": 4}
        model |= {"n_embd": args.width, "bos_token_id": 256, "eos_token_id": 256}
        (folder / "config.json").write_text(json.dumps(model))
        (folder / "text.txt").write_text("".join(f"{n} times three is {3 * n}, they say.\n" for n in range(2000)))
        train = f"--model_name_or_path {folder}/config.json --dataset_name {folder}/text.txt --output_dir {self.out}"
        train += " --resume_from_checkpoint auto --use_cpu --gradient_checkpointing false --adam_beta2 0.95"
        train += " --max_length 64 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3"
        train += f" --warmup_steps 4 --max_steps {args.steps} --logging_steps 1 --lr_scheduler_type cosine"
        train += f" --save_steps {args.save_every} --save_total_limit 2 --ddp_timeout 600"
        torchrun = f"--standalone --nproc-per-node {args.ranks} --max-restarts 3 --redirects 3 --log-dir {self.logs}"
        words = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), "-m", "gemini", "sft"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(folder / "torchrun.log", "a") as file:
            return subprocess.Popen([*words, *train.split()], cwd=ROOT, env=environment, stdout=file, stderr=file)

    def said(self, attempt: int) -> str:
        """What rank 0 has printed so far in one attempt of torchrun's."""
        found = list(self.logs.glob(f"*/attempt_{attempt}/0/stdout.log"))
        return found[0].read_text() if found else ""

    def did(self, step: int) -> bool:
        """Whether that step is done."""
        return f"step {step}/" in self.said(0)

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that run now."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                found[int(child.environ()["RANK"])] = child.pid
            except (psutil.Error, KeyError):
                continue
        return found

    def saving(self, step: int | str) -> bool:
        """Whether the checkpoint of ``step`` is being written now; of ``*`` any."""
        return any(self.out.glob(f".saving/checkpoint-{step}"))

    def kill(self, kill: Kill) -> list[str]:
        """Kill a rank, see the run to its end; cells of the row."""
        ranks, killed = self.pids(), time.perf_counter()
        os.kill(ranks[kill.rank], signal.SIGKILL)
        others = [pid for rank, pid in ranks.items() if rank != kill.rank]
        self.wait_for("the end of the other ranks", lambda: not any(map(runs, others)))
        others_end_s = time.perf_counter() - killed
        self.wait_for("a step after the restart", lambda: "\nstep " in self.said(1), pause_s=0.01)
        first_step_s = time.perf_counter() - killed
        self.finish()
        resumed = re.search(r"resuming from .* after step (\d+)", " ".join(self.said(1).split()))
        return [resumed[1] if resumed else "0", f"{others_end_s:.2f}", f"{first_step_s:.1f}"]

    def results(self) -> Files:
        """The model and the last checkpoint, file by file; what is left of unfinished ones counts as well."""
        last = max(self.out.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
        found = {path.name: path.read_bytes() for path in self.out.glob("*.safetensors")}
        found |= {f"{last.name}/{path.name}": path.read_bytes() for path in last.rglob("*.safetensors")}
        return found | {f"left over: {path.name}": b"" for path in self.out.glob(".*")}

    def last_words(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.rglob("*log")))

    def wait_for(self, what: str, there: Callable[[], bool], *, pause_s: float = 0.0005) -> None:
        """Look again and again, in bounded time."""
        deadline = time.perf_counter() + PATIENCE_S
        while not there():
            if time.perf_counter() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{what}: it did not come. The last words:\n{self.last_words()}")
            time.sleep(pause_s)

    def finish(self) -> str:
        """Wait for the end, which must be a good one; the seconds from the start, told."""
        if code := self.process.wait(PATIENCE_S):
            raise RuntimeError(f"the run ended with {code}:\n{self.last_words()}")
        return f"{time.perf_counter() - self.began:.1f}"

    def end(self) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                child.kill()
            self.process.kill()
        self.process.wait()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kills(args: argparse.Namespace) -> Iterator[Kill]:
    """Ranks take turns, and so do kills at steps and in saves; in each next round of ranks the other way round."""
    rng = random.Random(args.seed)
    saves = range(args.save_every, args.steps, args.save_every)
    for number in range(args.repetitions):
        in_save = (number + number // args.ranks) % 2 == 1
        step = rng.choice(saves) if in_save else rng.randrange(1, args.steps - 1)
        yield Kill(number % args.ranks, step, in_save, rng.uniform(0, MOST_DELAY_S[in_save]))


def disturbed(run: Run, kill: Kill) -> tuple[bool, list[str]]:
    """Kill a rank at its moment; whether a save was under way, and the row but for its last two cells."""
    if kill.in_save:
        run.wait_for(f"the save of step {kill.step}", lambda: run.saving(kill.step), pause_s=0.0002)
    else:
        run.wait_for(f"step {kill.step}", lambda: run.did(kill.step))
    time.sleep(kill.delay_s)
    was_saving = run.saving("*")
    return was_saving, [f"rank {kill.rank}", str(kill), "yes" if was_saving else "no", *run.kill(kill)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0, help="draws the steps and moments of the kills")
    add_out(parser)
    args = parser.parse_args()
    rows, num_same, num_saving = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="gemini-kill-") as scratch:
        wanted: Files = {}
        for number, kill in enumerate([None, *kills(args)]):
            run = Run(args, Path(scratch, str(number)))
            try:
                was_saving, row = disturbed(run, kill) if kill else (False, ["none", "", "", *("" for _ in COLUMNS)])
                seconds = run.finish()
            finally:
                run.end()
            found = run.results()
            wanted = wanted or found
            differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            num_same += bool(kill) and not differing
            num_saving += was_saving
            rows.append([*row, seconds, "DIFFERENT: " + ", ".join(differing) if differing else "the same"])
            print(" | ".join(rows[-1]), flush=True)
    rows[0][-1] = f"the measure, {len(wanted)} names"
    about = f"GPT-2 shape, {args.layers} layers of {args.width}, {ABOUT.format(args=args)} Bits: the model's file and "
    about += "every file of the last checkpoint against those of the undisturbed run."
    columns = ["killed", "when", "was saving", *COLUMNS, "run, s", "bits"]
    verdict = f"**{num_same} of {args.repetitions}** came to the same bits; {num_saving} kills fell into a save."
    publish([*head("Kill and resume", [about], 1, "accelerate"), *table(columns, rows), verdict], args.out)
    return 0 if num_same == args.repetitions else 1


if __name__ == "__main__":
    sys.exit(main())
