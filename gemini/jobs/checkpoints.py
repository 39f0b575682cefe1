"""Where a run keeps its checkpoints: ``OUT/checkpoint-500``, ordinary ones of a Trainer with Gemini's states inside.

A folder under its final name is a whole checkpoint: :mod:`gemini.integrations.huggingface` writes under another name
and renames.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini.errors import human_bytes
from gemini.integrations.huggingface_durable import as_checkpoint, committed
from gemini.integrations.huggingface_save import check_resumable, last_whole, newest
from gemini.jobs.errors import JobError, refusing
from gemini.memory.durable.folder import has_commit

_NEWEST = ("auto", "True", "true")
"""Values of --resume_from_checkpoint that are no folder."""


def choose(resume: str | None, out: Path, *, store: Path | None = None) -> Path | None:
    """The checkpoint to start from, or None to start anew; a JobError if the one named is not there, or starting anew
    would mix with what is in ``out`` or ``store``.

    Args:
        resume: its folder; "auto" or "True" for the newest one, of which the latter must be there.
        store: the folder of the run's durable store.
    """
    kept = None if store is None or not has_commit(store) else committed(store)
    is_own = kept is not None and kept.run == os.path.realpath(out)
    if kept is not None and not is_own and resume in (None, *_NEWEST):
        raise JobError(
            f"--nvme_path {store} holds the durable store of {f'the run in {kept.run}' if kept.run else 'a program'}, "
            "which this run would replace. Give another folder, or go on from it with --resume_from_checkpoint and "
            "this folder."
        )
    if resume in _NEWEST:
        found = newest(str(out), store)
        if found is None and resume != "auto":
            raise JobError(
                f"--resume_from_checkpoint {resume}: {out} has no checkpoint; with auto it would start anew."
            )
        return None if found is None else Path(found)
    if resume is None:
        last = last_whole(str(out))
        if last is None and not is_own:
            return None
        where = f"in the durable store {store}" if last is None else Path(last).name
        raise JobError(
            f"--output_dir {out} holds checkpoints of an earlier run, the newest is {where}. Continue it with "
            "--resume_from_checkpoint auto, or start anew in another --output_dir."
        )
    path = Path(resume)
    with refusing(f"--resume_from_checkpoint {resume}"):
        if (durable := committed(path)) is not None:
            return as_checkpoint(path, durable, out)
        check_resumable(resume)
    return path


def prepare_out(out: Path) -> None:
    """Make the folder, and find out now, not after hours, whether it can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # nameless: several processes may try at once
    except OSError as e:
        raise JobError(f"--output_dir {out} cannot be written to: {e.strerror or e}. Choose another folder.") from e


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Around a run: no other one may write into its folder. The claim ends with the process, however that ends."""
    prepare_out(out)
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise JobError(f"--output_dir {out} is in use: another job writes into it. Give another one.") from e
        yield
    finally:
        os.close(folder)


def check_room(out: Path, params: int, trained: int, keep: int) -> None:
    """Refuse a run whose checkpoints the drive has no room for; one more than is kept exists while it is written."""
    checkpoint = 2 * params + 12 * trained  # weights as a model, and what training goes on from
    free, needed = shutil.disk_usage(out).free, checkpoint * (keep + 1)
    if needed > free:
        raise JobError(
            f"--output_dir {out} has {human_bytes(free)} free, and {keep + 1} checkpoints of {human_bytes(checkpoint)} "
            f"take {human_bytes(needed)}. Choose another drive, a smaller --save_total_limit, or --save_strategy no."
        )
