"""What a user says about how a model is to be managed: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gemini.errors import parse_bytes
from gemini.planning.compact import spec_for
from gemini.planning.hardware import Hardware
from gemini.planning.layout import DEFAULT_MAX_CHUNK
from gemini.planning.placement import Placement, StaticPlacement
from gemini.planning.plan import Plan
from gemini.planning.planes import GRADIENTS, PRECISIONS, RuleSpec, check_gradients, spec_of
from gemini.planning.trace import MemoryTrace
from gemini.tiers import MemoryBudget


@dataclass(frozen=True)
class GeminiConfig:
    """How ``GeminiDDP`` manages a model.

    Args:
        precision: dtype of forward and backward. "bf16" (split fp32 master), "fp16" (fp32 master, `gemini.GradScaler`)
            or "fp32". The optimizer always updates an exact fp32 master. None says nothing: bf16, and in a framework
            (Trainer, Accelerate, Lightning) what its own flags say, which is fp32 without any.
        memory: budgets per tier; what is left out is measured.
        placement: "auto" (what :func:`gemini.plan` chooses for ``trace`` and ``hardware``), a :class:`StaticPlacement`,
            a :class:`~gemini.planning.plan.Plan` (its homes and moves exactly), or a whole
            :class:`~gemini.planning.placement.Placement`.
        gradients: what is kept between backward and update. "retain": one backward per step, +2 bytes per param in half
            precision (+4 in fp32); a second backward before the step promotes it to "accumulate" if there is room.
            Replicas (``dp_replicate``) add up in every backward then, and once per step otherwise.
            "accumulate": fp32 sums, +4 bytes. "accumulate_bf16", with compact states: bf16 sums, +2 bytes, and +1 for
            what rounding them has lost, which the next addition gets. "transient": nothing; needs
            ``HybridAdam(step_in_backward=True)``.
        device: "cuda", "cuda:1", "cpu", or None for "cuda" if there is one, else "cpu".
        activations: bytes of the ``gpu`` budget to leave to activations and workspaces ("4GiB"). None for what
            ``trace`` has of them, and for nothing without a trace; no effect without a GPU.
        offload_activations: where the inputs of checkpointed blocks wait for backward: None (where they are), "cpu"
            (on a GPU), "nvme", or "auto" (on the CPU if the plan gains by it, which takes a ``trace``). Takes effect
            where the model checkpoints: ``model.gradient_checkpointing_enable()``.
        reduce_dtype: what gradients are sent in between ranks: "fp32", "bf16", "fp16", or None for ``precision``. They
            are divided by the number of ranks before and summed up in fp32, so that the mean does not overflow.
        max_chunk: elements above which a block of the model is cut into several chunks.
        trace: the step to plan for, from :func:`gemini.trace` or :class:`gemini.MemoryTracer`. Without one the order of
            the modules is taken, and the first step that runs says what is needed when.
        hardware: the machine to plan for, from ``gemini doctor --measure`` or a named one. Without one typical speeds.
        overlap: let updates, fetches and writes run beside computing. The bits are the same without.
        update_threads: threads that share an update on the CPU that runs beside computing; None for the processors that
            computing leaves. Where torch takes them all, None makes updates that need no drive at once, with all.
        optimizer: the update rule (a :class:`gemini.rules.UpdateRule`: one of ``gemini.optim``, or your own) whose
            planes the chunks get; the optimizer of the params must have the same one. None for Adam's, which
            :class:`gemini.HybridAdam` has.
        states: "exact" (fp32 masters and states: 12 bytes per param with Adam) or "compact" (bf16 weights and 8 more
            bits of the master, states in 8 bits: 5.03 bytes per param; small params stay exact). In bf16 only, for
            Adam, Lion and SGD.
        tile_tokens: let the MLPs of the model, and its output head with its loss, be computed so many tokens at a
            time, so that neither their inner activations nor logits of a whole sequence ever exist; the rest is
            computed again in backward. Losses keep their bits, gradients are the same sums in another order, and an
            output of a training step has no logits. ``trace`` is then to be of the tiled model as well
            (``gemini.trace(..., tile_tokens=)``). "auto" leaves it to the planner: on, with the size that ``trace``
            has, where activations do not fit the budget without. None for a model as it is: whether gradients are
            added up in another order is not for a budget to decide, unless it is asked to.
        context_attention: how attention is divided over the dimension ``cp`` of a mesh: "ulysses" (each rank computes a
            part of the heads), "gathered" (each rank gathers all keys and values), or "auto": Ulysses where ``cp``
            divides the heads.

    Raises:
        ValueError, TypeError: for values that make no sense, naming what is accepted.
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
    context_attention: str = "auto"

    def __post_init__(self) -> None:
        if self.precision is not None:
            _one_of("precision", self.precision, PRECISIONS)
        _one_of("gradients", self.gradients, GRADIENTS)
        if self.reduce_dtype is not None:
            _one_of("reduce_dtype", self.reduce_dtype, PRECISIONS)
        _one_of("context_attention", self.context_attention, ("auto", "ulysses", "gathered"))
        if self.offload_activations is not None:
            _one_of("offload_activations", self.offload_activations, ("cpu", "nvme", "auto"))
        if not isinstance(self.memory, MemoryBudget):
            raise TypeError(f"memory= is a gemini.MemoryBudget, got {type(self.memory).__name__}")
        if isinstance(self.placement, str):
            _one_of("placement", self.placement, ("auto",))
        elif not isinstance(self.placement, (StaticPlacement, Placement, Plan)):
            raise TypeError(
                f'placement= is "auto", a gemini.StaticPlacement or a gemini.Plan, got {type(self.placement).__name__}'
            )
        for name, kind in (("trace", MemoryTrace), ("hardware", Hardware)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}= is a gemini.{kind.__name__}, got {type(value).__name__}")
        if not isinstance(self.max_chunk, int) or isinstance(self.max_chunk, bool) or self.max_chunk < 1:
            raise ValueError(f"max_chunk= is a positive number of elements, got {self.max_chunk!r}")
        if self.gradients == "transient" and self.precision == "fp16":
            raise ValueError(
                'gradients="transient" cannot be used with precision="fp16": whether a step is skipped is known only '
                'when every gradient is there. Use precision="bf16" or gradients="retain"'
            )
        if self.offload_activations == "nvme" and self.memory.nvme_path is None:
            raise ValueError('offload_activations="nvme" needs MemoryBudget(nvme_path=...), the directory of the file')
        if self.update_threads is not None and (not isinstance(self.update_threads, int) or self.update_threads < 1):
            raise ValueError(f"update_threads= is a positive number of threads, got {self.update_threads!r}")
        if spec_of(self.optimizer) is self.optimizer:
            raise TypeError(f"optimizer= takes an update rule, got only the spec of one: {self.optimizer!r}")
        check_gradients(self.gradients, self.rule_spec)
        tiles = self.tile_tokens
        if tiles not in (None, "auto") and (type(tiles) is not int or tiles < 2):
            raise ValueError(f'tile_tokens= is "auto" or a number of tokens, 2 or more, got {tiles!r}')
        if self.activations is not None:
            parse_bytes(self.activations, what="activations=")

    @property
    def rule_spec(self) -> RuleSpec:
        """The update rule as its states are kept."""
        return spec_for(spec_of(self.optimizer), self.states, self.precision)

    def resolved(self, precision: str = "bf16") -> GeminiConfig:
        """This config, or if it does not say a precision, one that says ``precision``.

        Raises:
            ValueError: if the rest of it cannot be had in that precision.
        """
        return self if self.precision is not None else replace(self, precision=precision)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")
