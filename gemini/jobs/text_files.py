"""Which files a job reads: paths and folders, as given on the command line, to one sorted list with sizes.

The list is the same on every machine that has the same files under the same roots, whatever the order of the directory
entries, so that a shuffle drawn over it can be resumed elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from gemini.jobs.errors import JobError

DEFAULT_GLOBS = ("*.txt", "*.md", "*.py")


class TextFile(NamedTuple):
    """One file of a corpus: where it is, its name below the root that was given, and its size in bytes."""

    path: Path
    name: str
    num_bytes: int


def find_text_files(
    roots: Sequence[Path | str], globs: Sequence[str] = DEFAULT_GLOBS, *, without_folders: Collection[str] = ()
) -> list[TextFile]:
    """The non-empty files under ``roots``: a file as itself, a folder searched recursively for ``globs``.

    Links to files are followed, links to folders are not (they may loop). A file reached twice counts once. Folders
    below a root whose name is in ``without_folders`` are left out.

    Raises:
        JobError: if a root does not exist or cannot be read, or nothing with text in it is found.
    """
    if not roots:
        raise JobError("No text was given to train on. Name files or folders with --data.")
    found: dict[Path, TextFile] = {}
    num_empty = 0
    for root in map(Path, roots):
        for path, name in _below(root, globs, without_folders):
            try:
                real, num_bytes = path.resolve(), path.stat().st_size
                readable = os.access(path, os.R_OK)
            except OSError as e:
                raise JobError(f"--data {root}: cannot look at {path}: {e.strerror or e}.") from e
            if not readable:
                raise JobError(f"--data {root}: {path} cannot be read: permission denied. Grant it or leave it out.")
            if num_bytes == 0:
                num_empty += 1
            elif real not in found:
                found[real] = TextFile(path, name, num_bytes)
    if not found:
        where = ", ".join(str(root) for root in roots)
        what = f"are only empty files ({num_empty})" if num_empty else f"is no file that matches {' '.join(globs)}"
        raise JobError(f"--data {where}: there {what}. Name files with text, or other patterns with --glob.")
    # Two roots may hold the same relative name; the path decides then.
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def fingerprint(files: Sequence[TextFile]) -> str:
    """Names and sizes of the files as one short digest. Contents are not read: a corpus may be terabytes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.num_bytes}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _below(root: Path, globs: Sequence[str], without_folders: Collection[str]) -> list[tuple[Path, str]]:
    """The candidates under one root, with the names the order and the fingerprint go by."""
    if root.is_file():
        return [(root, root.name)]
    if not root.exists():
        raise JobError(
            f"--data {root}: there is no such file or folder. Check the path (it is relative to {Path.cwd()})."
        )
    if not root.is_dir():
        raise JobError(f"--data {root}: this is neither a file nor a folder. Give text files or folders of them.")
    if not os.access(root, os.R_OK | os.X_OK):
        raise JobError(f"--data {root}: the folder cannot be read: permission denied.")
    paths = {path for glob in globs for path in root.rglob(glob) if path.is_file()}
    names = {path: path.relative_to(root) for path in paths}
    return [(path, name.as_posix()) for path, name in names.items() if not {*name.parent.parts} & {*without_folders}]
