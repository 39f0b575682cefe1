"""The jobs behind the command line, from HF configs and text files, and what they say when they cannot do what was
asked: one paragraph for a person, no traceback, an exit code. ``gemini.cli`` imports a job when a command needs it, for
torch takes seconds to load.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gemini.errors import GeminiError

# PEFT imports it where it is installed, and on a CPU it tells each process of kernels that nobody asked for.
for _package in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # the last one of classes that torchao registers
    logging.getLogger(_package).setLevel(logging.ERROR)

REFUSED, BROKEN = 2, 1


class JobError(GeminiError):
    """The request or its files are at fault. The message says what was asked, what is there and what to do."""


@contextmanager
def refusing(asked: str, hint: str = "") -> Iterator[None]:
    """Turn what another library trips over in the block into a ``JobError`` with its first cause and ``hint``. Wrap
    only code whose errors are about the user's values, never the training itself: a bug must keep its traceback.
    """
    try:
        yield
    except (JobError, MemoryError):
        raise
    except Exception as e:
        cause: BaseException = e
        while cause.__cause__ is not None and not isinstance(cause, GeminiError):
            cause = cause.__cause__
        is_plain = isinstance(cause, GeminiError | ValueError | TypeError | OSError | ImportError)
        words = str(cause) if isinstance(cause, GeminiError) else " ".join(str(cause).split())[:400]
        # Of a RuntimeError from a StopIteration contextlib thinks that Python has made it, and raises the latter.
        raise JobError(f"{asked}: {'' if is_plain else f'{type(cause).__name__}: '}{words}{hint}") from (
            None if isinstance(e, StopIteration) else e
        )
