"""``gemini`` as tests call it: in this process, with what is expected of the end."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner


class Command:
    """``command("--steps", 3)`` runs it after the words that it was made with.

    The result has ``exit_code``, ``stdout``, ``stderr`` and ``output``.
    """

    def __init__(self, *words: object):
        self._words = words

    def __call__(self, *words: object) -> Any:
        from gemini.cli import app

        return CliRunner().invoke(app, [str(word) for word in (*self._words, *words)])

    def ok(self, *words: object) -> Any:
        """A run that ends well."""
        result = self(*words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def told(self, *words: object) -> Any:
        """What ``--json`` prints, however the command ends."""
        return json.loads(self(*words, "--json").stdout)


def flat(result: Any) -> str:
    """What was said, in one line."""
    return " ".join(result.output.split())


def refused(result: Any, *says: str, begun: bool = False) -> None:
    """It left with 2, one paragraph on stderr that says all of it, no traceback, and, unless begun, an empty stdout."""
    assert result.exit_code == 2, (result.output, result.exception)
    message = " ".join(result.stderr.split())
    assert message.startswith("gemini: ") and "Traceback" not in result.output, result.output
    assert begun or not result.stdout, result.stdout
    for words in says:
        assert words in message, message
