"""A rule with compact states: what ``GeminiConfig(states="compact")`` makes of a rule, for the engine alone.

The optimizer keeps the rule itself; its hyperparameters, scalars and the form of its states outside are those. What is
different is where states stand between updates: in 8 bits with scales, beside a master of 24 bits
(:mod:`gemini.kernels.reference`). An update decodes, does what the rule does, and encodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gemini import kernels
from gemini.interrupts import without_grad
from gemini.kernels.reference import decode, dither_of, encode
from gemini.planning.planes import PlaneKind, RuleSpec
from gemini.planning.rules import compact, scale_of, spec_for
from gemini.rules import ElementwiseRule, States, UpdateRule, Where, rule_of


@dataclass(frozen=True)
class CompactRule(ElementwiseRule):
    """``exact`` with compact states. Raises ValueError for a rule that has no such form."""

    exact: UpdateRule

    def __post_init__(self) -> None:
        _ = self.spec

    @cached_property
    def spec(self) -> RuleSpec:  # type: ignore[override]
        return compact(self.exact.spec)

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.exact.defaults

    @property
    def has_kernel(self) -> bool:  # type: ignore[override]
        return self.exact.has_kernel

    @property
    def face(self) -> UpdateRule:
        return self.exact

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
    """Of the int16 other half of masters, where the bf16 one stays as it is: to the nearest that there is."""
    return ((residual.int() + 0x7F + (residual.int() >> 8 & 1)) >> 8).clamp_(max=127).to(torch.int8)


def rule_for(optimizer: UpdateRule | None, states: str, precision: str | None) -> UpdateRule:
    """The rule of ``GeminiConfig(optimizer=, states=, precision=)``. Raises ValueError for states that the rule or the
    precision does not have.
    """
    rule = rule_of(optimizer)
    return rule if spec_for(rule.spec, states, precision) is rule.spec else CompactRule(rule)
