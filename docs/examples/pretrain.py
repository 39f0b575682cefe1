"""Pretrain a Llama of 100 M params from scratch, on text files, in 1 GiB of host memory and a drive.

    python pretrain.py --data my_texts/ --scratch /scratch         # 100 M params, sequences of 1,024 bytes
    python pretrain.py --toy --steps 60                            # seconds, on this folder's documentation

Stop it with Ctrl-C and start it again: it goes on from its last checkpoint, with the same bits.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gemini

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[1], help="a folder of text files")
parser.add_argument("--out", type=Path, default=Path("pretrain"))
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local drive")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--toy", action="store_true")
args = parser.parse_args()

# Bytes are the tokens here, so no tokenizer is needed. Width, depth and sequence are those of GPT-2 small.
width, layers, length, batch = (64, 2, 64, 8) if args.toy else (768, 14, 1024, 8)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=width,
    intermediate_size=8 * width // 3,
    num_hidden_layers=layers,
    num_attention_heads=max(width // 64, 2),
    max_position_embeddings=length,
)
memory = gemini.MemoryBudget(cpu="1536KiB" if args.toy else "1GiB", nvme="2GiB", nvme_path=args.scratch)

files = sorted(path for path in args.data.rglob("*") if path.suffix in (".txt", ".md"))
text = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
windows = text[: len(text) // length * length].view(-1, length)
held_out, windows = windows[:batch], windows[batch:]

torch.manual_seed(0)
model = gemini.GeminiDDP(LlamaForCausalLM(config), gemini.GeminiConfig(precision="bf16", memory=memory))
optimizer = gemini.HybridAdam(model.parameters(), lr=3e-3 if args.toy else 6e-4, betas=(0.9, 0.95), weight_decay=0.1)
warm = max(args.steps // 20, 1)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.steps - warm, 1), eta_min=6e-5),
    ],
    [warm],
)

first, checkpoint = 0, args.out / "checkpoint"
args.out.mkdir(exist_ok=True)
if checkpoint.exists():
    first = gemini.load_checkpoint(checkpoint, model, optimizer, scheduler)["step"]
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M params, {len(text):,} bytes of text, step {first}")

for step in range(first + 1, args.steps + 1):
    rows = torch.randint(len(windows), (batch,), generator=torch.Generator().manual_seed(step))
    ids = windows[rows].to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == args.steps:
        with torch.no_grad():
            ids = held_out.to(model.device)
            print(f"step {step}: loss {loss.item():.2f}, held out {model(input_ids=ids, labels=ids).loss.item():.2f}")
    if step % 500 == 0 or step == args.steps:
        gemini.save_checkpoint(checkpoint, model, optimizer, scheduler, extra={"step": step})

print(model.memory_report())
model.save_pretrained(args.out / "model")  # opens with plain transformers
