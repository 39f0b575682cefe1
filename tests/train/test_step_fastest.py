"""The quickest step, chosen where a model is wrapped: how many blocks are kept, by the speeds of the machine."""

import gc
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.errors import PlanMismatch
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.trace import MemoryTrace
from gemini.train import second_look
from gemini.train.activations.kept import KeptBlocks
from gemini.train.engine import engine_of
from tests.train.helpers import llama, manage, t5
from tests.train.test_activations import batch, enable, train
from tests.world import world_of

LAYERS = 4


def machine(**speeds: float) -> Hardware:
    """One that computes slowly beside all that it moves."""
    values = {
        "num_gpus": 8, "gpu_bytes": 1e12, "cpu_bytes": 1e12, "nvme_bytes": 1e12, "cpu_threads": 8,
        "gpu_flops_bf16": 1e10, "gpu_flops_fp32": 1e10, "gpu_bandwidth": 1e12, "gpu_op_seconds": 1e-9,
        "cpu_flops_bf16": 1e10, "cpu_flops_fp32": 1e10, "cpu_op_seconds": 1e-9, "dram_bandwidth": 1e12,
        "h2d": 1e11, "d2h": 1e11, "nvme_read": 1e11, "nvme_write": 1e11, "update_cpu": 1e-12, "interconnect": 1e12,
    }  # fmt: skip
    return Hardware("made up", {key: Figure(value, "measured by hand") for key, value in {**values, **speeds}.items()})


def made(kind: Any = llama, **how: Any) -> Any:
    model = kind(layers=LAYERS, **how) if kind is llama else kind(**how)
    enable(model)
    return model


@cache
def traced(kind: Any = llama, number: Any = "auto", **how: Any) -> MemoryTrace:
    return gemini.trace(made(kind), batch(), target="cpu", kept_blocks=number, **how)


def wrap(model: Any, folder: Path, gpu: Any = "32MiB", **how: Any) -> Any:
    given = {"hardware": machine(), "kept_blocks": "auto", "trace": traced()} | how
    return manage(model, folder, "standin" if gpu else "cpu", gpu=gpu, **given).train()


def kept(model: Any) -> int:
    number = model.memory_report()["kept_blocks"]
    assert isinstance(number, int)
    return number


def test_as_many_are_kept_as_there_is_room_for(tmp_path: Path) -> None:
    """On a machine that computes slowly; each number is one of a plan that fits, and the ledger holds its bytes."""
    numbers = []
    for gpu in (600, 1000, 1500, 2100, 3000, 4000, 6000):
        try:
            model = wrap(made(), tmp_path, gpu=f"{gpu}KiB")
        except gemini.BudgetExceeded:
            assert not numbers
            continue
        numbers.append(kept(model))
        world = world_of(model)
        assert world.plan.trace == world.trace and world.trace.kept_blocks == numbers[-1]
        assert world.trace.all_kept is None and world.problem.activations >= world.trace.peak_bytes
        train(model)
        world_of(model).check()
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == LAYERS and len({*numbers}) > 3


@pytest.mark.parametrize("offload", [None, "auto", "cpu"])
@pytest.mark.parametrize("speeds", [{}, {"h2d": 1e6, "d2h": 1e6}, {"gpu_flops_bf16": 1e14}])
def test_it_is_the_quickest_of_all(speeds: dict[str, float], offload: str | None, tmp_path: Path) -> None:
    """Each number planned as it was asked for, and played."""
    how: dict[str, Any] = {"hardware": machine(**speeds), "offload_activations": offload, "gpu": "1400KiB"}
    chosen, seconds = wrap(made(), tmp_path, **how), dict[int, float]()
    for number in range(LAYERS + 1):
        try:
            other = wrap(made(), tmp_path, **{**how, "trace": traced(llama, number), "kept_blocks": number})
        except gemini.BudgetExceeded:
            continue
        seconds[number] = gemini.simulate(world_of(other).plan, how["hardware"]).step_seconds
    own = gemini.simulate(world_of(chosen).plan, how["hardware"]).step_seconds
    assert own == seconds[kept(chosen)] <= 1.005 * min(seconds.values())


@pytest.mark.parametrize("make", [llama, t5])
def test_the_same_bits(make: Any, tmp_path: Path) -> None:
    """As with none kept; of blocks that are no single walk all are kept, or none."""
    plain = wrap(made(make, dropout=0.1), tmp_path, kept_blocks=None, trace=None)
    chosen = wrap(made(make, dropout=0.1), tmp_path, trace=traced(make))
    assert kept(chosen) == 4 and kept(plain) == 0
    (losses, _, masters), (same, _, values) = train(plain), train(chosen)
    assert losses == same and all(torch.equal(value, values[name]) for name, value in masters.items())


