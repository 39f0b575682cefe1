"""What each command was asked to do: a frozen record, checked for itself before a file is read or anything is built.

A field that is made with ``opt`` is an option of the command line, with its help and the heading it stands under; the
tables at the end say which of them do not go together. No torch is imported here: a refusal takes no seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemini.config import contradictions
from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.options import argument, check, one_of, opt, spelled
from gemini.planning.compact import STATES, spec_for
from gemini.planning.planes import GRADIENTS, PRECISIONS, RuleSpec
from gemini.planning.rules import RULES, rule_named
from gemini.tiers import Tier

MOST_POSITIONS = 4096
"""What a sequence has by default at most; less where the model has fewer positions."""

_NAMES = "A Hugging Face config.json, a model folder (its weights are not read), or a preset: gpt2-small."
_MODEL, _STEP, _MACHINE, _OUTPUT = "Which model", "Which step", "On what", "What is written"


# ---- what several commands are asked ---------------------------------------------------------------------------------
# The bases of a record are named the last one first: that is the order of their fields, and so that of the help.


@dataclass(frozen=True, kw_only=True)
class Record:
    """Options that can be checked for themselves."""

    def check(self) -> None:
        """Refuse what no files or hardware could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        check(self)
        for pair in contradictions(self, _STEP_APART):
            raise JobError(_STEP_APART[pair].format(self=self))


@dataclass(frozen=True, kw_only=True)
class _Printed(Record):
    json: bool = opt(False, "Print JSON, and nothing else, on stdout.", _OUTPUT)


@dataclass(frozen=True, kw_only=True)
class _Played(Record):
    """Options of a step that is played on a machine."""

    machine: str | None = opt(
        None,
        "Whose speeds are predicted with: a machine by name, or a JSON file of `gemini doctor --measure`; where yours "
        "has more or less memory, as in rtx4090,cpu=128GiB.",
        _MACHINE,
    )
    schedule: str = one_of(
        "overlapped", "What is predicted", _MACHINE, ("overlapped", "serial"), ", which is training with overlap=False."
    )
    picture: tuple[Path, ...] = opt(
        (), "Draw the predicted step: .png, .svg, .html, or .json for a trace viewer. Repeat for more.", _OUTPUT
    )


@dataclass(frozen=True, kw_only=True)
class _Step(Record):
    """Options of a step that is traced, and so of one that is planned."""

    config: str | None = argument(None, _NAMES)
    layers: int | None = opt(None, "This many layers instead of the config's own.", _MODEL, least=1)
    seq_len: int | None = opt(
        None, f"Tokens in a sequence. (Default: the model's positions, at most {MOST_POSITIONS}.)", _STEP, least=2
    )
    gradient_checkpointing: bool = opt(False, "Compute activations again in backward instead of keeping them.", _STEP)
    tile_tokens: int | str | None = opt(
        None,
        "Compute MLPs, norms and the output head with its loss so many tokens at a time; head=1024: the head alone; "
        "auto: where the step does not fit otherwise. (Default: a whole micro-batch.)",
        _STEP,
        least=2,
    )
    lora: int | None = opt(None, "Train a LoRA of this rank on all linear layers; all else is frozen.", _STEP, least=1)
    load_in_4bit: bool = opt(False, "Keep the layers under --lora in 4 bits, half a byte per weight (QLoRA).", _STEP)
    attn_implementation: str | None = one_of(
        None,
        "How attention is computed",
        _STEP,
        ("auto", "eager", "sdpa", "flash_attention_2"),
        ". (Default: auto, what transformers chooses.)",
    )


