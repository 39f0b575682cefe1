"""Which files are no text, by name and by content: what would be trained on as text without anybody meaning it.

Any encoding is text here, for byte-level tokens take all of them. What gives other files away are the beginnings of
known formats, NUL bytes and control characters, of which text in no encoding has many.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gemini.jobs.errors import JobError
from gemini.jobs.text_files import TextFile

_LOOKED_AT = 1 << 20
"""Bytes of a file's beginning."""
_MOST_CONTROLS = 0.02
_CONTROLS = bytes(set(range(32)) - {*b"\t\n\v\f\r\b\x1a\x1b"}) + b"\x7f"

_BY_SUFFIX = {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON"}
_BY_BEGINNING = {
    b"\x1f\x8b": "compressed (gzip)", b"PK\x03\x04": "compressed (zip)", b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ\x00": "compressed (xz)", b"\x28\xb5\x2f\xfd": "compressed (zstd)", b"7z\xbc\xaf": "compressed (7z)",
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"%PDF-": "PDF", b"\x7fELF": "a program (ELF)", b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image", b"GIF8": "an image", b"SQLite format 3\x00": "a database",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip


def only_text(files: Sequence[TextFile], roots: Sequence[Path]) -> tuple[list[TextFile], str]:
    """The files that are text, and in words those below folders that are not: the first one, and how many more.

    Raises:
        JobError: if one of ``roots`` itself is a file that is no text, or nothing is left.
    """
    given, kept, others = {*map(Path, roots)}, [], []
    for file in files:
        kind = not_text(file.path)
        if kind is None:
            kept.append(file)
        elif file.path in given:
            raise JobError(f"--data {file.path}: this is {kind}, and would be trained on as if it were text. {_REMEDY}")
        else:
            others.append(f"{file.name} is {kind}")
    words = others[0] + (f", and {len(others) - 1} more" if others[1:] else "") if others else ""
    if not kept:
        raise JobError(f"--data: none of the files found ({len(files):,}) is text ({words}). {_REMEDY}")
    return kept, words


_REMEDY = (
    "Rows are read from files named .jsonl or .parquet; of anything else, write the text that is meant into text files "
    "first (unpack, decode), or say --bytes to train on the bytes as they are."
)


def not_text(path: Path) -> str | None:
    """What a file is if it is no text, else None.

    Raises:
        JobError: if it cannot be read.
    """
    kind = _BY_SUFFIX.get(path.suffix.lower())
    if kind is not None:
        return kind
    try:
        with open(path, "rb") as stream:
            data = stream.read(_LOOKED_AT)
    except OSError as e:
        raise JobError(f"{path} cannot be read: {e.strerror or e}.") from e
    for beginning, kind in _BY_BEGINNING.items():
        if data.startswith(beginning):
            return kind
    controls = len(data) - len(data.translate(None, _CONTROLS))
    if b"\0" in data or controls > max(3, _MOST_CONTROLS * len(data)):
        return "binary (it has NUL bytes or many control characters)"
    return "JSON lines" if _are_json_lines(data) else None


def _are_json_lines(data: bytes) -> bool:
    """Whether every whole line of the first ones is a JSON object."""
    lines = [line for line in data[: 1 << 16].split(b"\n") if line.strip()]
    if len(data) > 1 << 16:
        lines.pop()  # cut off
    if not lines or not all(line.lstrip().startswith(b"{") for line in lines):
        return False
    try:
        return all(isinstance(json.loads(line), dict) for line in lines)
    except ValueError:
        return False
