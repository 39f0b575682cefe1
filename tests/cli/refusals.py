"""What the command line says when it refuses."""

from __future__ import annotations

from typing import Any


def refused(result: Any, *says: str, begun: bool = False) -> None:
    """It left with 2, one paragraph on stderr that says all of it, no traceback, and, unless begun, an empty stdout."""
    assert result.exit_code == 2, (result.output, result.exception)
    message = " ".join(result.stderr.split())
    assert message.startswith("gemini: ") and "Traceback" not in result.output, result.output
    assert begun or not result.stdout, result.stdout
    for words in says:
        assert words in message
