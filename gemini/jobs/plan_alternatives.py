"""``gemini plan --alternatives``: what else the same machine could do with a step. Each is planned as the step is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gemini.errors import MissingFigure
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import PlanSettings
from gemini.tiers import Tier

LORA_RANK = 16
"""Of the LoRA among the alternatives."""


@dataclass(frozen=True)
class Alternative:
    """A way to run the step; ``fits`` is None where it cannot be, and ``result`` says why."""

    options: str
    beside: str
    fits: bool | None
    tokens_per_second: float | None
    result: str


Tried = Callable[[PlanSettings], tuple[bool, float | None]]


def alternatives(settings: PlanSettings, compute: Tier, precision: str, tried: Tried) -> Iterator[Alternative]:
    """The step as asked; what leaves less beside params, until the step fits; then every other change beside that.

    Args:
        compute: where forward and backward run.
        precision: of the step.
        tried: plans a step: whether it fits, and its tokens per second.
    """
    fits, rate = tried(settings)
    yield Alternative("as asked", "", fits, rate, "")
    base, beside = settings, ""
    for option, changed, result in _smaller(settings, compute, fits=fits):
        found = tried(changed)
        yield Alternative(option, "", *found, result)
        if found[0] and not fits:
            fits, base, beside = True, changed, option
            break
    for option, changed, result in _others(base, precision):
        try:
            yield Alternative(option, beside, *tried(changed), result)
        except (JobError, MissingFigure) as e:
            yield Alternative(option, beside, None, None, str(e).partition(" (")[0])


def _smaller(settings: PlanSettings, compute: Tier, *, fits: bool) -> Iterator[tuple[str, PlanSettings, str]]:
    """Steps that leave less beside params, each less than the one before."""
    if settings.trace is not None or compute is not Tier.GPU:
        return
    options = ""
    if not settings.gradient_checkpointing:
        settings, options = replace(settings, gradient_checkpointing=True), "--gradient-checkpointing"
        yield options, settings, "same bits"
    if settings.tile_tokens is None and settings.lora is None and not fits:
        yield f"{options} --tile-tokens auto".lstrip(), replace(settings, tile_tokens="auto"), "rounding"


def _others(settings: PlanSettings, precision: str) -> Iterator[tuple[str, PlanSettings, str]]:
    if settings.gradients is None and settings.accumulate == 1 and precision != "fp16":
        yield "--gradients transient", replace(settings, gradients="transient"), "no clipping"
    if settings.states == "exact" and precision == "bf16" and settings.has_compact_form:
        yield "--states compact", replace(settings, states="compact"), "8-bit moments"
    if settings.trace is None and settings.lora is None:
        yield f"--lora {LORA_RANK}", replace(settings, lora=LORA_RANK), "adapters only"
    if settings.trace is None and not settings.load_in_4bit:
        lora = settings.lora or LORA_RANK
        option = "--load-in-4bit" if settings.lora else f"--lora {lora} --load-in-4bit"
        yield option, replace(settings, lora=lora, load_in_4bit=True), "4-bit base"
    gpus = 2 * settings.gpus
    yield f"--gpus {gpus}", replace(settings, gpus=gpus), "rounding"