def test_where_the_host_computes_what_is_kept_has_room_beside_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No budget counts it there, and no step that checkpoints may take all of a small machine."""
    for beside, number in ((2**30, LAYERS), (traced(llama, 2).peak_bytes, 2), (0, 0)):
        monkeypatch.setattr("gemini.train.setup.problem.available_bytes", lambda b=beside: 64 * 2**20 + b)
        assert kept(wrap(made(), tmp_path, gpu=None)) == number


def test_a_trace_of_both_is_kept_in_a_file() -> None:
    trace = traced(llama, tile_tokens="auto")
    assert MemoryTrace.from_json(trace.to_json()) == trace
    assert [form.all_kept is not None and form.all_kept.tile_tokens == form.tile_tokens for form in trace.forms]
    assert all(form.all_kept is not None and form.all_kept.kept_blocks == LAYERS for form in trace.forms)
    assert gemini.trace(llama(), batch(), kept_blocks="auto").all_kept is None, "there is nothing that is kept again"


def test_what_it_needs_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match="needs the step with no block kept and with all of them: pass trace="):
        wrap(made(), tmp_path, trace=None)
    with pytest.raises(PlanMismatch, match="needs the step with no block kept and with all of them: pass trace="):
        wrap(made(), tmp_path, trace=traced(llama, 0))
    with pytest.raises(ValueError, match="by the speeds of the machine: leave placement= out, and pass hardware="):
        wrap(made(), tmp_path, hardware=None)
    with pytest.raises(
        ValueError, match="kept_blocks=.auto. chooses kept blocks and homes by the speeds of the machine"
    ):
        wrap(made(), tmp_path, placement=gemini.StaticPlacement())
    for wrong in ("most", -1, 1.5):
        with pytest.raises(ValueError, match='kept_blocks= is a number of blocks or "auto", got'):
            gemini.trace(made(), batch(), kept_blocks=wrong)
        with pytest.raises(ValueError, match='kept_blocks= is a number of blocks or "auto", got'):
            gemini.GeminiConfig(kept_blocks=wrong)
    with pytest.raises(ValueError, match='step="fastest" chooses kept blocks and homes'):
        wrap(made(), tmp_path, hardware=None, step="fastest")
    with pytest.raises(ValueError, match="step='best' is not known; use one of 'given', 'fastest'"):
        gemini.GeminiConfig(step="best")
    without_walls = gemini.trace(llama(), batch(), kept_blocks="auto")
    assert kept(wrap(llama(), tmp_path, trace=without_walls)) == 0


# ---- the second look ---------------------------------------------------------------------------------------------


def steps(model: Any, number: int = 6) -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    """Losses, blocks that were kept in each step, and the masters."""
    optimizer, losses, numbers = gemini.HybridAdam(model.parameters(), lr=1e-3), list[float](), list[int]()
    torch.manual_seed(0)
    for step in range(number):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        numbers.append(kept(model))
    world_of(model).check()
    return losses, numbers, {h.name: world_of(model).read(h) for h in world_of(model).handles}


SLOW_LINK, QUICK = {"h2d": 1e5, "d2h": 1e5}, {"gpu_flops_bf16": 1e17, "gpu_flops_fp32": 1e17}


@pytest.mark.filterwarnings("ignore:step=.fastest.")
@pytest.mark.parametrize(
    ("told", "found", "numbers"),
    [(SLOW_LINK, {}, [0, 0, 0, 4, 4, 4]), ({}, SLOW_LINK, [4, 4, 4, 0, 0, 0]), ({}, {}, [4] * 6)],
)
def test_the_number_changes_after_three_steps_and_no_bit_does(
    told: Any, found: Any, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines that are other ones than was said."""
    monkeypatch.setattr(second_look, "corrected_by", lambda *_: machine(**found))
    how: dict[str, Any] = {"offload_activations": "cpu", "hardware": machine(**told)}
    plain = wrap(made(dropout=0.1), tmp_path, **how, kept_blocks=None, trace=None)
    model = wrap(made(dropout=0.1), tmp_path, **how, step="fastest", kept_blocks=None)
    (losses, _, masters), (same, kept_then, values) = steps(plain), steps(model)
    assert kept_then == numbers and losses == same
    assert all(torch.equal(value, values[name]) for name, value in masters.items())
    assert model.memory_report()["step"]["hardware"] == machine(**found) and "the third step" in str(
        model.memory_report()
    )
    assert plain.memory_report()["step"] is None
    released = gemini.release(model)
    assert KeptBlocks(released, 99).blocks and all(b.gradient_checkpointing for b in KeptBlocks(released, 99).blocks)


