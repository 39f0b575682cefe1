"""What a rank takes of host memory to load its slices of a model (tensor parallel), at its peak.

    python benchmarks/slice_loading.py DIR --out benchmarks/reports/slice_loading_<hardware>_<date>.md

A Llama in fp32, whose largest param is its embedding, is loaded in bf16 by one process and by 2 and 4 ranks of ``tp``,
with all homes in the spill file, so that nothing but the loading itself takes memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._processes import Group, run_script
from benchmarks._report import add_out, head, mb, publish, table


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import gemini

    size, folder = settings["size"], settings["folder"]
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="16GiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(device="cpu", precision="bf16", memory=memory, placement=placement)
    torch.ones(2**22).sum()  # torch's own buffers and threads are there before
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)) if size > 1 else None
    import transformers.models.llama.modeling_llama  # noqa: F401

    def load() -> None:
        gemini.from_pretrained(f"{folder}/model", config, mesh=mesh, dtype=torch.bfloat16)

    return {"load": load}


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model and the spill files")
    parser.add_argument("--words", type=int, default=65536, help="rows of the embedding (default: %(default)s)")
    add_out(parser)
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=args.words, hidden_size=2048, intermediate_size=5504, num_hidden_layers=4, num_attention_heads=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model: Any = LlamaForCausalLM(config)
        num_params, largest = model.num_parameters(), model.get_input_embeddings().weight.numel()
        model.save_pretrained(f"{folder}/model")
        del model
        for size in (1, 2, 4):
            with Group(__file__, {"size": size, "folder": folder}, size) as group:
                before = [rank.status()["RssAnon"] for rank in group.ranks]
                group.order("load", watch=True)
                peak = max(rank.peak_anon - b for rank, b in zip(group.ranks, before, strict=True))
            rows.append([size, mb(2 * largest / size), mb(peak)])
    intro = f"{num_params / 1e6:.0f}M params in fp32 files, loaded as bf16; the largest param has {largest / 1e6:.0f}M."
    names = ["ranks of tp", "its slice of the largest param, MB", "memory at a rank's peak, MB"]
    publish([*head("Memory that loading slices takes", [intro], 1), "", *table(names, rows)], args.out)


if __name__ == "__main__":
    run_script(make_orders, main)
