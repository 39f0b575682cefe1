"""What ``gemini train`` was asked to do: one frozen record, checked for itself before anything is read or built."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.text_files import DEFAULT_GLOBS
from gemini.planning.compact import STATES

PRECISIONS = ("bf16", "fp16", "fp32")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The options of ``gemini train`` under their own names; the command line documents them."""

    # what is trained, on what
    model: Path | None = None
    preset: str | None = None
    layers: int | None = None
    data: tuple[Path, ...]
    glob: tuple[str, ...] = DEFAULT_GLOBS
    bytes: bool = False
    without_folders: tuple[str, ...] = ()
    num_held_out: int = 0

    # how
    seq_len: int = 512
    batch_size: int = 1
    accumulate: int = 1
    steps: int = 1000
    lr: float = 3e-4
    weight_decay: float = 0.1
    warmup: int = 0
    schedule: str = "cosine"
    clip: float = 1.0
    precision: str = "bf16"
    states: str = "exact"
    gradient_checkpointing: bool = False
    tile_tokens: int | str | None = None
    attn_implementation: str = "auto"
    compile: bool = False
    seed: int = 0
    device: str | None = None
    rank_timeout: int = 600

    # in how much memory
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    nvme_memory: str | None = None
    nvme_path: Path | None = None
    activations: str | None = None
    offload_activations: str | None = None
    plan: Path | None = None

    # what is written
    out: Path = Path("runs/train")
    overwrite: bool = False
    save_every: int = 500
    keep: int = 2
    resume: str | None = None
    log_every: int = 10

    def check(self) -> None:
        """Refuse what no files or hardware could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        if (self.model is None) == (self.preset is None):
            raise JobError("Say what to train with one of --model (a config.json or a model folder) and --preset.")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise JobError(f"{option(name)} must be at least {least}, got {value}.")
        for name in ("lr", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise JobError(f"{option(name)} must be a finite number and not negative, got {getattr(self, name)}.")
        for name, choices in (("precision", PRECISIONS), ("states", STATES), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise JobError(f"{option(name)} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.states == "compact" and self.precision != "bf16":
            raise JobError(f"--states compact keeps bf16 weights, which does not go with --precision {self.precision}.")
        for name in ("gpu_memory", "cpu_memory", "nvme_memory", "activations"):
            if (size := getattr(self, name)) is not None:
                with as_job_error(asked=f"{option(name)} {size}"):
                    parse_bytes(size)
        if self.offload_activations not in (None, "cpu", "nvme"):
            raise JobError(f"--offload-activations must be cpu or nvme, got {self.offload_activations!r}.")
        if self.offload_activations is not None and not self.gradient_checkpointing:
            raise JobError(
                f"--offload-activations {self.offload_activations} moves what --gradient-checkpointing keeps: "
                "give both."
            )
        if self.offload_activations == "nvme" and self.nvme_path is None:
            raise JobError("--offload-activations nvme needs --nvme-path: a folder on the drive that is to hold them.")
        if self.plan is not None and (self.activations or self.offload_activations):
            said = "--activations" if self.activations else "--offload-activations"
            raise JobError(f"{said} is the plan's to say where there is one: leave it out beside --plan.")
        if self.nvme_memory is not None and self.nvme_path is None:
            raise JobError(
                f"--nvme-memory {self.nvme_memory} needs --nvme-path: a folder on the drive that is to hold them."
            )


_AT_LEAST = {
    "layers": 1,
    "num_held_out": 0,
    "seq_len": 2,
    "batch_size": 1,
    "accumulate": 1,
    "steps": 1,
    "warmup": 0,
    "seed": 0,
    "rank_timeout": 1,
    "save_every": 0,
    "keep": 1,
    "log_every": 1,
}


def option(name: str) -> str:
    """The command line's spelling of a field."""
    assert name in {field.name for field in fields(TrainSettings)}
    return "--" + name.replace("_", "-")
