"""What all tests share: no network, one torch thread, and lines that tests want to see at the end of the run.

torch's own products change bits between one thread and two on some shapes, so a comparison of bits needs a fixed count.
The product never sets one; the tests do, here. A test that counts what it saw (``summary("180 placements ...")``) is
reported after the run, because a property test that never met its hard cases proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

# Before transformers is imported: no test may look for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

torch.set_num_threads(1)

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line now and once more at the end of the run."""
    lines = request.config.stash.setdefault(_LINES, [])

    def say(line: str) -> None:
        print(line)
        lines.append(line)

    return say


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes (pytest-xdist): the first one reports
        session.config.workeroutput["seen"] = session.config.stash.get(_LINES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    node.config.stash.setdefault(_LINES, []).extend(getattr(node, "workeroutput", {}).get("seen", []))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("what the tests saw")
        for line in lines:
            terminalreporter.write_line(line)
