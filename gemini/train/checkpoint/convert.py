"""States that were saved in one form and are kept in another: exact ones read into a compact model, masters in two
halves into a param that stays in fp32, and the other way.

A param is converted tile by tile, master and states together. From compact to exact nothing is lost that was there;
what exact states lose is counted, for whoever loads to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from gemini import kernels
from gemini.errors import PlanMismatch, warn
from gemini.kernels.reference import decode, encode
from gemini.planning.compact import BLOCK, compact, scale_of
from gemini.planning.planes import RESIDUAL, WEIGHTS, PlaneKind, PlaneSpec, RuleSpec

Values = Mapping[PlaneKind, torch.Tensor]


def face_of(rule: RuleSpec) -> RuleSpec:
    """The rule that an optimizer has, however its states are kept."""
    return rule.exact or rule


def check_rule(path: Path, saved: RuleSpec, here: RuleSpec) -> None:
    """Refuse states that a model of the rule ``here`` cannot take over.

    Raises:
        PlanMismatch: for states of another rule, and for compact ones of another form.
    """
    if face_of(saved) != face_of(here):
        raise PlanMismatch(
            f"{path} was saved with states of the update rule {saved.name!r}, the model was wrapped for "
            f"{here.name!r}: wrap it with GeminiConfig(optimizer=) of the same rule"
        )
    if saved.exact is not None:
        ours = compact(face_of(here))
        if (saved.planes, saved.residual, saved.codes) != (ours.planes, ours.residual, ours.codes):
            raise PlanMismatch(
                f"{path} has compact states of another form ({_form(saved)}), this Gemini knows {_form(ours)}: load it "
                'with the Gemini that wrote it, and save it with states="exact"'
            )


def _form(rule: RuleSpec) -> str:
    planes = ", ".join(f"{s.kind} {s.dtype}{f' for {s.block} elements' if s.block > 1 else ''}" for s in rule.planes)
    return f"{planes or 'no states'}, residual {rule.residual}, codes of form {rule.codes}"


class Form(NamedTuple):
    """How a trained param of a bf16 model is kept: by which rule, and whether its weights stay in fp32."""

    rule: RuleSpec
    fp32: bool

    @property
    def specs(self) -> list[PlaneSpec]:
        """Its planes."""
        halves = [PlaneSpec(WEIGHTS, "bfloat16"), PlaneSpec(RESIDUAL, self.rule.residual)]
        return [*([PlaneSpec(WEIGHTS, "float32")] if self.fp32 else halves), *self.rule.planes]


@dataclass
class Loss:
    """What exact states lost in becoming compact."""

    params: int = 0
    elements: int = 0
    rounded: int = 0
    """Masters that have more than 24 bits."""
    to_zero: int = 0
    """States that were not 0 and are."""

    def tell(self, path: Path) -> None:
        """Warn, if there is anything to be told."""
        if self.params:
            warn(
                f"{path} was saved with exact states, and the model keeps compact ones: of {self.elements:,} elements "
                f"in {self.params} params {self.rounded:,} masters were rounded to 24 bits and {self.to_zero:,} states "
                "became 0; all other states have 8 bits now. The run goes on close to what it was, not with its bits"
            )


def converted(saved: Form, here: Form, read: Callable[[PlaneSpec], torch.Tensor], loss: Loss) -> Values:
    """The planes, as ``here`` has them, of elements whose saved planes ``read`` gives; they begin with a block."""
    there = {spec.kind: read(spec) for spec in saved.specs}
    n = there[WEIGHTS].numel()
    made = {spec.kind: _empty(spec, n) for spec in here.specs}
    master = there[WEIGHTS] if saved.fp32 else torch.empty(n, dtype=torch.float32, device="cpu")
    if not saved.fp32:
        kernels.join_master(there[WEIGHTS], there[RESIDUAL], master)
    if here.fp32:
        made[WEIGHTS] = master
    else:
        kernels.split_master(master, made[WEIGHTS], made[RESIDUAL])
    loss.elements += n
    if saved.fp32 or there[RESIDUAL].dtype is torch.int16:
        lost = not here.fp32 and made[RESIDUAL].dtype is torch.int8
        loss.rounded += int(torch.count_nonzero(master.view(torch.int32) & 0xFF)) if lost else 0
    for kind in (spec.kind for spec in face_of(saved.rule).planes):
        values = there[kind]
        if saved.rule.exact is not None:
            values = decode(values, there[scale_of(kind)])
        if here.rule.exact is None:
            made[kind] = values
        else:
            encode(values, made[kind], made[scale_of(kind)])
            loss.to_zero += int(torch.count_nonzero((made[kind] == 0) & (values != 0)))
    return made


def _empty(spec: PlaneSpec, numel: int) -> torch.Tensor:
    assert spec.block in (1, BLOCK)
    return torch.empty(spec.num_items(numel), dtype=getattr(torch, spec.dtype), device="cpu")
