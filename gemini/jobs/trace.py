"""``gemini trace``: a model's step ahead of time, which a plan is made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

import gemini
from gemini.jobs import JobError, refusing
from gemini.jobs.screen import progress, say, write
from gemini.jobs.settings import MOST_POSITIONS, TraceSettings
from gemini.planning.trace import MemoryTrace, with_4bit_base


def take_trace(settings: TraceSettings) -> MemoryTrace:
    """The step that ``settings`` describes; a JobError if there is no such model, or these options cannot build it."""
    assert settings.config is not None
    settings.check()  # of a plan: only now it is known for what it is traced
    # The imports of seconds: a command line that is refused before does not pay for them.
    from gemini.jobs.models import find_config, hush
    from gemini.tracing.ahead import batch_for, model_class_for

    source = find_config(settings.config, settings.layers)
    config = source.config
    seq_len = seq_len_of(settings, config)
    hush()
    config.use_cache = False
    with refusing(f"{source.label} cannot be traced"):
        model_class = model_class_for(config)
        model = _outline_of(settings, config, model_class)
        found = gemini.trace(
            model,
            batch_for(config, settings.batch_size, seq_len, model_class=model_class),
            precision=settings.precision,
            target=settings.target,
            checkpointing="non-reentrant" if settings.gradient_checkpointing else None,
            model_class=model_class if model is config else None,
            tile_tokens=settings.tile_tokens,
            kept_blocks=int(settings.kept_blocks or 0),
            kernels=settings.kernels,
            fp16_accumulation=settings.fp16_accumulation,
            float8=settings.float8,
            tensor_parallel=settings.tp,
            context_parallel=settings.cp,
        )
    found = replace(found, model=model_class.__name__)  # not that of adapters around it
    return with_4bit_base(found) if settings.load_in_4bit else found


def _outline_of(settings: TraceSettings, config: Any, model_class: Any) -> Any:
    """The config, or a model with adapters, by whose names a plan knows params; JobError without such an attention."""
    from gemini.jobs.models import lora_on
    from gemini.tracing.ahead import FLASH
    from gemini.train.loading.skeleton import skeleton_from_config

    if settings.attn_implementation == FLASH and not model_class._supports_flash_attn:
        raise JobError(f"--attn-implementation {FLASH}: {model_class.__name__} has none in transformers. Leave it out.")
    if settings.attn_implementation not in (None, "auto"):
        config._attn_implementation = settings.attn_implementation
    if settings.lora is None:
        return config
    return lora_on(settings.lora)(skeleton_from_config(config, model_class=model_class).model, low_cpu_mem_usage=True)


def params_of(name: str, layers: int | None, precision: str) -> MemoryTrace:
    """The model of a config as a trace without work: its params, to compare with."""
    from gemini.jobs.models import find_config, hush
    from gemini.memory.chunks.chunk import COMPUTE_DTYPES
    from gemini.tracing.ahead import model_class_for
    from gemini.train.loading.skeleton import skeleton_from_config
    from gemini.train.setup.problem import structural_trace

    source = find_config(name, layers)
    hush()
    with refusing(f"{source.label} cannot be built"):
        model_class = model_class_for(source.config)
        model = skeleton_from_config(source.config, model_class=model_class, dtype=COMPUTE_DTYPES[precision]).model
        return structural_trace(model, precision)


def seq_len_of(settings: Any, config: Any = None) -> int:
    """Tokens in a sequence of a step of the model of ``config``, which is read if it is not given."""
    from gemini.jobs.models import find_config

    config, asked = config or find_config(settings.config, settings.layers).config, settings.seq_len
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return min(positions or MOST_POSITIONS, MOST_POSITIONS)
    if positions is not None and asked > positions:
        raise JobError(f"--seq-len {asked} is more than the model's {positions} positions.")
    return asked


def trace(settings: TraceSettings, console: Console) -> int:
    """Trace, say and write it; returns the exit code."""
    with progress("tracing the step"):
        found = take_trace(settings)
    say(console, str(found).splitlines())
    if settings.out is not None:
        write(settings.out, found.to_json(), console, f"; for a plan: gemini plan --trace {settings.out}")
    return 0
