"""From what --data names to rows or sequences: nothing lost or doubled, what is no use refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.jobs.data import JobData, open_data
from gemini.jobs.errors import JobError
from gemini.jobs.models import byte_tokenizer
from gemini.jobs.settings import TrainSettings
from gemini.jobs.text import BYTE_BOUNDARY, TextSequences, find_text_files, fingerprint


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


# ---- sequences -------------------------------------------------------------------------------------------------------


class LengthTokenizer:
    """Stands in for a real one: a word is its length, 99 ends a document."""

    eos_token_id = 99

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def row_of(sequences: TextSequences) -> list[int]:
    assert all(torch.equal(sequence["input_ids"], sequence["labels"]) for sequence in sequences)
    return [token for sequence in sequences for token in sequence["input_ids"].tolist()]


@given(documents=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), sequence=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_sequences_of_bytes_are_the_row(tmp_path_factory: pytest.TempPathFactory, documents, sequence) -> None:
    root = write(tmp_path_factory.mktemp("text"), {f"{i}.txt": document for i, document in enumerate(documents)})
    row = [token for document in documents for token in (*document, BYTE_BOUNDARY)]
    files = find_text_files([root])
    if len(row) < sequence:
        with pytest.raises(JobError, match=f"has {len(row)} tokens; sequences of --seq-len {sequence} need at least"):
            TextSequences(files, None, sequence, scratch=root)
        return
    sequences = TextSequences(files, None, sequence, scratch=root)
    assert row_of(sequences) == row[: len(row) // sequence * sequence] and sequences.num_tokens == len(row)


def test_a_tokenizer_encodes_once_with_boundaries(tmp_path: Path) -> None:
    files = find_text_files([write(tmp_path / "text", {"a.txt": b"one three\nsevenxx", "b.txt": b"go"})])
    assert row_of(TextSequences(files, LengthTokenizer(), 2, scratch=tmp_path)) == [3, 5, 7, 99, 2, 99]
    assert [path.name for path in tmp_path.iterdir()] == ["text"], "the encoded text must have no name"


def test_tokenizer_needs_utf8_and_says_so(tmp_path: Path) -> None:
    files = find_text_files([write(tmp_path, {"latin.txt": "caf\xe9".encode("latin-1")})])
    with pytest.raises(JobError, match=r"latin\.txt is not UTF-8 text.*iconv.*byte-level"):
        TextSequences(files, LengthTokenizer(), 2, scratch=tmp_path)


def test_the_tokenizer_of_bytes_has_their_ids() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(256))) + "日本 \t x"
    assert tokenizer.encode(text, add_special_tokens=False) == [*text.encode()]
    assert tokenizer.decode([*text.encode(), BYTE_BOUNDARY], skip_special_tokens=True) == text
    assert len(tokenizer) == 257 and tokenizer.eos_token_id == BYTE_BOUNDARY


# ---- what a job takes ------------------------------------------------------------------------------------------------


def rows(folder: Path, *values: dict[str, Any], name: str = "a.jsonl") -> Path:
    return write(folder, {name: "\n".join(map(json.dumps, values)).encode()}) / name


def opened(folder: Path, *data: Path, **more: Any) -> JobData:
    return open_data(TrainSettings(data=data, seq_len=4, out=folder, **more), None)


def test_rows_and_text_are_told_apart(tmp_path: Path) -> None:
    import datasets

    chat = {"messages": [{"role": "user", "content": "a"}], "id": 3}
    both = {"prompt": "a", "completion": "b", "text": "c"}
    assert opened(tmp_path, rows(tmp_path / "1", chat)).rows == ("messages",)
    assert opened(tmp_path, rows(tmp_path / "2", both).parent).rows == ("prompt", "completion")
    assert opened(tmp_path, rows(tmp_path / "3", chat), bytes=True).rows == ()
    table = datasets.Dataset.from_list([{"text": "c"}] * 5)
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "t.parquet", tmp_path / "saved"):
        data = opened(tmp_path, path, validation=0.4)
        assert data.rows == ("text",) and (len(data.train), len(data.evaluation)) == (3, 2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([{"question": "a"}], "its columns are question. Rows have a text, a prompt and a completion, or messages"),
        ([], "cannot be read as JSON lines"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}, {"messages": "b"}],
            "the messages of row 2 are 'b'. They are",
        ),
        ([{"messages": [{"role": "user", "content": "a"}]}, {"messages": ["b"]}], "the messages of row 2 are \"['b']"),
        ([{"messages": [{"from": "human", "value": "a"}]}], "each with a role and a content"),
    ],
)
def test_rows_of_no_use_are_refused(tmp_path: Path, values: list[dict[str, Any]], says: str) -> None:
    path = rows(tmp_path, *values) if values else write(tmp_path, {"a.jsonl": b"{no json"}) / "a.jsonl"
    with pytest.raises(JobError) as caught:
        opened(tmp_path, path)
    assert says in str(caught.value)
    text = write(tmp_path, {"b.txt": b"some text"}) / "b.txt"
    with pytest.raises(JobError, match="holds rows, and .*b.txt does not"):
        opened(tmp_path, tmp_path / "a.jsonl", text)


def test_what_is_kept_to_evaluate_on_is_not_trained_on(tmp_path: Path) -> None:
    text = write(tmp_path, {"a.txt": bytes(range(33, 113))}) / "a.txt"
    data = opened(tmp_path, text, validation=3)
    kept, left = ([sequence["input_ids"][0].item() for sequence in part] for part in (data.evaluation, data.train))
    assert kept == [33, 57, 85] and sorted(kept + left) == [*range(33, 113, 4)]
    with pytest.raises(JobError, match="keeps all of the 20 sequences"):
        opened(tmp_path, text, validation=20)
