"""Training on two machines: the processes of each share a copy of the model, the two copies add up their gradients.

    sbatch two_nodes.sbatch                                        # see there
    torchrun --nproc-per-node 2 two_nodes.py --steps 10            # two processes of one machine, a toy

Only sums of gradients go over the network; gathering weights stays inside of a machine. A process that is told to stop
(SIGTERM) stops all after the same step, with a checkpoint; started again, all go on from it.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from gemini.ranks.launch import tell_torch

parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, help="a model folder that all machines see; without one a toy")
parser.add_argument("--out", type=Path, default=Path("two_nodes"), help="a folder that all machines see")
parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a local drive of each machine")
parser.add_argument("--cpu", default="8MiB", help="of each machine")
parser.add_argument("--nvme", default="16MiB", help="of each machine")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))

tell_torch()  # what srun says, in the variables of torchrun
world, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (world // here, here), mesh_dim_names=("dp_replicate", "dp")) if world > 1 else None

settings = gemini.GeminiConfig(
    precision="bf16",
    memory=gemini.MemoryBudget(cpu=args.cpu, nvme=args.nvme, nvme_path=args.scratch),
)
torch.manual_seed(0)
if args.model:
    model = gemini.from_pretrained(args.model, settings, mesh=mesh)
else:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = gemini.GeminiDDP(LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)), settings, mesh=mesh)
model.train()
optimizer = gemini.HybridAdam(model.parameters(), lr=1e-5 if args.model else 1e-3)
rank, parts = gemini.data_rank(mesh)

first, checkpoint = 0, args.out / "checkpoint"
args.out.mkdir(exist_ok=True)
if checkpoint.exists():
    first = gemini.load_checkpoint(checkpoint, model, optimizer)["step"]
for step in range(first + 1, args.steps + 1):
    draw = torch.Generator().manual_seed(step * parts + rank)  # your data loader stands here, with a part for each rank
    ids = torch.randint(256, (2, 64), generator=draw).to(model.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    told = torch.tensor([float(bool(stop)), loss.item()], device=model.device)
    if world > 1:
        dist.all_reduce(told)  # all ranks stop after the same step, when one was told to
    if told[0] or step % 500 == 0 or step == args.steps:
        gemini.save_checkpoint(checkpoint, model, optimizer, extra={"step": step})
        if rank == 0:
            print(f"step {step}: loss {told[1].item() / parts:.2f}, saved by {world} processes", flush=True)
    if told[0]:
        break
