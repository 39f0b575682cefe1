"""``adopt``: a torch optimizer as an update rule, run tile by tile on fp32 masters with its states in planes.

For each tile an optimizer of the class is made for a short while, over a param that is the master and with states that
are the planes; its ``step()`` is the update, with the bits of its ordinary run over fp32 masters.

What a class keeps of a param is found by trying it on a small matrix for some steps. Tensors in the shape of the param
are planes, single numbers are kept once for a whole param, counts of steps need no memory. That this is all is tried
before a rule is made: with tiles that are parts of params, else with whole ones; what cannot be run so is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini.interrupts import without_grad
from gemini.planning.planes import ALIGN, FORMS, ITEMSIZES, FactorSpec, PlaneSpec, RuleSpec, shapes_of
from gemini.rules import States, UpdateRule, Where
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import make_factors

Hypers = tuple[tuple[str, Any], ...]  # by name, as a value that can be hashed

STEPS = 8  # of a trial: RAdam, for one, computes otherwise from its sixth step on
SHAPE = (61, 72)  # of the matrix: more than two blocks of ALIGN elements, and a tail that no vector register divides
SHAPES = {0: (), 1: (61,), 2: SHAPE, 3: (3, 5, 7), 4: (3, 4, 5, 7)}  # where an update asks for other dimensions
_SEED = 20


class Refusal(Exception):
    """Why an optimizer cannot be adopted, in words that go behind its name."""


class Anatomy(NamedTuple):
    """The states that an optimizer keeps of a param, beside its values."""

    planes: tuple[tuple[str, str], ...]  # states in the shape of the param: names and dtypes
    numbers: tuple[str, ...]  # states that are one fp32 number for a whole param, which its updates change
    counts: tuple[tuple[str, type], ...]
    """States that count the param's updates, and what they are: ``Tensor``, ``int`` or ``float``; those that are None.
    """
    group_counts: tuple[tuple[str, type], ...]  # entries of the param group that count updates
    factors: tuple[FactorSpec, ...] = ()  # states that are a few vectors of the param

    @property
    def specs(self) -> tuple[PlaneSpec, ...]:
        """The planes of a rule: a number of a whole param has a place in each block of it, so that a tile finds it."""
        numbers = tuple(PlaneSpec(name, "float32", ALIGN) for name in self.numbers)
        return (*(PlaneSpec(name, dtype) for name, dtype in self.planes), *numbers)

    def tensors(self, shape: tuple[int, ...]) -> list[str]:
        """The names of what is kept of a param of that shape in planes and factors."""
        return [*(name for name, _ in self.planes), *self.numbers, *shapes_of(self.factors, shape)]

    def keeps(self, shape: tuple[int, ...]) -> set[str]:
        """The names of all states of a param of that shape."""
        return {*self.tensors(shape), *(name for name, _ in self.counts)}


def called(kind: type) -> str:
    """The class, as a program writes it."""
    of_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if of_torch else f"{kind.__module__}.{kind.__qualname__}"


def make(kind: type[Optimizer], params: list[nn.Parameter], hypers: Mapping[str, Any]) -> Optimizer:
    """An optimizer of one group: what its constructor takes is given to it, the rest stands in the group."""
    taken = _arguments(kind)
    return kind([{"params": params, **hypers}], **{name: value for name, value in hypers.items() if name in taken})


def _arguments(kind: type[Optimizer]) -> set[str]:
    """The names of what its constructor takes beside the params."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[2:]  # without self and params
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def step(optimizer: Optimizer) -> None:
    """Its step, without hooks that a program has registered for its own optimizers."""
    function: Any = type(optimizer).step
    (function.__wrapped__ if getattr(function, "hooked", False) else function)(optimizer)


