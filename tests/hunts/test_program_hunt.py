"""The hunt by drawn programs does what it says: its plain side is the loop that defines the bits, it tells outcomes
apart, and some dozens of programs end well. The hunt itself is a script (program_hunt.py; docs/programs.md).
"""

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hunts import program_report as report
from tests.hunts import program_words as words
from tests.hunts.program_draw import Block, draw, each_part
from tests.hunts.program_run import BOTH, FAILURES, GOES_ON, HANG, RAW, REFUSED, RIGHT, SILENT, run_managed, run_plain
from tests.hunts.program_sides import PLACEMENTS, PRECISIONS, PlainSide, round_weights
from tests.hunts.program_source import source
from tests.hunts.program_workers import Task, run_tasks
from tests.train import helpers


def run(text: str, placement: str, precision: str, folder: Path, seed: int = 0) -> Any:
    return run_managed(text, seed, precision, placement, folder, run_plain(text, seed, precision))


# ---- programs are what they are said to be --------------------------------------------------------------------------


REFUSED_BY_TORCH = {
    "freed_twice",
    "after_step",
    "retained_over_step",
    "late_x_grad",
    "spoiled",
    "sparse",
    "second graph",
    "swap_tensors",
    "to_double",
    "type_of",
}
"""Parts of programs that plain torch refuses (and HybridAdam has no sparse gradients for plain params either)."""


@pytest.mark.slow
def test_every_part_makes_a_program_that_plain_torch_runs() -> None:
    """In fp32: what plain torch refuses by mistake would hide what Gemini does with it."""
    wrong = []
    for program in each_part():
        ran = run_plain(source(program), 0, "fp32")
        expected = any(name in feature for feature in program.features for name in REFUSED_BY_TORCH)
        expected |= {"kind growing_buffer", "habit anew from dcp"} <= {
            *program.features
        }  # which loads into what is there
        if (ran.error is not None) != expected:
            wrong.append(f"{program.features}: {ran.error}")
    assert not wrong, "\n".join(wrong)


def test_a_seed_is_a_program() -> None:
    programs = [draw(seed) for seed in range(300)]
    assert programs == [draw(seed) for seed in range(300)] and len({source(p) for p in programs}) == 300
    features = Counter(feature for program in programs for feature in program.features)
    assert len(features) > 150, "the draws reach most of the tables"
    for program in programs:
        ast.parse(source(program))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plain_side_is_the_plain_loop_of_the_other_tests(precision: str, tmp_path: Path) -> None:
    """Two backwards per step, clipped, three steps: weights and the masters behind them, and the norm."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return round_weights(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), precision)

    plain = helpers.Plain(make(), precision, lr=0.02, scale=2.0**10 if precision == "fp16" else None)
    side = PlainSide(make(), precision, tmp_path)
    optimizer = side.adam(side.model.parameters())
    for step in range(3):
        for micro in range(2):
            x = side.noise(10 * step + micro, 4, 8)
            plain.backward(plain.model(x).float().square().mean())
            side.scaler.scale(side.model(x).float().square().mean()).backward()
        side.scaler.unscale_(optimizer)
        assert float(side.clip(0.05)) == pytest.approx(plain.clip(0.05), rel=1e-7)
        plain.step()
        side.scaler.step(optimizer)
        side.scaler.update()
        optimizer.zero_grad()
    for name, param in plain.model.named_parameters():
        assert helpers.same_bits(side.full_param(name), param.detach()), name
        state = optimizer.state[side.model.get_parameter(name)]
        if precision == "bf16":
            assert helpers.same_bits(state["residual"].view(-1), plain.states[name]["residual"]), name
        if precision == "fp16":
            assert helpers.same_bits(state["master"].view(-1), plain.master(name)), name


# ---- outcomes are told apart ----------------------------------------------------------------------------------------

SCRIPT = """
import os, time, torch
from torch import nn
import gemini

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

