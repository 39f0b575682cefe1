"""Text files as one long row of token ids that can be read anywhere: bytes as they are, or through a tokenizer.

Both kinds put a boundary id after every document and answer ``read(start, count)`` from disk, so that a corpus of any
size costs no memory. ``ByteTokens`` reads the text files themselves; ``TokenizerTokens`` encodes them once into a
file that has no name and goes away with the process; each of several processes encodes into one of its own.
"""

from __future__ import annotations

import bisect
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from gemini.jobs.errors import JobError
from gemini.jobs.text_files import TextFile

BYTE_BOUNDARY = 256
BYTE_VOCABULARY = 257
_ID_TYPE = "I"
_ID_BYTES = array(_ID_TYPE).itemsize
# A file is encoded in pieces of about this many characters, cut at line ends: a tokenizer needs many times its input.
_PIECE_CHARS = 1 << 20


class Tokens(Protocol):
    """A row of ``num_tokens`` ids, each below ``vocabulary``."""

    num_tokens: int
    vocabulary: int

    def read(self, start: int, count: int) -> array[int]:
        """Ids ``start`` to ``start + count``, which must lie within the row."""
        ...

    def describe(self) -> str:
        """A few words for the job's first lines."""
        ...


class ByteTokens:
    """Every byte is an id, 256 ends each document. Any file is valid input: bytes need not be UTF-8."""

    def __init__(self, files: Sequence[TextFile]) -> None:
        self._files = list(files)
        # _ends[i] is the position after the boundary of file i.
        self._ends = list(accumulate(file.num_bytes + 1 for file in files))
        self.num_tokens = self._ends[-1] if self._ends else 0
        self.vocabulary = BYTE_VOCABULARY

    def read(self, start: int, count: int) -> array[int]:
        ids = array(_ID_TYPE)
        index = bisect.bisect_right(self._ends, start)
        while len(ids) < count:
            file, end = self._files[index], self._ends[index]
            offset = start + len(ids) - (end - file.num_bytes - 1)
            wanted = min(count - len(ids), file.num_bytes - offset)
            ids.extend(_read_bytes(file, offset, wanted))
            if len(ids) < count:
                ids.append(BYTE_BOUNDARY)
            index += 1
        return ids

    def describe(self) -> str:
        return "byte-level tokens (ids 0..255, 256 ends a document; text need not be UTF-8)"


class TokenizerTokens:
    """Ids of a Hugging Face tokenizer, its end-of-text id (if it has one) after each document. Text must be UTF-8."""

    def __init__(self, files: Sequence[TextFile], tokenizer: Any, *, scratch: Path, origin: str = "tokenizer") -> None:
        self._origin = origin
        self._boundary: int | None = tokenizer.eos_token_id
        self.vocabulary = len(tokenizer)
        # Unlinked from the start where the system can do it (O_TMPFILE), so that no death leaves it behind.
        self._file = tempfile.TemporaryFile(dir=scratch)
        try:
            self.num_tokens = sum(self._encode(file, tokenizer) for file in files)
            self._file.flush()
        except OSError as e:
            raise JobError(f"Cannot keep the encoded text in {scratch}: {e.strerror or e}. Is there room on it?") from e

    def _encode(self, file: TextFile, tokenizer: Any) -> int:
        num_tokens = 0
        for piece in _pieces(file):
            # verbose=False: a document longer than the model's window is cut later, it is nothing to warn about.
            ids = array(_ID_TYPE, tokenizer.encode(piece, add_special_tokens=False, verbose=False))
            ids.tofile(self._file)
            num_tokens += len(ids)
        if self._boundary is not None:
            array(_ID_TYPE, [self._boundary]).tofile(self._file)
            num_tokens += 1
        return num_tokens

    def read(self, start: int, count: int) -> array[int]:
        ids = array(_ID_TYPE)
        ids.frombytes(os.pread(self._file.fileno(), count * _ID_BYTES, start * _ID_BYTES))
        assert len(ids) == count, f"read {len(ids)} of {count} ids at {start} of {self.num_tokens}"
        return ids

    def describe(self) -> str:
        boundary = "no id between documents" if self._boundary is None else f"{self._boundary} ends a document"
        return f"{self._origin} with {self.vocabulary} ids, {boundary}"


def _read_bytes(file: TextFile, offset: int, count: int) -> bytes:
    """Exactly ``count`` bytes of a file, or a clear error: it was listed with its size, and must not have shrunk."""
    try:
        with open(file.path, "rb") as stream:
            stream.seek(offset)
            data = stream.read(count)
    except OSError as e:
        raise JobError(f"{file.path} was there when the job began and cannot be read now: {e.strerror or e}.") from e
    if len(data) != count:
        raise JobError(
            f"{file.path} had {file.num_bytes} bytes when the job began and is shorter now. Train on files that do not "
            "change, a copy for example."
        )
    return data


def _pieces(file: TextFile) -> Iterator[str]:
    """The text of one file in pieces that end with a line."""
    try:
        with open(file.path, encoding="utf-8", newline="") as stream:
            while lines := stream.readlines(_PIECE_CHARS):
                yield "".join(lines)
    except UnicodeDecodeError as e:
        raise JobError(
            f"{file.path} is not UTF-8 text ({e.reason}), and the model's tokenizer needs UTF-8. Convert the file "
            "(iconv -t UTF-8), leave it out with --glob, or train byte-level with --bytes: "
            "then every byte is a token."
        ) from e
    except OSError as e:
        raise JobError(f"{file.path} cannot be read: {e.strerror or e}.") from e