# ---- trace, plan, simulate -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceSettings(_Printed, _Step):
    """The step that is traced: the options of ``gemini trace``."""

    config: str | None = argument(None, _NAMES, required=True)
    batch_size: int = opt(1, "Sequences in a forward pass.", _STEP, least=1)
    precision: str = one_of("bf16", "What is computed in", _STEP, PRECISIONS)
    tp: int = opt(1, "Slices of layers, of which this is one.", _STEP, least=1)
    cp: int = opt(1, "Parts of sequences, of which this is one.", _STEP, least=1)
    target: str = one_of("cuda", "Whose workspaces count", _STEP, ("cpu", "cuda"))
    out: Path | None = opt(None, "Write the trace to this JSON file: what --trace of `plan` takes.", _OUTPUT)


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(_Printed, _Played):
    """The options of ``gemini simulate``."""

    plan: Path = argument(Path(), "A plan: a JSON file of `plan --out`.", required=True)
    gpus: int | None = opt(
        None, "Divide a plan of one GPU among this many. (Default: as it was planned.)", _MACHINE, least=1
    )
    out: Path | None = opt(None, "Write the timeline to this JSON file.", _OUTPUT)


def _budget(where: str, of: str) -> Any:
    return opt(None, f"Budget {where}. (Default: 80 % of {of}.)", _MACHINE, size=True)


@dataclass(frozen=True, kw_only=True)
class PlanSettings(_Printed, _Played, _Step):
    """The options of ``gemini plan``. What describes the step to trace is None if left out."""

    config: str | None = argument(None, f"{_NAMES} With --trace it may be left out.")
    trace: Path | None = opt(None, "Take the step from this file of `trace --out`.", _MODEL)
    batch_size: int | None = opt(None, "Sequences in a forward pass of each GPU. (Default: 1.)", _STEP, least=1)
    precision: str | None = one_of(None, "What is computed in", _STEP, PRECISIONS, ". (Default: bf16.)")
    accumulate: int = opt(1, "Batches in an optimizer step.", _STEP, least=1)
    micro_batch: str | None = opt(
        None,
        "auto: keep the sequences of a step (--batch-size times --accumulate), and choose how many of them are in a "
        "forward pass, so that the step is the quickest on the --machine.",
        _STEP,
    )
    fastest: bool = opt(
        False,
        "Choose the quickest step of --tokens-per-step on the --machine: micro-batch, checkpointing, where its inputs "
        "wait, and tiles where --tile-tokens auto allows them. Says what runs it.",
        _STEP,
    )
    tokens_per_step: int | None = opt(None, "Tokens in an optimizer step of all GPUs, for --fastest.", _STEP, least=2)
    gradients: str | None = one_of(
        None,
        "What is kept until the update",
        _STEP,
        GRADIENTS,
        ". (Default: retain, or accumulate with --accumulate.)",
    )
    optimizer: str = one_of("adamw", "The update rule", _STEP, tuple(RULES))
    states: str = one_of(
        "exact", "How optimizer states and masters are kept", _STEP, STATES, " (8 bits, 5 bytes per param in all)."
    )
    offload_activations: str = one_of(
        "auto", "Where the inputs of checkpointed blocks wait for backward", _STEP, ("auto", "no", "cpu", "nvme")
    )
    gpu: str | None = _budget("on each GPU, such as 24GiB", "what the machine's has")
    cpu: str | None = _budget("in host memory, for all GPUs of a machine together", "the machine's")
    nvme: str | None = _budget("on NVMe drives, for all GPUs of a machine together", "the machine's")
    gpus: int = opt(1, "GPUs (or, on CPUs, processes) that share the model.", _MACHINE, least=1)
    tp: int = opt(1, "GPUs that share each layer, in slices (tensor parallel).", _MACHINE, least=1)
    pp: int = opt(1, "Stages of a pipeline; --accumulate says its micro-batches.", _MACHINE, least=1)
    cp: int = opt(1, "GPUs that share each sequence, in parts (context parallel).", _MACHINE, least=1)
    parallel: str | None = opt(
        None,
        "auto: the best of all meshes of --gpus for the sequences of a step, and the runners-up.",
        _MACHINE,
        choices=("auto",),
    )
    compute: str | None = one_of(
        None, "Where forward and backward run", _MACHINE, ("gpu", "cpu"), ". (Default: gpu if there is one.)"
    )
    out: Path | None = opt(None, "Write the plan to this JSON file: what `simulate` takes.", _OUTPUT)
    alternatives: bool = opt(
        False,
        "A table of what else the machine could do with the step: checkpointing, tiles, transient gradients, compact "
        "states, a LoRA, twice the GPUs. Each is planned as the step is.",
        _OUTPUT,
    )

    def check(self) -> None:
        """Refuse what no model or machine could make right; the step that is to be traced is looked at as well.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        if self.micro_batch not in (None, "auto"):
            raise JobError(f"--micro-batch must be auto, got {self.micro_batch!r}; --batch-size says how large it is.")
        check(self)  # a number that is none is no option left out
        for pair in contradictions(self, _PLAN_APART):
            raise JobError(_PLAN_APART[pair].format(self=self))
        super().check()
        if self.trace is None:
            self.traced().check()
        if self.states == "compact":
            self.rule_in("bf16")

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of the mesh in which ranks share more than params, by option."""
        return {name: size for name in ("tp", "pp", "cp") if (size := getattr(self, name)) > 1}

    @property
    def mesh(self) -> str:
        """The option that asks for a mesh, if one does."""
        return "--parallel auto" if self.parallel else next((f"--{name}" for name in self.dims), "")

    @property
    def described(self) -> str:
        """The option that describes the step to trace, if one does."""
        return next((spelled(name) for name in _OF_THE_TRACE if getattr(self, name)), "")

    def rule_in(self, precision: str) -> RuleSpec:
        """The planes of the update rule, with its states kept as was asked.

        Raises:
            JobError: if it has no compact form.
        """
        try:
            return spec_for(rule_named(self.optimizer).spec, self.states, precision)
        except ValueError as e:
            raise JobError(f"--optimizer {self.optimizer}: {e}.") from None

    @property
    def has_compact_form(self) -> bool:
        """Whether the update rule can have compact states."""
        try:
            replace(self, states="compact").rule_in("bf16")
        except JobError:
            return False
        return True

    @property
    def kept_gradients(self) -> str:
        """What is kept until the update: several micro-batches need sums, for which the runtime takes fp32."""
        return self.gradients or ("accumulate" if self.accumulate > 1 else "retain")

    def given_bytes(self, tier: Tier) -> int | None:
        """The budget of a tier as given; None where it was left out."""
        size = getattr(self, tier.value)
        return None if size is None else parse_bytes(size)

    def traced(self, *, batch_size: int | None = None, target: str = "cuda") -> TraceSettings:
        """The step to trace, perhaps with another number of sequences in it."""
        return TraceSettings(
            **{f.name: getattr(self, f.name) for f in fields(_Step)},
            batch_size=batch_size or self.batch_size or 1,
            precision=self.precision or "bf16",
            target=target,
        )