@pytest.mark.filterwarnings("ignore:step=.fastest.")
@pytest.mark.parametrize(("gpu", "number"), [(2200, 0), (3000, LAYERS)])
def test_what_has_no_room_is_not_kept(gpu: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the budget has left, with every home where it is."""
    monkeypatch.setattr(second_look, "corrected_by", lambda *_: machine())
    how: dict[str, Any] = {"offload_activations": "cpu", "hardware": machine(**SLOW_LINK), "gpu": f"{gpu}KiB"}
    model = wrap(made(), tmp_path, **how, step="fastest")
    assert steps(model)[1] == [0, 0, 0] + [number] * 3 and world_of(model).peak(gemini.Tier.GPU) <= gpu * 2**10


def test_each_figure_is_corrected_by_what_its_track_took(tmp_path: Path) -> None:
    """A step on another machine, as it would be recorded: with corrected figures it is what was predicted."""
    slower = {"gpu_flops_bf16": 1e9, "gpu_flops_fp32": 1e9, "gpu_bandwidth": 1e11, "gpu_op_seconds": 1e-8, "h2d": 2e10}
    model = wrap(made(), tmp_path, gpu="1200KiB", offload_activations="cpu")
    plan = world_of(model).plan
    measured, predicted = (gemini.simulate(plan, machine(**speeds)) for speeds in (slower, {}))
    found = second_look.corrected_by(measured, predicted, machine(), engine_of(model))
    for key, value in machine(**slower).figures.items():
        assert found.figures[key].value == pytest.approx(value.value, rel=0.01) or key not in slower, key
    assert found.figures["h2d"].source.startswith("measured by hand, corrected by a step on ")
    assert gemini.simulate(plan, found).step_seconds == pytest.approx(measured.step_seconds, rel=0.02)


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
def test_a_step_of_several_batches_is_looked_at_as_that(gradients: str, tmp_path: Path) -> None:
    model = wrap(made(), tmp_path, step="fastest", gradients=gradients)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match="a step took .* as it was recorded, and .* was predicted"):
        for step in range(8):
            model(**batch(step)).loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert model.memory_report()["step"]["corrected"] > 0


def one_step(model: Any, optimizer: Any, step: int) -> None:
    model(**batch(step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:step=.fastest.")
@pytest.mark.parametrize("first", [1, 3])
def test_a_program_may_record_at_any_step(first: int, tmp_path: Path) -> None:
    """Where what the second look records is under way, or over, as well."""
    model = wrap(made(), tmp_path, step="fastest")
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    for step in range(first):
        one_step(model, optimizer, step)
    with model.recording() as recording:
        for step in range(first, 6):
            one_step(model, optimizer, step)
    assert recording.timeline.tokens == batch()["input_ids"].numel()
    assert (model.memory_report()["step"] is not None) == (first == 3)


def test_nothing_is_left_of_a_look_that_has_not_come(tmp_path: Path) -> None:
    """A run that ends in the step which is recorded: its model goes, or is an ordinary one."""
    for ends in (gemini.release, lambda model: None):
        model = wrap(made(), tmp_path, step="fastest")
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
        for step in range(3):
            one_step(model, optimizer, step)
        engine, reference = weakref.ref(engine_of(model)), weakref.ref(model)
        assert engine_of(model).forward.observers.recordings
        gc.collect()
        gc.disable()
        try:
            kept = ends(model)
            del model, optimizer
            assert engine() is None and reference() is kept
            assert kept is None or not (kept._forward_hooks or kept._forward_pre_hooks)
        finally:
            gc.enable()


@pytest.mark.filterwarnings("error")
def test_steps_block_by_block_are_not_looked_at(tmp_path: Path) -> None:
    """They are none that was planned, and looking would make them others."""
    model = wrap(made(), tmp_path, gpu="1200KiB", offload_activations="cpu", step="fastest", gradients="accumulate")
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    for step in range(5):
        gemini.train_step(model, [batch(2 * step), batch(2 * step + 1)])
        optimizer.step()
        optimizer.zero_grad()
    assert model.memory_report()["step"] is None
    with model.recording() as recording, pytest.warns(UserWarning, match="one after another.*it is being recorded"):
        gemini.train_step(model, [batch(0), batch(1)])
        optimizer.step()
    assert recording.timeline.tokens == 2 * batch()["input_ids"].numel()
