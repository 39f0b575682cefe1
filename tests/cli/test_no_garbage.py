"""``gemini sft`` trains on no tokens that nobody meant: a pretrained model has its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.cli.commands import Command, refused

STEP = ("--max_length", 8, "--max_steps", 1, "--cpu_memory", "256MiB", "--save_strategy", "no")


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
        return gemini_command(
            "sft", "--model_name_or_path", model, "--dataset_name", data, *STEP, "--output_dir", tmp_path / "out", *more
        )

    return call


def byte_pairs(path: Path) -> None:
    """The files of GPT-2's tokenizer, with its bytes and one merge."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = [*map(chr, letters), *(chr(256 + i) for i in range(256 - len(letters)))]
    vocab = {name: number for number, name in enumerate([*names, "th", "<|endoftext|>"])}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\nt h\n")


def test_a_model_folder_without_a_tokenizer(folder: Any, train: Any) -> None:
    for vocabulary, weights in ((300, True), (257, True), (301, False)):
        model = folder(vocabulary, weights)
        refused(train(model), "the folder has no tokenizer, or a part of one", "--bytes")
        result = train(model, "--bytes", "--output_dir", model.parent / str(vocabulary))
        assert result.exit_code == 0 and "byte-level tokens" in result.output


def test_a_tokenizer_without_tokenizer_json_is_used(folder: Any, train: Any) -> None:
    model = folder(300)
    byte_pairs(model)
    result = train(model)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"tokenizer of {model} with 258 ids" in " ".join(result.output.split())
    assert "byte-level" not in result.output
    assert "byte-level tokens" in train(model, "--bytes", "--output_dir", model.parent / "other").output


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tokenizer_config.json"]
)
@pytest.mark.parametrize("weights", [True, False])
def test_one_that_cannot_be_loaded_is_refused_with_its_files(folder: Any, train: Any, name: str, weights: bool) -> None:
    model = folder(300, weights)
    (model / name).write_text("{}" if name.endswith("json") else "")
    refused(train(model), str(model), "--bytes")
    assert train(model, "--bytes").exit_code == 0
