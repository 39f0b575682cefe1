"""What a job says when it cannot do what was asked: one paragraph for a person, no traceback, an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini.errors import GeminiError, RankLost

REFUSED, BROKEN = 2, 1


class JobError(GeminiError):
    """The request or its files are at fault. The message says what was asked, what is there and what to do."""


class SaidByRanks(JobError):
    """The end of a job of several processes, once they know who of them says why: ``str(e)`` is empty on the others."""

    def __init__(self, words: str, exit_code: int = REFUSED) -> None:
        super().__init__(words)
        self.exit_code = exit_code


def exit_code_of(error: Exception) -> int:
    """2 for what was refused; 1 if the job itself broke, because another process of it is gone."""
    if isinstance(error, SaidByRanks):
        return error.exit_code
    return BROKEN if isinstance(error, RankLost) else REFUSED


@contextmanager
def as_job_error(*, asked: str) -> Iterator[None]:
    """Turn a ``ValueError``, ``TypeError`` or ``OSError`` of checked input into a ``JobError`` naming what was asked.

    Wrap only code whose errors are about the user's values, never the training itself: a bug must keep its traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as e:
        raise JobError(f"{asked}: {e}") from e


@contextmanager
def refusing(asked: str, hint: str = "", *, innermost: bool = False) -> Iterator[None]:
    """Turn whatever another library trips over in the block, which comes from the files and options that it was given,
    into a ``JobError`` naming what was asked, with a ``hint`` behind it. ``innermost``: say its first cause.
    """
    try:
        yield
    except (JobError, MemoryError):
        raise
    except Exception as e:
        cause: BaseException = e
        while innermost and cause.__cause__ is not None:
            cause = cause.__cause__
        words = " ".join(str(cause).split())[:400]
        said = str(e) if isinstance(e, GeminiError) else f"{type(cause).__name__}: {words}"
        raise JobError(f"{asked}: {said}{hint}") from e
