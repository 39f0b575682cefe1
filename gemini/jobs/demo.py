"""The README's demo: a GPT-2-shaped model learns Python from the machine's own library, in less memory than it needs.

It is the main job with settings of its own, and then asks what a newcomer would: did the loss fall, did every tier stay
within its budget, and is the saved model the one that was trained? Each answer is measured in this run; a "no" is said
as such and makes the exit code 1.
"""

from __future__ import annotations

import gc
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from rich.console import Console

from gemini.errors import human_bytes, parse_bytes
from gemini.jobs.checkpoints import prepare_out
from gemini.jobs.errors import JobError
from gemini.jobs.models import find_model, hush, name_the_loss
from gemini.jobs.screen import budget_lines
from gemini.jobs.settings import DemoSettings
from gemini.jobs.team import Team
from gemini.jobs.train import Run
from gemini.jobs.train_options import Parser, options_of
from gemini.ranks import launch
from gemini.waiting import Latch

_PRESET = "gpt2-small"
# What the state of a param takes in bf16: weight 2, residual 2, two states of 4 each.
_STATE_BYTES_PER_PARAM = 12
# The host gets this part of the state, the drive has room for all of it and the gradients of one step.
_CPU_PART = 0.15
_NVME_BYTES_PER_PARAM = 16
_HELD_OUT = 8


class Size(NamedTuple):
    """How long a demo trains, on how long sequences."""

    seq_len: int
    batch_size: int
    steps: int


_SHORT = Size(seq_len=128, batch_size=2, steps=40)
_FULL = Size(seq_len=512, batch_size=2, steps=200)


def demo(asked: DemoSettings, console: Console) -> int:
    """Train, check, and say what came out; returns 0 if every check passed, else 1."""
    if launch.num_processes() > 1:
        raise JobError(
            f"`gemini demo` runs in one process, and {launch.num_processes()} were started. Start it without torchrun; "
            "`gemini sft` runs in several."
        )
    size = _FULL if asked.full else _SHORT
    steps = asked.steps or size.steps
    hush()
    num_params = _count_params()
    state_bytes = _STATE_BYTES_PER_PARAM * num_params
    cpu_bytes = int(_CPU_PART * state_bytes) if asked.cpu_memory is None else parse_bytes(asked.cpu_memory)

    console.print(
        f"GPT-2 small has {num_params / 1e6:.1f}M params; their weights and optimizer state take "
        f"{human_bytes(state_bytes)}. The host may hold {human_bytes(cpu_bytes)} of that, the rest lives in a file."
    )
    prepare_out(asked.out)
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("t*.py")))[: _HELD_OUT * size.seq_len]
    held_out = torch.tensor(list(text)).reshape(_HELD_OUT, size.seq_len)
    # Beside the model by default, and not where temporary files go: that may be memory.
    with tempfile.TemporaryDirectory(dir=asked.out, prefix="nvme-") as own_folder, ResidentPeak() as resident:
        words = {
            "model_name_or_path": _PRESET,
            "dataset_name": library / "[a-s]*.py",
            "max_length": size.seq_len,
            "per_device_train_batch_size": size.batch_size,
            "max_steps": steps,
            "learning_rate": 6e-4,
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "gradient_checkpointing": "false",
            "use_cpu": not torch.cuda.is_available(),
            "cpu_memory": cpu_bytes,
            "nvme_memory": _NVME_BYTES_PER_PARAM * num_params,
            "nvme_path": asked.nvme_path or own_folder,
            "output_dir": asked.out,
            "save_strategy": "no",
            "seed": asked.seed,
        }
        given = Parser("sft").read([word for name, value in words.items() for word in (f"--{name}", str(value))])
        before_model = resident_bytes()
        run = Run("sft", options_of(given), console, Team())
        first_loss = _mean_loss(run.model, held_out.to(run.device), size.batch_size)
        resident.restart()
        began = time.perf_counter()
        finished = run.steps()
        seconds = time.perf_counter() - began
        peak = resident.peak
        if not finished:
            console.print("Stopped before the end: nothing is checked.")
            return 130
        losses = [row["loss"] for row in run.trainer.state.log_history if "loss" in row]
        last_loss = _mean_loss(run.model, held_out.to(run.device), size.batch_size)
        memory = run.model.memory_report()
        run.trainer.save_model(str(asked.out))
        del run
        gc.collect()
        reloaded_loss = _plain_loss(asked.out, held_out, size.batch_size)

    console.print(f"\n{steps} steps took {seconds:.0f} s ({seconds / steps:.2f} s each).")
    if peak is not None and before_model is not None:
        console.print(
            f"The whole process held at most {human_bytes(peak)} of memory while it trained; that is "
            f"{human_bytes(before_model)} from before the model, the cpu tier, activations and temporaries."
        )
    fell = last_loss < first_loss and losses[-1] < losses[0]
    same = reloaded_loss == last_loss
    lines, within = budget_lines(memory)
    console.print(
        f"loss: {losses[0]:.4f} in the first step, {losses[-1]:.4f} at the end; on held-out text "
        f"{first_loss:.4f} before, {last_loss:.4f} after: {'it fell' if fell else 'IT DID NOT FALL'}"
    )
    console.print(*lines, sep="\n")
    console.print(
        f"saved to {asked.out}, reloaded with plain transformers: held-out loss {reloaded_loss!r} there, "
        f"{last_loss!r} here: " + ("the same bits" if same else "NOT THE SAME")
    )
    return 0 if fell and within and same else 1


@torch.no_grad()
def _mean_loss(model: Any, sequences: torch.Tensor, batch_size: int) -> float:
    """The mean over batches of sequences, in as little memory as training takes."""
    model.eval()
    losses = [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for ids in sequences.split(batch_size)]
    model.train()
    return sum(losses) / len(losses)


def _plain_loss(folder: Path, sequences: torch.Tensor, batch_size: int) -> float:
    """The loss of the saved model as anyone would load it, no Gemini involved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return _mean_loss(name_the_loss(model), sequences, batch_size)


def _count_params() -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(find_model(_PRESET).config)
    return sum(p.numel() for p in model.parameters())


# ---- what the process takes ------------------------------------------------------------------------------------------


def resident_bytes() -> int | None:
    """Anonymous bytes in memory now; None where the kernel does not say (not Linux)."""
    now = psutil.Process().memory_info()
    return now.rss - now.shared if hasattr(now, "shared") else None


class ResidentPeak:
    """The most that ``resident_bytes()`` was within a ``with`` block: a second opinion on the memory report.

    The report counts what Gemini holds; this counts everything the process has, the interpreter, activations and
    temporaries too. Pages of files (libraries, mapped weights) are not counted: the kernel may drop them at will.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self.peak: int | None = resident_bytes()
        self._interval_s = interval_s
        self._done = Latch()
        self._thread = threading.Thread(target=self._watch, name="resident-peak", daemon=True)

    def __enter__(self) -> ResidentPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def restart(self) -> None:
        """Forget the peak so far: what comes from now on is what is asked about."""
        self.peak = resident_bytes()

    def _watch(self) -> None:
        while not self._done.wait(self._interval_s):
            now = resident_bytes()
            if now is not None:
                self.peak = max(self.peak or 0, now)
