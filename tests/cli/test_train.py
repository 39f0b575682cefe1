"""``gemini train`` from the command line: it learns, keeps to its budgets, stops and goes on without losing a bit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks._progress import finish
from gemini.jobs import checkpoints
from gemini.planning.rules import RULES
from tests.cli.commands import Command, flat, refused, same_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def train(tiny_config: Path, text: Path) -> Command:
    """``train("--out", out, ...)``: a tiny model on a little text, a checkpoint every 5 of 10 steps."""

    base = ["--model", tiny_config, "--data", text, "--seq-len", 16, "--batch-size", 2, "--device", "cpu"]
    return Command("train", *base, "--steps", 10, "--save-every", 5, "--lr", 1e-2, "--log-every", 1)


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+  loss (\S+)", output, re.MULTILINE)]


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_it_learns_reports_and_saves(train: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train.ok("--out", out, "--cpu-memory", "64MiB", "--steps", 40)
    losses = losses_of(result.stdout)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert "need not be UTF-8" in result.stdout
    assert re.search(r"^cpu: stayed within its budget, peak \S+ \wiB of 64 MiB$", result.stdout, re.MULTILINE)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.use_cache, "only training goes without the cache"
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-35", "checkpoint-40"}


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.unattended])
def test_it_trains_by_every_rule_that_a_plan_can_be_made_for(name: str, train: Command, tmp_path: Path) -> None:
    """And goes on from a checkpoint with the same bits."""
    out, again, lr = tmp_path / "out", tmp_path / "again", 1e-3 if name in ("lion", "adan") else 1e-2
    losses = losses_of(train.ok("--out", out, "--optimizer", name, "--lr", lr).stdout)
    assert len(losses) == 10 and losses[-1] < losses[0]
    shutil.copytree(out, again)
    shutil.rmtree(again / "checkpoint-10")
    resumed = train.ok("--out", again, "--optimizer", name, "--lr", lr, "--resume", "auto")
    assert losses_of(resumed.stdout) == losses[5:]


def test_a_killed_run_goes_on_from_its_store(train: Command, tiny_config: Path, text: Path, tmp_path: Path) -> None:
    """No checkpoint was ever written. Another run does not replace its states, and goes on from them if told to."""
    whole, store = train("--out", tmp_path / "whole", "--steps", 60), tmp_path / "store"
    assert whole.exit_code == 0, (whole.output, whole.exception)
    store.mkdir()
    durable = ["--durable-every", 1, "--nvme-path", store, "--nvme-memory", "64MiB", "--save-every", 0, "--steps", 60]
    base = ["--model", tiny_config, "--data", text, "--seq-len", 16, "--batch-size", 2, "--device", "cpu"]
    how = [*base, "--lr", 1e-2, "--log-every", 1, "--out", tmp_path / "out", *durable]
    command = [sys.executable, "-m", "gemini", "train", *map(str, how)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 4/60"):
            run.kill()
            break
    run.stdout.close()
    assert run.wait(60) == -signal.SIGKILL
    held = f"holds the durable store of the run in {tmp_path / 'out'}"
    refused(train("--out", tmp_path / "other", *durable), held, begun=True)
    refused(train("--out", tmp_path / "out", *durable), "Continue it with --resume auto", begun=True)
    rest = train.ok("--out", tmp_path / "out", *durable, "--resume", "auto")
    found = re.search(r"resuming from the store in \S+ after step (\d+)", flat(rest))
    # The line of step 4 comes before its commit begins, which waits for that of step 3.
    assert found is not None and 2 <= int(found[1]) < 60 and len(losses_of(rest.stdout)) == 60 - int(found[1])
    assert losses_of(rest.stdout) == losses_of(whole.stdout)[-len(losses_of(rest.stdout)) :]
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    more = train.ok("--out", tmp_path / "more", "--steps", 61, "--resume", store, "--save-every", 0)
    assert "after step 60" in more.output, (more.output, more.exception)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_resumed_run_is_the_uninterrupted_run(train: Command, tmp_path: Path, precision: str) -> None:
    """Dropout, schedule, warm-up, accumulation and the order of the text included; under another budget."""
    common = ["--precision", precision, "--accumulate", 2, "--warmup", 3]
    whole = train.ok("--out", tmp_path / "whole", *common)
    resume = tmp_path / "whole" / "checkpoint-5"
    rest = train.ok("--out", tmp_path / "rest", *common, "--cpu-memory", "16MiB", "--resume", resume)
    assert losses_of(rest.stdout) == losses_of(whole.stdout)[5:]
    assert same_weights(tmp_path / "whole", tmp_path / "rest")


def test_resume_auto_goes_on_or_says_that_there_is_nothing(train: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = train.ok("--out", out, "--steps", 5, "--schedule", "constant", "--resume", "auto")
    assert "no checkpoint in" in first.stdout
    again = train.ok("--out", out, "--steps", 5, "--schedule", "constant", "--resume", "auto")
    assert losses_of(again.stdout) == []
    assert "these are all of --steps 5: only the model is written" in again.stdout
    named = train("--out", out, "--steps", 5, "--resume", out / "checkpoint-5")
    refused(named, "its 5 steps are all of --steps 5", begun=True)
    written = (out / "model.safetensors").stat().st_mtime_ns
    past = train.ok("--out", out, "--steps", 3, "--schedule", "constant", "--resume", "auto")
    assert "nothing is left to do" in past.stdout, past.output
    assert "step 5 is past --steps 3" in " ".join(past.stdout.split()) and "To go on" not in past.stdout
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    more = train.ok("--out", out, "--steps", 8, "--schedule", "constant", "--resume", "auto")
    assert "after step 5" in more.stdout and len(losses_of(more.stdout)) == 3
    assert steps_of(out) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_steps_that_are_made_again_have_one_row(train: Command, tmp_path: Path) -> None:
    """Whether the last checkpoint is behind them or the run starts anew; trackers are told what the file has."""
    out = tmp_path / "out"
    train.ok("--out", out, "--schedule", "constant", "--steps", 8)
    shutil.rmtree(out / "checkpoint-8")
    again = train.ok("--out", out, "--schedule", "constant", "--resume", "auto", "--epochs", 0.1)
    assert steps_of(out) == list(range(1, 14)), again.output
    done = train("--out", out, "--schedule", "constant", "--resume", "auto", "--epochs", 0.1)
    assert "these are all of --epochs 0.1, 13 steps: only the model" in done.stdout
    history = json.loads((out / "checkpoint-13" / "trainer_state.json").read_text())["log_history"]
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("tokens_per_second", "step_seconds", "seconds_left", "cpu_bytes", "cpu_peak_bytes"):
        assert row[name] == history[-1][name], "and so have trackers"


def test_a_model_that_was_not_written_is_written_by_resume_auto(train: Command, tmp_path: Path) -> None:
    """As after a death between the last checkpoint and the end."""
    train.ok("--out", tmp_path / "out")
    before = weights_of(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    train.ok("--out", tmp_path / "out", "--resume", "auto")
    after = weights_of(tmp_path / "out")
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_step_of_another_size_is_said(train: Command, tmp_path: Path) -> None:
    train.ok("--out", tmp_path / "out")
    result = train.ok("--out", tmp_path / "out", "--resume", "auto", "--steps", 12, "--accumulate", 3)
    assert "a step was 2 sequences before, it is 6 from now on" in result.stdout


def test_resuming_with_other_text_is_refused(train: Command, tmp_path: Path, text: Path) -> None:
    train.ok("--out", tmp_path / "out")
    text.write_text("other text " * 100)
    result = train("--out", tmp_path / "out", "--resume", "auto", "--steps", 20)
    refused(result, "stands in the middle of other data", begun=True)


def test_a_resumed_run_follows_the_command_line(train: Command, tmp_path: Path) -> None:
    """Another --lr is taken, not silently replaced by the checkpoint's."""
    common = ["--out", tmp_path / "out", "--schedule", "constant"]
    train.ok(*common)
    resumed = train.ok(*common, "--steps", 12, "--lr", 5e-3, "--resume", "auto")
    assert re.findall(r"  lr (\S+)$", resumed.stdout, re.MULTILINE) == ["0.005", "0.005"]


