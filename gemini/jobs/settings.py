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
DEFAULT_GLOBS = ("*.txt", "*.md", "*.py")
"""Which files of a folder are text."""

_NAMES = "A Hugging Face config.json, a model folder (its weights are not read), or a preset: gpt2-small."
_MODEL, _STEP, _MACHINE, _OUTPUT = "Which model", "Which step", "On what", "What is written"
_WHAT, _HOW, _MEMORY = "What is trained, on what", "How", "In how much memory"
_RANKS, _LOOK = "Among several processes (torchrun)", "What is looked at on the way"


# ---- what several commands are asked ---------------------------------------------------------------------------------
# The bases of a record are named the last one first: that is the order of their fields, and so that of the help.


@dataclass(frozen=True, kw_only=True)
class _Record:
    def check(self) -> None:
        """Refuse what no files or hardware could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        check(self)
        for pair in contradictions(self, _STEP_APART):
            raise JobError(_STEP_APART[pair].format(self=self))


@dataclass(frozen=True, kw_only=True)
class _Printed(_Record):
    json: bool = opt(False, "Print JSON, and nothing else, on stdout.", _OUTPUT)


@dataclass(frozen=True, kw_only=True)
class _Played(_Record):
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
class _Step(_Record):
    """Options of a step that is traced, and so of one that is planned."""

    config: str | None = argument(None, _NAMES)
    layers: int | None = opt(None, "This many layers instead of the config's own.", _MODEL, least=1)
    seq_len: int | None = opt(
        None, f"Tokens in a sequence. (Default: the model's positions, at most {MOST_POSITIONS}.)", _STEP, least=2
    )
    gradient_checkpointing: bool = opt(False, "Compute activations again in backward instead of keeping them.", _STEP)
    tile_tokens: int | str | None = opt(
        None,
        "Compute MLPs, norms and the output head with its loss so many tokens at a time; auto: where the step does not "
        "fit otherwise. (Default: a whole micro-batch.)",
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
        "forward pass.",
        _STEP,
    )
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


# ---- train, demo, doctor ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainSettings(_Record):
    """The options of ``gemini train`` under their own names."""

    config: Path | None = opt(
        None, "A YAML file of these options, as every run writes one into --out; others win over it.", None
    )
    model: Path | None = opt(
        None,
        "A Hugging Face config.json (weights are drawn from --seed, tokens are bytes), or a model folder (its weights "
        "are loaded, its tokenizer and chat template are used).",
        _WHAT,
    )
    preset: str | None = opt(None, "A built-in shape instead of --model: gpt2-small.", _WHAT)
    layers: int | None = opt(None, "This many layers instead of the config's own.", _WHAT, least=1)
    data: tuple[Path, ...] = opt(
        (),
        "JSON lines or Parquet with the columns text, prompt and completion, or messages; a file of plain text; a "
        "folder of such files, or one that datasets has saved. Repeat for more.",
        _WHAT,
    )
    glob: tuple[str, ...] = opt(
        DEFAULT_GLOBS,
        f"Which files of a folder are text. Repeat for more. (Default: {' '.join(DEFAULT_GLOBS)}.)",
        _WHAT,
    )
    bytes: bool = opt(
        False, "Every byte is a token, whatever tokenizer the model folder has, and any file is text.", _WHAT
    )
    chat_template: Path | None = opt(
        None, "A Jinja file that makes text of messages. (Default: the tokenizer's own; a plain one for bytes.)", _WHAT
    )
    loss_on: str = opt(
        "completions",
        "What of a row is learned: completions (and the assistant's messages), or all of it.",
        _WHAT,
        choices=("completions", "all"),
    )
    packing: str = opt(
        "none",
        "Rows in a sequence: none (one each, padded), bfd (several, which do not see each other) or wrapped (cut "
        "anywhere). Plain text is always wrapped.",
        _WHAT,
        choices=("none", "wrapped", "bfd"),
    )
    lora: int | None = opt(
        None, "Train a LoRA of this rank on all linear layers instead of the weights of --model.", _WHAT, least=1
    )
    load_in_4bit: bool = opt(
        False, "Keep the layers under --lora in 4 bits (QLoRA); needs bitsandbytes, the extra 'quantized'.", _WHAT
    )

    seq_len: int = opt(512, "Tokens in a sequence, the most there are.", _HOW, least=2)
    batch_size: int = opt(1, "Sequences in a forward pass of each process.", _HOW, least=1)
    accumulate: int = opt(1, "Batches in an optimizer step.", _HOW, least=1)
    steps: int = opt(1000, "Optimizer steps, those before a resume included.", _HOW, least=1)
    epochs: float | None = opt(None, "Times over all data, instead of --steps.", _HOW)
    lr: float = opt(3e-4, "Learning rate after the warm-up.", _HOW)
    optimizer: str = one_of(
        "adamw", "The update rule", _HOW, tuple(name for name, rule in RULES.items() if rule.unattended)
    )
    weight_decay: float = opt(0.1, "Weight decay; biases and norms have none.", _HOW)
    warmup: int = opt(0, "Steps over which the learning rate rises.", _HOW, least=0)
    schedule: str = one_of("cosine", "The learning rate after that", _HOW, ("cosine", "linear", "constant"))
    clip: float = opt(1.0, "Largest gradient norm; 0 turns clipping off.", _HOW)
    precision: str = one_of("bf16", "What is computed in", _HOW, PRECISIONS)
    states: str = one_of(
        "exact", "How optimizer states and masters are kept", _HOW, STATES, " (8 bits, 5 bytes per param in all)."
    )
    gradient_checkpointing: bool = opt(False, "Compute activations again in backward instead of keeping them.", _HOW)
    tile_tokens: int | str | None = opt(
        None,
        "Compute MLPs, norms and the output head with its loss so many tokens at a time; auto: where the step does not "
        "fit otherwise. (Default: a whole batch.)",
        _HOW,
        least=2,
    )
    attn_implementation: str = opt(
        "auto",
        "How attention is computed: eager, sdpa, flash_attention_2, or another name of transformers. auto: what the "
        "config says; else FlashAttention on a GPU where it is installed, and torch's sdpa.",
        _HOW,
    )
    compile: bool = opt(False, "Compile the repeated blocks with torch.compile.", _HOW)
    seed: int = opt(0, "Draws the weights, the order of the data and dropout.", _HOW, least=0)
    device: str | None = opt(None, "cpu or cuda. (Default: cuda if there is one.)", _HOW)
    replicas: int = opt(1, "Groups that keep a whole model each; a group shares its model.", _RANKS, least=1)
    tp: int = opt(1, "Processes that share each layer, in slices (tensor parallel).", _RANKS, least=1)
    cp: int = opt(1, "Processes that share each sequence, in parts (context parallel).", _RANKS, least=1)
    ep: int = opt(1, "Processes that share the experts of each layer (expert parallel).", _RANKS, least=1)
    rank_timeout: int = opt(600, "Seconds to wait for another process before it counts as lost.", _RANKS, least=1)

    gpu_memory: str | None = opt(
        None, "Budget on the GPU of each process, such as 20GiB. (Default: what is free.)", _MEMORY, size=True
    )
    cpu_memory: str | None = opt(
        None,
        "Budget in host memory, for all processes of a machine together. (Default: what is free.)",
        _MEMORY,
        size=True,
    )
    nvme_memory: str | None = opt(
        None, "Budget on the drive of --nvme-path, for all processes of a machine together.", _MEMORY, size=True
    )
    nvme_path: Path | None = opt(None, "A folder for what does not fit elsewhere. The file in it has no name.", _MEMORY)
    activations: str | None = opt(
        None, "The part of --gpu-memory to leave to activations, such as 4GiB.", _MEMORY, size=True
    )
    offload_activations: str | None = opt(
        None,
        "Where the inputs of checkpointed blocks wait for backward: cpu or nvme. (Default: where they are.)",
        _MEMORY,
    )
    plan: Path | None = opt(
        None,
        "A plan that `gemini plan --out` wrote for this model: its budgets, homes, moves, and the step that is made "
        "where no options describe another.",
        _MEMORY,
    )

    eval_data: tuple[Path, ...] = opt((), "Data to evaluate on, as for --data. Repeat for more.", _LOOK)
    validation: float = opt(
        0.0, "Keep this part of --data (below 1) or so many sequences of it (1 and more) for evaluation.", _LOOK
    )
    eval_every: int | None = opt(None, "Steps between evaluations. (Default: as --save-every.)", _LOOK, least=1)
    patience: int | None = opt(
        None, "Stop after so many evaluations without a lower loss, and keep the best weights.", _LOOK, least=1
    )
    sample_every: int = opt(0, "Steps between samples of what the model writes; 0 for none.", _LOOK, least=0)
    prompt: str = opt("The", "What samples begin with.", _LOOK)
    log_every: int = opt(10, "Steps between lines, and between rows of metrics.jsonl.", _LOOK, least=1)
    report_to: str = one_of("none", "Who else is told", _LOOK, ("none", "tensorboard", "wandb"))

    out: Path = opt(Path("runs/train"), "A folder for the model and the checkpoints.", _OUTPUT)
    save_every: int = opt(500, "Steps between checkpoints; 0 writes none but on Ctrl-C.", _OUTPUT, least=0)
    keep: int = opt(2, "Checkpoints to keep.", _OUTPUT, least=1)
    durable_every: int = opt(
        0, "Steps between commits to a store in --nvme-path that outlives a kill; 0 for none.", _OUTPUT, least=0
    )
    resume: str | None = opt(
        None, "A checkpoint folder or that of a durable store, or 'auto' for the newest of this --out.", _OUTPUT
    )

    # not options: how a job of ours calls it
    overwrite: bool = False
    without_folders: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what no files or hardware could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        if self.offload_activations not in (None, "cpu", "nvme"):
            raise JobError(f"--offload-activations must be cpu or nvme, got {self.offload_activations!r}.")
        super().check()
        for pair in contradictions(self, _JOB_APART):
            raise JobError(_JOB_APART[pair].format(self=self))
        if self.patience is not None and not (self.save_every or self.eval_every):
            raise JobError("--patience keeps the best weights in checkpoints: give --save-every or --eval-every.")
        if self.seq_len % self.cp:
            raise JobError(f"--cp {self.cp} does not divide --seq-len {self.seq_len}.")
        if self.epochs is not None and self.epochs == 0:
            raise JobError("--epochs must be more than 0.")
        if self.validation > 1 and self.validation != int(self.validation):
            raise JobError(f"--validation {self.validation}: give a part below 1, or a whole number of sequences.")

    @property
    def sliced(self) -> str:
        """The option that divides layers among processes, if one does."""
        return f"--tp {self.tp}" if self.tp > 1 else f"--ep {self.ep}" if self.ep > 1 else ""

    @property
    def divided(self) -> str:
        """The option that divides layers or sequences, if one does."""
        return self.sliced or (f"--cp {self.cp}" if self.cp > 1 else "")

    @property
    def sharing(self) -> int:
        """Processes that compute with the same sequences."""
        return self.tp * self.cp

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.eval_data) or self.validation > 0

    @property
    def steps_between_evaluations(self) -> int:
        """Of a job that evaluates."""
        return self.eval_every or self.save_every or self.steps


@dataclass(frozen=True, kw_only=True)
class DemoSettings(_Record):
    """The options of ``gemini demo``."""

    full: bool = opt(False, "Four times the context and more steps.", None)
    steps: int | None = opt(None, "Optimizer steps.", None, least=1)
    cpu_memory: str | None = opt(
        None, "Budget in host memory. (Default: a fixed part of what the model needs.)", None, size=True
    )
    nvme_path: Path | None = opt(None, "A folder for the rest. (Default: a new one in --out.)", None)
    out: Path = opt(Path("runs/demo"), "A folder for the model.", None)
    seed: int = opt(0, "Draws the weights, the order of the text and dropout.", None)


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(_Record):
    """The options of ``gemini doctor``."""

    store: Path | None = argument(None, "A durable store, the nvme_path of a run: say what is in it, check all of it.")
    nvme_path: Path | None = opt(
        None, "Try this folder as the NVMe tier: direct I/O, room; and a durable store in it.", None
    )
    measure: bool = opt(False, "Measure the machine's speeds as well; with --nvme-path the drive's too.", None)
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

_JOB_APART = {
    ("!model", "!preset"): ("Say what to train with one of --model (a config.json or a model folder) and --preset."),
    ("model", "preset"): "Say what to train with one of --model (a config.json or a model folder) and --preset.",
    ("offload_activations", "!gradient_checkpointing"): (
        "--offload-activations {self.offload_activations} moves what --gradient-checkpointing keeps: give both."
    ),
    ("offload_activations=nvme", "!nvme_path"): (
        "--offload-activations nvme needs --nvme-path: a folder on the drive that is to hold them."
    ),
    ("plan", "activations"): "--activations is the plan's to say where there is one: leave it out beside --plan.",
    ("plan", "offload_activations"): (
        "--offload-activations is the plan's to say where there is one: leave it out beside --plan."
    ),
    ("nvme_memory", "!nvme_path"): (
        "--nvme-memory {self.nvme_memory} needs --nvme-path: a folder on the drive that is to hold them."
    ),
    ("durable_every", "!nvme_path"): (
        "--durable-every needs --nvme-path: a folder on the drive that is to hold the store."
    ),
    ("lora", "preset"): "--lora {self.lora} adapts trained weights, and a preset has none: give a model folder.",
    ("ep>1", "tp>1|cp>1"): "--ep {self.ep} goes with --replicas alone: leave it out, or --tp and --cp.",
    ("sliced", "lora"): "{self.sliced} and --lora: a model in slices has none. Leave one out.",
    ("sliced", "tile_tokens"): "{self.sliced} and --tile-tokens: a model in slices has none. Leave one out.",
    ("sliced", "durable_every"): "{self.sliced} and --durable-every: a model in slices has none. Leave one out.",
    ("divided", "plan"): "{self.divided} and --plan: a plan is of a whole model. Leave --plan out.",
    ("cp>1", "packing=bfd"): "--cp {self.cp} and --packing bfd: packed rows cannot be cut. Use none or wrapped.",
    ("eval_data", "validation"): (
        "--validation keeps a part of --data, and --eval-data brings other data: drop one of the two."
    ),
    ("eval_every", "!evaluates"): "--eval-every needs something to evaluate on: --validation or --eval-data.",
    ("patience", "!evaluates"): "--patience needs something to evaluate on: --validation or --eval-data.",
}
