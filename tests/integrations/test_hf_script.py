"""A fine-tuning script in the manner of transformers' documentation, and the same script with one line added."""

import runpy
from pathlib import Path
from typing import Any

import pytest

import gemini
import tests.integrations.trainer_cases  # noqa: F401  its settings: quiet, and quick garbage collection

ADDED = "from gemini.integrations.huggingface import GeminiTrainer as Trainer\n"
SCRIPT = """
import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig, AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast, Trainer,
    TrainingArguments, pipeline, set_seed,
)
# one line here
set_seed(0)
words = ["[PAD]", "[UNK]", "good", "bad", "film", "book", "very", "not", "a", "the", "was", "it"]
raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


def rows(start, stop):
    label = [i % 2 for i in range(start, stop)]
    texts = [("it was very " * (i % 3) + ("good", "bad")[i % 2] + " the film") for i in range(start, stop)]
    return Dataset.from_dict({"text": texts, "label": label})


raw_datasets = DatasetDict({"train": rows(0, 32), "test": rows(32, 48)})
tokenized = raw_datasets.map(lambda examples: tokenizer(examples["text"], truncation=True), batched=True)
config = AutoConfig.for_model(
    "bert", vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, num_labels=2, id2label={0: "GOOD", 1: "BAD"}, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = AutoModelForSequenceClassification.from_config(config)


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((np.argmax(predictions, axis=1) == labels).mean())}


training_args = TrainingArguments(
    output_dir="my_model", learning_rate=1e-2, per_device_train_batch_size=4, per_device_eval_batch_size=8,
    num_train_epochs=6, weight_decay=0.01, eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch",
    load_best_model_at_end=True, use_cpu=True, report_to=[], disable_tqdm=True,
)
trainer = Trainer(
    model=model, args=training_args, train_dataset=tokenized["train"], eval_dataset=tokenized["test"],
    processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
predictions = trainer.predict(tokenized["test"])
trainer.save_model("final")
answers = pipeline("text-classification", model="final", tokenizer="final")(["a good film", "a bad book"])
"""


def run(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text(script)
    return runpy.run_path(str(folder / "script.py"))


def test_one_added_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = run(tmp_path / "stock", SCRIPT, monkeypatch)
    ours = run(tmp_path / "ours", SCRIPT.replace("# one line here\n", ADDED), monkeypatch)
    assert isinstance(ours["trainer"].model, gemini.GeminiDDP)
    assert not isinstance(stock["trainer"].model, gemini.GeminiDDP)
    mine, theirs = (
        [log for log in namespace["trainer"].state.log_history if "loss" in log or "eval_loss" in log]
        for namespace in (ours, stock)
    )
    assert len(mine) == len(theirs) == 13
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
            assert (key in a) == (key in b)
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=1e-3, abs=1e-6), key
    assert ours["metrics"]["eval_accuracy"] == stock["metrics"]["eval_accuracy"] == 1.0
    assert ours["predictions"].predictions == pytest.approx(stock["predictions"].predictions, abs=1e-3)
    assert [a["label"] for a in ours["answers"]] == [a["label"] for a in stock["answers"]] == ["GOOD", "BAD"]
    assert {p.name for p in (tmp_path / "ours" / "final").iterdir()} == {
        p.name for p in (tmp_path / "stock" / "final").iterdir()
    }
