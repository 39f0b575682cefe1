"""Each wrong request gets one paragraph that says what was asked, what is there and what to do; exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Command, refused


def test_importing_the_command_line_is_quick() -> None:
    code = "import sys, gemini.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("options", [["--preset", "gpt2-small", "--steps", "0"], ["--stepz", "3"], ["--steps", "few"]])
def test_of_several_processes_one_says_what_is_wrong(
    gemini_command: Command, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        result = gemini_command("train", "--data", "x", *options)
        assert result.exit_code == 2
        assert bool(result.stderr) == (rank == "0"), result.stderr


def test_unknown_preset_and_device(gemini_command: Command, tmp_path: Path, text: Path, tiny_config: Path) -> None:
    out = ["--out", tmp_path / "out", "--data", text]
    refused(gemini_command("train", "--preset", "gpt5", *out), "--preset gpt5: there is no such preset", "gpt2-small")
    refused(
        gemini_command("train", "--model", tiny_config, "--seq-len", 8, "--device", "tpu9", *out),
        "--device tpu9: there is no such device", begun=True,
    )  # fmt: skip


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json {", "is not a valid JSON file"),
        ("\xff\xfe", "is not a valid JSON file"),
        ("[1, 2]", "Should have a `model_type` key"),
        ('{"hidden_size": 4}', "Should have a `model_type` key"),
        ('{"model_type": "abacus"}', "model type `abacus` but Transformers does not recognize"),
        ('{"model_type": "t5"}', "transformers has no causal language model for"),
        ('{"model_type": "gpt2", "n_layer": "two"}', "(code that comes with a model is not run): StrictDataclass"),
    ],
)
def test_a_config_file_that_is_not_one(
    gemini_command: Command, tmp_path: Path, text: Path, content: str, says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    refused(gemini_command("train", "--model", path, "--data", text, "--out", tmp_path / "out"), str(path), says)


def test_model_paths_without_a_model(
    gemini_command: Command, tmp_path: Path, text: Path, tiny_values: dict[str, Any]
) -> None:
    def train(model: Path, *more: object):
        return gemini_command("train", "--model", model, "--data", text, "--out", tmp_path / "out", *more)

    refused(train(tmp_path / "absent"), "there is no such file or folder", "has to be downloaded first")
    refused(train(tmp_path), "has no config.json, so it is not a Hugging Face model folder")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_values))
    (folder / "consolidated.00.pt").touch()
    refused(train(folder), "pickled files, and neither safetensors nor a pytorch_model.bin", "save_pretrained")
    (folder / "pytorch_model.bin").touch()
    refused(train(folder, "--seq-len", 8), f"{folder / 'pytorch_model.bin'} cannot be read", begun=True)
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      junk")
    refused(train(folder, "--layers", 1), "--layers 1 builds another model")
    damaged = f"model folder {folder} cannot be built: {folder / 'model.safetensors'} cannot be read"
    refused(train(folder, "--seq-len", 8), damaged, begun=True)


def test_a_vocabulary_or_window_that_does_not_fit(
    gemini_command: Command, tmp_path: Path, text: Path, tiny_values: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_values | {"vocab_size": 100}))
    command = ["train", "--model", path, "--data", text, "--out", tmp_path / "out"]
    refused(gemini_command(*command, "--seq-len", 8), "has a vocabulary of 100", "vocab_size of at least 257")
    refused(gemini_command(*command, "--seq-len", 64), "--seq-len 64 is more than the model's 32 positions")
    refused(
        gemini_command(*command), "--seq-len 512 (the default) is more than the model's 32 positions. Use at most 32"
    )


def test_rows_that_are_none(gemini_command: Command, tmp_path: Path, tiny_values: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "config.json").write_text(json.dumps(tiny_values))
    command = (
        "train",
        "--model",
        tmp_path / "config.json",
        "--data",
        tmp_path / "rows.jsonl",
        "--out",
        tmp_path / "out",
    )
    refused(gemini_command(*command, "--seq-len", 8), f"--data {tmp_path / 'rows.jsonl'}: the file is empty")


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_that_is_missing_empty_or_short(gemini_command: Command, tmp_path: Path, tiny_config: Path) -> None:
    def train(*data: object):
        return gemini_command("train", "--model", tiny_config, "--seq-len", 16, "--out", tmp_path / "out", *data)

    refused(train(), "No text was given to train on", "--data")
    refused(train("--data", tmp_path / "absent"), f"--data {tmp_path / 'absent'}: there is no such file or folder")
    (tmp_path / "empty.txt").touch()
    refused(train("--data", tmp_path / "empty.txt"), "only empty files (1)")
    (tmp_path / "folder").mkdir()
    refused(train("--data", tmp_path / "folder"), "no file that matches *.txt *.md *.py", "--glob")
    (tmp_path / "short.txt").write_text("too short")
    short = train("--data", tmp_path / "short.txt")
    refused(short, "The text has 10 tokens; sequences of --seq-len 16 need at least 16")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_an_out_folder_that_cannot_be_or_is_taken(
    gemini_command: Command, tmp_path: Path, tiny_config: Path, text: Path
) -> None:
    def train(out: Path, *more: object):
        return gemini_command("train", "--model", tiny_config, "--seq-len", 16, "--data", text, "--out", out, *more)

    refused(train(text / "below"), "cannot be written to: Not a directory")
    taken = tmp_path / "taken"
    checkpoint = taken / "checkpoint-20"
    (checkpoint / "gemini").mkdir(parents=True)
    for name in ("gemini/manifest.json", "scheduler.pt", "trainer_state.json"):
        (checkpoint / name).touch()
    refused(train(taken), "holds checkpoints of an earlier run, the newest is checkpoint-20", "--resume auto")
    refused(train(taken, "--resume", tmp_path / "absent"), "there is no such checkpoint folder")
    refused(train(taken, "--resume", taken), "this is the folder of a run", "checkpoint-20")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    refused(train(model), "holds a model already")
