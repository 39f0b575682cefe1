"""``gemini plan``: from a config, sizes and perhaps a machine to one answer: does it fit, how fast, what to change? Of
a model that ranks share as params alone, or over a mesh, where stages are planned with slices and parts of sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.status import Status

from gemini.errors import BudgetExceeded, GeminiError
from gemini.jobs import REFUSED, JobError, refusing
from gemini.jobs.plan_report import Report, named, planned, refused, screen
from gemini.jobs.planner import RUNNERS_UP, Found, Way, as_options, choose, options_of, run_by
from gemini.jobs.screen import progress, say, write
from gemini.jobs.settings import MAIN, PlanSettings
from gemini.jobs.trace import params_of
from gemini.pictures import draw
from gemini.planning.costs import MeshSizes
from gemini.planning.hardware import Hardware
from gemini.planning.parallel import MeshOutcome, least_seconds, play_mesh
from gemini.planning.plan import Plan
from gemini.planning.rules import RULES
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier

LORA_RANK = 16  # of the LoRA among the alternatives

Answer = tuple[Report, Plan | None, Timeline | None]
"""What is said, and what it was found with, if it fits."""


def plan(settings: PlanSettings, console: Console) -> int:
    """Plan, write and say it; returns the exit code: 0 if it fits, 2 if it does not."""
    if settings.config is not None:
        from gemini.jobs.models import find_config

        find_config(settings.config, settings.layers)  # a name that is none is said before anything else
    with progress("tracing the step") as status:
        report, made, timeline = (_plan_over_mesh if settings.mesh else _plan_whole)(Way(settings), status)
    if settings.json:
        print(json.dumps(report, indent=1))
        console.quiet = True
    say(console, screen(report))
    if settings.out is not None and made is None:
        Console(stderr=True).print(f"--out {settings.out} is not written: there is nothing that fits", soft_wrap=True)
    elif settings.out is not None and made is not None:
        write(settings.out, made.to_json(), console, f"; to train by it: gemini sft --plan {settings.out} ...")
    for path in settings.picture:
        if timeline is not None:
            with refusing(f"--picture {path}"):
                draw(path, timeline)
            console.print(f"written to {path}")
    return 0 if report["fits"] else REFUSED


def _plan_whole(way: Way, status: Status) -> Answer:
    """The step of a model that ranks share as params alone, perhaps with others that compute in turn, before it."""
    found, candidates = list[Found](), 0
    if way.settings.fastest or way.settings.kept_blocks == "auto":
        from gemini.tracing.ahead import nothing_collected

        with nothing_collected():  # a look through all traces and plans, again and again, costs a tenth of the time
            way, found, candidates = choose(way, status)
    status.update("choosing homes and moves ...")
    settings, machine, together, before = way.settings, way.machine, None, 0.0
    made = timeline = None
    try:
        together = way.plan_together() if settings.with_ else None
        made = way.plan() if together is None else together.plans[MAIN]
    except BudgetExceeded as e:
        report = refused(settings, machine, way.trace().forms[-1], e)
    else:
        if machine.hardware is not None:
            status.update("simulating the step ...")
            timeline = way.play(made)
            others = () if together is None else (plan for name, plan in together.plans.items() if name != MAIN)
            before = sum(way.play(plan).step_seconds for plan in others)
        report = planned(settings, machine, made, timeline, together=together, before=before)
    if found and made is not None:
        hours = None if timeline is None else 1e6 / timeline.tokens_per_second / 3600
        chosen = {"options": options_of(way), "candidates": candidates, "played": len(found)}
        report["fastest"] = chosen | {"hours_per_million": hours, **run_by(way, made)}
        report["alternatives"] = _next_to(found, None if timeline is None else report["tokens"])
    elif settings.alternatives or (made is None and not settings.with_):
        for number, other in enumerate(_alternatives(way, made is not None, timeline), 1):
            report["alternatives"].append(other)
            status.update(f"planning what else it could do, {number} of about 8 ...")
    return report, made, timeline


# ---- what else the machine could do ----------------------------------------------------------------------------------


def _next_to(found: list[Found], tokens: float | None) -> list[Report]:
    """The ways that come next to the first of ``found``, of steps of so many tokens (None: nobody asks how fast)."""
    reports = []
    for other in found[1 : RUNNERS_UP + 1]:
        least, less = "" if other.is_played else "at least ", 1 - found[0].seconds / other.seconds
        words = f"{least}{less:.1%} less" if less >= 0 else f"at most {-less:.1%} more, which was not played"
        rate = None if tokens is None else tokens / other.seconds
        reports.append(_alternative(options_of(other.way), True, rate, words))
    return reports


def _alternative(options: str, fits: bool | None, tokens_per_second: float | None, result: str = "") -> Report:
    return {"options": options, "result": result, "fits": fits, "tokens_per_second": tokens_per_second}


def _others(way: Way, *, fits: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Options that were not taken, and what they do to what is computed; those first that change nothing or little."""
    settings, on_gpu, trace = way.settings, way.machine.compute is Tier.GPU, way.trace()
    here, no_lora, sequences = settings.trace is None, settings.lora is None, settings.batch_size or 1
    small = {"batch_size": 1, "accumulate": sequences * settings.accumulate}
    too_large, lora = on_gpu and not fits, {"lora": LORA_RANK} if no_lora else {}
    waits = settings.offload_activations == "no" and trace.checkpoint_bytes > 0
    one_backward = settings.gradients is None and settings.accumulate == 1 and trace.precision != "fp16"
    exact = settings.states == "exact" and trace.precision == "bf16" and RULES[settings.optimizer].squares is not None
    options: tuple[tuple[bool, dict[str, Any], str], ...] = (
        (on_gpu and here and not settings.gradient_checkpointing, {"gradient_checkpointing": True}, "same bits"),
        (too_large and here and sequences > 1, small, "the same step in small micro-batches"),
        (too_large and waits, {"offload_activations": "cpu"}, "same bits"),
        (one_backward, {"gradients": "transient"}, "no clipping"),
        (too_large and here and no_lora and settings.tile_tokens is None, {"tile_tokens": "auto"}, "rounding"),
        (exact, {"states": "compact"}, "8-bit moments"),
        (here and no_lora, lora, "adapters only"),
        (here and not settings.load_in_4bit, {**lora, "load_in_4bit": True}, "4-bit base"),
        (True, {"gpus": 2 * settings.gpus}, "rounding"),
    )
    return ((changes, result) for is_open, changes, result in options if is_open)