def frozen(value: Any) -> Any:
    """A hyperparameter that can be hashed: a number, a word, or a tuple of such; TypeError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"it is a {type(value).__name__}, wanted is a number, a word, or a tuple of such")


def _hypers_of(group: Mapping[str, Any], what: str) -> Hypers:
    """The hyperparameters of ``what``, :func:`frozen`. Raises TypeError, naming the one that cannot be."""
    found = []
    for name, value in group.items():
        try:
            found.append((name, frozen(value)))
        except TypeError as e:
            raise TypeError(f"{name} of {what} cannot be used: {e}") from e
    return tuple(found)


class AdoptedScalars(NamedTuple):
    """Numbers that an update needs beside tensors."""

    step: int
    grad_scale: float
    hypers: Hypers


@dataclass(frozen=True, repr=False)
class AdoptedRule(UpdateRule):
    """The rule of a torch optimizer; made by :func:`adopt`. Two are the same if they are of one class and keep the same
    states, whatever their hyperparameters.

    Args:
        kind: the class.
        given: the hyperparameters of every group that does not say others.
        anatomy: what the class keeps of a param.
        spec: the planes for it.
    """

    kind: type[Optimizer]
    given: Hypers = field(compare=False)
    anatomy: Anatomy
    spec: RuleSpec  # type: ignore[misc]

    def __repr__(self) -> str:
        defaults = {**_defaults(self.kind, {}), "foreach": False}
        given = [f", {name}={value!r}" for name, value in self.given if defaults.get(name, ...) != value]
        return f"gemini.optim.adopt({called(self.kind)}{''.join(given)})"

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The hyperparameters of a param group: those of the class, with what was given to :func:`adopt`."""
        return dict(self.given)

    @property
    def uniform(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.anatomy.numbers)

    def make(self, params: Any, *, step_in_backward: bool = False, **hypers: Any) -> HybridOptimizer:
        """The optimizer of this rule, over params or param groups: :class:`gemini.HybridOptimizer`."""
        return HybridOptimizer(params, self, step_in_backward=step_in_backward, **hypers)

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        found = _hypers_of({name: group[name] for name, _ in self.given}, what)
        _check(self, found, what)
        if self.spec.whole:
            params = group.get("params", ())
            for dims in {p.dim() for p in params if isinstance(p, Tensor)} if isinstance(params, list) else ():
                _check_dims(self, found, dims, what)

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> AdoptedScalars:
        return AdoptedScalars(step, grad_scale, tuple((name, frozen(group[name])) for name, _ in self.given))

    @without_grad
    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        shape = where.shape if self.spec.whole and where is not None else master.shape
        param, before = nn.Parameter(master.view(shape)), scalars.step - 1
        param.grad = grad.to(torch.float32, copy=True).mul_(scalars.grad_scale).view(shape)  # it may write to it
        optimizer = make(self.kind, [param], dict(scalars.hypers))
        kept = {name: states[name] for name in self.anatomy.tensors(shape)}
        if before:  # else it begins its states itself
            given: dict[str, Any] = {**kept, **{name: kept[name].view(shape) for name, _ in self.anatomy.planes}}
            given |= {name: kept[name][0].cpu() for name in self.anatomy.numbers}  # where torch has such numbers
            optimizer.state[param] = given | {name: _count(of, before) for name, of in self.anatomy.counts}
        for name, of in self.anatomy.group_counts:
            optimizer.param_groups[0][name] = _count(of, before)
        step(optimizer)
        for name, held in kept.items():
            value = optimizer.state[param][name]
            if not value.dim():
                held.fill_(value)  # a number of the whole param: to every block
            elif value.data_ptr() != held.data_ptr():
                held.copy_(value.reshape(held.shape))
        if param.data_ptr() != master.data_ptr():
            master.copy_(param.reshape(-1))


def _count(kind: type, count: int) -> Any:
    if kind is NoneType:
        return None
    return torch.tensor(float(count), dtype=torch.float32, device="cpu") if kind is Tensor else kind(count)


