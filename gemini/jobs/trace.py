"""``gemini trace``: a step of a model from its config, ahead of time, and the table of what in it is large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import TraceSettings
from gemini.planning.trace import MemoryTrace, Phase

_TOP = 8
"""Modules in the table."""


def take_trace(settings: TraceSettings) -> MemoryTrace:
    """The step that ``settings`` describes.

    Raises:
        JobError: if there is no such model, or it cannot be traced with these options.
    """
    assert settings.config is not None
    # The imports of seconds: a command line that is refused before does not pay for them.
    import gemini
    from gemini.jobs.models import find_config, first_line
    from gemini.jobs.outline import outline

    model, batch = outline(find_config(settings.config, settings.layers), settings)
    try:
        return gemini.trace(model, batch, precision=settings.precision, target=settings.target)
    except MemoryError:
        raise
    except Exception as e:
        # The model's own code runs here, on a batch of zeros: what it refuses is the config's or the options' doing.
        raise JobError(f"{settings.config} cannot be traced: {first_line(e)}") from e


def trace(settings: TraceSettings, console: Console, *, as_json: bool, out: Path | None) -> int:
    """Trace, write and say it; returns the exit code."""
    found = take_trace(settings)
    if out is not None:
        write_file(out, found.to_json())
    if as_json:
        print(found.to_json())
        return 0
    lines = [str(found), "", *phase_lines(found), "", *module_lines(found)]
    if out is not None:
        lines += ["", f"written to {out}; for a plan: gemini plan --trace {out}"]
    say(console, lines)
    return 0


def phase_lines(found: MemoryTrace) -> Iterator[str]:
    """Work by phase: matrix products, memory traffic, operations."""
    yield f"{'phase':<12}{'moments':>10}{'operations':>12}{'TFLOP':>12}{'read+written':>16}{'peak':>14}"
    for phase in Phase:
        moments = [moment for moment in found.moments if moment.phase is phase]
        if moments:
            yield (
                f"{phase.value:<12}{len(moments):>10,}{sum(m.num_ops for m in moments):>12,}"
                f"{sum(m.flops for m in moments) / 1e12:>12,.4g}"
                f"{human_bytes(sum(m.touched_bytes for m in moments)):>16}"
                f"{human_bytes(max(m.peak_bytes for m in moments)):>14}"
            )


def module_lines(found: MemoryTrace) -> Iterator[str]:
    """Where most bytes beside the params are live: modules by their highest peak."""
    peaks: dict[tuple[str, str], int] = {}
    for moment in found.moments:
        key = (moment.module or "(the model itself)", moment.phase.value)
        peaks[key] = max(peaks.get(key, 0), moment.peak_bytes)
    yield f"{'most bytes beside params':<48}{'in':<12}{'peak':>14}"
    for (module, phase), peak in sorted(peaks.items(), key=lambda item: -item[1])[:_TOP]:
        shown = module if len(module) < 47 else f"...{module[-43:]}"
        yield f"{shown:<48}{phase:<12}{human_bytes(peak):>14}"


def say(console: Console, lines: list[str]) -> None:
    """Print what is put into lines already."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def write_file(path: Path, text: str) -> None:
    """Raises: JobError: if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise JobError(f"--out {path} cannot be written: {e.strerror or e}. Choose a file you may write.") from e