@pytest.mark.parametrize(
    ("precision", "says"),
    [("bf16", "The gradients of step 2 hold inf or NaN"), ("fp16", "The loss has been inf or NaN for 10 steps")],
)
def test_a_run_that_explodes_is_stopped(train: Command, tmp_path: Path, precision: str, says: str) -> None:
    out = tmp_path / "out"
    result = train("--out", out, "--lr", 1e30, "--steps", 100, "--save-every", 0, "--precision", precision)
    refused(result, says, begun=True)
    assert not (out / "model.safetensors").exists()
    assert (out / "checkpoint-1").is_dir() == (precision == "bf16")


@pytest.mark.slow
def test_ctrl_c_saves_the_last_whole_step_and_says_how_to_go_on(
    train: Command, gemini_command: Command, tmp_path: Path, tiny_config: Path, text: Path
) -> None:
    common = ["--steps", "150", "--save-every", "0", "--schedule", "constant"]
    whole = train.ok("--out", tmp_path / "whole", *common)

    words = ["--model", tiny_config, "--data", text, "--seq-len", 16, "--batch-size", 2]
    words += ["--device", "cpu", "--lr", 1e-2]
    command = [sys.executable, "-m", "gemini", "train", *map(str, words), "--log-every", "1", *common]
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest, error = finish(process)
    output = "".join(said) + rest
    assert process.returncode == 130, output + error
    assert "Stopping after this step, then saving." in error
    assert "Traceback" not in error
    hint = re.search(r"^Stopped after step (\d+) of 150\. To go on: (gemini train .*)$", output, re.MULTILINE)
    assert hint is not None, output
    assert (tmp_path / "out" / f"checkpoint-{hint[1]}").is_dir()
    assert not (tmp_path / "out" / "model.safetensors").exists()

    resumed = gemini_command.ok(*shlex.split(hint[2])[1:])
    assert losses_of(output) + losses_of(resumed.stdout) == losses_of(whole.stdout)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_budget_that_is_too_small_is_a_plain_refusal(train: Command, tmp_path: Path) -> None:
    refused(train("--out", tmp_path / "out", "--cpu-memory", "100KiB"), "KiB", begun=True)


