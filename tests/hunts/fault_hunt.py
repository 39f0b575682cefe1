"""Hunts bad ends: every read, write, update and hook of a few steps fails in turn, and the last checkpoint must resume.

    python tests/hunts/fault_hunt.py                     # all of it
    python tests/hunts/fault_hunt.py --stride 7          # every seventh call
    python tests/hunts/fault_hunt.py --only "adam" --case "standin"
    python tests/hunts/fault_hunt.py --kills 40 --stride 0

A tiny model makes one step, writes a checkpoint, and goes on: two more steps, a second checkpoint, a read of all of
it. In each run one call breaks: a write finds the disk full, a read fails, the update raises in whatever thread it
runs, or KeyboardInterrupt comes at a hook or a wait of the training thread. Then: the error comes to the training
thread, with its cause, and says what to do; the ledger's equations hold; ``gemini.load_checkpoint`` of the first
checkpoint, into the same model or a new one, makes the repeated steps the very bits of a run nobody disturbed; and when
the model is deleted no thread and no spill file is left. ``--kills`` does it to whole processes: SIGTERM or SIGINT at a
random moment. The exit code is 1 unless all of that was so.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import gemini  # noqa: E402
from gemini.errors import GeminiError  # noqa: E402
from tests.hunts import race_hunt  # noqa: E402
from tests.hunts.faults import ALARM, BESIDE, KINDS, Faults, Injected  # noqa: E402
from tests.hunts.race_hunt import Schedule  # noqa: E402
from tests.hunts.race_recipes import NUM_STEPS, Recipe, World, look, reference, same_all  # noqa: E402
from tests.scaling import backward, clip_grads, make_step, new_scaler  # noqa: E402
from tests.world import world_of  # noqa: E402

ENDS_S = 60
"""How long a process may take to end after a signal."""


def case(family: str, gradients: str, device: str, homes: tuple[float, ...], **more: Any) -> Schedule:
    in_backward = gradients == "transient"
    max_norm = None if in_backward else more.pop("max_norm", 0.5)
    recipe = Recipe(family, False, more.pop("precision", "bf16"), gradients, in_backward, max_norm)
    drawn = {"seed": 1, "poison": True, "slack": 0.0, "max_chunk": 2000, "tile": 4096, "overlap": True}
    drawn |= {"update_threads": 1, "pauses": 0.0, "switch_interval": 0.005, "reads": 0.0}
    return Schedule(recipe=recipe, device=device, homes=homes, **(drawn | more))


CASES = {
    "cpu, all on nvme": case("some unused", "retain", "cpu", (0, 0, 1, 1)),
    "cpu, all on nvme, accumulated": case("some unused", "accumulate", "cpu", (0, 0, 1, 1), slack=1.0),
    "cpu, all on nvme, in backward": case("some unused", "transient", "cpu", (0, 0, 1, 1)),
    "cpu, all on nvme, guessed": case(
        "some unused", "retain", "cpu", (0, 0, 1, 1), slack=1.0, max_norm=1e3, guesses=True, durable=True
    ),
    "cpu, all on nvme, guessed wrong": case(
        "some unused", "retain", "cpu", (0, 0, 1, 1), slack=1.0, guesses=True, durable=True
    ),
    "cpu, half in the spill file, guessed": case(
        "some unused", "retain", "cpu", (0, 0, 0.5, 0.5), slack=9.0, max_norm=1e3, guesses=True
    ),
    "cpu, half in the spill file, guessed wrong": case(
        "some unused", "retain", "cpu", (0, 0, 0.5, 0.5), slack=9.0, guesses=True
    ),
    "cpu, half on nvme, fp16": case("some unused", "retain", "cpu", (0, 0, 0.5, 0.5), precision="fp16", slack=0.3),
    "cpu, all in memory": case("some unused", "retain", "cpu", ()),
    "standin, half on nvme": case("some unused", "retain", "standin", (0.3, 0.0, 0.4, 0.5)),
    "standin, llama": case("llama", "retain", "standin", (0.0, 0.0, 0.5, 1.0), slack=0.5, max_chunk=10**6),
}


# ---- one run ---------------------------------------------------------------------------------------------------------


def step(recipe: Recipe, model: Any, optimizer: gemini.HybridAdam, done: int, faults: Faults) -> None:
    """The step of race_hunt's loop, telling where it is."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + done)
    for batch in recipe.batches(done):
        faults.phase = faults.phase and "forward"
        loss = model(**batch).loss
        faults.phase = faults.phase and "backward"
        backward(model, loss / recipe.num_micro)
    faults.phase = faults.phase and "clip"
    if recipe.max_norm is not None:
        clip_grads(model, optimizer, recipe.max_norm)
    faults.phase = faults.phase and "step"
    make_step(model, optimizer)
    faults.phase = faults.phase and "in flight"
    optimizer.zero_grad()


