"""Two slots of a plane: writes that may be undone, beside those that are committed."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch

from gemini.memory import nvme
from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.durable.slots import ZEROS, Runs, SlotFile, SlotPair, pages_of

# ---- slots -----------------------------------------------------------------------------------------------------------

# Two slots of every page: random writes, some of them undone, commits and restarts against a plain array, and the sums
# that records get.

MANY = 40


def write_some(pair: SlotPair, expected: bytearray, rng: random.Random) -> None:
    """Some pages in a row, into both."""
    first = rng.randrange(MANY)
    count = rng.randint(1, MANY - first)
    if rng.random() < 0.5:  # as tiles are: mostly the same ranges
        first, count = first // 8 * 8, 8
    data = rng.randbytes(count * PAGE)
    source = host_bytes(count * PAGE)
    source.numpy()[:] = memoryview(data)
    pair.write(source, first * PAGE)
    expected[first * PAGE : (first + count) * PAGE] = data


def content(paths: list[Path], runs: Runs) -> bytes:
    """What runs say is there, each as its sum says."""
    on_drives, found, page = [path.read_bytes() for path in paths], bytearray(), 0
    parts = nvme.stripes(0, 2 * MANY * PAGE, len(paths))
    data = b"".join(on_drives[drive][at : at + size] for drive, at, _, size in parts)
    for count, slot, crc in runs:
        begin = slot * MANY * PAGE + page * PAGE
        part = bytes(count * PAGE) if slot == ZEROS else data[begin : begin + count * PAGE]
        assert crc == (0 if slot == ZEROS else zlib.crc32(part))
        found += part
        page += count
    return bytes(found)


@pytest.mark.parametrize("drives", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_runs_are_what_was_written_whatever_was_written_over(
    seed: int, drives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "STRIPE", 3 * PAGE)
    rng, expected = random.Random(seed), bytearray(MANY * PAGE)
    paths = [tmp_path / f"slots-{drive}" for drive in range(drives)]
    slots = SlotFile(paths, {"plane": MANY * PAGE})
    pair = slots.pairs["plane"]
    committed, kept = pair.runs(), bytes(expected)
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            write_some(pair, expected, rng)
        if rng.random() < 0.5 and pair.can_be_tentative:
            before = bytes(expected)
            pair.begin_tentative()
            for _ in range(rng.randrange(3)):
                write_some(pair, expected, rng)
            if rng.random() < 0.5:
                pair.keep()
            else:
                pair.undo()
                expected[:] = before
        runs = pair.runs()
        assert content(paths, runs) == expected
        assert content(paths, committed) == kept, "what was committed is never written over"
        if rng.random() < 0.2:  # a commit that fails: nothing is said to be committed
            continue
        pair.commit(runs)
        committed, kept = runs, bytes(expected)
        if rng.random() < 0.2:  # the next run
            slots.close()
            slots = SlotFile(paths, {"plane": MANY * PAGE})
            pair = slots.pairs["plane"]
            pair.take_committed(runs)
            if rng.random() < 0.5:
                pair._now[:] = pair._committed
            else:
                expected[:] = bytes(len(expected))
    slots.close()


PAGES = 12


def made(path: Path) -> tuple[SlotFile, SlotPair]:
    file = SlotFile([path / "slots"], {"a": PAGES * PAGE, "b": PAGES * PAGE})
    return file, file.pairs["b"]


def write(pair: SlotPair, first: int, values: list[int]) -> None:
    source = host_bytes(len(values) * PAGE)
    source.view(len(values), PAGE)[:] = torch.tensor(values, dtype=torch.uint8)[:, None]
    pair.write(source, first * PAGE)


def test_what_is_neither_committed_nor_new_is_no_place_to_write(tmp_path: Path) -> None:
    file, pair = made(tmp_path)
    assert pair.can_be_tentative, "nothing was ever written"
    write(pair, 0, [1] * PAGES)
    assert pair.can_be_tentative, "nothing is committed"
    pair.commit(pair.runs())
    assert pair.can_be_tentative, "all of it is committed"
    write(pair, 3, [2])
    assert not pair.can_be_tentative, "one page has its committed content and a newer one"
    pair._now[:] = pair._committed
    assert pair.can_be_tentative
    pair.take_committed([(PAGES, 1, 0)])
    assert pages_of(pair.runs()) == bytes(PAGES) and not pair.can_be_tentative
    file.close()
