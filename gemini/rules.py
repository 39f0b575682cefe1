"""Update rules: what ``optimizer.step()`` does to a master and its state, as a value.

A rule declares its planes (:class:`~gemini.planning.planes.RuleSpec`), turns the hyperparameters of a step into scalars
once, and says in torch lines what an update is: that defines the bits, wherever the planes live. A native kernel may
take the place of those lines; it must leave the same bits. The model is wrapped with ``GeminiConfig(optimizer=rule)``,
which lays out the planes, and its optimizer is ``HybridOptimizer(params, rule)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import without_grad
from gemini.planning import planes
from gemini.planning.planes import RuleSpec

_SLAB = 2**20
"""Elements that are joined, updated and split at once: bounds what the torch lines take beside planes and budgets."""


class Where(NamedTuple):
    """Which elements an update is given: those from ``offset`` of the whole param ``name``, of ``shape``, on."""

    name: str
    offset: int
    shape: tuple[int, ...] = ()


class Arrays(NamedTuple):
    """Where the elements of an update are: flat, equally long (a plane by blocks has an item for each), on one device.

    ``weights`` and ``residual`` are a master, whole (then ``residual`` is None) or split; ``states`` has the planes of
    the rule by name, and its factors.
    """

    weights: Tensor
    residual: Tensor | None
    states: Mapping[str, Tensor]
    grad: Tensor


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of the arrays of an update, what they are updated with, and for rules that need their
    place, that.
    """

    begin: int
    end: int
    scalars: Any
    where: Where | None = None


@dataclass(frozen=True)
class UpdateRule(ABC):
    """What is to be written for a rule: ``spec``, ``defaults``, :meth:`scalars` and :meth:`update`."""

    spec: ClassVar[RuleSpec]
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The hyperparameters of a param group, with their defaults."""
    stops_on_device: ClassVar[bool] = False
    """Whether :meth:`run` takes ``stop`` and ``grad_scale``: then nobody need look at gradients on a device before."""
    uniform: ClassVar[frozenset[str]] = frozenset()
    """Planes each item of which is the same number for a whole param: states show that number alone."""

    @property
    def face(self) -> UpdateRule:
        """The rule that an optimizer of such a model has: this one, unless its states are kept in another form."""
        return self

    def of(self, exact: bool) -> UpdateRule:
        """The rule of a chunk, which keeps its states exact or not (``ChunkSpec.exact``)."""
        return self

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        """Refuse hyperparameters that make no sense.

        Raises:
            ValueError, TypeError: naming the hyperparameter and ``what`` has it.
        """
        for name, default in self.defaults.items():
            if name not in group:
                raise ValueError(f"{what} has no {name!r}, which the rule {self.spec.name!r} needs")
            if type(default) in (int, float):
                try:
                    finite = math.isfinite(group[name])
                except TypeError as e:
                    raise TypeError(f"{name} of {what} must be a number, got {group[name]!r}") from e
                if not finite:
                    raise ValueError(f"{name} of {what} must be finite, got {group[name]!r}")

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Hashable:
        """What an update needs beside tensors, fixed when ``optimizer.step()`` is called.

        Args:
            group: the param group.
            step: the number of this update of the param, from 1 on.
            grad_scale: what the gradient is to be multiplied by before anything else (clipping, loss scale).
        """

    @abstractmethod
    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        """One update in place, in torch lines: of ``master``, flat and fp32, and of the states by name.

        Factors are among the states, in their shapes. ``grad`` has the dtype it was kept in. ``where`` is None for
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
class AdamRule(UpdateRule):
    """Adam and AdamW, by native kernels that equal ``gemini.kernels_reference.adam_update``."""

    spec = planes.ADAM
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled": True,
    }  # fmt: skip
    stops_on_device = True

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> kernels.AdamHyper:
        beta1, beta2 = group["betas"]
        return kernels.AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=is_decoupled(group),
            grad_scale=grad_scale,
        )

    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        kernels.adam_update(master, None, states["exp_avg"], states["exp_avg_sq"], grad, scalars)

    def run(
        self, arrays: Arrays, segments: Sequence[Segment], stop: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> None:
        weights, residual, states, grad = arrays
        own = weights, residual, states["exp_avg"], states["exp_avg_sq"], grad
        if stop is None and grad_scale is None and len(segments) == 1 and segments[0][:2] == (0, weights.numel()):
            kernels.adam_update(*own, segments[0].scalars)
            return
        parts = [kernels.Segment(begin, end, scalars) for begin, end, scalars, _ in segments]
        kernels.adam_update_segments(*own, parts, grad_scale, stop)


ADAM = AdamRule()


def is_decoupled(group: Mapping[str, Any]) -> Any:
    """Whether a group of an Adam is AdamW's, in our word or, where it is torch's own group, in torch's."""
    return group.get("decoupled", group.get("decoupled_weight_decay", True))


def rule_of(optimizer: UpdateRule | None) -> UpdateRule:
    """The rule that ``GeminiConfig(optimizer=)`` says: Adam's for None."""
    return ADAM if optimizer is None else optimizer


def refuse_other(given: UpdateRule, wrapped_for: UpdateRule) -> None:
    """Refuse an optimizer whose model has the planes of another rule.

    Raises:
        GeminiError: naming both.
    """
    if given != wrapped_for.face:
        raise GeminiError(
            f"this optimizer's rule is {given!r}, and the model was wrapped for {wrapped_for.face!r}, whose planes its "
            "chunks have: wrap it with GeminiConfig(optimizer=rule), and make the optimizer with "
            "HybridOptimizer(params, rule) (HybridAdam has the rule of None)"
        )
