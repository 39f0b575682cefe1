"""What ``gemini trace`` and ``gemini plan`` were asked: frozen records, checked before anything is read or built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.options import check_size
from gemini.optim.names import RULES, rule_named
from gemini.planning.compact import STATES, spec_for
from gemini.planning.planes import GRADIENTS, PRECISIONS, RuleSpec
from gemini.tiers import Tier

TARGETS = ("cpu", "cuda")
ATTENTIONS = ("auto", "eager", "sdpa", "flash_attention_2")
COMPUTES = ("gpu", "cpu")
OFFLOADS = ("auto", "no", "cpu", "nvme")
STEP_SCHEDULES = ("overlapped", "serial")
MOST_POSITIONS = 4096
"""What a sequence has by default at most; less where the model has fewer positions."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The step that is traced: the options of ``gemini trace`` under their own names."""

    config: str | None = None
    layers: int | None = None
    batch_size: int = 1
    seq_len: int | None = None
    precision: str = "bf16"
    gradient_checkpointing: bool = False
    tile_tokens: int | str | None = None
    lora: int | None = None
    attn_implementation: str | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    target: str = "cuda"

    def check(self) -> None:
        """Refuse what no model could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        at_least(1, "--layers", self.layers)
        at_least(1, "--batch-size", self.batch_size)
        at_least(2, "--seq-len", self.seq_len)
        at_least(1, "--lora", self.lora)
        at_least(1, "--tp", self.tensor_parallel)
        at_least(1, "--cp", self.context_parallel)
        one_of(PRECISIONS, "--precision", self.precision)
        one_of(ATTENTIONS, "--attn-implementation", self.attn_implementation)
        one_of(TARGETS, "--target", self.target)
        if self.attn_implementation == "flash_attention_2":
            for asked, value, other in (("--precision", self.precision, "fp32"), ("--target", self.target, "cpu")):
                if value == other:
                    raise JobError(
                        f"--attn-implementation flash_attention_2 and {asked} {other}: FlashAttention computes in bf16 "
                        "and fp16 on CUDA only. Leave one of the two out."
                    )


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The options of ``gemini plan`` under their own names. What describes the step to trace is None if left out."""

    # what is trained
    config: str | None = None
    trace: Path | None = None
    layers: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    gradient_checkpointing: bool = False
    tile_tokens: int | str | None = None
    lora: int | None = None
    attn_implementation: str | None = None
    accumulate: int = 1
    micro_batch: str | None = None
    gradients: str | None = None
    optimizer: str = "adamw"
    states: str = "exact"
    offload_activations: str = "auto"

    # on what
    gpu: str | None = None
    cpu: str | None = None
    nvme: str | None = None
    machine: str | None = None
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    parallel: str | None = None
    compute: str | None = None
    schedule: str = "overlapped"

    def check(self) -> None:
        """Refuse what no model or machine could make right.

        Raises:
            JobError: naming the option, what was given and what is possible.
        """
        if self.config is None and self.trace is None:
            raise JobError("Say what to plan for: a config.json, a model folder, a preset, or a trace with --trace.")
        if self.trace is not None:
            given = [name for name in _OF_THE_TRACE if getattr(self, name)]
            if given:
                raise JobError(
                    f"{option(given[0])} describes a step that is to be traced, and --trace {self.trace} brings one "
                    "that has been: drop one of the two."
                )
        elif self.micro_batch is None or self.micro_batch == "auto":
            self.traced().check()
        if self.micro_batch not in (None, "auto"):
            raise JobError(f"--micro-batch must be auto, got {self.micro_batch!r}; --batch-size says how large it is.")
        at_least(1, "--accumulate", self.accumulate)
        at_least(1, "--gpus", self.gpus)
        for dim in _DIMS:
            at_least(1, f"--{dim}", getattr(self, dim))
        one_of(("auto",), "--parallel", self.parallel)
        if self.is_over_mesh:
            self._check_mesh()
        one_of(GRADIENTS, "--gradients", self.gradients)
        one_of(tuple(RULES), "--optimizer", self.optimizer)
        one_of(STATES, "--states", self.states)
        one_of(OFFLOADS, "--offload-activations", self.offload_activations)
        one_of(COMPUTES, "--compute", self.compute)
        one_of(STEP_SCHEDULES, "--schedule", self.schedule)
        for tier in Tier:
            self.given_bytes(tier)
        if self.gradients in ("transient", "retain") and self.accumulate > 1:
            raise JobError(
                f"--gradients {self.gradients} has one backward per update, and --accumulate {self.accumulate} has "
                "several: leave --gradients out."
            )
        if self.states == "compact" and self.precision not in (None, "bf16"):
            raise JobError(f"--states compact keeps bf16 weights, which does not go with --precision {self.precision}.")
        if self.states == "compact":
            self.rule_in("bf16")
        if self.gradients == "transient" and self.precision == "fp16":
            raise JobError("--gradients transient updates inside backward, which does not go with --precision fp16.")

    @property
    def is_over_mesh(self) -> bool:
        """Whether ranks share more than params."""
        return self.parallel is not None or any(getattr(self, dim) > 1 for dim in _DIMS)

    def _check_mesh(self) -> None:
        asked = "--parallel auto" if self.parallel else f"--{next(dim for dim in _DIMS if getattr(self, dim) > 1)}"
        if self.parallel and any(getattr(self, dim) > 1 for dim in _DIMS):
            raise JobError("--parallel auto chooses the mesh: leave --tp, --pp and --cp out, or leave it out.")
        if self.trace is not None:
            raise JobError(
                f"{asked} needs a step of one rank of a mesh, and --trace {self.trace} brings one of a whole model: "
                "give the config in its place."
            )
        for name in ("micro_batch", "tile_tokens", "lora"):
            if getattr(self, name) is not None:
                raise JobError(f"{asked} with {option(name)}: leave one of the two out.")
        if self.gradients == "transient" and (self.parallel or self.tp > 1 or self.pp > 1):
            raise JobError(f"{asked} with --gradients transient: slices and stages keep gradients until the update.")
        if self.precision == "fp16" and (self.parallel or self.pp > 1):
            raise JobError(f"{asked} with --precision fp16: stages have no common loss scale. Use bf16.")

    def rule_in(self, precision: str, states: str | None = None) -> RuleSpec:
        """The planes of the update rule, with its states kept as was asked or as said.

        Raises:
            JobError: if it has no compact form.
        """
        try:
            return spec_for(rule_named(self.optimizer).spec, states or self.states, precision)
        except ValueError as e:
            raise JobError(f"--optimizer {self.optimizer}: {e}.") from None

    @property
    def has_compact_form(self) -> bool:
        """Whether the update rule can have compact states."""
        try:
            self.rule_in("bf16", "compact")
        except JobError:
            return False
        return True

    @property
    def kept_gradients(self) -> str:
        """What is kept until the update: several micro-batches need sums, for which the runtime takes fp32."""
        return self.gradients or ("accumulate" if self.accumulate > 1 else "retain")

    def given_bytes(self, tier: Tier) -> int | None:
        """The budget of a tier as given; None where it was left out.

        Raises:
            JobError: for what cannot be read as a size.
        """
        size = getattr(self, tier.value)
        if size is None:
            return None
        check_size(f"--{tier.value}", size)
        return parse_bytes(size)

    def traced(self, *, batch_size: int | None = None, target: str = "cuda") -> TraceSettings:
        """The step to trace, perhaps with another number of windows in it."""
        return TraceSettings(
            config=self.config,
            layers=self.layers,
            batch_size=batch_size or (1 if self.batch_size is None else self.batch_size),
            seq_len=self.seq_len,
            precision=self.precision or "bf16",
            gradient_checkpointing=self.gradient_checkpointing,
            tile_tokens=self.tile_tokens,
            lora=self.lora,
            attn_implementation=self.attn_implementation,
            target=target,
        )


_DIMS = ("tp", "pp", "cp")

_OF_THE_TRACE = (
    "batch_size", "seq_len", "precision", "gradient_checkpointing", "tile_tokens", "lora", "attn_implementation",
    "micro_batch",
)  # fmt: skip


def option(name: str) -> str:
    """The command line's spelling of a field."""
    assert name in {field.name for field in fields(PlanSettings)}
    return "--" + name.replace("_", "-")


def at_least(least: int, asked: str, value: int | None) -> None:
    if value is not None and value < least:
        raise JobError(f"{asked} must be at least {least}, got {value}.")


def as_tiles(given: str | None) -> int | str | None:
    """What ``--tile-tokens`` says: a number of tokens, "auto", or None.

    Raises:
        JobError: for anything else.
    """
    if given is None or given == "auto":
        return given
    if not given.isdecimal() or int(given) < 2:
        raise JobError(f"--tile-tokens must be auto or a number of tokens, 2 or more, got {given!r}.")
    return int(given)


def one_of(choices: tuple[str, ...], asked: str, value: str | None) -> None:
    if value is not None and value not in choices:
        raise JobError(f"{asked} must be one of {', '.join(choices)}, got {value!r}.")
