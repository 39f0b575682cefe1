"""Settings of the kernels that tests and benchmarks change, and no program: instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini import kernels


@contextmanager
def use_isa(name: str | None) -> Iterator[None]:
    """Run the kernels of the process with one instruction set; None is the best. ValueError if it cannot run here."""
    chosen = list(kernels._isas)[-1] if name is None else name
    if chosen not in kernels._isas:
        raise ValueError(f"instruction set {chosen!r} cannot run here; there are {', '.join(kernels._isas)}")
    before = kernels._isa_name, kernels._isa, kernels._only_reference
    kernels._isa_name, kernels._isa, kernels._only_reference = chosen, kernels._isas[chosen], name == "reference"
    try:
        yield
    finally:
        kernels._isa_name, kernels._isa, kernels._only_reference = before


def set_num_threads(n: int) -> None:
    """Set how many threads share one call of a native kernel, the caller counted; at first the CPUs of the process."""
    if n < 1:
        raise ValueError(f"there must be at least 1 thread, not {n}")
    kernels._num_threads = n
    if kernels._native is not None:
        kernels._native.set_num_threads(n)
