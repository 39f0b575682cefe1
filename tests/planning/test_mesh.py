"""Steps over a mesh: who is on which machine, traces of slices, stages out of a trace, and what a step takes."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from traces import decoder_trace
from transformers import LlamaConfig

import gemini
from gemini.errors import BudgetExceeded
from gemini.planning import working
from gemini.planning.costs import Grid, Group, MeshSizes, sent_in_ring
from gemini.planning.hardware import load_hardware
from gemini.planning.parallel import (
    Blocks,
    MeshOutcome,
    block_by_block,
    breadth_first,
    in_flight,
    least_seconds,
    play_mesh,
    stage_trace,
)
from gemini.planning.plan import Plan
from gemini.planning.trace import MemoryTrace, Phase
from gemini.tiers import Tier
from gemini.tracing.ahead import batch_for

HIDDEN, TOKENS, LAYERS, WORDS = 64, 2 * 32, 4, 256
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=WORDS,
)  # fmt: skip
HARDWARE = load_hardware("dgx-a100")
GIB = 2**30


def kept_by(trace: MemoryTrace) -> int:
    """Bytes that a micro-batch keeps between its forward and its backward."""
    return [moment.live_bytes for moment in trace.moments if moment.phase is Phase.FORWARD][-1]


def traced(**settings: Any) -> MemoryTrace:
    return gemini.trace(CONFIG, batch_for(CONFIG, 2, 32), target="cuda", **settings)


def played(
    sizes: MeshSizes,
    trace: MemoryTrace,
    micro_batches: int,
    *,
    per_machine: int = 8,
    gpu: int = 3 * GIB,
    **settings: Any,
) -> MeshOutcome:
    hardware = HARDWARE.with_figures("a test", num_gpus=per_machine)

    def make(trace: MemoryTrace, accumulate: int, order: str) -> Plan:
        return gemini.plan(
            trace, hardware, {Tier.GPU: gpu, Tier.CPU: 16 * GIB}, gradients="accumulate", accumulate=accumulate,
            ranks=sizes.shards, local_ranks=min(sizes.ranks, per_machine),
        )  # fmt: skip

    return play_mesh(
        trace, hardware, sizes, make, micro_batches=micro_batches, width=HIDDEN, per_machine=per_machine, **settings
    )


# ---- who is where ----------------------------------------------------------------------------------------------------


def test_inner_dims_are_on_one_machine_first() -> None:
    grid = Grid(MeshSizes(pp=2, dp=4, cp=2, tp=4), 8)
    assert grid.slices == Group(4, 4)
    assert grid.parts == Group(2, 2)
    assert grid.shards == Group(8, 2)
    assert grid.stages == Group(2, 1)
    assert MeshSizes(pp=2, dp=4, cp=2, tp=4).ranks == 64


def test_a_machine_receives_once_what_it_has_not() -> None:
    """16 ranks on two machines are to have 1,600 bytes: 8 ports bring the 800 that a machine lacks."""
    inside, between = sent_in_ring(Group(16, 8), 1600 * 15 / 16)
    assert between * 8 == pytest.approx(800)
    assert inside == pytest.approx(1600 * 7 / 8)
    assert sent_in_ring(Group(8, 8), 700) == (700, 0)
    assert sent_in_ring(Group(4, 1), 75) == (0, pytest.approx(75))


# ---- traces of slices ------------------------------------------------------------------------------------------------


def test_slices_share_the_work_and_say_what_they_send() -> None:
    whole, slices = traced(), traced(tensor_parallel=4)
    assert slices.tensor_parallel == 4 and MemoryTrace.from_json(slices.to_json()) == slices
    assert slices.flops * 4 == pytest.approx(whole.flops, rel=0.01)
    norms = (2 * LAYERS + 1) * HIDDEN
    assert (slices.num_params - norms) * 4 + norms == whole.num_params
    # Two sums in the forward of a layer, two in its backward; each rank sends 2 (n - 1) / n of the bytes in a ring.
    own = sum(moment.tp_bytes for moment in slices.moments if ".layers." in f".{moment.module}")
    assert own == 4 * LAYERS * 2 * 3 * TOKENS * HIDDEN * 2 // 4
    assert not any(moment.tp_bytes or moment.cp_bytes for moment in whole.moments)


def test_parts_of_slices() -> None:
    both = traced(tensor_parallel=2, context_parallel=2)
    assert both.flops * 4 == pytest.approx(traced().flops, rel=0.01)
    assert any(moment.cp_bytes for moment in both.moments)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor parallel over 3 ranks: .* is not a multiple of 3"):
        traced(tensor_parallel=3)
    with pytest.raises(ValueError, match="tile_tokens=16 with tensor_parallel=2: leave one of them out"):
        traced(tensor_parallel=2, tile_tokens=16)


# ---- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_stages_are_the_whole_step(checkpointing: str | None) -> None:
    trace, boundary = traced(checkpointing=checkpointing), TOKENS * HIDDEN * 2
    blocks = Blocks(trace)
    assert blocks.number == LAYERS
    stages = [stage_trace(trace, blocks, start, start + 2, boundary_bytes=boundary) for start in (0, 2)]
    assert sum(stage.flops for stage in stages) == trace.flops
    assert sum(len(stage.moments) for stage in stages) == len(trace.moments)
    names = [param.name for stage in stages for param in stage.params]
    assert sorted(names) == sorted(param.name for param in trace.params)
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "lm_head.weight"
    done = [stage.params[i].name for stage in stages for moment in stage.moments for i in moment.gradients]
    assert sorted(done) == sorted(names)
    for stage in stages:
        assert 0 < stage.peak_bytes < trace.peak_bytes
        assert [m.phase for m in stage.moments if m.phase is Phase.FORWARD]
    # What all stages keep between forward and backward is what the whole model keeps, and the boundary.
    assert sum(map(kept_by, stages)) == kept_by(trace) + boundary


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_a_stage_counts_the_kept_blocks_that_it_has(kept: int) -> None:
    trace = traced(checkpointing=True, kept_blocks=kept)
    blocks = Blocks(trace)
    for start, stop in ((0, 2), (2, 4), (1, 4), (1, 1), (0, 4)):
        stage = stage_trace(trace, blocks, start, stop, boundary_bytes=0)
        again = {blocks.of(moment.module) for moment in stage.moments if moment.phase is Phase.RECOMPUTE}
        assert stage.kept_blocks == len({*range(start, stop)} - again)


def test_a_param_of_two_stages_is_apart() -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    trace = gemini.trace(config, batch_for(config, 2, 32), target="cuda")
    first, last = (stage_trace(trace, Blocks(trace), start, start + 2, boundary_bytes=0) for start in (0, 2))
    assert first.params[0].name == last.params[0].name == "model.embed_tokens.weight"
    assert first.params[0].apart and last.params[0].apart and not first.params[1].apart


def test_micro_batches_in_flight_keep_what_they_keep() -> None:
    trace = traced()
    assert in_flight(trace, 3).peak_bytes == trace.peak_bytes + 2 * kept_by(trace)
    every = breadth_first(trace, 3)
    assert every.flops == 3 * trace.flops and every.tokens == 3 * trace.tokens
    assert kept_by(every) == 3 * kept_by(trace)
    assert every.peak_bytes < 3 * trace.peak_bytes  # one of them computes


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_block_by_block_others_wait_with_what_they_have_at_the_ends_of_a_stage() -> None:
    """Moments and work of all, activations of one, and of the others the hidden states and what they keep."""
    one = decoder_trace(hidden=16, layers=4, vocab=64, tokens=8, checkpointing=True)
    step, last = block_by_block(one, 3), 3
    assert (step.tokens, step.flops, step.micro_batches) == (3 * one.tokens, 3 * one.flops, 3)
    assert len(step.stages) == 2 * last + 1 and len(step.moments) == len(one.moments)
    hidden = 2 * 8 * 16
    for number in range(1, last):  # forward: those behind it have saved their input of this block too
        at = step.stages[number]
        assert step.moments[at].live_bytes == one.moments[at].live_bytes + 2 * (hidden + (number + 1) * hidden)
        assert step.moments[at].saved_bytes == 3 * hidden
    head = range(*step.stages[last : last + 2])
    assert {step.moments[at].live_bytes - one.moments[at].live_bytes for at in head} == {2 * (1 + last) * hidden}
    ends = [*(start - 1 for start in step.stages[1:]), len(step.moments) - 1]
    grads = [at for at, moment in enumerate(step.moments) if moment.gradients]
    assert grads == ends[last:] and sum(len(step.moments[at].gradients) for at in grads) == len(one.params)
    assert step.checkpoint_bytes == 3 * one.checkpoint_bytes
    tied = replace(one, moments=(*one.moments[:-1], replace(one.moments[-1], params=(len(one.params) - 1,))))
    with pytest.raises(ValueError, match="lm_head.weight of Decoder is read in more than one of its stages"):
        block_by_block(tied, 3)


@pytest.mark.parametrize("number", [1, 16])
@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
def test_what_is_carried_away_is_counted_as_in_the_plan(schedule: str, number: int) -> None:
    """Micro-batches pass a stage in turn: the inputs of one are there, and of all that wait for it elsewhere."""
    one = decoder_trace(hidden=256, layers=6, vocab=500, tokens=2048, checkpointing=True)
    trace = replace(one if number == 1 else block_by_block(one, number), target="cuda")
    hardware, away = load_hardware("rtx4090"), [*working.carried_away(trace)]
    for gpu in (1500, 1502, 1532):
        memory = gemini.MemoryBudget(gpu=f"{gpu}MiB", cpu="4GiB")
        plan = gemini.plan(trace, hardware, memory, gradients="retain", offload_activations="cpu", compute=Tier.GPU)
        timeline = gemini.simulate(plan, hardware, schedule=schedule)
        assert plan.problem.offload_to is Tier.CPU
        assert timeline.peaks[Tier.GPU] <= plan.problem.budgets[Tier.GPU], gpu
        held = {here.get("activations", 0) for here in (sample.held[Tier.GPU] for sample in timeline.samples)}
        peaks = [moment.peak_bytes - own for moment, own in zip(trace.moments, away, strict=True)]
        assert max(peaks) == max(held) < max(moment.peak_bytes for moment in trace.moments)
        waiting = max(sample.held[Tier.CPU].get("activations", 0) for sample in timeline.samples)
        assert waiting == trace.checkpoint_bytes or (schedule == "overlapped" and 0 < waiting < trace.checkpoint_bytes)


def test_without_stages_it_is_the_step_that_is_played_alone() -> None:
    trace = traced()
    outcome = played(MeshSizes(), trace, 2)
    assert outcome.step_seconds == outcome.slowest.timeline.step_seconds > 0
    assert (outcome.bubble, outcome.sent, outcome.order) == (0.0, {}, "")
    assert outcome.tokens == 2 * TOKENS


def test_a_bubble_shrinks_with_micro_batches() -> None:
    trace = traced()
    sizes = MeshSizes(pp=2)
    few, many = (played(sizes, trace, number, order="1f1b") for number in (2, 8))
    assert [stage.blocks for stage in few.stages] == [(0, 2), (2, 4)]
    computing = max(stage.timeline.busy[gemini.planning.timeline.Track.COMPUTE] for stage in few.stages)
    assert few.bubble == pytest.approx(computing / 2, rel=0.05)  # and two transfers of hidden states
    assert few.bubble / few.step_seconds > 2 * many.bubble / many.step_seconds
    assert many.sent["hidden states"] == (2 * 8 * TOKENS * HIDDEN * 2, 0)
    looped = played(sizes, trace, 8, order="bfs")
    assert looped.bubble < many.bubble
    best = played(sizes, trace, 8)
    assert best.step_seconds == min(many.step_seconds, looped.step_seconds)


def test_of_stages_of_a_kind_one_is_played() -> None:
    """With the head the last stage has two of ten blocks and the first has two: the slowest ones are between them."""
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers = 10
    trace, sizes = gemini.trace(config, batch_for(config, 2, 32), target="cuda"), MeshSizes(pp=4)
    for order in ("1f1b", "bfs"):
        kinds, every = (played(sizes, trace, 4, order=order, each_kind=each_kind) for each_kind in (True, False))
        assert [stage.blocks for stage in every.stages] == [(0, 2), (2, 5), (5, 8), (8, 10)]
        assert [stage.blocks for stage in kinds.stages] == [(0, 2), (2, 5), (8, 10)]
        assert kinds.step_seconds == pytest.approx(every.step_seconds, rel=0.01)
    with pytest.raises(ValueError, match="order='gpipe' is not known; use one of 1f1b, bfs"):
        played(sizes, trace, 4, order="gpipe")


def test_slices_over_machines_take_longer() -> None:
    trace = traced(tensor_parallel=4)
    trace = replace(trace, moments=tuple(replace(moment, num_ops=0) for moment in trace.moments))  # all is launched
    near, far = (played(MeshSizes(tp=4), trace, 1, per_machine=per_machine) for per_machine in (8, 2))
    assert far.step_seconds > near.step_seconds
    inside, between = far.sent["slices of layers"]
    assert between and near.sent["slices of layers"] == (sum(m.tp_bytes for m in trace.moments), 0)
    assert far.slowest.timeline.stalls["slices of layers"] > near.slowest.timeline.stalls["slices of layers"]


@pytest.mark.parametrize(
    "sizes", [MeshSizes(), MeshSizes(dp=4), MeshSizes(tp=4), MeshSizes(pp=4), MeshSizes(2, 2, 1, 2)]
)
def test_no_step_is_shorter_than_its_bound(sizes: MeshSizes) -> None:
    trace = traced(tensor_parallel=sizes.tp)
    assert least_seconds(trace, HARDWARE, sizes, 8, per_machine=8) <= played(sizes, trace, 8).step_seconds


def test_a_stage_that_does_not_fit_is_named() -> None:
    with pytest.raises(BudgetExceeded, match=r"stage \d of 2 \(blocks \d to \d\): "):
        played(MeshSizes(pp=2), traced(), 8, gpu=2**20)
    with pytest.raises(ValueError, match="8 stages of LlamaForCausalLM, which has only 4 blocks: use fewer"):
        played(MeshSizes(pp=8), traced(), 8)
