"""Recorded steps of several ranks: each has its own view, waiting for the others included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import gemini
from gemini.planning.timeline import Timeline, Track
from tests.ranks.cases import Job, batches, config_of, make_model
from tests.ranks.pool import Pool
from tests.world import world_of


def record(job: Job) -> tuple[Timeline, dict[str, int], dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(job.family)
    model = gemini.GeminiDDP(model, config_of(job, model))
    optimizer = gemini.HybridAdam(model.parameters(), lr=job.lr)
    with model.recording() as recording:
        for step in batches(job, rank, world):
            for batch in step:
                model(**batch).loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            world_of(model).settle()  # so that no step has bytes of the one before
    report = model.memory_report()
    return recording.timeline, report["moved"], report["stalls"]


@pytest.mark.parametrize("where", ["ram", "standin"])
def test_every_rank_has_its_own_view(where: str, pool_of: Callable[[int], Pool], tmp_path: Path) -> None:
    job = Job(precision="bf16", where=where, num_steps=2, path=str(tmp_path))
    for timeline, moved, waited in pool_of(2).run(record, job):
        assert timeline.moved == moved and "1 of 2 ranks" in timeline.title
        tracks = {span.track for span in timeline.spans}
        assert {Track.COMPUTE, Track.GATHER, Track.REDUCE, Track.UPDATE} <= tracks
        assert {"other ranks", "all-gather", "reduce-scatter"} <= timeline.stalls.keys()
        assert "other ranks" in waited
        for track in (Track.COMPUTE, Track.UPDATE, Track.GATHER, Track.REDUCE):
            end = 0.0
            for span in timeline.spans:
                if span.track is track:
                    assert end <= span.start < span.stop
                    end = span.stop
        gathered = {s.name for s in timeline.spans if s.track is Track.GATHER}
        reduced = {s.name for s in timeline.spans if s.track is Track.REDUCE}
        assert all(name.startswith("all-gather chunk ") for name in gathered) and len(gathered) > 1
        assert all(name.startswith("reduce-scatter chunk ") for name in reduced) and len(reduced) > 1
        assert timeline.tokens == 8 * 7, "of all ranks"
