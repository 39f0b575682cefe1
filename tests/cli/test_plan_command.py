"""``gemini plan``: one screen that says whether it fits, how fast it is and what to change; and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import decoder_trace
from transformers import GPT2Config

import gemini
from gemini.errors import human_bytes
from gemini.jobs.plan_report import VERSION
from gemini.planning.hardware import load_hardware
from gemini.planning.planes import ADAM
from gemini.planning.timeline import Timeline
from gemini.planning.working import CUDA_CONTEXT, CUDA_KERNELS, allocator_bytes
from tests.cli.commands import FOUR_BLOCKS, Command, flat, llama_config, refused
from tests.planning.policies import check_plan

SIZES = ("--gpu", "24MiB", "--cpu", "64MiB", "--nvme", "200MB")


def played(path: Path, machine: str, schedule: str = "overlapped") -> Timeline:
    """The step of a plan in a file."""
    plan = gemini.Plan.from_json(path.read_text())
    return gemini.simulate(plan, load_hardware(machine).with_gpus(plan.layout.ranks), schedule=schedule)


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """The file of a trace of a small decoder, 5.6 M params."""
    path = tmp_path / "trace.json"
    path.write_text(decoder_trace(hidden=192, layers=8, vocab=2000).to_json())
    return path


def rows_of(screen: str) -> dict[str, list[str]]:
    """The table of who lives where: label to cells."""
    lines = screen.split("who lives where")[1].split("\n\n")[0].splitlines()[1:]
    return {line[:20].strip(): re.split(r"\s{2,}", line[20:].strip()) for line in lines}


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models--org--tiny"
    for part, text in {"refs/main": "abc", "snapshots/abc/config.json": GPT2Config(n_layer=2).to_json_string()}.items():
        (model / part).parent.mkdir(parents=True)
        (model / part).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "GPT2LMHeadModel, 53.6 M params" in Command("plan").ok("org/tiny", "--cpu", "4GiB").output


def test_a_screen_without_a_machine_says_all_that_needs_no_speeds(gemini_command: Command, traced: Path) -> None:
    result = gemini_command.ok("plan", "--trace", traced, *SIZES)
    lines = result.stdout.splitlines()
    assert len(lines) <= 30 and all(len(line) <= 80 for line in lines), result.stdout
    assert "given            gpu 24 MiB; cpu 64 MiB; nvme 190.7 MiB" in result.stdout
    assert re.search(r"^FITS: 12\.\d\d bytes per trained param, and 2\.\d\d for gradients", result.stdout, re.M)
    rows = rows_of(result.stdout)
    assert list(rows)[:5] == ["weights", "residual", "exp_avg", "exp_avg_sq", "grad"]
    assert {"activations", "staging", "in all", "free", "updates run on"} <= rows.keys()
    for words in ("beside params", "moved in a step", "step time        not known without a machine: --machine NAME"):
        assert words in result.stdout
    assert "gemini doctor --measure --json FILE" in " ".join(result.stdout.split())


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_a_machine_adds_the_time_and_what_bounds_it(gemini_command: Command, traced: Path, schedule: str) -> None:
    result = gemini_command.ok("plan", "--trace", traced, *SIZES, "--machine", "rtx4090", "--schedule", schedule)
    lines = result.stdout.splitlines()
    assert len(lines) <= 30 and all(len(line) <= 80 for line in lines), result.stdout
    assert re.search(
        rf"^step time +[\d.]+ \w+ predicted \({schedule}\), [\d,.]+ tokens/s \(a million in", result.stdout, re.M
    )
    assert re.search(r"^bound by +\w.*, [\d.]+ \w+ \(\d+% of the", result.stdout, re.M)
    assert "machine rtx4090" in result.stdout


def test_more_than_the_machine_has_is_refused_unless_it_is_said_to_be_there(
    gemini_command: Command, traced: Path, tmp_path: Path
) -> None:
    asked = ("plan", "--trace", traced, "--gpu", "24GiB")
    beyond = gemini_command(*asked, "--cpu", "200GiB", "--machine", "rtx4090", "--out", tmp_path / "plan.json")
    refused(beyond, "--cpu 200GiB is more than rtx4090 has", "If yours has it, say --machine rtx4090,cpu=200GiB.")
    assert not (tmp_path / "plan.json").exists()
    for how in (("--machine", "rtx4090,cpu=200GiB"), ("--cpu", "200GiB", "--machine", "rtx4090,cpu=256GiB,nvme=4TB")):
        result = gemini_command.ok(*asked, *how, "--out", tmp_path / "plan.json")
        assert "\nFITS: " in result.stdout, result.output
    played(tmp_path / "plan.json", "rtx4090,cpu=256GiB,nvme=4TB")
    for wrong in ("rtx4090,cpu", "rtx4090,disk=1TB", "rtx4090,cpu=much"):
        refused(gemini_command(*asked, "--machine", wrong), f"{wrong}: behind a machine stands what it has of gpu, cpu")


def test_a_plan_for_a_gpu_leaves_room_for_a_context(gemini_command: Command, tmp_path: Path) -> None:
    """The most that the runtime takes from a budget for it, with a row of its own."""
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "64", "--cpu", "1GiB", "--gpu")
    said = gemini_command.told(*asked, "2GiB")
    assert said["held"]["gpu"]["context"] == CUDA_CONTEXT + CUDA_KERNELS + allocator_bytes(ADAM)
    assert rows_of(gemini_command(*asked, "2GiB").stdout)["context"][0] == "1.377 GiB"
    refusal = gemini_command.told(*asked, "1GiB")["refusal"]
    assert "must fit at once beside the 1.377 GiB of a CUDA context" in refusal
    least = re.search(r"to at least (\d+) MiB", refusal)
    assert least and gemini_command.told(*asked, f"{least[1]}MiB")["fits"]
    on_cpu = gemini_command.told(*asked, "2GiB", "--compute", "cpu")
    assert "context" not in on_cpu["held"]["cpu"]


def test_models_that_compute_in_turn_are_planned_in_one_budget(gemini_command: Command, tmp_path: Path) -> None:
    config, plan = llama_config(tmp_path / "config.json"), tmp_path / "plan.json"
    asked = ("plan", config, "--seq-len", "64", "--with", f"ref={config}", "--with", f"critic={config},trained")
    alone = gemini_command.told("plan", config, "--seq-len", "64", "--cpu", "1GiB", "--gpu", "2GiB")
    said = gemini_command.told(*asked, "--cpu", "1GiB", "--gpu", "2GiB", "--machine", "rtx4090", "--out", plan)
    models = said["models"]
    assert said["fits"] and [*models] == ["ref", "critic", "model"]
    assert [each["trained"] for each in models.values()] == [False, True, True]
    assert said["held"]["gpu"]["context"] == alone["held"]["gpu"]["context"]
    for name in ("ref", "critic"):
        kept = {tier: held[name] for tier, held in said["held"].items() if name in held}
        assert models[name]["kept"] == {tier: n for tier, n in kept.items() if n}
    assert models["ref"]["kept"]["cpu"] >= 2 * said["num_params"] and "gpu" not in models["ref"]["kept"]
    assert said["moved"] == dict(sum((Counter(each["moved"]) for each in models.values()), Counter()))
    assert said["step"]["seconds"] > said["step"]["seconds_of_others"] > 0
    made = gemini.Plan.from_json(plan.read_text())
    assert made.trace.num_params == said["num_params"] and made.problem.others == 2 * models["ref"]["at_once"]
    screen = flat(gemini_command(*asked, "--cpu", "1GiB", "--gpu", "2GiB"))
    assert "with ref LlamaForCausalLM" in screen and "in turn room for the largest working set" in screen
    less = gemini_command(*asked, "--cpu", "2MiB")
    assert less.exit_code == 2 and "beside what the others keep" in flat(less)
    assert "DOES NOT FIT: critic, with what the other models leave of the budget: " in flat(less)
    refused(gemini_command(*asked, "--cpu", "1GiB", "--fastest"), "--with does not go with --fastest")
    refused(gemini_command(*asked, "--cpu", "1GiB", "--with", f"ref={config}"), "a name of its own for each")
    for wrong in ("ref", "=x", "ref=", "ref=x,other"):
        refused(gemini_command("plan", config, "--cpu", "1GiB", "--with", wrong), "a model is NAME=CONFIG")


def test_budgets_that_are_left_out_are_the_machines_with_the_margin_of_the_runtime(
    gemini_command: Command, traced: Path
) -> None:
    result = gemini_command("plan", "--trace", traced, "--machine", "rtx4090", "--json")
    said, machine = json.loads(result.stdout), load_hardware("rtx4090")
    for tier in gemini.Tier:
        assert said["budgets"][tier.value] == int(0.8 * (machine.capacity(tier) or 0))
        assert said["origins"][tier.value].startswith("(80% of ")
    given = gemini_command.told("plan", "--trace", traced, "--cpu", "1GiB")
    assert given["budgets"] == {"cpu": 2**30} and given["compute"] == "cpu" and given["origins"] == {}


def test_gpus_of_a_machine_divide_the_model_its_memory_and_its_drives(gemini_command: Command, traced: Path) -> None:
    options = ["plan", "--trace", traced, "--machine", "dgx-h100", "--json"]
    one, eight = (gemini_command.told(*options, "--gpus", n) for n in (1, 8))
    sixteen = gemini_command.told(*options, "--gpus", 16)
    for tier, share in (("gpu", 1), ("cpu", 8), ("nvme", 8)):
        assert eight["budgets"][tier] == sixteen["budgets"][tier] == one["budgets"][tier] // share
    assert (eight["tokens"], sixteen["tokens"]) == (8 * one["tokens"], 16 * one["tokens"])
    assert 0.99 < 8 * eight["needs"]["exp_avg"] / one["needs"]["exp_avg"] < 1.1  # shards are whole pages
    assert "all-gather" in eight["step"]["busy"] and "all-gather" not in one["step"]["busy"]


def test_what_does_not_fit_is_said_with_the_cheapest_change_and_that_one_is_enough(
    gemini_command: Command, traced: Path
) -> None:
    options = ["plan", "--trace", traced, "--gpu", "24MiB", "--cpu", "32MiB"]
    result = gemini_command(*options, "--nvme", "1MB")
    assert result.exit_code == 2 and not result.stderr, (result.output, result.exception)
    assert "DOES NOT FIT: " in result.stdout and "it needs  " in result.stdout and "beside params" in result.stdout
    assert "who lives where" not in result.stdout and "step time" not in result.stdout
    change = re.search(r"^cheapest change +raise the nvme budget to (\d+ \w+)", result.stdout, re.M)
    assert change, result.stdout
    gemini_command.ok(*options, "--nvme", change[1])
    said = gemini_command.told(*options, "--nvme", "1MB")
    assert said["fits"] is False and "Cheapest change" in said["refusal"] and said["held"] == {} and not said["step"]


def test_a_change_that_is_named_makes_it_fit(gemini_command: Command, traced: Path) -> None:
    """Where the gradients are what is too much."""
    options = ["plan", "--trace", traced, "--cpu", "70MiB"]
    result = gemini_command(*options)
    assert result.exit_code == 2
    assert re.search(r"^--gradients transient +no clipping +yes +\.$", result.stdout, re.M)
    assert re.search(r"^as asked +no +\.$", result.stdout, re.M)
    gemini_command.ok(*options, "--gradients", "transient")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--optimizer", "lion"], "8.0 bytes per trained param with Lion"),
        (["--optimizer", "lion", "--states", "compact"], "with Lion, compact"),
        (["--optimizer", "plain-sgd"], "4.0 bytes per trained param with SGD without momentum"),
        (["--optimizer", "muon"], "with Muon"),
    ],
)
def test_any_rule_is_planned_for(gemini_command: Command, traced: Path, options: list[str], words: str) -> None:
    result = gemini_command.ok("plan", "--trace", traced, *SIZES, *options)
    said = re.sub(r"(\d\.\d)\d", r"\1", " ".join(result.stdout.split()))
    assert words in said, said


def test_compact_states_need_less_and_are_named_where_they_help(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(
        tmp_path / "config.json", vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=3
    )
    gemini_command("trace", config, "--seq-len", 16, "--target", "cpu", "--out", tmp_path / "trace")
    options = ["plan", "--trace", tmp_path / "trace", "--cpu"]
    large = gemini_command.told(*options, "1GiB")["needs"]
    small = gemini_command.told(*options, "1GiB", "--states", "compact")["needs"]
    assert small["residual"] < 0.51 * large["residual"] and small["exp_avg_sq"] < 0.26 * large["exp_avg_sq"]
    assert small["exp_avg_scale"] < 0.02 * small["exp_avg"] and "exp_avg_scale" not in large
    assert sum(small.values()) < 0.55 * sum(large.values())  # 7 of 14, gradients among them
    result = gemini_command(*options, "100MiB")
    assert result.exit_code == 2 and "--states compact" in result.stdout, result.stdout
    gemini_command.ok(*options, "100MiB", "--states", "compact")


# ---- what it writes --------------------------------------------------------------------------------------------------


def test_json_is_the_same_answer_and_nothing_else(gemini_command: Command, traced: Path, tmp_path: Path) -> None:
    options = ["plan", "--trace", traced, *SIZES, "--machine", "rtx4090"]
    said = gemini_command.told(*options, "--json", "--out", tmp_path / "plan.json")
    plan = gemini.Plan.from_json((tmp_path / "plan.json").read_text())
    assert {tier: sum(held.values()) for tier, held in said["held"].items()} == {
        tier.value: num_bytes for tier, num_bytes in plan.bytes_per_tier.items()
    }
    assert said["moved"] == {str(boundary): num_bytes for boundary, num_bytes in plan.traffic.items()}
    screen = gemini_command(*options).stdout
    assert (said["gemini"], said["version"], said["fits"]) == ("plan report", VERSION, True)
    for tier, held in said["held"].items():
        assert sum(held.values()) <= said["budgets"][tier]
    rows = rows_of(screen)
    tiers = list(said["held"])
    assert [gemini.errors.human_bytes(sum(said["held"][tier].values())) for tier in tiers] == rows["in all"]
    assert sum(said["update"].values()) == said["num_trained"]
    assert f"{said['step']['tokens_per_second']:,.0f} tokens/s" in screen
    assert list(said["step"]["busy"].values()) == sorted(said["step"]["busy"].values(), reverse=True)


def test_every_field_of_the_json_is_in_the_reference(gemini_command: Command, traced: Path) -> None:
    said = gemini_command.told("plan", "--trace", traced, *SIZES, "--machine", "rtx4090")
    page = (Path(gemini.__file__).parents[1] / "docs" / "reference" / "cli.md").read_text()
    for name in (*said, *said["activations"], *said["step"]):
        assert f"`{name}`" in page, f"docs/reference/cli.md does not say what {name!r} is"


def test_a_saved_plan_runs_and_is_played(gemini_command: Command, traced: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ["plan", "--trace", traced, *SIZES, "--machine", "rtx4090", "--out", path]
    result = gemini_command(*options)
    assert f"written to {path}" in " ".join(result.stdout.split())
    said = gemini_command.told(*options)
    plan = gemini.Plan.from_json(path.read_text())
    check_plan(plan)
    assert played(path, "rtx4090").step_seconds == said["step"]["seconds"]
    assert played(path, "rtx4090", schedule="serial").step_seconds > said["step"]["seconds"]


# ---- what it refuses -------------------------------------------------------------------------------------------------


def changed(path: Path, to: Path, **fields: Any) -> Path:
    to.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return to


def test_files_that_are_not_what_they_should_be(gemini_command: Command, traced: Path, tmp_path: Path) -> None:
    def plan(path: Path) -> Any:
        return gemini_command("plan", "--trace", path, "--cpu", "1GiB")

    other = tmp_path / "other.json"
    refused(plan(changed(traced, other, version=99)), str(other), "written in version 99, and version 1 is read here")
    refused(plan(changed(traced, other, gemini="plan")), "a trace is needed, and this is a plan")
    refused(plan(changed(traced, other, tokens="many", params=[1])), "this trace is damaged")
    refused(plan(changed(traced, other, moments=[])), str(other), "has no moments")
    other.write_text("{")
    refused(plan(other), "this is not a trace: it is not JSON")
    machine = tmp_path / "machine.json"
    machine.write_text(load_hardware("rtx4090").to_json())
    figures = json.loads(machine.read_text())["figures"]
    del figures["nvme_read"]
    refused(
        gemini_command("plan", "--trace", traced, *SIZES, "--machine", changed(machine, other, figures=figures)),
        "hardware 'rtx4090' has no figure 'nvme_read'",
    )


def test_a_trace_of_another_model(gemini_command: Command, traced: Path, tiny_config: Path) -> None:
    refused(
        gemini_command("plan", tiny_config, "--trace", traced, "--cpu", "1GiB"),
        f"--trace {traced} is of another model",
        "Trace this model anew",
    )


def test_what_a_solver_writes_to_the_standard_output_is_not_in_the_answer(
    gemini_command: Command, traced: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process's own, below Python: `gemini plan --json` is read by programs."""
    make = gemini.plan

    def plan(*args: Any, **kwargs: Any) -> gemini.Plan:
        os.write(1, b"solver's noise\n")
        return make(*args, **kwargs)

    monkeypatch.setattr(gemini, "plan", plan)
    gemini_command.ok("plan", "--trace", traced, *SIZES, "--json")
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"


