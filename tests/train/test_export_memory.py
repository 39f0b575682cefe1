"""Saving never holds the model: the rise of anonymous memory while it is written, sampled in a process of its own.

The weights are on NVMe, so nothing but the export itself could bring them into memory; mapped pages of files do not
count as anonymous, the system takes them back at will.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks._progress import run as watched_run

SCRIPT = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel
import gemini
from tests.peaks import rise_over

directory, precision = sys.argv[1:]
model = GPT2LMHeadModel(GPT2Config(n_embd=768, n_layer=8, n_head=8, vocab_size=4096, n_positions=64))
memory = gemini.MemoryBudget(cpu="1GiB", nvme_path=directory)
everything = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
model = gemini.GeminiDDP(model, gemini.GeminiConfig(precision=precision, memory=memory, placement=everything))
optimizer = gemini.HybridAdam(model.parameters())
model.state_dict()  # whatever allocators keep of a first read is there before

def save():
    model.save_pretrained(directory + "/out")
    gemini.save_checkpoint(directory + "/checkpoint", model, optimizer)

print(rise_over(save)[0], sum(p.numel() for p in model.parameters()) * 2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see anonymous memory")
@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_saving_takes_a_small_part_of_the_weights(precision: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    run = watched_run([sys.executable, "-c", SCRIPT, str(tmp_path), precision], cwd=root)
    assert run.returncode == 0, run.stderr
    rise, weights = map(int, run.stdout.split())
    assert rise < weights / 4, f"{rise} bytes more for {weights} bytes of weights"
