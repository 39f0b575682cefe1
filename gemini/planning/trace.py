"""What one step of a model does, moment by moment: the trace, a value. It knows no torch and no chunks.

A *moment* is a stretch of a step between two boundaries of module calls in which at least one operation runs: it has
the params that must be readable all through it, the bytes beside the model that are live in it, and its work. A trace
is made ahead of time from a config alone, or recorded from a real step; both are this value. Chunks come in when a
layout is laid over it (:func:`accesses`).

:func:`with_4bit_base` is a step with adapters as it would be on a base of 4-bit weights: the same step, other bytes.
The form is that of bitsandbytes (QLoRA, https://arxiv.org/abs/2305.14314, section 3): two codes in a byte, one fp32
scale for each block of 64 weights, kept as a byte, with an fp32 one for each block of 256 of these (double
quantization). Per weight that is 0.5 bytes of codes, which live in chunks, and 0.0159 of scales, which stay where they
are read. A product makes the weight in the compute dtype first, in forward and again in backward.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gemini.errors import PlanMismatch, human_bytes
from gemini.planning.document import Document
from gemini.planning.layout import DEFAULT_MAX_CHUNK, Layout, ParamSpec, make_layout
from gemini.planning.planes import ADAM, RuleSpec, compute_itemsize


class Phase(Enum):
    """The model's work in a moment. Recomputation is forward work that gradient checkpointing repeats."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"


class Source(Enum):
    """The origin of a trace: fake tensors, a recorded step, or the order of the modules alone (no work in it)."""

    AHEAD = "ahead"
    RECORDED = "recorded"
    STRUCTURE = "structure"


