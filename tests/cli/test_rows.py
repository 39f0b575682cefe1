"""``gemini train`` on chats: what is learned is the stock Trainer's own, and everything around it is there."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from gemini.jobs.models import byte_tokenizer
from tests.cli.commands import Command, refused, same_weights


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """40 chats in which one is added."""
    path = tmp_path / "chats.jsonl"
    turns = ([{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(40))
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    return path


@pytest.fixture
def train(tmp_path: Path, tiny_values: dict[str, Any], chats: Path) -> Command:
    config = tmp_path / "wide.json"
    config.write_text(json.dumps(tiny_values | {"n_positions": 64}))

    words = ["--model", config, "--data", chats, "--seq-len", 48, "--batch-size", 4, "--device", "cpu"]
    return Command("train", *words, "--lr", 1e-2, "--log-every", 1, "--schedule", "constant")


def losses_of(out: Path, name: str = "loss") -> list[float]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_a_run_on_chats_and_its_repetition_from_yaml(train: Command, gemini_command: Command, tmp_path: Path) -> None:
    """Dropout, held-out chats, samples and an exact resume; the file beside the run repeats it."""
    out = tmp_path / "out"
    more = ["--validation", 8, "--eval-every", 3, "--sample-every", 6, "--prompt", "3+1", "--save-every", 3]
    result = train.ok("--out", out, "--steps", 6, *more)
    assert "data: 40 rows of messages" in result.stdout and "8 of them are kept to evaluate on" in result.stdout
    assert result.stdout.count("perplexity") == 2 and "sample after step 6: 3+1 ->" in result.stdout
    assert losses_of(out)[-1] < losses_of(out)[0] and len(losses_of(out, "eval_perplexity")) == 2

    again = tmp_path / "again"
    shutil.rmtree(out / "checkpoint-6")
    words = ["--config", out / "gemini.yaml", "--out", again, "--resume", out / "checkpoint-3"]
    gemini_command.ok("train", *words)
    assert losses_of(again) == losses_of(out)[3:]
    assert same_weights(out, again)

    adapter = tmp_path / "adapter"
    lora = gemini_command.ok("train", "--config", out / "gemini.yaml", "--model", out, "--lora", 2, "--out", adapter)
    assert "of them trained" in lora.stdout and (adapter / "adapter_model.safetensors").is_file()
    drawn = tmp_path / "drawn"
    torch.manual_seed(12345)  # whatever was drawn before, the same adapter comes from the same --seed
    gemini_command("train", "--config", out / "gemini.yaml", "--model", out, "--lora", 2, "--out", drawn)
    assert losses_of(drawn) == losses_of(adapter)


def test_a_base_in_4_bits_goes_on_from_a_checkpoint(train: Command, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install '.[quantized]'")
    base, out, again = tmp_path / "base", tmp_path / "out", tmp_path / "again"
    train.ok("--out", base, "--steps", 1)
    how = ["--model", base, "--lora", 2, "--load-in-4bit", "--schedule", "constant"]
    train.ok("--out", out, "--steps", 4, "--save-every", 2, *how)
    assert (out / "adapter_model.safetensors").is_file()
    train.ok("--out", again, "--steps", 4, "--resume", out / "checkpoint-2", *how)
    assert losses_of(again) == losses_of(out)[2:] and len(losses_of(again)) == 2
    assert same_weights(out, again, "adapter_model.safetensors")


def test_4_bits_without_the_library_say_what_to_install(train: Command, tmp_path: Path, monkeypatch: Any) -> None:
    base = tmp_path / "base"
    train.ok("--out", base, "--steps", 1)
    refused(train("--out", tmp_path / "out", "--steps", 1, "--model", base, "--load-in-4bit"), "give --lora as well")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    result = train("--out", tmp_path / "out", "--steps", 1, "--model", base, "--lora", 2, "--load-in-4bit")
    refused(result, "--load-in-4bit needs bitsandbytes", "pip install", begun=True)


def test_only_the_answers_are_learned(train: Command, tmp_path: Path) -> None:
    """Where all of a chat is, the loss is another; so is it where rows share sequences."""
    first = {}
    for name, more in {"answers": [], "all": ["--loss-on", "all"], "packed": ["--packing", "bfd"]}.items():
        train.ok("--out", tmp_path / name, "--steps", 1, *more)
        first[name] = losses_of(tmp_path / name)[0]
    assert len({round(loss, 3) for loss in first.values()}) == 3


def test_rows_that_are_cut_or_left_out_are_counted_before_the_first_step(
    train: Command, tmp_path: Path, chats: Path
) -> None:
    """Of what is trained and evaluated on, on resume too; rows that are packed may be cut anywhere."""
    turns = [
        [{"role": "user", "content": "?" * (50 * (n % 2))}, {"role": "assistant", "content": "x" * 30}]
        for n in range(40)
    ]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    out, more = tmp_path / "out", ["--eval-data", chats, "--save-every", 1, "--eval-every", 4]
    said = "40; 40 cut at --seq-len 48, 20 of them left out (nothing to learn remains); longest 105, median 80 tokens"
    for steps in (1, 2):
        result = train.ok("--out", out, "--steps", steps, "--resume", "auto", "--schedule", "constant", *more)
        before = result.stdout.partition(f"step {steps}/{steps}")[0]
        assert f"\nrows: {said}" in before and f"\nrows to evaluate on: {said}" in before
    all_ = train("--out", tmp_path / "all", "--steps", 1, "--loss-on", "all", "--packing", "wrapped")
    assert "rows: 40; 0 cut at --seq-len 48; longest 105" in all_.stdout, all_.output
    packed = train("--out", tmp_path / "bfd", "--steps", 1, "--packing", "bfd")
    assert "rows: 40; 40 cut at --seq-len 48, in 20 of them nothing to learn remains" in packed.stdout, packed.output
    short = train("--out", tmp_path / "short", "--steps", 1, "--seq-len", 12)
    refused(short, "of no row is anything to be learned left", "longest 105", begun=True)


TEMPLATES = sorted((Path(__file__).resolve().parents[2] / "docs" / "examples" / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("template", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_templates_that_come_as_examples_mark_what_is_learned(train: Command, tmp_path: Path, template: Path) -> None:
    """The assistant's words with the token that ends a turn; a chat that goes on begins as it did."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template.read_text()
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    made = tokenizer.apply_chat_template(
        [*chat, *chat[1:]], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, is_marked in zip(made["input_ids"], made["assistant_masks"], strict=True) if is_marked]
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "plain": "<|endoftext|>"}[template.stem]
    assert tokenizer.decode(marked) == 2 * f"A{end}"
    text = tokenizer.apply_chat_template([*chat, *chat[1:]], tokenize=False)
    assert text.startswith(tokenizer.apply_chat_template(chat, tokenize=False))
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(f"{asked}A{end}")

    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps(json.loads(wide.read_text()) | {"n_positions": 160}))
    result = train.ok("--out", tmp_path / "out", "--steps", 1, "--seq-len", 160, "--chat-template", template)
    assert "0 cut at --seq-len 160" in result.stdout, (result.output, result.exception)


