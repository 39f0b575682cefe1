"""Plain text as training sequences: files through a tokenizer, or as bytes, into one row of ids that is cut evenly.

The row is encoded once into a file that has no name and goes away with the process, so that a corpus of any size costs
no memory; each of several processes encodes into one of its own. A boundary id stands after every document.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from gemini.jobs.errors import JobError
from gemini.jobs.text_files import TextFile

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