# ---- demo, doctor ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Record):
    """The options of ``gemini demo``."""

    steps: int = opt(40, "Optimizer steps.", None, least=1)
    cpu_memory: str | None = opt(
        None, "Budget in host memory. (Default: a fixed part of what the model needs.)", None, size=True
    )
    nvme_path: Path | None = opt(None, "A folder for the rest. (Default: a new one in --out.)", None)
    out: Path = opt(Path("runs/demo"), "A folder for the model.", None)
    seed: int = opt(0, "Draws the weights, the order of the text and dropout.", None)


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Record):
    """The options of ``gemini doctor``."""

    store: Path | None = argument(None, "A durable store, the nvme_path of a run: say what is in it, check all of it.")
    nvme_path: tuple[Path, ...] = opt(
        (),
        "Try folders as the NVMe tier, one on each drive: direct I/O, room; and a durable store in them.",
        None,
        several=True,
    )
    measure: bool = opt(
        False, "Measure the machine's speeds as well; with --nvme-path those of the first one's drive too.", None
    )
    json: Path | None = opt(None, "Write what was measured to this file, for --machine of gemini plan.", None)

    def check(self) -> None:
        """Raises: JobError: for a file without anything to write to it."""
        if self.json is not None and not self.measure:
            raise JobError(f"--json {self.json} is for the figures that --measure finds: add --measure")


