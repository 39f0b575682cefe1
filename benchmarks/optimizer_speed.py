"""Tokens per second and memory of every optimizer, with its states in memory and on a drive, and of LoRA.

    python benchmarks/optimizer_speed.py --nvme-path /scratch
    python benchmarks/optimizer_speed.py --quick

The same Llama and the same batches; each optimizer and each home is a process of its own, and they take turns: every
number is a median over rounds, and ratios to AdamW with the same home are taken inside a round. Memory is seen from
outside: the peak of anonymous RSS over all steps, less what the process had before the model (interpreter, torch,
transformers, a step of a tiny model). With "nvme" weights, masters, states and gradients are in the spill file.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._memory import MALLOC, trim
from benchmarks._models import add_model_arguments, llama_config, shape_of, skewed_batch
from benchmarks._processes import Group, run_script
from benchmarks._report import add_report_arguments, head, mb, publish, table
from benchmarks._rounds import in_turn, median_ratio

HOMES = ("ram", "nvme")
BASE = "AdamW"


# ---- methods ---------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    lr: float
    make: Callable[[Any, float], Any]
    config: Callable[[], dict[str, Any]] = dict
    lora: bool = False


def methods() -> dict[str, Method]:
    import gemini
    from gemini import optim

    compact = {"states": "compact"}

    def adopted() -> Any:
        return optim.adopt(torch.optim.Adafactor)

    def of(rule: Any, **more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"optimizer": rule(), **more}

    def lomo(params: Any, lr: float) -> Any:
        return optim.LOMO(params, lr=lr)

    found = {
        "AdamW": Method(3e-4, lambda p, lr: gemini.HybridAdam(p, lr=lr)),
        "AdamW, compact": Method(3e-4, lambda p, lr: gemini.HybridAdam(p, lr=lr), lambda: compact),
        "Lion": Method(3e-5, lambda p, lr: optim.Lion(p, lr=lr), of(optim.LionRule)),
        "Lion, compact": Method(3e-5, lambda p, lr: optim.Lion(p, lr=lr), of(optim.LionRule, **compact)),
        "SGD, momentum": Method(1e-2, lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9), of(optim.SGDRule)),
        "SGD, momentum, compact": Method(
            1e-2, lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9), of(optim.SGDRule, **compact)
        ),
        "LOMO": Method(3e-2, lomo, of(optim.PlainSGDRule, gradients="transient")),
        "AdaLomo": Method(3e-3, lambda p, lr: optim.AdaLomo(p, lr=lr), of(optim.AdaLomoRule)),
        "Adafactor, adopted": Method(1e-3, lambda p, lr: adopted().make(p, lr=lr), of(adopted)),
        "Muon": Method(
            3e-4,
            lambda p, lr: optim.Muon(p, lr=lr, adjust_lr="match_rms_adamw"),
            of(optim.MuonRule),
        ),
        "LoRA, rank 8, AdamW": Method(1e-3, lambda p, lr: gemini.HybridAdam(p, lr=lr), lora=True),
    }
    return found


def wrap(model: Any, method: Method, lr: float, **config: Any) -> tuple[Any, Any]:
    """The model, managed, and what the optimizer of the method is given."""
    import gemini
    from gemini import optim

    if method.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = {"precision": "bf16", "device": "cpu", **config, **method.config()}
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(**settings))
    if isinstance(settings.get("optimizer"), optim.MuonRule):
        return model, optim.muon_groups(model, lr=lr / 3)
    return model, [param for param in model.parameters() if param.requires_grad]


# ---- a process -------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import gemini
    from benchmarks._models import build
    from benchmarks._report import set_threads

    state: dict[str, Any] = {}
    set_threads(settings["threads"])

    def begin(shape: dict[str, int]) -> dict[str, Any]:
        config = llama_config(
            shape["hidden"], shape["layers"], shape["vocab"], positions=shape["tokens"], attn_implementation="eager"
        )
        how: dict[str, Any] = {"memory": gemini.MemoryBudget(cpu="8GiB")}
        if settings["home"] == "nvme":
            how["memory"] = gemini.MemoryBudget(cpu=settings["cpu"], nvme="16GiB", nvme_path=settings["folder"])
            how["placement"] = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
        method = methods()[settings["method"]]
        plain = build(config)
        numel = sum(param.numel() for param in plain.parameters())
        state["model"], trained = wrap(plain, method, method.lr, **how)
        state["optimizer"], state["step"], state["shape"] = method.make(trained, method.lr), 0, shape
        del plain
        trim()
        return {"params": numel}

    def train(steps: int) -> dict[str, Any]:
        model, optimizer, shape = state["model"], state["optimizer"], state["shape"]
        start = time.perf_counter()
        for _ in range(steps):
            batch = skewed_batch(shape["vocab"], shape["batch"], shape["tokens"], state["step"])
            loss = model(**batch).loss
            loss.backward()
            if not optimizer.step_in_backward:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
        report = model.memory_report()
        return {"seconds": time.perf_counter() - start, "loss": loss.item(), "moved": report["moved"]}

    def warm_up() -> None:
        begin({"hidden": 64, "layers": 1, "vocab": 512, "batch": 1, "tokens": 32})
        train(1)
        state.clear()
        trim()

    return {"warm_up": warm_up, "build": lambda: begin(settings["shape"]), "train": train}


# ---- from outside ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=768, layers=6, vocab=8192, batch=1, tokens=128)
    parser.add_argument("--methods", nargs="+", default=[], help="which are tried (default: all)")
    parser.add_argument("--homes", nargs="+", default=list(HOMES), choices=HOMES)
    parser.add_argument("--steps", type=int, default=3, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", default="600MiB", help="host memory beside the drive (default: %(default)s)")
    parser.add_argument("--nvme-path", default=None, help="a folder on the drive (default: the folder for temporaries)")
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.rounds, args.steps = 256, 2, 2048, 1, 1
    tokens = args.batch * args.tokens * args.steps
    names = [(method, home) for home in args.homes for method in (args.methods or methods())]
    groups: dict[tuple[str, str], Group] = {}
    before: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    moved: dict[tuple[str, str], dict[str, int]] = {}
    numel = 0
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="optimizer-speed-") as folder:
        try:
            for method, home in names:
                settings = {"method": method, "home": home, "shape": shape_of(args), "folder": folder,
                            "cpu": args.cpu, "threads": args.threads}  # fmt: skip
                group = Group(__file__, settings, environment=lambda rank: MALLOC, timeout=args.timeout, ranked=False)
                groups[method, home] = group
                group.order("warm_up")
                before[method, home] = group.ranks[0].status()["RssAnon"]
                numel = group.order("build")[0]["params"]
            for number, name in in_turn(names, args.rounds, order="shuffled"):
                (found,) = groups[name].order("train", watch=True, steps=args.steps)
                peaks[name] = max(peaks[name], groups[name].ranks[0].peak_anon - before[name])
                if number >= 0:
                    seconds[name].append(found["seconds"])
                    moved[name] = found["moved"]
                print(f"{number} {name}: {tokens / found['seconds']:.0f} tokens/s", file=sys.stderr, flush=True)
        finally:
            for group in groups.values():
                group.close()
    rows = []
    for method, home in names:
        own = seconds[method, home]
        crossing = sum(moved[method, home].get(way, 0) for way in ("nvme->cpu", "cpu->nvme")) / numel
        rows.append([
            method, home, f"{tokens / statistics.median(own):,.0f}",
            f"{median_ratio(seconds[BASE, home], own):.2f}" if (BASE, home) in seconds else "",
            mb(peaks[method, home]), f"{peaks[method, home] / numel:.2f}", f"{crossing:.1f}",
        ])  # fmt: skip
    what = (
        f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {numel:,} params, bf16; {args.batch} x "
        f"{args.tokens} tokens a step, clipped to 1 where gradients are kept; {args.threads} threads; {args.steps} "
        f"steps a round, {args.rounds} rounds. On the drive: {args.cpu} of memory beside it."
    )
    columns = ["method", "home", "tokens/s", "over AdamW", "peak MB", "per param", "over the drive per param and step"]
    publish(
        [*head("Every optimizer, in memory and on a drive", [what]), *table(columns, rows)], args.out,
        theme=None if args.quick else "optimizer_speed",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    run_script(make_orders, main)