def _alternatives(way: Way, fits: bool, timeline: Timeline | None) -> Iterator[Report]:
    """The step as asked, then with changes; with --alternatives each is planned, else only asked whether it fits."""
    beside: dict[str, Any] = {}
    yield _alternative("as asked", fits, None if timeline is None else timeline.tokens_per_second)
    for changes, result in _others(way, fits=fits):
        said = beside | changes
        try:
            other = way.changed(**said)
            does_fit = other.fits()
            is_timed = does_fit and way.settings.alternatives and way.machine.hardware is not None
            rate = other.play(other.plan()).tokens_per_second if is_timed else None
        except (GeminiError, ValueError) as e:  # a model without tiles, a machine without more GPUs
            yield _alternative(as_options(said), None, None, str(e).partition(" (")[0])
            continue
        yield _alternative(as_options(said), does_fit, rate, result)
        if "gradient_checkpointing" in changes and not fits:
            beside = changes


# ---- over a mesh -----------------------------------------------------------------------------------------------------

MOST_PLAYED = 8  # meshes at most: those whose steps take least by their computing and bubble alone


def _plan_over_mesh(way: Way, status: Status) -> Answer:
    """The step over the mesh that was asked for, or over the one with the shortest step."""
    settings, machine = way.settings, way.machine
    if machine.hardware is None:
        raise JobError("A plan over a mesh needs the speeds of a machine and of its wires: --machine NAME or FILE.")
    status.update("playing steps over meshes ...")
    over, is_auto = _OverMesh(way, machine.hardware), bool(settings.parallel)
    candidates = sorted(over.candidates(), key=lambda candidate: candidate[2]) if is_auto else [over.asked()]
    if not candidates:
        raise JobError(f"--parallel auto: no mesh of {settings.gpus} GPUs goes with this model.")
    found, refusals = _played(over, candidates, each_kind=is_auto)
    if is_auto and found and found[0].sizes.pp > 2:  # to compare meshes it was played with one stage of a kind
        found[0] = over.play(found[0].sizes, found[0].micro_batches)
    best, made, timeline = found[0] if found else None, None, None
    # Where it fits on none, the first one is told.
    sizes, micro_batches = (best.sizes, best.micro_batches) if best else refusals[0][:2]
    trace = way.trace(tp=sizes.tp, cp=sizes.cp)
    if best:
        made, timeline = best.slowest.plan, best.slowest.timeline
        report = planned(settings, machine, made, timeline, best=best)
    else:
        report = refused(settings, machine, trace, refusals[0][2])
    num_params = params_of(settings.config or "", settings.layers, settings.precision or "bf16").num_params
    report |= {
        "num_params": num_params,
        "num_trained": num_params,
        "ranks": sizes.ranks,
        "tokens": trace.tokens * micro_batches * sizes.shards,
        "accumulate": micro_batches,
        "mesh": _told_of(sizes, best) | {"chosen": best is not None and is_auto},
        "alternatives": [
            _alternative(_words_of(o), True, o.tokens_per_second, f"{o.micro_batches} micro-batches")
            for o in found[1 : RUNNERS_UP + 1]
        ],
    }
    if trace.context_parallel > 1:  # it has a part of each sequence
        samples, length = next(shape for shape in trace.batch.values() if len(shape) > 1)
        report["batch"] = {"input_ids": (samples, length * trace.context_parallel)}
    return report, made, timeline


