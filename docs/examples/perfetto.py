"""Every move and stretch of computing of a planned step, as a trace for ui.perfetto.dev or chrome://tracing.

    gemini plan config.json --machine rtx4090 --gpu 24GiB --cpu 96GiB --out plan.json
    python perfetto.py --plan plan.json --machine rtx4090 --out step.json

A recorded step (`model.recording()`) has a timeline too: `events(recording.timeline, 2)` stands beside the first one.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemini
from gemini.planning.hardware import load_hardware
from gemini.planning.timeline import Span, Timeline, Track


def events(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    """A thread for each track, and a counter of the bytes of each tier; times in microseconds."""

    def called(kind: str, thread: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": thread, "args": {"name": name}}

    yield called("process", 0, f"{timeline.source}: {timeline.title}")
    thread = 0
    for track in Track:
        for spans in rows(span for span in timeline.spans if span.track is track):
            thread += 1
            yield called("thread", thread, track.value)
            for span in spans:
                start, stop = (round(seconds * 1e9) / 1e3 for seconds in (span.start, span.stop))
                moment = str(timeline.moments[span.moment]) if 0 <= span.moment < len(timeline.moments) else ""
                args = {"moment": moment, "chunk": span.chunk, "bytes": span.num_bytes}
                yield {
                    **{"ph": "X", "name": span.name, "pid": process, "tid": thread},
                    **{"ts": start, "dur": stop - start, "args": args},
                }
    for sample in timeline.samples:
        for tier, held in sample.held.items():
            times = {"pid": process, "tid": 0, "ts": sample.seconds * 1e6}
            yield {"ph": "C", "name": f"{tier.value} bytes", **times, "args": dict(held)}


def rows(spans: Iterator[Span]) -> list[list[Span]]:
    """Spans that overlap stand in rows of their own: a viewer takes what overlaps in one for calls in calls."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        free = next((row for row in found if row[-1].stop <= span.start), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True, help="of gemini plan --out")
    parser.add_argument("--machine", required=True, help="a name, or a file of gemini doctor --measure --json")
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    args = parser.parse_args()
    plan = gemini.MemoryPlan.from_json(args.plan.read_text())
    step = gemini.simulate(plan, load_hardware(args.machine))
    args.out.write_text(json.dumps({"traceEvents": list(events(step, 1)), "displayTimeUnit": "ms"}))
    print(f"{len(step.spans)} spans of {step.step_seconds:.3g} s: {args.out}")
