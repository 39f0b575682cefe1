"""``model.recording()``: a real step as a timeline, which changes no bit and agrees with the reports."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.watching import Activity
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import MemoryTrace, Source, TracedParam
from gemini.tiers import Tier
from tests import models
from tests.scaling import backward, clip_grads, make_step
from tests.train.helpers import manage, step_on
from tests.world import world_of

WAYS = {Track.NVME_READ: "nvme->cpu", Track.NVME_WRITE: "cpu->nvme", Track.H2D: "cpu->gpu", Track.D2H: "gpu->cpu"}


def wrap(device: str, folder: Path, **settings: Any) -> Any:
    """Room for little more than one module on the computing tier: steps evict and fetch. Everything in turn, unless
    ``overlap=True``.
    """
    budget = {"gpu": "192KiB", "cpu": "64MiB"} if device == "standin" else {"cpu": "320KiB"}
    homes = {"weights_on_nvme": 0.5 if device == "standin" else 1, "optimizer_on_nvme": 1}
    settings = {"overlap": False, "max_chunk": 8192, **settings}
    return manage(models.make_model("llama"), folder, device, **budget, homes=homes, **settings)


def adam(model: Any, **how: Any) -> gemini.HybridAdam:
    return gemini.HybridAdam(model.parameters(), lr=1e-3, **how)


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(1, models.VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def step(model: Any, optimizer: Any, num_micro: int = 1, *, clips: bool = True) -> None:
    for micro in range(num_micro):
        loss_of(model, micro).backward()
    if clips:
        model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def check(timeline: Timeline, model: Any, *, alone: bool = True) -> None:
    """What holds for every recorded step; ``alone``: nothing was done beside it, and its updates ran inside it."""
    assert [span.start for span in timeline.spans] == sorted(span.start for span in timeline.spans)
    for track in (Track.COMPUTE, Track.UPDATE):
        end = 0.0
        for span in timeline.spans:
            if span.track is track:
                assert end <= span.start < span.stop, "one thread, one thing at a time"
                end = span.stop
    assert 0 < max(span.stop for span in timeline.spans) <= timeline.step_seconds * (1 + 1e-9)
    assert timeline.source == "measured" and timeline.tokens
    assert not alone or timeline.moved == model.memory_report()["moved"]
    for track, way in WAYS.items():
        assert sum(s.num_bytes for s in timeline.spans if s.track is track) == timeline.moved.get(way, 0), track
    busy, stalls = timeline.busy, sum(timeline.stalls.values())
    assert busy[Track.COMPUTE] + stalls <= timeline.step_seconds * (1 + 1e-9)
    world = world_of(model)
    if not world.config.overlap:  # whatever is done, computing waits for it
        assert busy.get(Track.UPDATE, 0.0) <= stalls * (1 + 1e-9)
    waited = model.memory_report()["stalls"]
    # The report's waits are around those that are recorded, and count to the outermost cause.
    assert not alone or stalls <= sum(waited.values()) * (1 + 1e-9)
    for tier, budget in timeline.budgets.items():
        assert budget == world.budget(tier)
        assert all(0 <= sample.total(tier) <= budget for sample in timeline.samples)
        assert not alone or timeline.samples[-1].held.get(tier, {}) == world.holders(tier)
    assert all(0 <= s.moment < len(timeline.moments) for s in timeline.spans if s.track is Track.COMPUTE)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert not world.recordings and world.recorder is None and world.ledger.on_change is None


@pytest.mark.parametrize("device", ["cpu", "standin"])
@pytest.mark.parametrize("gradients, num_micro", [("retain", 1), ("accumulate", 2), ("transient", 1)])
def test_a_step_is_where_its_time_and_its_bytes_went(
    device: str, gradients: str, num_micro: int, tmp_path: Path
) -> None:
    model = wrap(device, tmp_path, gradients=gradients)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, step_in_backward=gradients == "transient")
    gathers = 0
    with model.recording() as recording:
        for _ in range(2):
            gathers = world_of(model).num_gathers
            step(model, optimizer, num_micro, clips=gradients != "transient")
    timeline = recording.timeline
    check(timeline, model)
    assert timeline.tokens == 12 * num_micro
    names = {span.name.split(" chunk ")[0] for span in timeline.spans if span.chunk >= 0}
    assert {"fetch", "update"} <= names and ("land gradients of" in names) == (gradients != "transient")
    fetched = [s for s in timeline.spans if s.name.startswith("fetch") and s.track in (Track.H2D, Track.NVME_READ)]
    assert len({(s.chunk, s.moment) for s in fetched}) <= world_of(model).num_gathers - gathers
    phases = {name.split()[0] for name in timeline.moments}
    assert phases == {"forward", "loss", "backward"}
    assert {"forward model.layers.0", "backward model.layers.0"} <= set(timeline.moments)
    assert timeline.stalls["update"] >= timeline.busy[Track.UPDATE]
    peak = timeline.peaks[world_of(model).device.tier]
    assert peak > timeline.samples[-1].total(world_of(model).device.tier) - 1, "windows came and went"


@pytest.mark.parametrize("device", ["cpu", "standin"])
@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_an_overlapped_step_shows_what_ran_beside_computing(device: str, gradients: str, tmp_path: Path) -> None:
    in_backward = gradients == "transient"
    model = wrap(device, tmp_path, gradients=gradients, overlap=True)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, step_in_backward=in_backward)
    with model.recording() as recording:
        for seed in range(3):
            loss_of(model, seed).backward()
            if not in_backward:
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if seed == 1:  # of the second step until the third begins
                world, tail = world_of(model), recording.last.step
    second = tail.timeline(title="", tokens=0, flops=0, budgets={})
    third = recording.timeline
    check(third, model, alone=False)
    assert second.step_seconds == tail.next_start - tail.start, "to the first forward of the third"
    assert all(0 <= span.start < span.stop <= second.step_seconds * (1 + 1e-9) for span in second.spans)
    updates = [span for span in third.spans if span.track is Track.UPDATE and span.name.startswith("update chunk")]
    assert {span.chunk for span in updates} == {chunk.spec.index for chunk in world.chunks}
    assert sum(third.stalls.values()) < third.step_seconds and set(third.stalls) <= {
        "update", "fetch from nvme", "fetch from cpu", "gradient landing",
    }  # fmt: skip
    in_flight = [span for span in third.spans if span.track is Track.NVME_READ and span.name.startswith("update chunk")]
    assert {span.chunk for span in in_flight} == {span.chunk for span in updates}, "every state is on the drive"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_recording_changes_no_bit_and_no_move(precision: str, tmp_path: Path) -> None:
    seen = []
    for records in (False, True):
        model = wrap("standin", tmp_path, precision=precision)
        optimizer, losses = adam(model), []
        for _ in range(2):
            with model.recording() if records else nullcontext() as recording:
                losses.append(loss_of(model))
                backward(model, losses[-1])
                norm = clip_grads(model, optimizer, 1.0)
                make_step(model, optimizer)
                optimizer.zero_grad()
            if records:
                check(recording.timeline, model)
        world = world_of(model)
        counts = (world.num_gathers, world.num_evictions, model.memory_report()["moved"])
        floats = [float(x.detach()) for x in (*losses, norm)]
        seen.append((floats, model.state_dict(dtype=torch.float32), counts))
    (floats, weights, counts), (same_floats, same_weights, same_counts) = seen
    assert floats == same_floats and counts == same_counts
    for name, weight in weights.items():
        models.assert_same_bits(same_weights[name], weight, name)


def test_the_report_says_what_the_last_step_waited_for(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    optimizer = adam(model)
    assert model.memory_report()["stalls"] == {}
    assert "waited in the last step: nothing" in str(model.memory_report())
    step(model, optimizer)
    report = model.memory_report()
    waited = report["stalls"]
    assert waited.keys() == {"update", "fetch from nvme", "gradient landing"}
    assert list(waited.values()) == sorted(waited.values(), reverse=True) and min(waited.values()) > 0
    line = next(line for line in str(report).splitlines() if line.startswith("waited in the last step: "))
    assert [part.rsplit(" ", 2)[0] for part in line.split(": ")[1].split(", ")] == list(waited)
    loss_of(model)
    assert model.memory_report()["stalls"] == waited, "of the last step, not of what came after it"


def test_recomputation_and_activations_that_leave_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = models.make_model("llama")
    plain.activation_checkpointing_enable({"use_reentrant": False})
    memory = gemini.MemoryBudget(gpu="1MiB", cpu="64MiB", nvme="64MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(
        memory=memory,
        device="standin",
        placement=gemini.StaticPlacement(),
        offload_activations="nvme",
        max_chunk=8192,
        overlap=False,
    )  # where weights stay on the GPU, recomputing counts as backward of its block
    model = gemini.GeminiDDP(plain, config).train()
    ids = torch.randint(1, models.VOCAB, (16, 30))
    with model.recording() as recording:
        model(input_ids=ids, labels=ids).loss.backward()
        adam(model).step()
    check(recording.timeline, model)
    assert {name.split()[0] for name in recording.timeline.moments} == {"forward", "loss", "backward", "recompute"}
    told = {span.name: span for span in recording.timeline.spans}
    assert told["offload activations"].num_bytes and told["fetch activations"].num_bytes
    assert recording.timeline.stalls["activation"] > 0
    assert recording.timeline.peaks[Tier.NVME] >= told["offload activations"].num_bytes


def test_a_step_goes_on_to_the_next_first_forward(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    optimizer = adam(model)
    with model.recording() as recording:
        step(model, optimizer)
        before = recording.timeline
        loss_of(model)  # the next step begins
        after = recording.timeline
        assert before.step_seconds < after.step_seconds and before.spans == after.spans
        with torch.no_grad():
            loss_of(model)
        model.zero_grad()
    check(recording.timeline, model, alone=False)


@pytest.mark.parametrize("inside", [True, False])
def test_updates_that_a_step_left_in_flight_are_waited_for(inside: bool, tmp_path: Path) -> None:
    """A drain that ends an update which takes an hour more."""
    model = wrap("cpu", tmp_path)
    world, optimizer = world_of(model), adam(model)

    def drain() -> None:
        recorder = world.recorder
        late = Activity(recorder, Track.UPDATE, "update chunk 99", "", 99)
        recorder.add(late, recorder.clock(), recorder.clock() + 3600)

    with model.recording() as recording:
        step(model, optimizer)
        world.settle_by(drain)
        if inside:
            assert recording.timeline.step_seconds > 3600
            loss = loss_of(model)
            world.settle_by(lambda: 1 / 0)  # the next step has begun: asking does not wait in its middle
            assert recording.timeline.spans[-1].chunk == 99
            world.settle_by(lambda: None)
            loss.backward()
            model.zero_grad()
    assert recording.timeline.spans[-1].chunk == 99


def test_only_whole_steps_count(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path, gradients="accumulate")
    optimizer = adam(model)
    with model.recording() as recording:
        with torch.no_grad():
            loss_of(model)
        with pytest.raises(gemini.GeminiError, match="no whole step"):
            _ = recording.timeline
        loss_of(model).backward()
        with pytest.raises(gemini.GeminiError, match=r"forward .* backward and optimizer.step\(\)"):
            _ = recording.timeline
    with model.recording() as recording:  # its first half was before
        loss_of(model).backward()
        optimizer.step()
        with pytest.raises(gemini.GeminiError, match="no whole step"):
            _ = recording.timeline
    optimizer.zero_grad()
    waiting = loss_of(model)
    with model.recording() as recording:
        waiting.backward()
        step_on(loss_of(model), optimizer)
        with pytest.raises(gemini.GeminiError, match="no whole step"):
            _ = recording.timeline
        loss_of(model).backward()
        optimizer.zero_grad()  # given up
        step(model, optimizer)
    check(recording.timeline, model, alone=False)
    assert recording.timeline.tokens == 12, "of the step that was made"
    assert recording.timeline.moments.count("loss") == 1


def test_gradients_may_be_zeroed_between_forward_and_backward(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    optimizer = adam(model)
    with model.recording() as recording:
        for _ in range(2):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    check(recording.timeline, model)
    assert recording.timeline.moments[0] == "forward LlamaForCausalLM"


def test_a_failed_step_is_dropped_and_the_next_one_recorded(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    optimizer = adam(model)
    with model.recording() as recording:
        fetch = world_of(model).spill.begin_read
        world_of(model).spill.begin_read = lambda extents, urgent: 1 / 0
        with pytest.raises(ZeroDivisionError):
            loss_of(model)
        world_of(model).spill.begin_read = fetch
        optimizer.zero_grad()
        step(model, optimizer)
    check(recording.timeline, model)


def test_a_second_recording_and_a_trace_of_another_model_are_refused(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    params = tuple(TracedParam((n,), tuple(p.shape)) for n, p in model.named_parameters())
    trace = MemoryTrace("LlamaForCausalLM", "bf16", {}, 12, "cpu", Source.STRUCTURE, params, ())
    with (
        pytest.raises(gemini.PlanMismatch, match="another model"),
        model.recording(trace=MemoryTrace("Other", "bf16", {}, 12, "cpu", Source.STRUCTURE, params[1:], ())),
    ):
        pass
    with model.recording(trace=trace) as recording:
        with pytest.raises(gemini.GeminiError, match="recorded already"), model.recording():
            pass
        step(model, adam(model))
    assert recording.timeline.flops == 0, "a trace of the structure alone has no work in it"
    check(recording.timeline, model)


def test_a_timeline_reads_well(tmp_path: Path) -> None:
    model = wrap("cpu", tmp_path)
    with model.recording() as recording:
        step(model, adam(model))
    text = str(recording.timeline)
    assert text.startswith("LlamaForCausalLM, bf16, cpu: measured step ") and "tokens/s" in text
    assert "TFLOP/s" not in text, "nobody counted them"
    assert "computing waited for: " in text and "fetch from nvme" in text


@pytest.mark.parametrize(("device", "ranges"), [("cpu", {"update", "fetch"}), ("standin", {"update", "fetch", "land"})])
def test_a_profile_of_all_threads_shows_the_tracks_and_a_plain_one_does_not(
    device: str, ranges: set[str], tmp_path: Path
) -> None:
    """As the guide says: torch profiles the threads that it knows of, unless it is told to profile all."""
    model = wrap(device, tmp_path, overlap=True)
    optimizer = adam(model)
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)

    step(model, optimizer)
    step(model, optimizer)  # from now on it is known what to fetch ahead
    found = []
    for how in (None, everywhere):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, experimental_config=how) as profile:
            step(model, optimizer)
            model.memory_report()
        found.append({(event.name, event.thread) for event in profile.events()})
    plain, all_threads = found
    training = {thread for name, thread in plain if name == "aten::mm"}
    assert len(training) == 1 and {thread for name, thread in plain if name.startswith("gemini::")} <= training
    (trains,) = {thread for name, thread in all_threads if name == "aten::mm"}
    beside = {name for name, thread in all_threads if name.startswith("gemini::") and thread != trains}
    assert beside == {f"gemini::{name}" for name in ranges}
