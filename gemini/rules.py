"""Update rules: what ``optimizer.step()`` does to a master and its state, as a value.

A rule declares its planes (:class:`~gemini.planning.planes.RuleSpec`), turns the hyperparameters of a step into scalars
once, and says in torch lines what an update is: that defines the bits, wherever the planes live. A native kernel may
take the place of those lines; it must leave the same bits. The model is wrapped with ``GeminiConfig(optimizer=rule)``,
which lays out the planes, and its optimizer is ``HybridOptimizer(params, rule)``.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import without_grad
from gemini.kernels.arrays import Arrays, Segment, Where, with_scale
from gemini.planning.planes import ADAM as ADAM_SPEC
from gemini.planning.planes import RuleSpec

States = Mapping[str, Tensor]  # the states of an update by name: planes, flat, and factors in their shapes
LARGEST = torch.finfo(torch.float32).max  # the largest number that a hyperparameter may be
_SLAB = 2**20
"""Elements that are joined, updated and split at once: bounds what the torch lines take beside planes and budgets."""


def number_of(value: Any, what: str) -> float:
    """A real number, also as a tensor of one element; ``what`` names it. Raises TypeError for anything else."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value)
    elif not isinstance(value, (str, bytes, bool)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"{what} must be a number, or a tensor of one, got {shown}")


_RANGES = {
    "a finite number and not negative": (0.0, LARGEST),
    "0 or more": (0.0, LARGEST),
    "0 or less": (-LARGEST, 0.0),
    "positive": (math.ulp(0.0), LARGEST),
    "in [0, 1)": (0.0, math.nextafter(1.0, 0.0)),
    "in [0, 1]": (0.0, 1.0),
    "a whole number from 1 to 99": (1, 99),
}
"""The first and the last number of each."""


class Hyper(NamedTuple):
    """A hyperparameter of a rule: a number, some numbers, a bool or a word, as its default is."""

    default: Any
    words: str = ""  # what it is, for the documentation; nothing of one that programs do not give to an optimizer
    within: str | tuple[str, ...] = ""
    """Which numbers make sense (where nothing is said what is not negative, of several "in [0, 1)"), or the words."""

    def check(self, value: Any, what: str) -> None:
        """Refuse a value that makes no sense; ``what`` names it. Raises ValueError or TypeError, saying why."""
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise TypeError(f"{what} must be True or False, got {value!r}")
        elif isinstance(self.within, tuple):
            if value not in self.within:
                raise ValueError(f"{what} must be one of {self.within}, got {value!r}")
        elif isinstance(self.default, tuple):
            within = str(self.within) or "in [0, 1)"
            (first, last), count = _RANGES[within], {2: "two", 3: "three"}[len(self.default)]
            are_in = isinstance(value, (tuple, list)) and len(value) == len(self.default)
            for one in value if are_in else ():
                are_in = are_in and first <= number_of(one, what) <= last
            if not are_in:
                within = within if within.startswith("in") else f"of {within}"
                raise ValueError(f"{what} must be {count} numbers {within}, got {value!r}")
        else:
            within = self.within or "a finite number and not negative"
            first, last = _RANGES[within]
            if not first <= number_of(value, what) <= last or (type(first) is int and type(value) is not int):
                raise ValueError(f"{what} must be {within}, got {value!r}")


