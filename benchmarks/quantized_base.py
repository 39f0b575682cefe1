"""QLoRA: adapters on a base of 4-bit codes, plain and managed: losses, bytes per weight, plan and ledger, step time.

    pip install '.[quantized]'
    python benchmarks/quantized_base.py

The plain side is transformers, PEFT and bitsandbytes with ``HybridAdam`` on the plain model. Step times are taken in
turns, a step of each way after the other, so that a busy machine is busy for all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of
from benchmarks._report import MB, add_report_arguments, head, publish, table

WAYS = ("plain", "memory", "NVMe", "NVMe, checkpointing", "half on NVMe", "device stand-in")


def make(folder: Path, rank: int, *, checkpointing: bool = False) -> Any:
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def wrapped(way: str, model: Any, drive: Path, batch: Any, args: argparse.Namespace) -> Any:
    import gemini
    import gemini.testing  # the stand-in

    host: dict[str, Any] = {"nvme": "8GiB", "nvme_path": drive}
    on_nvme = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    how: dict[str, Any] = {
        "memory": {"memory": gemini.MemoryBudget(cpu="8GiB"), "trace": gemini.trace(model, batch, target="cpu")},
        "NVMe": {"memory": gemini.MemoryBudget(cpu=args.cpu, **host), "placement": on_nvme},
        "half on NVMe": {
            "memory": gemini.MemoryBudget(cpu="8GiB", **host),
            "placement": gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=0.5),
        },
        "device stand-in": {
            "memory": gemini.MemoryBudget(gpu=args.gpu, cpu="8GiB", **host), "device": "standin",
            "placement": gemini.StaticPlacement(weights_on_nvme=0.3, optimizer_on_nvme=0.5),
        },
    }[way.partition(",")[0]]  # fmt: skip
    return gemini.GeminiDDP(model, gemini.GeminiConfig(**{"device": "cpu", "precision": "bf16", **how}))


def step(model: Any, optimizer: Any, batch: Any) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> int:
    args = parse()
    import gemini
    from gemini.tiers import Tier

    shape = shape_of(args)
    batches = [make_batch(shape, number, 0) for number in range(args.steps)]
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="quantized-base-") as name:
        folder = Path(name)
        make_llama(shape, "bfloat16").save_pretrained(folder / "base")
        models, optimizers = {}, {}
        for way in WAYS:
            model = make(folder / "base", args.rank, checkpointing="checkpointing" in way)
            if way == "plain":
                coded = [p for p in model.parameters() if hasattr(p, "quant_state")]
                weights = sum(p.quant_state.shape.numel() for p in coded)
                codes = sum(p.nbytes for p in coded)
                traced = gemini.trace(model, batches[0], target="cpu")
                with gemini.MemoryTracer(model) as tracer:
                    model(**batches[0]).loss.backward()
                recorded = tracer.trace
                model.zero_grad()
            models[way] = model if way == "plain" else wrapped(way, model, folder, batches[0], args)
            adapters = [p for p in models[way].parameters() if p.requires_grad]
            optimizers[way] = gemini.HybridAdam(adapters, lr=1e-3)
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for batch in batches:
            for way in WAYS:
                began = time.perf_counter()
                losses[way].append(step(models[way], optimizers[way], batch))
                models[way].memory_report() if way != "plain" else None  # waits for what is in flight
                seconds[way].append(time.perf_counter() - began)
        state = models["plain"].state_dict()
        same = {
            way: losses[way] == losses["plain"]
            and all(value.equal(state[name]) for name, value in models[way].state_dict().items())
            for way in WAYS
        }
        engine = models["memory"]._gemini_engine
        at_home = sum(c.weights.num_bytes for c in engine.store.chunks if c.spec.coded)
        report = models["memory"].memory_report()
        planned = sum(engine.decision.plan.held[Tier.CPU].values())
        rows = []
        for way in WAYS:
            ratios = [own / plain for own, plain in zip(seconds[way][1:], seconds["plain"][1:], strict=True)]
            moved = {} if way == "plain" else models[way].memory_report()["moved"]
            read = sum(size for boundary, size in moved.items() if boundary in ("nvme->cpu", "cpu->gpu"))
            rows.append(
                [way, f"{losses[way][0]:.6f}", f"{losses[way][-1]:.6f}", "yes" if same[way] else "NO",
                 f"{read / MB:,.1f}", f"{statistics.median(seconds[way][1:]):.2f}", f"{statistics.median(ratios):.2f}"]
            )  # fmt: skip
    lines = head(
        "Adapters on a base of 4-bit codes (QLoRA)",
        [
            f"Llama of {shape['layers']} layers of {shape['hidden']}, vocabulary {shape['vocab']}, weights drawn: "
            f"{weights:,} of them in 4 bits (nf4, double quantization), LoRA of rank {args.rank} on all linear layers; "
            f"{shape['batch']} x {shape['tokens']} tokens, {args.steps} steps. On NVMe: {args.cpu} of host memory. "
            f"No GPU: the stand-in is a device with a budget of its own ({args.gpu}) in host memory."
        ],
        None, "bitsandbytes", "peft",
    )  # fmt: skip
    lines += table(
        ["", "first loss", "last loss", "same bits", "MB to where it computes", "s per step", "of plain"], rows
    )
    lines += [
        "",
        "Same bits: all losses, adapters, codes and scales after the last step. Times: medians without the first step, "
        "taken in turns; the machine had other work. With checkpointing forward is computed twice.",
        "",
        f"Codes: {codes:,} bytes, {codes / weights:.4f} per weight; at home {at_home:,} ({at_home / weights:.4f}, "
        f"pages included). Scales, beside: {traced.buffer_bytes:,} bytes with all buffers, "
        f"{traced.buffer_bytes / weights:.4f} per weight. In bf16 the same weights take 2.",
        "",
        f"In memory, planned for the host: {planned:,} bytes; peak of the ledger: {report['cpu']['peak']:,}. "
        f"Beside params at the peak of a step: traced ahead {traced.peak_bytes / MB:,.1f} MB, recorded "
        f"{recorded.peak_bytes / MB:,.1f} MB.",
    ]
    publish(lines, args.out, theme=None if args.quick else "quantized_base")
    misses = [way for way in WAYS if not same[way]]
    return 1 if misses or report["cpu"]["peak"] > planned else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=512, layers=8, vocab=4096, batch=2, tokens=128)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--cpu", default="32MiB", help="host memory with all on NVMe (default: %(default)s)")
    parser.add_argument("--gpu", default="16MiB", help="memory of the stand-in (default: %(default)s)")
    parser.add_argument("--nvme-path", type=Path, help="a folder on the drive (default: where temporary files are)")
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.tokens, args.steps = 128, 2, 32, 2
    return args


if __name__ == "__main__":
    raise SystemExit(main())
