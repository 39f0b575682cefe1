"""``gemini plan --fastest``: the quickest step of so many tokens, by branch and bound.

Every way to make the step is known from two traces of it. Those that fit are planned and played in the order of what
they take at least, until none that is left can be quicker. What is found is said with the command that runs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.status import Status

from gemini.errors import BudgetExceeded, GeminiError
from gemini.jobs.errors import JobError
from gemini.jobs.plan_report import Report
from gemini.jobs.planner import Traces, Way
from gemini.jobs.settings import spelled
from gemini.jobs.trace import seq_len_of
from gemini.planning.fastest import step_seconds
from gemini.planning.plan import Plan
from gemini.tiers import Tier

CLOSE = 0.005
"""What could be quicker by less than this part of a step is not looked at."""


RUNNERS_UP = 4
"""Ways that are shown beside the best one."""


class Found(NamedTuple):
    """A way to make the step, its plan and how long it takes: seconds, or micro-batches where no speeds are known."""

    way: Way
    plan: Plan
    seconds: float


class Choice(NamedTuple):
    """What was found, the quickest first, and of how many ways that fit."""

    found: tuple[Found, ...]
    candidates: int


def choose(way: Way, status: Status) -> tuple[Way, Choice]:
    """The quickest way to make the step that was asked for, and those beside it that were played; if none fits, the one
    that needs least.
    """
    sequences = _sequences(way)
    way = Way(way.settings, Traces(of_two=True))
    candidates = sorted(((other.least(), other) for other in _ways(way, sequences)), key=lambda pair: pair[0])
    found: list[Found] = []
    for number, (least, other) in enumerate(candidates):
        if found and least > (1 - CLOSE) * found[0].seconds:
            break
        status.update(f"playing {options_of(other)}, {number + 1} of at most {len(candidates)} ...")
        try:
            plan = other.plan()
            seconds = step_seconds(plan, other.play) if way.machine.hardware else least
        except (BudgetExceeded, JobError):  # it was a lower bound of what it needs
            continue
        found.append(Found(other, plan, seconds))
        found.sort(key=lambda each: each.seconds)
    best = found[0].way if found else way.changed(batch_size=1, accumulate=sequences)
    return best, Choice(tuple(found), len(candidates))


def _sequences(way: Way) -> int:
    """Of a step, on each GPU."""
    settings = way.settings
    if settings.tokens_per_step is None:
        return (settings.batch_size or 1) * settings.accumulate
    each = seq_len_of(settings) * settings.gpus
    if settings.tokens_per_step % each:
        nearest = max(round(settings.tokens_per_step / each), 1) * each
        gpus = f" on {settings.gpus} GPUs" if settings.gpus > 1 else ""
        raise JobError(
            f"--tokens-per-step {settings.tokens_per_step} is no whole number of sequences of {each // settings.gpus} "
            f"tokens{gpus}: --tokens-per-step {nearest}, or another --seq-len."
        )
    return settings.tokens_per_step // each


def _ways(way: Way, sequences: int) -> Iterator[Way]:
    """Those that fit, as far as that is known without planning them."""
    asked = way.settings
    is_open = way.machine.hardware is not None and not asked.gradient_checkpointing
    for checkpointing in (False, True) if is_open else (asked.gradient_checkpointing,):
        base = way.changed(gradient_checkpointing=checkpointing)
        try:
            saves = base.changed(batch_size=1).plain().checkpoint_bytes > 0
        except GeminiError:
            if checkpointing and is_open:  # the model has none
                continue
            raise
        places = ("no", "cpu") if saves else ("no",)
        may_move = way.machine.hardware and way.machine.compute is Tier.GPU and asked.offload_activations == "auto"
        for where in places if may_move else (asked.offload_activations,):
            yield from _of_sizes(base.changed(offload_activations=where), sequences)


def _of_sizes(way: Way, sequences: int) -> Iterator[Way]:
    """Of several micro-batches none fits that is larger than one that does not; one alone needs no sums."""
    too_large = False
    for size in [size for size in range(1, sequences + 1) if sequences % size == 0]:
        other = way.changed(batch_size=size, accumulate=sequences // size)
        alone = size == sequences
        if (too_large and not alone) or (not alone and way.settings.gradients in ("transient", "retain")):
            continue
        if alone and too_large and not other.may_tile and not way.changed(batch_size=1, accumulate=1).fits():
            continue
        if other.refusal(other.plain()) is None:  # tiles are for what does not fit without
            yield other.changed(tile_tokens=None) if other.may_tile else other
        elif other.may_tile and other.fits():
            yield other
        else:
            too_large = True


def chosen(choice: Choice, report: Report) -> Report:
    """What a report says of it."""
    best, *others = choice.found
    tokens, step = report["tokens"], report["step"]
    return {
        "options": options_of(best.way),
        "candidates": choice.candidates,
        "played": len(choice.found),
        "hours_per_million": 1e6 / step["tokens_per_second"] / 3600 if step else None,
        "runners_up": [
            {
                "options": options_of(other.way),
                "tokens_per_second": tokens / other.seconds,
                "loss": 1 - best.seconds / other.seconds,
            }
            for other in (others[:RUNNERS_UP] if step else ())
        ],
        "command": sft_command(best.way, best.plan),
    }


# ---- how to run it ---------------------------------------------------------------------------------------------------


def options_of(way: Way) -> str:
    """What was chosen, as options of ``gemini plan``."""
    names = ("batch_size", "accumulate", "gradient_checkpointing", "offload_activations", "tile_tokens")
    return _joined([], {spelled(name): getattr(way.settings, name) for name in names})


def sft_command(way: Way, plan: Plan) -> str:
    """``gemini sft`` that runs the plan, which ``--out`` writes; "" if it has no step like it."""
    settings, ranks = way.settings, plan.layout.ranks
    if plan.problem.gradients == "transient":
        return ""
    said = {
        "model_name_or_path": settings.config,
        "dataset_name": "DATA",
        "plan": settings.out or "PLAN",
        "nvme_path": any(plan.bytes_per_tier.get(tier) for tier in Tier if tier.in_files) and "FOLDER",
        "attn_implementation": settings.attn_implementation,
        "use_peft": settings.lora is not None,
        "lora_r": settings.lora,
        "lora_target_modules": settings.lora and "all-linear",
        "load_in_4bit": settings.load_in_4bit,
        "use_cpu": settings.compute == "cpu",
    }
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m", "gemini"] if ranks > 1 else ["gemini"]
    return _joined([*start, "sft"], {f"--{name}": value for name, value in said.items()})


def _joined(words: list[str], said: dict[str, Any]) -> str:
    for name, value in said.items():
        words += [name] if value is True else [] if value in (None, False) else [name, str(value)]
    return shlex.join(words)
