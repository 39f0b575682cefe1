"""What loading a large checkpoint, and drawing a model from scratch, take of host memory, each in a process of its own.

    python benchmarks/load_memory.py --out benchmarks/reports/load_memory_<hardware>_<date>.md

A Llama-shaped checkpoint of safetensors is written once. Then each way of getting a managed model runs in a fresh
process that is watched from outside: anonymous RSS, sampled every few milliseconds from the start of the interpreter.
``gemini.from_pretrained`` and ``gemini.from_config`` have their homes on NVMe; the peer is what transformers does
(``from_pretrained``, ``from_config``, then ``GeminiDDP(model)`` with the same budgets). The model is used afterwards,
one forward of a few tokens, and all ways of loading must give the same loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MB = 10**6
WAYS = {
    "import": "torch, transformers and gemini imported, nothing else",
    "load": "gemini.from_pretrained",
    "plain load": "transformers from_pretrained",
    "load and wrap": "transformers from_pretrained, then GeminiDDP",
    "draw": "gemini.from_config",
    "draw and wrap": "transformers from_config, then GeminiDDP",
}


def shape(layers: int):  # type: ignore[no-untyped-def]
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, dtype="bfloat16", use_cache=False, architectures=["LlamaForCausalLM"],
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


def job(way: str, folder: Path, spill: Path, layers: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import gemini

    memory = gemini.MemoryBudget(cpu="300MB", nvme="40GB", nvme_path=spill)
    config = gemini.GeminiConfig(precision="bf16", memory=memory, device="cpu")
    torch.manual_seed(0)
    began = time.perf_counter()
    if way == "import":
        return
    if way == "load":
        model = gemini.from_pretrained(folder, config)
    elif way == "draw":
        model = gemini.from_config(shape(layers), config)
    elif way.startswith("draw"):
        model = AutoModelForCausalLM.from_config(shape(layers))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    if way.endswith("wrap"):
        model = gemini.GeminiDDP(model, config)
    seconds = time.perf_counter() - began
    print(json.dumps({"event": "there", "seconds": seconds}), flush=True)
    sys.stdin.readline()
    ids = torch.arange(16)[None]
    with torch.no_grad():
        loss = float(model.eval()(input_ids=ids, labels=ids).loss)
    print(json.dumps({"event": "used", "loss": loss, "params": sum(p.numel() for p in model.parameters())}), flush=True)


def watch(arguments: list[str]) -> dict[str, float]:
    """Run a job; its peak anonymous bytes until the model was there, and what it said."""
    root = str(Path(__file__).resolve().parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    seen: dict[str, float] = {"peak": 0}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, __file__, "job", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, bufsize=0,
        )  # fmt: skip
        assert child.stdout is not None and child.stdin is not None
        os.set_blocking(child.stdout.fileno(), False)
        text, there = b"", False
        while child.poll() is None:
            try:
                with open(f"/proc/{child.pid}/status") as status:
                    anon = next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)
            except OSError:
                break
            if not there:
                seen["peak"] = max(seen["peak"], anon)
            text += child.stdout.read() or b""
            if b'"there"' in text and not there:
                there = True
                child.stdin.write(b"\n")
            time.sleep(0.004)
        text += child.stdout.read() or b""
        if child.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"{arguments} failed: {errors.read()[-2000:]}")
    for line in text.splitlines():
        if line.startswith(b"{"):
            seen |= json.loads(line)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mode", nargs="?", choices=("run", "write", "job"), default="run")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=32, help="32 make a checkpoint of 3.08 GB")
    parser.add_argument("--folder", type=Path, help="where checkpoint and spill file go (default: a temporary folder)")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, help="write a report")
    args = parser.parse_args()
    if args.mode == "write":
        return write(Path(args.rest[0]), int(args.rest[1]))
    if args.mode == "job":
        way, folder, spill, layers = args.rest
        return job(way, Path(folder), Path(spill), int(layers))
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        folder = Path(own)
        subprocess.run([sys.executable, __file__, "write", str(folder), str(args.layers)], check=True)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        lines = [
            f"Checkpoint: {size / 1e9:.2f} GB of safetensors in {len(list(folder.glob('*.safetensors')))} files, bf16; "
            "home of the chunks: cpu=300MB, the rest NVMe. Peak anonymous RSS of the whole process, from the start of "
            "the interpreter until the model is there; its imports are in the first row.",
            "",
            "| way | peak anonymous, MB | above imports, MB | s | loss of a forward |",
            "|---|---:|---:|---:|---:|",
        ]
        print("\n".join(lines), flush=True)
        base = 0.0
        for way in args.ways:
            seen = watch([way, str(folder), str(folder), str(args.layers)])
            base = base or seen["peak"]
            loss = f"{seen['loss']:.6f}" if "loss" in seen else ""
            seconds = f"{seen['seconds']:.1f}" if "seconds" in seen else ""
            lines.append(
                f"| {WAYS[way]} | {seen['peak'] / MB:,.0f} | {(seen['peak'] - base) / MB:,.0f} | {seconds} | {loss} |"
            )
            print(lines[-1], flush=True)
    if args.out is not None:
        import platform

        command = "python benchmarks/load_memory.py " + " ".join(sys.argv[1:])
        head = [
            f"# Memory of loading and drawing, {time.strftime('%Y-%m-%d')}", "",
            f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs, Python {platform.python_version()}. "
            f"Command: `{command}`", "",
        ]  # fmt: skip
        args.out.write_text("\n".join(head + lines) + "\n")


if __name__ == "__main__":
    main()