def _played(
    over: _OverMesh, candidates: list[tuple[MeshSizes, int, float]], *, each_kind: bool
) -> tuple[list[MeshOutcome], list[tuple[MeshSizes, int, BudgetExceeded]]]:
    """The steps over meshes, the shortest first, and those that do not fit. Meshes are played in the order of what
    a step takes at least, until no other one can be among the best, or ``MOST_PLAYED`` are. JobError if none suits.
    """
    found: list[MeshOutcome] = []
    refused = list[tuple[MeshSizes, int, BudgetExceeded]]()
    unsuited: ValueError | None = None
    for sizes, micro_batches, least in candidates:
        if len(found) == MOST_PLAYED or (len(found) > RUNNERS_UP and least > found[RUNNERS_UP].step_seconds):
            break
        try:
            found.append(over.play(sizes, micro_batches, each_kind=each_kind))
            found.sort(key=lambda outcome: outcome.step_seconds)
        except BudgetExceeded as e:
            refused.append((sizes, micro_batches, e))
        except ValueError as e:
            unsuited = e
    # What does not fit is told before what does not suit: it can be changed.
    if unsuited is not None and not found and not refused:
        raise JobError(f"{over.words}: {unsuited}.") from unsuited
    return found, refused


def _told_of(sizes: MeshSizes, best: MeshOutcome | None) -> Report:
    """What is said of a mesh: its stages, and how its ranks wait for and send to each other; ``best``: if it fits."""
    if best is None:
        return {"mesh": str(sizes), "stages": [], "bubble": 0.0, "sent": {}}
    stages = [
        {
            "first_block": stage.blocks[0],
            "stop_block": stage.blocks[1],
            "num_params": stage.plan.trace.num_params,
            "held": named(stage.plan.bytes_per_tier),
            "seconds": stage.timeline.step_seconds,
        }
        for stage in (best.stages if sizes.pp > 1 else ())
    ]
    return {"mesh": _words_of(best), "stages": stages, "bubble": best.bubble, "sent": dict(best.sent)}


def _words_of(outcome: MeshOutcome) -> str:
    orders = {"1f1b": "; one forward, one backward", "bfs": "; breadth first", "": ""}
    return f"{outcome.sizes}{orders[outcome.order]}"


