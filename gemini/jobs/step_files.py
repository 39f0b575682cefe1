"""What the commands of planning write beside what they print: a value as JSON, pictures of a step."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.trace import say, write_file
from gemini.planning.timeline import Timeline

_SUFFIXES = (".png", ".svg", ".html", ".json")


def check_pictures(pictures: tuple[Path, ...]) -> None:
    """Before anything is computed for them.

    Raises:
        JobError: for a kind of file that there is no picture for.
    """
    for path in pictures:
        if path.suffix.lower() not in _SUFFIXES:
            raise JobError(f"--picture {path}: a picture is one of {', '.join(_SUFFIXES)}, by the suffix of its name.")


def write_all(
    out: Path | None, value: str, pictures: tuple[Path, ...], timeline: Timeline | None, *, console: Console | None
) -> None:
    """Write ``value`` to ``out``, the pictures of ``timeline``, and what was written where to ``console``.

    Raises:
        JobError: for a file that cannot be written, or without the package that draws.
    """
    written: list[Path] = []
    if out is not None:
        write_file(out, value)
        written.append(out)
    if pictures and timeline is not None:
        from gemini.pictures import draw

        for path in pictures:
            try:
                with as_job_error(asked=f"--picture {path}"):
                    draw(path, timeline)
            except ImportError as e:
                raise JobError(f"--picture {path}: {e}") from e
            written.append(path)
    if console is not None and written:
        say(console, ["", *(f"written to {path}" for path in written)])
