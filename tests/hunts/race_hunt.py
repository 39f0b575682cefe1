"""Hunts races: random schedules of tiny models must give the bits of a run in which everything is done in turn.

    python tests/hunts/race_hunt.py --seeds 0:1000
    python tests/hunts/race_hunt.py --seeds 417:418          # replays one
    python tests/hunts/race_hunt.py --guess                  # updates inside backward that may be undone
    python tests/hunts/race_hunt.py --more                   # what a config and a loop may have beside that
    python tests/hunts/race_hunt.py --device cuda            # on a GPU; that of tests/fakegpu tells of races

Each seed draws *what* is trained (model, precision, gradients, clipping: a recipe) and *how* (device, budgets, homes,
overlap, threads, the clock of the stand-in device, pauses around reads, writes and updates, Python's switch interval,
and reads of the state at random points: a schedule). What is trained runs once more on the CPU, all in memory and
serial; every loss, norm, weight, state and everything that was read in between must be the same bits. Fresh windows
are filled with NaN and the learning rate is spoiled as soon as ``step()`` has returned, so that whoever comes too early
or too late is found out. After each seed no thread and no open file may be left. A failure prints its seed and its
draw; the exit code is 1.
"""

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

import gemini  # noqa: E402
from gemini import kernels  # noqa: E402
from gemini.errors import parse_bytes  # noqa: E402
from gemini.memory.devices.cuda import CudaDevice  # noqa: E402
from gemini.memory.devices.pages import PageWindow, StorageWindow  # noqa: E402
from gemini.memory.movement.transfers import JobThread  # noqa: E402
from gemini.memory.nvme import SpillFile  # noqa: E402
from gemini.planning import working  # noqa: E402
from gemini.train.activations import store as activations  # noqa: E402
from tests.hunts.race_recipes import (  # noqa: E402
    Recipe,
    World,
    averages_of,
    draw_recipe,
    eval_loss,
    reference,
    same_all,
    train,
)
from tests.models import assert_same_bits  # noqa: E402
from tests.standin_device import StandinDevice  # noqa: E402
from tests.standins import PieceDevice, RandomClock  # noqa: E402
from tests.world import world_of  # noqa: E402

HANGING_S = 300


# ---- how it is run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """One seed's draw."""

    seed: int
    recipe: Recipe
    device: str
    poison: bool
    homes: tuple[float, ...]
    """Fractions of weights and optimizer states on the GPU, then on NVMe; empty for all in the computing tier."""
    slack: float
    """What the budget of the computing tier has beyond the least it takes, as a fraction of that."""
    max_chunk: int
    tile: int
    overlap: bool
    update_threads: int | None
    pauses: float
    switch_interval: float
    reads: float
    """How often something is read at a point of the loop."""
    updates_on_gpu: float = 0.0
    """Of the states in host memory, for which there is a GPU: streamed through it."""
    in_pieces: bool = False
    """Windows need memory in one piece."""
    guesses: bool = False
    """Updates begin inside backward before it is known whether they clip."""
    durable: bool = False
    """Weights and states on NVMe are in a store."""
    kept_blocks: int | None = None
    offload: str | None = None
    shared: bool = False
    """Another model is in the budget, frozen, and evaluated now and then."""

    def config(self, budget: int, directory: Path) -> gemini.GeminiConfig:
        memory: dict[str, Any] = {"cpu": "1GiB", "nvme": "64MiB", "nvme_path": directory}
        on_gpu = self.device != "cpu"
        memory["gpu" if on_gpu else "cpu"] = budget
        if self.durable:
            memory |= {"durable": True, "nvme": "128MiB"}
        placement: Any = "auto"
        if self.homes:
            there = dict(zip(("weights_on_gpu", "optimizer_on_gpu"), self.homes[:2], strict=True))
            placement = gemini.StaticPlacement(
                **(there | {"updates_on_gpu": self.updates_on_gpu} if on_gpu else {}),
                weights_on_nvme=self.homes[2], optimizer_on_nvme=self.homes[3],
            )  # fmt: skip
        device: Any = self.device
        if self.device == "standin":
            make = PieceDevice if self.in_pieces else StandinDevice
            device = make(gate=RandomClock(self.seed), poison=self.poison)
        budgets = (gemini.SharedBudget if self.shared else gemini.MemoryBudget)(**memory)
        return gemini.GeminiConfig(
            precision=self.recipe.precision, gradients=self.recipe.gradients, device=device, max_chunk=self.max_chunk,
            memory=budgets, placement=placement, overlap=self.overlap, update_threads=self.update_threads,
            optimizer=self.recipe.rule, states=self.recipe.states, kept_blocks=self.kept_blocks,
            offload_activations=self.offload,
        )  # fmt: skip