def test_a_step_is_drawn(gemini_command: Command, traced: Path, tmp_path: Path) -> None:
    page, drawn = tmp_path / "step.svg", tmp_path / "step.png"
    options = ["plan", "--trace", traced, *SIZES, "--machine", "rtx4090", "--out", tmp_path / "plan.json"]
    result = gemini_command.ok(*options, "--picture", page, "--picture", drawn)
    assert "<svg" in page.read_text() and drawn.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.count("written to ") == 3
    bitmap = gemini_command(*options, "--picture", tmp_path / "step.bmp")
    refused(bitmap, "a picture is a .png or an .svg, not 'bmp'", begun=True)
    (tmp_path / "folder.png").mkdir()
    refused(gemini_command(*options, "--picture", tmp_path / "folder.png"), "folder.png is a folder: give the name of")
    (tmp_path / "away.svg").symlink_to(tmp_path / "absent" / "step.svg")
    away = gemini_command(*options, "--picture", tmp_path / "away.svg")
    assert away.exit_code == 2 and "No such file" in away.stderr and "Traceback" not in away.output


@pytest.mark.slow
def test_tiles_of_tokens_are_advised_and_with_auto_chosen(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json", hidden_size=32)
    asked = ("plan", config, "--seq-len", "2048", "--gradient-checkpointing", "--gpu", "1443MiB", "--cpu", "64MiB")
    without = gemini_command(*asked)
    assert without.exit_code == 2, without.output
    assert re.search(r"^--tile-tokens auto +rounding +yes", without.stdout, re.M), without.output
    chosen = gemini_command.ok(*asked, "--tile-tokens", "auto")
    assert re.search(r"tiles of 256 tokens of the head", " ".join(chosen.stdout.split()))
    sizes = ("--cpu", "1GiB", "--gpu", "4GiB")
    roomy = gemini_command.told(*asked[:-4], *sizes, "--tile-tokens", "auto")
    assert roomy["tile_tokens"] is None


def test_a_lora_trains_its_adapters_only(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "64", "--cpu", "64MiB", "--gpu", "64MiB")
    whole, adapted = (gemini_command.told(*asked, *how) for how in ((), ("--lora", "4")))
    per_layer = 4 * (4 * (64 + 64) + 3 * (64 + 128))  # four linear layers of attention, three of the MLP
    assert adapted["num_trained"] == 2 * per_layer
    assert adapted["num_params"] == whole["num_params"] + adapted["num_trained"]
    assert adapted["model"] == whole["model"]
    assert 0 < adapted["needs"]["exp_avg"] < whole["needs"]["exp_avg"] / 10


@pytest.mark.filterwarnings("error:fan_in_fan_out", "error::FutureWarning")
def test_no_warning_of_a_library_stands_in_a_plan(gemini_command: Command, tmp_path: Path) -> None:
    """PEFT has one about layers like GPT-2's, transformers some about what it will rename."""
    GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256).save_pretrained(tmp_path)
    asked = ("plan", tmp_path / "config.json", "--seq-len", "64", "--cpu", "64MiB", "--gpu", "64MiB")
    assert "of them frozen" in gemini_command(*asked, "--lora", "4", "--gradient-checkpointing").stdout


