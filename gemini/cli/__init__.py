"""The command line ``gemini``: options in, jobs out. Nothing heavy is imported before a command needs it.

``app`` is all of it: what the commands are, and how they end.
"""

from __future__ import annotations

import os

from gemini.cli.app import app as app

_SPINS = "1000"
"""How often torch's threads look for work before they sleep (docs/decisions/2026-11-24-threads-that-wait.md)."""


def main() -> int:
    """The console script; returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # libgomp reads it once, when torch is imported
    return app()
