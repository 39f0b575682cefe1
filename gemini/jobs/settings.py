"""What ``gemini train`` was asked to do: one frozen record, checked for itself before anything is read or built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemini.jobs.errors import JobError
from gemini.jobs.options import check, one_of, opt, spelled
from gemini.jobs.text_files import DEFAULT_GLOBS
from gemini.planning.compact import STATES
from gemini.planning.planes import PRECISIONS
from gemini.planning.rules import RULES

_WHAT, _HOW, _MEMORY = "What is trained, on what", "How", "In how much memory"
_RANKS = "Among several processes (torchrun)"
_LOOK, _FILES = "What is looked at on the way", "What is written"


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The options of ``gemini train`` under their own names."""

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

    out: Path = opt(Path("runs/train"), "A folder for the model and the checkpoints.", _FILES)
    save_every: int = opt(500, "Steps between checkpoints; 0 writes none but on Ctrl-C.", _FILES, least=0)
    keep: int = opt(2, "Checkpoints to keep.", _FILES, least=1)
    durable_every: int = opt(
        0, "Steps between commits to a store in --nvme-path that outlives a kill; 0 for none.", _FILES, least=0
    )
    resume: str | None = opt(
        None, "A checkpoint folder or that of a durable store, or 'auto' for the newest of this --out.", _FILES
    )

    # not options: how a job of ours calls it
    overwrite: bool = False
    without_folders: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what no files or hardware could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        if (self.model is None) == (self.preset is None):
            raise JobError("Say what to train with one of --model (a config.json or a model folder) and --preset.")
        check(self)
        if self.states == "compact" and self.precision != "bf16":
            raise JobError(f"--states compact keeps bf16 weights, which does not go with --precision {self.precision}.")
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
        if self.durable_every and self.nvme_path is None:
            raise JobError("--durable-every needs --nvme-path: a folder on the drive that is to hold the store.")
        if self.lora is not None and self.preset is not None:
            raise JobError(f"--lora {self.lora} adapts trained weights, and a preset has none: give a model folder.")
        if self.load_in_4bit and self.lora is None:
            raise JobError("--load-in-4bit freezes the weights in 4 bits: give --lora as well, which is trained then.")
        self._check_mesh()
        if self.epochs is not None and self.epochs == 0:
            raise JobError("--epochs must be more than 0.")
        if self.eval_data and self.validation:
            raise JobError(
                "--validation keeps a part of --data, and --eval-data brings other data: drop one of the two."
            )
        if self.validation > 1 and self.validation != int(self.validation):
            raise JobError(f"--validation {self.validation}: give a part below 1, or a whole number of sequences.")
        asked = next((name for name in ("eval_every", "patience") if getattr(self, name) is not None), None)
        if asked is not None and not self.evaluates:
            raise JobError(f"--{asked.replace('_', '-')} needs something to evaluate on: --validation or --eval-data.")
        if self.patience is not None and not (self.save_every or self.eval_every):
            raise JobError("--patience keeps the best weights in checkpoints: give --save-every or --eval-every.")

    def _check_mesh(self) -> None:
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep}
        asked = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
        if len(asked) > 1 and self.ep > 1:
            raise JobError(f"{' and '.join(asked)}: --ep goes with --replicas alone. Leave one of them out.")
        if self.tp > 1 or self.ep > 1:
            for name in ("lora", "tile_tokens", "durable_every"):
                if getattr(self, name):
                    raise JobError(f"{asked[0]} and {spelled(name)}: a model in slices has none. Leave one out.")
        if asked and self.plan is not None:
            raise JobError(f"{asked[0]} and --plan: a plan is of a whole model. Leave --plan out.")
        if self.cp > 1 and self.packing == "bfd":
            raise JobError(f"--cp {self.cp} and --packing bfd: packed rows cannot be cut. Use none or wrapped.")
        if self.seq_len % self.cp:
            raise JobError(f"--cp {self.cp} does not divide --seq-len {self.seq_len}.")

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
