"""``gemini train`` trains on nothing that nobody meant: tokens foreign to a pretrained model, or no text at all."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from gemini.jobs.text import not_text
from tests.cli.commands import Command, refused

STEP = ("--seq-len", 8, "--steps", 1, "--device", "cpu", "--cpu-memory", "256MiB", "--log-every", 1)


@pytest.fixture
def folder(tmp_path: Path, tiny_values: dict[str, Any]) -> Callable[..., Path]:
    """A pretrained model folder with so many ids."""

    def make(vocabulary: int, weights: bool = True) -> Path:
        path = tmp_path / f"model-{vocabulary}"
        config = transformers.GPT2Config(**{**tiny_values, "vocab_size": vocabulary})
        config.save_pretrained(path)
        if weights:
            transformers.GPT2LMHeadModel(config).save_pretrained(path)
        return path

    return make


@pytest.fixture
def train(gemini_command: Command, text: Path, tmp_path: Path) -> Callable[..., Any]:
    def call(model: Path, *more: object, data: Path = text) -> Any:
        return gemini_command("train", "--model", model, "--data", data, *STEP, "--out", tmp_path / "out", *more)

    return call


def byte_pairs(path: Path) -> None:
    """The files of GPT-2's tokenizer, with its bytes and one merge."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = [*map(chr, letters), *(chr(256 + i) for i in range(256 - len(letters)))]
    vocab = {name: number for number, name in enumerate([*names, "th", "<|endoftext|>"])}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\nt h\n")


def test_a_pretrained_model_without_a_tokenizer(folder: Any, train: Any, text: Path) -> None:
    refused(train(folder(300)), "weights for a vocabulary of 300 and no tokenizer", "--bytes")
    assert "byte-level tokens" in train(folder(300), "--bytes").output
    for vocabulary in (256, 257):
        result = train(folder(vocabulary), "--out", text.parent / str(vocabulary))
        assert "vocabulary of 256; the text" in " ".join(result.stderr.split()) or "byte-level tokens" in result.output
    result = train(folder(301, weights=False), "--out", text.parent / "drawn")
    assert result.exit_code == 0 and "byte-level tokens" in result.output, "nothing was trained on other ids"


def test_a_tokenizer_without_tokenizer_json_is_used(folder: Any, train: Any) -> None:
    model = folder(300)
    byte_pairs(model)
    result = train(model)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"tokenizer of {model} with 258 ids" in " ".join(result.output.split())
    assert "byte-level" not in result.output
    assert "byte-level tokens" in train(model, "--bytes", "--out", model.parent / "other").output


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tokenizer_config.json"]
)
@pytest.mark.parametrize("weights", [True, False])
def test_one_that_cannot_be_loaded_is_refused_with_its_files(folder: Any, train: Any, name: str, weights: bool) -> None:
    model = folder(300, weights)
    (model / name).write_text("{}" if name.endswith("json") else "")
    refused(train(model), f"({name})", "--bytes")
    assert train(model, "--bytes").exit_code == 0


PROGRAM = b"\x7fELF" + bytes(range(256)) * 20
NO_TEXT = {
    "chat.jsonl": (b'{"a": 1}\n', "its columns are a. Rows have a text"),
    "chat.txt": (b'{"text": "one"}\n{"text": "two"}\n' * 400, "JSON lines"),
    "data.JSON": (b'{"a": 1}', "its columns are a. Rows have a text"),
    "data.parquet": (b"PAR1" + b"x" * 900, "cannot be read as Parquet"),
    "table.txt": (b"PAR1" + b"x" * 900, "Parquet"),
    "t.txt.gz": (gzip.compress(b"text " * 100), "compressed (gzip)"),
    "t.txt": (gzip.compress(b"text " * 100), "compressed (gzip)"),
    "python": (PROGRAM, "a program (ELF)"),
    "nul.txt": (b"some text\0 and more", "binary"),
    "noise.md": (bytes(b for b in range(1, 256)) * 9, "binary"),
    "wide.txt": ("some text".encode("utf-16"), "UTF-16"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_file_that_is_no_text(name: str, tmp_path: Path, tiny_config: Path, train: Any) -> None:
    data, kind = NO_TEXT[name]
    path = tmp_path / "data" / name
    path.parent.mkdir()
    path.write_bytes(data)
    rows = path.suffix in (".jsonl", ".JSON", ".parquet")
    refused(train(tiny_config, data=path), name, *([kind] if rows else [f"this is {kind}", "--bytes"]))
    path.write_bytes(data * (1 + 100 // len(data)))
    assert train(tiny_config, "--bytes", data=path).exit_code == 0
    others = train(tiny_config, "--glob", "*", "--out", tmp_path / "other", data=path.parent)
    refused(others, "none of the files found (1)", name)


def test_in_a_folder_they_are_left_out_and_said(tmp_path: Path, tiny_config: Path, train: Any) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "a.txt").write_text("words and words\n" * 40)
    (path / "b.txt").write_bytes(PROGRAM)
    (path / "c.txt").write_bytes(gzip.compress(b"text"))
    result = train(tiny_config, data=path)
    said = " ".join(result.output.split())
    assert result.exit_code == 0 and "text: 1 file," in said
    assert "left out as no text: b.txt is a program (ELF), and 1 more" in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1251", "koi8-r", "shift-jis", "gb18030"])
def test_text_of_any_encoding_is_text(encoding: str, tmp_path: Path) -> None:
    words = {"latin-1": "Où ça\té\r\n", "shift-jis": "日本語の文章です\n", "gb18030": "这是中文\f"}.get(
        encoding, "Так это текст\n"
    )
    (tmp_path / "a.txt").write_bytes((words * 200).encode(encoding))
    assert not_text(tmp_path / "a.txt") is None
    (tmp_path / "a.py").write_text('{\n    "a": 1}\n\x1b[0m')
    assert not_text(tmp_path / "a.py") is None
