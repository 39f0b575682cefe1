"""What a layer whose weights move costs the thread that launches: calls of Gemini, and microseconds of that thread.

    python benchmarks/launching.py
    python benchmarks/launching.py --against ../before --out benchmarks/reports/launching.md
    python benchmarks/launching.py --kinds "host memory" --by-function 40

A Llama of 4 and one of 16 layers, tiny, so that nothing but the thread itself takes time. Calls are those of a layer, a
twelfth of the difference. Microseconds are those between two layers of the large one, by the clock of the thread: the
tenth percentile of all its layers and steps but the first, since others have the caches in the rest. ``own`` is what a
layer takes beside one of plain torch in the same process, in forward and backward together.

``chunks`` has each layer in one chunk, ``small chunks`` each weight in one of its own; all weights are on a drive, and
there is room for one module's. ``host memory`` has them there, for a stand-in of a GPU whose copies are over as they
begin, so that it takes no time of its own; it has windows for all layers, which get the new weights after each step.
With ``few windows`` there is room for a part of the layers, which all come twice in a step. Each checkout runs in a
process of its own, in turn; the least of the rounds is given. ``--by-function`` adds, of this checkout, the functions
that such a layer enters most, with what a profile of every call makes of them; calls cost several times as much under
it, so its times compare functions and nothing else.
"""

import argparse
import cProfile
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from _report import add_out, head, publish, table

HERE = Path(__file__).resolve()
SIZES = (4, 16)
DRIVE = {"cpu": "3MiB", "nvme": "64MiB"}
KINDS: dict[str, tuple[dict[str, str], dict[str, float], dict[str, Any]]] = {
    "chunks": (DRIVE, {"weights_on_nvme": 1, "optimizer_on_nvme": 1}, {}),
    "small chunks": (DRIVE, {"weights_on_nvme": 1, "optimizer_on_nvme": 1}, {"max_chunk": 64}),
    "host memory": ({"gpu": "8MiB", "cpu": "64MiB"}, {"weights_on_gpu": 0}, {"on_standin": True}),
    "few windows": ({"gpu": "600KiB", "cpu": "64MiB"}, {"weights_on_gpu": 0}, {"on_standin": True}),
}
"""By name: budgets, where weights and states are, and what else is set."""
ROUNDS, STEPS = 3, 30


