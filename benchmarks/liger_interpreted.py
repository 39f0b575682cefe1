"""Liger's kernels under Gemini, on a CPU: Triton's interpreter runs them.

    pip install liger-kernel triton
    python benchmarks/liger_interpreted.py --out benchmarks/reports/liger_interpreted_<hardware>_<date>.md

Models of transformers are patched by Liger (rope, SwiGLU, and the fused head and loss) and trained for three steps: in
plain torch, managed in memory, managed with everything on NVMe, and with checkpointing. The losses and weights must be
the same bits. Liger's RMSNorm is left out: Triton 3.7's interpreter does not run it.

Triton's interpreter takes no Python float as an argument of a kernel; here it is given one as a scalar of fp32.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

import gemini
from benchmarks._report import add_out, head, publish, table

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES),
}
WAYS = ("plain", "memory", "nvme", "nvme, checkpointing")


def let_floats_in() -> None:
    """The interpreter makes scalars of ints alone."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def scalar(arg: Any) -> Any:
        if not isinstance(arg, float):
            return convert(arg)
        return tl.core.tensor(interpreter.TensorHandle(numpy.array([arg], numpy.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = scalar


def count_kernels() -> Counter[str]:
    """How often each kernel was run, from now on."""
    from triton.runtime import interpreter

    seen, call = Counter[str](), interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[self.fn.__name__] += 1
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    return seen


def made(config: Any, *, liger: bool) -> Any:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    if liger:
        _apply_liger_kernel_to_instance(model, rms_norm=False)
    return model


def trained(model: Any, parameters: Callable[[], Any]) -> list[float]:
    """The losses of the steps."""
    optimizer, losses = gemini.HybridAdam(parameters(), lr=1e-3), []
    ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(config: Any, way: str, folder: str, *, liger: bool = True) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights afterwards."""
    model = made(config, liger=liger)
    if way == "plain":
        losses = trained(model, model.parameters)
        return losses, dict(model.state_dict())
    if "checkpointing" in way:
        model.gradient_checkpointing_enable()
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0) if "nvme" in way else None
    settings: dict[str, Any] = {} if placement is None else {"placement": placement}
    managed: Any = gemini.GeminiDDP(
        model, gemini.GeminiConfig(precision="fp32", device="cpu", memory=memory, **settings)
    )
    losses = trained(managed, managed.parameters)
    return losses, managed.state_dict(dtype=torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    args = parser.parse_args()
    let_floats_in()
    rows, wrong, seen = [], 0, count_kernels()
    with tempfile.TemporaryDirectory() as folder:
        for family, config in FAMILIES.items():
            without, _ = run(config, "plain", folder, liger=False)
            losses, weights = run(config, "plain", folder)
            for way in WAYS[1:]:
                seen.clear()
                found, state = run(config, way, folder)
                same = found == losses and all(torch.equal(state[name], weights[name]) for name in weights)
                wrong += not same
                off = max(abs(a - b) for a, b in zip(losses, without, strict=True))
                rows.append(
                    [family, way, f"{losses[-1]:.6f}", f"{off:.1e}", len(seen), "the same" if same else "DIFFERENT"]
                )
                wrong += not seen
    columns = [
        "model",
        "managed",
        "loss of step 3",
        "off torch without Liger",
        "kernels",
        "losses and weights against plain",
    ]
    said = [
        "Llama-like models of 2 layers of width 32, fp32, three steps; rope, SwiGLU and the fused head and loss are "
        "Liger's. Kernels: how many different ones were run."
    ]
    lines = [
        *head("Liger's kernels, interpreted on a CPU", said, None, "liger-kernel", "triton"),
        *table(columns, rows),
    ]
    publish(lines, args.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
