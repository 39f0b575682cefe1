"""Each wrong request gets one paragraph that says what was asked, what is there and what to do; exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini.jobs import JobError
from gemini.jobs.models import byte_tokenizer, find_model, tokenizer_of
from gemini.jobs.train_options import Parser, options_of
from tests.cli.commands import Command, refused


def test_importing_the_command_line_is_quick() -> None:
    code = "import sys, gemini.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("options", [["--cpu_memory", "5 parsecs"], ["--stepz", "3"], ["--max_steps", "few"]])
def test_of_several_processes_one_says_what_is_wrong(
    gemini_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("gemini.cli.PATIENCE_S", 0)
    for rank, report in ("0", None), ("1", tmp_path / "report.json"), ("1", None):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        if report is None:
            monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
        result = gemini_command("sft", "--dataset_name", "x", "--model_name_or_path", "y", *options)
        assert result.exit_code == 2 and options[0].replace("_", "-") in (result.stderr or report.read_text())
        begins = "gemini: rank 1: " if rank == "1" else "gemini: "
        assert result.stderr.startswith(begins) if report is None else not result.stderr, result.stderr


@pytest.mark.parametrize("rule", ["--optimizer muon", "--optimizer adalomo", "--optim adalomo"])
def test_a_rule_of_whole_params_takes_a_whole_model_in_each_process(rule: str) -> None:
    words = f"--model_name_or_path gpt2-small --dataset_name x --use_cpu {rule}".split()
    with pytest.raises(JobError, match="looks at whole params, which 2 processes would divide: give --replicas 2, and"):
        options_of(Parser("sft").read(words), 2)
    assert options_of(Parser("sft").read([*words, "--replicas", "2"]), 2).config.rule_spec.whole


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json {", "is not a valid JSON file"),
        ("\xff\xfe", "is not a valid JSON file"),
        ("[1, 2]", "Should have a `model_type` key"),
        ('{"hidden_size": 4}', "Should have a `model_type` key"),
        ('{"model_type": "abacus"}', "model type `abacus` but Transformers does not recognize"),
        ('{"model_type": "gpt2", "n_layer": "two"}', "(code that comes with a model is not run): Field 'n_layer'"),
    ],
)
def test_a_config_file_that_is_not_one(
    gemini_command: Command, tmp_path: Path, text: Path, content: str, says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    given = ("--model_name_or_path", path, "--dataset_name", text, "--output_dir", tmp_path / "out")
    refused(gemini_command("sft", *given), str(path), says)


def test_a_model_that_is_no_language_model(gemini_command: Command, tmp_path: Path, text: Path) -> None:
    (tmp_path / "t5.json").write_text('{"model_type": "t5"}')
    given = ("--model_name_or_path", tmp_path / "t5.json", "--dataset_name", text, "--output_dir", tmp_path / "out")
    refused(gemini_command("sft", *given, "--max_length", 8), "T5Config", "AutoModelForCausalLM", begun=True)


def test_model_paths_without_a_model(
    gemini_command: Command, tmp_path: Path, text: Path, tiny_values: dict[str, Any]
) -> None:
    def train(model: Path, *more: object):
        given = ("--model_name_or_path", model, "--dataset_name", text, "--output_dir", tmp_path / "out", *more)
        return gemini_command("sft", *given)

    refused(train(tmp_path / "absent"), str(tmp_path / "absent"))
    refused(train(tmp_path), "Should have a `model_type` key in its config.json")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_values))
    (folder / "consolidated.00.pt").touch()
    refused(train(folder), "pickled files, and neither safetensors nor a pytorch_model.bin", "save_pretrained")
    (folder / "pytorch_model.bin").touch()
    bytewise = ["--max_length", 8, "--bytes"]
    refused(train(folder, *bytewise), f"{folder / 'pytorch_model.bin'} cannot be read", begun=True)
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      junk")
    damaged = f"model folder {folder} cannot be built: {folder / 'model.safetensors'} cannot be read"
    refused(train(folder, *bytewise), damaged, begun=True)


def test_what_the_trainer_refuses_before_its_first_step(
    gemini_command: Command, tmp_path: Path, tiny_config: Path, text: Path
) -> None:
    def train(*more: object):
        given = ("--model_name_or_path", tiny_config, "--dataset_name", text, "--output_dir", tmp_path / "out", *more)
        return gemini_command("sft", "--max_length", 8, "--max_steps", 1, *given)

    refused(train("--learning_rate", "inf"), "lr of the optimizer AdamW must be a finite number", begun=True)
    wrong = ("--lr_scheduler_type", "polynomial", "--lr_scheduler_kwargs", '{"x": 1}')
    refused(train(*wrong), "got an unexpected keyword argument 'x'", begun=True)
    refused(train("--eval_on_start", "true"), "there is no split 'test', but train. --test_split_size")


def test_a_vocabulary_or_window_that_does_not_fit(
    gemini_command: Command, tmp_path: Path, text: Path, tiny_values: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_values | {"vocab_size": 100}))
    command = ["sft", "--model_name_or_path", path, "--dataset_name", text, "--output_dir", tmp_path / "out"]
    refused(gemini_command(*command), "has a vocabulary of 100", "vocab_size of at least 257")
    refused(gemini_command(*command, "--max_length", 64), "--max_length 64 is more than the model's 32 positions")
    # Of a model of several parts the one that reads text says it.
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": {"max_position_embeddings": 32}}))
    refused(gemini_command(*command, "--max_length", 64), "--max_length 64 is more than the model's 32 positions")


def test_special_tokens_that_no_text_becomes_may_be_beyond_the_vocabulary(
    tmp_path: Path, tiny_values: dict[str, Any]
) -> None:
    """Gemma 3's for images has the first number behind the embedding of the models that read text alone."""
    folder, tokenizer = tmp_path / "model", byte_tokenizer()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_values))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    source = find_model(str(folder))
    assert len(tokenizer_of(source)[0]) == 258
    tokenizer.chat_template = "<image_soft_token>" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(JobError, match="has a vocabulary of 257; .* need 258. Give a config with a vocab_size of at "):
        tokenizer_of(source)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_an_out_folder_that_cannot_be_or_is_taken(
    gemini_command: Command, tmp_path: Path, tiny_config: Path, text: Path
) -> None:
    def train(out: Path, *more: object):
        given = ("--model_name_or_path", tiny_config, "--dataset_name", text, "--output_dir", out, *more)
        return gemini_command("sft", *given)

    refused(train(text / "below"), "cannot be written to: [Errno 20] Not a directory")
    taken = tmp_path / "taken"
    checkpoint = taken / "checkpoint-20"
    (checkpoint / "gemini").mkdir(parents=True)
    for name in ("gemini/manifest.json", "scheduler.pt", "trainer_state.json"):
        (checkpoint / name).touch()
    refused(
        train(taken),
        "holds checkpoints of an earlier run, the newest is checkpoint-20",
        "--resume_from_checkpoint auto",
    )
    refused(train(taken, "--resume_from_checkpoint", tmp_path / "absent"), "there is no checkpoint at")
    refused(train(taken, "--resume_from_checkpoint", taken), "has no gemini/ (masters and optimizer states)")
    refused(train(tmp_path / "new", "--resume_from_checkpoint", "True"), "True: ", "has no checkpoint")
