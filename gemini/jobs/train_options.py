"""The options of ``gemini sft`` and its like: TRL's, read by its parser (from YAML too), and Gemini's beside them."""

from __future__ import annotations

import copy
import math
import os
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import trl
from accelerate import ParallelismConfig

from gemini.config import GeminiConfig, MemoryBudget
from gemini.errors import counted
from gemini.integrations.huggingface import check_args, with_rule
from gemini.jobs import JobError, refusing
from gemini.jobs.parts import is_text
from gemini.jobs.settings import Help, Refusing, at_least, check_together, seed, size, tiles
from gemini.planning import document
from gemini.planning.hardware import load_hardware
from gemini.planning.plan import Plan
from gemini.planning.rules import RULES, STATES, name_of, rule_named
from gemini.tiers import Tier


def _opt(words: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"help": words, **more})


@dataclass
class GeminiArguments:
    """Options that neither TRL nor the Trainer has."""

    _argument_group_name: ClassVar[str] = "Gemini"

    gpu_memory: str | None = _opt("Budget on the GPU of each process, such as 20GiB. (Default: what is free.)")
    cpu_memory: str | None = _opt("Budget in host memory for all processes of a machine. (Default: what is free.)")
    nvme_memory: str | None = _opt("Budget on the drive of --nvme_path for all processes of a machine.")
    nvme_path: list[str] | None = _opt(
        "A folder for what does not fit elsewhere, or one on each of several drives, which are read and written "
        "together. The files in them have no name."
    )
    activations: str | None = _opt("The part of --gpu_memory to leave to activations, such as 4GiB.")
    offload_activations: str | None = _opt(
        "Where the inputs of checkpointed blocks wait for backward. (Default: where they are.)", choices=("cpu", "nvme")
    )
    states: str = _opt(
        "How states and masters are kept; compact is 8 bits, 5 bytes per param.", "exact", choices=STATES
    )
    optimizer: str | None = _opt("The update rule, where --optim has no name for it.", choices=tuple(RULES))
    tile_tokens: str | None = _opt(
        "Compute MLPs, norms and the output head with its loss so many tokens at a time; head=1024: the head alone; "
        "auto: where the step does not fit otherwise. (Default: a whole batch.)"
    )
    plan: str | None = _opt(
        "A plan that `gemini plan --out` wrote for this model: its budgets, homes, moves, and the step that is made "
        "where no options describe another."
    )
    fastest: bool = _opt(
        "Choose what makes the step quickest on --machine with the same bits: which blocks of --gradient_checkpointing "
        "are not computed again, where activations wait, and homes.",
        False,
    )
    machine: str | None = _opt("Whose speeds to plan with: a name or a file, as for `gemini plan --machine`.")
    order: str | None = _opt("bfs: micro-batches go block by block. (Default: --plan's.)", choices=("dfs", "bfs"))
    fp16_accumulation: bool = _opt(
        "Sum products of --fp16 in fp16: twice as quick on GeForce cards, and other bits. (Default: --plan's.)", False
    )
    float8: bool = _opt(
        "Multiply in float8 in the linear layers of blocks, by torchao: other bits. (Default: --plan's.)", False
    )
    bytes: bool = _opt("Every byte of the text is a token, whatever tokenizer the model has.", False)
    durable_every: int = _opt("Steps between commits to a store in --nvme_path that outlives a kill; 0 for none.", 0)
    replicas: int = _opt("Groups of processes that keep a whole model each; a group shares its model.", 1)
    tp: int = _opt("Processes that share each layer, in slices (tensor parallel).", 1)
    cp: int = _opt("Processes that share each sequence, in parts (context parallel).", 1)
    ep: int = _opt("Processes that share the experts of each layer (expert parallel).", 1)


_OURS = {
    "disable_tqdm": True,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "log_level": "error",
    "log_level_replica": "error",
}
"""Defaults that are not TRL's: that it has begun to learn is said at once, and a line is a line."""

