"""Commit records: the one place that says which slots of a store hold a whole step. The format of the record files.

A rank has two record files and writes the one that does not hold its last commit, after everything that the record
names has reached the drive. A record is good if it is whole, which its checksum tells; one that was torn by a power cut
is none, and the other one is there. ``docs/reference/durable-format.md`` has the same as a table of bytes.

    offset  bytes  what
    0       8      b"GEMINI\\x00C"
    8       4      version of the format, little-endian as all numbers
    12      4      CRC-32 of all that follows
    16      8      sequence number of the commit
    24      8      J, bytes of the text
    32      8      T, bytes of the tensors
    40      J      text: JSON, compressed by zlib
    40 + J  T      tensors, one after the other; the text has their dtypes and shapes

What follows a record in its file is what a longer one before it has left.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from gemini.errors import StorageError
from gemini.memory.durable.slots import barrier

MAGIC, VERSION = b"GEMINI\x00C", 2
_HEAD = struct.Struct("<8sIIQQQ")
_SUMMED = 16
"""Where that begins of which there is a checksum."""
_MAX_TEXT = 2**31
"""Bytes of a text, uncompressed: what is said to be more is no record."""


class Record(NamedTuple):
    """One commit of one rank."""

    sequence: int
    text: Any
    """What JSON has."""
    tensors: bytes
    version: int = VERSION
    """Of the format that it was read in."""


def to_bytes(record: Record) -> bytes:
    """The bytes of a record."""
    text = zlib.compress(json.dumps(record.text, separators=(",", ":")).encode(), 1)
    rest = struct.pack("<QQQ", record.sequence, len(text), len(record.tensors)) + text + record.tensors
    return MAGIC + struct.pack("<II", VERSION, zlib.crc32(rest)) + rest


def write(path: Path, record: Record) -> int:
    """Put a record into its file; it is on the drive when this returns, and its bytes are counted.

    Raises:
        StorageError: if it cannot be written. It may be there nevertheless.
    """
    data = to_bytes(record)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            barrier(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise StorageError(f"could not write the commit record {path}: {e.strerror}") from e
    return len(data)


def read(path: Path) -> Record | None:
    """The record in a file; None if there is none that is whole.

    Raises:
        StorageError: if the file cannot be read, or was written in a newer format.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StorageError(f"the commit record {path} cannot be read: {e.strerror}") from e
    if len(data) < _HEAD.size:
        return None
    magic, version, checksum, sequence, text, tensors = _HEAD.unpack_from(data)
    if magic != MAGIC:
        return None
    if version > VERSION:
        raise StorageError(
            f"{path} has version {version} of the format, this Gemini reads version {VERSION}: load the store with the "
            "Gemini that wrote it"
        )
    end = _HEAD.size + text + tensors
    if len(data) < end or zlib.crc32(memoryview(data)[_SUMMED:end]) != checksum:
        return None
    begin = _HEAD.size + text
    try:
        unpacked = zlib.decompressobj().decompress(data[_HEAD.size : begin], _MAX_TEXT)
        return Record(sequence, json.loads(unpacked), data[begin:end], version)
    except (ValueError, RecursionError, zlib.error):
        return None
