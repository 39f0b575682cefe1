"""The numbers behind the pictures: peaks survive, shares add up, phases follow each other."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.pictures import series
from gemini.planning.timeline import Sample, Span, Track
from gemini.tiers import Tier
from tests.pictures.timelines import empty, large, toy


@pytest.mark.parametrize("columns", [1, 7, 100, series.COLUMNS])
def test_a_stack_is_no_finer_than_asked_and_keeps_the_peak(columns: int) -> None:
    timeline = large()
    assert len(timeline.samples) > series.COLUMNS
    shown = series.stack(timeline, Tier.GPU, columns)
    assert len(shown.samples) == columns == len(shown.edges) - 1
    assert max(sample.total(Tier.GPU) for sample in shown.samples) == timeline.peaks[Tier.GPU]
    for start, stop, sample in zip(shown.edges, shown.edges[1:], shown.samples, strict=False):
        inside = [s.total(Tier.GPU) for s in timeline.samples if start < s.seconds < stop]
        assert sample.total(Tier.GPU) >= max(inside, default=0)


def test_few_samples_are_shown_as_they_are() -> None:
    shown = series.stack(toy(), Tier.GPU)
    assert shown.samples == list(toy().samples)
    assert shown.edges == [*(sample.seconds for sample in toy().samples), toy().step_seconds]


def test_a_sample_counts_until_the_next_one() -> None:
    """A column in which nothing changes shows what the one before left."""
    samples = [Sample(second / 1000, 0, {Tier.CPU: {"weights": second}}) for second in range(600)]
    timeline = replace(toy(), samples=tuple(samples), step_seconds=10.0)
    shown = series.stack(timeline, Tier.CPU, 100)
    assert [s.total(Tier.CPU) for s in shown.samples[:7]] == [99, 199, 299, 399, 499, 599, 599]
    assert shown.samples[-1].total(Tier.CPU) == 599
    late = [sample._replace(seconds=sample.seconds + 5) for sample in samples]
    assert series.stack(replace(timeline, samples=tuple(late)), Tier.CPU, 100).samples[0] is late[0]


intervals = st.lists(st.tuples(st.floats(0, 9), st.floats(0, 3)).map(lambda p: (p[0], p[0] + p[1])), max_size=20)


@given(intervals, st.integers(1, 40))
def test_shares_of_columns_add_up_to_what_is_covered(found: list[tuple[float, float]], columns: int) -> None:
    edges = [10.0 * column / columns for column in range(columns + 1)]
    shares = series.coverage(found, edges)
    assert all(0 <= share <= 1 for share in shares)
    covered, end = 0.0, 0.0
    for start, stop in sorted(found):
        covered += max(0.0, min(stop, 10.0) - max(start, end))
        end = max(end, min(stop, 10.0))
    assert sum(shares) * 10 / columns == pytest.approx(covered, abs=1e-6)


def test_what_computing_does_not_take_it_waits() -> None:
    for timeline in (toy(), large()):
        shown = series.in_track(timeline, Track.COMPUTE, timeline.step_seconds * 2)
        width = [b - a for a, b in zip(shown.edges, shown.edges[1:], strict=False)]
        busy = {name: sum(s * w for s, w in zip(shares, width, strict=True)) for name, shares in shown.shares.items()}
        assert busy["forward"] + busy["backward"] == pytest.approx(timeline.busy[Track.COMPUTE])
        assert sum(busy.values()) == pytest.approx(timeline.step_seconds)
        assert len(shown.edges) <= series.COLUMNS + 1


def test_few_spans_are_seen_as_they_are() -> None:
    shown = series.in_track(toy(), Track.H2D, toy().step_seconds)
    assert set(shown.shares["fetch weights"]) == {0.0, 1.0}, "no column is half full"


def test_what_a_track_does_at_once_shares_its_time() -> None:
    """Fetches beside reads for updates: neither hides the other, and the track is not busier than all of its time."""
    spans = [Span(Track.NVME_READ, 0, 4, "fetch chunk 1"), Span(Track.NVME_READ, 0, 4, "fetch chunk 2")]
    spans += [Span(Track.NVME_READ, 2, 6, "update chunk 3"), Span(Track.NVME_READ, 3, 5, "offload activations")]
    shown = series.busy(spans, 8)
    assert shown.edges == [0, 2, 3, 4, 5, 6, 8]
    third = pytest.approx(1 / 3)
    assert shown.shares["fetch weights"] == [1, 0.5, third, 0, 0, 0]
    assert shown.shares["update"] == [0, 0.5, third, 0.5, 1, 0]
    assert shown.shares["activations"] == [0, 0, third, 0.5, 0, 0]
    coarse = series.busy(spans, 8, columns=2)
    assert sum(values[0] for values in coarse.shares.values()) == pytest.approx(1)
    assert sum(values[1] for values in coarse.shares.values()) == pytest.approx(0.5)


def test_phases_follow_each_other() -> None:
    names = [phase.name for phase in series.phases(toy())]
    assert names == ["forward", "backward", "update"]
    found = series.phases(toy())
    assert all(a.stop <= b.start for a, b in zip(found, found[1:], strict=False))
    assert found[-1].stop == toy().step_seconds and series.phases(empty()) == []


def test_recomputing_is_part_of_backward_and_an_early_update_is_not_a_phase() -> None:
    names = ["forward a", "backward a", "recompute a", "backward a", "forward a", "backward a"]
    spans = [Span(Track.COMPUTE, i, i + 1, name) for i, name in enumerate(names)]
    spans.append(Span(Track.UPDATE, 1.5, 2.5, "update chunk 3"))
    found = series.phases(replace(toy(), spans=tuple(spans)))
    assert [phase.name for phase in found] == ["forward", "backward", "forward", "backward"]


def test_activities_are_told_by_track_and_name() -> None:
    told = {
        (Track.COMPUTE, "recompute model.layers.1"): "recompute",
        (Track.COMPUTE, "loss"): "other computing",
        (Track.NVME_READ, "fetch chunk 3"): "fetch weights",
        (Track.NVME_READ, "update chunk 3"): "update",
        (Track.D2H, "land gradients of chunk 3"): "gradients",
        (Track.D2H, "offload activations"): "activations",
        (Track.GATHER, "all-gather chunk 3"): "all-gather",
        (Track.REDUCE, "reduce-scatter chunk 3"): "reduce-scatter",
        (Track.H2D, "host to gpu"): "other moves",
    }
    for (track, name), activity in told.items():
        assert series.activity_of(Span(track, 0, 1, name)) == activity
        assert activity in series.ACTIVITIES


def test_what_comes_into_a_tier_left_another() -> None:
    into_gpu, _ = series.across(toy(), Tier.GPU, toy().step_seconds)
    into_cpu, out_of_cpu = series.across(toy(), Tier.CPU, toy().step_seconds)
    _, out_of_nvme = series.across(toy(), Tier.NVME, toy().step_seconds)
    assert into_gpu == out_of_cpu and set(into_gpu.shares) == {"fetch weights"}
    assert into_cpu == out_of_nvme and set(into_cpu.shares) == {"update"}
    assert series.evictions(toy(), Tier.GPU) == [toy().samples[2].seconds, toy().samples[5].seconds]