def test_an_nvme_folder_that_is_not_there_is_a_plain_refusal(train: Command, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    result = train("--out", tmp_path / "out", "--nvme-memory", "1GiB", "--nvme-path", absent)
    refused(result, str(absent), begun=True)


def test_two_runs_in_one_folder_are_refused(train: Command, tmp_path: Path) -> None:
    with checkpoints.claimed(tmp_path / "out"):
        refused(train("--out", tmp_path / "out"), "is in use: another gemini train writes into it")
    assert list((tmp_path / "out").iterdir()) == []
    train.ok("--out", tmp_path / "out")


def test_a_model_that_does_not_fit_is_told_in_options(train: Command, gemini_command: Command, tmp_path: Path) -> None:
    small = ("--out", tmp_path / "out", "--cpu-memory")
    said = train(*small, "800KiB").stderr
    assert "nvme_path=" not in said and "only evaluated" not in said
    found = re.search(r"give --nvme-path FOLDER --nvme-memory (\d+ ?\w+), or raise the cpu", said)
    assert found, said
    planned = shlex.split(said.partition("Other ways: gemini ")[2])
    assert {"--seq-len", "--cpu", "800KiB", "--alternatives"} <= {*planned}
    ways = gemini_command(*planned)
    assert ways.exit_code == 2 and re.search("as asked +no", ways.output) and "--states compact" in ways.output
    train.ok(*small, "800KiB", "--nvme-path", tmp_path, "--nvme-memory", found[1])


def test_a_lora_by_the_plan_of_a_lora(train: Command, gemini_command: Command, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    train.ok("--out", tmp_path / "whole", "--save-every", 0)
    model, planned = tmp_path / "whole", tmp_path / "plan.json"
    asked = ("--seq-len", 16, "--batch-size", 2, "--lora", 4)
    gemini_command.ok("plan", model, *asked, "--gpu", "0MiB", "--cpu", "64MiB", "--out", planned)
    train.ok("--model", model, "--bytes", "--lora", 4, "--plan", planned, "--out", tmp_path / "adapted")
    assert (tmp_path / "adapted" / "adapter_model.safetensors").is_file()


def test_a_damaged_checkpoint_is_a_plain_refusal(train: Command, tmp_path: Path) -> None:
    train.ok("--out", tmp_path / "out")
    newest = tmp_path / "out" / "checkpoint-10"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(train("--out", tmp_path / "out", "--steps", 20, "--resume", "auto"), begun=True)


def test_it_spills_to_a_folder_and_leaves_nothing_there(train: Command, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    roomy = train("--out", tmp_path / "roomy", "--cpu-memory", "64MiB")
    tight = ["--cpu-memory", "700KiB", "--nvme-memory", "16MiB", "--nvme-path", spill]
    small = train.ok("--out", tmp_path / "small", *tight)
    assert re.search(r"^nvme: stayed within its budget, peak (?!0 B)", small.stdout, re.MULTILINE), small.stdout
    assert losses_of(small.stdout) == losses_of(roomy.stdout)
    assert list(spill.iterdir()) == []


def test_a_model_folder_with_weights_and_tokenizer_goes_on_training(
    train: Command, gemini_command: Command, tmp_path: Path, text: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    first = tmp_path / "first"
    train.ok("--out", first, "--steps", 20)
    kit = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    kit.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    kit.train_from_iterator(
        [text.read_text()], tokenizers.trainers.BpeTrainer(vocab_size=150, special_tokens=["?", "<end>"])
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=kit, eos_token="<end>", unk_token="?")
    fast.save_pretrained(first)
    second = tmp_path / "second"
    words = ["--model", first, "--data", text, "--seq-len", 16, "--device", "cpu", "--steps", 5, "--save-every", 0]
    result = gemini_command.ok("train", *words, "--out", second)
    assert f"tokenizer of {first} with {len(fast)} ids, {fast.eos_token_id} ends a document" in result.stdout
    assert (second / "tokenizer.json").is_file()
    assert json.loads((second / "config.json").read_text())["n_layer"] == 2


def test_what_the_files_of_a_model_lack_is_said(train: Command, tmp_path: Path) -> None:
    """A classifier has no head that predicts tokens."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=258
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    result = train.ok("--model", tmp_path / "model", "--bytes", "--steps", 1, "--out", tmp_path / "out")
    assert "not in its files, and therefore drawn at random: lm_head.weight\n" in result.stdout


def test_gradient_checkpointing_changes_no_bit(train: Command, tmp_path: Path) -> None:
    plain = train("--out", tmp_path / "plain")
    checkpointed = train.ok("--out", tmp_path / "checkpointed", "--gradient-checkpointing")
    assert losses_of(checkpointed.stdout) == losses_of(plain.stdout)
    words = ["--gradient-checkpointing", "--offload-activations", "nvme", "--nvme-path", tmp_path]
    offloaded = train.ok("--out", tmp_path / "offloaded", *words)
    assert losses_of(offloaded.stdout) == losses_of(plain.stdout)


@pytest.mark.slow
def test_compiled_blocks_and_another_attention(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is compiled too, and the same wherever chunks live."""
    from gemini.jobs import train as job
    from gemini.train.modules.compiled import compile_blocks

    num_blocks: list[int] = []
    monkeypatch.setattr(
        job, "compile_blocks", lambda model: num_blocks.append(compile_blocks(model, backend="aot_eager"))
    )
    runs = {}
    nvme = ["--cpu-memory", "1600KiB", "--nvme-path", tmp_path]
    for name, more in {"ram": ["eager", "--compile"], "disk": ["eager", "--compile", *nvme], "sdpa": ["auto"]}.items():
        result = train.ok("--out", tmp_path / name, "--steps", 2, "--attn-implementation", *more)
        runs[name] = result.stdout
    assert num_blocks == [2, 2] * 2  # the model that is planned for, and the one that is drawn
    assert "bf16, eager attention, compiled blocks\n" in runs["ram"] and "bf16, sdpa attention\n" in runs["sdpa"]
    assert losses_of(runs["ram"]) == losses_of(runs["disk"])
    assert same_weights(tmp_path / "ram", tmp_path / "disk")


def test_attention_that_cannot_be_is_refused(train: Command, tmp_path: Path) -> None:
    for asked, said in {"flash_attention_2": "needs the package flash_attn", "fast": "is not supported"}.items():
        refused(train("--out", tmp_path / "out", "--attn-implementation", asked), asked, said, begun=True)