def test_the_base_of_a_lora_may_be_in_4_bits(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json", hidden_size=128, intermediate_size=256)
    asked = ("plan", config, "--seq-len", "64", "--cpu", "64MiB", "--gpu", "64MiB", "--lora", "4", "--json")
    plain, quantized = (gemini_command.told(*asked, *how) for how in ((), ("--load-in-4bit",)))
    assert all(quantized[name] == plain[name] for name in ("num_params", "num_trained", "model"))
    in_layers = 2 * (4 * 128 * 128 + 3 * 128 * 256)  # the head and the embedding stay in bf16
    assert plain["needs"]["weights"] - quantized["needs"]["weights"] == (2 - 0.5) * in_layers


@pytest.mark.parametrize(
    "gpu",
    [pytest.param("1543MiB", id="fits"), pytest.param("1443MiB", id="fits only in tiles", marks=pytest.mark.slow)],
)
def test_alternatives_are_the_plans_that_their_options_make(gemini_command: Command, tmp_path: Path, gpu: str) -> None:
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "2048", "--machine", "dgx-h100", "--cpu", "1GiB", "--nvme", "1GiB")
    said = gemini_command.told(*asked, "--gpu", gpu, "--alternatives")
    rows = {row["options"]: row for row in said["alternatives"]}
    others = ["--gradients transient", "--states compact", "--lora 16", "--lora 16 --load-in-4bit", "--gpus 2"]
    checkpointing, tiles = "--gradient-checkpointing", "--gradient-checkpointing --tile-tokens auto"
    if gpu == "1543MiB":
        assert list(rows) == ["as asked", checkpointing, *others]
        fit = {"as asked": True, checkpointing: True}
    else:
        others = [f"{checkpointing} {other}" for other in others]
        assert list(rows) == ["as asked", checkpointing, others[0], tiles, *others[1:]]
        fit = {"as asked": False, checkpointing: False, tiles: True}
    assert {name: rows[name]["fits"] for name in fit} == fit
    for name in (*fit, *others[-2:]):  # all of them are made in one way
        row = rows[name]
        alone = gemini_command.told(*asked, "--gpu", gpu, *(name.split() if name != "as asked" else ()))
        assert alone["fits"] is row["fits"], name
        assert row["tokens_per_second"] == (alone["step"] or {}).get("tokens_per_second"), name


