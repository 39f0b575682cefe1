"""Two slots of every page: random writes, commits and restarts against a plain array, and the sums that records get."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.durable.slots import ZEROS, SlotFile, SlotPair

PAGES = 40


def write(pair: SlotPair, expected: bytearray, rng: random.Random) -> None:
    """Some pages in a row, into both."""
    first = rng.randrange(PAGES)
    count = rng.randint(1, PAGES - first)
    if rng.random() < 0.5:  # as tiles are: mostly the same ranges
        first, count = first // 8 * 8, 8
    data = rng.randbytes(count * PAGE)
    source = host_bytes(count * PAGE)
    source.numpy()[:] = memoryview(data)
    pair.begin_write(source, first * PAGE).wait()
    expected[first * PAGE : (first + count) * PAGE] = data


def check(pair: SlotPair, path: Path, expected: bytearray) -> list[tuple[int, int, int | None]]:
    """The runs, which say where every byte is, with its sum."""
    data, found, page = path.read_bytes(), bytearray(), 0
    for count, slot, crc in pair.runs():
        begin = slot * PAGES * PAGE + page * PAGE
        part = bytes(count * PAGE) if slot == ZEROS else data[begin : begin + count * PAGE]
        assert crc == (0 if slot == ZEROS else zlib.crc32(part))
        found += part
        page += count
    assert found == expected
    return pair.runs()


@pytest.mark.parametrize("seed", range(8))
def test_runs_are_what_was_written_whatever_was_written_over(seed: int, tmp_path: Path) -> None:
    rng, path, expected = random.Random(seed), tmp_path / "slots", bytearray(PAGES * PAGE)
    slots = SlotFile(path, {"plane": PAGES * PAGE})
    pair = slots.pairs["plane"]
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            write(pair, expected, rng)
        runs = check(pair, path, expected)
        pair.commit(runs)
        if rng.random() < 0.2:  # the next run, with or without sums in the record
            slots.close()
            slots = SlotFile(path, {"plane": PAGES * PAGE})
            pair = slots.pairs["plane"]
            pair.take_committed([(count, slot, None if seed % 2 else crc) for count, slot, crc in runs])
            pair.restore()
    slots.close()
