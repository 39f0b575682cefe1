"""What a job says when it cannot do what was asked: one paragraph for a person, no traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class JobError(Exception):
    """The request or its files are at fault. The message says what was asked, what is there and what to do."""


@contextmanager
def as_job_error(*, asked: str) -> Iterator[None]:
    """Turn a ``ValueError``, ``TypeError`` or ``OSError`` of checked input into a ``JobError`` naming what was asked.

    Wrap only code whose errors are about the user's values, never the training itself: a bug must keep its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as e:
        raise JobError(f"{asked}: {e}") from e
