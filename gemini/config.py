"""What a user says about how a model is to be managed: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from gemini.errors import parse_bytes
from gemini.planning.hardware import Hardware
from gemini.planning.layout import DEFAULT_MAX_CHUNK
from gemini.planning.placement import Placement, StaticPlacement
from gemini.planning.plan import Plan
from gemini.planning.planes import GRADIENTS, PRECISIONS, RuleSpec, check_gradients, spec_of
from gemini.planning.policy import EvictionPolicy
from gemini.planning.rules import spec_for
from gemini.planning.trace import MemoryTrace, as_tiles, check_kept, tile_sizes
from gemini.tiers import FILED, OFFLOAD_TO, MemoryBudget


@dataclass(frozen=True)
class GeminiConfig:
    """How ``GeminiDDP`` manages a model.

    Args:
        precision: the dtype of forward and backward: "bf16", "fp16" (with `gemini.GradScaler`) or "fp32". The optimizer
            always updates an exact fp32 master. By default bf16. In Trainer, Accelerate and Lightning the default is
            what their own flags say, which is fp32 without any flag.
        memory: how many bytes each tier may hold; a :class:`gemini.SharedBudget` for several models together. Tiers
            that are left out are measured.
        placement: where everything is stored. "auto": what :func:`gemini.plan` chooses for ``trace`` and ``hardware``.
            A :class:`StaticPlacement`: fractions. A :class:`~gemini.planning.plan.Plan`: exactly its homes and moves.
            Or a whole :class:`~gemini.planning.placement.Placement`.
        fp16_accumulation: sum matrix products in fp16 as well, with ``precision="fp16"``: twice as quick on GeForce
            cards, no quicker on others. Results have other bits. torch's switch for it is one for the whole process: it
            is on as long as the model is managed, and fp16 models that are managed beside it must say the same.
        float8: let the linear layers of the repeated blocks multiply in float8, with ``precision="bf16"`` and torchao
            (the extra "float8"); weights stay as they are to chunks, updates and checkpoints. Results have other bits.
        keep_fp32: which params stay in fp32 where ``precision`` is "bf16" or "fp16". "auto": those that are already so
            in a model of bf16 or fp16, those that the class of the model declares (``_keep_in_fp32_modules`` of
            transformers, with the meaning it has there), and those that torch computes with fp32 buffers (norms with
            running statistics, spectral norms). A list of names of modules or params ("head", "layers.*.gate") and of
            classes of modules (``nn.LayerNorm``): these too. What is named computes in fp32 whatever it is given;
            norms and embeddings give the compute dtype, everything else fp32. None: every param is cast.
        gradients: what is kept between backward and update.

            - "retain": the gradients of one backward per step, in 2 bytes per param in half precision, 4 in fp32. If
              memory allows, a second backward before the step switches to "accumulate".
            - "accumulate": fp32 sums of several backwards, 4 bytes per param.
            - "accumulate_bf16", only with compact states: bf16 sums (2 bytes per param) and their rounding errors (1
              byte), which the next addition corrects.
            - "transient": nothing; params are updated during backward. Needs ``HybridAdam(step_in_backward=True)``.
        device: "cuda", "cuda:1" or "cpu". By default "cuda" if there is one, else "cpu".
        activations: how many bytes of the ``gpu`` budget are reserved for activations and workspaces ("4GiB"). By
            default as many as ``trace`` needs, or none without a trace. No effect without a GPU.
        offload_activations: where the inputs of checkpointed blocks are kept until backward: None (where they are),
            "cpu" (only on a GPU), "nvme", or "auto" (on the CPU if that makes the plan faster; needs a ``trace``). Only
            for models that checkpoint: ``model.gradient_checkpointing_enable()``.
        reduce_dtype: the dtype in which ranks send gradients to each other: "fp32", "bf16", "fp16", or None for
            ``precision``. Gradients are divided by the number of ranks before they are sent, so that the mean does not
            overflow, and are added up in fp32.
        max_chunk: the largest number of elements in a chunk. Larger blocks of a model are divided into several chunks.
        trace: the step to plan for, from :func:`gemini.trace` or :class:`gemini.MemoryTracer`. Without a trace Gemini
            uses the order of the modules, and replaces it by what the first step does.
        hardware: the machine to plan for. :func:`gemini.planning.hardware.load_hardware` reads a file of
            ``gemini doctor --measure``, and knows some machines by name. By default typical speeds.
        overlap: whether updates, fetches and writes run at the same time as computing. Results have the same bits
            without.
        update_threads: the number of CPU threads for an update that runs during computing. By default those processors
            that computing does not use, and no more than make it faster by the figures of ``hardware``. If torch uses
            all of them, the default is to run updates that need no drive immediately, on all processors.
        optimizer: the update rule (a :class:`gemini.rules.UpdateRule`: one of ``gemini.optim``, or your own). It
            decides which states there are, and the optimizer must have the same rule. By default Adam's, which
            :class:`gemini.HybridAdam` uses.
        states: "exact": fp32 masters and states, 12 bytes per param with Adam. "compact": bf16 weights with 8 more bits
            of the master, and states in 8 bits, 5.03 bytes per param; small params stay exact. "compact" needs bf16,
            and Adam, Lion or SGD.
        tile_tokens: compute MLPs, and the output head with its loss, this many tokens at a time. Their inner
            activations and the logits of a whole sequence then never exist in memory; those of MLPs are computed again
            in backward. "head=1024": the head alone, "head=1024,mlp=4096": other sizes for each. Losses keep their
            bits; gradients are added up in another order; the output of a training step has no logits. ``trace`` must
            be of the tiled model too (``gemini.trace(..., tile_tokens=)``). "auto": the planner tiles, with the size
            that ``trace`` has, if activations do not fit otherwise: the head alone if that will do. None: never.
        kept_blocks: of a model that checkpoints, how many of its blocks keep their activations in place of computing
            them again: evenly spread, the last one among them. With ``offload_activations`` they wait there as the
            inputs of the other blocks do. Results have the same bits. By default as in the plan or ``trace``, else 0.
            "auto": as many as make the step quickest on ``hardware``; needs ``gemini.trace(..., kept_blocks="auto")``.
        step: "given": as all else says. "fastest": what may be chosen without other bits is, for ``hardware``: with
            ``kept_blocks`` and ``offload_activations`` left out these are "auto". The third step is recorded, figures
            of the machine are corrected by it, and the number of kept blocks is chosen again.
        eviction: who goes when memory for weights is short. "auto": what makes the moves of a step cost least.
            An :class:`~gemini.planning.policy.EvictionPolicy`: the moves of a step are those that it makes on demand.

    Raises:
        ValueError, TypeError: for an invalid value. The message says what is accepted.
    """

    # None is "not said", until resolved(): all that is handed down from the entrances has a precision.
    precision: str = None  # type: ignore[assignment]
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    placement: str | StaticPlacement | Placement | Plan = "auto"
    gradients: str = "retain"
    device: Any = None
    activations: str | int | None = None
    offload_activations: str | None = None
    reduce_dtype: str | None = None
    max_chunk: int = DEFAULT_MAX_CHUNK
    trace: MemoryTrace | None = None
    hardware: Hardware | None = None
    overlap: bool = True
    update_threads: int | None = None
    optimizer: Any = None
    states: str = "exact"
    tile_tokens: int | str | None = None
    kept_blocks: int | str | None = None
    step: str = "given"
    keep_fp32: Any = "auto"
    fp16_accumulation: bool = False
    float8: bool = False
    eviction: str | EvictionPolicy = "auto"

    def __post_init__(self) -> None:
        if self.step == "fastest":
            for name in ("kept_blocks", "offload_activations"):
                object.__setattr__(self, name, "auto" if getattr(self, name) is None else getattr(self, name))
        self._check_kinds()
        self._check_together()
        object.__setattr__(self, "keep_fp32", as_kept(self.keep_fp32))
        if self.tile_tokens != "auto":
            try:
                object.__setattr__(self, "tile_tokens", as_tiles(tile_sizes(self.tile_tokens)))
            except ValueError as e:
                raise ValueError(f"tile_tokens= is {e}") from None

    def _check_kinds(self) -> None:
        """Refuse what is no value for its field, whatever the others say."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                words = ", ".join(map(repr, filter(None, allowed)))
                raise ValueError(f"{name}={value!r} is not known; use one of {words}")
        for name, kind in (("memory", MemoryBudget), ("trace", MemoryTrace), ("hardware", Hardware)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "memory"):
                raise TypeError(f"{name}= is a gemini.{kind.__name__}, got {type(value).__name__}")
        if self.placement != "auto" and not isinstance(self.placement, (StaticPlacement, Placement, Plan)):
            raise TypeError(f'placement= is "auto", a gemini.StaticPlacement or a gemini.Plan, got {self.placement!r}')
        for name in ("overlap", "fp16_accumulation", "float8"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}= is True or False, got {getattr(self, name)!r}")
        if self.kept_blocks is not None:
            check_kept(self.kept_blocks)
        for name, count in (("max_chunk", self.max_chunk), ("update_threads", self.update_threads)):
            if (type(count) is not int or count < 1) and (count is not None or name == "max_chunk"):
                raise ValueError(f"{name}= is a positive number, got {count!r}")
        policy: Any = self.eviction
        if policy != "auto" and (isinstance(policy, type) or not hasattr(policy, "choose")):
            raise TypeError(f'eviction= is "auto" or an object with choose(candidates, missing), got {policy!r}')
        if spec_of(self.optimizer) is self.optimizer:
            raise TypeError(f"optimizer= takes an update rule, got only the spec of one: {self.optimizer!r}")
        if self.activations is not None:
            parse_bytes(self.activations, what="activations=")

    def _check_together(self) -> None:
        """Refuse values that do not go together."""
        for name, needed in (("fp16_accumulation", "fp16"), ("float8", "bf16")):
            if getattr(self, name) and self.precision not in (None, needed):
                raise ValueError(
                    f'{name}=True with precision="{self.precision}": use precision="{needed}", or leave it out'
                )
        if self.kept_blocks == "auto" and (self.placement != "auto" or self.hardware is None):
            what = 'step="fastest"' if self.step == "fastest" else 'kept_blocks="auto"'
            raise ValueError(
                f"{what} chooses kept blocks and homes by the speeds of the machine: leave placement= out, and pass "
                "hardware=gemini.Hardware.from_json(...) of a file of `gemini doctor --measure --json FILE`, or "
                'gemini.planning.hardware.load_hardware("rtx4090")'
            )
        if self.eviction != "auto" and isinstance(self.placement, Plan):
            raise ValueError(
                "eviction= has no effect with placement=plan, which says what is evicted when: leave it out"
            )
        for tier in FILED:
            if self.offload_activations == tier.value and not self.memory.paths_of(tier):
                raise ValueError(
                    f'offload_activations="{tier.value}" needs MemoryBudget({tier.value}_path=...), the directory of '
                    "the file"
                )
        if self.gradients == "transient" and self.precision == "fp16":
            raise ValueError(
                'gradients="transient" cannot be used with precision="fp16": whether a step is skipped is known only '
                'when every gradient is there. Use precision="bf16" or gradients="retain"'
            )
        check_gradients(self.gradients, self.rule_spec)

    @property
    def eviction_policy(self) -> EvictionPolicy | None:
        """The policy that decides what is evicted; None where the moves are to cost least."""
        return None if isinstance(self.eviction, str) else self.eviction

    @property
    def rule_spec(self) -> RuleSpec:
        """The update rule as its states are kept."""
        return spec_for(spec_of(self.optimizer), self.states, self.precision)

    def resolved(self, precision: str = "bf16") -> GeminiConfig:
        """This config, or if it does not say a precision, one that says ``precision``."""
        return self if self.precision is not None else replace(self, precision=precision)