def calls_in(do: Callable[[], Any], root: str) -> Counter[str]:
    """How often this thread enters each function of files below ``root``, by file and name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            found[f"{code.co_filename.removeprefix(root)[1:]}:{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return found


def seconds_in(do: Callable[[], Any], root: str) -> dict[str, float]:
    """Seconds of this thread in each function of files below ``root``, without those that it calls, by a profile."""
    profile = cProfile.Profile(time.thread_time)
    profile.runcall(do)
    found: dict[str, float] = {}
    for entry in profile.getstats():
        code: Any = entry.code
        if not isinstance(code, str) and code.co_filename.startswith(root):
            # What it calls in C, torch's operations too, is its own: another way to call them is what could be saved.
            in_c = sum(each.inlinetime for each in entry.calls or () if isinstance(each.code, str))
            name = f"{code.co_filename.removeprefix(root)[1:]}:{code.co_name}"
            found[name] = found.get(name, 0.0) + entry.inlinetime + in_c
    return found


class Stamps:
    """The time of the thread at which each layer of a model begins, in forward and in backward."""

    def __init__(self, model: Any):
        self.forward, self.backward = list[float](), list[float]()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, layer: Any, args: Any) -> None:
        self.forward.append(time.thread_time())
        if args[0].requires_grad:  # not that of the first layer where embeddings are frozen
            args[0].register_hook(self._came_through)

    def _came_through(self, grad: Any) -> None:
        self.backward.append(time.thread_time())

    def take(self) -> dict[str, list[float]]:
        """Seconds of the layers but the outermost two, which have the ends of a pass to do as well."""
        told = {}
        for name, times in (("forward", self.forward), ("backward", self.backward)):
            told[name] = [after - before for before, after in zip(times, times[1:], strict=False)][1:-1]
            times.clear()
        return told


def measure(model: Any, stamps: Stamps, optimizer: Any, root: str) -> dict[str, Any]:
    """Calls of a forward and of a backward by function, and microseconds of a layer, of the thread that runs them."""
    import torch

    ids, held = torch.arange(16)[None], dict[str, Any]()

    def forward() -> None:
        held["loss"] = model(input_ids=ids, labels=ids).loss

    passes = {"forward": forward, "backward": lambda: held["loss"].backward()}
    found: dict[str, Any] = {name: {} for name in passes}
    layers: dict[str, list[float]] = {name: [] for name in passes}
    for step in range(STEPS):
        for name, run in passes.items():
            # The schedule is known then, and nothing is made for the first time.
            if step == 3:
                found[name]["calls"] = calls_in(run, root)
            elif step == 4:
                found[name]["seconds"] = seconds_in(run, root)
            else:
                run()
        for name, seconds in stamps.take().items():
            layers[name] += seconds if step > 4 else []
        optimizer.step()
        optimizer.zero_grad()
    for name, seconds in layers.items():
        found[name]["us"] = 1e6 * sorted(seconds)[len(seconds) // 10]
    return found


def standin() -> Any:
    """A stand-in of a GPU whose copies are over when they have begun."""
    from gemini.interrupts import call_without_grad
    from gemini.memory.devices.device import DONE
    from tests.standin_device import StandinDevice

    class AtOnce(StandinDevice):
        def copy(self, into: Any, source: Any, *_: Any, **how: Any) -> Any:
            return self.copy_all([(into, source)], "")

        def copy_all(self, pairs: Any, stream: str) -> Any:
            for into, source in pairs:
                call_without_grad(into.copy_, source)
            return DONE

    return AtOnce()


def child(kinds: list[str]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import gemini

    torch.set_num_threads(1)
    root, result = str(Path(gemini.__file__).parent), {}
    for kind in ("plain", *kinds):
        of_sizes = []
        for num_layers in SIZES:
            torch.manual_seed(0)
            config = LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=128, use_cache=False,
            )  # fmt: skip
            model: Any = LlamaForCausalLM(config).bfloat16()
            if kind == "plain":
                of_sizes.append(measure(model, Stamps(model), torch.optim.SGD(model.parameters()), root))
                continue
            budgets, placement, settings = KINDS[kind]
            settings = {**settings}
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                memory = gemini.MemoryBudget(**budgets, **({"nvme_path": folder} if "nvme" in budgets else {}))  # type: ignore[arg-type]
                if settings.pop("on_standin", False):
                    settings["device"] = standin()
                managed: Any = gemini.GeminiDDP(
                    model,
                    gemini.GeminiConfig(memory=memory, placement=gemini.StaticPlacement(**placement), **settings),
                )
                of_sizes.append(measure(managed, Stamps(model), gemini.HybridAdam(managed.parameters()), root))
                del managed
        small, large = of_sizes
        result[kind] = {
            name: {"us": large[name]["us"]} | {
                what: {
                    function: (count - small[name][what].get(function, 0)) / (SIZES[1] - SIZES[0])
                    for function, count in large[name][what].items()
                }
                for what in ("calls", "seconds")
            }
            for name in small
        }  # fmt: skip
    print(json.dumps(result))


def run_in(checkout: Path, kinds: list[str]) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE), "--child", "--kinds", *kinds]
    done = subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def by_function(found: list[dict[str, Any]], kind: str, number: int) -> list[str]:
    """The functions that a layer enters most: calls, and microseconds of the thread under a profile."""
    lines: list[str] = []
    for name in ("forward", "backward"):
        calls = found[0][kind][name]["calls"]
        seconds = {function: min(each[kind][name]["seconds"].get(function, 0) for each in found) for function in calls}
        rows = [
            [f"`{function}`", f"{calls[function]:.1f}", f"{1e6 * seconds[function]:.0f}"]
            for function in sorted(calls, key=lambda function: -seconds[function])[:number]
            if calls[function] > 0
        ]
        lines += ["", f"## {kind}, {name}", "", *table(["function", "calls", "us, profiled"], rows)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, built, that takes turns with this one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="those to measure (all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes for each checkout (%(default)s)")
    parser.add_argument("--by-function", type=int, default=0, metavar="N", help="the N functions that take most")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_out(parser)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.kinds)
        return
    checkouts = {"this checkout": HERE.parents[1]} | ({"before": chosen.against} if chosen.against else {})
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    loads = [os.getloadavg()[0]]
    for _ in range(chosen.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(run_in(checkout.resolve(), chosen.kinds))
            loads.append(os.getloadavg()[0])
    rows = []
    for name, found in rounds.items():
        for kind in ("plain", *chosen.kinds):
            calls = [sum(found[0][kind][of]["calls"].values()) for of in ("forward", "backward")]
            least = [min(each[kind][of]["us"] for each in found) for of in ("forward", "backward")]
            own = [sum(each[kind][of]["us"] - each["plain"][of]["us"] for of in each[kind]) for each in found]
            rows.append([name, kind, *(f"{value:,.0f}" for value in (*calls, *least, min(own)))])
    columns = ["checkout", "weights", "forward calls", "backward calls", "forward us", "backward us", "own us"]
    title = "What a layer whose weights move costs the thread that launches"
    told = [
        f"For one layer: calls of Gemini, and microseconds of the thread, the least of {chosen.rounds} processes. The "
        f"machine had {os.cpu_count()} processors, and a load of {min(loads):.1f} to {max(loads):.1f}, 1 of it this.",
        "",
    ]
    lines = [*head(title, told, 1), *table(columns, rows)]
    for kind in chosen.kinds if chosen.by_function else ():
        lines += by_function(rounds["this checkout"], kind, chosen.by_function)
    publish(lines, chosen.out)


if __name__ == "__main__":
    main()
