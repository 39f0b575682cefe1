"""What each command was asked to do: a frozen record whose fields are its options, each with its help, its heading and
how argparse reads it; ``check`` says which do not go together. No torch is imported here: a refusal takes no seconds.
"""

from __future__ import annotations

import copy
import re
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, ArgumentTypeError, HelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from gemini.errors import parse_bytes
from gemini.jobs import JobError
from gemini.planning.hardware import machine_names
from gemini.planning.planes import GRADIENTS, PRECISIONS, RuleSpec
from gemini.planning.rules import RULES, STATES, rule_named, spec_for
from gemini.planning.trace import as_tiles, tile_sizes

MOST_POSITIONS = 4096
"""What a sequence has by default at most; less where the model has fewer positions."""

MAIN = "model"
"""What a model is called beside those of ``--with``."""

# ---- how an option is read -------------------------------------------------------------------------------------------


def at_least(least: int, below: int = 2**63) -> Callable[[str], Any]:
    """Numbers from ``least`` on."""

    def read(text: str) -> int:
        if not least <= (number := int(text)) < below:
            most = f" and less than {below}" if number >= below else ""
            raise ValueError(f"must be at least {least}{most}, got {text}")
        return number

    return read


seed = at_least(0, 2**32)  # what generators of random numbers begin with


def size(text: str) -> str:
    """A number of bytes, as it was written."""
    parse_bytes(text)
    return text


def tiles(text: str) -> int | str | None:
    """Tiles, as ``GeminiConfig(tile_tokens=)`` takes them."""
    return text if text == "auto" else as_tiles(tile_sizes(int(text) if text.isdecimal() else text))


def blocks(text: str) -> int | str:
    """A number of blocks, or auto."""
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"must be a number of blocks or auto, got {text!r}")
    return text if text == "auto" else int(text)


class WithModel(NamedTuple):
    """A model that computes in turn with the one that is planned for."""

    name: str
    config: str
    is_trained: bool


def with_model(text: str) -> WithModel:
    """A model by a name of one's own, its config, and whether it is trained too."""
    name, _, rest = text.partition("=")
    config, _, how = rest.partition(",")
    if not name or not config or how not in ("", "frozen", "trained"):
        raise ValueError(f"a model is NAME=CONFIG, which is frozen, or NAME=CONFIG,trained, got {text!r}")
    return WithModel(name, config, how == "trained")


def new_file(text: str) -> Path:
    """A file to write, after seconds or hours: whether that can be is known now."""
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    return path


class Help(HelpFormatter):
    """Says an option by one of its names: whether its words stand apart by ``-`` or ``_`` is the same."""

    def _format_action_invocation(self, action: Action) -> str:
        names = action.option_strings
        shown = copy.copy(action)
        shown.option_strings = [name for name in names if "-" not in name[2:]] or names
        return super()._format_action_invocation(shown)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return action.dest.rstrip("_").upper()


class Refusing(ArgumentParser):
    """Says what is wrong in one paragraph."""

    def _get_value(self, action: Action, text: str) -> Any:
        """Read a value as argparse does, which shows the words of no other error than its own."""
        try:
            return self._registry_get("type", action.type, action.type)(text)
        except (ArgumentTypeError, TypeError, ValueError) as e:
            raise ArgumentError(action, str(e)) from e

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message}. `{self.prog} --help` lists all options.")


