"""What must be alike on all ranks of a model before any of them changes a weight, and the error that names what is not.

Each rank updates its own shard by its own hyperparameters, and writes its own part of what is loaded; so ranks that
disagree would make a model that nobody asked for. They compare checksums, which travel in messages that they send
anyway. Only if these differ do they tell each other the facts themselves, and all raise the same error. Floats are
compared by their bits, and NaN is equal to itself.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from gemini.errors import RankMismatch
from gemini.ranks.agreement import Point
from gemini.ranks.group import checksum_of
from gemini.ranks.handshake import error_called
from gemini.train.params.guard import handle_of, optimizer_of

if TYPE_CHECKING:
    from gemini.train.engine import Engine
    from gemini.train.sharding.shards import Shards
    from gemini.train.update.optimizer import HybridOptimizer

_REFUSES = -1
_LOW = 2**32


class Facts:
    """Values by what they are called, and columns with a value for each param in the order of the model."""

    def __init__(self, values: dict[str, str], columns: dict[str, array[Any]]):
        self.values = values
        self.columns = columns

    @property
    def checksum(self) -> int:
        """Of 32 bits, never 0."""
        found = zlib.crc32(json.dumps(self.values).encode())
        for column in self.columns.values():
            found = zlib.crc32(column.tobytes(), found)
        return found or 1

    def to_json(self) -> str:
        """For the other ranks, who have the same params."""
        return json.dumps({"values": self.values, "columns": {n: list(map(repr, c)) for n, c in self.columns.items()}})


_COLUMNS: dict[str, Callable[[str], str]] = {
    "the gradient": lambda value: "there" if value == "1" else "none",
    "the param group": lambda value: "none" if value == "-1" else value,
    "requires_grad": lambda value: str(value == "1"),
    "the number of updates": str,
    "the clipping": str,
}
"""What a column is called, and how its values read."""


def gradient_facts(engine: Engine) -> Facts:
    """Which params have a gradient."""
    return Facts({}, {"the gradient": array("b", [handle.has_grad for handle in engine.handles])})


def step_facts(engine: Engine, optimizers: Sequence[HybridOptimizer]) -> Facts:
    """Everything that an update of ``engine``'s params by these optimizers depends on, but the gradients themselves."""
    assert engine.reduction is not None
    values = {
        "clip_grad_norm_": ", ".join(engine.reduction.clippings) or "not called",
        "the number of backwards since the last step": str(engine.reduction.num_backwards),
        "how often zero_grad() dropped gradients since the last step": str(engine.reduction.num_dropped),
    }
    groups: dict[str, int] = {}
    number = 0
    for which, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            label = f"param group {index}" + (f" of optimizer {which}" if len(optimizers) > 1 else "")
            managed = [handle for param in group["params"] if (handle := handle_of(param)) is not None]
            for name in optimizer.defaults if managed else ():
                values[f"{name} of {label}"] = repr(_plain(group.get(name, "not given")))
            for handle in managed:
                groups[handle.name] = number
            number += 1
    if engine.loss_scale is not None:
        values["the loss scale"] = repr(float(engine.loss_scale.scale))
    values["the factor that takes the loss scale out of gradients"] = repr(float(engine.grad_unscale))
    values["the coefficient of clip_grad_norm_"] = repr(float(engine.state.clip_coefficient))
    handles = engine.handles
    return Facts(
        values,
        {
            "the param group": array("q", [groups.get(handle.name, -1) for handle in handles]),
            "requires_grad": array("b", [handle.trained for handle in handles]),
            "the number of updates": array("q", [handle.num_steps for handle in handles]),
            "the clipping": array("d", [handle.clip for handle in handles]),
        },
    )


def owners(engine: Engine) -> list[HybridOptimizer]:
    """The optimizers of the engine's params, in the order of the model."""
    found = {id(o): o for handle in engine.handles if (o := optimizer_of(handle.param)) is not None}
    return list(found.values())


