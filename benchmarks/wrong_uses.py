"""Wrong uses of the command line, and what a person is told: a table in Markdown.

    python benchmarks/wrong_uses.py > table.md

Exit code 1 if one of them ends in anything but a paragraph and code 2.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import transformers
from typer.testing import CliRunner

from gemini.cli import app


def main() -> int:
    transformers.logging.set_verbosity_error()
    os.environ["COLUMNS"] = "400"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_files()
        bad = 0
        print("| asked | told |")
        print("|---|---|")
        for name, words in USES:
            result = CliRunner().invoke(app, words)
            said = " ".join(result.stderr.split())
            fine = result.exit_code == 2 and "gemini: " in said and "Traceback" not in said
            bad += not fine
            print(f"| {name} | {said.partition('gemini: ')[2].replace(folder, '.') if fine else f'NOT TOLD: {said}'} |")
        os.chdir("/")
    return bool(bad)


def write_files() -> None:
    tiny = {
        "model_type": "gpt2",
        "vocab_size": 257,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    Path("c.json").write_text(json.dumps(tiny))
    Path("t5.json").write_text('{"model_type":"t5"}')
    Path("junk.json").write_text("no")
    Path("t.txt").write_text("some words. " * 300)
    Path("short.txt").write_text("few")
    Path("q.jsonl").write_text('{"question":"a"}\n')
    Path("bad.parquet").write_bytes(b"x" * 99)
    Path("t.gz").write_bytes(b"\x1f\x8b" + b"x" * 99)
    Path("run.yaml").write_text("stepz: 3\n")
    Path("chat.jsonl").write_text(
        '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n' * 9
    )
    Path("long.jsonl").write_text(json.dumps({"prompt": "a" * 99, "completion": "b"}) + "\n")


BASE = ["train", "--model", "c.json", "--data", "t.txt", "--seq-len", "32", "--device", "cpu", "--out", "o"]
USES = [
    ("a size without a unit", BASE + ["--cpu-memory", "24"]),
    ("a unit that is none", BASE + ["--cpu-memory", "5 parsecs"]),
    ("no model", ["train", "--data", "t.txt"]),
    ("a hub's name", ["train", "--model", "meta/llama", "--data", "t.txt"]),
    ("a config that is no JSON", ["train", "--model", "junk.json", "--data", "t.txt"]),
    ("an encoder-decoder", ["train", "--model", "t5.json", "--data", "t.txt"]),
    ("no data", ["train", "--model", "c.json", "--seq-len", "32"]),
    ("data that is not there", ["train", "--model", "c.json", "--seq-len", "32", "--data", "nope"]),
    ("too little text", ["train", "--model", "c.json", "--seq-len", "32", "--data", "short.txt"]),
    ("rows with other columns", ["train", "--model", "c.json", "--seq-len", "32", "--data", "q.jsonl"]),
    ("a broken Parquet", ["train", "--model", "c.json", "--seq-len", "32", "--data", "bad.parquet"]),
    ("compressed text", ["train", "--model", "c.json", "--seq-len", "32", "--data", "t.gz"]),
    ("text and rows together", BASE + ["--data", "chat.jsonl"]),
    (
        "prompts that fill the sequence",
        ["train", "--model", "c.json", "--seq-len", "32", "--device", "cpu", "--out", "o9", "--data", "long.jsonl"],
    ),
    ("a window longer than the model", ["train", "--model", "c.json", "--seq-len", "128", "--data", "t.txt"]),
    ("an option of no such name in YAML", ["train", "--config", "run.yaml"]),
    ("LoRA of drawn weights", BASE + ["--lora", "4"]),
    ("patience without evaluation", BASE + ["--patience", "2"]),
    ("two sources to evaluate on", BASE + ["--validation", "3", "--eval-data", "t.txt"]),
    ("all kept for evaluation", BASE + ["--validation", "112"]),
    ("an optimizer that is none", BASE + ["--optimizer", "adam8bit"]),
    ("compact states in fp16", BASE + ["--states", "compact", "--precision", "fp16"]),
    ("a learning rate below 0", BASE + ["--lr", "-1"]),
    ("a tracker that is not installed", BASE + ["--report-to", "wandb"]),
    ("a drive without a folder", BASE + ["--nvme-memory", "1GiB"]),
    ("activations moved, none kept", BASE + ["--offload-activations", "cpu"]),
    ("a budget that is too small", BASE + ["--cpu-memory", "100KiB"]),
    ("a checkpoint that is not there", BASE + ["--resume", "o/checkpoint-9"]),
    ("a plan without a unit", ["plan", "c.json", "--gpu", "24", "--cpu", "8GiB"]),
    ("a plan for nothing", ["plan", "nope.json"]),
    ("a machine that is none", ["plan", "c.json", "--machine", "4090"]),
    ("more GPUs than there are", ["plan", "c.json", "--machine", "dgx-h100", "--gpus", "12"]),
]


if __name__ == "__main__":
    sys.exit(main())
