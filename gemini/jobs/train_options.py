"""The options of ``gemini sft``, ``dpo``, ``kto``, ``reward``, ``grpo`` and ``rloo``: TRL's, read by TRL's own parser
from the command line and from YAML, and Gemini's beside them.
"""

from __future__ import annotations

import copy
import shlex
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import trl
import yaml
from accelerate import ParallelismConfig

from gemini.config import contradictions
from gemini.jobs.data import text_files
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.options import Refusing, check_size, tiles_of
from gemini.planning import document
from gemini.planning.compact import STATES
from gemini.planning.plan import Plan
from gemini.planning.rules import RULES, name_of
from gemini.tiers import Tier


def _opt(default: Any, words: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": words, **more})


@dataclass
class GeminiArguments:
    """What no option of TRL or the Trainer says."""

    _argument_group_name: ClassVar[str] = "Gemini"

    gpu_memory: str | None = _opt(None, "Budget on the GPU of each process, such as 20GiB. (Default: what is free.)")
    cpu_memory: str | None = _opt(
        None, "Budget in host memory, for all processes of a machine together. (Default: what is free.)"
    )
    nvme_memory: str | None = _opt(None, "Budget on the drive of --nvme_path, for all processes of a machine together.")
    nvme_path: list[str] | None = _opt(
        None,
        "A folder for what does not fit elsewhere, or one on each of several drives, which are read and written "
        "together. The files in them have no name.",
    )
    activations: str | None = _opt(None, "The part of --gpu_memory to leave to activations, such as 4GiB.")
    offload_activations: str | None = _opt(
        None,
        "Where the inputs of checkpointed blocks wait for backward: cpu or nvme. (Default: where they are.)",
        choices=("cpu", "nvme"),
    )
    states: str = _opt(
        "exact", "How optimizer states and masters are kept: exact, or compact (8 bits, 5 bytes per param in all)."
    )
    optimizer: str | None = _opt(None, f"The update rule, where --optim has no name for it: {', '.join(RULES)}.")
    tile_tokens: str | None = _opt(
        None,
        "Compute MLPs, norms and the output head with its loss so many tokens at a time; head=1024: the head alone; "
        "auto: where the step does not fit otherwise. (Default: a whole batch.)",
    )
    plan: str | None = _opt(
        None,
        "A plan that `gemini plan --out` wrote for this model: its budgets, homes, moves, and the step that is made "
        "where no options describe another.",
    )
    bytes: bool = _opt(False, "Every byte of the text is a token, whatever tokenizer the model has.")
    patience: int | None = _opt(
        None,
        "Stop after so many evaluations without a lower loss; with --load_best_model_at_end keep the best weights.",
    )
    durable_every: int = _opt(0, "Steps between commits to a store in --nvme_path that outlives a kill; 0 for none.")
    replicas: int = _opt(1, "Groups of processes that keep a whole model each; a group shares its model.")
    tp: int = _opt(1, "Processes that share each layer, in slices (tensor parallel).")
    cp: int = _opt(1, "Processes that share each sequence, in parts (context parallel).")
    ep: int = _opt(1, "Processes that share the experts of each layer (expert parallel).")


_OURS = {
    "disable_tqdm": True,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "log_level": "error",
    "log_level_replica": "error",
}
"""Defaults that are not TRL's: that it has begun to learn is said at once, and a line is a line."""

_TrlParser: Any = trl.TrlParser


class Options(NamedTuple):
    """A job as it was asked for.

    Attributes:
        script: TRL's arguments of its scripts: the data.
        args: the trainer's (``trl.SFTConfig``, ...).
        model: TRL's ``ModelConfig``.
        mixture: TRL's ``DatasetMixtureConfig``.
        ours: Gemini's.
        said: what was given, by name; all else is a default.
        compiles: whether the blocks are compiled. To the Trainer ``torch_compile`` means the whole model.
    """

    script: Any
    args: Any
    model: Any
    mixture: Any
    ours: GeminiArguments
    said: dict[str, Any]
    compiles: bool


class Asked(NamedTuple):
    """What a parser has read: a value for every option, of the ``said`` ones the given one."""

    parser: Parser
    values: Namespace
    said: dict[str, Any]


class Parser(Refusing, _TrlParser):
    """TRL's, which keeps apart what was said from what is a default."""

    def __init__(self, kind: str) -> None:
        scripts: Any = trl.ScriptArguments
        if kind in ("grpo", "rloo"):
            module = __import__(f"trl.scripts.{kind}", fromlist=["scripts"])
            scripts = getattr(module, f"{kind.upper()}ScriptArguments")
        config = getattr(trl, f"{'Reward' if kind == 'reward' else kind.upper()}Config")
        records = (scripts, config, trl.ModelConfig, trl.DatasetMixtureConfig, GeminiArguments)
        _TrlParser.__init__(self, records, prog=f"gemini {kind}", allow_abbrev=False)
        self.said: dict[str, Any] = {}
        super().set_defaults_with_config(**_OURS, use_cpu=not torch.cuda.is_available())

    def set_defaults_with_config(self, **given: Any) -> list[str]:
        self.said = given
        return list(super().set_defaults_with_config(**given))

    def parse_args_into_dataclasses(self, args: Any = None, **_: Any) -> Any:
        values, rest = self.parse_known_args(args)
        for action in self._actions:
            action.default = SUPPRESS
        self.said |= vars(self.parse_known_args(args)[0])
        return values, rest

    def read(self, words: Sequence[str]) -> Asked:
        """The value of every option.

        Raises:
            JobError: for options that there are not, or that are no values of their kind.
        """
        dashed = [word.replace("_", "-") for word in words]
        if "--config" in dashed and dashed[-1] == "--config":
            self.error("--config needs a file")
        with as_job_error(asked="--config"):
            try:
                values, of_file, rest = self.parse_args_and_config(
                    words, return_remaining_strings=True, separate_remaining_strings=True
                )
            except yaml.YAMLError as e:
                raise JobError(f"--config: this is not YAML: {' '.join(str(e).split())}") from e
        for word in (*of_file[::2], *rest):
            self.refuse(word)
        _check_alone(values)
        return Asked(self, values, copy.deepcopy(self.said))  # records are made of the values, in place


def options_of(asked: Asked, num_processes: int = 1) -> Options:
    """The records of what so many processes were asked, checked against each other. What was left out is a plan's, if
    there is one, and otherwise what the kind of the data needs.

    Raises:
        JobError: for options that do not go together.
    """
    parser, values, said = asked
    kind = parser.prog.split()[1]
    unsaid: dict[str, Any] = {"data_seed": values.seed}  # all ranks draw the same order, whatever else they draw
    if kind == "sft" and text_files(values.dataset_name):
        unsaid |= {"packing": True, "packing_strategy": "wrapped"}  # a document is no example
    if values.cp > 1:
        unsaid["pad_to_multiple_of"] = values.cp
    if kind in ("dpo", "kto") and not (values.use_peft or values.sync_ref_model):
        unsaid["precompute_ref_log_probs"] = True  # by the model itself, before its first step: no second one in memory
    if values.patience is not None:
        unsaid |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        unsaid["save_steps"] = values.eval_steps or values.logging_steps
    if values.plan is not None:
        unsaid |= step_of(document.load(Path(values.plan), "--plan", Plan.from_json))
    for name, value in unsaid.items():
        if name not in said:
            setattr(values, name, value)
    compiles, values.torch_compile = bool(values.torch_compile), False
    with as_job_error(asked=parser.prog):
        made: list[Any] = [
            record(**{f.name: getattr(values, f.name) for f in fields(record) if f.init})
            for record in parser.dataclass_types
        ]
    options = Options(made[0], made[1], made[2], made[3], made[4], said, compiles)
    _check(kind, options)
    options.args.parallelism_config = parallelism_of(options.ours, num_processes)
    return options


# ---- what does not go together ---------------------------------------------------------------------------------------

_APART = {
    (
        "!model.model_name_or_path",
        "ours",
    ): "Say what to train with --model_name_or_path: a folder, a config.json, a name.",
    ("!script.dataset_name", "!mixture.datasets"): (
        "Say what to train on with --dataset_name: a file of rows or text, a folder, a pattern, a name."
    ),
    ("ours.nvme_memory", "!ours.nvme_path"): (
        "--nvme_memory {o.ours.nvme_memory} needs --nvme_path: a folder on the drive that is to hold them."
    ),
    ("ours.durable_every", "!ours.nvme_path"): (
        "--durable_every needs --nvme_path: a folder on the drive that is to hold the store."
    ),
    ("ours.offload_activations", "!args.gradient_checkpointing"): (
        "--offload_activations {o.ours.offload_activations} moves what --gradient_checkpointing keeps: give both."
    ),
    ("ours.offload_activations=nvme", "!ours.nvme_path"): (
        "--offload_activations nvme needs --nvme_path: a folder on the drive that is to hold them."
    ),
    ("ours.plan", "ours.activations|ours.offload_activations"): (
        "--activations and --offload_activations are the plan's to say where there is one: leave them out."
    ),
    ("model.load_in_4bit|model.load_in_8bit", "!model.use_peft"): (
        "--load_in_4bit freezes the weights in 4 bits: give --use_peft as well, which is trained then."
    ),
    (
        "ours.ep>1",
        "ours.tp>1|ours.cp>1",
    ): "--ep {o.ours.ep} goes with --replicas alone: leave it out, or --tp and --cp.",
    ("ours.tp>1|ours.ep>1", "model.use_peft|ours.tile_tokens|ours.durable_every"): (
        "--tp and --ep cut layers, which have no --use_peft, --tile_tokens or --durable_every. Leave one out."
    ),
    ("ours.tp>1|ours.ep>1|ours.cp>1", "ours.plan"): "--tp, --cp and --ep and --plan: a plan is of a whole model.",
    ("ours.states=compact", "args.fp16"): "--states compact keeps bf16 weights, which does not go with --fp16.",
}
"""Two conditions, as :func:`gemini.config.contradictions` reads them, and what is said of them together."""


def _check_alone(values: Namespace) -> None:
    """What can be refused before processes meet."""
    if isinstance(values.nvme_path, str):  # in YAML
        values.nvme_path = [values.nvme_path]
    for name in (*(f"{tier.value}_memory" for tier in Tier), "activations"):
        if (size := getattr(values, name)) is not None:
            check_size(f"--{name}", str(size))
    least = {"replicas": 1, "tp": 1, "cp": 1, "ep": 1, "patience": 1, "durable_every": 0}
    for name, number in least.items():
        if (given := getattr(values, name)) is not None and given < number:
            raise JobError(f"--{name} must be at least {number}, got {given}.")
    for name, known in {"states": STATES, "optimizer": (None, *RULES)}.items():
        if getattr(values, name) not in known:
            raise JobError(f"--{name} must be one of {', '.join(filter(None, known))}, got {getattr(values, name)!r}.")
    if values.optimizer is not None and not RULES[values.optimizer].unattended:
        raise JobError(f"--optimizer {values.optimizer} needs a loop of its own: docs/optimizers.md has it.")
    if values.patience is not None and getattr(values.eval_strategy, "value", values.eval_strategy) == "no":
        raise JobError("--patience needs something to evaluate on: --eval_strategy steps, and a split of the data.")
    values.tile_tokens = tiles_of("--tile_tokens", values.tile_tokens)


def _check(kind: str, options: Options) -> None:
    ours = options.ours
    if kind != "sft" and max(ours.tp, ours.cp, ours.ep) > 1:
        raise JobError(f"--tp, --cp and --ep are for gemini sft; gemini {kind} computes whole layers and sequences.")
    for pair in contradictions(options, _APART):
        raise JobError(_APART[pair].format(o=options))


def precision_of(args: Any) -> str:
    """What is computed in."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


# ---- several processes -------------------------------------------------------------------------------------------


def parallelism_of(ours: GeminiArguments, num_processes: int) -> ParallelismConfig | None:
    """How processes share sequences and layers, as the Trainer is told it; None where none do.

    Raises:
        JobError: for numbers of processes that do not go together.
    """
    sizes = {name: getattr(ours, name) for name in ("replicas", "tp", "cp", "ep")}
    groups = sizes["replicas"] * sizes["tp"] * sizes["cp"] * sizes["ep"]
    if num_processes % groups:
        asked = " ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        raise JobError(
            f"{asked} takes {groups} processes or a multiple of that, and there "
            f"{'is' if num_processes == 1 else 'are'} {num_processes}: torchrun --nproc-per-node {groups} -m gemini ..."
        )
    if sizes["tp"] * sizes["cp"] == 1:
        return None
    if sizes["replicas"] > 1 and num_processes == groups:  # accelerate does not know replicas that shard nothing
        raise JobError(
            f"--replicas {sizes['replicas']} leaves each of {num_processes} processes without another one to share its "
            "part of the model with: leave --replicas out, or start more processes."
        )
    return ParallelismConfig(
        dp_replicate_size=sizes["replicas"],
        dp_shard_size=num_processes // groups,
        cp_size=sizes["cp"],
        tp_size=sizes["tp"],
    )


# ---- a plan's step, and a plan for a step ----------------------------------------------------------------------------


def step_of(plan: Plan) -> dict[str, Any]:
    """The options that describe a plan's step."""
    trace, rule = plan.trace, plan.problem.rule
    sizes = trace.batch.get("input_ids", ())
    names = ("per_device_train_batch_size", "max_length")
    return (dict(zip(names, sizes, strict=True)) if len(sizes) == 2 else {}) | {
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_checkpointing": bool(trace.checkpointing),
        "tile_tokens": trace.tile_tokens,
        "bf16": plan.problem.precision == "bf16",
        "fp16": plan.problem.precision == "fp16",
        "optimizer": None if name_of(rule) == "adamw" else name_of(rule),
        "states": "exact" if rule.exact is None else "compact",
    }


def check_step(plan: Plan, options: Options) -> Iterator[str]:
    """What a job that runs a plan makes otherwise than it was planned, where it may: what is larger was not planned
    for, and another kind of step has other planes. Ranks, the tier that computes and the store are compared when the
    model is made.

    Raises:
        JobError: naming the option, what it is here and what it was for the plan.
    """
    made = f"--plan {options.ours.plan} was made"
    for name, planned in step_of(plan).items():
        here = getattr(options.args if hasattr(options.args, name) else options.ours, name)
        if here == planned or (name, here) == ("tile_tokens", "auto"):
            continue
        words = f"{made} with --{name} {planned}, and this job has {here}"
        sums = name == "gradient_accumulation_steps" and plan.problem.gradients != "retain"
        shorter = name in ("per_device_train_batch_size", "max_length") and here is not None and here < planned
        if not sums and not shorter:
            raise JobError(f"{words}. Leave it out here, and it is as in the plan; or make a plan for this step.")
        yield f"{words}: its speed is not the planned one"
    if Tier.NVME in plan.problem.budgets and options.ours.nvme_path is None:
        raise JobError(f"--plan {options.ours.plan} keeps some of the model on NVMe: give --nvme_path, a folder there.")


def plan_command(options: Options) -> str:
    """How ``gemini plan`` is asked what else would do for the job."""
    args, ours = options.args, options.ours
    asked: dict[str, Any] = {
        "seq-len": getattr(args, "max_length", None),
        "batch-size": args.per_device_train_batch_size,
        "accumulate": args.gradient_accumulation_steps if args.gradient_accumulation_steps > 1 else None,
        "precision": None if args.bf16 else precision_of(args),
        "optimizer": ours.optimizer,
        "states": None if ours.states == "exact" else ours.states,
        "gradient-checkpointing": args.gradient_checkpointing,
        "tile-tokens": ours.tile_tokens,
        "lora": options.model.lora_r if options.model.use_peft else None,
        "load-in-4bit": options.model.load_in_4bit,
        "offload-activations": ours.offload_activations,
        **{tier.value: getattr(ours, f"{tier.value}_memory") for tier in Tier},
    }
    words = ["gemini", "plan", str(options.model.model_name_or_path)]
    for name, value in asked.items():
        words += [f"--{name}"] if value is True else [] if value in (None, False) else [f"--{name}", str(value)]
    return shlex.join([*words, "--alternatives"])


def to_yaml(said: dict[str, Any]) -> str:
    """What was said, as ``--config`` reads it."""
    plain = {name: value for name, value in said.items() if name != "resume_from_checkpoint"}
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)) if plain else "{}\n"