def _plain(value: Any) -> Any:
    """A hyperparameter as it is used: a float, whichever kind of number or tensor it was given as."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # refused, after the ranks have compared it
        return str(value)


def meet_with(shards: Shards, point: Point, gradients: Facts, step: Facts | None) -> list[list[tuple[int, int]]]:
    """Every rank of the model stands at ``point``: the two checksums of each, by replica; 0 for none.

    They travel in one number of 63 bits.
    """
    said = (gradients.checksum >> 1) * _LOW + (0 if step is None else step.checksum)
    return [[divmod(other, _LOW) for other in row] for row in shards.meet_all(point, said)]


def refuse_differing(shards: Shards, doing: str, facts: Facts, *, untouched: str = "No weight") -> None:
    """All ranks of the model come here when their checksums differ: tell each other the facts.

    Raises:
        RankMismatch: naming the first fact that differs, both values and both ranks.
    """
    everyone = shards.ranks.everyone
    heard = [json.loads(text) for text in everyone.exchange_texts(facts.to_json(), doing)]
    names = [handle.name for handle in shards.engine.handles]
    for rank, other in enumerate(heard):
        found = _first_difference(heard[0], other, names)
        if found is not None:
            what, first, second = found
            raise RankMismatch(
                f"{doing}: the ranks disagree about {what}: {first} on rank {everyone.global_ranks[0]}, {second} on "
                f"rank {everyone.global_ranks[rank]}. {untouched} was changed. What is done on one rank must be done "
                "on all of them, with the same values"
            )
    raise RankMismatch(f"{doing}: the ranks disagree. {untouched} was changed")


def _first_difference(
    first: Mapping[str, Any], other: Mapping[str, Any], names: list[str]
) -> tuple[str, str, str] | None:
    for label in {**first["values"], **other["values"]}:
        a, b = first["values"].get(label, "none"), other["values"].get(label, "none")
        if a != b:
            return label, a, b
    for label, column in first["columns"].items():
        for name, a, b in zip(names, column, other["columns"][label], strict=True):
            if a != b:
                return f"{label} of {name!r}", _COLUMNS[label](a), _COLUMNS[label](b)
    return None


def agree_on_step(engine: Engine, optimizer: HybridOptimizer) -> None:
    """``optimizer.step()`` is about to update managed params: all ranks come here, and must be about to do the same.

    The checksum travels in the message with which ranks meet before the norm is added up. If that was sent by
    ``clip_grad_norm_`` already, they meet here once more.

    Raises:
        RankMismatch: on every rank; no weight was changed.
    """
    reduction = engine.reduction
    if reduction is not None and not reduction.sync_grads(step_facts(engine, [optimizer])):
        reduction.confirm(step_facts(engine, [optimizer]))


# ---- values that are loaded or written ---------------------------------------------------------------------------


def value_facts(values: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Checksums of tensors, by what they are called. One after the other: nothing is kept of them."""
    return Facts({f"the values of {name!r}": _sum(value) for name, value in values}, {})


def _sum(value: torch.Tensor) -> str:
    return f"checksum {checksum_of(value):08x} ({str(value.dtype).removeprefix('torch.')})"


def agree_on_optimizer_state(optimizer: HybridOptimizer, state: Mapping[str, Any]) -> None:
    """Every rank is about to load the same state into managed params; called when this rank has nothing against it.

    Raises:
        RankMismatch: on every rank, naming what differs; nothing was changed.
    """
    engine = optimizer.engine()
    if engine is None:
        return

    def facts() -> Facts:
        values: dict[str, str] = {}
        for index, (group, loaded) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            if all(handle_of(param) is None for param in group["params"]):
                continue
            for name in optimizer.defaults:
                values[f"{name} of param group {index}"] = repr(_plain(loaded.get(name, "not given")))
            for key, param in zip(loaded["params"], group["params"], strict=True):
                handle = handle_of(param)
                if handle is None:
                    continue
                for name, value in state["state"].get(key, {}).items():
                    is_values = isinstance(value, torch.Tensor) and value.dim() > 0
                    values[f"{name} of {handle.name!r}"] = _sum(value) if is_values else repr(_plain(value))
        return Facts(values, {})

    agree_on_values(engine, Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts)


def agree_on_values(
    engine: Engine, point: Point, doing: str, facts: Callable[[], Facts], refusal: Exception | None = None
) -> None:
    """Every rank is about to write the same values, or none writes any.

    Args:
        facts: of what this rank writes; not asked for in one process.
        refusal: why this rank will not.

    Raises:
        RankMismatch: on every rank, naming what differs.
        GeminiError: naming the rank that refuses; on that rank the refusal itself.
    """
    shards = engine.shards
    if shards is None or refusal is not None:
        if shards is not None:
            everyone = _flat(shards.meet_all(point, _REFUSES))
            if any(said != _REFUSES for said in everyone):
                _tell(shards, doing, refusal)
        if refusal is not None:
            raise refusal
        return
    found = facts()
    everyone = _flat(shards.meet_all(point, found.checksum))
    if _REFUSES in everyone:
        _tell(shards, doing, None)
    if len(set(everyone)) > 1:
        refuse_differing(shards, doing, found, untouched="Nothing")


def _flat(rows: list[list[int]]) -> list[int]:
    return [said for row in rows for said in row]


def _tell(shards: Shards, doing: str, refusal: Exception | None) -> None:
    """Some ranks refuse, and say why; the others raise that, of the same type if it is one of ours."""
    everyone = shards.ranks.everyone
    said = None if refusal is None else [type(refusal).__name__, str(refusal)]
    heard = [json.loads(text) for text in everyone.exchange_texts(json.dumps(said), doing)]
    for rank, other in enumerate(heard):
        if refusal is None and other is not None:
            raise error_called(other[0])(f"rank {everyone.global_ranks[rank]} refused {doing}: {other[1]}")


def reports_to_all(point: Point, doing: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of an optimizer that calls :func:`agree_on_values`: what it raises before that, all ranks raise."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def reporting(self: HybridOptimizer, *args: Any, **kwargs: Any) -> Any:
            engine = self.engine()
            if engine is None or engine.shards is None:
                return method(self, *args, **kwargs)
            before = engine.shards.num_meetings
            try:
                return method(self, *args, **kwargs)
            except Exception as e:
                if engine.shards.num_meetings == before:
                    agree_on_values(engine, point, doing, lambda: Facts({}, {}), e)
                raise

        return reporting

    return decorate
