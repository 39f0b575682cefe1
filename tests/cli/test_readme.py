"""What the README shows is what there is: its loop runs as printed, its commands and options exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_loop_runs_as_printed(
    tmp_path: Path, tiny_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the sizes and the folder are changed."""
    (code,) = blocks("python")
    for theirs, here in (('"64GiB"', '"8MiB"'), ('"400GiB"', '"8MiB"'), ('"/scratch"', repr(str(tmp_path)))):
        assert code.count(theirs) == 1
        code = code.replace(theirs, here)
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(32).view(2, 16)
    names = {"config": transformers.GPT2Config(**tiny_values), "loader": [{"input_ids": ids, "labels": ids}] * 3}
    exec(compile(code, "README.md", "exec"), names)
    assert "held by" in capsys.readouterr().out
    assert transformers.AutoModelForCausalLM.from_pretrained("out").num_parameters() == 34_720
    assert Path("checkpoint").is_dir()


def test_commands_and_options_exist(gemini_command: Callable[..., Any]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    said = "\n".join([*blocks("bash"), *re.findall(r"`((?:make|gemini) [^`]+)`", README)])
    targets = set(re.findall(r"make ([a-z-]+)", said))
    commands = re.findall(r"^(?:torchrun .*-m )?(gemini .*)$", said, re.MULTILINE)
    assert {"demo", "test"} <= targets and len(commands) >= 5
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in commands:
        words = command.split("#")[0].split()
        help_text = gemini_command(words[1], "--help").stdout
        for option in (word for word in words if word.startswith("--") and word != "--help"):
            assert option in help_text, command
