"""Long sequences: wide parts in tiles of tokens, blocks computed again in backward, their inputs kept on a drive.

    python long_context.py --length 131072 --model Llama-3.1-8B/ --gpu 22GiB --cpu 64GiB --nvme 200GiB
    python long_context.py --length 512 --picture long.png         # seconds, on a toy

The second line draws the recorded step: activations go to the drive in forward and come back in backward.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig

import gemini

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
parser.add_argument("--model", type=Path, help="a model folder; without one a toy is trained")
parser.add_argument("--gpu")
parser.add_argument("--cpu", default="3MiB")
parser.add_argument("--nvme", default="64MiB")
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local drive")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--picture", type=Path, help="draw the last step into this file")
args = parser.parse_args()

settings = gemini.GeminiConfig(
    precision="bf16",
    memory=gemini.MemoryBudget(gpu=args.gpu, cpu=args.cpu, nvme=args.nvme, nvme_path=args.scratch),
    tile_tokens=max(args.length // 16, 64),  # MLPs and the head with its loss: never wider than this many tokens
    offload_activations="nvme",  # what a checkpointed block keeps, its input, waits on the drive
)
torch.manual_seed(0)
if args.model:
    model = gemini.from_pretrained(args.model, settings)
else:
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=args.length, **shape)
    model = gemini.from_config(config, settings)
model.train()
model.gradient_checkpointing_enable()
optimizer = gemini.HybridAdam(model.parameters(), lr=1e-5 if args.model else 3e-3)

ids = torch.randint(model.config.vocab_size, (1, args.length))  # your data loader stands here
with model.recording() as recording:
    for step in range(1, args.steps + 1):
        batch = ids.to(model.device)
        loss = model(input_ids=batch, labels=batch).loss  # there are no logits: that is the point
        waiting = model.memory_report()["nvme"]["holders"].get("activations", 0)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.2f}, {waiting:,} bytes of activations waited on the drive")

print(recording.timeline)
if args.picture:
    from gemini import pictures

    pictures.draw(args.picture, recording.timeline)
