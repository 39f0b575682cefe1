"""``gemini`` as tests call it: in this process, with what is expected of the end."""

from __future__ import annotations

import io
import json
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file


class Tee(io.StringIO):
    """A text file in memory whose text goes to others."""

    def __init__(self, *files: io.StringIO):
        super().__init__()
        self._files = files

    def write(self, text: str) -> int:
        return max(file.write(text) for file in self._files)


class Command:
    """``command("--steps", 3)`` runs it after the words that it was made with.

    The result has ``exit_code``, ``stdout``, ``stderr`` and ``output``.
    """

    def __init__(self, *words: object):
        self.words = words

    def __call__(self, *words: object) -> Any:
        from gemini.cli import app

        out, err, both = io.StringIO(), io.StringIO(), io.StringIO()
        code, exception = 1, None
        with redirect_stdout(Tee(out, both)), redirect_stderr(Tee(err, both)):
            try:
                code = app([str(word) for word in (*self.words, *words)])
            except Exception as e:
                exception = e
                traceback.print_exc()
        said = {"stdout": out.getvalue(), "stderr": err.getvalue(), "output": both.getvalue()}
        return SimpleNamespace(exit_code=code, exception=exception, **said)

    def ok(self, *words: object) -> Any:
        """A run that ends well."""
        result = self(*words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def told(self, *words: object) -> Any:
        """What ``--json`` prints, however the command ends."""
        return json.loads(self(*words, "--json").stdout)


def flat(result: Any) -> str:
    """What was said, in one line."""
    return " ".join(result.output.split())


def refused(result: Any, *says: str, begun: bool = False) -> None:
    """It left with 2, one paragraph on stderr that says all of it, no traceback, and, unless begun, an empty stdout."""
    assert result.exit_code == 2, (result.output, result.exception)
    message = " ".join(result.stderr.split())
    assert message.startswith("gemini: ") and "Traceback" not in result.output, result.output
    assert begun or not result.stdout, result.stdout
    for words in says:
        assert words in message, message


def same_weights(one: Path, other: Path, name: str = "model.safetensors") -> bool:
    """Whether two runs wrote the same bits."""
    first, second = load_file(one / name), load_file(other / name)
    return first.keys() == second.keys() and all(torch.equal(weight, second[key]) for key, weight in first.items())


FOUR_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}


def llama_config(path: Path, **changes: Any) -> Path:
    """The file of a config, of two small blocks but for ``changes``."""
    body = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4000,
    }
    path.write_text(json.dumps(body | changes))
    return path
