"""Collectives of other code (a Trainer's own, accelerate's): when a rank is gone they fail in torch's words, one of
which says nothing of ranks. Told here as Gemini tells of its own.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gemini.errors import GeminiError, RankLost
from gemini.ranks.wire import lost

_OF_TORCH = str(Path(dist.__file__).parent)
_GONE = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|remote process|aborted", re.I)
"""What gloo, NCCL and the store say of a rank that does not answer (torch 2.11 to 2.13)."""


@contextmanager
def collectives_of(whom: str) -> Iterator[None]:
    """Around code of ``whom``: a collective of torch in it that fails because a rank is gone is a lost rank.

    Raises:
        RankLost: instead of torch's error; it names the rank where there is one other only.
    """
    try:
        yield
    except GeminiError:
        raise
    except RuntimeError as e:
        if not _is_of_a_lost_rank(e):
            raise
        what = f"a collective of {whom}"
        if dist.is_initialized() and dist.get_world_size() == 2:
            raise lost(1 - dist.get_rank(), what, e) from e
        raise RankLost(
            f"{what} failed: {e}. Another rank died, was stopped, or hangs: its own output says why. Start again from "
            "the last checkpoint (torchrun --max-restarts does it)"
        ) from e


def _is_of_a_lost_rank(error: RuntimeError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OF_TORCH) and _GONE.search(str(error)) is not None