def test_an_alternative_that_cannot_be_says_why(gemini_command: Command, tmp_path: Path) -> None:
    config, own = llama_config(tmp_path / "config.json"), load_hardware("rtx4090")
    mine = replace(own, figures={key: figure for key, figure in own.figures.items() if key != "num_gpus"})
    (tmp_path / "mine.json").write_text(mine.to_json())
    asked = ("plan", config, "--seq-len", "64", "--machine", tmp_path / "mine.json", "--alternatives", "--json")
    last = gemini_command.told(*asked)["alternatives"][-1]
    assert (last["options"], last["fits"]) == ("--gpus 2", None)
    assert last["result"] == "hardware 'rtx4090' has no figure 'num_gpus'"


def test_a_second_gpu_is_in_the_same_box(gemini_command: Command, tmp_path: Path) -> None:
    """Which divides what it has; what they send to each other goes through host memory."""
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "64", "--cpu", "1GiB", "--gpu", "3GiB", "--json")
    one, two = (gemini_command.told(*asked, "--machine", "rtx4090", "--gpus", number) for number in ("1", "2"))
    assert two["fits"] and two["step"]["busy"]["all-gather"] > 0
    assert two["budgets"]["cpu"] == one["budgets"]["cpu"] // 2 and two["budgets"]["nvme"] == one["budgets"]["nvme"] // 2
    assert two["budgets"]["gpu"] == one["budgets"]["gpu"]
    saved = tmp_path / "plan.json"
    gemini_command.ok(*asked, "--machine", "rtx4090", "--gpus", "2", "--out", saved)
    assert played(saved, "rtx4090").step_seconds == two["step"]["seconds"]
    cluster = load_hardware("rtx4090").with_figures("a test", network=1e9)
    assert cluster.with_gpus(2) is cluster, "more of its GPUs are more machines"


