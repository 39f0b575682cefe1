"""``gemini trace``: a step of a model from its config, ahead of time, and the table of what in it is large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import MOST_POSITIONS, TraceSettings
from gemini.jobs.step_files import check_files, progress, say, write_file
from gemini.planning.trace import MemoryTrace, Phase, with_4bit_base

_TOP = 8
"""Modules in the table."""


def take_trace(settings: TraceSettings) -> MemoryTrace:
    """The step that ``settings`` describes.

    Raises:
        JobError: if there is no such model, or it cannot be built with these options.
        GeminiError: if it cannot be traced.
    """
    assert settings.config is not None
    settings.check()
    # The imports of seconds: a command line that is refused before does not pay for them.
    import gemini
    from gemini.jobs.models import find_config, hush, lora_on, only_refusing
    from gemini.tracing.batches import batch_for, model_class_for
    from gemini.train.loading.attention import FLASH, supports_flash
    from gemini.train.loading.from_config import skeleton_from_config

    source = find_config(settings.config, settings.layers)
    config = source.config
    seq_len = _seq_len(config, settings.seq_len)
    hush()
    config.use_cache = False
    with only_refusing(source, "traced"):
        model_class = model_class_for(config)
        if settings.attn_implementation not in (None, "auto"):
            config._attn_implementation = settings.attn_implementation
            if settings.attn_implementation == FLASH and not supports_flash(model_class, config):
                raise JobError(
                    f"--attn-implementation {FLASH}: {model_class.__name__} has none in transformers, or its heads are "
                    "too wide for it. Leave it out."
                )
        model = config
        if settings.lora is not None:
            adapt = lora_on(settings.lora)
            # As training wraps it: a plan knows params by their names.
            model = adapt(skeleton_from_config(config, model_class=model_class).model, low_cpu_mem_usage=True)
        found = gemini.trace(
            model,
            batch_for(config, settings.batch_size, seq_len, model_class=model_class),
            precision=settings.precision,
            target=settings.target,
            checkpointing="non-reentrant" if settings.gradient_checkpointing else None,
            model_class=model_class if model is config else None,
            tile_tokens=settings.tile_tokens,
            tensor_parallel=settings.tp,
            context_parallel=settings.cp,
        )
    found = replace(found, model=model_class.__name__)  # not that of adapters around it
    return with_4bit_base(found) if settings.load_in_4bit else found


def params_of(name: str, layers: int | None, precision: str) -> MemoryTrace:
    """The model of a config as a trace without work: its params, to compare with."""
    from gemini.jobs.models import find_config, hush, only_refusing
    from gemini.memory.chunks.chunk import COMPUTE_DTYPES
    from gemini.tracing.batches import model_class_for
    from gemini.train.loading.from_config import skeleton_from_config
    from gemini.train.setup.structure import structural_trace

    source = find_config(name, layers)
    hush()
    with only_refusing(source, "built"):
        model_class = model_class_for(source.config)
        model = skeleton_from_config(source.config, model_class=model_class, dtype=COMPUTE_DTYPES[precision]).model
        return structural_trace(model, precision)


def _seq_len(config: Any, asked: int | None) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return min(positions or MOST_POSITIONS, MOST_POSITIONS)
    if positions is not None and asked > positions:
        raise JobError(f"--seq-len {asked} is more than the model's {positions} positions.")
    return asked


def trace(settings: TraceSettings, console: Console) -> int:
    """Trace, write and say it; returns the exit code."""
    out = settings.out
    check_files(out)
    with progress() as now:
        now("tracing the step")
        found = take_trace(settings)
    if out is not None:
        write_file(out, found.to_json())
    if settings.json:
        print(found.to_json())
        return 0
    lines = [*str(found).splitlines(), "", *phase_lines(found), "", *module_lines(found)]
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