def run(model, side):
    optimizer = side.adam(model.parameters())
    loss = model(side.noise(0, 2, 8)).float().square().mean()
    side.see("loss", loss)
    loss.backward()
    {line}
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("outcome", "line", "told"),
    [
        (RIGHT, "pass", ""),
        (REFUSED, "if side.managed: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", ""),
        (BOTH, "loss.backward()", ""),
        (GOES_ON, "assert side.managed", ""),
        (SILENT, "side.see('x', float(side.managed))", "x: 1.0 instead of 0.0"),
        (SILENT, "side.see('x', torch.full((2,), -0.0 if side.managed else 0.0))", "x: "),
        (SILENT, "if side.managed: side.see('more', 1)", "'more'"),
        (SILENT, "if side.managed: optimizer.zero_grad()", "weight 0.weight"),
        (SILENT, "side.see('x', float(side.managed)); 1 / (not side.managed)", "then ZeroDivisionError"),
        (SILENT, "if side.managed: torch.rand(1)", "state of the random numbers"),
        (RAW, "if side.managed: raise IndexError('0.weight: use something else')", "not an error of Gemini"),
        (RAW, "if side.managed: raise ValueError('0.weight: use something else')", "not an error of Gemini"),
        (RAW, "if side.managed: raise gemini.GeminiError('something is wrong')", "no remedy"),
        (RAW, "if side.managed: raise gemini.GeminiError('use something else')", "names nothing"),
        (RAW, "if side.managed: raise gemini.GeminiError(\"'0.weight': use it. Please report\")", "asks for a report"),
        (RAW, "if side.managed: raise gemini.IllegalTransition(\"'0.weight': use it\")", "a bug by its own page"),
    ],
)  # fmt: skip
def test_outcomes(outcome: str, line: str, told: str, tmp_path: Path) -> None:
    result = run(SCRIPT.replace("{line}", line), "nvme", "fp32", tmp_path)
    assert result.outcome == outcome and told in result.detail, result


@pytest.mark.slow
def test_a_program_that_hangs_or_dies_is_an_outcome_and_the_others_go_on() -> None:
    lines = ["if side.managed: time.sleep(600)", "if side.managed: os._exit(3)", "pass"]
    wheres = [("memory",), ("memory", "serial"), ("memory", "serial")]
    tasks = [Task(n, "fp32", where, SCRIPT.replace("{line}", lines[n])) for n, where in enumerate(wheres)]
    found: list[Any] = []
    run_tasks(tasks, jobs=2, limit=10.0, on_result=found.append)
    outcomes = sorted((result.seed, result.placement, result.outcome) for result in found)
    assert outcomes == [
        (seed, placement, outcome) for seed, outcome in enumerate((HANG, RAW, RIGHT)) for placement in wheres[seed]
    ]
    assert "<program_0>" in next(r.detail for r in found if r.outcome == HANG), "the stacks say where"
    assert "exit code 3" in next(r.detail for r in found if r.outcome == RAW)


def test_shrinking_keeps_what_matters() -> None:
    def still(text: str) -> bool:
        return "self.aux" in text and "Saves" in text

    blocks = tuple(Block(kind, exit="dict", aux=aux) for kind, aux in (("mlp", ""), ("function_saves", "attribute")))
    program = replace(draw(5), blocks=(*blocks, Block("conv")), root=("unet",), objective="penalty", habits=("clip",))
    least = report.shrink(program, still)
    assert least.blocks == (Block("function_saves", aux="attribute"),)
    assert least.objective == "plain" and not least.habits and not least.root


# ---- its words ------------------------------------------------------------------------------------------------------


def test_the_page_of_words_is_the_one_that_is_made() -> None:
    """But for words that other versions of the packages have more, or less."""
    text = words.PAGE.read_text()
    for where in words.groups():
        told = text.partition(f"## {where}\n")[2].partition("\n## ")[0]
        said = set(re.findall(r"`([\w.]+)`", told.partition("Drawn: ")[2].partition("\n")[0]))
        assert said == {*words.drawn(where)}, f"{where}: python tests/hunts/program_words.py --write"
        without = {word for group in words.left_out(where).values() for word in group}
        assert not without & {*words.drawn(where)} and without.isdisjoint(words.not_drawn(where))
        assert len(words.groups()[where]) == len(words.drawn(where)) + len(without) + len(words.not_drawn(where))
    assert words.EXCLUDED.keys() <= words.groups().keys()


# ---- a few dozens of them -------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "transient"])
def test_drawn_programs_end_well(placement: str, tmp_path: Path, summary: Callable[[str], None]) -> None:
    counts: Counter[str] = Counter()
    at, findings = list(PLACEMENTS).index(placement), []
    for seed in range(at, 48, len(PLACEMENTS) - 1):
        precision, own = ("fp32", "bf16")[seed % 2], tmp_path / str(seed)  # a store has one model at a time
        own.mkdir()
        result = run(source(draw(seed)), placement, precision, own, seed)
        counts[result.outcome] += 1
        if result.outcome in (*FAILURES, GOES_ON):
            findings.append(f"--replay {seed}:{placement}:{precision} {result.outcome} {result.detail.splitlines()[0]}")
    assert not findings, "\n".join(findings)
    summary(f"drawn programs at {placement}: {dict(counts)}")
