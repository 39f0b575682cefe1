"""Two slots of every page: random writes, some of them undone, commits and restarts against a plain array, and the sums
that records get.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.durable.slots import ZEROS, Runs, SlotFile, SlotPair

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


def content(path: Path, runs: Runs) -> bytes:
    """What runs say is there, each as its sum says."""
    data, found, page = path.read_bytes(), bytearray(), 0
    for count, slot, crc in runs:
        begin = slot * PAGES * PAGE + page * PAGE
        part = bytes(count * PAGE) if slot == ZEROS else data[begin : begin + count * PAGE]
        assert crc == (0 if slot == ZEROS else zlib.crc32(part))
        found += part
        page += count
    return bytes(found)


@pytest.mark.parametrize("seed", range(8))
def test_runs_are_what_was_written_whatever_was_written_over(seed: int, tmp_path: Path) -> None:
    rng, path, expected = random.Random(seed), tmp_path / "slots", bytearray(PAGES * PAGE)
    slots = SlotFile(path, {"plane": PAGES * PAGE})
    pair = slots.pairs["plane"]
    committed, kept = pair.runs(), bytes(expected)
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            write(pair, expected, rng)
        if rng.random() < 0.5 and pair.can_be_tentative:
            before = bytes(expected)
            pair.begin_tentative()
            for _ in range(rng.randrange(3)):
                write(pair, expected, rng)
            if rng.random() < 0.5:
                pair.keep()
            else:
                pair.undo()
                expected[:] = before
        runs = pair.runs()
        assert content(path, runs) == expected
        assert content(path, committed) == kept, "what was committed is never written over"
        if rng.random() < 0.2:  # a commit that fails: nothing is said to be committed
            continue
        pair.commit(runs)
        committed, kept = runs, bytes(expected)
        if rng.random() < 0.2:  # the next run, with or without sums in the record
            slots.close()
            slots = SlotFile(path, {"plane": PAGES * PAGE})
            pair = slots.pairs["plane"]
            pair.take_committed([(count, slot, None if seed % 2 else crc) for count, slot, crc in runs])
            if rng.random() < 0.5:
                pair.restore()
            else:
                expected[:] = bytes(len(expected))
    slots.close()