_KINDS = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "max_length"), at_least(1)),
    **dict.fromkeys(("gradient_accumulation_steps", "replicas", "tp", "cp", "ep"), at_least(1)),
    "seed": seed,
    "durable_every": at_least(0),
    **dict.fromkeys(("gpu_memory", "cpu_memory", "nvme_memory", "activations"), size),
    "tile_tokens": tiles,
}
"""How some options are read, where it is more than their type."""

ROWS = {"dpo": 2, "reward": 2}
"""By kind of training the rows that a model computes for one example, if more than one: those of a pair."""

_TrlParser: Any = trl.TrlParser


def stem(kind: str) -> str:
    """How TRL's classes for a ``kind`` of training begin: "SFT", "Reward"."""
    return kind.upper() if len(kind) <= len("grpo") else kind.capitalize()


class Options(NamedTuple):
    """A job as it was asked for."""

    kind: str  # "sft", "dpo", ...
    script: Any  # TRL's arguments of its scripts: the data
    args: Any  # the trainer's (trl.SFTConfig, ...)
    model: Any  # TRL's ModelConfig
    mixture: Any  # TRL's DatasetMixtureConfig
    ours: GeminiArguments
    said: dict[str, Any]  # what was given, by name; all else is a default
    compiles: dict[str, Any] | None  # the blocks, with these words; to the Trainer they mean the whole model
    config: GeminiConfig  # how the model is managed