def go_on(schedule: Schedule, model: Any, optimizer: gemini.HybridAdam, directory: Path, faults: Faults) -> None:
    """What is disturbed: the steps after the checkpoint; idle for a moment behind every other one."""
    for done in range(1, NUM_STEPS):
        faults.phase = "forward"
        step(schedule.recipe, model, optimizer, done, faults)
        if (faults.chosen + done) % 2:
            time.sleep(0.01)
    faults.phase = "save"
    gemini.save_checkpoint(directory / "second", model, optimizer, extra=NUM_STEPS)
    faults.phase = "read"
    model.state_dict()
    faults.phase = ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and everything that it names as its cause."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_message(kind: str, error: BaseException) -> None:
    """It says what and what to do, and has what was injected as a cause."""
    injected = KeyboardInterrupt if "interrupt" in kind else Injected if kind == "adam: raises" else OSError
    assert any(isinstance(e, injected) for e in chain(error)), f"the cause is lost: {error!r}"
    if injected is KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt), f"Ctrl-C came out as {error!r}"
    elif kind != "adam: raises":
        assert isinstance(error, GeminiError), f"not an error of ours: {error!r}"
        said = str(error)
        assert "spill file" in said and ("checkpoint" in said or "disk" in said), said
    elif isinstance(error, GeminiError):
        assert "checkpoint" in str(error), str(error)


def same_world(recipe: Recipe, model: Any, optimizer: gemini.HybridAdam, world: World, what: str) -> None:
    same_all(model.state_dict(dtype=torch.float32), world.masters, f"masters {what}")
    same_all(optimizer.state_dict()["state"], world.states, f"states {what}")


