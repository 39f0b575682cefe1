"""The planes of a chunk: which kinds of content it has, in which form, and what an update rule adds to them.

bf16:  weights 2 (the bf16 half of the fp32 master) + residual 2 (the other half)
fp16:  weights 4 (the fp32 master; cast when it is gathered)
fp32:  weights 4 (the master itself), which is also how a param is kept that stays in fp32 beside the others

that is 4 bytes per param, and the planes of the update rule beside them: Adam's two states make it 12. Gradients
between backward and update take 2 bytes (4 in fp32, or where accumulated), none where updates run in backward. With
compact states (:mod:`gemini.planning.rules`) the residual is 1 byte and each state 1 and a 64th: 5.03 for Adam. Their
gradients may be accumulated in bf16: 2 bytes, and 1 for what rounding the sum has lost.

What a rule computes is not in here (:mod:`gemini.rules`): layout, budgets, plans and costs need its planes alone.

Factors are states of a param that are a few vectors in the place of a matrix (a value for each row, and one for each
column), as Adafactor keeps its second moment. They are fp32, stand in host memory beside the planes, and pass through
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

FORMS = ("rows", "columns", "vector")


@dataclass(frozen=True)
class FactorSpec:
    """One of them: of params of two dimensions or more a value for each of the "rows" (the last dimension is 1) or of
    the "columns" (the last but one is); of the others, which have neither, one for each element ("vector").

    Raises:
        ValueError: for a form that is not known.
    """

    name: str
    form: str

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"factor {self.name!r} is {self.form!r}; use one of {', '.join(map(repr, FORMS))}")

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The factor's shape of a param of ``shape``; None if it has no such factor."""
        if (len(shape) < 2) != (self.form == "vector"):
            return None
        if self.form == "vector":
            return tuple(shape)
        return (*shape[:-1], 1) if self.form == "rows" else (*shape[:-2], 1, shape[-1])


