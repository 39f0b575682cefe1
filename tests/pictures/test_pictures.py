"""Files of the right kind that say what they should, the same bytes each time, and open without a network."""

import builtins
import itertools
import json
import re
import runpy
import struct
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemini.pictures import draw
from gemini.pictures.board import board, picture
from gemini.pictures.series import ACTIVITIES, HOLDERS
from gemini.planning.timeline import Span, Timeline, Track
from gemini.tiers import Tier
from tests.pictures.timelines import MIB, empty, large, toy


def texts_of(svg: bytes) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("}svg")
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")]


# ---- PNG and SVG -----------------------------------------------------------------------------------------------------


def test_a_png_is_one(tmp_path: Path) -> None:
    data = draw(tmp_path / "step.png", toy()).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 800 < width < 1200 and 600 < height < 2000
    both = draw(tmp_path / "both.PNG", toy(), toy("measured", 1.3)).read_bytes()
    assert abs(struct.unpack(">II", both[16:24])[0] - 2 * width) <= 1, "a column each"


def test_an_svg_says_what_there_is(tmp_path: Path) -> None:
    texts = texts_of(draw(tmp_path / "step.svg", toy(), toy("measured", 1.3)).read_bytes())
    for wanted in (
        "Toy <model> & co on standin", "forward", "backward",
        "GPU memory: peak 2 MiB of 3 MiB (67%)", "Host memory: peak 9 MiB of 64 MiB (14%)",
        "NVMe: peak 6 MiB of 8 MiB (75%)", "budget", "compute", "update", "host to gpu", "nvme read", "in", "out",
        "evicted", "milliseconds since the step began", "held by", "windows", "exp_avg_sq", "what tracks do", "waiting",
        "fetch weights", "2 MiB",
    ):  # fmt: skip
        assert wanted in texts, wanted
    assert any(text.startswith("predicted step 12 ms, 2,000 tokens/s") for text in texts)
    assert any(text.startswith("measured step 13.8 ms, ") for text in texts)
    assert "gpu to host" not in texts, "a track that nothing runs on has no row"


def test_the_same_timeline_is_the_same_file() -> None:
    def draw_all() -> list[bytes]:
        return [picture(toy(), suffix=suffix) for suffix in (".png", ".svg")]

    assert draw_all() == draw_all()


def test_thousands_of_moments_stay_small(tmp_path: Path) -> None:
    timeline = large()
    assert len(timeline.moments) > 2000
    assert draw(tmp_path / "large.svg", timeline).stat().st_size < 800_000


def boxes(figure: Any) -> list[tuple[str, Any]]:
    """Every text that is seen, with its place in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    seen = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in seen]


@pytest.mark.parametrize("timelines", [[toy()], [toy(), toy("measured", 1.3)], [large()]], ids=["one", "two", "large"])
def test_no_text_lies_on_another_or_outside(timelines: list[Timeline]) -> None:
    figure = board(timelines)
    seen = boxes(figure)
    assert len(seen) > 30
    for number, (text, box) in enumerate(seen):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        for other, place in seen[number + 1 :]:
            apart = box.x1 <= place.x0 or place.x1 <= box.x0 or box.y1 <= place.y0 + 2 or place.y1 <= box.y0 + 2
            assert apart, f"{text!r} lies on {other!r}"


def test_every_holder_and_activity_has_a_colour_of_its_own() -> None:
    for colours in (HOLDERS, ACTIVITIES):
        assert len(set(colours.values())) == len(colours)
        assert all(re.fullmatch("#[0-9A-Fa-f]{6}", colour) for colour in colours.values())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_an_empty_step_and_unknown_holders_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    strange = replace(toy(), samples=(toy().samples[0]._replace(held={Tier.CPU: {"new thing": MIB}}),))
    assert draw(tmp_path / f"empty.{suffix}", empty()).stat().st_size
    assert draw(tmp_path / f"strange.{suffix}", strange, empty()).stat().st_size


# ---- the trace of docs/examples/perfetto.py --------------------------------------------------------------------------

EVENTS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "perfetto.py"))["events"]


def perfetto(*timelines: Timeline) -> str:
    events = [event for number, timeline in enumerate(timelines, 1) for event in EVENTS(timeline, number)]
    return json.dumps({"traceEvents": events})


def check_trace(text: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """What the viewers need of trace events; the spans by process and thread."""
    events = json.loads(text)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    for event in events:
        assert event["ph"] in ("X", "C", "M") and event["pid"] in processes and event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in named
            threads[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(n, int) and n >= 0 for n in event["args"].values())
    for spans in threads.values():
        end = 0
        for event in sorted(spans, key=lambda e: e["ts"]):
            assert round(event["ts"] * 1000) >= end, "spans of one thread do not overlap"
            end = round((event["ts"] + event["dur"]) * 1000)
    return threads


def test_a_trace_has_a_process_per_timeline_and_a_thread_per_track() -> None:
    first, second = toy(), toy("measured", 1.3)
    text = perfetto(first, second)
    threads = check_trace(text)
    assert sum(len(spans) for spans in threads.values()) == len(first.spans) + len(second.spans)
    events = json.loads(text)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"predicted: {first.title}", f"measured: {second.title}"]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert tracks == [track.value for track in Track if track in first.busy]
    fetch = next(e for e in events if e["name"] == "fetch chunk 1")
    assert fetch["args"] == {"moment": str(first.moments[1]), "chunk": 1, "bytes": MIB}
    assert fetch["ts"] == 1500 and fetch["dur"] == 500, "microseconds"
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "gpu bytes"]
    windows = [e["args"]["windows"] for e in counters]
    assert [of for of, _ in itertools.groupby(windows)] == [MIB, 2 * MIB, MIB, 2 * MIB, MIB]


def test_spans_that_overlap_get_threads_of_their_own() -> None:
    spans = [Span(Track.NVME_READ, i, i + 2.5, f"fetch chunk {i}", -1, i) for i in range(6)]
    text = perfetto(replace(toy(), spans=tuple(spans)))
    assert len(check_trace(text)) == 3
    names = [e["args"]["name"] for e in json.loads(text)["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["nvme read"] * 3
    check_trace(perfetto(large()))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step.pdf", "step", "step.tar.gz", "step.perfetto.json"])
def test_other_kinds_of_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a \.png or an \.svg.*perfetto\.py writes"):
        draw(tmp_path / name, toy())
    assert not (tmp_path / name).exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    for suffix in ("png", "svg"):
        with pytest.raises(ImportError, match=r"pip install '\.\[pictures\]'"):
            draw(tmp_path / f"step.{suffix}", toy())