def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    recipe = draw_recipe(rng)
    device = rng.choice(("cpu", "standin"))
    where = rng.choice(("computing tier", "host", "some on nvme", "some on nvme", "all on nvme"))
    homes: tuple[float, ...] = ()
    if where == "all on nvme":
        homes = (0.0, 0.0, 1.0, 1.0)
    elif where == "host":
        homes = (0.0, 0.0, 0.0, 0.0)
    elif where == "some on nvme":
        on_gpu = (rng.choice((0.0, 0.3, 0.6)), rng.choice((0.0, 0.5)))
        homes = (*on_gpu, rng.uniform(0, 1 - on_gpu[0]), rng.uniform(0, 1 - on_gpu[1]))
    return Schedule(
        seed=seed,
        recipe=recipe,
        device=device,
        poison=rng.random() < 0.7,
        homes=tuple(round(fraction, 2) for fraction in homes),
        slack=rng.choice((0.0, 0.0, 0.1, 0.4, 1.5)),
        max_chunk=rng.choice((3000, 6000, 10**6)),
        tile=rng.choice((4096, 4096, 2**21)),
        overlap=rng.random() < 0.9,
        update_threads=rng.choice((None, 1, 2)),
        pauses=rng.choice((0.0, 0.1, 0.5)),
        switch_interval=10 ** rng.uniform(-6, -2.3),
        reads=rng.choice((0.0, 0.1, 0.4)),
        updates_on_gpu=rng.choice((0.0, 0.5, 1.0)),
        in_pieces=rng.random() < 0.5,
    )


def guessing(schedule: Schedule) -> Schedule:
    """The same with guesses of steps of which some clip: on a store, and wherever else they can be undone."""
    rng, recipe = random.Random(f"guess {schedule.seed}"), schedule.recipe
    gradients = "retain" if recipe.gradients == "transient" else recipe.gradients
    recipe = replace(recipe, gradients=gradients, in_backward=False, max_norm=rng.choice((None, 0.5, 2.0, 5.0, 1e3)))
    homes = schedule.homes if any(schedule.homes[2:]) and rng.random() < 0.5 else (0.0, 0.0, 1.0, 1.0)
    durable, threads = rng.random() < 0.5, schedule.update_threads
    if not durable:
        homes, threads = rng.choice((schedule.homes, homes, (0.0, 0.0, 0.0, 0.0), ())), rng.choice((1, 2))
    return replace(
        schedule, recipe=recipe, homes=homes, updates_on_gpu=0.0, overlap=True, guesses=True, durable=durable,
        update_threads=threads,
    )  # fmt: skip


def more(schedule: Schedule) -> Schedule:
    """The same with what a config and a loop may have beside that: averages, compact states, a second model in the
    budget, kept blocks, activations elsewhere, steps block by block.
    """
    rng, recipe = random.Random(f"more {schedule.seed}"), schedule.recipe
    family, kept, offload = recipe.family, None, None
    if rng.random() < 0.6:
        family = rng.choice(("llama", "llama", "gpt2"))
        kept = rng.choice((None, 0, 1, 2))
        offload = rng.choice((None, "nvme", "nvme" if schedule.device == "cpu" else "cpu"))
    loop = rng.choice(("plain", "micro_batch", "train_step", "train_step"))
    in_backward, gradients = recipe.in_backward and loop != "train_step", recipe.gradients
    if loop == "train_step" and gradients == "transient":
        gradients = "retain"
    compact = recipe.precision == "bf16" and rng.random() < 0.3
    if compact and gradients == "accumulate" and not in_backward and rng.random() < 0.5:
        gradients = "accumulate_bf16"
    recipe = replace(
        recipe, family=family, checkpointing=kept is not None or offload is not None or recipe.checkpointing,
        loop=loop, in_backward=in_backward, gradients=gradients, states="compact" if compact else "exact",
        averaged=not compact and rng.random() < 0.5,
    )  # fmt: skip
    return replace(schedule, recipe=recipe, kept_blocks=kept, offload=offload, shared=rng.random() < 0.4)


WHAT_BUDGETS_DEPEND_ON = (
    "recipe", "device", "homes", "updates_on_gpu", "max_chunk", "tile", "overlap", "durable", "kept_blocks", "offload",
    "shared",
)  # fmt: skip