def shapes_of(factors: Iterable[FactorSpec], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The factors of a param, and their shapes."""
    return {factor.name: found for factor in factors if (found := factor.shape_of(shape)) is not None}


def factor_bytes(factors: Iterable[FactorSpec], shape: tuple[int, ...]) -> int:
    """Bytes of the factors of a param."""
    return sum(4 * math.prod(found) for found in shapes_of(factors, shape).values())


PAGE = 4096
"""Bytes of a page: what direct I/O reads and writes whole."""

ALIGN = 2048
"""Elements between possible starts of params, at least: one page of a 2-byte plane."""

ITEMSIZES = {"uint8": 1, "int8": 1, "int16": 2, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4}

COMPACT_WORK = 3.4
"""Decoding and encoding compact states is arithmetic, not memory; measured by ``benchmarks/cpu_adam.py``."""


PlaneKind: TypeAlias = str
"""The name of one kind of content of a chunk. Four the engine knows; a rule brings the names of its own."""

WEIGHTS, RESIDUAL, GRAD, GRAD_ERROR = "weights", "residual", "grad", "grad_error"
EMA: PlaneKind = "ema"  # of the rules that average masters
GRADS = (GRAD, GRAD_ERROR)
"""What is there between backward and update alone; updates read the first, sums of gradients both."""

PRECISIONS = ("bf16", "fp16", "fp32")
GRADIENTS = ("transient", "retain", "accumulate", "accumulate_bf16")
NEEDS = ("elements", "place", "param")
WHOLE_TEMPORARIES = 4
"""fp32 values for each element of a param that an update of whole params may take beside planes: its master joined, its
gradient in fp32, and what is computed of them. Only one such update is computed at a time.
"""
_TAKEN = {WEIGHTS, RESIDUAL, *GRADS, "step", "master", "windows", "pool", "staging", "exchange"}
_TAKEN |= {"activations", "factors", "temporaries"}
"""What is called so is something else, in states or among the holders of a budget."""


@dataclass(frozen=True)
class PlaneSpec:
    """The layout of a plane: one item of ``dtype`` for every ``block`` elements of the chunk (a scale is shared by
    many).

    Raises:
        ValueError: for an unknown dtype, or a block that does not divide ``ALIGN``.
    """

    kind: PlaneKind
    dtype: str
    block: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"plane {self.kind!r} is of {self.dtype!r}; planes are of {', '.join(ITEMSIZES)}")
        if self.block < 1 or ALIGN % self.block:
            raise ValueError(f"plane {self.kind!r} has blocks of {self.block} elements: they must divide {ALIGN}")

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return ITEMSIZES[self.dtype]

    def num_items(self, numel: int) -> int:
        """Items for ``numel`` elements."""
        return -(-numel // self.block)

    def num_bytes(self, numel: int) -> int:
        """Bytes for ``numel`` elements."""
        return self.num_items(numel) * self.block_bytes

    def page_bytes(self, numel: int) -> int:
        """The same in whole pages: what a plane of its own takes."""
        return -(-self.num_bytes(numel) // PAGE) * PAGE

    @property
    def stays_in_memory(self) -> bool:
        """Less than a byte per element: a page of it would hold many params, so it is never in the spill file."""
        return self.block_bytes < self.block


@dataclass(frozen=True)
class RuleSpec:
    """The facts that the planner needs of an update rule before any optimizer exists.

    Args:
        name: the name of the rule in reports and errors.
        planes: its states, which start at zero.
        needs: what one call of the rule must see: "elements" (any elements, of any params), "place" (elements of one
            param, and their position in it) or "param" (a whole param, and its shape).
        residual: the dtype of the rest of a bf16 master: "int16" for a full fp32 master, or "int8" for 24 bits of it.
        exact: only for compact states: the rule of the params that keep exact states, in chunks of their own.
        smallest: only for compact states: the smallest number of elements of a param with compact states, if it has two
            dimensions or more.
        factors: states that are a few vectors per param. Needs "param".
        codes: the version of the encoding of compact states; 0 for exact ones.

    Raises:
        ValueError: for names that are reserved or used twice, and for an unknown value of ``needs``.
    """

    name: str
    planes: tuple[PlaneSpec, ...] = ()
    needs: str = "elements"
    residual: str = "int16"
    exact: RuleSpec | None = None
    smallest: int = 0
    factors: tuple[FactorSpec, ...] = ()
    codes: int = 0

    def __post_init__(self) -> None:
        names = [*(spec.kind for spec in self.planes), *(factor.name for factor in self.factors)]
        wrong = [name for name in names if name in _TAKEN or not name.isidentifier() or names.count(name) > 1]
        if wrong:
            raise ValueError(f"rule {self.name!r} calls a plane {wrong[0]!r}: that is taken, given twice or no name")
        if self.needs not in NEEDS:
            raise ValueError(f"needs={self.needs!r} is not known; use one of {', '.join(map(repr, NEEDS))}")
        if self.residual not in ("int16", "int8"):
            raise ValueError(f"rule {self.name!r} has a residual of {self.residual!r}: it is int16 or int8")
        if self.factors and not self.whole:
            raise ValueError(f"rule {self.name!r} has factors, which are of whole params: it needs 'param'")

    def keeps_exact(self, shape: tuple[int, ...], *, trainable: bool, fp32: bool = False) -> bool:
        """Whether a param has a place among those with exact states: the small ones, those in fp32, and frozen ones, in
        case they are trained later. Of a rule without compact states no param has: all are alike.
        """
        small = len(shape) < 2 or math.prod(shape) < self.smallest
        return self.exact is not None and (small or fp32 or not trainable)

    def of(self, exact: bool) -> RuleSpec:
        """The rule of a chunk, which keeps its states exact or not."""
        return self.exact if exact and self.exact is not None else self

    @cached_property
    def whole(self) -> bool:
        """Whether a tile has to be a whole param."""
        return self.needs == "param"

    @cached_property
    def states(self) -> tuple[PlaneKind, ...]:
        """The kinds beside weights and gradients: the other half of the master, and the rule's own."""
        return (RESIDUAL, *(spec.kind for spec in self.planes))

    @cached_property
    def kinds(self) -> tuple[PlaneKind, ...]:
        """All kinds that a trained chunk may have."""
        return (WEIGHTS, *self.states, GRAD, *(spec.kind for spec in self._of_error))

    @property
    def _of_error(self) -> tuple[PlaneSpec, ...]:
        """Planes that the sums of gradients may have beside them: compact states alone."""
        return () if self.exact is None else (PlaneSpec(GRAD_ERROR, "int8"),)

    @cached_property
    def in_memory(self) -> frozenset[PlaneKind]:
        """Kinds that never go to the spill file."""
        return frozenset(spec.kind for spec in self.planes if spec.stays_in_memory)

    @cached_property
    def align(self) -> int:
        """Elements between possible starts of params: a whole page of every plane that may go to the spill file."""
        in_files = [spec.block_bytes for spec in self.planes if not spec.stays_in_memory]
        return max(ALIGN, *(PAGE // num_bytes for num_bytes in (*in_files, ITEMSIZES[self.residual])))

    @cached_property
    def staged(self) -> tuple[PlaneSpec, ...]:
        """The areas of a tile in staging: every plane at its widest, and three areas for fp32 at least."""
        widest = {spec.kind: spec for spec in (*self.planes, *(self.exact.planes if self.exact else ()))}
        own = (PlaneSpec(WEIGHTS, "float32"), PlaneSpec(RESIDUAL, "int16"), *widest.values())
        spare = () if any(is_wide(spec) for spec in widest.values()) else (PlaneSpec("spare", "float32"),)
        return (*own, PlaneSpec(GRAD, "float32"), *self._of_error, *spare)

    @cached_property
    def touched(self) -> int:
        """Bytes that an update in bf16 with a split master reads and writes, per param; blocks are counted whole."""
        specs = plane_specs("bf16", "retain", self, trainable=True).values()
        return self.touched_bytes({spec.kind: spec.num_bytes(ALIGN) for spec in specs}) // ALIGN

    def touched_bytes(self, planes: Mapping[PlaneKind, int]) -> int:
        """Bytes that an update of planes of so many reads and writes; an average goes over the masters once more."""
        passes = 1 + sum(spec.kind == EMA for spec in self.planes)
        times = {GRAD: 1, GRAD_ERROR: 0, WEIGHTS: 2 * passes, RESIDUAL: 2 * passes}
        return sum(num_bytes * times.get(kind, 2) for kind, num_bytes in planes.items())

    @cached_property
    def beyond_bytes(self) -> float:
        """How many times longer than its bytes say an update takes on the CPU, against Adam's exact one."""
        return COMPACT_WORK if self.exact is not None else 1.0

    def to_body(self) -> list[Any]:
        """The form that plans and checkpoints have; :meth:`from_body` reads it."""
        needs = [self.needs, [[factor.name, factor.form] for factor in self.factors]] if self.factors else self.needs
        body = [self.name, [[spec.kind, spec.dtype, spec.block] for spec in self.planes], needs]
        return body if self.exact is None else [*body, self.residual, self.exact.to_body(), self.smallest, self.codes]

    @classmethod
    def from_body(cls, body: Any) -> RuleSpec:
        """Raises: ValueError, TypeError, OverflowError: for what is no rule."""
        name, planes, needs, *compact = body
        needs, factors = needs if isinstance(needs, list) else (needs, [])
        specs = tuple(PlaneSpec(str(kind), dtype, int(block)) for kind, dtype, block in planes)
        vectors = tuple(FactorSpec(str(name), form) for name, form in factors)
        if not compact:
            return cls(str(name), specs, needs, factors=vectors)
        residual, exact, smallest, *codes = compact
        number = int(codes[0]) if codes else 1  # the first form did not say it
        return cls(str(name), specs, needs, residual, cls.from_body(exact), int(smallest), vectors, number)


def is_wide(spec: PlaneSpec) -> bool:
    """Whether an area for such a plane has room for fp32."""
    return spec.block == 1 and spec.block_bytes >= 4


ADAM = RuleSpec("Adam", (PlaneSpec("exp_avg", "float32"), PlaneSpec("exp_avg_sq", "float32")))
"""Adam and AdamW: the rule where nobody says another."""


def spec_of(optimizer: Any) -> RuleSpec:
    """The spec of an update rule, or of Adam for None. Raises TypeError for what is no rule."""
    spec = ADAM if optimizer is None else getattr(optimizer, "spec", optimizer)
    if not isinstance(spec, RuleSpec) or isinstance(optimizer, type):
        raise TypeError(f"optimizer= is an update rule (a gemini.rules.UpdateRule, made), got {optimizer!r}")
    return spec


def check_gradients(gradients: str, rule: RuleSpec) -> None:
    """Refuse sums of gradients in bf16 beside exact states, with a ValueError."""
    if gradients == "accumulate_bf16" and rule.exact is None:
        raise ValueError(
            'gradients="accumulate_bf16" goes with states="compact"; beside exact states gradients are summed up in '
            'fp32: gradients="accumulate"'
        )


def precision_of(spec: Any, precision: str) -> str:
    """The precision of a param or a chunk in a model of ``precision``; ``spec.fp32``: it stays in fp32 anyway."""
    return "fp32" if spec.fp32 else precision


def compute_itemsize(precision: str, *, coded: bool = False) -> int:
    """Bytes per element of the gathered weights, as forward and backward read them."""
    return 1 if coded else 4 if precision == "fp32" else 2


def compute_dtype(precision: str) -> str:
    """Their dtype."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]


def plane_specs(
    precision: str, gradients: str, rule: RuleSpec = ADAM, *, trainable: bool, coded: bool = False
) -> dict[PlaneKind, PlaneSpec]:
    """The form of every plane that a chunk has. Frozen chunks have weights alone, in the compute dtype or as bytes."""
    narrow = compute_dtype(precision)
    weights = "uint8" if coded else "float32" if precision == "fp16" and trainable else narrow
    specs = [PlaneSpec(WEIGHTS, weights)]
    if trainable:
        specs += [PlaneSpec(RESIDUAL, rule.residual)] if precision == "bf16" else []
        specs += rule.planes
        if gradients != "transient":
            specs.append(PlaneSpec(GRAD, "float32" if gradients == "accumulate" else narrow))
        if gradients == "accumulate_bf16" and precision == "bf16":
            specs.append(PlaneSpec(GRAD_ERROR, "int8"))
    return {spec.kind: spec for spec in specs}


def bytes_by_kind(specs: Iterable[PlaneSpec], numel: int) -> dict[PlaneKind, int]:
    """Bytes of planes for ``numel`` elements, in whole pages each."""
    return {spec.kind: spec.page_bytes(numel) for spec in specs}
