"""Updates for the tests of kernels: every rule that has native code, with hyperparameters that matter, and where it has
a compact form that too; their arrays of any bits, and comparison.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini import kernels
from gemini.optim import AdamRule, LionRule, PlainSGDRule, SGDRule
from gemini.optim.around import CompactRule, MovingAverage
from gemini.rules import Arrays, Segment, UpdateRule, Where
from tests import kernel_settings
from tests.native.native_cases import any_bits, as_bits, assert_same_bits, to_dtype


class Case(NamedTuple):
    """A rule, hyperparameters that are not its defaults, and the number of the update."""

    rule: UpdateRule
    hypers: dict[str, Any]
    step: int = 3

    def scalars(self, grad_scale: float = 0.37) -> Any:
        return self.rule.scalars({**self.rule.defaults, **self.hypers}, self.step, grad_scale)

    @property
    def is_compact(self) -> bool:
        return isinstance(self.rule, CompactRule)


EXACT: dict[str, Case] = {
    "adamw": Case(AdamRule(), {"weight_decay": 0.1}),
    "adam": Case(AdamRule(), {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "decoupled": False}),
    "first adam": Case(AdamRule(), {"weight_decay": 0.1, "decoupled": False}, 1),
    "sgd": Case(SGDRule(), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "first sgd": Case(SGDRule(), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, 1),
    "nesterov": Case(SGDRule(), {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain sgd": Case(PlainSGDRule(), {"lr": 0.1, "weight_decay": 0.1}),
    "lion": Case(LionRule(), {"lr": 1e-3, "weight_decay": 0.1}),
    "average": Case(MovingAverage(), {"decay": 0.99, "fresh": 0.0}),
    "first average": Case(MovingAverage(), {"decay": 0.99, "fresh": 1.0}),
}
COMPACT = {
    f"{name}, compact": EXACT[name]._replace(rule=CompactRule(EXACT[name].rule))
    for name in ("adamw", "first adam", "sgd", "plain sgd", "lion")
}
CASES = EXACT | COMPACT
WAYS = [
    (name, is_split) for name, case in CASES.items() for is_split in (False, True) if is_split or not case.is_compact
]
"""Every case with masters in two halves, and where there are such, whole ones."""


def arrays(rule: UpdateRule, n: int, is_split: bool, dtype: torch.dtype) -> Arrays:
    """Of any bits."""
    weights, residual = any_bits(n, 1).clone(), None
    generator = torch.Generator().manual_seed(n)
    states = {}
    for number, spec in enumerate(rule.spec.planes):
        if spec.dtype == "float32":
            state = any_bits(n, 5 + number).clone()
            states[spec.kind] = state.abs() if spec.kind == "exp_avg_sq" else state
        else:
            low, high = (0, 254) if spec.block > 1 else (-127, 128) if spec.dtype == "int8" else (0, 256)
            codes = torch.randint(low, high, (spec.num_items(n),), generator=generator)
            states[spec.kind] = codes.to(getattr(torch, spec.dtype))
    if is_split:
        hi, residual = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=getattr(torch, rule.spec.residual))
        with kernel_settings.use_isa("reference"):
            kernels.split_master(weights, hi, residual)
        weights = hi
    return Arrays(weights, residual, states, to_dtype(any_bits(n, 4), dtype))


def flat(given: Arrays) -> dict[str, Tensor]:
    """Every array by name."""
    named = {"weights": given.weights, **given.states, "grad": given.grad}
    return named if given.residual is None else {**named, "residual": given.residual}


def renewed(given: Arrays, tensors: dict[str, Tensor]) -> Arrays:
    """The arrays with these tensors by name."""
    states = {kind: tensors[kind] for kind in given.states}
    return Arrays(tensors["weights"], tensors.get("residual"), states, tensors["grad"])


def copied(given: Arrays) -> Arrays:
    return renewed(given, {name: tensor.clone() for name, tensor in flat(given).items()})


def updated(
    isa: str, case: Case, given: Arrays, segments: Sequence[Segment], stop: Any = None, grad_scale: Any = None
) -> Arrays:
    """Copies after one update."""
    result = copied(given)
    with kernel_settings.use_isa(isa):
        case.rule.run(result, segments, stop, grad_scale)
    return result


def whole(case: Case, n: int) -> list[Segment]:
    """All elements, which begin inside of their param."""
    return [Segment(0, n, case.scalars(), Where("a.weight", 128))]


def assert_alike(given: Arrays, expected: Arrays, what: str) -> None:
    found = flat(given)
    for name, wanted in flat(expected).items():
        if not wanted.is_floating_point() or (wanted.element_size() == 2 and name != "grad"):
            # Halves of a master, whose NaN is canonical, and codes: equal as integers.
            assert torch.equal(as_bits(found[name]), as_bits(wanted)), f"{what}: {name}"
        assert_same_bits(found[name], wanted, f"{what}: {name}")
