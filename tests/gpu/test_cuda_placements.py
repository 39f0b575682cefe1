"""On a GPU: the same bits wherever chunks live, and the GPU budget kept, measured by torch's own allocator."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from tests.gpu.gpu_cases import budget
from tests.scaling import backward, clip_grads, make_step
from tests.world import world_of

STEPS = 4


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(config: gemini.GeminiConfig) -> tuple[list[float], dict[str, torch.Tensor], torch.nn.Module]:
    model = gemini.GeminiDDP(build(), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(1)  # random tokens: a loss falls on those that were seen before
        for _ in range(2):
            tokens = torch.randint(0, 1000, (2, 64), generator=generator).cuda()
            loss = model(input_ids=tokens, labels=tokens).loss
            backward(model, loss / 2)
            seen.append(loss.item())
        seen.append(clip_grads(model, optimizer, 1.0).item())
        make_step(model, optimizer)
        optimizer.zero_grad()
        world_of(model).check()
    return seen, model.state_dict(dtype=torch.float32), model


def placements(tmp_path: Path) -> dict[str, gemini.GeminiConfig]:
    nvme = gemini.MemoryBudget(gpu=budget("8MiB"), cpu="64MiB", nvme="1GiB", nvme_path=tmp_path)
    static = gemini.StaticPlacement
    return {
        "all on the gpu": gemini.GeminiConfig(memory=gemini.MemoryBudget(gpu=budget("2GiB"), cpu="1GiB")),
        "windows on the gpu": gemini.GeminiConfig(memory=gemini.MemoryBudget(gpu=budget("8MiB"), cpu="1GiB")),
        "all on nvme": gemini.GeminiConfig(memory=nvme, placement=static(weights_on_nvme=1, optimizer_on_nvme=1)),
        "half and half": gemini.GeminiConfig(
            memory=gemini.MemoryBudget(gpu=budget("64MiB"), cpu="1GiB", nvme="1GiB", nvme_path=tmp_path),
            placement=static(weights_on_gpu=0.5, optimizer_on_gpu=0.4, weights_on_nvme=0.3, optimizer_on_nvme=0.3),
        ),
    }


def test_same_bits_wherever_chunks_live(tmp_path: Path) -> None:
    results = {name: train(config)[:2] for name, config in placements(tmp_path).items()}
    seen, weights = results.pop("all on the gpu")
    for name, (other_seen, other_weights) in results.items():
        assert other_seen == seen, name
        assert all(torch.equal(other_weights[key], weights[key]) for key in weights), name


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_precision_trains(precision: str) -> None:
    seen, weights, _ = train(gemini.GeminiConfig(precision=precision, memory=gemini.MemoryBudget(cpu="1GiB")))
    assert seen[-3] < seen[0]
    assert all(value.isfinite().all() for value in weights.values())


def test_planes_and_windows_stay_within_the_gpu_budget() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = gemini.GeminiConfig(memory=gemini.MemoryBudget(gpu=budget("8MiB"), cpu="1GiB"))
    model = gemini.GeminiDDP(build(), config)
    with model.gathered([model.lm_head.weight]), torch.no_grad():
        peak = torch.cuda.max_memory_allocated()
        assert model.lm_head.weight.isfinite().all()  # with temporaries of the test's own
    assert peak - before <= 8 * 2**20
