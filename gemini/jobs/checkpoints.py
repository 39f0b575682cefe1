"""Where a run keeps its checkpoints: ``OUT/checkpoints/step-00000500``, newest last, the oldest removed.

A folder under its final name is a whole checkpoint: ``gemini.save_checkpoint`` writes under another name and renames.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from gemini.errors import StorageError
from gemini.jobs.errors import JobError
from gemini.train.checkpoint import replacing

_NAME = re.compile(r"step-(\d{8,})")


def checkpoints_in(out: Path) -> list[Path]:
    """The checkpoints of the run in ``out``, by step."""
    folder = out / "checkpoints"
    found = (
        [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()] if folder.is_dir() else []
    )
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def checkpoint_path(out: Path, step: int) -> Path:
    """The name of the checkpoint after ``step`` steps."""
    return out / "checkpoints" / f"step-{step:08d}"


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest ``keep``. Called after a newer one is whole, so one is always there."""
    for path in checkpoints_in(out)[:-keep]:
        replacing.discard(path)


def clean_up(out: Path) -> None:
    """Remove what killed saves and removals have left, and let a whole checkpoint that was being replaced stand again.

    Called by one process before the first step of a run; what another living process is writing is left alone.
    """
    folder = out / "checkpoints"
    replacing.clean_up(folder, lambda name: _NAME.fullmatch(name) is not None)
    for path in folder.glob(".step-*.removed"):  # as removals were called once
        replacing.remove(path)


def choose(resume: str | None, out: Path, *, overwrite: bool) -> Path | None:
    """The checkpoint to start from, or None to start anew.

    Raises:
        JobError: if the one named is not there, or starting anew would mix with, or write over, what is in ``out``.
    """
    there = checkpoints_in(out)
    if resume == "auto":
        return there[-1] if there else None
    if resume is not None:
        path = Path(resume)
        try:
            replacing.find(replacing.place_of(path))
        except StorageError as e:
            raise JobError(
                f"--resume {resume}: there is no such checkpoint folder. Give one such as {checkpoint_path(out, 500)}, "
                "or 'auto' for the newest in --out."
            ) from e
        inside = checkpoints_in(path)
        if inside:  # the run's folder was given, not one of its checkpoints
            raise JobError(f"--resume {resume}: this is the folder of a run. Its newest checkpoint is {inside[-1]}.")
        return path
    if there:
        raise JobError(
            f"--out {out} holds checkpoints of an earlier run, the newest is {there[-1].name}. Continue it with "
            "--resume auto, or start anew in another --out."
        )
    if not overwrite and any(out.glob("*.safetensors")):
        raise JobError(f"--out {out} holds a model already. Choose another --out, or remove it first.")
    return None


def prepare_out(out: Path) -> None:
    """Make the folder, and find out now, not after hours, whether it can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # nameless: several processes may try at once
    except OSError as e:
        raise JobError(f"--out {out} cannot be written to: {e.strerror or e}. Choose a folder you may write to.") from e
