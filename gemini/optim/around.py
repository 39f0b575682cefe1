"""Rules around another rule: with its states in compact form, and with a moving average of the masters beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gemini import kernels, rules
from gemini.interrupts import without_grad
from gemini.kernels.reference import decode, dither_of, encode
from gemini.planning.planes import EMA, PlaneKind, PlaneSpec, RuleSpec
from gemini.planning.rules import compact, scale_of, spec_for
from gemini.rules import ADAM, Arrays, ElementwiseRule, Hyper, Segment, States, UpdateRule, Where, kernel_scalars

_DECAY = Hyper(0.999, within="in [0, 1]")


# ---- compact states --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompactRule(ElementwiseRule):
    """``exact`` with compact states, which ``GeminiConfig(states="compact")`` makes of a rule, for the engine alone:
    the optimizer keeps the rule itself. Between updates states are in 8 bits with scales, beside a master of 24 bits
    (:mod:`gemini.kernels.reference`); an update decodes, does what the rule does, and encodes. ValueError for a rule
    without such a form.
    """

    exact: UpdateRule

    defaults = property(lambda self: self.exact.defaults)  # type: ignore[assignment]
    has_kernel = property(lambda self: self.exact.has_kernel)  # type: ignore[assignment]
    face = property(lambda self: self.exact)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _ = self.spec

    @cached_property
    def spec(self) -> RuleSpec:  # type: ignore[override]
        return compact(self.exact.spec)

    def of(self, exact: bool) -> UpdateRule:
        return self.exact if exact else self

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Hashable:
        return self.exact.scalars(group, step, grad_scale)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        assert where is not None and where.offset % kernels.COMPACT_BLOCK == 0
        names = [spec.kind for spec in self.exact.spec.planes]
        values = {kind: decode(states[kind], states[scale_of(kind)]) for kind in names}
        self.exact.update(master, grad, values, scalars, None)
        dither = dither_of(where.name, where.offset, scalars.step)
        for kind in names:
            encode(values[kind], states[kind], states[scale_of(kind)], dither)

    # ---- states from outside, and for it -------------------------------------------------------------------------

    @without_grad
    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        """A state as the exact rule has it, in the shape of the codes."""
        return decode(codes.reshape(-1), scales).view(codes.shape)

    @without_grad
    def encoded(self, kind: PlaneKind, values: Tensor) -> dict[PlaneKind, Tensor]:
        """The planes of a state of the exact rule, to the nearest: its codes in its shape, and its scales."""
        spec = next(spec for spec in self.spec.planes if spec.kind == kind)
        flat = values.detach().to("cpu", torch.float32).reshape(-1)
        codes = torch.empty(len(flat), dtype=getattr(torch, spec.dtype), device="cpu")
        scales = torch.empty(-(-len(flat) // kernels.COMPACT_BLOCK), dtype=torch.uint8, device="cpu")
        encode(flat, codes, scales)
        return {kind: codes.view(values.shape), scale_of(kind): scales}


def upper_byte(residual: Tensor) -> Tensor:
    """The upper byte of int16 residuals, where the bf16 weights stay as they are: rounded to the nearest."""
    return ((residual.int() + 0x7F + (residual.int() >> 8 & 1)) >> 8).clamp_(max=127).to(torch.int8)


def rule_for(optimizer: UpdateRule | None, states: str, precision: str | None) -> UpdateRule:
    """The rule of ``GeminiConfig(optimizer=, states=, precision=)``; ValueError if it cannot have these states."""
    rule = rules.rule_of(optimizer)
    return rule if spec_for(rule.spec, states, precision) is rule.spec else CompactRule(rule)


# ---- moving averages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovingAverage(ElementwiseRule):
    """No step: the master stays as it is, and the gradient is not looked at.

    Of each param the average begins as the master that its first update finds. After every update, in fp32::

        average -= (average - master) * (1 - decay)

    in this order: ``EMAModel.step`` of diffusers over fp32 params, bit for bit. (``torch.lerp`` rounds once less where
    an element happens to be in a vector register, so what it gives depends on where a tensor begins and ends.)
    """

    spec = RuleSpec("moving average", (PlaneSpec(EMA, "float32"),))

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        """``group``: the decay, and whether the average begins here."""
        return kernel_scalars("average", weight=1.0 - group["decay"], fresh=group["fresh"], grad_scale=grad_scale)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        ema = states[EMA]
        if scalars.fresh:
            ema.copy_(master)
        else:
            ema.sub_((ema - master) * scalars.weight)


_AVERAGE = MovingAverage()
_BEGIN = _AVERAGE.scalars({"decay": 0.0, "fresh": 1.0}, 0, 1.0)


class AveragedScalars(NamedTuple):
    """Scalars of an update: of the rule inside, and of the average, None where it stays; ``is_first``: it begins."""

    own: Any
    average: Any
    is_first: bool


@dataclass(frozen=True)
class AveragedRule(UpdateRule):
    """Another rule, and a moving average of the masters: 4 more bytes per param, on whatever tier its states are.
    :class:`gemini.EMA` reads it.

    Args:
        rule: the rule that updates, by default Adam's. The optimizer of the model is that of this rule.
        decay: what is kept of the average in each update, from 0 (it is the master) to 1 (it stays); or that as a
            function of the number of the param's update, from 1 on: a warm-up, or averaging that begins late or only
            every few steps. It always returns the same for a number, on every rank.
        dtype: only fp32. In half precision it stands still when its steps are less than half of its last bit.

    Raises:
        ValueError, TypeError: for a decay outside of 0 and 1, another dtype, and a rule inside that is none, has an
            average itself or compact states.
    """

    rule: UpdateRule = ADAM
    decay: float | Callable[[int], float] = _DECAY.default
    dtype: torch.dtype = torch.float32

    defaults = property(lambda self: self.rule.defaults)  # type: ignore[assignment]
    has_kernel = property(lambda self: self.rule.has_kernel)  # type: ignore[assignment]
    uniform = property(lambda self: self.rule.uniform)  # type: ignore[assignment]
    face = property(lambda self: self.rule)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.rule, UpdateRule) or self.rule.face is not self.rule:
            raise TypeError(f"AveragedRule(rule=) is a rule without an average and compact states, got {self.rule!r}")
        if self.dtype is not torch.float32:
            raise ValueError(
                f"AveragedRule(dtype={self.dtype}): averages are kept in torch.float32, or they stand still"
            )
        if not callable(self.decay):
            _DECAY.check(self.decay, "AveragedRule(decay=)")

    def __repr__(self) -> str:
        # Ranks compare it, and the repr of a function has an address.
        name = getattr(self.decay, "__qualname__", type(self.decay).__qualname__)
        return f"AveragedRule(rule={self.rule!r}, decay={name if callable(self.decay) else self.decay!r})"

    @cached_property
    def spec(self) -> RuleSpec:  # type: ignore[override]
        own = self.rule.spec
        return replace(own, name=f"{own.name} with EMA", planes=(*own.planes, *_AVERAGE.spec.planes))

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        self.rule.check_group(group, what)

    def grouped(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.rule.grouped(model, groups)

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Hashable:
        decay = self.decay
        if callable(decay):
            decay = decay(step)
            _DECAY.check(decay, f"decay({step}) of {self!r}")
        average = None if decay == 1 else _AVERAGE.scalars({"decay": float(decay), "fresh": 0.0}, step, 1.0)
        return AveragedScalars(self.rule.scalars(group, step, grad_scale), average, step == 1)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        if scalars.is_first:
            _AVERAGE.update(master, grad, states, _BEGIN, where)
        self.rule.update(master, grad, states, scalars.own, where)
        if scalars.average is not None:
            _AVERAGE.update(master, grad, states, scalars.average, where)

    def run(
        self, arrays: Arrays, segments: Sequence[Segment], stop: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> None:
        if not self.has_kernel:
            super().run(arrays, segments, stop, grad_scale)
            return
        _AVERAGE.run(arrays, [one._replace(scalars=_BEGIN) for one in segments if one.scalars.is_first], stop)
        self.rule.run(arrays, [one._replace(scalars=one.scalars.own) for one in segments], stop, grad_scale)
        moved = [one._replace(scalars=one.scalars.average) for one in segments if one.scalars.average is not None]
        _AVERAGE.run(arrays, moved, stop)
