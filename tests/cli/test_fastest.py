"""``gemini plan --fastest`` against every way there is: as quick as the best of them, no bound above what is played,
not slower on a better machine; and what it says runs.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import pytest
from rich.console import Console
from traces import decoder_trace
from transformers import AutoConfig, LlamaConfig, MixtralConfig

import gemini
from gemini.errors import BudgetExceeded, parse_bytes
from gemini.jobs import JobError, planner
from gemini.jobs.planner import Traces, Way, choose
from gemini.jobs.settings import PlanSettings, TraceSettings
from gemini.jobs.train_options import Parser, options_of
from gemini.planning import quickest
from gemini.planning.hardware import load_hardware
from gemini.planning.quickest import numbers_up_to
from gemini.planning.rules import RULES
from gemini.planning.sizes import DEEP, SHALLOW, deepened, with_kept
from gemini.planning.trace import MemoryTrace, Phase
from tests.cli.commands import FOUR_BLOCKS, Command, llama_config, refused

CLOSE = 1.03
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bert": {"intermediate_size": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 2},
    "qwen3_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
KINDS = ("llama", "mixtral", "gpt2", "bert", "qwen3_moe", "olmo2", "opt")
SPEEDS = ("gpu_flops_bf16", "h2d", "d2h", "dram_bandwidth", "nvme_read", "nvme_write", "nvme_write_sustained")


class Case(NamedTuple):
    """A step to choose for."""

    settings: PlanSettings
    shape: dict[str, Any]
    """Of the model, as ``decoder_trace`` takes it."""


def draw(number: int, folder: Path) -> Case:
    """The case of that number: a model, a machine that is another one's, faster here and slower there, budgets from
    hardly enough on, and tokens of a step.
    """
    rng = random.Random(number)
    shape = {"hidden": rng.choice([256, 512, 1024]), "layers": rng.randint(2, 5), "vocab": rng.choice([500, 8000])}
    length = rng.choice([64, 256])
    config = llama_config(folder / "config.json", **{**FOUR_BLOCKS, "max_position_embeddings": 4096})
    hardware = load_hardware(rng.choice(["rtx4090", "rtx5090", "h100", "rtx3090"]))
    speeds = {key: hardware.figures[key].value * 10 ** rng.uniform(-2, 1) for key in SPEEDS if hardware.has(key)}
    speeds["update_cpu"] = hardware.figures["update_cpu"].value * 10 ** rng.uniform(-1, 1)
    (folder / "machine.json").write_text(hardware.with_figures("drawn", **speeds).to_json())
    params = decoder_trace(**shape, tokens=length).num_params
    gpu = int(params * rng.choice([0.5, 2, 6, 20])) + (40 << 20) + (1458 << 20)
    settings = PlanSettings(
        config=str(config),
        machine=str(folder / "machine.json"),
        seq_len=length,
        fastest=True,
        tokens_per_step=length * rng.choice([1, 4, 6, 12, 16]),
        gpu=f"{gpu}B",
        cpu=f"{int(params * rng.choice([4, 12, 17, 40])) + (100 << 20)}B",
        nvme="100GiB",
        schedule=rng.choice(["overlapped"] * 3 + ["serial"]),
    )
    settings.check()
    return Case(settings, shape)


def stand_in(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """Traces by arithmetic in the place of those of a model."""

    def take(settings: TraceSettings) -> MemoryTrace:
        length = settings.seq_len or 0
        tokens = settings.batch_size * length
        kept = {"checkpointing": settings.gradient_checkpointing, "kept_blocks": settings.kept_blocks or 0}
        made = decoder_trace(**shape, tokens=tokens, **kept)
        return replace(made, batch={"input_ids": (settings.batch_size, length)}, target="cuda")

    monkeypatch.setattr(planner, "take_trace", take)


def every_way(settings: PlanSettings, shape: dict[str, Any]) -> Iterator[tuple[Way, float]]:
    """All that fit, with every number of kept blocks and in both orders, each planned and played as a whole, with its
    seconds.
    """
    sequences = (settings.tokens_per_step or 0) // (settings.seq_len or 1)
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    asked = replace(settings, fastest=False, tokens_per_step=None)
    for size, kept, where, order in product(sizes, (None, *range(shape["layers"] + 1)), ("no", "cpu"), ("dfs", "bfs")):
        if where == "cpu" and kept is None or order == "bfs" and size == sequences:
            continue
        changes = {"gradient_checkpointing": kept is not None, "kept_blocks": kept, "offload_activations": where}
        changes["order"] = order
        way = Way(replace(asked, batch_size=size, accumulate=sequences // size, **changes))
        try:
            plan = way.plan()
        except BudgetExceeded:
            continue
        yield way, way.play(plan).step_seconds


def chosen_seconds(settings: PlanSettings) -> float | None:
    with Console(stderr=True, quiet=True).status("") as status:
        way, found, _ = choose(Way(settings), status)
    return way.play(way.plan()).step_seconds if found else None


def check(case: Case) -> str:
    """Compare with the whole list; says what was found."""
    ways = list(every_way(case.settings, case.shape))
    mine = chosen_seconds(case.settings)
    if mine is None:
        assert not ways
        return "nothing fits"
    best = min(seconds for _, seconds in ways)
    assert mine <= CLOSE * best, f"{mine} s chosen, {best} s is the best of {len(ways)}"
    for way, seconds in ways:
        for least in way.least(), way.seconds_of(way.plan(), played=False):
            assert least <= seconds * (1 + 1e-6), f"{least} s at least, and {seconds} s as played"
    return (
        f"{len(ways)} ways, {mine / best - 1:.2%} above the best, {max(s for _, s in ways) / best:.2f} times the worst"
    )


@pytest.mark.parametrize(
    "number",
    [2, 11, *(pytest.param(n, marks=pytest.mark.slow) for n in (*range(40), 1189, 1195) if n not in (2, 11))],
)
def test_no_way_is_much_quicker(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(number, tmp_path)
    stand_in(monkeypatch, case.shape)
    print(number, check(case))


@pytest.mark.parametrize(
    "better",
    [
        {"gpu": 4, "h2d": 3, "d2h": 3},
        pytest.param({"cpu": 4}, marks=pytest.mark.slow),
        pytest.param({"gpu": 4}, marks=pytest.mark.slow),
        pytest.param({"dram_bandwidth": 3}, marks=pytest.mark.slow),
        pytest.param({"gpu_flops_bf16": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda better: "-".join(better),
)
def test_more_memory_and_higher_speeds_never_make_a_step_slower(
    better: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is not looked at because it could not be quicker by half a percent."""
    case = draw(1, tmp_path)
    stand_in(monkeypatch, case.shape)
    settings, hardware = case.settings, load_hardware(case.settings.machine or "")
    tiers = {name: times for name, times in better.items() if name in ("gpu", "cpu")}
    speeds = {name: hardware.figures[name].value * times for name, times in better.items() if name not in tiers}
    (tmp_path / "better.json").write_text(hardware.with_figures("drawn", **speeds).to_json())
    sizes = {name: f"{int(parse_bytes(getattr(settings, name)) * times)}B" for name, times in tiers.items()}
    before = chosen_seconds(settings)
    after = chosen_seconds(replace(settings, machine=str(tmp_path / "better.json"), **sizes))
    assert before is not None and after is not None and after <= 1.006 * before


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("llama", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(KINDS, (False, True))
            if case != ("llama", True)
        ),
    ],
)
def test_a_trace_of_many_layers_is_made_of_two(
    kind: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the step as it is and in tiles, to the last byte; two traces are taken, whatever the number of layers."""
    shape = {"hidden_size": 32, "num_hidden_layers": 9, "num_attention_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model(kind, **shape, **MORE.get(kind, {"num_key_value_heads": 2, "intermediate_size": 48}))
    config.save_pretrained(tmp_path)
    taken: list[int | None] = []
    take = planner.take_trace
    monkeypatch.setattr(planner, "take_trace", lambda own: (taken.append(own.layers), take(own))[1])
    settings = TraceSettings(
        config=str(tmp_path), batch_size=2, seq_len=512, gradient_checkpointing=checkpointing, tile_tokens="auto"
    )
    made = Traces(of_two=True).take(settings)
    assert taken == [SHALLOW, DEEP] and made.tiled is not None
    assert made == take(settings)


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ("llama", "bert"))]
)
def test_a_trace_with_kept_blocks_is_made_of_two(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when it is traced: the same moments and work, and the bytes but for what the first of them was given."""
    shape = {"hidden_size": 32, "num_hidden_layers": 9, "num_attention_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model(kind, **shape, **MORE.get(kind, {"num_key_value_heads": 2, "intermediate_size": 48}))
    config.save_pretrained(tmp_path)
    settings = TraceSettings(config=str(tmp_path), batch_size=2, seq_len=512, gradient_checkpointing=True)
    take, taken = planner.take_trace, list[TraceSettings]()
    monkeypatch.setattr(planner, "take_trace", lambda own: (taken.append(own), take(own))[1])
    traces = Traces(of_two=True)
    input_bytes = 2 * 512 * 32 * 2
    for kept in (1, 4, 12):
        made, real = traces.take(replace(settings, kept_blocks=kept)), take(replace(settings, kept_blocks=kept))
        assert made.kept_blocks == real.kept_blocks == min(kept, 9) and made.checkpointing
        assert abs(made.checkpoint_bytes - real.checkpoint_bytes) <= 2 * input_bytes < made.checkpoint_bytes
        assert made.flops == pytest.approx(real.flops, rel=0.01)
        assert made.peak_bytes == pytest.approx(real.peak_bytes, abs=2 * input_bytes)
        assert len(made.moments) == pytest.approx(len(real.moments), abs=2)
        for phase in Phase:
            numbers = [sum(m.phase is phase for m in trace.moments) for trace in (made, real)]
            assert numbers[0] == pytest.approx(numbers[1], abs=2)
    assert len(taken) == 4, "three and five layers, without a kept one and with all"
    assert with_kept(traces.take(settings), real, 0) == traces.take(settings)


def test_layers_of_two_kinds_are_traced_one_by_one(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 5
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    AutoConfig.for_model("gemma2", layer_types=kinds, **shape, **heads).save_pretrained(tmp_path)
    settings = [TraceSettings(config=str(tmp_path), seq_len=16, layers=layers) for layers in (SHALLOW, DEEP, None)]
    traces = Traces(of_two=True)
    three, five, ten = map(traces.take, settings)
    assert ten == Traces().take(settings[2])
    with pytest.raises(ValueError, match="not there|evenly|other"):
        deepened(three, replace(five, moments=five.moments[:-40]), 10)


FASTEST = ("--machine", "rtx4090", "--seq-len", 64, "--fastest", "--tokens-per-step", 512)


def test_the_answer_says_what_else_there_is_and_what_runs_it(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json", **FOUR_BLOCKS)
    said = gemini_command.told("plan", config, *FASTEST, "--gpu", "1463MiB", "--cpu", "2GiB")
    best = said["fastest"]
    assert said["tokens"] == 512 and best["played"] <= best["candidates"]
    rates = [other["tokens_per_second"] for other in said["alternatives"]]
    assert rates == sorted(rates, reverse=True) and len(rates) > 1
    again = gemini_command.told(
        "plan", config, "--machine", "rtx4090", "--seq-len", 64, *shlex.split(best["options"]),
        "--gpu", "1463MiB", "--cpu", "2GiB",
    )  # fmt: skip
    assert again["step"]["seconds"] == pytest.approx(said["step"]["seconds"], rel=0.03)
    page = (Path(gemini.__file__).parents[1] / "docs" / "reference" / "cli.md").read_text()
    assert all(f"`{name}`" in page for name in ("fastest", *best))
    screen = gemini_command.ok("plan", config, *FASTEST, "--gpu", "1463MiB", "--cpu", "2GiB").stdout
    assert f"chosen {best['options']}" in " ".join(screen.split())
    assert "\nrun it with\ngemini sft --model-name-or-path" in screen
    assert "\nnext to it " in screen


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--nvme", "1GB", "--cpu", "100MiB", "--precision", "fp32"),
        pytest.param(("--lora", 8, "--optimizer", "lion", "--states", "compact"), marks=pytest.mark.slow),
    ],
    ids=lambda more: "-".join(map(str, more[:2])) or "plain",
)
def test_what_runs_it_is_read(
    more: tuple[Any, ...], gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command by the command's own parser, the lines by Python: both are of the step that was chosen."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    config = llama_config(tmp_path / "config.json", **FOUR_BLOCKS)
    sizes = ("--gpu", "1463MiB", "--cpu", "2GiB")
    said = gemini_command.told("plan", config, *FASTEST, *sizes, "--out", "plan.json", *more)
    gemini_words, kind, *words = shlex.split(said["fastest"]["command"])
    assert (gemini_words, kind) == ("gemini", "sft")
    options = options_of(Parser("sft").read(words))
    made = options.args.per_device_train_batch_size, options.args.gradient_accumulation_steps
    assert made == (said["batch"]["input_ids"][0], said["accumulate"]) and options.args.max_length == 64
    assert options.args.gradient_checkpointing is bool(said["checkpointing"])
    assert options.config.precision == said["precision"] and options.model.lora_r == (8 if "--lora" in more else 16)
    assert (options.ours.nvme_path is not None) == bool(sum(said["held"].get("nvme", {}).values()))
    seen: list[Any] = []
    model = SimpleNamespace(gradient_checkpointing_enable=lambda: seen.append("checkpointing"))
    monkeypatch.setattr(gemini, "GeminiDDP", lambda model, config: seen.append(config))
    monkeypatch.setattr(peft, "get_peft_model", lambda model, config: model)
    lines = "\n".join(said["fastest"]["python"])
    assert ("nvme='1GB', nvme_path='FOLDER'" in lines) == (options.ours.nvme_path is not None)
    exec(lines, {"model": model})
    *checkpointing, written = seen
    assert bool(checkpointing) is bool(said["checkpointing"]) and written.precision == said["precision"]
    for config in (options.config, written):
        assert config.gradients == said["gradients"] and isinstance(config.placement, gemini.Plan)
        assert config.rule_spec.name == said["optimizer"] and config.states == options.ours.states


LIGER = """
def forward(self, hidden):
    return type(self).forward(self, hidden)

def apply_liger_kernel_to_llama(model):
    model.model.norm.forward = forward.__get__(model.model.norm)
"""
PLAIN = ["import torch", "from transformers import AutoConfig, AutoModelForCausalLM"]
STEP = ["ids = torch.zeros(2, 32, dtype=torch.long)", "model(input_ids=ids, labels=ids).loss.backward()"]
LINES = [
    *(("--optimizer", rule) for rule in RULES if rule != "lion"),
    ("--optimizer", "lion", "--states", "compact", "--gradient-checkpointing"),
    ("--lora", 4),
    ("--kernels", "liger"),
    ("--attn-implementation", "eager", "--nvme", "1GB", "--cpu", "20MiB", "--precision", "fp32"),
]


@pytest.mark.parametrize(
    "more",
    [
        ("--lora", 4, "--optimizer", "lion", "--attn-implementation", "eager", "--gradient-checkpointing"),
        *(pytest.param(more, marks=pytest.mark.slow) for more in LINES),
    ],
    ids=lambda more: "-".join(map(str, more[:4])),
)
def test_the_lines_run_in_an_interpreter_of_their_own(
    more: tuple[Any, ...], gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no more than the model that the config describes, up to a backward."""
    monkeypatch.chdir(tmp_path)
    for folder in ("FOLDER", "liger_kernel/transformers"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "liger_kernel/transformers/__init__.py").write_text(LIGER)
    config = llama_config(tmp_path / "config.json")
    step = ("--compute", "cpu", "--cpu", "8GiB", "--seq-len", 32, "--batch-size", 2, "--fastest", "--out", "plan.json")
    lines = gemini_command.told("plan", config, *step, *more)["fastest"]["python"]
    built = "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('config.json')).train()"
    program = "\n".join([*PLAIN, built, *lines, *STEP])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_plan_with_sums_in_fp16_is_run_with_them(gemini_command: Command, tmp_path: Path) -> None:
    config, out = llama_config(tmp_path / "config.json", **FOUR_BLOCKS), tmp_path / "plan.json"
    sizes = ("--seq-len", 64, "--tokens-per-step", 256, "--fastest", "--machine", "rtx4090", "--out", out)
    arithmetic = ("--precision", "fp16", "--fp16-accumulation")
    for more, wanted in ((arithmetic, True), (arithmetic[:2], False)):
        fastest = gemini_command.told("plan", config, *sizes, *more)["fastest"]
        assert ("fp16_accumulation=True" in " ".join(fastest["python"])) is wanted, "nobody is given it unasked"
        words = shlex.split(fastest["command"])[2:]
        asked = options_of(Parser("sft").read(words))
        assert asked.args.fp16 and asked.config.fp16_accumulation is wanted
        with pytest.raises(JobError, match=f"was made with --fp16_accumulation {wanted}"):
            options_of(Parser("sft").read([*words, f"--fp16_accumulation={not wanted}"]))


def test_a_plan_in_float8_is_quicker_and_is_run_so(gemini_command: Command, tmp_path: Path) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    config, out = llama_config(tmp_path / "config.json", **shape), tmp_path / "plan.json"
    step = ("plan", config, "--seq-len", 2048, "--batch-size", 8, "--cpu", "32GiB")
    plain, quick = (gemini_command.told(*step, "--machine", "rtx4090", *how) for how in ((), ("--float8",)))
    assert (plain["precision"], quick["precision"]) == ("bf16", "float8")
    assert quick["step"]["busy"]["compute"] < 0.9 * plain["step"]["busy"]["compute"]
    peak = load_hardware("rtx4090").figures["gpu_flops_float8"].value
    assert quick["step"]["mfu"] == pytest.approx(quick["step"]["flops_per_second"] / peak)
    refused(gemini_command(*step, "--machine", "a100", "--float8"), "'a100' has no figure 'gpu_flops_float8'")
    refused(gemini_command(*step, "--machine", "rtx4090", "--float8", "--precision", "fp16"), "--float8")
    fast = ("--seq-len", 64, "--tokens-per-step", 256, "--fastest", "--machine", "rtx4090", "--out", out, "--float8")
    fastest = gemini_command.told("plan", config, *fast)["fastest"]
    assert "float8=True" in " ".join(fastest["python"]) and "model.compile()" in fastest["python"]
    words = shlex.split(fastest["command"])[2:]
    asked = options_of(Parser("sft").read(words))
    assert asked.config.float8 and asked.compiles == {}
    with pytest.raises(JobError, match="was made with --float8 True"):
        options_of(Parser("sft").read([*words, "--float8=False"]))


def test_both_orders_are_compared_and_what_runs_it_says_which(
    gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow bus weights that cross once are quicker than once for each micro-batch."""
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch, {"hidden": 1024, "layers": 5, "vocab": 500})
    config = llama_config(tmp_path / "config.json", **{**FOUR_BLOCKS, "max_position_embeddings": 256})
    hardware = load_hardware("rtx4090")
    slow = {name: hardware.figures[name].value / 30 for name in ("h2d", "d2h")}
    (tmp_path / "slow.json").write_text(hardware.with_figures("drawn", **slow).to_json())
    sizes = ("--seq-len", 256, "--tokens-per-step", 2048, "--gpu", "1530MiB", "--cpu", "4GiB")
    step = ("plan", config, "--machine", "slow.json", *sizes, "--fastest")
    said = gemini_command.told(*step, "--out", "plan.json")
    best, others = said["fastest"], [other["options"] for other in said["alternatives"]]
    assert said["order"] == "bfs" and said["accumulate"] > 1 and said["gradients"] == "retain"
    assert best["options"].endswith("--order bfs") and not all(each.endswith("--order bfs") for each in others)
    assert best["python"][-1] == "losses = gemini.train_step(model, micro_batches)"
    words = shlex.split(best["command"])
    assert words[words.index("--order") + 1] == "bfs"
    options = options_of(Parser("sft").read(words[2:]))
    assert options.ours.order == "bfs" and options.config.gradients == "retain"
    only = gemini_command.told(*step, "--order", "dfs")
    assert only["order"] == "dfs" and "--order" not in only["fastest"]["command"]
    assert only["step"]["seconds"] > said["step"]["seconds"]
    assert all("bfs" not in other["options"] for other in only["alternatives"])
    adapted = gemini_command.told(*step, "--lora", 4)
    assert adapted["order"] == "dfs", "whose dropout has another order block by block"
    asked = gemini_command.told(*step, "--lora", 4, "--order", "bfs")
    assert "--order bfs" in asked["fastest"]["command"] and "--lora-dropout 0.0" in asked["fastest"]["command"]


def test_kernels_that_may_be_are_compared_with_none(gemini_command: Command, tmp_path: Path) -> None:
    """In both orders, of a model that they are for; without a word of others."""
    config = llama_config(tmp_path / "config.json", **{**FOUR_BLOCKS, "max_position_embeddings": 64})
    more = ("--tokens-per-step", 128, "--cpu", "2GiB", "--kernels", "auto")
    said = gemini_command.told("plan", config, *FASTEST, "--gpu", "1463MiB", *more)
    assert said["kernels"] == "liger" and "--kernels liger" in said["fastest"]["options"]
    assert "--use-liger-kernel" in said["fastest"]["command"]
    AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64).save_pretrained(tmp_path / "gpt2")
    other = gemini_command.told("plan", tmp_path / "gpt2", *FASTEST, *more)
    assert other["kernels"] is None
    tiled = gemini_command.told("plan", config, *FASTEST, *more, "--tile-tokens", 64)
    assert tiled["kernels"] is None and tiled["tile_tokens"] == 64, "kernels are of layers without tiles"
    refused(gemini_command("plan", config, "--cpu", "2GiB", "--kernels", "auto"), "auto needs --fastest")


@pytest.mark.parametrize(
    ("kind", "more", "asked", "by_block"),
    [
        (LlamaConfig, {}, None, True),
        (LlamaConfig, {"attention_dropout": 0.1}, None, False),
        (MixtralConfig, {}, None, False),
        (MixtralConfig, {}, "bfs", True),
        (MixtralConfig, {"output_router_logits": True}, "bfs", False),
    ],
    ids=["plain", "dropout", "routers", "asked for", "routers of the model"],
)
def test_an_order_that_train_step_does_not_take_is_not_looked_at(
    kind: Any, more: dict[str, Any], asked: str | None, by_block: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 128}
    config = tmp_path / "config.json"
    config.write_text(kind(**sizes, **more).to_json_string(use_diff=False))
    step = {"machine": "rtx4090", "seq_len": 32, "tokens_per_step": 128, "fastest": True, "order": asked}
    orders = {way.settings.order for way, _ in planner._ways(Way(PlanSettings(config=str(config), **step)), 4)}
    assert ("bfs" in orders) is by_block


def test_tiles_that_may_be_are_compared_with_none_where_both_fit(tmp_path: Path) -> None:
    """The head in tiles leaves room: on a full GPU the step with them may be the quicker one."""
    config = llama_config(
        tmp_path / "config.json", **{**FOUR_BLOCKS, "vocab_size": 8192, "max_position_embeddings": 512}
    )
    step = {"config": str(config), "machine": "rtx4090", "seq_len": 512, "tokens_per_step": 2048, "fastest": True}
    settings = PlanSettings(**step, tile_tokens="auto", gpu="1700MiB", cpu="2GiB")
    settings.check()
    with Console(stderr=True, quiet=True).status("") as status:
        chosen, found, _ = choose(Way(settings), status)
    tiles = {each.way.settings.tile_tokens for each in found}
    assert None in tiles and any(str(tile).startswith("head=") for tile in tiles), tiles
    best = min(each.way.play(each.way.plan()).step_seconds for each in found)
    assert chosen.play(chosen.plan()).step_seconds <= best * 1.005


def test_what_has_no_command_or_no_lines(gemini_command: Command, tmp_path: Path) -> None:
    """Another number of layers has no command; layers in 4 bits have no lines."""
    config = llama_config(tmp_path / "config.json")
    step = ("plan", config, "--cpu", "8GiB", "--seq-len", 32, "--fastest")
    in_4bit = gemini_command.told(*step, "--lora", 4, "--load-in-4bit")["fastest"]
    assert "--load-in-4bit --use-cpu" in in_4bit["command"] and not in_4bit["python"]
    fewer_layers = gemini_command.told(*step, "--layers", 1)["fastest"]
    assert not fewer_layers["command"] and "device='cpu'" in fewer_layers["python"][-1]


def test_what_it_does_not_choose_for(gemini_command: Command, tmp_path: Path) -> None:
    config = llama_config(tmp_path / "config.json", **FOUR_BLOCKS)
    machine = ("plan", config, "--machine", "rtx4090", "--fastest")
    refused(gemini_command("plan", config, "--tokens-per-step", 64), "--tokens-per-step needs --fastest")
    refused(
        gemini_command(*machine, *FASTEST[2:], "--accumulate", 2), "--tokens-per-step does not go with --accumulate"
    )
    refused(
        gemini_command(*machine, *FASTEST[2:], "--gpus", 2, "--tp", 2),
        "--fastest does not go with --tp: it looks at steps of several",
    )
    odd = gemini_command(*machine, "--seq-len", 60, "--tokens-per-step", 500)
    refused(odd, "--tokens-per-step 500 is no whole number of sequences of 60 tokens: --tokens-per-step 480")
    small = gemini_command.told(*machine, *FASTEST[2:], "--gpu", "1MiB", "--cpu", "1MiB", "--nvme", "1MiB")
    assert not small["fits"] and small["fastest"] is None and small["refusal"]


def test_kept_blocks_auto_is_the_quickest_number_of_the_step_that_was_asked_for(
    gemini_command: Command, tmp_path: Path
) -> None:
    config = llama_config(tmp_path / "config.json", **FOUR_BLOCKS)
    step = (
        "plan", config, "--machine", "rtx4090", "--seq-len", 64, "--batch-size", 2, "--accumulate", 2,
        "--gradient-checkpointing", "--gpu", "1463MiB", "--cpu", "2GiB",
    )  # fmt: skip
    said = gemini_command.told(*step, "--kept-blocks", "auto")
    rates = [gemini_command.told(*step, "--kept-blocks", k)["step"]["tokens_per_second"] for k in (0, 2, 4)]
    assert (said["accumulate"], said["batch"]["input_ids"]) == (2, [2, 64])
    assert said["step"]["tokens_per_second"] >= 0.99 * max(rates)
    assert f"--kept-blocks {said['kept_blocks']}" in said["fastest"]["options"] and said["kept_blocks"] > 0
    refused(gemini_command(*step[:2], *step[4:], "--kept-blocks", "auto"), "with the speeds of a --machine")
    refused(
        gemini_command(*step, "--kept-blocks", "auto", "--alternatives"),
        "--kept-blocks auto does not go with --alternatives: it looks at",
    )
    refused(gemini_command(*step, "--kept-blocks", "many"), "a number of blocks or auto")


@pytest.mark.parametrize("blocks", [12, 28])  # an eighth of them is no whole number
def test_numbers_of_kept_blocks_that_lie_unevenly_are_climbed_to_the_end(blocks: int) -> None:
    """Each block saves a second, and the best way needs all of them: no stop before the end is right."""
    numbers = numbers_up_to(blocks)
    for until in range(2, len(numbers) + 1):
        planned = {number: 100.0 - number for number in numbers[:until]}
        assert quickest._least_with_more(planned, blocks) == pytest.approx(100 - blocks)
    assert quickest._least_with_more({0: 100.0}, blocks) == -float("inf")
    for now in 99.0, 101.0:  # a plan with other homes: what comes may save as the first did
        assert quickest._least_with_more({0: 100.0, 1: 99.0, 3: now}, blocks) == now - (blocks - 3)
    for now in 100.0, 101.0:  # what no more blocks make less
        assert quickest._least_with_more({0: 100.0, 1: now}, blocks) == now


@pytest.mark.parametrize("blocks", [12, 28])
def test_the_quickest_number_of_kept_blocks_is_reached_where_steps_are_uneven(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Played:
        """A way whose step takes ``base`` seconds, less ``gain`` for each kept block."""

        def __init__(self, base: float, gain: float, kept: int = 0):
            self.base, self.gain, self.kept = base, gain, kept

        def keeping(self, number: int) -> Any:
            return Played(self.base, self.gain, number)

        def plan(self) -> Any:
            return self

        def seconds_of(self, plan: Any, *, played: bool = True) -> float:
            return self.base - self.gain * self.kept - (not played)

    numbers = numbers_up_to(blocks)
    others = Played(100 - 0.9 * blocks, 0), Played(100, 1)
    monkeypatch.setattr(planner, "_sequences", lambda way: 1)
    monkeypatch.setattr(planner, "Way", lambda settings, traces: Played(0, 0))
    monkeypatch.setattr(planner, "_ways", lambda way, sequences: iter([(others[0], 0), (others[1], blocks)]))
    monkeypatch.setattr(planner, "_kept", lambda way, most: dict.fromkeys(numbers, 11.0) if most else {0: 10.0})
    monkeypatch.setattr(planner, "options_of", lambda way: "")
    way: Any = SimpleNamespace(settings=None)
    status: Any = SimpleNamespace(update=lambda words: None)
    best: Any = choose(way, status)[0]
    assert (best.gain, best.kept) == (1, blocks)


def test_a_job_asks_for_the_quickest_step(tmp_path: Path) -> None:
    """As a program does; and not with what is another step, or known to no machine."""
    model = llama_config(tmp_path / "config.json", **FOUR_BLOCKS)
    words = ["--model_name_or_path", str(model), "--dataset_name", "DATA", "--use_cpu", "--fastest"]
    config = options_of(Parser("sft").read([*words, "--machine", "rtx4090"])).config
    assert (config.step, config.kept_blocks, config.offload_activations) == ("fastest", "auto", "auto")
    assert config.hardware == load_hardware("rtx4090")
    with pytest.raises(JobError, match="--fastest needs --machine: it compares seconds"):
        options_of(Parser("sft").read(words))
    for other in (["--order", "bfs"], ["--activations", "1GiB"], ["--use_peft"], ["--tp", "2"]):
        with pytest.raises(JobError, match=f"--fastest does not go with {other[0]}"):
            options_of(Parser("sft").read([*words, "--machine", "rtx4090", *other]))
