"""Full finetuning of an 8B Llama on a card of 24 GiB, planned anywhere, and the same program on smaller models.

python finetune_8b.py --size 8b --plan-only                    # the plan on an RTX 4090: no weights, no GPU needed
python finetune_8b.py --size 8b --model Llama-3.1-8B/ --scratch /scratch
python finetune_8b.py --size tenth                             # 0.8 B params, drawn: 4 GiB of memory and a drive
python finetune_8b.py                                          # a toy, in seconds
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig

import gemini
from gemini.planning.hardware import load_hardware

SIZES = {  # width, inner width, layers, heads, heads of keys, vocabulary; tokens of a step; budgets
    "8b": (4096, 14336, 32, 32, 8, 128256, 4096, {"gpu": "22GiB", "cpu": "64GiB", "nvme": "120GiB"}),
    "tenth": (2048, 7168, 12, 16, 4, 32064, 256, {"cpu": "4GiB", "nvme": "12GiB"}),
    "toy": (64, 224, 2, 4, 2, 256, 64, {"cpu": "2MiB", "nvme": "8MiB"}),
}

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="toy")
parser.add_argument("--model", type=Path, help="a model folder; without one weights are drawn")
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local drive")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--plan-only", action="store_true")
parser.add_argument("--picture", type=Path, help="with --plan-only: draw the predicted step into this file")
args = parser.parse_args()

width, inner, layers, heads, key_heads, vocabulary, length, budgets = SIZES[args.size]
config = LlamaConfig(
    hidden_size=width,
    intermediate_size=inner,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=key_heads,
    vocab_size=vocabulary,
)
if args.model:
    config = AutoConfig.from_pretrained(args.model)
memory = gemini.MemoryBudget(**budgets, nvme_path=args.scratch)

# What a step holds besides params, and for how long: from shapes alone.
target = "cuda" if args.plan_only and "gpu" in budgets else None
trace = gemini.trace(config, gemini.batch_for(config, 1, length), target=target, checkpointing=True)
if args.plan_only:  # does it fit, and how long does a step take there?
    plan = gemini.plan(trace, load_hardware("rtx4090"), memory, offload_activations="auto")
    predicted = gemini.simulate(plan, load_hardware("rtx4090"))
    print(plan, predicted, sep="\n")
    if args.picture:
        from gemini import pictures

        pictures.draw(args.picture, predicted)
    raise SystemExit

torch.manual_seed(0)
settings = gemini.GeminiConfig(precision="bf16", memory=memory, trace=trace, offload_activations="auto")
model = gemini.from_pretrained(args.model, settings) if args.model else gemini.from_config(config, settings)
model.train()
model.gradient_checkpointing_enable()
optimizer = gemini.HybridAdam(model.parameters(), lr=1e-5 if args.model else 1e-3)

ids = torch.randint(config.vocab_size, (1, length))  # your data loader stands here
for step in range(1, args.steps + 1):
    loss = model(input_ids=ids.to(model.device), labels=ids.to(model.device)).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.2f}")
print(model.memory_report())