# ---- what does not go together ---------------------------------------------------------------------------------------
# Two conditions, as `contradictions` reads them, and what is said; the first pair that holds is the one that is said.

_OF_THE_TRACE = (
    "batch_size seq_len precision gradient_checkpointing tile_tokens lora load_in_4bit attn_implementation micro_batch"
).split()

_STEP_APART = {
    ("load_in_4bit", "!lora"): (
        "--load-in-4bit freezes the weights in 4 bits: give --lora as well, which is trained then."
    ),
    ("states=compact", "precision!=bf16"): (
        "--states compact keeps bf16 weights, which does not go with --precision {self.precision}."
    ),
    ("attn_implementation=flash_attention_2", "precision=fp32"): (
        "--attn-implementation flash_attention_2 and --precision fp32: FlashAttention computes in bf16 and fp16 on "
        "CUDA only. Leave one of the two out."
    ),
    ("attn_implementation=flash_attention_2", "target=cpu"): (
        "--attn-implementation flash_attention_2 and --target cpu: FlashAttention computes in bf16 and fp16 on CUDA "
        "only. Leave one of the two out."
    ),
}

_PLAN_APART = {
    ("!config", "!trace"): "Say what to plan for: a config.json, a model folder, a preset, or a trace with --trace.",
    ("trace", "described"): (
        "{self.described} describes a step that is to be traced, and --trace {self.trace} brings one that has been: "
        "drop one of the two."
    ),
    ("fastest", "!tokens_per_step"): "--fastest needs the tokens of a step: --tokens-per-step 65536.",
    ("tokens_per_step", "!fastest"): "--tokens-per-step is for --fastest: --batch-size and --accumulate say it else.",
    ("fastest", "!machine"): "--fastest needs the speeds of a machine: --machine NAME or FILE.",
    ("fastest", "trace"): "--fastest looks at steps of several sizes, and --trace {self.trace} is of one: drop it.",
    ("fastest", "batch_size|accumulate>1|micro_batch|alternatives"): (
        "--fastest chooses how --tokens-per-step are divided, and shows what else there is: leave --batch-size, "
        "--accumulate, --micro-batch and --alternatives out."
    ),
    ("mesh", "fastest"): "{self.mesh} with --fastest: leave one of the two out.",
    ("parallel", "dims"): "--parallel auto chooses the mesh: leave --tp, --pp and --cp out, or leave it out.",
    ("mesh", "trace"): (
        "{self.mesh} needs a step of one rank of a mesh, and --trace {self.trace} brings one of a whole model: give "
        "the config in its place."
    ),
    ("mesh", "micro_batch"): "{self.mesh} with --micro-batch: leave one of the two out.",
    ("mesh", "tile_tokens"): "{self.mesh} with --tile-tokens: leave one of the two out.",
    ("mesh", "lora"): "{self.mesh} with --lora: leave one of the two out.",
    ("mesh", "out"): (
        "--out {self.out} is for the plan of one model, and a mesh has one for each stage: leave it out."
    ),
    ("mesh", "alternatives"): ("--alternatives are those of one GPU or of GPUs that share params: leave out the mesh."),
    ("parallel|tp>1|pp>1", "gradients=transient"): (
        "{self.mesh} with --gradients transient: slices and stages keep gradients until the update."
    ),
    ("parallel|pp>1", "precision=fp16"): (
        "{self.mesh} with --precision fp16: stages have no common loss scale. Use bf16."
    ),
    ("gradients=transient|gradients=retain", "accumulate>1"): (
        "--gradients {self.gradients} has one backward per update, and --accumulate {self.accumulate} has several: "
        "leave --gradients out."
    ),
    ("gradients=transient", "precision=fp16"): (
        "--gradients transient updates inside backward, which does not go with --precision fp16."
    ),
}
