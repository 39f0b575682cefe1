"""Running planner and storage of a checkpoint under DCP, on all ranks of a model, or in one process without it.

In one process the same planners and storages are called one after the other, without any process group. An error of one
rank is raised on all of them, as one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from gemini.errors import GeminiError, RankLost, StorageError
from gemini.train.sharding.consensus import error_called


def save(planner: SavePlanner, writer: StorageWriter, group: dist.ProcessGroup | None, doing: str) -> None:
    """Plan, write and finish, on all ranks or on none.

    Raises:
        GeminiError: on every rank, naming the one that failed.
    """
    if group is not None:
        with _news_of_failures(doing, group):
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
        return
    planner.set_up_planner({}, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def load(planner: LoadPlanner, reader: StorageReader, group: dist.ProcessGroup | None, doing: str) -> None:
    """Plan (with every check), then read. If the plan fails on any rank, none has changed anything.

    Raises:
        GeminiError: on every rank, naming the one that failed.
    """
    if group is not None:
        with _news_of_failures(doing, group):
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group)
        return
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


@contextmanager
def _news_of_failures(doing: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except CheckpointException as e:
        raise _as_ours(doing, e, group) from e
    except GeminiError:
        raise
    except RuntimeError as e:
        raise RankLost(
            f"{doing} failed: {e}. Another rank died, was stopped, or hangs: its own output says why. Start again from "
            "the last checkpoint (torchrun --max-restarts does it)"
        ) from e


def _as_ours(doing: str, news: CheckpointException, group: dist.ProcessGroup) -> BaseException:
    """One error for what failed on some ranks; an interrupt of this one stays what it is."""
    own: Any = news.failures.get(dist.get_rank(group))
    if own is not None and not isinstance(own[0], Exception):
        return own[0]
    rank, (cause, _) = min(news.failures.items())
    others = f" (and {len(news.failures) - 1} more ranks)" if len(news.failures) > 1 else ""
    name = dist.get_global_rank(group, rank)
    if isinstance(cause, OSError):
        return StorageError(f"{doing} failed on rank {name}{others}: {cause.strerror or cause}")
    if isinstance(cause, GeminiError):
        return error_called(type(cause).__name__)(f"{doing} failed on rank {name}{others}: {cause}")
    return GeminiError(f"{doing} failed on rank {name}{others}: {type(cause).__name__}: {cause}")