SUMS = 2**18
"""More than the fp32 sums of a stage, whose room has to be there for steps block by block."""

_least: dict[tuple[Any, ...], int] = {}


def wrap(schedule: Schedule, directory: Path) -> tuple[Any, gemini.HybridAdam, Any]:
    """The model under the least budget that holds it, and the slack; and the other one of a shared budget. What the
    least is, refusals say.
    """
    if not schedule.homes and not schedule.slack:
        return wrap_in(schedule, 2**28, directory)
    key = tuple(getattr(schedule, name) for name in WHAT_BUDGETS_DEPEND_ON)
    budget = _least.get(key, 4096)
    for _ in range(50):
        try:
            wrapped = wrap_in(schedule, budget, directory)
        except gemini.BudgetExceeded as refusal:
            named = re.search(r"budget to at least ([\d.]+ [KMG]iB)", str(refusal))
            least = parse_bytes(named[1], what="the error") if named and not schedule.shared else int(1.3 * budget)
            budget = max(budget + 4096, least)
            gc.collect()  # of two models one is there
            continue
        _least[key] = budget
        by_stages = SUMS if schedule.recipe.loop == "train_step" else 0
        if not schedule.slack and not by_stages:
            return wrapped
        world_of(wrapped[0]).close()  # a store has one model at a time
        del wrapped
        gc.collect()
        return wrap_in(schedule, int(budget * (1 + schedule.slack)) + by_stages, directory)
    raise AssertionError("no budget is enough")


def wrap_in(schedule: Schedule, budget: int, directory: Path) -> tuple[Any, gemini.HybridAdam, Any]:
    config, other = schedule.config(budget, directory), None
    if schedule.shared:  # what is small first
        memory = replace(config.memory, durable=False)
        frozen = schedule.recipe.make_model().requires_grad_(False)
        device = schedule.config(budget, directory).device  # of its own
        other = gemini.GeminiDDP(
            frozen, replace(config, memory=memory, device=device, optimizer=None, kept_blocks=None)
        )
    return *schedule.recipe.wrap(config, guesses=schedule.guesses), other


