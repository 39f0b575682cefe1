"""``adopt``: a torch optimizer as an update rule, run tile by tile on fp32 masters with its states in planes.

For each tile an optimizer of the class is made for a short while, over a flat param that is the master and with states
that are the planes; its ``step()`` is the update. So it is the class's own arithmetic, of whatever package, and the
bits of its ordinary run over fp32 masters. That this is so is tried before a rule is made, and what cannot be run like
that is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini.grad_mode import without_grad
from gemini.optim.anatomy import (
    SHAPE,
    STEPS,
    Anatomy,
    Hypers,
    Refusal,
    anatomy_of,
    begin_of,
    called,
    frozen,
    gradient,
    make,
    step,
    takes,
    trained,
)
from gemini.planning.planes import ALIGN, RuleSpec
from gemini.rules import UpdateRule, Where
from gemini.train.optimizers.optimizer import HybridOptimizer

_NOT_HERE = {
    "capturable": "steps are not captured into CUDA graphs",
    "differentiable": "nothing can be differentiated through an update",
}


class AdoptedScalars(NamedTuple):
    """What an update needs beside tensors."""

    step: int
    grad_scale: float
    hypers: Hypers


@dataclass(frozen=True, repr=False)
class AdoptedRule(UpdateRule):
    """The rule of a torch optimizer; made by :func:`adopt`. Two are the same if they are of one class and keep the same
    states, whatever their hyperparameters.

    Args:
        kind: the class.
        hypers: those of every group that does not say others.
        anatomy: what the class keeps of a param.
        spec: the planes for it.
    """

    kind: type[Optimizer]
    hypers: Hypers = field(compare=False)
    anatomy: Anatomy
    spec: RuleSpec  # type: ignore[misc]

    def __repr__(self) -> str:
        defaults = {**_defaults(self.kind, {}), "foreach": False}
        given = [f", {name}={value!r}" for name, value in self.hypers if defaults.get(name, ...) != value]
        return f"gemini.optim.adopt({called(self.kind)}{''.join(given)})"

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The hyperparameters of a param group: those of the class, with what was given to :func:`adopt`."""
        return dict(self.hypers)

    @property
    def uniform(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.anatomy.numbers)

    def make(self, params: Any, *, step_in_backward: bool = False, **hypers: Any) -> HybridOptimizer:
        """The optimizer of this rule, over params or param groups: :class:`gemini.HybridOptimizer`."""
        return HybridOptimizer(params, self, step_in_backward=step_in_backward, **hypers)

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        found = []
        for name, _ in self.hypers:
            try:
                found.append((name, frozen(group[name])))
            except TypeError as e:
                raise TypeError(f"{name} of {what} cannot be used: {e}") from e
        _check(self, tuple(found), what)

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> AdoptedScalars:
        return AdoptedScalars(step, grad_scale, tuple((name, frozen(group[name])) for name, _ in self.hypers))

    @without_grad
    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        param, before = nn.Parameter(master), scalars.step - 1
        param.grad = grad.to(torch.float32, copy=True).mul_(scalars.grad_scale)  # it may write to it
        optimizer = make(self.kind, [param], dict(scalars.hypers))
        if before:  # else it begins its states itself
            optimizer.state[param] = self._state_of(states, before)
        for name, kind in self.anatomy.group_counts:
            optimizer.param_groups[0][name] = _count(kind, before)
        step(optimizer)
        state = optimizer.state[param]
        for name, _ in self.anatomy.planes:
            if state[name].data_ptr() != states[name].data_ptr():
                states[name].copy_(state[name])
        for name in self.anatomy.numbers:
            states[name].fill_(state[name])
        if param.data_ptr() != master.data_ptr():
            master.copy_(param)

    def _state_of(self, states: Mapping[str, Tensor], before: int) -> dict[str, Any]:
        state: dict[str, Any] = {name: states[name] for name, _ in self.anatomy.planes}
        state.update({name: states[name][0].cpu() for name in self.anatomy.numbers})  # where torch has such numbers
        state.update({name: _count(kind, before) for name, kind in self.anatomy.counts})
        return {**state, **dict.fromkeys(self.anatomy.nones)}


