"""Plain text as training sequences: which files, which of them are no text, and their ids as rows of even length.

The list of files is the same on every machine that has the same files under the same roots, whatever the order of the
directory entries, so that a shuffle drawn over it can be resumed elsewhere. Any encoding is text here, for byte-level
tokens take all of them. What gives other files away are the beginnings of known formats, NUL bytes and control
characters, of which text in no encoding has many. Ids are encoded once into a file that has no name and goes away with
the process, so that a corpus of any size costs no memory; each of several processes encodes into one of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

from gemini.jobs.errors import JobError
from gemini.jobs.settings import DEFAULT_GLOBS


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


# ---- which of them are no text ---------------------------------------------------------------------------------------

_LOOKED_AT = 1 << 20
"""Bytes of a file's beginning."""
_MOST_CONTROLS = 0.02
_CONTROLS = bytes(set(range(32)) - {*b"\t\n\v\f\r\b\x1a\x1b"}) + b"\x7f"

_BY_SUFFIX = {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON"}
_BY_BEGINNING = {
    b"\x1f\x8b": "compressed (gzip)",
    b"PK\x03\x04": "compressed (zip)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ\x00": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"7z\xbc\xaf": "compressed (7z)",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"%PDF-": "PDF",
    b"\x7fELF": "a program (ELF)",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"SQLite format 3\x00": "a database",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


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


# ---- sequences of their ids ------------------------------------------------------------------------------------------

BYTE_BOUNDARY = 256
BYTE_VOCABULARY = 257
# A file is encoded in pieces of about this many characters, cut at line ends: a tokenizer needs many times its input.
_PIECE = 1 << 20


class TextSequences(Dataset[dict[str, torch.Tensor]]):
    """``num_tokens`` ids in sequences of ``sequence_tokens``; what does not fill the last one is left out.

    Args:
        tokenizer: None for bytes: ids 0..255, 256 ends a document, and text need not be UTF-8.

    Raises:
        JobError: if the text is shorter than one sequence, cannot be read, or there is no room for it in ``scratch``.
    """

    def __init__(self, files: Sequence[TextFile], tokenizer: Any, sequence_tokens: int, *, scratch: Path) -> None:
        # Unlinked from the start where the system can do it (O_TMPFILE), so that no death leaves it behind.
        self._file = tempfile.TemporaryFile(dir=scratch)
        self.num_tokens = 0
        for file in files:
            for ids in _encoded(file, tokenizer):
                try:
                    self._file.write(numpy.asarray(ids, dtype=numpy.uint32).tobytes())
                except OSError as e:
                    raise JobError(f"Cannot keep the encoded text in {scratch}: {e.strerror}. Is there room?") from e
                self.num_tokens += len(ids)
        self._file.flush()
        count = self.num_tokens // sequence_tokens
        if count < 1:
            raise JobError(
                f"The text has {self.num_tokens} tokens; sequences of --seq-len {sequence_tokens} need at least "
                f"{sequence_tokens}. Give more text, or a shorter --seq-len."
            )
        self._row = numpy.memmap(self._file, dtype=numpy.uint32, mode="r", shape=(count, sequence_tokens))

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._row[index].astype(numpy.int64))
        return {"input_ids": ids, "labels": ids}


def _encoded(file: TextFile, tokenizer: Any) -> Iterator[Any]:
    boundary = BYTE_BOUNDARY if tokenizer is None else tokenizer.eos_token_id
    try:
        if tokenizer is None:
            with open(file.path, "rb") as stream:
                while piece := stream.read(_PIECE):
                    yield numpy.frombuffer(piece, dtype=numpy.uint8)
        else:
            with open(file.path, encoding="utf-8", newline="") as text:
                while lines := text.readlines(_PIECE):
                    # verbose=False: a document longer than the model can read is cut later, nothing to warn about.
                    yield tokenizer.encode("".join(lines), add_special_tokens=False, verbose=False)
    except UnicodeDecodeError as e:
        raise JobError(
            f"{file.path} is not UTF-8 text ({e.reason}), and the model's tokenizer needs UTF-8. Convert the file "
            "(iconv -t UTF-8), leave it out with --glob, or train byte-level with --bytes: then every byte is a token."
        ) from e
    except OSError as e:
        raise JobError(f"{file.path} cannot be read: {e.strerror or e}.") from e
    if boundary is not None:
        yield [boundary]
