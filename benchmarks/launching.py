"""What a layer whose weights move costs the thread that launches: calls of Gemini, and microseconds of that thread.

    python benchmarks/launching.py
    python benchmarks/launching.py --against ../before --out benchmarks/reports/launching.md

A Llama of 4 and one of 16 layers, tiny, so that nothing but the thread itself takes time; a layer is a twelfth of the
difference. ``chunks`` has each layer in one chunk, ``small chunks`` each weight in one of its own; all weights are on
a drive, and there is room for one module's. Each checkout runs in a process of its own, in turn; the least of the
rounds is given, since other threads of the process share its interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from _report import add_out, head, publish, table

HERE = Path(__file__).resolve()
SIZES = (4, 16)
KINDS = {"chunks": {}, "small chunks": {"max_chunk": 64}}
ROUNDS, STEPS = 3, 20


def calls_in(do: Callable[[], Any], root: str) -> int:
    """How often this thread enters a function of a file below ``root``."""
    found = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(root)

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(None)
    return found


def measure(model: Any, optimizer: Any, root: str) -> dict[str, float]:
    """Calls and microseconds of a forward and of a backward, of the thread that runs them."""
    import torch

    ids, held = torch.arange(16)[None], dict[str, Any]()

    def forward() -> None:
        held["loss"] = model(input_ids=ids, labels=ids).loss

    passes = {"forward": forward, "backward": lambda: held["loss"].backward()}
    found = {f"{name} us": float("inf") for name in passes}
    for step in range(STEPS):
        for name, run in passes.items():
            if step == 3:  # the schedule is known, and nothing is made for the first time
                found[f"{name} calls"] = calls_in(run, root)
                continue
            begun = time.thread_time()
            run()
            found[f"{name} us"] = min(found[f"{name} us"], 1e6 * (time.thread_time() - begun))
        optimizer.step()
        optimizer.zero_grad()
    return found


def child() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import gemini

    torch.set_num_threads(1)
    root, result = str(Path(gemini.__file__).parent), {}
    for kind in ("plain", *KINDS):
        of_sizes = []
        for num_layers in SIZES:
            torch.manual_seed(0)
            config = LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=128, use_cache=False,
            )  # fmt: skip
            model: Any = LlamaForCausalLM(config).bfloat16()
            if kind == "plain":
                of_sizes.append(measure(model, torch.optim.SGD(model.parameters()), root))
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                managed: Any = gemini.GeminiDDP(
                    model,
                    gemini.GeminiConfig(
                        memory=gemini.MemoryBudget(cpu="3MiB", nvme="64MiB", nvme_path=folder),
                        placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1),
                        **KINDS[kind],
                    ),
                )
                of_sizes.append(measure(managed, gemini.HybridAdam(managed.parameters()), root))
                del managed
        small, large = of_sizes
        result[kind] = {name: (large[name] - small[name]) / (SIZES[1] - SIZES[0]) for name in small}
    print(json.dumps(result))


def run_in(checkout: Path) -> dict[str, dict[str, float]]:
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE), "--child"], cwd=checkout, env=env, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, built, that takes turns with this one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_out(parser)
    chosen = parser.parse_args()
    if chosen.child:
        child()
        return
    checkouts = {"this checkout": HERE.parents[1]} | ({"before": chosen.against} if chosen.against else {})
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
    for _ in range(ROUNDS):
        for name, checkout in checkouts.items():
            rounds[name].append(run_in(checkout.resolve()))
    rows = []
    for name, found in rounds.items():
        for kind in ("plain", *KINDS):
            least = {what: min(each[kind][what] for each in found) for what in found[0][kind]}
            rows.append([name, kind, *(f"{value:,.0f}" for value in least.values())])
    columns = ["checkout", "weights", *rounds["this checkout"][0]["plain"]]
    title = "What a layer whose weights move costs the thread that launches"
    told = [f"For one layer: calls of Gemini, and microseconds of the thread, the least of {ROUNDS} processes.", ""]
    publish([*head(title, told, 1), *table(columns, rows)], chosen.out)


if __name__ == "__main__":
    main()
