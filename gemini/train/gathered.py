"""``model.gathered()``: full weights to look at, and to write, where the writes become the masters exactly."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gemini.errors import RankMismatch
from gemini.ranks.agreement import Point
from gemini.train.guard import ParamHandle

if TYPE_CHECKING:
    from gemini.train.engine import Engine


@contextmanager
def gathered(engine: Engine, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
    """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.

    An exception inside undoes what was written. With several ranks each writes its shard, so all must write the same.
    """
    chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
    # Of weights that are changed in place nothing else tells what they were, so that the rest keeps its residual.
    before: dict[str, torch.Tensor] = {}
    if write:
        for chunk in chunks:
            engine.updates.wait(chunk)
        before = {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
    try:
        with engine.open_gathered(chunks):
            if write:
                for chunk in chunks:
                    engine.before_write(chunk)  # one that never moves is written in place
            try:
                yield
                if write:
                    _check_same_on_all(engine, handles)
            except BaseException:
                for handle in handles:
                    handle.version = handle.param._version
                    if handle.name in before:
                        handle.view.copy_(before[handle.name])
                raise
            if write:
                for handle in handles:
                    engine.by_names.take_over(handle, before.get(handle.name))
    finally:
        if write:
            engine.manager.drop(chunks)
            engine.manager.refresh_lent()


def _check_same_on_all(engine: Engine, handles: list[ParamHandle]) -> None:
    """Refuse, before any master changes, what was not written alike on every rank.

    Raises:
        RankMismatch: on every rank.
    """
    if engine.shards is None:
        return
    checksum = 0
    for handle in handles:
        data = handle.view.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy().data, checksum)
    everyone = engine.shards.meet(Point.WRITE, checksum)
    if len(set(everyone)) > 1:
        raise RankMismatch(
            f"gathered(write=True): the ranks wrote different values to {handles[0].name!r} and what was gathered with "
            "it (or only some of them wrote). Nothing was changed: write the same on every rank, for example what "
            "rank 0 has broadcast"
        )