class _OverMesh:
    """Steps of a model over meshes: which there are, and how long one takes."""

    def __init__(self, way: Way, hardware: Hardware):
        from gemini.jobs.models import find_config

        settings = way.settings
        assert settings.config is not None
        self._way, self._settings, self._hardware = way, settings, hardware
        config = find_config(settings.config, settings.layers).config
        self._config = config.get_text_config()
        self._in_two = bool(getattr(config, "is_encoder_decoder", False))
        self._whole_rule = settings.rule_in(settings.precision or "bf16").whole
        asked = " ".join(f"--{name} {size}" for name, size in settings.dims.items())
        self.words = "--parallel auto" if settings.parallel else asked

    def asked(self) -> tuple[MeshSizes, int, float]:
        """The mesh that was asked for, as ``candidates`` has them; a JobError if it does not go with the model."""
        settings = self._settings
        own = settings.pp * settings.cp * settings.tp
        if settings.gpus % own:
            raise JobError(
                f"--gpus {settings.gpus} with {self.words}, which are {own} GPUs together: a multiple of {own}."
            )
        sizes = MeshSizes(settings.pp, settings.gpus // own, settings.cp, settings.tp)
        if settings.accumulate < sizes.pp:
            raise JobError(
                f"--pp {sizes.pp} with --accumulate {settings.accumulate}: a pipeline takes a micro-batch for each of "
                f"its stages at least, --accumulate {sizes.pp}."
            )
        if sizes.pp > 1 and self._in_two:
            raise JobError(
                f"--pp {sizes.pp}: this model is an encoder-decoder, whose decoder reads in every block what the "
                "encoder gives, which a pipeline does not hand on. Use --tp, or data parallel alone."
            )
        if sizes.tp > 1 and self._whole_rule:
            raise JobError(
                f"--tp {sizes.tp} with --optimizer {settings.optimizer}, which looks at whole params, and slices leave "
                "a part of each on a rank."
            )
        return sizes, settings.accumulate, 0.0

    def candidates(self) -> Iterator[tuple[MeshSizes, int, float]]:
        """Every mesh of the powers of two (and what is left) that the model goes with; the micro-batches of a step on
        it, of as many sequences as all GPUs would take without slices, parts and stages; and what it takes at least.
        """
        gpus, sharing = self._settings.gpus, self._way.machine.sharing
        for tp in _powers(1 if self._whole_rule else min(gpus, sharing)):
            for cp in _powers(gpus // tp):
                try:
                    trace = self._way.trace(tp=tp, cp=cp)
                except (GeminiError, ValueError):
                    continue  # heads or lengths that do not divide, attention that has no parts
                most = 1 if self._in_two else getattr(self._config, "num_hidden_layers", 1)
                for pp in _powers(min(gpus // (tp * cp), most)):
                    if gpus % (tp * cp * pp):
                        continue
                    sizes = MeshSizes(pp, gpus // (tp * cp * pp), cp, tp)
                    micro_batches = self._settings.accumulate * pp * cp * tp
                    least = least_seconds(trace, self._hardware, sizes, micro_batches, per_machine=sharing)
                    yield sizes, micro_batches, least

    def play(self, sizes: MeshSizes, micro_batches: int, *, each_kind: bool = False) -> MeshOutcome:
        """The step; ``each_kind``: not all stages, as for :func:`play_mesh`."""
        settings = self._settings

        def make(trace: MemoryTrace, accumulate: int, order: str) -> Plan:
            gradients = settings.gradients or ("accumulate" if sizes.pp > 1 or accumulate > 1 else "retain")
            # 1f1b: some micro-batches wait at once, whose inputs no plan of one knows.
            more = {"offload_activations": None} if order == "1f1b" else {}
            return self._way.plan_for(trace, gradients=gradients, accumulate=accumulate, ranks=sizes.shards, **more)

        return play_mesh(
            self._way.trace(tp=sizes.tp, cp=sizes.cp),
            self._hardware,
            sizes,
            make,
            micro_batches=micro_batches,
            width=self._config.hidden_size,
            per_machine=self._way.machine.sharing,
            schedule=settings.schedule,
            each_kind=each_kind,
        )


def _powers(most: int) -> Iterator[int]:
    """The powers of two up to it."""
    return (1 << power for power in range(most.bit_length()))