def test_a_plan_says_when_its_drives_are_worn_out(gemini_command: Command, tmp_path: Path) -> None:
    """And writes at the speed that they keep up."""
    config, own = llama_config(tmp_path / "config.json", num_hidden_layers=8), load_hardware("rtx4090")
    asked = ("plan", config, "--seq-len", "64", "--cpu", "12MiB", "--nvme", "1GiB", "--gpu", "1417MiB")
    screens = {}
    for rated in (2**36, 2**60):
        path = tmp_path / f"{rated}.json"
        path.write_text(own.with_figures("a test", nvme_endurance=rated, nvme_write_sustained=1e6).to_json())
        screens[rated] = gemini_command(*asked, "--machine", path).stdout
    step = gemini_command.told(*asked, "--machine", tmp_path / f"{2**36}.json")["step"]
    written = step["nvme_written"]
    assert written > 0 and step["steps_until_worn"] == 2**36 // written < 100_000
    assert f"WARNING: {human_bytes(written)} written a step" in " ".join(screens[2**36].split())
    assert "drives wear" not in screens[2**60]
    assert step["busy"]["nvme write"] == pytest.approx(written / 1e6, rel=0.01)


def test_mfu_is_without_what_is_computed_again(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "64", "--cpu", "1GiB", "--gpu", "3GiB", "--machine", "rtx4090", "--json")
    ways = ((), ("--gradient-checkpointing",))
    plain, again = (gemini_command.told(*asked, *how)["step"] for how in ways)
    peak = load_hardware("rtx4090").figures["gpu_flops_bf16"].value
    assert plain["mfu"] == pytest.approx(plain["flops_per_second"] / peak)
    flops = plain["mfu"] * plain["seconds"]
    assert again["mfu"] * again["seconds"] == pytest.approx(flops, rel=0.02)
    assert again["flops_per_second"] / peak > 1.05 * again["mfu"]


