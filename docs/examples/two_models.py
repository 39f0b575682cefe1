"""Two models in one budget, as in reinforcement learning: a policy is trained, a frozen reference holds it back.

    python two_models.py --policy Qwen2.5-1.5B/ --gpu 20GiB --cpu 48GiB
    python two_models.py                                           # seconds, on a toy

Both are parts of one module, so they share chunks, tiers, plan and budget: 14 bytes per param of the policy, 2 of the
reference. The reward here is the share of the letter "e" among what the policy writes.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gemini


class Pair(nn.Module):
    """Log-probabilities of the same tokens by both models."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)

    def forward(self, ids: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            before = log_probs(self.reference(input_ids=ids).logits, ids, start)
        return log_probs(self.policy(input_ids=ids).logits, ids, start), before


def log_probs(logits: torch.Tensor, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Of each token from ``start`` on, given those before it."""
    logits = logits[:, start - 1 : -1].float().log_softmax(-1)
    return logits.gather(-1, ids[:, start:, None]).squeeze(-1)


parser = argparse.ArgumentParser()
parser.add_argument("--policy", type=Path, help="a model folder; without one a toy that reads bytes")
parser.add_argument("--gpu")
parser.add_argument("--cpu", default="1700KiB")
parser.add_argument("--nvme", default="8MiB")
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local drive")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=128, eos_token_id=None, pad_token_id=0, **shape)
policy = AutoModelForCausalLM.from_pretrained(args.policy) if args.policy else LlamaForCausalLM(config)
memory = gemini.MemoryBudget(gpu=args.gpu, cpu=args.cpu, nvme=args.nvme, nvme_path=args.scratch)
pair = gemini.GeminiDDP(Pair(policy), gemini.GeminiConfig(precision="bf16", memory=memory))
optimizer = gemini.HybridAdam(pair.parameters(), lr=1e-5 if args.policy else 1e-2)

prompt, letter = torch.tensor([list(b"the ")] * 8, device=pair.device), ord("e")
for step in range(1, args.steps + 1):
    ids = pair.policy.generate(prompt, max_new_tokens=24, do_sample=True)
    reward = (ids[:, prompt.shape[1] :] == letter).float().mean(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    now, before = pair(ids, prompt.shape[1])
    drift = (before - now).exp() - (before - now) - 1  # how far from the reference, never negative
    loss = (0.02 * drift - advantage[:, None] * now).mean()
    loss.backward()
    pair.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: reward {reward.mean().item():.3f}, drift {drift.mean().item():.3f}")

print(pair.memory_report())