def _count(kind: type, count: int) -> Any:
    return torch.tensor(float(count), dtype=torch.float32, device="cpu") if kind is Tensor else kind(count)


def adopt(kind: type[Optimizer], **hypers: Any) -> AdoptedRule:
    """The rule of a torch optimizer, of ``torch.optim`` or of another package::

        rule = gemini.optim.adopt(torch.optim.NAdam, momentum_decay=0.01)
        model = gemini.GeminiDDP(model, gemini.GeminiConfig(optimizer=rule))
        optimizer = rule.make(model.parameters(), lr=1e-3)

    The class is tried on a small matrix, step by step: what it keeps of a param becomes planes, and its step must give
    the same bits in one piece, in two, and with states that were put aside in between. Slower than a native kernel.

    Args:
        kind: the class.
        hypers: what its constructor takes beside params. Which states it keeps may depend on them (``momentum=0.9``,
            ``amsgrad=True``), so they belong to the rule; those of ``rule.make`` and of param groups may differ from
            them as long as the states are the same.

    Raises:
        TypeError: for what is no optimizer class, and for hyperparameters that it does not have.
        ValueError: naming the class and the reason why it cannot be run tile by tile.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"adopt takes a class of torch optimizers (torch.optim.NAdam), got {kind!r}")
    if issubclass(kind, HybridOptimizer):
        raise TypeError(f"{called(kind)} is an optimizer of Gemini already: give its rule to GeminiConfig(optimizer=)")
    for name in hypers:
        if not takes(kind, name):
            raise TypeError(f"{called(kind)} has no {name}=")
    if takes(kind, "foreach"):
        hypers.setdefault("foreach", False)
    try:
        return _adopted(kind, tuple((name, frozen(value)) for name, value in _defaults(kind, hypers).items()))
    except Refusal as e:
        raise ValueError(f"gemini.optim.adopt({called(kind)}): {e}") from e


def _defaults(kind: type[Optimizer], hypers: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as the class makes one.

    Raises:
        Refusal: if it cannot be made of params and these.
    """
    try:
        group = kind([nn.Parameter(torch.zeros(SHAPE, device="cpu"))], **hypers).param_groups[0]
    except Exception as e:
        raise Refusal(f"it cannot be made as {kind.__name__}(params, ...): {type(e).__name__}: {e}") from e
    return {name: value for name, value in group.items() if name != "params"}


def _adopted(kind: type[Optimizer], hypers: Hypers) -> AdoptedRule:
    """The rule, tried.

    Raises:
        Refusal: if what it makes of tiles is not what the class makes of a param.
    """
    given = dict(hypers)
    for name, why in _NOT_HERE.items():
        if given.get(name):
            raise Refusal(f"{name}=True: {why}; leave it out")
    if not given.get("lr", 1):
        given["lr"] = 1e-3  # a warm-up begins with 0, and what it does then is no trial
    wanted = trained(kind, given, SHAPE, slice(None))
    anatomy = anatomy_of(wanted, given)
    try:
        spec = RuleSpec(called(kind), anatomy.specs, needs="place")
    except ValueError as e:
        raise Refusal(f"its states cannot be named: {e}") from e
    rule = AdoptedRule(kind=kind, hypers=hypers, anatomy=anatomy, spec=spec)
    numel = SHAPE[0] * SHAPE[1]
    pieces = slice(0, ALIGN), slice(ALIGN, numel)
    made = [_run(rule, given, piece) for piece in pieces]
    for number, snapshot in enumerate(wanted):
        for piece, runs in zip(pieces, made, strict=True):
            master, states = runs[number]
            same = torch.equal(master.view(torch.uint8), snapshot.value.view(-1)[piece].view(torch.uint8))
            for name, _ in anatomy.planes:
                same &= torch.equal(
                    states[name].view(torch.uint8), snapshot.state[name].reshape(-1)[piece].view(torch.uint8)
                )
            for name in anatomy.numbers:
                same &= bool((states[name] == snapshot.state[name]).all())
            if not same:
                raise Refusal(_why(kind, given, wanted, pieces))
    return rule


