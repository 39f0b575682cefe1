"""The README's demo: a GPT-2-shaped model learns Python from the machine's own library, in less memory than it needs.

It is ``gemini sft`` with settings of its own, and then asks what a newcomer would: did the loss fall, did every tier
stay within its budget, and is the saved model the one that was trained? Each answer is measured in this run; a "no" is
said as such and makes the exit code 1.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from gemini.jobs.errors import JobError
from gemini.jobs.models import hush
from gemini.jobs.settings import DemoSettings
from gemini.jobs.team import Team
from gemini.jobs.train import Run
from gemini.jobs.train_options import Parser, options_of
from gemini.jobs.watch import prepare_out
from gemini.ranks import launch

_PARAMS = 124_439_808
_HELD_OUT, _SEQ_LEN = 8, 128


def demo(asked: DemoSettings, console: Console) -> int:
    """Train, check, and say what came out; returns 0 if every check passed, else 1."""
    if (number := launch.num_processes()) > 1:
        raise JobError(f"`gemini demo` runs in one process, and {number} were started. Start it without torchrun.")
    hush()
    prepare_out(asked.out)
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("t*.py")))[: _HELD_OUT * _SEQ_LEN]
    held_out = torch.tensor(list(text)).reshape(_HELD_OUT, _SEQ_LEN)
    # Beside the model by default, and not where temporary files go: that may be memory.
    with tempfile.TemporaryDirectory(dir=asked.out, prefix="nvme-") as own_folder:
        words = {
            "model_name_or_path": "gpt2-small",
            "dataset_name": library / "[a-s]*.py",
            "max_length": _SEQ_LEN,
            "per_device_train_batch_size": 2,
            "max_steps": asked.steps,
            "learning_rate": 6e-4,
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "gradient_checkpointing": "false",
            "use_cpu": not torch.cuda.is_available(),
            # A part of what weights and states take in bf16 with Adam, 12 bytes for each param; room for all and
            # gradients.
            "cpu_memory": asked.cpu_memory or int(0.15 * 12 * _PARAMS),
            "nvme_memory": 16 * _PARAMS,
            "nvme_path": asked.nvme_path or own_folder,
            "output_dir": asked.out,
            "save_strategy": "no",
            "seed": asked.seed,
        }
        given = Parser("sft").read([word for name, value in words.items() for word in (f"--{name}", str(value))])
        run = Run(options_of(given), console, Team())
        device = run.options.args.device
        first = _mean_loss(run.model, held_out.to(device))
        if (code := run.go("gemini demo")) == 130:
            return code
        last = _mean_loss(run.model, held_out.to(device))
    plain = transformers.AutoModelForCausalLM.from_pretrained(asked.out, dtype=torch.bfloat16, local_files_only=True)
    reloaded = _mean_loss(plain, held_out)
    fell, same = (
        "it fell" if last < first else "IT DID NOT FALL",
        "the same bits" if reloaded == last else "NOT THE SAME",
    )
    console.print(f"loss on held-out text: {first:.4f} before, {last:.4f} after: {fell}")
    console.print(f"reloaded with plain transformers: held-out loss {reloaded!r} there, {last!r} here: {same}")
    return code if last < first and reloaded == last else 1


@torch.no_grad()
def _mean_loss(model: Any, sequences: torch.Tensor) -> float:
    """The mean over batches of sequences, in as little memory as training takes."""
    model.eval()
    losses = [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for ids in sequences.split(2)]
    model.train()
    return sum(losses) / len(losses)