def test_sums_in_fp16_are_quicker_where_the_card_has_them(gemini_command: Command, tmp_path: Path) -> None:
    """Products alone: attention's kernels sum in fp32 whatever the switch says."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = llama_config(tmp_path / "config.json", **shape)
    step = ("plan", config, "--seq-len", 2048, "--batch-size", 8, "--cpu", "32GiB", "--precision", "fp16")
    on_4090, h200 = (*step, "--machine", "rtx4090"), (*step, "--machine", "dgx-h200")
    plain, quick = (gemini_command.told(*on_4090, *how) for how in ((), ("--fp16-accumulation",)))
    assert (plain["precision"], quick["precision"]) == ("fp16", "fp16_accumulation") and plain["held"] == quick["held"]
    computing = [said["step"]["busy"]["compute"] for said in (plain, quick)]
    assert 0.5 * computing[0] < computing[1] < 0.75 * computing[0]
    assert quick["step"]["seconds"] < plain["step"]["seconds"]
    peak = load_hardware("rtx4090").figures["gpu_flops_fp16_accumulation"].value
    assert quick["step"]["mfu"] == pytest.approx(quick["step"]["flops_per_second"] / peak)
    assert gemini_command.told(*h200)["fits"]
    refused(gemini_command(*h200, "--fp16-accumulation"), "'dgx-h200' has no figure 'gpu_flops_fp16_accumulation'")


def test_mfu_of_stages_is_of_the_whole_step(gemini_command: Command, tmp_path: Path) -> None:
    """In which they wait for each other."""
    config = llama_config(tmp_path / "config.json")
    asked = ("plan", config, "--seq-len", "64", "--machine", "dgx-a100", "--json")
    step = gemini_command.told(*asked, "--gpus", "2", "--pp", "2", "--accumulate", "2")["step"]
    peak = load_hardware("dgx-a100").figures["gpu_flops_bf16"].value
    assert step["waited"]["other stages"] > 0 and step["mfu"] == pytest.approx(step["flops_per_second"] / peak)


# ---- over a mesh -----------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Four blocks."""
    return llama_config(tmp_path / "config.json", **FOUR_BLOCKS)