def adopt(kind: type[Optimizer], **hypers: Any) -> AdoptedRule:
    """Use an optimizer class of ``torch.optim`` or of another package as an update rule::

        rule = gemini.optim.adopt(torch.optim.NAdam, momentum_decay=0.01)
        model = gemini.GeminiDDP(model, gemini.GeminiConfig(optimizer=rule))
        optimizer = rule.make(model.parameters(), lr=1e-3)

    The class is tested on a small matrix. Its states become planes of the chunks, and its step must give the same bits
    on a whole matrix, on two halves, and with states that were stored in between. If only the halves differ, the class
    always gets whole params (``rule.spec.needs == "param"``), for which staging must have room. It is slower than a
    native kernel.

    Args:
        kind: the optimizer class.
        hypers: arguments of its constructor beside the params. Those that decide which states there are
            (``momentum=0.9``, ``amsgrad=True``) must be given here. ``rule.make`` and param groups may change the
            others.

    Raises:
        TypeError: if it is not an optimizer class, does not have one of the hyperparameters, or has one that is
            neither a number, a word, nor a tuple of such.
        ValueError: if the class can update neither parts of params nor whole ones. The message gives the reason.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"adopt takes a class of torch optimizers (torch.optim.NAdam), got {kind!r}")
    if issubclass(kind, HybridOptimizer):
        raise TypeError(f"{called(kind)} is an optimizer of Gemini already: give its rule to GeminiConfig(optimizer=)")
    taken = _arguments(kind)
    for name in hypers:
        if name not in taken:
            raise TypeError(f"{called(kind)} has no {name}=")
    if "foreach" in taken:
        hypers.setdefault("foreach", False)
    try:
        return _adopted(kind, _hypers_of(_defaults(kind, hypers), called(kind)))
    except Refusal as e:
        raise ValueError(f"gemini.optim.adopt({called(kind)}): {e}") from e


def _defaults(kind: type[Optimizer], hypers: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as the class makes one. Raises Refusal if that cannot be made of these."""
    try:
        group = kind([nn.Parameter(begin_of(SHAPE))], **hypers).param_groups[0]
    except Exception as e:
        raise Refusal(f"it cannot be made as {kind.__name__}(params, ...): {type(e).__name__}: {e}") from e
    return {name: value for name, value in group.items() if name != "params"}


def _adopted(kind: type[Optimizer], hypers: Hypers) -> AdoptedRule:
    """The rule, tried. Raises Refusal if what it makes of tiles is not what the class makes of a param."""
    given = _not_still(dict(hypers))
    wanted = trained(kind, given)
    anatomy, numel = anatomy_of(wanted, given), SHAPE[0] * SHAPE[1]
    if anatomy.factors:  # then of a param of one dimension something else is kept
        vector, known = trained(kind, given, SHAPES[1])[-1], anatomy.keeps(SHAPES[1])
        alike = (n for n, v in vector.state.items() if isinstance(v, Tensor) and v.shape == vector.value.shape)
        vectors = (FactorSpec(name, "vector") for name in alike if name not in known)
        anatomy = anatomy._replace(factors=(*anatomy.factors, *vectors))
    for needs, pieces in (("place", (slice(0, ALIGN), slice(ALIGN, numel))), ("param", (slice(0, numel),))):
        if anatomy.factors and needs != "param":
            continue
        try:
            spec = RuleSpec(called(kind), anatomy.specs, needs, factors=anatomy.factors)
        except ValueError as e:
            raise Refusal(f"its states cannot be named: {e}") from e
        rule = AdoptedRule(kind=kind, given=hypers, anatomy=anatomy, spec=spec)
        try:
            if all(_does_alike(rule, given, wanted, piece) for piece in pieces):
                return rule
        except Exception as e:
            if needs == "param":
                raise Refusal(f"it cannot go on with its states: {type(e).__name__}: {e}") from e
    raise Refusal("its steps need more than its states of a param: something stays in the optimizer itself")


def _not_still(hypers: Mapping[str, Any]) -> dict[str, Any]:
    """For a trial: a schedule may begin with 0, and what a step does then says nothing."""
    return {**hypers, "lr": 1e-3} if not hypers.get("lr", 1) else dict(hypers)