def attempt(schedule: Schedule, faults: Faults, chosen: int, directory: Path) -> tuple[str, str] | None:
    """One run with one fault: where it fired, or None if it never did.

    Raises:
        AssertionError: if anything of what the file's text promises is not so.
    """
    recipe, worlds = schedule.recipe, reference(schedule.recipe)[1]
    quiet = Faults("")
    before = race_hunt.left_open()
    with race_hunt.disturbed(schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, _ = race_hunt.wrap(schedule, directory)
        step(recipe, model, optimizer, 0, quiet)
        gemini.save_checkpoint(directory / "first", model, optimizer, extra=1)
        faults.arm(chosen)
        caught: BaseException | None = None
        with faults.injected():
            try:
                go_on(schedule, model, optimizer, directory, faults)
            except BaseException as e:
                caught = e
            finally:
                faults.phase = ""
        if caught is not None:
            if faults.fired is None:
                raise caught
            check_message(faults.kind, caught)
            caught.__traceback__ = None
            del caught
            world_of(model).check_ledger()
            if chosen % 2:
                del model, optimizer
                gc.collect()
                model, optimizer, _ = race_hunt.wrap(schedule, directory)
            first = directory / "second" if faults.fired[0] == "read" and chosen % 3 == 0 else directory / "first"
            done = gemini.load_checkpoint(first, model, optimizer)
            new_scaler(model, 2.0**12)  # the other broke off in the middle of a step
            race_hunt.check_invariants(model)
            same_world(recipe, model, optimizer, worlds[done], "of the loaded checkpoint")
            for number in range(done, NUM_STEPS):
                step(recipe, model, optimizer, number, quiet)
        elif not (faults.fired is None or faults.kind.startswith("read") or faults.kind == ALARM or schedule.guesses):
            # A read ahead may fail and be made again, and so may an update that is only guessed; an interrupt in a
            # finalizer is printed and forgotten by Python.
            raise AssertionError(f"nobody said so: {faults.fired}")
        same_world(recipe, model, optimizer, worlds[-1], "at the end")
        race_hunt.check_invariants(model)
        del model, optimizer
        gc.collect()
    race_hunt.check_nothing_left(before)
    assert not any(path.name.startswith(".") for path in directory.iterdir()), "an unfinished checkpoint is left"
    return faults.fired


def sweep(
    name: str, kind: str, chosen: Callable[[int], Any], report: Callable[[int, BaseException | None], None]
) -> Counter[tuple[str, str]]:
    """Fail the calls that ``chosen`` picks, given how many there are; where they fired, and how often."""
    schedule, faults = CASES[name], Faults(kind)
    with tempfile.TemporaryDirectory(prefix="gemini-faults-") as directory:
        attempt(schedule, faults, 0, Path(directory))
    fired: Counter[tuple[str, str]] = Counter()
    for number in chosen(faults.calls):
        with (
            tempfile.TemporaryDirectory(prefix="gemini-faults-") as directory,
            race_hunt.watchdog((name, kind, number)),
        ):
            try:
                where = attempt(schedule, faults, number, Path(directory))
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt) and "made by the test" not in str(e):
                    raise
                report(number, e)
                continue
        if where is not None:
            fired[where] += 1
        report(number, None)
    return fired


