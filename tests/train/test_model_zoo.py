"""The suite's share of the model zoo: one class of many kinds, three steps with offload, the bits of the plain loop.

The whole zoo is ``tests/hunts/model_zoo.py``; docs/models.md has what came of it, and must list what transformers has.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tests.hunts.zoo import mappings, runner, sweep, table
from tests.hunts.zoo.inputs import Spec
from tests.hunts.zoo.mappings import Entry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ENTRIES = {entry.name: (kind, entry) for kind, entry in mappings.all_entries()}

# One of each manner of computing: what it is there for stands beside it.
QUICK = {
    "Qwen3NextForCausalLM": "bf16",  # gated delta rule and attention in turns, MoE
    "JambaForCausalLM": "bf16",  # selective scan, attention and experts
    "Mamba2ForCausalLM": "fp32",
    "RwkvForCausalLM": "fp32",  # a recurrence over single params
    "DeepseekV3ForCausalLM": "bf16",  # latent attention
    "Gemma3nForCausalLM": "bf16",  # params per layer input, shared key-value layers
    "GptOssForCausalLM": "bf16",  # sinks: a param of an attention module
    "ZambaForCausalLM": "bf16",  # blocks shared between layers
    "ReformerModelWithLMHead": "fp32",  # reversible layers: a custom backward that computes forward again
    "SwitchTransformersForConditionalGeneration": "fp32",  # casts its own router
    "BartForConditionalGeneration": "bf16",
    "BertForMaskedLM": "bf16",
    "DebertaV2ForMaskedLM": "fp32",
    "ViTForImageClassification": "bf16",
    "SwinModel": "fp32",
    "ResNetForImageClassification": "fp32",  # buffers written in forward
    "SegformerForSemanticSegmentation": "fp32",
    "DetrForObjectDetection": "fp32",
    "CLIPModel": "bf16",  # a param without dimensions
    "Wav2Vec2ForCTC": "bf16",  # parametrized weights, a projection written to in place
    "WhisperForConditionalGeneration": "fp32",
    "VitsModel": "fp32",  # weight norm throughout
    "Qwen2VLForConditionalGeneration": "bf16",
    "LlavaForConditionalGeneration": "fp32",
    "Idefics3ForConditionalGeneration": "bf16",
}


@pytest.mark.sweep(every=8)
@pytest.mark.parametrize("name", QUICK)
def test_trains_as_in_the_plain_loop(name: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    kind, entry = ENTRIES[name]
    result = runner.run(kind, entry, tmp_path, QUICK[name])
    assert (result.status, result.reason) == ("works", "")
    assert result.evictions[0] > 0 and result.evictions[1] > 0


def test_the_page_lists_every_class_that_transformers_has() -> None:
    found = table.rows(PAGE.read_text())
    for kind in mappings.KINDS:
        assert list(found[kind.lower()]) == [entry.name for entry in mappings.entries(kind)], f"write {PAGE.name} anew"
    tasks = {task for kind in mappings.KINDS.values() for task in kind} | set(mappings.ELSEWHERE)
    assert tasks == mappings.known_tasks()


def test_the_page_counts_its_rows_and_nothing_is_broken() -> None:
    text = PAGE.read_text()
    found = table.rows(text)
    counts = Counter(result for kind in found.values() for result in kind.values())
    cells = " | ".join(str(counts[word]) for word in table.WORDS.values())
    assert f"| all | {counts.total()} | {cells} |" in text
    assert counts["works"] >= 400 and counts["broken"] == 0
    assert {name for kind in found.values() for name, result in kind.items() if result == "works"} >= set(QUICK)


def test_a_wrong_bit_a_crash_and_a_refusal_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, entry = ENTRIES["LlamaForCausalLM"]
    build = runner.build

    def with_a_change(entry: Entry, what: str) -> nn.Module:
        model = build(entry)
        made.append(model)
        if len(made) == 3:  # the model that is managed; the first two find a batch and run the plain loop
            if what == "wrong bit":
                model.lm_head.weight.data[0, 0] += 1e-3
            elif what == "complex":
                model.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            else:
                model.model.norm.forward = None
        return model

    for what, status, reason in (
        ("wrong bit", "failed", "differ"),
        ("complex", "refused", "complex64"),
        ("crash", "failed", "not callable"),
    ):
        made: list[nn.Module] = []
        monkeypatch.setattr(runner, "build", lambda entry, what=what: with_a_change(entry, what))
        result = runner.run(kind, entry, tmp_path, "fp32")
        assert result.status == status and reason in result.reason, result


def test_a_process_that_dies_or_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, entry = ENTRIES["LlamaForCausalLM"]

    def dies(kind: str, entry: Entry, folder: Path, precision: str | None) -> None:
        (folder / runner.MANAGED).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(sweep, "run", dies)
    died = sweep.run_apart(kind, entry)
    assert died["status"] == "failed" and "SIGKILL" in died["reason"]
    monkeypatch.setattr(sweep, "run", lambda *args: time.sleep(60))  # before the managed loop begins
    hung = sweep.run_apart(kind, entry, seconds=1)
    assert (hung["status"], hung["reason"]) == ("untried", "the plain loop: not done after 1 s")


def test_placeholders_are_learned_from_what_the_model_says() -> None:
    spec = Spec(torch.float32)
    assert spec.learn(ValueError("Image features and image tokens do not match, tokens: 0, features: 8"))
    assert spec.placeholders == {"image": 4}
    assert spec.learn(ValueError("Image features and image tokens do not match, tokens: 8, features: 128"))
    assert not spec.learn(ValueError("something else"))