class RecordParser(Refusing):
    """The command line of a command whose options are the fields of a record."""

    def __init__(self, name: str, about: str, record: type) -> None:
        how: dict[str, Any] = {"allow_abbrev": False, "argument_default": SUPPRESS, "formatter_class": Help}
        super().__init__(prog=f"gemini {name}", description=about, **how)
        self._record = record
        groups: dict[str | None, Any] = {None: self}
        for option in fields(record):
            how, written = dict(option.metadata), str(option.type)
            group, words, least = how.pop("group"), how.pop("words").replace("%", "%%"), how.pop("least", None)
            if group not in groups:
                groups[group] = self.add_argument_group(group)
            if written == "bool":
                how["action"] = "store_true"
            elif "Path" in written:
                how.setdefault("type", Path)
            elif least is not None:
                how["type"] = at_least(least)
            if how.get("nargs") == "?":
                how["default"] = None  # argparse takes SUPPRESS for a word that was said
            if not is_argument(option):
                how["dest"] = option.name
            groups[group].add_argument(option.name if is_argument(option) else spelled(option.name), help=words, **how)
        behind = [f"[{a.metavar}]" if a.nargs else str(a.metavar) for a in self._actions if not a.option_strings]
        self.usage = " ".join((self.prog, "[OPTIONS]", *behind))

    def read(self, words: Sequence[str]) -> Any:
        """The record, checked for itself; what was left out has its default."""
        given = vars(self.parse_args([re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), w) for w in words]))
        record = self._record(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
        record.check()
        return record


def opt(group: str | None, words: str, default: Any = None, **how: Any) -> Any:
    """A field with its help ``words``, under the heading ``group`` (None: that of all commands). ``how``: ``least``,
    the smallest number it may be, and what argparse calls by the same name.
    """
    return field(default=default, metadata={"words": words, "group": group, **how})


def is_argument(option: Any) -> bool:
    """Whether a field is given by its place and not by its name."""
    return "metavar" in option.metadata


def spelled(name: str, sign: str = "-") -> str:
    """The command line's spelling of a field."""
    return "--" + name.rstrip("_").replace("_", sign)


# ---- what goes together ----------------------------------------------------------------------------------------------

Rule = tuple[str, str, str]
"""Options by their fields, others, and why. "gradients=transient" is an option with that value alone."""


def check_together(
    asked: Any, defaults: Mapping[str, Any], apart: Sequence[Rule], needs: Sequence[Rule], sign: str = "-"
) -> None:
    """Raises: JobError: where options that are not as they are by default break a rule: those ``apart`` go with none of
    the others, and what ``needs`` something goes with one of them alone. ``sign``: between the words of an option.
    """

    def said(words: str) -> str:
        for name, _, value in (word.partition("=") for word in words.split()):
            found = getattr(asked, name, None)
            if str(found) == value if value else found not in (None, False, defaults.get(name)):
                return f"{spelled(name, sign)} {value}".rstrip()
        return ""

    for these, those, why in apart:
        if (one := said(these)) and (other := said(those)):
            raise JobError(f"{one} does not go with {other}: {why}. Leave one of them out.")
    for these, those, why in needs:
        if (one := said(these)) and not said(those):
            raise JobError(f"{one} needs {spelled(those, sign)}: {why}. Give both, or leave it out.")


# ---- what several commands are asked ---------------------------------------------------------------------------------
# The bases of a record are named the last one first: that is the order of their fields, and so that of the help.

_NAMES = "A config.json, a model folder (weights are not read), a name on the Hugging Face hub, or gpt2-small."
_MODEL, _STEP, _MACHINE, _OUTPUT = "Which model", "Which step", "On what", "What is written"
_FLASH = "it computes in bf16 and fp16 on CUDA only"
_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Options that can be checked for themselves."""

    apart: ClassVar[tuple[Rule, ...]] = ()
    needs: ClassVar[tuple[Rule, ...]] = ()

    def check(self) -> None:
        """Raises: JobError: for options of which no files or hardware could make both right."""
        check_together(self, {option.name: option.default for option in fields(self)}, self.apart, self.needs)


@dataclass(frozen=True, kw_only=True)
class _Step(Record):
    """Options of a step that is traced, and so of one that is planned."""

    config: str | None = opt(None, _NAMES, metavar="CONFIG", nargs="?")
    layers: int | None = opt(_MODEL, "This many layers instead of the config's own.", least=1)
    seq_len: int | None = opt(
        _STEP, f"Tokens in a sequence. (Default: all positions, up to {MOST_POSITIONS}.)", least=2
    )
    gradient_checkpointing: bool = opt(_STEP, "Compute activations again in backward, and do not keep them.", False)
    kept_blocks: int | str | None = opt(
        _STEP,
        "Of the blocks of --gradient-checkpointing, how many are not computed again, evenly spread; auto: as many as "
        "are quickest on a --machine.",
        type=blocks,
    )
    tile_tokens: int | str | None = opt(
        _STEP,
        "Compute MLPs, norms and the output head so many tokens at a time; head=1024: the head alone; auto: where the "
        "step does not fit otherwise. (Default: a whole micro-batch.)",
        type=tiles,
    )
    kernels: str | None = opt(
        _STEP,
        "Compute norms, SwiGLU, rope and the head with its loss by Liger's kernels (llama, mistral, qwen2, qwen3); "
        "auto: where that is quicker, for --fastest.",
        choices=("liger", "auto"),
    )
    fp16_accumulation: bool = opt(
        _STEP, "Sum products of --precision fp16 in fp16: twice as quick on GeForce cards, and other bits.", False
    )
    float8: bool = opt(_STEP, "Multiply in float8 in the linear layers of blocks, by torchao: other bits.", False)
    lora: int | None = opt(_STEP, "Train a LoRA of this rank on all linear layers; all else is frozen.", least=1)
    load_in_4bit: bool = opt(_STEP, "Keep the layers under --lora in 4 bits, half a byte per weight (QLoRA).", False)
    attn_implementation: str | None = opt(_STEP, "How attention is computed. (Default: auto.)", choices=_ATTENTION)


# ---- trace, plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceSettings(_Step):
    """Trace a step of a model ahead of time: its memory beside params and its work. Needs no weights and no GPU."""

    config: str | None = opt(None, _NAMES, metavar="CONFIG")
    batch_size: int = opt(_STEP, "Sequences in a forward pass.", 1, least=1)
    precision: str = opt(_STEP, "What is computed in.", "bf16", choices=PRECISIONS)
    tp: int = opt(_STEP, "Slices of layers, of which this is one.", 1, least=1)
    cp: int = opt(_STEP, "Parts of sequences, of which this is one.", 1, least=1)
    target: str = opt(_STEP, "Whose workspaces count.", "cuda", choices=("cpu", "cuda"))
    out: Path | None = opt(_OUTPUT, "A JSON file for the trace: what --trace of `plan` takes.", type=new_file)

    apart = (("attn_implementation=flash_attention_2", "precision=fp32 target=cpu", _FLASH),)
    needs = (
        ("fp16_accumulation", "precision=fp16", "it is of products in fp16"),
        ("fp16_accumulation", "target=cuda", "a CPU sums in fp32"),
        ("float8", "precision=bf16", "its scales are for bf16"),
        ("kept_blocks", "gradient_checkpointing", "it is of the blocks that this computes again"),
        ("load_in_4bit", "lora", "weights in 4 bits are frozen, and adapters trained"),
    )

    def check(self) -> None:
        super().check()
        if self.kept_blocks == "auto":
            raise JobError(
                "--kept-blocks auto is chosen by `gemini plan` with the speeds of a --machine, or say a number."
            )


_MESH, _CHOICES = "parallel tp pp cp", "fastest kept_blocks=auto alternatives"
_OTHER_GRADIENTS = " ".join(f"gradients={kind}" for kind in GRADIENTS if kind != "retain")
_TRACED = " ".join(("batch_size precision", *(o.name for o in fields(_Step) if o.name not in ("config", "layers"))))
"""The options that describe the step to trace."""


def _budget(where: str) -> Any:
    return opt(_MACHINE, f"Budget {where}. (Default: 80 % of the machine's.)", type=size)


@dataclass(frozen=True, kw_only=True)
class PlanSettings(_Step):
    """Does it fit, how fast will it be, what should be changed: from a config alone. Exit code 2 if it does not fit.
    For example: gemini plan config.json --gpu 24GiB --cpu 64GiB --nvme 1TB --machine rtx4090
    """

    # What describes the step to trace is None if left out.
    config: str | None = opt(None, f"{_NAMES} With --trace it may be left out.", metavar="CONFIG", nargs="?")
    trace: Path | None = opt(_MODEL, "Take the step from this file of `trace --out`.")
    with_: tuple[WithModel, ...] = opt(
        _MODEL,
        "NAME=CONFIG: another model in the same budget that computes in turn with this one, evaluated alone (a "
        "reference, a reward) or with NAME=CONFIG,trained trained too. Repeat for more.",
        (),
        type=with_model,
        action="append",
    )
    batch_size: int | None = opt(_STEP, "Sequences in a forward pass of each GPU. (Default: 1.)", least=1)
    precision: str | None = opt(_STEP, "What is computed in. (Default: bf16.)", choices=PRECISIONS)
    accumulate: int = opt(_STEP, "Batches in an optimizer step.", 1, least=1)
    order: str | None = opt(
        _STEP,
        "bfs: each block takes all batches of --accumulate; dfs: one after another. (Default: dfs; --fastest: both.)",
        choices=("dfs", "bfs"),
    )
    fastest: bool = opt(
        _STEP,
        "Choose the quickest step of so many tokens (--tokens-per-step, or --batch-size times --accumulate): "
        "micro-batch, and on a --machine checkpointing, blocks that are kept, and where they wait, and tiles with "
        "--tile-tokens auto.",
        False,
    )
    tokens_per_step: int | None = opt(_STEP, "Tokens in an optimizer step of all GPUs, for --fastest.", least=2)
    gradients: str | None = opt(
        _STEP, "What is kept until the update. (Default: what the step needs.)", choices=GRADIENTS
    )
    optimizer: str = opt(_STEP, "The update rule.", "adamw", choices=tuple(RULES))
    states: str = opt(_STEP, "How states and masters are kept; compact is 8 bits.", "exact", choices=STATES)
    offload_activations: str = opt(
        _STEP, "Where the inputs of checkpointed blocks wait.", "auto", choices=("auto", "no", "cpu", "nvme")
    )
    gpu: str | None = _budget("on each GPU, such as 24GiB")
    cpu: str | None = _budget("in host memory, for all GPUs of a machine together")
    nvme: str | None = _budget("on NVMe drives, for all GPUs of a machine together")
    gpus: int = opt(_MACHINE, "GPUs (or, on CPUs, processes) that share the model.", 1, least=1)
    tp: int = opt(_MACHINE, "GPUs that share each layer, in slices (tensor parallel).", 1, least=1)
    pp: int = opt(_MACHINE, "Stages of a pipeline; --accumulate says its micro-batches.", 1, least=1)
    cp: int = opt(_MACHINE, "GPUs that share each sequence, in parts (context parallel).", 1, least=1)
    parallel: str | None = opt(_MACHINE, "The best of all meshes of --gpus, and the runners-up.", choices=("auto",))
    compute: str | None = opt(_MACHINE, "Where it is computed. (Default: gpu if there is one.)", choices=("gpu", "cpu"))
    machine: str | None = opt(
        _MACHINE,
        f"Whose speeds are predicted with: {', '.join(machine_names())}, or a JSON file of `gemini doctor --measure`; "
        "where yours has more or less memory, as in rtx4090,cpu=128GiB.",
    )
    schedule: str = opt(_MACHINE, "serial: with overlap=False.", "overlapped", choices=("overlapped", "serial"))
    json: bool = opt(_OUTPUT, "Print JSON, and nothing else, on stdout.", False)
    picture: tuple[Path, ...] = opt(
        _OUTPUT, "Draw the step: .png or .svg. Repeat for more.", (), type=new_file, action="append"
    )
    out: Path | None = opt(_OUTPUT, "A JSON file for the plan: what `sft --plan` takes.", type=new_file)
    alternatives: bool = opt(
        _OUTPUT, "A table of what else the machine could do with the step, each planned as the step is.", False
    )

    apart = (
        ("attn_implementation=flash_attention_2", "precision=fp32 compute=cpu", _FLASH),
        ("trace", _TRACED, "that describes a step to trace, and this one has been traced"),
        ("tokens_per_step", "batch_size accumulate", "--fastest chooses these"),
        ("fastest kept_blocks=auto", f"alternatives trace {_MESH}", "it looks at steps of several sizes"),
        ("with_", f"{_CHOICES} picture trace {_MESH}", "one step of several models is planned as it is"),
        ("order=bfs", f"gpus precision=fp16 {_OTHER_GRADIENTS} {_MESH}", "it is a step of one GPU with its own sums"),
        ("parallel", "tp pp cp", "it chooses them"),
        (_MESH, "trace tile_tokens lora out alternatives", "of a mesh each stage has a plan, from a config"),
        ("parallel tp pp", "gradients=transient", "slices and stages keep gradients until the update"),
        ("parallel pp", "precision=fp16", "stages have no common loss scale"),
        ("gradients=transient", "precision=fp16", "it updates inside backward, before the loss scale is known"),
    )
    needs = (
        ("kernels=auto", "fastest", "that compares steps with and without them"),
        ("tokens_per_step", "fastest", "that divides them into micro-batches"),
        ("picture", "machine", "it shows a step in time, by the speeds of one"),
    )

    def check(self) -> None:
        if self.config is None and self.trace is None:
            raise JobError("Say what to plan for: a config.json, a model folder, a preset, or a trace with --trace.")
        super().check()
        if len({MAIN, *(each.name for each in self.with_)}) <= len(self.with_):
            raise JobError(f"--with needs a name of its own for each model, and none is {MAIN!r}.")
        if self.gradients in ("transient", "retain") and self.accumulate > 1 and self.order != "bfs":
            raise JobError(
                f"--gradients {self.gradients} has one backward per update, and --accumulate {self.accumulate} has "
                "several: leave --gradients out."
            )

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of the mesh in which ranks share more than params, by option."""
        return {name: size for name in ("tp", "pp", "cp") if (size := getattr(self, name)) > 1}

    @property
    def mesh(self) -> bool:
        """Whether ranks share more than params."""
        return bool(self.parallel or self.dims)

    def rule_in(self, precision: str) -> RuleSpec:
        """The planes of the update rule, with its states kept as was asked; a JobError if it has no compact form."""
        try:
            return spec_for(rule_named(self.optimizer).spec, self.states, precision)
        except ValueError as e:
            raise JobError(f"--optimizer {self.optimizer}: {e}.") from None

    @property
    def kept_gradients(self) -> str:
        """Gradients kept until the update: micro-batches one after another need sums, and those are in fp32."""
        return self.gradients or ("accumulate" if self.accumulate > 1 and self.order != "bfs" else "retain")

    def traced(self, **more: Any) -> TraceSettings:
        """The step to trace."""
        asked = {option.name: getattr(self, option.name) for option in fields(_Step)}
        asked |= {"batch_size": self.batch_size or 1, "precision": self.precision or "bf16"}
        return TraceSettings(**asked | more)


# ---- doctor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Record):
    """Say what this machine offers: versions, processors, native kernels, memory, disks. With --measure also how fast
    it is; of a durable STORE what is in it, and whether it is whole.
    """

    store: Path | None = opt(
        None, "A durable store, the nvme_path of a run: say what is in it, check all of it.", metavar="STORE", nargs="?"
    )
    nvme_path: tuple[Path, ...] = opt(
        None, "Try folders as the NVMe tier, one on each drive, and a store in them.", (), nargs="+", action="extend"
    )
    measure: bool = opt(None, "Measure the machine's speeds, and with --nvme-path those of the first drive.", False)
    json: Path | None = opt(None, "Write what was measured to this file, for --machine of gemini plan.", type=new_file)

    needs = (("json", "measure", "it is for the figures that are measured"),)
