"""Plain timers around functions of the engine: where a step's time goes, for two looks at the clock a call."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Place = tuple[Any, str, str]
"""A class or module, the name of one of its functions, and what is told of it."""


@contextmanager
def timed(places: Sequence[Place], charged: str = "") -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Seconds of every call while the block runs, by what is told of it: with and without other places inside.

    ``charged``: a place whose calls are told as a part of whatever calls them.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    around: list[str] = []
    inside: list[float] = []

    def wrapped(real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = f"{around[-1].partition(':')[0]}: {what}" if what == charged and around else what
            around.append(what)
            inside.append(0.0)
            begin = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                taken = time.perf_counter() - begin
                around.pop()
                found.setdefault(name, []).append((taken, taken - inside.pop()))
                if inside:
                    inside[-1] += taken

        return call

    before = [(owner, name, getattr(owner, name), what) for owner, name, what in places if hasattr(owner, name)]
    try:
        for owner, name, real, what in before:
            setattr(owner, name, wrapped(real, what))
        yield found
    finally:
        for owner, name, real, _ in before:
            setattr(owner, name, real)