class _Help(Help, ArgumentDefaultsHelpFormatter):
    """With what is taken by default, where that is something."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(Refusing, _TrlParser):
    """TRL's for a ``kind`` ("sft", ...), perhaps by another ``name`` and with other ``defaults``. It keeps apart what
    was ``said``; ``values``: every option, once read.
    """

    values: Namespace

    def __init__(self, kind: str, about: str = "", name: str = "", **defaults: Any) -> None:
        scripts: Any = trl.ScriptArguments
        if kind in ("grpo", "rloo"):
            module = __import__(f"trl.scripts.{kind}", fromlist=["scripts"])
            scripts = getattr(module, f"{kind.upper()}ScriptArguments")
        if (config := getattr(trl, f"{stem(kind)}Config", None)) is None:
            raise JobError(f"gemini {kind} needs a newer trl than {trl.__version__}, which has no such trainer.")
        records = (scripts, config, trl.ModelConfig, trl.DatasetMixtureConfig, GeminiArguments)
        self.kind = kind
        prog = f"gemini {name or kind}"
        how = {"usage": f"{prog} [OPTIONS]", "description": about, "allow_abbrev": False, "formatter_class": _Help}
        _TrlParser.__init__(self, records, prog=prog, **how)
        self.said: dict[str, Any] = {}
        for action in self._actions:
            action.type = _KINDS.get(action.dest, action.type)
        super().set_defaults_with_config(**_OURS, use_cpu=not torch.cuda.is_available(), **defaults)

    def set_defaults_with_config(self, **given: Any) -> list[str]:
        """Take the values of a YAML file, which are read as those of the command line are."""
        self.said = given
        read = {name: str(value) if name in _KINDS and value is not None else value for name, value in given.items()}
        if isinstance(folder := read.get("nvme_path"), str):
            read["nvme_path"] = [folder]
        return list(super().set_defaults_with_config(**read))

    def parse_args_into_dataclasses(self, args: Any = None, **_: Any) -> Any:
        values, rest = self.parse_known_args(args)
        if values.optimizer not in (None, *RULES):  # argparse looks at choices of the command line, and not of YAML
            self.error(f"--optimizer must be one of {', '.join(RULES)}, got {values.optimizer!r}")
        for action in self._actions:
            action.default = SUPPRESS
        self.said |= vars(self.parse_known_args(args)[0])
        return values, rest

    def read(self, words: Sequence[str]) -> Parser:
        """Take the value of every option; the parser itself."""
        if words[-1:] == ["--config"]:
            self.error("argument --config: a YAML file is expected")
        with refusing("--config"):
            values, of_file, rest = self.parse_args_and_config(
                words, return_remaining_strings=True, separate_remaining_strings=True
            )
            if unknown := (*of_file[::2], *rest):
                begun = tuple(word for word in unknown if word.startswith("--"))
                near = [f"--{a.dest}" for a in self._actions if any(n.startswith(begun) for n in a.option_strings)]
                hint = f" (perhaps {', '.join(near[:4])})" if begun and near else ""
                self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        self.values, self.said = values, copy.deepcopy(self.said)  # records are made of the values, in place
        return self


def options_of(asked: Parser, num_processes: int = 1) -> Options:
    """The records of what so many processes were asked, checked against each other. What was left out is a plan's, if
    there is one, and otherwise what the kind of the data needs.
    """
    kind, values, said = asked.kind, asked.values, asked.said
    unsaid: dict[str, Any] = {"data_seed": values.seed}  # all ranks draw the same order, whatever else they draw
    if kind == "sft" and is_text(values.dataset_name):
        unsaid |= {"packing": True, "packing_strategy": "wrapped"}  # a document is no example
    if values.cp > 1:
        unsaid["pad_to_multiple_of"] = values.cp
    if kind in ("dpo", "kto") and not (values.use_peft or values.sync_ref_model):
        unsaid["precompute_ref_log_probs"] = True  # by the model itself, before its first step: no second one in memory
    plan = None if values.plan is None else document.load(Path(values.plan), "--plan", Plan.from_json)
    planned = {} if plan is None else step_of(plan, ROWS.get(kind, 1), values.plan)
    for name, value in (unsaid | planned).items():
        if name not in said:
            setattr(values, name, value)
        elif name in planned and getattr(values, name) != value:
            raise JobError(
                f"--plan {values.plan} was made with --{name} {value}, and this job has {getattr(values, name)}. Leave "
                "it out here, and it is as in the plan; or make a plan for this step."
            )
    _check(kind, values)
    words = {"backend": values.torch_compile_backend, "mode": values.torch_compile_mode}
    compiles = (
        {name: word for name, word in words.items() if word} if values.torch_compile or any(words.values()) else None
    )
    values.torch_compile, values.torch_compile_backend, values.torch_compile_mode = False, None, None
    with refusing(asked.prog):
        script, args, model, mixture, ours = asked.parse_dict(vars(values), allow_extra_keys=True)
        config = config_of(args, ours, plan, num_processes)
    args.parallelism_config = parallelism_of(ours, num_processes)
    return Options(kind, script, args, model, mixture, ours, said, compiles, config)


def config_of(args: Any, ours: GeminiArguments, plan: Plan | None, num_processes: int) -> GeminiConfig:
    """How the model of a job is managed, as its options or a plan say it. Raises ValueError for an ``--optim`` that
    cannot update it or is another rule than ``--optimizer``, and JobError for a rule of params that would be divided.
    """
    check_args(args)
    # What a plan may have of a tier that it leaves empty needs no folder there.
    budgets = {} if plan is None else {t: n for t, n in plan.problem.budgets.items() if plan.bytes_per_tier.get(t)}
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))  # a plan's are those of one rank
    budgets = {t: n if t is Tier.GPU else n * sharing for t, n in budgets.items()}
    gradients = "accumulate" if args.gradient_accumulation_steps > 1 else "retain"
    config = GeminiConfig(
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        states=ours.states,
        memory=MemoryBudget(
            gpu=ours.gpu_memory or budgets.get(Tier.GPU),
            cpu=ours.cpu_memory or budgets.get(Tier.CPU),
            nvme=ours.nvme_memory or budgets.get(Tier.NVME),
            nvme_path=ours.nvme_path,
            durable=ours.durable_every > 0,
        ),
        placement="auto" if plan is None else plan,
        gradients=gradients if plan is None else plan.problem.gradients,
        device=str(args.device),
        activations=ours.activations,
        offload_activations=ours.offload_activations
        or ("cpu" if getattr(args, "activation_offloading", False) else None),
        tile_tokens=ours.tile_tokens,
        fp16_accumulation=ours.fp16_accumulation,
        float8=ours.float8,
        step="fastest" if ours.fastest else "given",
        hardware=None if ours.machine is None else load_hardware(ours.machine),
        optimizer=rule_named(ours.optimizer) if ours.optimizer else None,
    )
    config = with_rule(args, config) or config
    if config.rule_spec.whole and num_processes > ours.replicas:
        raise JobError(
            f"The rule {config.rule_spec.name!r} looks at whole params, which {num_processes} processes would divide: "
            f"give --replicas {num_processes}, and each has the whole model."
        )
    return config


def step_of(plan: Plan, rows: int, path: str) -> dict[str, Any]:
    """The options that describe a plan's step, of so many ``rows`` for one example."""
    trace, rule = plan.trace, plan.problem.rule
    sizes = trace.batch.get("input_ids", ())
    if len(sizes) == 2 and sizes[0] % rows:
        raise JobError(
            f"--plan {path} is of {counted(sizes[0], 'row')} at a time, and here each example is {rows}: plan a "
            f"multiple of that, --batch-size {sizes[0] + 1}."
        )
    return ({"per_device_train_batch_size": sizes[0] // rows, "max_length": sizes[1]} if len(sizes) == 2 else {}) | {
        "gradient_accumulation_steps": plan.accumulate * plan.trace.micro_batches,
        "order": "bfs" if plan.trace.micro_batches > 1 else "dfs",
        "gradient_checkpointing": bool(trace.checkpointing),
        "tile_tokens": trace.tile_tokens,
        "bf16": plan.problem.precision == "bf16",
        "fp16": plan.problem.precision == "fp16",
        "fp16_accumulation": trace.fp16_accumulation,
        "float8": trace.float8,
        "optimizer": name_of(rule),
        "states": "exact" if rule.exact is None else "compact",
    }


_APART = (
    ("plan", "activations offload_activations activation_offloading", "where there is a plan, it says that"),
    ("plan", "tp cp ep", "a plan is of a whole model"),
    ("fastest", "plan activations order=bfs use_peft tp ep", "it is chosen for whole layers, one batch after another"),
    ("dataset_streaming streaming", "test_split_size", "a stream has no length, of which it would be a part"),
    ("ep", "tp cp", "experts are shared with --replicas alone"),
    ("tp ep", "use_peft tile_tokens durable_every", "layers are cut, and there are no slices of these"),
)
_NEEDS = (
    ("fastest", "machine", "it compares seconds, by the speeds of one"),
    ("offload_activations activation_offloading", "gradient_checkpointing", "it moves what that keeps"),
    ("load_in_4bit load_in_8bit", "use_peft", "weights in codes are frozen, and adapters trained"),
)


def _check(kind: str, values: Namespace) -> None:
    """Refuse options that do not go together, whatever the files and the machine."""
    if not values.model_name_or_path:
        raise JobError("Say what to train with --model_name_or_path: a folder, a config.json, a name.")
    mixture = getattr(values, "datasets", None)
    if values.dataset_name and mixture:
        raise JobError("--dataset_name and datasets: of a YAML file both say what to train on: give one of them.")
    if not values.dataset_name and not mixture:
        raise JobError("Say what to train on with --dataset_name: a file of rows or text, a folder, a pattern, a name.")
    if kind != "sft" and max(values.tp, values.cp, values.ep) > 1:
        raise JobError(f"--tp, --cp and --ep are for gemini sft; gemini {kind} computes whole layers.")
    check_together(values, {option.name: option.default for option in fields(GeminiArguments)}, _APART, _NEEDS, "_")


def parallelism_of(ours: GeminiArguments, num_processes: int) -> ParallelismConfig | None:
    """How processes share sequences and layers, as the Trainer is told it; None where none do."""
    sizes = {name: getattr(ours, name) for name in ("replicas", "tp", "cp", "ep")}
    groups = math.prod(sizes.values())
    if num_processes % groups:
        asked = " ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        raise JobError(
            f"{asked} takes {groups} processes or a multiple of that, and there are {num_processes}: torchrun "
            f"--nproc-per-node {groups} -m gemini ..."
        )
    if sizes["tp"] * sizes["cp"] == 1:
        return None
    with refusing(f"--replicas {ours.replicas}"):
        return ParallelismConfig(
            dp_replicate_size=ours.replicas, dp_shard_size=num_processes // groups, cp_size=ours.cp, tp_size=ours.tp
        )
