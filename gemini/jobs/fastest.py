"""``gemini plan --fastest`` and ``--micro-batch auto``: the quickest step of so many tokens, by branch and bound.

Every way to make the step is known from two traces of it. Those that fit are planned and played in the order of what
they take at least, until none that is left can be quicker. What is found is said with the command and the program that
run it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.status import Status

from gemini.errors import BudgetExceeded, GeminiError
from gemini.jobs.errors import JobError
from gemini.jobs.options import spelled
from gemini.jobs.plan_report import Report
from gemini.jobs.planner import Traces, Way
from gemini.jobs.trace import seq_len_of
from gemini.planning.fastest import step_seconds
from gemini.planning.plan import Plan
from gemini.planning.rules import RULES
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


class _Candidate(NamedTuple):
    least: float
    way: Way


def choose(way: Way, status: Status) -> tuple[Way, Choice]:
    """The quickest way to make the step that was asked for, and those beside it that were played; if none fits, the one
    that needs least.

    Raises:
        JobError: for tokens that are no whole number of sequences.
    """
    sequences = _sequences(way)
    way = Way(way.settings, Traces(of_two=True))
    candidates = sorted(_candidates(way, sequences), key=lambda candidate: candidate.least)
    found: list[Found] = []
    for number, (least, other) in enumerate(candidates):
        if found and least > (1 - CLOSE) * found[0].seconds:
            break
        status.update(f"playing {options_of(other)}, {number + 1} of at most {len(candidates)} ...")
        try:
            plan = other.plan()
            seconds = step_seconds(plan, other.play) if way.machine.hardware else other.least()
        except (BudgetExceeded, JobError):  # it was a lower bound of what it needs
            continue
        found.append(Found(other, plan, seconds))
        found.sort(key=lambda each: each.seconds)
    smallest = {"batch_size": 1, "accumulate": sequences}
    best = found[0].way if found else way.changed(**smallest)
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


def _candidates(way: Way, sequences: int) -> Iterator[_Candidate]:
    """The ways that fit, as far as that is known without planning them."""
    asked = way.settings
    checkpointings = (False, True) if asked.fastest and not asked.gradient_checkpointing else (None,)
    for checkpointing in checkpointings:
        base = way if checkpointing is None else way.changed(gradient_checkpointing=checkpointing)
        try:
            saves = base.changed(batch_size=1).plain().checkpoint_bytes > 0
        except (JobError, GeminiError):
            if checkpointing and len(checkpointings) > 1:  # the model has none
                continue
            raise
        is_open = asked.fastest and asked.offload_activations == "auto" and way.machine.compute is Tier.GPU
        for where in (("no", "cpu") if saves else ("no",)) if is_open else (asked.offload_activations,):
            yield from _of_sizes(base.changed(offload_activations=where), sequences)


def _of_sizes(way: Way, sequences: int) -> Iterator[_Candidate]:
    """Of several micro-batches none fits that is larger than one that does not; one alone needs no sums."""
    too_large = False
    for size in [size for size in range(1, sequences + 1) if sequences % size == 0]:
        other = way.changed(batch_size=size, accumulate=sequences // size)
        alone = size == sequences
        if (too_large and not alone) or (not alone and way.settings.gradients in ("transient", "retain")):
            continue
        if alone and too_large and not other.may_tile and not way.changed(batch_size=1, accumulate=1).fits():
            continue
        if other.refusal(other.plain()) is None:
            # Tiles are for what does not fit without.
            other = other.changed(tile_tokens=None) if other.may_tile else other
            yield _Candidate(other.least(), other)
        elif other.may_tile and other.refusal(other.trace()) is None:
            yield _Candidate(other.least(), other)
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
        "python": python_lines(best.way, best.plan),
    }


# ---- how to run it ---------------------------------------------------------------------------------------------------


def options_of(way: Way) -> str:
    """What was chosen, as options of ``gemini plan``."""
    chosen = way.settings
    said = {
        "batch_size": chosen.batch_size,
        "accumulate": chosen.accumulate if chosen.accumulate > 1 else None,
        "gradient_checkpointing": chosen.gradient_checkpointing,
        "offload_activations": chosen.offload_activations if chosen.offload_activations not in ("auto", "no") else None,
        "tile_tokens": chosen.tile_tokens,
    }
    return shlex.join(_words({spelled(name): value for name, value in said.items()}))


def _words(said: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in said.items():
        found += [name] if value is True else [] if value in (None, False) else [name, str(value)]
    return found


def _memory(way: Way, plan: Plan) -> dict[str, Any]:
    """Budgets as given; what was left out is measured where it runs, but for a drive, which is used if it is named."""
    given: dict[str, Any] = {tier.value: getattr(way.settings, tier.value) for tier in way.machine.budgets}
    for tier in [tier for tier in way.machine.budgets if tier.in_files]:
        if not plan.bytes_per_tier.get(tier):
            del given[tier.value]
            continue
        given[tier.value] = given[tier.value] or f"{way.machine.budgets[tier] >> 30}GiB"
        given[f"{tier.value}_path"] = "FOLDER"
    return {name: value for name, value in given.items() if value is not None}


def sft_command(way: Way, plan: Plan) -> str:
    """``gemini sft`` that makes the step of a plan; "" if it has none like it."""
    settings, trace = way.settings, plan.trace
    if plan.problem.gradients == "transient" or not any(len(shape) == 2 for shape in trace.batch.values()):
        return ""
    samples, length = next(shape for shape in trace.batch.values() if len(shape) == 2)
    memory = {name if "path" in name else f"{name}_memory": size for name, size in _memory(way, plan).items()}
    step: dict[str, Any] = {
        "max_length": length,
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_checkpointing": str(trace.checkpointing),
        "bf16": str(plan.problem.precision == "bf16"),
        "fp16": plan.problem.precision == "fp16",
        "offload_activations": plan.offload_activations,
        "tile_tokens": trace.tile_tokens,
        "optimizer": None if settings.optimizer == "adamw" else settings.optimizer,
        "states": None if settings.states == "exact" else settings.states,
        **memory,
    }
    if settings.out is not None:  # it says all that
        step = {"plan": settings.out, **{name: value for name, value in memory.items() if "path" in name}}
    said = {
        "model_name_or_path": settings.config,
        "dataset_name": "DATA",
        **step,
        "attn_implementation": settings.attn_implementation,
        "use_peft": settings.lora is not None,
        "lora_r": settings.lora,
        "lora_target_modules": None if settings.lora is None else "all-linear",
        "load_in_4bit": settings.load_in_4bit,
        "use_cpu": settings.compute == "cpu",
    }
    ranks = plan.layout.ranks
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m", "gemini"] if ranks > 1 else ["gemini"]
    return shlex.join([*start, "sft", *_words({f"--{name}": value for name, value in said.items()})])


def python_lines(way: Way, plan: Plan) -> list[str]:
    """The lines of a program that manage ``model`` for the step of a plan."""
    settings, on_gpu = way.settings, plan.problem.compute is Tier.GPU
    memory = ", ".join(f"{name}={value!r}" for name, value in _memory(way, plan).items())
    said = {
        "precision": plan.problem.precision,
        "gradients": plan.problem.gradients,
        "activations": plan.problem.activations if on_gpu and settings.out is None else None,
        "offload_activations": plan.offload_activations,
        "tile_tokens": plan.trace.tile_tokens,
        "states": None if settings.states == "exact" else settings.states,
        "device": settings.compute if settings.compute == "cpu" else None,
    }
    options = [f"memory=gemini.MemoryBudget({memory})"] if memory else []
    options += [f"{name}={value!r}" for name, value in said.items() if value is not None]
    if settings.optimizer != "adamw":
        entry = RULES[settings.optimizer]
        options.append(f"optimizer={entry.module}.{entry.rule}()")
    if settings.out is not None:
        options.append(f"placement=gemini.Plan.from_json(open({str(settings.out)!r}).read())")
    checkpointing = ["model.gradient_checkpointing_enable()"] if plan.trace.checkpointing else []
    return [*checkpointing, f"model = gemini.GeminiDDP(model, gemini.GeminiConfig({', '.join(options)}))"]