@without_grad
def _run(rule: AdoptedRule, given: Mapping[str, Any], piece: slice) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What the rule makes of a piece of the trial's param, as a tile: the master and the planes after each step."""
    master, found = begin_of(SHAPE).view(-1)[piece].clone(), []
    states = {
        spec.kind: torch.zeros(spec.num_items(master.numel()), dtype=getattr(torch, spec.dtype), device="cpu")
        for spec in rule.spec.planes
    }
    try:
        for number in range(1, STEPS + 1):
            scalars = AdoptedScalars(number, 1.0, tuple(given.items()))
            rule.update(master, gradient(number, SHAPE).view(-1)[piece], states, scalars, None)
            found.append((master.clone(), {name: state.clone() for name, state in states.items()}))
    except Exception as e:
        text = " ".join(str(e).split())[:200]
        raise Refusal(f"it cannot update a part of a param: {type(e).__name__}: {text}") from e
    return found


def _why(kind: type[Optimizer], given: Mapping[str, Any], wanted: list[Any], pieces: tuple[slice, slice]) -> str:
    """What it is in an optimizer that tiles do not have."""
    numel = SHAPE[0] * SHAPE[1]
    last = wanted[-1].value.view(-1)
    whole = trained(kind, given, (numel,), slice(None))[-1].value
    if not torch.equal(whole, last):
        return "its update of a matrix is not that of the same elements in a row: it needs the shape of a param"
    if not all(torch.equal(trained(kind, given, (numel,), piece)[-1].value, last[piece]) for piece in pieces):
        return "its update of an element depends on the others of the param (a norm or a mean of them)"
    return "its steps need more than the states that it keeps of a param: something stays in the optimizer itself"


_anatomies: dict[tuple[type, tuple[tuple[str, bool], ...]], Anatomy] = {}
"""What classes keep, by which of their hyperparameters are off: a schedule changes numbers at every step."""


def _anatomy_with(kind: type[Optimizer], hypers: Hypers) -> Anatomy:
    pattern = kind, tuple((name, bool(value)) for name, value in hypers)
    if pattern not in _anatomies:
        _anatomies[pattern] = _adopted(kind, hypers).anatomy
    return _anatomies[pattern]


@lru_cache(maxsize=512)
def _check(rule: AdoptedRule, hypers: Hypers, what: str) -> None:
    """Refuse hyperparameters that the class does not take, or with which it keeps other states than the rule has.

    Raises:
        ValueError: naming them.
    """
    try:
        make(rule.kind, [nn.Parameter(torch.zeros(SHAPE, device="cpu"))], dict(hypers))
    except Exception as e:
        raise ValueError(f"{called(rule.kind)} refuses {what}: {e}") from e
    try:
        anatomy = _anatomy_with(rule.kind, hypers)
    except Refusal as e:
        raise ValueError(f"{what} cannot be used with {called(rule.kind)}: {e}") from e
    if anatomy != rule.anatomy:
        mine, theirs = ({spec.kind for spec in a.specs} for a in (rule.anatomy, anatomy))
        different = sorted(mine ^ theirs) or sorted(mine)
        ours = dict(rule.hypers)
        changed = {name: value for name, value in hypers if bool(value) != bool(ours.get(name))}
        raise ValueError(
            f"{what} has {changed}, with which {called(rule.kind)} keeps other states ({different}) than the rule has: "
            f"say it where the rule is made, gemini.optim.adopt({called(rule.kind)}, ...)"
        )