@contextlib.contextmanager
def disturbed(schedule: Schedule) -> Iterator[Counter[str]]:
    """Pauses in whatever threads do, NaN in fresh windows, another switch interval, small tiles; undone afterwards.

    Gives what the workers were asked to do.
    """
    seen: Counter[str] = Counter()
    rng, lock, undo = random.Random(f"pauses {schedule.seed}"), threading.Lock(), contextlib.ExitStack()

    def pause() -> None:
        with lock:
            kind, fraction = rng.random(), rng.random()
        if kind < schedule.pauses:
            time.sleep(fraction * (0.0004 if kind > schedule.pauses / 20 else 0.004))

    def patch(owner: Any, name: str, replacement: Any) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, replacement)

    def pausing(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            pause()
            result = real(*args, **kwargs)
            pause()
            return result

        patch(owner, name, call)

    def spoil(kind: type) -> None:
        real = kind.populate  # type: ignore[attr-defined]

        def populate(window: Any) -> None:
            real(window)
            window.bytes.fill_(255)

        patch(kind, "populate", populate)

    with undo:
        for name in ("submit_read", "submit_write", "wait"):
            pausing(kernels.IoQueue, name)
        for owner, name in ((SpillFile, "read"), (SpillFile, "write"), (kernels, "update")):
            pausing(owner, name)
        # Not on a GPU: whoever fills a window there is one more who uses it, on a stream that nobody waits for.
        for kind in (PageWindow, StorageWindow) if schedule.device != "cuda" else (PageWindow,):
            spoil(kind)
        put = JobThread.put

        def late(worker: Any, *jobs: Any) -> None:
            """Now and then the lane is far ahead of who gave it work, or far behind."""
            put(worker, *jobs)
            seen[f"jobs of {worker.name}"] += len(jobs)
            pause()

        patch(JobThread, "put", late)
        patch(working, "TILE", schedule.tile)
        patch(activations, "MIN_BYTES", 64)
        undo.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(schedule.switch_interval)
        yield seen


class Reader:
    """Reads things at random points, and compares them with what the serial run had at that point."""

    def __init__(self, schedule: Schedule, model: Any, optimizer: gemini.HybridAdam, other: Any, directory: Path):
        self.schedule, self.recipe, self.model, self.optimizer = schedule, schedule.recipe, model, optimizer
        self.other = other
        self.worlds = reference(schedule.recipe)[1]
        self.rng = random.Random(f"reads {schedule.seed}")
        commits = schedule.durable and schedule.seed % 3 > 0
        self.checkpoint, self.saved_at = directory if commits else directory / f"checkpoint-{schedule.seed}", -1
        self.save_chance = 0.6 if commits else 0.15
        self.num_rewinds = 0
        self.seen: Counter[str] = Counter()

    def watch(self, point: str, done: int) -> int:
        if point == "end" and self.rng.random() < self.save_chance:  # first of all, while everything is in flight
            kind = self.rng.choice(("save", "save behind"))
            self.seen[kind] += 1
            self.read(kind, self.worlds[done], done)
        while self.rng.random() < self.schedule.reads:
            after_backward = point == "backward" and self.recipe.in_backward
            world = self.worlds[done + after_backward]
            kinds = ["full_param", "report", "gathered", "eval", "collect"]
            if point == "backward" and not self.recipe.in_backward:
                kinds.append("full_grad")
            if self.other is not None:
                kinds += ["other", "other"]
            if (self.schedule.shared or self.recipe.averaged) and point in ("step", "end"):
                kinds += ["parked", "averages", "swapped"]
            if point in ("step", "end"):
                kinds += ["state_dict", "masters", "states", "full_state", "invariants"]
            if point == "end":
                kinds += ["save", "save behind", "load"]
            kind = self.rng.choice(kinds)
            self.seen[kind] += 1
            if kind == "load":
                done = self.load(done)
            else:
                self.read(kind, world, done)
        return done

    def read(self, kind: str, world: World, done: int) -> None:
        model, rng = self.model, self.rng
        name, param = rng.choice(list(model.named_parameters()))
        what = f"{kind} after {done} steps"
        if kind == "full_param":
            assert_same_bits(model.full_param(name, torch.float32), world.masters[name], f"{what} of {name}")
        elif kind == "report":
            str(model.memory_report())
        elif kind == "gathered":
            with model.gathered([param]):
                assert_same_bits(param.detach().cpu().clone(), world.weights[name], f"{what} of {name}")
        elif kind == "eval":
            found = eval_loss(self.recipe, model, rng.choice((torch.no_grad, torch.inference_mode)))
            assert found == world.eval_loss, (what, found, world.eval_loss)
        elif kind == "collect":
            gc.collect(0)
        elif kind == "full_grad":
            same_all({name: model.full_grad(name)}, {name: world.grads[name]}, what)
        elif kind == "state_dict":
            same_all(model.state_dict(), world.weights, what)
        elif kind == "masters":
            same_all(model.state_dict(dtype=torch.float32), world.masters, what)
        elif kind == "states":
            same_all(self.optimizer.state_dict()["state"], world.states, what)
        elif kind == "other":
            assert eval_loss(self.recipe, self.other) == self.worlds[0].eval_loss, what
        elif kind == "parked":
            with model.parked():
                assert_same_bits(model.full_param(name, torch.float32), world.masters[name], f"{what} of {name}")
                if self.other is not None:
                    self.read("other", world, done)
        elif kind == "averages":
            same_all(averages_of(self.recipe, model), world.averages, what)
        elif kind == "swapped" and self.recipe.averaged:
            with gemini.EMA(model).swapped_in():
                same_all(model.state_dict(dtype=torch.float32), world.averages, what)
        elif kind == "full_state":
            self.optimizer.full_state(name)
        elif kind == "invariants":
            check_invariants(model)
        else:
            gemini.save_checkpoint(self.checkpoint, model, self.optimizer, extra=done, wait=kind == "save")
            self.saved_at = done

    def load(self, done: int) -> int:
        """Back to where the last checkpoint was written; not for ever."""
        if self.saved_at < 0 or self.num_rewinds > 1:
            return done
        self.num_rewinds += 1
        assert gemini.load_checkpoint(self.checkpoint, self.model, self.optimizer) == self.saved_at
        return self.saved_at


def check_invariants(model: Any) -> None:
    world = world_of(model)
    world.settle()
    world.check()
    for tier in world.tiers:
        assert world.peak(tier) <= world.budget(tier), tier


def run(schedule: Schedule, directory: Path) -> Counter[str]:
    """Train as the schedule says and compare; what was read, by kind.

    Raises:
        AssertionError: if something has other bits, or is left behind; and whatever the engine raises.
    """
    steps, worlds = reference(schedule.recipe)
    before = left_open()
    with disturbed(schedule) as jobs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, other = wrap(schedule, directory)
        reader = Reader(schedule, model, optimizer, other, directory)
        found = train(schedule.recipe, model, optimizer, reader.watch)
        assert found.losses == steps.losses, ("losses", found.losses, steps.losses)
        assert found.norms == steps.norms, ("norms", found.norms, steps.norms)
        same_all(model.state_dict(dtype=torch.float32), worlds[-1].masters, "final masters")
        same_all(optimizer.state_dict()["state"], worlds[-1].states, "final states")
        if reader.saved_at >= 0:
            assert gemini.load_checkpoint(reader.checkpoint, model, optimizer) == reader.saved_at
            world = worlds[reader.saved_at]
            same_all(model.state_dict(dtype=torch.float32), world.masters, f"masters saved after {reader.saved_at}")
            same_all(optimizer.state_dict()["state"], world.states, f"states saved after {reader.saved_at}")
        same_all(averages_of(schedule.recipe, model), worlds[reader.saved_at].averages, "final averages")
        check_invariants(model)
        if schedule.shared:
            check_invariants(other)
        reader.seen["kept"] = world_of(model).guesses.num_kept
        reader.seen["undone"] = world_of(model).guesses.num_undone
        reader.seen["evictions"] = world_of(model).num_evictions
        seen = reader.seen + jobs
        del reader, optimizer, model, other
        gc.collect()
    check_nothing_left(before)
    return seen


def left_open() -> set[Any]:
    """Worker threads and nameless files of this process."""
    return nameless_files() | {thread for thread in threading.enumerate() if thread.name.startswith("gemini-")}


def check_nothing_left(before: set[Any]) -> None:
    """Spill files and worker threads go with their model."""
    until = time.monotonic() + 20
    while left := left_open() - before:
        assert time.monotonic() < until, f"left behind: {left}"
        gc.collect()
        time.sleep(0.01)


def nameless_files() -> set[str]:
    """The files without a name that this process has open, by inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is gone
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in found if "(deleted)" in link}


# ---- the hunt --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watchdog(schedule: object) -> Iterator[None]:
    """A schedule that hangs says so, with all stacks, and ends the program."""

    def bark() -> None:
        print(f"HANGS: {schedule}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    timer = threading.Timer(HANGING_S, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def fake_runtime() -> Any:
    """The runtime of tests/fakegpu, if this process has it for CUDA: it tells of races. None: a GPU, which does not."""
    if "fakegpu" not in os.environ.get("LD_PRELOAD", ""):
        return None
    from tests.fakegpu import computing, launches

    computing.install()
    launches.install()
    # Budgets are some KiB here, to evict all the time: neither a context nor whole segments are in them.
    CudaDevice.beside_bytes = lambda *_: 0  # type: ignore[method-assign]
    CudaDevice.begin_budget = lambda device, *budget, **_: None  # type: ignore[method-assign]
    return computing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="first:last+1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--device", choices=("cpu", "standin", "cuda"), help="for every schedule (default: drawn)")
    parser.add_argument("--guess", action="store_true", help="updates inside backward that may be undone, in all")
    parser.add_argument("--more", action="store_true", help="averages, kept blocks, block by block, ...")
    parser.add_argument("--verbose", action="store_true", help="a line for each schedule, before it runs")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    runtime = fake_runtime() if args.device == "cuda" else None
    gc.freeze()
    began, failed, done, seen = time.monotonic(), [], 0, Counter[str]()
    for seed in range(first, last):
        if time.monotonic() - began > args.seconds:
            break
        schedule = draw(seed) if args.device is None else replace(draw(seed), device=args.device)
        if args.guess:
            schedule = guessing(schedule)
        if args.more:
            schedule = more(schedule)
        if runtime is not None:
            runtime.draw_from(seed % 3 and seed)  # each third: as late as it may be
        if args.verbose:
            print(schedule, flush=True)
        with tempfile.TemporaryDirectory(prefix="gemini-races-") as directory, watchdog(schedule):
            try:
                seen += run(schedule, Path(directory))
                raced = [] if runtime is None else runtime.races()
                assert not raced, raced[:5]
            except Exception:
                failed.append(seed)
                print(f"FAILED: {schedule}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        done += 1
        if done % 50 == 0:
            print(f"{done} schedules, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{done} schedules, {reference.cache_info().currsize} recipes, "
          f"{time.monotonic() - began:.0f} s; seen: {dict(sorted(seen.items()))}")  # fmt: skip
    print(f"failed seeds: {failed}" if failed else "all gave the bits of the serial run")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