@without_grad
def _does_alike(rule: AdoptedRule, given: Mapping[str, Any], wanted: list[Snapshot], piece: slice) -> bool:
    """Whether the rule makes the same bits of a piece of the trial's param, as a tile, in each step."""
    shape = wanted[0].value.shape
    master = begin_of(shape).view(-1)[piece].clone()
    where = Where("trial", piece.start, shape)
    states = {
        spec.kind: torch.zeros(spec.num_items(master.numel()), dtype=getattr(torch, spec.dtype), device="cpu")
        for spec in rule.spec.planes
    } | make_factors(rule.spec, shape)
    for number, snapshot in enumerate(wanted, 1):
        scalars = AdoptedScalars(number, 1.0, tuple(given.items()))
        rule.update(master, gradient(number, shape).view(-1)[piece], states, scalars, where)
        pairs = [(master, snapshot.value.view(-1)[piece])]
        for name in rule.anatomy.tensors(shape):
            held, value = states[name], snapshot.state[name]
            if name in dict(rule.anatomy.planes):
                value = value.reshape(-1)[piece]
            pairs.append((held, value if value.dim() else value.repeat(held.shape)))
        # As bytes: NaN is equal to itself.
        if not all(torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in pair)) for pair in pairs):
            return False
    return True


@lru_cache(maxsize=512)
def _check_dims(rule: AdoptedRule, hypers: Hypers, dims: int, what: str) -> None:
    """Refuse params of so many dimensions that a rule of whole params cannot update. Raises ValueError, saying why."""
    shape, given = SHAPES.get(dims, (2,) * dims), _not_still(dict(hypers))
    try:
        wanted = trained(rule.kind, given, shape)
        if wanted[-1].state.keys() != rule.anatomy.keeps(shape):
            raise Refusal("it keeps other states of such a param")
        if not _does_alike(rule, given, wanted, slice(0, wanted[0].value.numel())):
            raise Refusal("it needs more than the states that it keeps of it")
    except Refusal as e:
        raise ValueError(
            f"{what} has params of {dims} dimensions, which {called(rule.kind)} cannot update here: {e}"
        ) from e


_anatomies: dict[tuple[type, tuple[tuple[str, bool], ...]], Anatomy] = {}
"""What classes keep, by which of their hyperparameters are off: a schedule changes numbers at every step."""


@lru_cache(maxsize=512)
def _check(rule: AdoptedRule, hypers: Hypers, what: str) -> None:
    """Refuse hyperparameters that the class does not take, or with which it keeps other states. Raises ValueError."""
    pattern = rule.kind, tuple((name, bool(value)) for name, value in hypers)
    try:
        make(rule.kind, [nn.Parameter(begin_of(SHAPE))], dict(hypers))
        if pattern not in _anatomies:
            _anatomies[pattern] = _adopted(rule.kind, hypers).anatomy
    except Exception as e:
        raise ValueError(f"{what} cannot be used with {called(rule.kind)}: {e}") from e
    if _anatomies[pattern] != rule.anatomy:
        ours = dict(rule.given)
        changed = {name: value for name, value in hypers if bool(value) != bool(ours.get(name))}
        raise ValueError(
            f"{what} has {changed}, with which {called(rule.kind)} keeps other states than the rule has: say it where "
            f"the rule is made, gemini.optim.adopt({called(rule.kind)}, ...)"
        )


# ---- trials ----------------------------------------------------------------------------------------------------------


def begin_of(shape: tuple[int, ...]) -> Tensor:
    """The weights that a trial of a param begins with."""
    return _draw(shape, _SEED)


def gradient(number: int, shape: tuple[int, ...]) -> Tensor:
    """The gradient of step ``number``, from 1 on: partly the same in each, of several sizes, here and there zero."""
    steady = _draw(shape, _SEED + 1) * math.cos(number / 2)
    fresh = _draw(shape, _SEED + 1 + number)
    place = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu").view(shape)
    size, last = place % 7 * 0.3, place / max(math.prod(shape), 1)  # its beginning is unlike its end
    return (steady + fresh) * size * (1 + 30 * last) * 1e-2


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    source = torch.Generator(device="cpu").manual_seed(seed)
    # Whatever dtype and device the program has as its defaults.
    return torch.randn(shape, generator=source, dtype=torch.float32, device="cpu")


