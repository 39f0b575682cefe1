"""What a rank takes of host memory to load its slices of a model (tensor parallel), at its peak.

    python benchmarks/slice_loading.py DIR --out benchmarks/reports/slice_loading_<hardware>_<date>.md

A Llama in fp32, whose largest param is its embedding, is loaded in bf16 by one process and by 2 and 4 ranks of ``tp``,
with all homes in the spill file, so that nothing but the loading itself takes memory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemini
from benchmarks._report import add_out, head, mb, publish, table
from tests.peaks import rise_over
from tests.ranks.parallel_cases import mesh_of
from tests.ranks.pool import Pool


def loading(size: int, path: str, folder: str) -> int:
    """Bytes."""
    torch.ones(2**22).sum()  # torch's own buffers and threads are there before
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="16GiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(device="cpu", precision="bf16", memory=memory, placement=placement)
    mesh = mesh_of({"tp": size}) if size > 1 else None
    rise, _ = rise_over(lambda: gemini.from_pretrained(path, config, mesh=mesh, dtype=torch.bfloat16))
    return rise


def main() -> None:
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
            with contextlib.closing(Pool(size)) as pool:
                peak = max(pool.run(loading, size, f"{folder}/model", folder))
            rows.append([size, mb(2 * largest / size), mb(peak)])
    intro = f"{num_params / 1e6:.0f}M params in fp32 files, loaded as bf16; the largest param has {largest / 1e6:.0f}M."
    names = ["ranks of tp", "its slice of the largest param, MB", "memory at a rank's peak, MB"]
    publish([*head("Memory that loading slices takes", [intro], 1), "", *table(names, rows)], args.out)


if __name__ == "__main__":
    main()