MESH = ("--machine", "dgx-a100", "--gpus", "16")


def test_a_mesh_says_its_stages_and_what_a_gpu_sends(gemini_command: Command, config: Path) -> None:
    result = gemini_command.ok("plan", config, *MESH, "--tp", "2", "--pp", "4", "--cp", "2", "--accumulate", "8")
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
    assert re.search(r"^mesh +pp 4 x cp 2 x tp 2; (breadth first|one forward, one backward)$", result.stdout, re.M)
    assert re.search(r"^  4 +3-3 ", result.stdout, re.M)
    assert "1x128 tokens; 8 micro-batches; 16 GPUs" in result.stdout and "1,024 tokens a step" in result.stdout
    for words in ("slices of layers", "parts of sequences", "hidden states", "bubble", "for other stages"):
        assert words in result.stdout
    told = gemini_command.told("plan", config, *MESH, "--tp", "8")
    assert told["mesh"]["mesh"] == "dp 2 x tp 8" and told["mesh"]["stages"] == []
    inside, between = told["mesh"]["sent"]["slices of layers"]
    assert inside > 0 and between == 0 and told["mesh"]["sent"]["weights and gradients"][1] > 0
    assert told["tokens"] == 2 * 128


def test_auto_finds_a_mesh_as_good_as_any_that_is_asked_for(gemini_command: Command, config: Path) -> None:
    asked = (config, "--machine", "dgx-a100", "--gpus", "4", "--json")
    best = gemini_command.told("plan", *asked, "--parallel", "auto")
    assert best["mesh"]["chosen"] and len(best["alternatives"]) == 4
    rates = [other["tokens_per_second"] for other in best["alternatives"]]
    assert best["step"]["tokens_per_second"] >= max(rates) and rates == sorted(rates, reverse=True)
    for options in (("--tp", "2"), ("--pp", "2", "--accumulate", "2"), ("--cp", "2", "--accumulate", "2")):
        one = gemini_command.told("plan", *asked, *options)
        assert best["step"]["tokens_per_second"] >= one["step"]["tokens_per_second"], options


