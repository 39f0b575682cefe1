"""Commands let torch's threads sleep soon, unless the user has said how they wait."""

from __future__ import annotations

import os

import pytest

from gemini import cli


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["nothing", "spins", "policy"],
)
def test_how_threads_wait(given: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(cli, "app", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cli.main()
    assert seen == [found]
