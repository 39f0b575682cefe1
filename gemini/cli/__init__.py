"""The command line ``gemini``: options in, jobs out. Nothing heavy is imported before a command needs it.

``app`` holds what all commands share; each other module holds some commands and adds them to it.
"""

from __future__ import annotations

from gemini.cli import planning as planning
from gemini.cli import training as training
from gemini.cli.app import app as app


def main() -> None:
    """The console script."""
    app()
