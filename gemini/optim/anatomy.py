"""What a torch optimizer keeps of a param, and whether its updates can be made piece by piece: found by trying it.

A small matrix is trained for some steps with the class as it is. What it has kept then is sorted: tensors in the shape
of the param are planes, single numbers are kept once for a whole param, counts of steps need no memory at all. Whether
that is all, and whether a step takes one element after the other, is tried as well (:mod:`gemini.optim.adopted`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini.interrupts import without_grad
from gemini.planning.planes import ALIGN, FORMS, ITEMSIZES, FactorSpec, PlaneSpec, shapes_of

Hypers = tuple[tuple[str, Any], ...]
"""Hyperparameters by name, as a value that can be hashed."""

STEPS = 8
"""Of a trial: RAdam, for one, computes otherwise from its sixth step on."""
SHAPE = (61, 72)
"""Of the matrix: more than two blocks of ``ALIGN`` elements, and a tail that no vector register divides."""
SHAPES = {0: (), 1: (61,), 2: SHAPE, 3: (3, 5, 7), 4: (3, 4, 5, 7)}
"""Of params of other dimensions, where an update asks for them."""
_SEED = 20


class Refusal(Exception):
    """Why an optimizer cannot be adopted, in words that go behind its name."""


class Anatomy(NamedTuple):
    """What an optimizer keeps of a param, beside its values."""

    planes: tuple[tuple[str, str], ...]
    """States in the shape of the param: names and dtypes."""
    numbers: tuple[str, ...]
    """States that are one fp32 number for a whole param, which its updates change."""
    counts: tuple[tuple[str, type], ...]
    """States that count the param's updates, and what they are: ``Tensor``, ``int`` or ``float``."""
    nones: tuple[str, ...]
    """States that are None."""
    group_counts: tuple[tuple[str, type], ...]
    """Entries of the param group that count updates."""
    factors: tuple[FactorSpec, ...] = ()
    """States that are a few vectors of the param."""

    @property
    def specs(self) -> tuple[PlaneSpec, ...]:
        """The planes of a rule: a number of a whole param has a place in each block of it, so that a tile finds it."""
        numbers = tuple(PlaneSpec(name, "float32", ALIGN) for name in self.numbers)
        return (*(PlaneSpec(name, dtype) for name, dtype in self.planes), *numbers)

    def keeps(self, shape: tuple[int, ...]) -> set[str]:
        """The names of the states of a param of that shape."""
        alike = *(name for name, _ in self.planes), *self.numbers, *(name for name, _ in self.counts), *self.nones
        return {*alike, *shapes_of(self.factors, shape)}


def called(kind: type) -> str:
    """The class, as a program writes it."""
    of_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if of_torch else f"{kind.__module__}.{kind.__qualname__}"


def make(kind: type[Optimizer], params: list[nn.Parameter], hypers: Mapping[str, Any]) -> Optimizer:
    """An optimizer of one group: what its constructor takes is given to it, the rest stands in the group."""
    taken = _arguments(kind)
    return kind([{"params": params, **hypers}], **{name: value for name, value in hypers.items() if name in taken})


def _arguments(kind: type[Optimizer]) -> set[str]:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[2:]  # without self and params
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def takes(kind: type[Optimizer], name: str) -> bool:
    """Whether its constructor has such an argument."""
    return name in _arguments(kind)


def step(optimizer: Optimizer) -> None:
    """Its step, without hooks that a program has registered for its own optimizers."""
    function: Any = type(optimizer).step
    (function.__wrapped__ if getattr(function, "hooked", False) else function)(optimizer)