def test_a_template_without_marks_is_told_from_a_chat_without_an_assistant(
    train: Command, tmp_path: Path, chats: Path
) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    result = train("--out", tmp_path / "out", "--steps", 1, "--chat-template", template)
    refused(result, "with --chat-template FILE: docs/examples/chat_templates has some", begun=True)
    train.ok("--out", tmp_path / "out", "--steps", 1, "--chat-template", template, "--loss-on", "all")
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    result = train("--out", tmp_path / "alone", "--steps", 1)
    assert result.exit_code == 2 and "no assistant tokens" in result.stderr and "--chat-template" not in result.stderr


def test_a_run_whose_evaluation_gets_worse_ends_early(train: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--validation", 8, "--eval-every", 2, "--patience", 1, "--lr", 0.3, "--seed", 1]
    result = train.ok("--out", out, "--steps", 40, *more)
    evaluations = losses_of(out, "eval_loss")
    assert 2 <= len(evaluations) < 20 and evaluations[-1] > min(evaluations)
    best = 2 * (1 + evaluations.index(min(evaluations)))
    assert (
        f"Stopped after step {2 * len(evaluations)} of 40: no lower loss in 1 evaluation. The weights are those of "
        f"step {best}, loss {min(evaluations):.4f}.\nThe model is in" in result.stdout
    )


def test_the_run_is_that_of_the_stock_trainer(tiny_config: Path, text: Path, tmp_path: Path) -> None:
    """transformers' Trainer with torch's AdamW, from the same weights on the same sequences."""
    from gemini.jobs.settings import TrainSettings
    from gemini.jobs.train import TrainRun
    from gemini.jobs.trainer import arguments_of

    settings = TrainSettings(
        model=tiny_config, data=(text,), seq_len=16, batch_size=2, accumulate=2, device="cpu", steps=6, lr=4e-3,
        precision="fp32", save_every=0, log_every=1, out=tmp_path / "out",
    )  # fmt: skip
    run = TrainRun(settings, Console(quiet=True))
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    ours = run.run()

    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_config))
    plain.load_state_dict(weights)
    plain.loss_type = "ForCausalLM"
    arguments = transformers.TrainingArguments(**arguments_of(settings, use_cpu=True))
    stock = transformers.Trainer(
        model=plain, args=arguments, train_dataset=run.data.train, data_collator=transformers.default_data_collator
    )
    stock.train()
    theirs = [row["loss"] for row in stock.state.log_history if "loss" in row]
    assert ours == pytest.approx(theirs, rel=2e-5) and ours[-1] < 0.95 * ours[0]
