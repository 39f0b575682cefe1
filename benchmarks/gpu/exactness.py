"""20 steps of a Llama of 219M params on the GPU: the same bits in every placement.

    python benchmarks/gpu/exactness.py --out FOLDER
    python benchmarks/gpu/exactness.py --device standin --tiny     # to try the script

Losses, gradient norms, and after the last step all masters and states, as SHA-256; torch's deterministic algorithms
are on. The first placement runs twice: a GPU that does not repeat itself could not be compared with anything.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA begins: cuBLAS then adds up in one order
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import gemini
from benchmarks._memory import free_disk
from benchmarks._report import table
from benchmarks.gpu import _llama, _part
from benchmarks.gpu._card import Card, host_budget
from benchmarks.gpu._training import CLIP, CLIPPED, Training, tight_gpu, trace_of

PLACEMENTS: dict[str, dict[str, float]] = {
    "all on the GPU": {"weights_on_gpu": 1, "optimizer_on_gpu": 1},
    "weights on the GPU, states in host memory": {"weights_on_gpu": 1},
    "all in host memory": {},
    "mixed over GPU, host and NVMe": {
        "weights_on_gpu": 0.4, "optimizer_on_gpu": 0.3, "weights_on_nvme": 0.2, "optimizer_on_nvme": 0.3
    },
    "all on NVMe": {"weights_on_nvme": 1, "optimizer_on_nvme": 1},
}  # fmt: skip
if "updates_on_gpu" in gemini.StaticPlacement.__dataclass_fields__:
    PLACEMENTS["states in host memory, updated through the GPU"] = {"weights_on_gpu": 0.4, "updates_on_gpu": 1}


def digest_of(model: Any, optimizer: Any, names: Sequence[str]) -> str:
    """Of all masters and states; one after the other, read by name."""
    found = hashlib.sha256()
    for name in names:
        state = optimizer.full_state(name)
        for tensor in (model.full_param(name, torch.float32), *(state[key] for key in sorted(state))):
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def train(training: Training, steps: int) -> dict[str, Any]:
    losses, norms = [], []
    for _ in range(steps):
        loss = training.model(**training.batch()).loss
        loss.backward()
        norms.append(float(training.model.clip_grad_norm_(CLIP)))
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    names = [name for name, _ in training.model.named_parameters()]
    states = digest_of(training.model, training.optimizer, names)
    moved = dict(training.finish()["moved"])
    return {"losses": losses, "norms": norms, "states": states, "moved in a step": moved}


def said_of(
    runs: dict[str, dict[str, Any]], shape: _llama.Shape, tokens: int, steps: int
) -> tuple[list[str], list[str]]:
    """What is to be said of these runs, and which of them differ from the first one."""
    first = runs["again"]
    rows = []
    for name, own in runs.items():
        same = [own[key] == first[key] for key in ("losses", "norms", "states")]
        moved = ", ".join(f"{way} {n / 1e9:.2f}" for way, n in own["moved in a step"].items() if n)
        told = f"{name if name != 'again' else f'{next(iter(PLACEMENTS))}, once more'}"
        rows.append(
            [told, *("same" if one else "DIFFERENT" for one in same), f"{own['seconds']:.1f}", moved or "nothing"]
        )
    lines = [
        f"{steps} steps of {shape.params:,} params, bf16, {tokens} tokens per step, clipping to {CLIP}: loss "
        f"{first['losses'][0]:.4f} -> {first['losses'][-1]:.4f}, norm {first['norms'][0]:.3f} -> "
        f"{first['norms'][-1]:.3f}",
        "",
        *table(["placement", "losses", "norms", "masters and states", "seconds", "GB moved in a step"], rows),
    ]
    return lines, [row[0] for row in rows if "DIFFERENT" in row]


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    torch.use_deterministic_algorithms(True)  # with warn_only, attention of cuDNN adds up in any order
    shape = _llama.SHAPES["tiny" if args.tiny else args.shape]
    tokens, seq_len, steps = (64, 32, 4) if args.tiny else (args.tokens, args.seq_len, args.steps)
    sizes = {"cpu": min(host_budget(args.host), 64 * shape.params + 2**30), "nvme": int(free_disk(args.spill) * 0.8)}
    trace = trace_of(shape, tokens, seq_len, card)
    results.add("shape", shape._asdict() | {"params": shape.params, "tokens": tokens, "steps": steps})
    runs: dict[str, dict[str, Any]] = {}
    slowest = 0.0
    for name in ("again", *PLACEMENTS):
        if runs and results.left() < 1.5 * slowest:
            results.say(f"{name}: not run, no time left")
            continue
        before = results.left()
        fractions = PLACEMENTS[next(iter(PLACEMENTS)) if name == "again" else name]
        placement = gemini.StaticPlacement(**fractions)
        memory = gemini.MemoryBudget(gpu=tight_gpu(shape, trace, fractions, card), **sizes, nvme_path=args.spill)
        training = Training(card, shape, tokens, seq_len, {"memory": memory, "placement": placement, "trace": trace})
        training.use(CLIPPED)
        runs[name] = train(training, steps) | {"seconds": before - results.left()}
        training.close()
        slowest = max(slowest, runs[name]["seconds"])
        results.add("runs", runs)
        results.say_so_far(*said_of(runs, shape, tokens, steps)[0])
    lines, differing = said_of(runs, shape, tokens, steps)
    results.say(*lines)
    num = len(runs) - 1
    said = f"MISSED by {'; '.join(differing)}" if differing else "met"
    results.say(f"- {num} placements; goal the same bits: {said}", "")
    if differing:
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=150)
    parser.add_argument("--shape", choices=_llama.SHAPES, default="200m", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="per step (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    return _part.run("exactness", parser, measure, argv)


if __name__ == "__main__":
    main()