@dataclass(frozen=True)
class TracedParam:
    """A param once: all its names (the first is its name), its shape, whether it is laid out as a trained one, whether
    its chunk holds nothing else, whether its elements are bytes of codes (two 4-bit weights in each), and whether it
    stays in fp32 in a model of another precision.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    trainable: bool = True
    apart: bool = False
    coded: bool = False
    fp32: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Product(NamedTuple):
    """``times`` products of ``m x k`` by ``k x n``, each of them ``batch`` at once. ``dtype``: "float8", or "" for the
    compute dtype of the step.
    """

    batch: int
    m: int
    n: int
    k: int
    times: int | float = 1  # a whole number stays one in a file that is read and written again
    dtype: str = ""

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.m * self.n * self.k * self.times

    def num_bytes(self, itemsize: int) -> float:
        """Bytes of both factors and the result, what is read and written at least, with ``itemsize`` of the step."""
        factors = (self.m * self.k + self.k * self.n) * (1 if self.dtype == "float8" else itemsize)
        return self.batch * (factors + self.m * self.n * itemsize) * self.times


class AttentionWork(NamedTuple):
    """FLOP of fused attention."""

    counted: int = 0  # in full, whatever the mask
    forward: int = 0  # of these, what kernels do: half under a causal mask, above whose diagonal they skip tiles
    backward: int = 0

    def __add__(self, other: tuple[int, ...]) -> AttentionWork:  # type: ignore[override]
        return AttentionWork(*(own + more for own, more in zip(self, other, strict=True)))

    def scaled(self, number: float) -> AttentionWork:
        return AttentionWork(*(round(each * number) for each in self))


@dataclass(frozen=True)
class Moment:
    """One moment of a step.

    Attributes:
        phase: forward, backward, or the repeated forward of checkpointing.
        module: the path of the innermost module that computes; "" is the model itself.
        params: indices into ``MemoryTrace.params`` of all params that must be readable in this moment, those that the
            calls around it keep included.
        live_bytes: bytes beside the model (activations, workspaces, gradients on their way) live at the end of it.
        peak_bytes: the most of them at once within it; never less than ``live_bytes``.
        saved_bytes: inputs of checkpointed blocks, and what kept ones save, kept for backward in this moment: what
            offloading would move away.
        restored_bytes: those that backward asks for in this moment: what offloading would bring back.
        flops: floating point operations of its matrix products, convolutions and attention.
        touched_bytes: bytes that its operations read and write, weights included: the work of memory-bound ones.
        num_ops: operations that run in it (each costs a launch).
        tp_bytes, cp_bytes: bytes that it sends to ranks with other slices of the layers, and other parts of the
            sequences (ahead of time; a recorded step does not say).
        gradients: indices of params whose gradient is complete at its end.
        seconds: measured computing time, without waiting for moves; None ahead of time.
        products: matrix products by shape, a part of ``flops``; none in a trace that was saved before they were kept.
        attention: fused attention, a part of ``flops`` too.
    """

    phase: Phase
    module: str
    params: tuple[int, ...] = ()
    live_bytes: int = 0
    peak_bytes: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    flops: int = 0
    touched_bytes: int = 0
    num_ops: int = 0
    gradients: tuple[int, ...] = ()
    seconds: float | None = None
    tp_bytes: int = 0
    cp_bytes: int = 0
    products: tuple[Product, ...] = ()
    attention: AttentionWork = AttentionWork()


_NESTED = ("tiled", "all_kept")
"""Fields of a trace that are other forms of its step."""


def times(moment: Moment, number: float, *names: str) -> Moment:
    """The moment with so many times its work and the inputs that it keeps, and of these fields."""
    counted = ("flops", "touched_bytes", "saved_bytes", "restored_bytes", *names)
    return replace(
        moment,
        products=tuple(product._replace(times=product.times * number) for product in moment.products),
        attention=moment.attention.scaled(number),
        seconds=None if moment.seconds is None else moment.seconds * number,
        **{name: round(getattr(moment, name) * number) for name in counted},
    )


@dataclass(frozen=True)
class MemoryTrace(Document, kind="trace"):
    """One forward and backward of a model on one micro-batch.

    Attributes:
        model: the name of the model's class.
        precision: the compute dtype, "bf16", "fp16" or "fp32".
        batch: the shapes of the inputs by name.
        tokens: positions (or, without a sequence, samples) of the micro-batch: what tokens/s counts.
        target: "cpu" or "cuda": whose workspaces the bytes include.
        source: how it was made.
        params: every param once, in declaration order.
        buffer_bytes: bytes of the model's buffers, live all the time and not in the moments.
        checkpointing: whether gradient checkpointing was on.
        tile_tokens: what ``GeminiConfig(tile_tokens=)`` was; None for a model as it is.
        kept_blocks: of the blocks that checkpoint, how many are not computed again (:func:`kept_among`).
        kernels: "liger": the fused kernels that the model computes with; None for its own.
        fp16_accumulation: whether products in fp16 are summed in fp16, as ``GeminiConfig(fp16_accumulation=)`` says.
        context_parallel: parts of a sequence, of which this is the last one; 1 for whole sequences.
        tensor_parallel: slices of layers, of which this has the first one; 1 for whole layers. ``params`` are slices.
        moments: in the order of the step.
        read_together: sets of params that some module may read at once whatever forward does; evaluation may, where the
            step did not.
        tiled: the same step in tiles of tokens, for the planner to take where this one's activations do not fit
            (``gemini.trace(..., tile_tokens="auto")``); None if there is no choice.
        all_kept: the same step with every block kept: of both the planner makes that of any number
            (``gemini.trace(..., kept_blocks="auto")``); None if there is no choice.
        micro_batches: how many pass through stages together, as one (:func:`gemini.planning.parallel.block_by_block`).
        stages: with several of them, the moments at which a stage begins: what it reads stays until the next.
    """

    model: str
    precision: str
    batch: Mapping[str, tuple[int, ...]]
    tokens: int
    target: str
    source: Source
    params: tuple[TracedParam, ...]
    moments: tuple[Moment, ...]
    buffer_bytes: int = 0
    checkpointing: bool = False
    read_together: tuple[tuple[int, ...], ...] = ()
    tile_tokens: int | str | None = None
    context_parallel: int = 1
    tensor_parallel: int = 1
    tiled: MemoryTrace | None = None
    all_kept: MemoryTrace | None = None
    kept_blocks: int = 0
    kernels: str | None = None
    fp16_accumulation: bool = False
    micro_batches: int = 1
    stages: tuple[int, ...] = ()

    @property
    def num_params(self) -> int:
        """Weights of the model; of those in 4 bits a byte has two."""
        return sum(param.numel * (2 if param.coded else 1) for param in self.params)

    @property
    def flops(self) -> int:
        return sum(moment.flops for moment in self.moments)

    @property
    def float8(self) -> bool:
        """Whether layers multiply in float8."""
        return any(product.dtype == "float8" for moment in self.moments for product in moment.products)

    @property
    def peak_bytes(self) -> int:
        """The most bytes beside params and buffers at any moment."""
        return max((moment.peak_bytes for moment in self.moments), default=0)

    @property
    def checkpoint_bytes(self) -> int:
        """The most bytes of inputs of checkpointed blocks that wait for backward at once."""
        return max(accumulate((m.saved_bytes - m.restored_bytes for m in self.moments), initial=0))

    @property
    def seconds(self) -> float | None:
        """Measured computing time of the step; None unless every moment has one."""
        measured = [moment.seconds for moment in self.moments]
        return None if None in measured or not measured else sum(filter(None, measured))

    @property
    def fingerprint(self) -> str:
        """Equal for two models exactly if their params have the same names, ties, shapes and are trained alike."""
        described = [
            [list(p.names), list(p.shape), p.trainable, *["coded"] * p.coded, *["fp32"] * p.fp32] for p in self.params
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    @property
    def forms(self) -> list[MemoryTrace]:
        """The step as it is, then in tiles, each without the others: first what less is computed in tiles of."""
        return [replace(self, tiled=None), *([] if self.tiled is None else self.tiled.forms)]

    def arithmetic(self, precision: str) -> str:
        """How the products of the step in this precision are computed: "fp16_accumulation", "float8" (those of linear
        layers), or as the precision is.
        """
        if self.fp16_accumulation and precision == "fp16":
            return "fp16_accumulation"
        return "float8" if self.float8 else precision

    def with_fp32(self, names: Collection[str]) -> MemoryTrace:
        """The same step of a model in which the params of these (first) names stay in fp32, and no others."""
        params = tuple(replace(param, fp32=param.name in names) for param in self.params)
        others = self._nested(lambda own: own.with_fp32(names))
        same = params == self.params and all(getattr(self, name) == own for name, own in others.items())
        return self if same else replace(self, params=params, **others)

    def _nested(self, change: Callable[[MemoryTrace], MemoryTrace]) -> dict[str, Any]:
        """The other forms of the step that it has, changed as it is changed itself."""
        return {name: own and change(own) for name in _NESTED for own in [getattr(self, name)]}

    def layout(self, *, ranks: int = 1, max_chunk: int = DEFAULT_MAX_CHUNK, rule: RuleSpec = ADAM) -> Layout:
        """The chunks that ``GeminiDDP`` cuts this model into."""
        specs = []
        for p in self.params:
            exact = rule.keeps_exact(p.shape, trainable=p.trainable, fp32=p.fp32)
            specs.append(ParamSpec(p.name, p.numel, p.trainable, exact, p.apart, p.coded, p.fp32))
        return make_layout(specs, ranks=ranks, max_chunk=max_chunk, align=rule.align)

    def check_same_model(self, other: MemoryTrace, *, what: str) -> None:
        """Refuse to go on with a trace of another model. Raises PlanMismatch naming the first difference."""
        if self.fingerprint == other.fingerprint:
            return
        ours = {p.name: p for p in self.params}
        theirs = {p.name: p for p in other.params}
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise PlanMismatch(
                    f"{what} is of another model ({other.model}, {other.num_params:,} params) than the one at hand "
                    f"({self.model}, {self.num_params:,} params): param {name!r} is {_said(theirs.get(name))} there "
                    f"and {_said(ours.get(name))} here. Trace this model anew"
                )
        raise PlanMismatch(f"{what} has its params in another order than the model at hand: trace this model anew")

    def _to_body(self) -> dict[str, Any]:
        """Params and moments as lists of values, which take a third of the room."""
        body = super()._to_body()
        together = body.pop("read_together")
        return {
            **body,
            **{name: own and own.to_json() for name in _NESTED for own in [getattr(self, name)]},
            "together": together,
            "params": [list(param.values()) for param in body["params"]],
            "moment_fields": list(Moment.__dataclass_fields__),
            "moments": [list(moment.values()) for moment in body["moments"]],
        }

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> MemoryTrace:
        names = body["moment_fields"]  # an older trace has fewer
        trace = super()._from_body(
            {
                **body,
                **{name: cls.from_json(body[name]) if body.get(name) else None for name in _NESTED},
                "read_together": body["together"],
                "params": [dict(zip(TracedParam.__dataclass_fields__, v, strict=False)) for v in body["params"]],
                "moments": [dict(zip(names, values, strict=True)) for values in body["moments"]],
            }
        )
        for indices in (*trace.read_together, *((*moment.params, *moment.gradients) for moment in trace.moments)):
            for index in indices:
                trace.params[index if index >= 0 else len(trace.params)]  # an index out of range is damage too
        return trace

    def __str__(self) -> str:
        """Its model, its size, and its most expensive modules."""
        how = {Source.AHEAD: "traced ahead of time", Source.RECORDED: "recorded", Source.STRUCTURE: "from structure"}
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.batch.items())
        settings = {
            ", gradient checkpointing": self.checkpointing,
            f" but for {self.kept_blocks} blocks": self.kept_blocks,
            f", {self.kernels}'s kernels": self.kernels,
            f", tiles of {self.tile_tokens and tile_words(self.tile_tokens)}": self.tile_tokens,
            f", one of {self.context_parallel} parts of each sequence": self.context_parallel > 1,
            f", one of {self.tensor_parallel} slices of its layers": self.tensor_parallel > 1,
        }
        precision = self.arithmetic(self.precision)
        said = "".join(words for words, is_so in settings.items() if is_so)
        lines = [
            f"{self.model}, {self.num_params:,} params, {precision}{said}; {shapes or 'no inputs known'}",
            f"{how[self.source]} for {self.target}: {len(self.moments):,} moments, {self.flops / 1e12:,.4g} TFLOP, "
            f"{self.tokens:,} tokens",
            f"beside params: {human_bytes(self.peak_bytes)} at the peak, buffers {human_bytes(self.buffer_bytes)}",
        ]
        if self.moments:
            top = max(self.moments, key=lambda moment: moment.peak_bytes)
            lines.append(f"the peak is in {top.phase.value} of {top.module or 'the model itself'}")
        if self.checkpoint_bytes:
            lines.append(f"inputs of checkpointed blocks: {human_bytes(self.checkpoint_bytes)}")
        lines += [
            f"in tiles of {tile_words(form.tile_tokens)}: {human_bytes(form.peak_bytes)} at the peak, "
            f"{abs(form.flops / max(1, self.flops) - 1):.0%} more work"
            for form in self.forms[1:]
        ]
        if self.seconds is not None:
            lines.append(f"computing took {self.seconds:.3g} s")
        return "\n".join(lines)


def _said(param: TracedParam | None) -> str:
    if param is None:
        return "absent"
    how = {"frozen": not param.trainable, "apart": param.apart, "coded": param.coded, "kept in fp32": param.fp32}
    return " ".join([str(list(param.shape)), *(word for word, is_so in how.items() if is_so)])


@dataclass(frozen=True)
class Access:
    """The chunks that a moment needs: all that must be gathered in it."""

    moment: int
    chunks: tuple[int, ...]


def chunks_of_params(trace: MemoryTrace, layout: Layout) -> list[int]:
    """The index of the chunk of every param of the trace."""
    chunk_of = {slot.name: chunk.index for chunk in layout.chunks for slot in chunk.slots}
    return [chunk_of[param.name] for param in trace.params]


def accesses(trace: MemoryTrace, layout: Layout) -> tuple[Access, ...]:
    """The trace in chunks: one :class:`Access` per moment, in order."""
    by_param = chunks_of_params(trace, layout)
    read = [moment.params for moment in trace.moments]
    for start, stop in pairwise((*trace.stages, len(read)) if trace.stages else ()):
        read[start:stop] = [tuple(sorted({p for params in read[start:stop] for p in params}))] * (stop - start)
    known = {params: tuple(sorted({by_param[p] for p in params})) for params in {*read}}
    return tuple(Access(index, known[params]) for index, params in enumerate(read))


ALL = 2**20
"""Kept blocks of a model, or more."""


def check_kept(number: object) -> None:
    """Refuse what is no number of kept blocks, nor "auto", with a ValueError."""
    if number != "auto" and (type(number) is not int or number < 0):
        raise ValueError(f'kept_blocks= is a number of blocks or "auto", got {number!r}')


def kept_among(blocks: int, number: int) -> list[int]:
    """Which of the blocks that checkpoint are kept where ``number`` are, or all: spread evenly, so that what one saves
    can leave while those behind it compute, and the last one, which is asked for first.
    """
    return [at for at in range(blocks) if (at + 1) * min(number, blocks) // blocks > at * min(number, blocks) // blocks]


def with_seconds(trace: MemoryTrace, seconds: list[float]) -> MemoryTrace:
    """The same trace with other computing times, one per moment."""
    return replace(trace, moments=tuple(replace(m, seconds=s) for m, s in zip(trace.moments, seconds, strict=True)))


_CODES_PER_SCALE, _SCALES_PER_BLOCK = 64, 256
"""Weights with one scale, and scales with one of their own."""

_TABLE, _TABLE_OF_SCALES = 16, 256
"""What the codes stand for, in fp32: beside each weight."""

_IN_ADAPTER = ".base_layer.weight"
"""What PEFT calls the weight that an adapter is put on."""


def scale_bytes(numel: int) -> int:
    """Bytes beside the codes of a weight of ``numel`` elements."""
    blocks = -(-numel // _CODES_PER_SCALE)
    return blocks + 4 * (_TABLE + _TABLE_OF_SCALES + -(-blocks // _SCALES_PER_BLOCK) + 1)


def with_4bit_base(trace: MemoryTrace) -> MemoryTrace:
    """The step with the weights of all layers that have adapters in 4 bits. Raises ValueError if none has."""
    sizes = {
        i: param.numel
        for i, param in enumerate(trace.params)
        if param.name.endswith(_IN_ADAPTER) and len(param.shape) == 2 and not param.trainable
    }
    if not sizes:
        raise ValueError("4-bit weights are frozen, and no layer of this step has an adapter to train in their place")
    params = tuple(
        replace(param, shape=((sizes[i] + 1) // 2, 1), coded=True) if i in sizes else param
        for i, param in enumerate(trace.params)
    )
    read_by = {trace.params[i].name.removesuffix(".weight"): numel for i, numel in sizes.items()}

    def with_weight(moment: Moment) -> Moment:
        numel = read_by.get(moment.module)
        if numel is None:
            return moment
        made = numel * compute_itemsize(trace.precision) + 4 * -(-numel // _CODES_PER_SCALE)
        return replace(
            moment,
            peak_bytes=moment.peak_bytes + made,
            num_ops=moment.num_ops + 1,
            touched_bytes=moment.touched_bytes + made + numel // 2,
        )

    return replace(
        trace,
        params=params,
        moments=tuple(map(with_weight, trace.moments)),
        buffer_bytes=trace.buffer_bytes + sum(scale_bytes(numel) for numel in sizes.values()),
        **trace._nested(with_4bit_base),
    )


LEAST_TILE = 256
"""Tokens that ``tile_tokens="auto"`` takes at least: products of fewer rows read weights more than they compute."""

TILES = (16, 128)
"""Tiles of a batch that it takes at least and at most."""

PARTS = {"head": "the head", "mlp": "MLPs"}
"""What is computed in tiles: the output head with its loss; MLPs, experts and norms."""


def tile_sizes(tile_tokens: int | str | None) -> dict[str, int]:
    """Tokens of a tile by part (:data:`PARTS`), as ``tile_tokens=`` says them: 1024 for all, "head=1024" for the head
    alone, "head=1024,mlp=4096" for both apart. A part that is not there is not tiled. ValueError for anything else.
    """
    if tile_tokens is None:
        return {}
    if isinstance(tile_tokens, str):
        said = [each.partition("=")[::2] for each in tile_tokens.replace(" ", "").split(",")]
        sizes = {part: int(size) if size.isdecimal() else 0 for part, size in said}
        is_right = len(sizes) == len(said) and sizes.keys() <= PARTS.keys()
    else:
        is_right, sizes = type(tile_tokens) is int, dict.fromkeys(PARTS, tile_tokens)
    if not is_right or min(sizes.values()) < 2:
        raise ValueError(
            f'"auto" or a number of tokens, 2 or more, or one by part ("head=1024,mlp=4096"), got {tile_tokens!r}'
        )
    return sizes


def as_tiles(sizes: Mapping[str, int]) -> int | str | None:
    """The words that :func:`tile_sizes` reads, the same for the same sizes."""
    if len(sizes) == len(PARTS) and len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    return ",".join(f"{part}={sizes[part]}" for part in PARTS if part in sizes) or None


def tile_words(tile_tokens: int | str | None) -> str:
    """The same for people."""
    if isinstance(tile_tokens, int):
        return f"{tile_tokens:,} tokens"
    return " and ".join(f"{size:,} tokens of {PARTS[part]}" for part, size in tile_sizes(tile_tokens).items())


def tile_tokens_for(tokens: int, vocabulary: int, hidden: int) -> int:
    """Tokens of a tile for a batch of ``tokens``: so that the logits of one tile with what their loss makes of them
    (12 bytes each) take less than half of what a block keeps of the whole batch (some 32 bytes per token and hidden
    unit). Their number does not depend on the batch, so what is left beside tiles grows with it alone.
    """
    least, most = TILES
    wanted = min(max(least, -(-12 * vocabulary // (16 * hidden))), most)
    return max(LEAST_TILE, -(-tokens // (1 << (wanted - 1).bit_length())))