def frozen(value: Any) -> Any:
    """A hyperparameter as a value that can be hashed: tensors of one element are numbers, lists are tuples.

    Raises:
        TypeError: for what is neither a number, a word, nor a tuple of such.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"it is a {type(value).__name__}, wanted is a number, a word, or a tuple of such")


# ---- trials ----------------------------------------------------------------------------------------------------------


def begin_of(shape: tuple[int, ...]) -> Tensor:
    """The weights that a trial of a param begins with."""
    return torch.randn(shape, generator=_generator(_SEED), device="cpu")


def gradient(number: int, shape: tuple[int, ...]) -> Tensor:
    """Of step ``number``, from 1 on: partly the same in each step, of several sizes, and here and there zero."""
    steady = torch.randn(shape, generator=_generator(_SEED + 1), device="cpu") * math.cos(number / 2)
    fresh = torch.randn(shape, generator=_generator(_SEED + 1 + number), device="cpu")
    size = torch.arange(math.prod(shape), device="cpu").view(shape) % 7 * 0.3  # its beginning is unlike its end
    last = torch.arange(math.prod(shape), device="cpu").view(shape) / max(math.prod(shape), 1)
    return (steady + fresh) * size * (1 + 30 * last) * 1e-2


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


class Snapshot(NamedTuple):
    """A param and its states, after a step."""

    value: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


@without_grad
def trained(
    kind: type[Optimizer], hypers: Mapping[str, Any], of: tuple[int, ...] = SHAPE, part: slice | None = None
) -> list[Snapshot]:
    """What an optimizer makes of a param of shape ``of``, step by step; or of ``part`` of its elements in a row.

    Raises:
        Refusal: if it cannot even do that, or draws random numbers.
    """

    def taken(whole: Tensor) -> Tensor:
        return whole.clone() if part is None else whole.view(-1)[part].clone()

    param = nn.Parameter(taken(begin_of(of)))
    before = torch.get_rng_state()
    found = []
    try:
        optimizer = make(kind, [param], hypers)
        for number in range(1, STEPS + 1):
            param.grad = taken(gradient(number, of))
            step(optimizer)
            state = {name: _copied(value) for name, value in optimizer.state[param].items()}
            group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            found.append(Snapshot(param.detach().clone(), state, group))
    except Refusal:
        raise
    except Exception as e:
        raise Refusal(f"it cannot update a param of shape {tuple(param.shape)} with step(): {_told(e)}") from e
    finally:
        drew = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    if drew:
        raise Refusal("it draws random numbers inside step(): its results would depend on the order of updates")
    return found


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# ---- what is found ---------------------------------------------------------------------------------------------------


def anatomy_of(steps: list[Snapshot], given: Mapping[str, Any]) -> Anatomy:
    """Sort what an optimizer has kept.

    Raises:
        Refusal: for a state that has no place.
    """
    names = steps[-1].state.keys()
    if any(snapshot.state.keys() != names for snapshot in steps):
        raise Refusal("it keeps other states in later steps than in its first one")
    planes, numbers, counts, nones, factors = [], [], [], [], []
    for name in names:
        values = [snapshot.state[name] for snapshot in steps]
        last, shape = values[-1], steps[-1].value.shape
        if all(value is None for value in values):
            nones.append(name)
        elif _counts(values):
            counts.append((name, Tensor if isinstance(last, Tensor) else type(last)))
        elif not all(isinstance(value, Tensor) for value in values):
            raise Refusal(f"its state {name!r} is a {type(last).__name__}, which no plane can keep")
        elif last.shape == shape and str(last.dtype).removeprefix("torch.") in ITEMSIZES:
            planes.append((name, str(last.dtype).removeprefix("torch.")))
        elif last.dim() == 0 and last.dtype is torch.float32:
            numbers.append(name)
        elif (form := _form_of(last, tuple(shape))) is not None:
            factors.append(FactorSpec(name, form))
        else:
            raise Refusal(
                f"its state {name!r} is {str(last.dtype).removeprefix('torch.')} {list(last.shape)} for a param of "
                f"{list(shape)}: neither an item for each element, nor for each row or column, nor one for all"
            )
    of_group = _group_counts(steps, given)
    return Anatomy(tuple(planes), tuple(numbers), tuple(counts), tuple(nones), of_group, tuple(factors))


def _form_of(state: Tensor, shape: tuple[int, ...]) -> str | None:
    if state.dtype is not torch.float32 or len(shape) < 2:
        return None
    return next((f for f in FORMS if FactorSpec("", f).shape_of(shape) == tuple(state.shape)), None)


def with_vectors(anatomy: Anatomy, steps: list[Snapshot]) -> Anatomy:
    """With what is kept of a param of one dimension, beside what is kept of a matrix."""
    known, last = anatomy.keeps(SHAPES[1]), steps[-1]
    more = tuple(
        FactorSpec(name, "vector")
        for name, value in last.state.items()
        if name not in known and isinstance(value, Tensor) and value.shape == last.value.shape
    )
    return anatomy._replace(factors=(*anatomy.factors, *more))


def _counts(values: Iterable[Any]) -> bool:
    """Whether a state is 1, 2, 3, ... after so many steps."""
    return all(
        isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
        and (not isinstance(value, Tensor) or value.dim() == 0) and float(value) == number
        for number, value in enumerate(values, 1)
    )  # fmt: skip


def _group_counts(steps: list[Snapshot], given: Mapping[str, Any]) -> tuple[tuple[str, type], ...]:
    found = []
    for name in steps[-1].group:
        values = [snapshot.group.get(name) for snapshot in steps]
        if _counts(values):
            found.append((name, Tensor if isinstance(values[-1], Tensor) else type(values[-1])))
        elif name not in given or any(_differ(value, given[name]) for value in values):
            raise Refusal(
                f"it changes {name!r} in its param group, which all params share: that is no state of one of them"
            )
    return tuple(found)


def _differ(a: Any, b: Any) -> bool:
    same: Callable[[Any], Any] = frozen
    return bool(same(a) != same(b))