@dataclass(frozen=True)
class UpdateRule(ABC):
    """A rule to be written: ``spec``, ``defaults`` or ``hypers``, :meth:`scalars` and :meth:`update`."""

    spec: ClassVar[RuleSpec]
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The hyperparameters of a param group, with their defaults: those of ``hypers``, where these are given."""
    hypers: ClassVar[Mapping[str, Hyper]] = {}
    """What they are, and which values of them make sense; all of a rule that others share."""
    has_kernel: ClassVar[bool] = False
    """Whether there is native code for it. Then :meth:`run` takes ``stop`` and ``grad_scale``, and nobody need look at
    gradients on a device before.
    """
    uniform: ClassVar[frozenset[str]] = frozenset()
    """Planes each item of which is the same number for a whole param: states show that number alone."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "hypers" in vars(cls):
            cls.defaults = {name: hyper.default for name, hyper in cls.hypers.items()}

    @property
    def face(self) -> UpdateRule:
        """The rule that an optimizer of such a model has: this one, unless it keeps states in another form, or more of
        them than an optimizer knows.
        """
        return self

    def of(self, exact: bool) -> UpdateRule:
        """The rule of a chunk, which keeps its states exact or not (``ChunkSpec.exact``)."""
        return self

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        """Refuse hyperparameters of ``what`` that make no sense. Raises ValueError or TypeError, naming one."""
        for name, default in self.defaults.items():
            if name not in group:
                raise ValueError(f"{what} has no {name!r}, which the rule {self.spec.name!r} needs")
            value, called = group[name], f"{name} of {what}"
            if name in self.hypers:
                self.hypers[name].check(value, called)
            elif type(default) in (int, float) and not math.isfinite(number_of(value, called)):
                raise ValueError(f"{called} must be finite, got {value!r}")

    def grouped(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Param groups of a model as this rule takes them: a rule may update some of the params in another way."""
        return groups

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Hashable:
        """Numbers that an update needs beside tensors, fixed when ``optimizer.step()`` is called.

        Args:
            group: the param group.
            step: the number of this update of the param, from 1 on.
            grad_scale: what the gradient is to be multiplied by before anything else (clipping, loss scale).
        """

    @abstractmethod
    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        """One update in place, in torch lines: of ``master``, flat and fp32, and of the states.

        ``grad`` has the dtype it was kept in. ``where`` is None for
        rules that need "elements" only; one that needs "param" is given all elements of one, flat, and its shape in it.
        """

    def run(
        self, arrays: Arrays, segments: Sequence[Segment], stop: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> None:
        """Update parts of the arrays, each in its own way; those of a rule that is ``whole`` one after the other.

        ``stop``: a flag on their device; if it is not 0 when the update would begin there, nothing is done.
        ``grad_scale``: a number there, in place of the one that the scalars were made with.
        """
        assert stop is None and grad_scale is None, "this rule takes nothing from a device"
        for begin, end, scalars, where in segments:
            size = end - begin if self.spec.whole else _SLAB
            for first in range(begin, end, max(size, 1)):
                last = min(first + size, end)
                here = None if where is None else where._replace(offset=where.offset + first - begin)
                self._run(arrays, slice(first, last), scalars, here)

    @without_grad
    def _run(self, arrays: Arrays, part: slice, scalars: Any, where: Where | None) -> None:
        weights, residual, states, grad = arrays
        own = {
            spec.kind: states[spec.kind][part.start // spec.block : -(-part.stop // spec.block)]
            for spec in self.spec.planes
        } | {factor.name: states[factor.name] for factor in self.spec.factors if factor.name in states}
        if residual is None:
            self.update(weights[part], grad[part], own, scalars, where)
            return
        master = torch.empty(part.stop - part.start, dtype=torch.float32, device=weights.device)
        kernels.join_master(weights[part], residual[part], master)
        self.update(master, grad[part], own, scalars, where)
        kernels.split_master(master, weights[part], residual[part])


@dataclass(frozen=True)
class ElementwiseRule(UpdateRule):
    """A rule with a native kernel, which its scalars name and csrc/rules.h must have; where native code cannot take the
    tensors it runs in its torch lines. Its scalars are those of :func:`kernel_scalars`.
    """

    has_kernel = True

    def run(
        self, arrays: Arrays, segments: Sequence[Segment], stop: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> None:
        if not kernels.update(arrays, self.spec, segments, grad_scale, stop) and (stop is None or int(stop) == 0):
            super().run(arrays, segments if grad_scale is None else with_scale(segments, grad_scale))


def kernel_scalars(kernel: str, step: int = 0, **numbers: float) -> Any:
    """Make the scalars of the update that is called ``kernel`` in csrc/rules.h: a named tuple of its numbers, by the
    names and in the order of the struct there, of ``kernel``, and of ``step``, where compact states are dithered by it.
    Numbers are computed in double and rounded to fp32 here, once.
    """
    return _scalars_named(tuple(numbers))(*[ctypes.c_float(x).value for x in numbers.values()], kernel, step)


@cache
def _scalars_named(names: tuple[str, ...]) -> Any:
    return namedtuple("KernelScalars", (*names, "kernel", "step"))


@dataclass(frozen=True)
class AdamRule(ElementwiseRule):
    """Adam and AdamW (Loshchilov and Hutter, 2019; Kingma and Ba, 2015): the rule where nobody says another."""

    spec = ADAM_SPEC
    hypers: ClassVar[Mapping[str, Hyper]] = {
        "lr": Hyper(1e-3, "learning rate."),
        "betas": Hyper((0.9, 0.999), "decay rates of the moments ``exp_avg`` and ``exp_avg_sq``."),
        "eps": Hyper(1e-8, "added to the denominator."),
        "weight_decay": Hyper(0.01, "the decoupled weight decay of AdamW, or the L2 coefficient of Adam."),
        "decoupled": Hyper(True, "True for AdamW, False for Adam."),
    }

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group({**group, "decoupled": is_decoupled(group)}, what)
        for option in ("amsgrad", "maximize", "differentiable"):  # of torch's Adam, which this one does not have
            if group.get(option):
                raise ValueError(f"{what} has {option}={group[option]!r}, which HybridAdam does not have: leave it out")

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        (beta1, beta2), lr, weight_decay = map(float, group["betas"]), float(group["lr"]), float(group["weight_decay"])
        return kernel_scalars(
            "adamw" if is_decoupled(group) else "adam",
            step,
            c1=1.0 - beta1,
            c2=1.0 - beta2,
            beta2=beta2,
            decay=1.0 - lr * weight_decay,
            wd=weight_decay,
            neg_step=-(lr / (1.0 - beta1**step)),
            inv_sqrt_bc2=1.0 / math.sqrt(1.0 - beta2**step),
            eps=float(group["eps"]),
            grad_scale=grad_scale,
        )

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        s, m, v = scalars, states["exp_avg"], states["exp_avg_sq"]
        g = grad.float() * s.grad_scale
        if s.kernel == "adam":
            g = g + master * s.wd
        m.add_((g - m) * s.c1)
        v.mul_(s.beta2).add_((g * s.c2) * g)
        # Torch's own root on CPU may be an ulp off, in fp32 (17 % of all numbers with torch 2.13 and MKL) and in fp64.
        # From fp64 with an error under one ulp the second rounding is right: no root of an fp32 number is closer than
        # 2^-51 (relative) to the middle between two fp32 numbers.
        d = v.double().sqrt_().float() * s.inv_sqrt_bc2 + s.eps
        if s.kernel == "adamw":
            master.mul_(s.decay)
        master.add_((m * s.neg_step) / d)


ADAM = AdamRule()


def is_decoupled(group: Mapping[str, Any]) -> Any:
    """Whether a group of an Adam is AdamW's, in our word or, where it is torch's own group, in torch's."""
    return group.get("decoupled", group.get("decoupled_weight_decay", True))


def rule_of(optimizer: UpdateRule | None) -> UpdateRule:
    """The rule that ``GeminiConfig(optimizer=)`` says: Adam's for None."""
    return ADAM if optimizer is None else optimizer


def refuse_other(given: UpdateRule, wrapped_for: UpdateRule) -> None:
    """Refuse an optimizer whose model has the planes of another rule. Raises GeminiError, naming both."""
    if given not in (wrapped_for.face, wrapped_for):
        raise GeminiError(
            f"this optimizer's rule is {given!r}, and the model was wrapped for {wrapped_for.face!r}, whose planes its "
            "chunks have: wrap it with GeminiConfig(optimizer=rule), and make the optimizer with "
            "HybridOptimizer(params, rule) (HybridAdam has the rule of None)"
        )
