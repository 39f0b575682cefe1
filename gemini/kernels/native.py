"""The native library, if there is one: the only module that loads gemini._C. For gemini.kernels."""

from __future__ import annotations

import importlib
import os
from typing import Any

_INTERFACE = 9  # of the signatures in csrc/bindings.cpp, and of the bits


def load() -> tuple[Any, str | None]:
    """The native module, or None and why not."""
    if os.environ.get("GEMINI_NATIVE") == "0":
        return None, "GEMINI_NATIVE=0 is set"
    try:
        native = importlib.import_module("gemini._C")
    except ImportError as error:
        return None, f"gemini._C cannot be loaded ({error}); install with a C++ compiler and pybind11 to build it"
    if getattr(native, "INTERFACE", None) != _INTERFACE:
        return None, "gemini._C was built from another version of the sources; build it again"
    return native, None


native, why_not = load()
