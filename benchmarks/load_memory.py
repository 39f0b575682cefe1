"""What loading a large checkpoint, and drawing a model from scratch, take of host memory, each in a process of its own.

    python benchmarks/load_memory.py --out benchmarks/reports/load_memory_<hardware>_<date>.md

A Llama-shaped checkpoint of safetensors is written once. Then each way of getting a managed model runs in a fresh
process that is watched from outside: anonymous RSS, sampled every few milliseconds from the start of the interpreter.
``gemini.from_pretrained`` and ``gemini.from_config`` have their homes on NVMe; the peer is what transformers does
(``from_pretrained``, ``from_config``, then ``GeminiDDP(model)`` with the same budgets). The model is used afterwards,
one forward of a few tokens, and all ways of loading must give the same loss.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._models import llama_config
from benchmarks._processes import Group, run_script
from benchmarks._report import MB, add_out, head, mb, publish, table

WAYS = {
    "import": "torch, transformers and gemini imported, nothing else",
    "load": "gemini.from_pretrained",
    "plain load": "transformers from_pretrained",
    "load and wrap": "transformers from_pretrained, then GeminiDDP",
    "draw": "gemini.from_config",
    "draw and wrap": "transformers from_config, then GeminiDDP",
}


def shape(layers: int) -> Any:
    return llama_config(
        2048, layers, 32000, intermediate=5632, heads=32, kv_heads=4, positions=2048, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def write(folder: Path, layers: int) -> None:
    """A checkpoint of random values, in files of at most 1 GB and their index."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = shape(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, param in model.named_parameters():
        value = torch.ones(param.shape, dtype=torch.bfloat16)
        if param.dim() > 1:
            value.normal_(0, 0.02)
        if sum(t.numel() for t in files[-1].values()) + value.numel() > 500 * MB:
            files.append({})
        files[-1][name] = value
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


# ---- the watched process ---------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    import gemini

    way, folder = settings["way"], settings["folder"]
    memory = gemini.MemoryBudget(cpu="300MB", nvme="40GB", nvme_path=folder)
    config = gemini.GeminiConfig(precision="bf16", memory=memory, device="cpu")
    state: dict[str, Any] = {}

    def make() -> float:
        torch.manual_seed(0)
        began = time.perf_counter()
        if way == "load":
            model = gemini.from_pretrained(folder, config)
        elif way == "draw":
            model = gemini.from_config(shape(settings["layers"]), config)
        elif way.startswith("draw"):
            model = AutoModelForCausalLM.from_config(shape(settings["layers"]))
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
        state["model"] = gemini.GeminiDDP(model, config) if way.endswith("wrap") else model
        return time.perf_counter() - began

    def use() -> float:
        ids = torch.arange(16)[None]
        with torch.no_grad():
            return float(state["model"].eval()(input_ids=ids, labels=ids).loss)

    return {"make": make, "use": use}


# ---- from outside ----------------------------------------------------------------------------------------------------


def watch(way: str, folder: Path, layers: int) -> tuple[int, str, str]:
    """The peak of anonymous bytes until the model was there, its seconds, and its loss."""
    settings = {"way": way, "folder": str(folder), "layers": layers}
    with Group(__file__, settings, ranked=False, watch=True, patience=600) as group:
        (rank,) = group.ranks
        peak = rank.peak_anon
        if way == "import":
            return peak, "", ""
        (seconds,) = group.order("make")
        peak = max(peak, rank.peak_anon)
        (loss,) = group.order("use")
    return peak, f"{seconds:.1f}", f"{loss:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=32, help="32 make a checkpoint of 3.08 GB")
    parser.add_argument("--folder", type=Path, help="where checkpoint and spill file go (default: a temporary folder)")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    add_out(parser)
    args = parser.parse_args()
    if args.write is not None:
        return write(args.write, args.layers)
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        folder = Path(own)
        subprocess.run([sys.executable, __file__, f"--write={folder}", f"--layers={args.layers}"], check=True)
        files = list(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        rows, base = [], 0
        for way in args.ways:
            peak, seconds, loss = watch(way, folder, args.layers)
            base = base or peak
            rows.append([WAYS[way], mb(peak, 0), mb(peak - base, 0), seconds, loss])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    lines = [
        f"Checkpoint: {size / 1e9:.2f} GB of safetensors in {len(files)} files, bf16; home of the chunks: cpu=300MB, "
        "the rest NVMe. Peak anonymous RSS of the whole process, from the start of the interpreter until the model is "
        "there; its imports are in the first row.",
    ]
    names = ["way", "peak anonymous, MB", "above imports, MB", "s", "loss of a forward"]
    publish([*head("Memory of loading and drawing", lines), *table(names, rows)], args.out)


if __name__ == "__main__":
    run_script(make_orders, main)
