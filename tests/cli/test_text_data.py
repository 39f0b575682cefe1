"""Text files to tokens to shuffled windows: nothing lost or doubled, the same order everywhere, resumable anywhere."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.jobs.errors import JobError
from gemini.jobs.text_files import find_text_files, fingerprint
from gemini.jobs.tokens import BYTE_BOUNDARY, ByteTokens, TokenizerTokens
from gemini.jobs.windows import WindowStream, permute


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


# ---- files ----------------------------------------------------------------------------------------------------------


def test_folders_are_searched_for_text_and_sorted_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"b", "a/c.py": b"c", "a/d.bin": b"d", "z.md": b"z", "empty.txt": b""})
    files = find_text_files([tmp_path])
    assert [file.name for file in files] == ["a/c.py", "b.txt", "z.md"]
    assert [file.name for file in find_text_files([tmp_path], ["*.bin"])] == ["a/d.bin"]


def test_folders_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"a", "test/b.py": b"b", "c/test/d.py": b"d", "c/test.py": b"e"})
    files = find_text_files([tmp_path], without_folders={"test"})
    assert [file.name for file in files] == ["a.py", "c/test.py"]


def test_a_file_reached_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a"})
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert len(find_text_files([tmp_path, tmp_path / "a.txt"])) == 1


@pytest.mark.parametrize(
    ("files", "root", "says"),
    [
        ({}, "absent", "no such file or folder"),
        ({"a.bin": b"a"}, ".", "no file that matches"),
        ({"a.txt": b""}, ".", "only empty files (1)"),
        ({"a.txt": b""}, "a.txt", "only empty files (1)"),
    ],
)
def test_missing_and_empty_text_is_refused(tmp_path: Path, files: dict[str, bytes], root: str, says: str) -> None:
    write(tmp_path, files)
    with pytest.raises(JobError) as caught:
        find_text_files([tmp_path / root])
    assert says in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a"})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(JobError, match="permission denied"):
        find_text_files([tmp_path])


def test_fingerprint_sees_names_and_sizes(tmp_path: Path) -> None:
    one = fingerprint(find_text_files([write(tmp_path / "1", {"a.txt": b"abc"})]))
    same = fingerprint(find_text_files([write(tmp_path / "2", {"a.txt": b"xyz"})]))
    longer = fingerprint(find_text_files([write(tmp_path / "3", {"a.txt": b"abcd"})]))
    renamed = fingerprint(find_text_files([write(tmp_path / "4", {"b.txt": b"abc"})]))
    assert one == same and len({one, longer, renamed}) == 3


# ---- tokens ---------------------------------------------------------------------------------------------------------


@given(documents=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_byte_tokens_read_the_row_anywhere(tmp_path_factory: pytest.TempPathFactory, documents, data) -> None:
    root = write(tmp_path_factory.mktemp("text"), {f"{i}.txt": document for i, document in enumerate(documents)})
    row = [token for document in documents for token in (*document, BYTE_BOUNDARY)]
    tokens = ByteTokens(find_text_files([root]))
    assert tokens.num_tokens == len(row)
    start = data.draw(st.integers(0, len(row) - 1))
    count = data.draw(st.integers(0, len(row) - start))
    assert tokens.read(start, count).tolist() == row[start : start + count]


def test_bytes_that_are_not_utf8_are_bytes(tmp_path: Path) -> None:
    tokens = ByteTokens(find_text_files([write(tmp_path, {"a.txt": b"\xff\xfe\x00"})]))
    assert tokens.read(0, 4).tolist() == [255, 254, 0, 256]


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    files = find_text_files([write(tmp_path, {"a.txt": b"abcdef"})])
    (tmp_path / "a.txt").write_bytes(b"ab")
    with pytest.raises(JobError, match=r"a\.txt had 6 bytes .* shorter now"):
        ByteTokens(files).read(0, 6)


class LengthTokenizer:
    """Stands in for a real one: a word is its length, 99 ends a document."""

    eos_token_id = 99

    def __len__(self) -> int:
        return 100

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_tokenizer_tokens_encode_once_with_boundaries(tmp_path: Path) -> None:
    files = find_text_files([write(tmp_path / "text", {"a.txt": b"one three\nsevenxx", "b.txt": b"go"})])
    tokens = TokenizerTokens(files, LengthTokenizer(), scratch=tmp_path)
    assert tokens.num_tokens == 6
    assert tokens.read(0, 6) == array("I", [3, 5, 7, 99, 2, 99])
    assert tokens.read(2, 2).tolist() == [7, 99]
    assert [path.name for path in tmp_path.iterdir()] == ["text"], "the encoded text must have no name"


def test_tokenizer_needs_utf8_and_says_so(tmp_path: Path) -> None:
    files = find_text_files([write(tmp_path, {"latin.txt": "caf\xe9".encode("latin-1")})])
    with pytest.raises(JobError, match=r"latin\.txt is not UTF-8 text.*iconv.*byte-level"):
        TokenizerTokens(files, LengthTokenizer(), scratch=tmp_path)


# ---- windows --------------------------------------------------------------------------------------------------------


class Count:
    """A row whose ids are their positions."""

    vocabulary = 1 << 30

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def read(self, start: int, count: int) -> array[int]:
        assert 0 <= start and start + count <= self.num_tokens
        return array("I", range(start, start + count))

    def describe(self) -> str:
        return "positions"


@given(size=st.integers(1, 300), key=st.binary(min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_permute_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_the_order_is_the_same_for_ever() -> None:
    """A checkpoint outlives versions: if this changes, old data positions point at other text."""
    assert [permute(index, 10, b"7:0") for index in range(10)] == [7, 6, 5, 4, 0, 9, 2, 3, 1, 8]


def test_an_order_looks_shuffled() -> None:
    size = 1000
    order = [permute(index, size, b"seed") for index in range(size)]
    fixed = sum(index == image for index, image in enumerate(order))
    neighbours = sum(abs(a - b) == 1 for a, b in zip(order, order[1:], strict=False))
    assert fixed < 10 and neighbours < 15  # about 1 and 2 are expected of a random order


@given(num_windows=st.integers(2, 60), held_out=st.integers(0, 5), rest=st.integers(0, 3), seed=st.integers(0, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_an_epoch_visits_every_window_once_but_the_held_out(num_windows, held_out, rest, seed) -> None:
    held_out = min(held_out, num_windows - 1)
    stream = WindowStream(Count(4 * num_windows + rest), 4, seed=seed, num_held_out=held_out)
    for epoch in range(2):
        seen = [window[0] // 4 for window in stream.next_batch(stream.num_windows)]
        kept = [window[0] // 4 for window in stream.held_out()]
        assert stream.epoch == epoch
        assert len(kept) == held_out
        assert sorted(seen + kept) == list(range(num_windows))


def test_seeds_and_epochs_differ() -> None:
    def order(seed: int, epochs: int) -> list[list[int]]:
        stream = WindowStream(Count(400), 4, seed=seed)
        return [stream.next_batch(100) for _ in range(epochs)][-1]

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(2, 1)
    assert order(1, 1) != order(1, 2)


@given(steps=st.integers(0, 30), batch=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_restored_position_goes_on_exactly(steps: int, batch: int) -> None:
    stream = WindowStream(Count(40), 4, seed=3, num_held_out=2, identity="x")
    for _ in range(steps):
        stream.next_batch(batch)
    state = stream.state_dict()
    other = WindowStream(Count(40), 4, seed=3, num_held_out=2, identity="x")
    other.load_state_dict(state)
    assert [other.next_batch(3) for _ in range(9)] == [stream.next_batch(3) for _ in range(9)]


@given(parts=st.integers(1, 4), batch=st.integers(1, 6), steps=st.integers(1, 12), num_windows=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_processes_deal_out_what_one_would_take(parts: int, batch: int, steps: int, num_windows: int) -> None:
    """The same windows in every step, across epochs, and the same position after it on every rank."""
    streams = [WindowStream(Count(4 * num_windows), 4, seed=3) for _ in range(parts)]
    whole = WindowStream(Count(4 * num_windows), 4, seed=3)
    for _ in range(steps):
        dealt = [stream.next_batch(batch, part=part, parts=parts) for part, stream in enumerate(streams)]
        assert [window for windows in dealt for window in windows] == whole.next_batch(parts * batch)
        assert all(stream.state_dict() == whole.state_dict() for stream in streams)


def test_a_position_in_other_data_is_refused() -> None:
    stream = WindowStream(Count(40), 4, seed=3, identity="x")
    for other, says in [
        (WindowStream(Count(40), 4, seed=4, identity="x"), "seed is 3, here it is 4"),
        (WindowStream(Count(40), 5, seed=3, identity="x"), "sequence length is 4, here it is 5"),
        (WindowStream(Count(40), 4, seed=3, identity="y"), "list of files"),
    ]:
        with pytest.raises(JobError) as caught:
            other.load_state_dict(stream.state_dict())
        assert says in str(caught.value)


def test_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(JobError, match="has 7 tokens; windows of --seq-len 8 need at least 8"):
        WindowStream(Count(7), 8, seed=0)
    with pytest.raises(JobError, match="need at least 16"):
        WindowStream(Count(15), 8, seed=0, num_held_out=1)