def test_a_mesh_that_does_not_fit(gemini_command: Command, config: Path) -> None:
    result = gemini_command(
        "plan", config, *MESH, "--pp", "2", "--accumulate", "8", "--gpu", "1MiB", "--cpu", "1MiB", "--nvme", "1MiB"
    )
    assert result.exit_code == 2
    assert "DOES NOT FIT" in result.stdout and "mesh             pp 2 x dp 8" in result.stdout
    sizes = ("--pp", "2", "--accumulate", "8", "--cpu", "1MiB", "--nvme", "1MiB")
    refused, fits = (
        json.loads(gemini_command("plan", config, *MESH, *sizes, "--gpu", gpu, "--json").stdout)
        for gpu in ("1MiB", "1GiB")
    )
    same = ("tokens", "accumulate", "ranks", "num_params")
    assert [refused[name] for name in same] == [fits[name] for name in same] and refused.keys() == fits.keys()


def test_an_encoder_decoder_has_no_stages(gemini_command: Command, tmp_path: Path) -> None:
    body = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128,
        "num_layers": 4, "num_heads": 4, "d_kv": 16, "vocab_size": 256, "decoder_start_token_id": 0, "n_positions": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(body))
    refused(
        gemini_command("plan", path, *MESH, "--pp", "2", "--accumulate", "2"), "--pp 2: this model is an encoder-dec"
    )
    best = gemini_command.told("plan", path, "--machine", "dgx-a100", "--gpus", "2", "--parallel", "auto")
    assert "pp" not in best["mesh"]["mesh"] and not any("pp" in other["options"] for other in best["alternatives"])


def test_images_over_a_mesh_have_no_tokens(gemini_command: Command, tmp_path: Path) -> None:
    body = {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(body))
    best = gemini_command.told("plan", path, "--machine", "dgx-a100", "--gpus", "2", "--parallel", "auto")
    assert best["batch"]["pixel_values"] == [1, 3, 32, 32] and best["fits"]


def test_an_output_is_written_whole_or_not_at_all(
    gemini_command: Command, traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.json"
    result = gemini_command("plan", "--trace", traced, "--gpu", "1MiB", "--cpu", "1MiB", "--out", out)
    assert result.exit_code == 2 and "is not written: there is nothing that fits" in flat(result)
    assert not out.exists()
    write = Path.write_text

    def broken(path: Path, text: str, **kwargs: Any) -> int:
        write(path, text[:10], **kwargs)
        raise OSError("the drive is full")

    monkeypatch.setattr(Path, "write_text", broken)
    refused(
        gemini_command("plan", "--trace", traced, *SIZES, "--out", out),
        "cannot be written",
        "the drive is full",
        begun=True,
    )
    assert not out.exists()