def config_of(given: GeminiConfig | None) -> GeminiConfig:
    """The config that was given, or the one of all defaults. Raises TypeError for anything else."""
    if not isinstance(given, (GeminiConfig, type(None))):
        raise TypeError(f"the config of a managed model is a gemini.GeminiConfig, got {type(given).__name__}")
    return GeminiConfig() if given is None else given


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "precision": (None, *PRECISIONS),
    "gradients": GRADIENTS,
    "reduce_dtype": (None, *PRECISIONS),
    "offload_activations": (None, *OFFLOAD_TO, "auto"),
    "step": ("given", "fastest"),
}
"""What fields may say in words."""


def as_kept(wanted: Any) -> str | tuple[Any, ...] | None:
    """``keep_fp32=`` as a value that nobody changes. Raises TypeError for what it may not say."""
    if wanted is None or wanted == "auto":
        return wanted
    listed = None if isinstance(wanted, (str, bytes, type)) or not isinstance(wanted, Iterable) else tuple(wanted)
    if listed is None or not all(isinstance(one, (str, type)) and one != "" for one in listed):
        raise TypeError(
            'keep_fp32= is "auto", None, or a list of names and classes of modules (["lm_head", nn.LayerNorm]), got '
            f"{wanted!r}"
        )
    return listed
