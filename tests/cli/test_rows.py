"""What the training commands make of rows and text: what is learned, cut and left out, and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import trl

from gemini.jobs import JobError, parts
from gemini.jobs.models import byte_tokenizer
from gemini.jobs.parts import is_text
from tests.cli.commands import Command, flat, refused


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
    config.write_text(json.dumps(tiny_values | {"n_positions": 160}))
    words = ["--model_name_or_path", config, "--dataset_name", chats, "--max_length", 48, "--max_steps", 1]
    words += ["--per_device_train_batch_size", 4, "--learning_rate", 1e-2, "--logging_steps", 1]
    return Command("sft", *words, "--save_strategy", "no", "--output_dir", tmp_path / "out")


def loss_of(out: Path) -> float:
    return float(json.loads((out / "trainer_state.json").read_text())["log_history"][0]["loss"])


def test_only_the_answers_are_learned_where_that_is_asked(train: Command, tmp_path: Path) -> None:
    """The loss is another; so is it where rows share sequences."""
    losses = []
    for more in (["--assistant_only_loss"], [], ["--packing"]):
        train.ok(*more, "--output_dir", tmp_path / f"out-{len(losses)}")
        losses.append(round(loss_of(tmp_path / f"out-{len(losses)}"), 3))
    assert len({*losses}) == 3


def test_rows_that_are_cut_or_left_out_are_counted_before_the_first_step(
    train: Command, tmp_path: Path, chats: Path
) -> None:
    """Of what is trained and evaluated on, on resume too; rows that are packed may be cut anywhere."""
    turns = [
        [{"role": "user", "content": "?" * (50 * (n % 2))}, {"role": "assistant", "content": "x" * 30}]
        for n in range(40)
    ]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    more = ["--assistant_only_loss", "--test_split_size", 10, "--eval_strategy", "steps", "--eval_steps", 4]
    for steps in (1, 2):
        how = ["--max_steps", steps, "--resume_from_checkpoint", "auto", "--save_strategy", "steps", "--save_steps", 1]
        result = train.ok(*more, *how)
        before = result.stdout.partition(f"step {steps}/{steps}")[0]
        assert "\nrows: 30; 30 longer than max_length 48;" in before and "left out; longest 105" in before, before
        assert "\nrows to evaluate on: 10; 10 longer than max_length 48;" in before
        left = [int(line.split(" left out")[0].split("; ")[-1]) for line in before.splitlines() if "left out" in line]
        assert sum(left) == 20, "the answers of half of the chats are behind the cut"
    packed = train.ok("--packing", "--packing_strategy", "wrapped", "--output_dir", tmp_path / "all")
    assert "rows: 40; packed into " in packed.stdout and "longer than" not in packed.stdout
    filled = train.ok("--packing", "--output_dir", tmp_path / "bfd")
    assert "40 longer than max_length 48" in filled.stdout, "whose ends are lost"
    short = train("--assistant_only_loss", "--max_length", 12, "--output_dir", tmp_path / "short")
    refused(short, "leaves nothing of any row to learn", "longest 105", begun=True)


TEMPLATES = sorted((Path(__file__).resolve().parents[2] / "docs" / "examples" / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("template", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_templates_that_come_as_examples_mark_what_is_learned(train: Command, template: Path) -> None:
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
    how = ["--max_length", 160, "--assistant_only_loss", "--chat_template_path", template]
    assert "0 longer than max_length 160" in train.ok(*how).stdout


def test_a_template_without_marks(train: Command, tmp_path: Path) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    bare = ["--chat_template_path", template]
    refused(train(*bare, "--assistant_only_loss"), "{% generation %}", "docs/examples/chat_templates", begun=True)
    train.ok(*bare, "--output_dir", tmp_path / "all")


# ---- what kind of data a name stands for -----------------------------------------------------------------------------


def test_rows_and_text_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b.txt", "a.md", "image.png", "a.py"):
        (folder / name).write_text("words\n")
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "texts/b.txt", "texts/a.md", "texts/*.txt", "texts/**/*.py", "texts/image.png"):
        assert is_text(name), name
    (folder / "rows.jsonl").write_text("{}\n")
    for name in (None, "texts", "texts/rows.jsonl", "texts/*.jsonl", "owner/name"):
        assert not is_text(name), name


@pytest.mark.parametrize("kind", ["parquet", "saved", "csv", "folder", "mixture"])
def test_rows_of_many_kinds(kind: str, train: Command, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": [f"{n} and {n}" for n in range(20)]})
    path = tmp_path / f"rows.{kind}"
    more: list[object] = ["--dataset_name", path]
    if kind in ("parquet", "csv"):
        getattr(rows, f"to_{kind}")(path)
    elif kind == "saved":
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(path)
        more += ["--eval_strategy", "steps", "--eval_steps", 1]
    elif kind == "folder":
        path.mkdir()
        for split in ("train", "test"):
            rows.to_json(path / f"{split}.jsonl")
        more += ["--eval_strategy", "steps", "--eval_steps", 1]
    else:
        rows.to_json(tmp_path / "mixed.jsonl")
        path.write_text(f"datasets:\n  - path: json\n    data_files: {tmp_path / 'mixed.jsonl'}\n    columns: [text]\n")
        words = [*map(str, train.words)]
        at = words.index("--dataset_name")
        result = Command(*words[:at], *words[at + 2 :]).ok("--config", path)
        assert "data: 20 rows of text" in result.stdout
        return
    result = train.ok(*more)
    assert "data: 20 rows of text" in result.stdout
    assert ("evaluation after step 1" in result.stdout) == (len(more) > 2)


BAD = {
    "empty.jsonl": (b"", "--dataset_name"),
    "broken.jsonl": (b'{"text": "a"}\n{"text', "--dataset_name"),
    "data.parquet": (b"PAR1" + b"x" * 900, "--dataset_name"),
    "odd.jsonl": (b'{"a": 1}\n', "gemini sft learns from the columns"),
    "wide.txt": ("some text".encode("utf-16"), "--dataset_name"),
    "program.py": (b"\x7fELF" + bytes(range(256)) * 20, "--dataset_name"),
    "nothing.txt": (b"", "there is nothing in it to learn"),
}


@pytest.mark.parametrize("name", BAD)
def test_data_of_no_use_is_refused(name: str, train: Command, tmp_path: Path) -> None:
    content, says = BAD[name]
    (tmp_path / name).write_bytes(content)
    refused(train("--dataset_name", tmp_path / name), says, begun=True)


def test_data_that_is_not_there(train: Command, tmp_path: Path, text: Path) -> None:
    for absent in (tmp_path / "absent.jsonl", tmp_path / "absent.txt", tmp_path / "a" / "b"):
        refused(train("--dataset_name", absent), f"--dataset_name {absent}: there is no such file or folder")
    refused(train("--dataset_name", tmp_path / "*.nothing"), "*.nothing")
    evaluates = ["--eval_strategy", "steps"]
    refused(train(*evaluates), "there is no split 'test', but train. --test_split_size 0.05 takes one")
    one = train("--dataset_name", text, *evaluates, "--test_split_size", 0.1)
    refused(one, "--test_split_size 0.1 of 1 row of text (a file of text is one)", begun=True)
    refused(train("--dataset_train_split", "better"), "there is no split 'better', but train")


def test_text_for_training_and_evaluation_in_one_folder(train: Command, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train.txt", "test.txt"):
        shutil.copy(text, folder / name)
    (folder / "train-more.txt").write_bytes(gzip.compress(text.read_bytes()))  # which datasets opens by itself
    result = train.ok("--dataset_name", folder, "--eval_strategy", "steps")
    assert "data: 2 rows of text" in result.stdout and "to evaluate on: 1 row of text" in flat(result)


@pytest.mark.parametrize(
    ("kind", "says"),
    {
        "sft": "messages, or conversations, or prompt and completion, or input_ids, or text, and there are question",
        "dpo": "chosen and rejected, and",
        "kto": "completion and label, or chosen and rejected, and",
        "reward": "chosen and rejected, or",
        "grpo": "prompt, and",
    }.items(),
)
def test_rows_of_other_columns_are_refused_before_the_model_is_made(
    kind: str, says: str, train: Command, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n')
    words = ["--dataset_name", rows, *(["--reward_funcs", "accuracy_reward"] if kind == "grpo" else [])]
    refused(
        Command(kind, *train.words[1:5], "--output_dir", tmp_path / "out")(*words),
        f"{kind} learns from the columns {says}",
    )


def test_rows_of_several_datasets_are_refused_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["some"]})
    monkeypatch.setattr(parts.trl, "get_dataset", lambda mixture: datasets.DatasetDict({"train": rows}))
    script = SimpleNamespace(dataset_name=None, dataset_train_split="train", dataset_test_split="test")
    mixture = trl.DatasetMixtureConfig(datasets=[{"path": "one"}, {"path": "another"}])
    args = SimpleNamespace(eval_on_start=False, eval_strategy="steps", seed=0, dataset_text_field="text")
    with pytest.raises(JobError, match="^datasets: there is no split 'test', but train"):
        parts.open_data("sft", script, mixture, args)


@pytest.mark.parametrize(
    ("says", "held_out"),
    {
        "^--dataset_name some, split 'test': gemini sft learns from the columns .*, and there are question": ["1+1"],
        "^--dataset_name some, split 'test': there is nothing in it to evaluate on": [],
    }.items(),
)
def test_rows_to_evaluate_on_are_looked_at_too(says: str, held_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "train": datasets.Dataset.from_dict({"text": ["some"]}),
        "test": datasets.Dataset.from_dict({"question": held_out}),
    }
    monkeypatch.setattr(parts.datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(rows))
    script = SimpleNamespace(
        dataset_name="some",
        dataset_train_split="train",
        dataset_test_split="test",
        dataset_streaming=False,
        dataset_config=None,
    )
    args = SimpleNamespace(eval_on_start=False, eval_strategy="steps", seed=0, dataset_text_field="text")
    with pytest.raises(JobError, match=says):
        parts.open_data("sft", script, trl.DatasetMixtureConfig(), args)
    args.eval_strategy = "no"
    assert parts.open_data("sft", script, trl.DatasetMixtureConfig(), args)[1] is None


def test_rows_of_several_datasets_are_held_out_by_the_seed(chats: Path) -> None:
    """The same ones in every process, and when a run goes on, whatever the split is called."""
    mixture = trl.DatasetMixtureConfig(
        datasets=[{"path": "json", "data_files": str(chats)} for _ in range(2)], test_split_size=0.25
    )
    args = SimpleNamespace(eval_on_start=True, eval_strategy="no", seed=0, dataset_text_field="text")
    found = []
    for name in ("test", "test", "held_out"):
        script = SimpleNamespace(dataset_name=None, dataset_train_split="train", dataset_test_split=name)
        rows, held_out = parts.open_data("sft", script, mixture, args)
        assert (len(rows), len(held_out)) == (60, 20)
        found.append(held_out["messages"])
    assert found[0] == found[1] == found[2]