# ---- whole processes -------------------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.hunts import fault_hunt
fault_hunt.train_for_ever({name!r}, Path({directory!r}))
"""


def train_for_ever(name: str, directory: Path) -> None:
    """In the child: step after step, a checkpoint after each (every third behind the training); two are kept."""
    torch.set_num_threads(1)
    schedule, quiet = CASES[name], Faults("")
    with race_hunt.disturbed(schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, _ = race_hunt.wrap(schedule, directory)
        for done in range(10_000):
            step(schedule.recipe, model, optimizer, done, quiet)
            where = directory / f"step-{done + 1:05d}"
            gemini.save_checkpoint(where, model, optimizer, extra=done + 1, wait=done % 3 != 2)
            if done == 2:
                print("ready", flush=True)
            old = directory / f"step-{done - 1:05d}"
            if old.exists():
                for path in old.iterdir():
                    path.unlink()
                old.rmdir()


@dataclass
class Child:
    """A training process that will get a signal."""

    name: str
    directory: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, directory: Path) -> Child:
        code = CHILD.format(root=str(ROOT), name=name, directory=str(directory))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment)
        return cls(name, directory, process)

    def kill(self, number: signal.Signals, after_s: float) -> int:
        """Send it, see the process end, and the newest checkpoint resume; how many steps that one had.

        Raises:
            AssertionError: if any of it is not so.
        """
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]
        time.sleep(after_s)
        self.process.send_signal(number)
        try:
            _, said = self.process.communicate(timeout=ENDS_S)
        except subprocess.TimeoutExpired as e:
            raise AssertionError(f"still running {ENDS_S} s after {number.name}") from e
        finally:
            self.process.kill()
        code = self.process.returncode
        assert code in {signal.SIGTERM: (-signal.SIGTERM,), signal.SIGINT: (-signal.SIGINT, 130, 1)}[number], (
            code,
            said,
        )
        assert number is signal.SIGTERM or "KeyboardInterrupt" in said, said
        for word in ("Fatal Python error", "terminate called", "Segmentation fault", "Exception ignored in"):
            assert word not in said, said
        left = [path.name for path in self.directory.iterdir() if path.name.startswith(".gemini")]
        assert not left, left
        return resume(CASES[self.name], max(self.directory.glob("step-*")))


def resume(schedule: Schedule, checkpoint: Path) -> int:
    """The model made anew, the checkpoint loaded, two more steps: the bits of a run nobody disturbed."""
    quiet, recipe = Faults(""), schedule.recipe
    with race_hunt.disturbed(schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, _ = race_hunt.wrap(schedule, checkpoint.parent)
        done = gemini.load_checkpoint(checkpoint, model, optimizer)
        for number in range(done, done + 2):
            step(recipe, model, optimizer, number, quiet)
        config = gemini.GeminiConfig(
            device="cpu", memory=gemini.MemoryBudget(cpu="1GiB"), precision=recipe.precision, gradients=recipe.gradients
        )
        plain, its_optimizer = recipe.wrap(config)
        for number in range(done + 2):
            step(recipe, plain, its_optimizer, number, quiet)
        world = look(recipe, plain, its_optimizer)
        same_world(recipe, model, optimizer, world, f"two steps after step {done}")
    return done


# ---- the hunt --------------------------------------------------------------------------------------------------------


def tell(what: str, bad: list[int], number: int, error: BaseException | None) -> None:
    """Keep and print what ended badly."""
    if error is not None:
        bad.append(number)
        text = "".join(traceback.format_exception(error))
        print(f"FAILED: {what}, call {number}\n{text}", file=sys.stderr, flush=True)


def line(name: str, kind: str, fired: Counter[tuple[str, str]], bad: list[int]) -> str:
    where = ", ".join(f"{phase} ({thread}) {n}" for (phase, thread), n in sorted(fired.items()))
    return f"{name}; {kind}: {fired.total()} well: {where or 'none'}{f'; FAILED {bad}' if bad else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="fail every n-th call; 0 for none")
    parser.add_argument("--first", type=int, default=1, help="the first call to fail")
    parser.add_argument("--only", default="", help=f"kinds of faults that contain this, or {BESIDE!r}")
    parser.add_argument("--case", default="", help="cases that contain this")
    parser.add_argument("--kills", type=int, default=10, help="processes to send signals to")
    parser.add_argument("--alarms", type=int, default=0, help="for each case, interrupts at moments that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments of the signals")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    began, failures, total = time.monotonic(), 0, 0
    for name in [n for n in CASES if args.case in n] if args.stride else []:
        for kind in [k for k in KINDS if args.only in k] or [args.only]:
            bad: list[int] = []
            fired = sweep(name, kind, lambda calls: range(args.first, calls + 1, args.stride),
                          partial(tell, f"{name}; {kind}", bad))  # fmt: skip
            print(line(name, kind, fired, bad), flush=True)
            failures, total = failures + len(bad), total + fired.total() + len(bad)
    for name in [n for n in CASES if args.case in n] if args.alarms else []:
        bad: list[int] = []
        first = 1 + args.seed * args.alarms
        numbers = range(first, first + args.alarms)
        fired = sweep(name, ALARM, lambda _, numbers=numbers: numbers, partial(tell, f"{name}; {ALARM}", bad))
        print(line(name, ALARM, fired, bad), flush=True)
        failures, total = failures + len(bad), total + fired.total() + len(bad)
    rng = random.Random(args.seed)
    for number in range(args.kills):
        name = rng.choice([n for n in CASES if args.case in n and "llama" not in n])
        what, after_s = rng.choice((signal.SIGTERM, signal.SIGINT)), rng.uniform(0, 0.5)
        with tempfile.TemporaryDirectory(prefix="gemini-faults-") as directory:
            try:
                done = Child.start(name, Path(directory)).kill(what, after_s)
                print(f"{name}; {what.name} after {after_s:.3f} s: resumed from step {done}", flush=True)
            except Exception:
                failures += 1
                print(f"FAILED: {name}; {what.name}, kill {number} after {after_s:.3f} s\n{traceback.format_exc()}",
                      file=sys.stderr, flush=True)  # fmt: skip
        total += 1
    print(f"{total} faults, {failures} ended badly, {time.monotonic() - began:.0f} s")
    return 1 if failures or not total else 0


if __name__ == "__main__":
    sys.exit(main())
