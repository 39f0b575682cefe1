"""LoRA on a base that is larger than host memory: it is read from its files straight to a drive.

    python lora.py --base Qwen2.5-7B/ --data chats.txt --scratch /scratch --cpu 4GiB --nvme 40GiB
    python lora.py --toy                                           # seconds, on a small base made here

`gemini sft --use_peft --dataset_name chats.jsonl` does the same without a program, with chat templates and masks.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gemini

parser = argparse.ArgumentParser()
parser.add_argument("--base", type=Path, help="a model folder with safetensors and a tokenizer")
parser.add_argument("--data", type=Path, help="a text file")
parser.add_argument("--out", type=Path, default=Path("adapter"))
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local drive")
parser.add_argument("--cpu", default="1500KiB")
parser.add_argument("--nvme", default="16MiB")
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--toy", action="store_true")
args = parser.parse_args()

if args.toy:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    args.base = Path(tempfile.mkdtemp()) / "base"
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).bfloat16().save_pretrained(args.base)
    tokens = list(b"User: how are you? Assistant: fine, thank you. " * 40)
else:
    tokens = AutoTokenizer.from_pretrained(args.base)(args.data.read_text())["input_ids"]
windows = torch.tensor(tokens[: len(tokens) // args.length * args.length]).view(-1, args.length)

lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
memory = gemini.MemoryBudget(cpu=args.cpu, nvme=args.nvme, nvme_path=args.scratch)
model = gemini.from_pretrained(
    args.base,
    gemini.GeminiConfig(precision="bf16", memory=memory),
    adapt=lambda model: get_peft_model(model, lora),  # before the weights are read
)
model.train()
model.print_trainable_parameters()
optimizer = gemini.HybridAdam(model.parameters(), lr=2e-3 if args.toy else 2e-4)

for step in range(1, args.steps + 1):
    rows = torch.randint(len(windows), (2,), generator=torch.Generator().manual_seed(step))
    ids = windows[rows].to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 10 == 0:
        print(f"step {step}: loss {loss.item():.2f}")

print(model.memory_report())
model.save_pretrained(args.out)  # the adapter alone: opens with plain PEFT on the same base
