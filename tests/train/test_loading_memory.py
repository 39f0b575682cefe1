"""Loading and drawing never hold the model: anonymous memory of a process of its own, sampled while it happens.

All homes are in the spill file, so nothing but the loading itself could bring weights into memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._progress import run as watched_run

SCRIPT = """
import sys
import torch
from transformers import AutoConfig
import gemini
from gemini.train.loading import paging
from tests.peaks import rise_over

directory, how = sys.argv[1:]
paging.ROOM = 8 * 2**20
memory = gemini.MemoryBudget(cpu="1GiB", nvme_path=directory)
everything = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
config = gemini.GeminiConfig(device="cpu", memory=memory, placement=everything)
hf_config = AutoConfig.from_pretrained(directory)
torch.ones(2**22).sum()  # torch's own buffers and threads are there before
ways = {
    "load": lambda: gemini.from_pretrained(directory, config),
    "draw": lambda: gemini.from_config(hf_config, config),
}
rise, model = rise_over(ways[how])
print(rise, sum(p.numel() for p in model.parameters()) * 2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see anonymous memory")
@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("how", ["load", "draw"])
def test_loading_takes_a_small_part_of_the_weights(how: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=768, intermediate_size=2304, num_hidden_layers=14, num_attention_heads=4
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="64MB")
    root = Path(__file__).parents[2]
    run = watched_run([sys.executable, "-c", SCRIPT, str(tmp_path), how], cwd=root)
    assert run.returncode == 0, run.stderr
    rise, weights = map(int, run.stdout.split())
    assert rise < weights / 2, f"{rise} bytes more for {weights} bytes of weights"
    print(f"{how}: {rise / 1e6:.0f} MB more for {weights / 1e6:.0f} MB of weights")