class Snapshot(NamedTuple):
    """A param and its states, after a step."""

    value: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


@without_grad
def trained(kind: type[Optimizer], hypers: Mapping[str, Any], shape: tuple[int, ...] = SHAPE) -> list[Snapshot]:
    """A param as an optimizer leaves it, step by step; Refusal if it cannot, or draws random numbers."""
    param = nn.Parameter(begin_of(shape))
    before = torch.get_rng_state()
    found = []
    try:
        optimizer = make(kind, [param], hypers)
        for number in range(1, STEPS + 1):
            param.grad = gradient(number, shape)
            step(optimizer)
            group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            found.append(Snapshot(param.detach().clone(), deepcopy(dict(optimizer.state[param])), group))
    except Exception as e:
        raise Refusal(f"it cannot update a param of shape {shape} with step(): {type(e).__name__}: {e}") from e
    finally:
        drew = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    if drew:
        raise Refusal("it draws random numbers inside step(): its results would depend on the order of updates")
    return found


# ---- what is found ---------------------------------------------------------------------------------------------------


def anatomy_of(steps: list[Snapshot], given: Mapping[str, Any]) -> Anatomy:
    """Sort what an optimizer has kept. Raises Refusal for a state that has no place."""
    names = steps[-1].state.keys()
    if any(snapshot.state.keys() != names for snapshot in steps):
        raise Refusal("it keeps other states in later steps than in its first one")
    planes, numbers, counts, factors = [], [], [], []
    for name in names:
        values = [snapshot.state[name] for snapshot in steps]
        last, shape = values[-1], steps[-1].value.shape
        dtype = str(getattr(last, "dtype", "")).removeprefix("torch.")
        if _counts(values) or all(value is None for value in values):
            counts.append((name, _type_of(last)))
        elif others := [type(value).__name__ for value in values if not isinstance(value, Tensor)]:
            raise Refusal(f"its state {name!r} is a {others[-1]}, which no plane can keep")
        elif last.shape == shape and dtype in ITEMSIZES:
            planes.append((name, dtype))
        elif last.dim() == 0 and dtype == "float32":
            numbers.append(name)
        elif dtype == "float32" and len(shape) > 1 and (form := _form_of(last, tuple(shape))) is not None:
            factors.append(FactorSpec(name, form))
        else:
            raise Refusal(
                f"its state {name!r} is {dtype} {list(last.shape)} for a param of {list(shape)}: there is room for an "
                f"item for each element ({', '.join(ITEMSIZES)}), and in float32 for each row or column, or one for all"
            )
    return Anatomy(tuple(planes), tuple(numbers), tuple(counts), _group_counts(steps, given), tuple(factors))


def _form_of(state: Tensor, shape: tuple[int, ...]) -> str | None:
    return next((f for f in FORMS if FactorSpec("", f).shape_of(shape) == tuple(state.shape)), None)


def _type_of(value: Any) -> type:
    return Tensor if isinstance(value, Tensor) else type(value)


def _counts(values: Iterable[Any]) -> bool:
    """Whether a state is 1, 2, 3, ... after so many steps."""
    return all(
        isinstance(value, (Tensor, int, float))
        and not isinstance(value, bool)
        and (not isinstance(value, Tensor) or value.dim() == 0)
        and bool(value == number)
        for number, value in enumerate(values, 1)
    )


def _group_counts(steps: list[Snapshot], given: Mapping[str, Any]) -> tuple[tuple[str, type], ...]:
    found = []
    for name in steps[-1].group:
        values = [snapshot.group.get(name) for snapshot in steps]
        if _counts(values):
            found.append((name, _type_of(values[-1])))
        elif name not in given or any(frozen(value) != frozen(given[name]) for value in values):
            raise Refusal(
                f"it changes {name!r} in its param group, which all params share: that is no state of one of them"
            )
    return tuple(found)
