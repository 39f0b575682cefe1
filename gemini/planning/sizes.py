"""A step in another form than it was traced or planned in; ``gemini plan`` looks at so many that tracing each whole
would take minutes. All bytes and all work of a moment are a part that is there once and a part that comes again with
every layer where layers are alike: so a step of many comes from two of few, and so do those with some blocks kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import TypeVar

from gemini.planning.trace import MemoryTrace, Moment, TracedParam, kept_among

# ---- more layers -----------------------------------------------------------------------------------------------------

NUMBERS = [f.name for f in fields(Moment) if f.type == "int"]

SHALLOW, DEEP = 3, 5
"""Layers of the traces that :func:`deepened` reads: a first one, a last one, and one or three between them."""

_LAYER = re.compile(r"((?:[^\W\d]\w*\.)*)(\d+)(?=\.|$)")
"""The path of a module or param up to its layer: the names before, and the first number."""


def _layer_of(name: str) -> int | None:
    return int(found[2]) if (found := _LAYER.match(name)) else None


def _shifted(name: str, by: int) -> str:
    """The same of the layer ``by`` further on, if it is of one."""
    return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + by}", name, count=1) if _LAYER.match(name) else name


def _renamed(param: TracedParam, by: int) -> TracedParam:
    return replace(param, names=tuple(_shifted(name, by) for name in param.names))


def are_alike(params: Sequence[TracedParam]) -> bool:
    """Whether there is one row of layers, and all but the first and the last have the same params."""
    rows = {found[1] for param in params if (found := _LAYER.match(param.name))}
    runs = [(layer, [*own]) for layer, own in groupby(params, key=lambda param: _layer_of(param.name))]
    layers = [(layer, own) for layer, own in runs if layer is not None]
    between = [[_renamed(param, 1 - layer) for param in own] for layer, own in layers[1:-1]]
    return (
        len(rows) == 1 and len({layer for layer, _ in layers}) == len(layers) and between == between[:1] * len(between)
    )


def deepened(three: MemoryTrace, five: MemoryTrace, num_layers: int) -> MemoryTrace:
    """The step of a model of ``num_layers`` layers, from the steps of three and of five of them. That further layers
    are like these is for the caller to know (:func:`are_alike`). Raises ValueError if a step is no walk through the
    layers and back, or differs in more than numbers, or not by as much from layer to layer.
    """
    more, tiled = num_layers - DEEP, None
    if three.tiled is not None and five.tiled is not None:
        tiled = deepened(three.tiled, five.tiled, num_layers)
    params = _deep(five.params, lambda param: _layer_of(param.name), _renamed, more)
    index = {param.name: number for number, param in enumerate(params)}

    def moved(numbers: tuple[int, ...], by: int) -> tuple[int, ...]:
        names = [_shifted(five.params[number].name, by) for number in numbers]
        if any(name not in index for name in names):
            raise ValueError("a moment reads params of a layer that is not there")
        return tuple(index[name] for name in names)

    def layer_read(numbers: tuple[int, ...]) -> int | None:
        return max(
            (layer for number in numbers if (layer := _layer_of(five.params[number].name)) is not None), default=None
        )

    def moment(base: Moment, less: Moment, by: int, further: Sequence[Moment] = ()) -> Moment:
        """``base``, as it is ``by`` layers further on; ``less`` is of the step of three, ``further`` one and two on."""
        numbers = _numbers_of(base, less, further, more=more, by=by)
        where = {"module": _shifted(base.module, by), "params": moved(base.params, by)}
        return replace(base, **where, gradients=moved(base.gradients, by), **numbers)  # type: ignore[arg-type]

    shallow, deep = _walk(three, SHALLOW), _walk(five, DEEP)
    moments: list[Moment] = []
    for (way, layer), own in deep.items():
        if layer in (2, 3):
            continue
        before = shallow.get((way, layer), [])
        if layer == 1:
            alike = [*zip(own, before, deep[way, 2], deep[way, 3], strict=True)]
            between = range(more + 3)
            for by in between if way == "there" else reversed(between):
                moments += [moment(base, less, by, further) for base, less, *further in alike]
            continue
        for base, less in zip(own, before, strict=True):
            # Outside of layers what is read of one is of the first or of the last.
            is_last = layer == -1 or (layer is None and (layer_read((*base.params, *base.gradients)) or 0) > 1)
            moments.append(moment(base, less, more if is_last else 0))
    return replace(
        five,
        params=tuple(params),
        moments=tuple(moments),
        read_together=tuple(_deep(five.read_together, layer_read, moved, more)),
        kept_blocks=num_layers if five.kept_blocks else 0,
        buffer_bytes=five.buffer_bytes + (five.buffer_bytes - three.buffer_bytes) // (DEEP - SHALLOW) * more,
        tiled=tiled,
    )


def _numbers_of(base: Moment, less: Moment, further: Sequence[Moment], *, more: int, by: int) -> dict[str, int]:
    """What a moment ``by`` layers behind ``base`` does and holds, in a step of so many ``more`` layers. Raises
    ValueError if it is not the same for each layer.
    """
    alike = (less, *further)
    if any((m.phase, m.products, m.attention) != (base.phase, base.products, base.attention) for m in alike):
        raise ValueError(f"{base.module} has other work in another layer")
    numbers = {}
    for name in NUMBERS:
        own, before, *later = (getattr(m, name) for m in (base, *alike))
        slope = later[0] - own if later else 0
        if (own - before) % (DEEP - SHALLOW) or (later and later[1] - later[0] != slope):
            raise ValueError(f"{name} of {base.module} does not grow evenly with layers")
        numbers[name] = own + (own - before) // (DEEP - SHALLOW) * more + slope * (by if later else 0)
    return numbers


T = TypeVar("T")


def _deep(
    of_five: Sequence[T], layer_of: Callable[[T], int | None], moved: Callable[[T, int], T], more: int
) -> list[T]:
    """The items of five layers in their order, with so many more of the second."""
    found: list[T] = []
    for layer, group in groupby(of_five, key=layer_of):
        own = [*group]
        if layer == 1:
            found += [moved(each, by) for by in range(more + 3) for each in own]
        elif layer not in (2, 3):
            found += [moved(each, more if layer == 4 else 0) for each in own]
    return found


def _walk(trace: MemoryTrace, num_layers: int) -> dict[tuple[str, int | None], list[Moment]]:
    """The moments of a step by where they are: before the layers, from the begin of each to that of the next (the last
    one is -1), between the way there and the way back, after. On the way back a layer may do what the one behind it has
    left, so it begins where it is first seen. Raises ValueError if it goes another way.
    """
    last, layers = num_layers - 1, [_layer_of(moment.module) for moment in trace.moments]
    if set(layers) != {None, *range(num_layers)}:
        raise ValueError(f"a step of {num_layers} layers goes through {set(layers)}")
    turn = layers.index(None, layers.index(last)) if None in layers[layers.index(last) :] else len(layers)
    end = len(layers) - next(number for number, layer in enumerate(reversed(layers)) if layer is not None)
    found: dict[tuple[str, int | None], list[Moment]] = {}
    place: tuple[str, int | None] = ("before", None)
    for number, (layer, moment) in enumerate(zip(layers, trace.moments, strict=True)):
        at = last if place[1] == -1 else place[1]
        if number in (turn, end):
            place = ("between" if number == turn else "after", None)
        elif layer is not None and (number < turn or at is None or layer < at):
            place = ("there" if number < turn else "back", -1 if layer == last else layer)
        found.setdefault(place, []).append(moment)
    there = [*range(last), -1]
    walk = [("there", layer) for layer in there] + [("between", None)] + [("back", layer) for layer in there[::-1]]
    if [place for place in found if place[0] not in ("before", "after")] != walk:
        raise ValueError(f"a step of {num_layers} layers goes through them in another order: {[*found]}")
    return found


# ---- blocks that are kept --------------------------------------------------------------------------------------------


def with_kept(none: MemoryTrace, every: MemoryTrace, number: int) -> MemoryTrace:
    """The step in which ``number`` blocks keep their activations (:func:`kept_among`), of those in which ``none`` of
    them does, and ``every`` one: each block as it is in one of them, with what those before it keep. Raises ValueError
    for a step that is no walk through the blocks and back.
    """
    if not number:
        return none
    tiled = with_kept(none.tiled, every.tiled, number) if none.tiled and every.tiled else None
    of_none, of_every = (_walk(trace, every.kept_blocks) for trace in (none, every))
    last, kept = every.kept_blocks - 1, kept_among(every.kept_blocks, number)

    # By block, bytes that all before it keep more in ``every``, looked at when what they read is gone.
    begins = [("there", block) for block in (*range(last), -1)]
    more = [of_every[place][0].live_bytes - of_none[place][0].live_bytes for place in begins]
    keeps = [own - more[0] for own in more]
    # By block, of those before it the ones that are kept here.
    there = [sum(keeps[k + 1] - keeps[k] for k in kept if k < block) for block in range(last + 1)]
    moments: list[Moment] = []
    for (way, block), own in of_none.items():
        if way in ("before", "after"):
            moments += own
            continue
        at = last if block in (-1, None) else block
        is_kept = way == "between" or at in kept
        by = there[at] - (keeps[at] if is_kept else 0)
        moments += [
            replace(m, live_bytes=m.live_bytes + by, peak_bytes=m.peak_bytes + by)
            for m in (of_every[way, block] if is_kept else own)
        ]
    return replace(every, moments=tuple(moments), kept_blocks=number, tiled=tiled)
