"""The same steps by two checkouts, which take turns: what a change of the insides costs.

    python benchmarks/old_new.py ../before --rounds 15

Each checkout is a process of its own for each case; both sleep in a read while the other trains. A ratio is taken in a
round, in changing order, and the median over rounds is printed, above 1 where this checkout is quicker. Losses must be
the same bits.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CASES = {
    "memory 64": (64, 4, 40, {}), "memory 256": (256, 4, 20, {}), "memory 512": (512, 4, 8, {}),
    "nvme": (256, 4, 6, {"nvme": 1}), "nvme, in turn": (256, 4, 6, {"nvme": 1, "overlap": 0}),
    "durable": (256, 4, 6, {"nvme": 1, "durable": 1}), "fp16 scaled": (256, 4, 15, {"fp16": 1}),
    "nvme, guessed": (256, 4, 6, {"nvme": 1, "guessed": 1}),
}  # fmt: skip
"""Width, layers, steps of a round, and what is switched on."""
WORKER = """
import sys, tempfile, time, torch, gemini
from transformers import LlamaConfig, LlamaForCausalLM
width, layers, steps, on = eval(sys.argv[1])
torch.manual_seed(0); torch.set_num_threads(1)
shape = LlamaConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=4,
                    vocab_size=512, use_cache=False)
model, ids, nvme = LlamaForCausalLM(shape), torch.randint(512, (2, 32)), "nvme" in on
sizes = {"cpu": "1GiB"} | ({"nvme": "1GiB", "nvme_path": tempfile.mkdtemp()} if nvme else {})
place = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1) if nvme else "auto"
gemini.GeminiDDP(model, gemini.GeminiConfig(
    precision="fp16" if "fp16" in on else "bf16", memory=gemini.MemoryBudget(**sizes, durable="durable" in on),
    placement=place, overlap=bool(on.get("overlap", 1))))
guess = dict(step_in_backward=True, speculate=True) if "guessed" in on else {}
optimizer, scaler = gemini.HybridAdam(model.parameters(), lr=1e-3, **guess), gemini.GradScaler(enabled="fp16" in on)
for _ in sys.stdin:
    begin = time.perf_counter()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss; scaler.scale(loss).backward(); scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    model._gemini_engine.drain(); print(time.perf_counter() - begin, loss.item(), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout, built")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    given = parser.parse_args()
    print(f"| {'case':<14} | ms a step before | after | ratio | 10 % to 90 % |\n|---|---:|---:|---:|---:|")
    for name in given.cases:
        sides = [
            subprocess.Popen([sys.executable, "-W", "ignore", "-c", WORKER, repr(CASES[name])], cwd=tree, text=True,
                             env={**os.environ, "PYTHONPATH": str(tree)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for tree in (given.before.resolve(), HERE)
        ]  # fmt: skip
        times: list[list[float]] = []
        for number in range(given.rounds + 2):
            said = {}
            for side in (0, 1) if number % 2 else (1, 0):
                print(file=sides[side].stdin, flush=True)
                said[side] = sides[side].stdout.readline().split()
            assert said[0][1] == said[1][1], (name, number, said)
            times += [[float(said[side][0]) / CASES[name][2] for side in (0, 1)]] if number > 1 else []
        for side in sides:
            side.stdin.close()
            side.wait(60)
        ratios = sorted(old / new for old, new in times)
        old, new = (1e3 * statistics.median(row[side] for row in times) for side in (0, 1))
        spread = f"{ratios[len(ratios) // 10]:.2f} to {ratios[-1 - len(ratios) // 10]:.2f}"
        print(f"| {name:<14} | {old:.2f} | {new:.2f} | **{statistics.median(ratios):.3f}** | {spread} |", flush=True)


if __name__ == "__main__":
    main()
