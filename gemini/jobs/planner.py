"""What ``gemini plan`` asks of the rooms of planning: a machine; steps traced, placed and played; and ``--fastest``,
the quickest step of so many tokens, by branch and bound. Two traces give every way to make a step, and those that fit
are played in the order of what they take at least, until none that is left can be quicker.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

from rich.status import Status

import gemini
from gemini.errors import BudgetExceeded, GeminiError, PlanMismatch, human_bytes, parse_bytes
from gemini.jobs import JobError
from gemini.jobs.screen import stdout_closed_to_others
from gemini.jobs.settings import MAIN, PlanSettings, TraceSettings, spelled
from gemini.jobs.trace import params_of, seq_len_of, take_trace
from gemini.planning import document
from gemini.planning.costs import MeshSizes
from gemini.planning.hardware import Hardware, load_hardware
from gemini.planning.parallel import block_by_block, least_seconds
from gemini.planning.placement import Problem, fill_fastest
from gemini.planning.plan import Plan
from gemini.planning.planner import pose_problem
from gemini.planning.quickest import Found, numbers_up_to, quickest
from gemini.planning.rules import RULES
from gemini.planning.simulate import bound_of, step_seconds
from gemini.planning.sizes import DEEP, SHALLOW, are_alike, deepened, with_kept
from gemini.planning.timeline import Timeline
from gemini.planning.together import Together, evaluated
from gemini.planning.trace import ALL, MemoryTrace, as_tiles, tile_tokens_for
from gemini.planning.working import MARGIN
from gemini.tiers import Tier

ROUNDED = 1.01  # more than a tier has by less than this is the number on its box: a card of 24 GiB shows 23.99


class Machine(NamedTuple):
    """A machine to plan for."""

    budgets: dict[Tier, int]  # bytes of one machine
    origins: dict[Tier, str]  # where they come from, if they were not given
    hardware: Hardware | None  # its speeds, if known
    compute: Tier
    ranks: int
    sharing: int  # ranks that divide its host memory and drives

    @property
    def budgets_of_rank(self) -> dict[Tier, int]:
        return {tier: n if tier is Tier.GPU else n // self.sharing for tier, n in self.budgets.items()}


def machine_of(settings: PlanSettings) -> Machine:
    """Budgets as given, else the runtime's share of the machine's capacities; a JobError if there is neither."""
    hardware = None if settings.machine is None else load_hardware(settings.machine)
    budgets: dict[Tier, int] = {}
    origins: dict[Tier, str] = {}
    for tier in Tier:
        if tier is Tier.GPU and settings.compute == "cpu":
            continue
        given = None if (said := getattr(settings, tier.value)) is None else parse_bytes(said)
        capacity = None if hardware is None else hardware.capacity(tier)
        if given is None and capacity is not None:
            given, origins[tier] = int(capacity * MARGIN), f"({MARGIN:.0%} of {human_bytes(capacity)})"
        if given and hardware is not None and capacity is not None and given > capacity:
            if given > ROUNDED * capacity:
                raise JobError(
                    f"--{tier.value} {said} is more than {hardware.name} has, {human_bytes(capacity)}. If yours has "
                    f"it, say --machine {settings.machine},{tier.value}={said}."
                )
            origins[tier] = f"({hardware.name}: {human_bytes(capacity)})"
            hardware = hardware.with_figures("as given", **{f"{tier.value}_bytes": given})
        if given:
            budgets[tier] = given
    compute = Tier.GPU if Tier.GPU in budgets else Tier.CPU
    if settings.compute == "gpu" and compute is not Tier.GPU:
        raise JobError("--compute gpu needs the size of a GPU: --gpu 24GiB, or a --machine that has one.")
    if Tier.CPU not in budgets:
        raise JobError(
            "A plan needs host memory, where whatever moves stands in between: give --cpu 64GiB, or --machine for "
            f"{MARGIN:.0%} of what a machine has."
        )
    sharing = settings.gpus
    if compute is Tier.GPU and hardware is not None and hardware.has("num_gpus"):
        hardware = hardware.with_gpus(sharing)
        num_gpus = int(hardware.figures["num_gpus"].value)
        sharing = min(sharing, num_gpus)
        if settings.gpus % sharing:
            raise JobError(
                f"--gpus {settings.gpus}: a {hardware.name} has {num_gpus}, so that many or fewer, or a multiple of it "
                "for several machines."
            )
    return Machine(budgets, origins, hardware, compute, settings.gpus, sharing)


def problem_of(
    settings: PlanSettings, machine: Machine, trace: MemoryTrace, where: str | None = None, *, overlap: bool = True
) -> Problem:
    """Pose what is placed; ``where``: the inputs of checkpointed blocks wait. ``overlap``: room for every worker."""
    return pose_problem(
        trace,
        machine.budgets_of_rank,
        precision=trace.precision,
        gradients=settings.kept_gradients,
        compute=machine.compute,
        offload_activations=where,
        ranks=machine.ranks,
        sharing=machine.sharing,
        rule=settings.rule_in(trace.precision),
        overlap=overlap,
    )


class Way:
    """A way to run a step: as it was asked for, or with some options changed. Each trace is taken once for all."""

    def __init__(self, settings: PlanSettings, traces: Traces | None = None):
        self.settings = settings
        self.machine = machine_of(settings)
        self._traces = traces or Traces()
        self._made: Plan | None = None

    def changed(self, **options: Any) -> Way:
        """Take other options, and perhaps with them another machine."""
        return Way(replace(self.settings, **options), self._traces)

    def keeping(self, number: int) -> Way:
        """The same with so many blocks kept."""
        return self.changed(kept_blocks=number) if number else self

    def trace(self, **more: Any) -> MemoryTrace:
        """The step that is planned for: traced, or read and found to be of the model that was named."""
        settings = self.settings
        if settings.trace is not None:
            trace = self._traces.read(settings.trace, settings.config, settings.layers)
        else:
            target = "cuda" if self.machine.compute is Tier.GPU else "cpu"
            trace = self._traces.take(settings.traced(target=target, **more))
        if settings.order != "bfs" or settings.accumulate == 1:
            return trace
        try:
            by_block = block_by_block(trace, settings.accumulate)
        except ValueError as e:
            raise JobError(f"--order bfs: {e}.") from e
        if why := settings.config and _why_in_turn(self._traces.config(settings.config, settings.layers)):
            raise JobError(f"--order bfs: {why}. A run would compute one micro-batch after another: plan --order dfs.")
        return by_block

    def plan(self) -> Plan:
        """Raises: BudgetExceeded: if it does not fit. JobError: for a rule that several ranks cannot share."""
        try:
            self._made = self._made or self.plan_for(self.trace())
            return self._made
        except ValueError as e:
            raise JobError(f"--optimizer {self.settings.optimizer} with --gpus {self.settings.gpus}: {e}.") from e

    def plan_for(self, trace: MemoryTrace, **more: Any) -> Plan:
        """The plan of another step than the whole one, as it was asked for, but for ``more``."""
        machine = self.machine
        with stdout_closed_to_others():
            return gemini.plan(trace, machine.hardware, machine.budgets, **{**self._asked(trace), **more})

    def _asked(self, trace: MemoryTrace) -> dict[str, Any]:
        settings, machine = self.settings, self.machine
        return {
            "gradients": settings.kept_gradients,
            "optimizer": settings.rule_in(trace.precision),
            "compute": machine.compute,
            "offload_activations": None if settings.offload_activations == "no" else settings.offload_activations,
            "accumulate": settings.accumulate // trace.micro_batches,
            "ranks": machine.ranks,
            "local_ranks": machine.sharing,
            "schedule": settings.schedule,
        }

    def plan_together(self) -> Together:
        """The plans of this model and of those that compute in turn with it, before it. Raises BudgetExceeded."""
        traces: dict[str, MemoryTrace] = {}
        for name, config, is_trained in self.settings.with_:
            asked = {"config": config, "layers": None, "lora": None, "load_in_4bit": False, "kept_blocks": None}
            checkpoints = self.settings.gradient_checkpointing or not is_trained
            try:
                trace = self.trace(**asked, gradient_checkpointing=checkpoints)
            except GeminiError:  # it has none
                trace = self.trace(**asked, gradient_checkpointing=False)
            traces[name] = trace if is_trained else evaluated(trace)
        # As bridges wrap them: a graph may keep weights of one while another computes.
        own = self.trace()
        with stdout_closed_to_others():
            return gemini.plan_together(
                {**traces, MAIN: own}, self.machine.hardware, self.machine.budgets, at_once=True, **self._asked(own)
            )

    def play(self, plan: Plan) -> Timeline:
        """The step in time, on a machine whose speeds are known."""
        assert self.machine.hardware is not None
        return gemini.simulate(plan, self.machine.hardware, schedule=self.settings.schedule)

    def seconds_of(self, plan: Plan, *, played: bool = True) -> float:
        """How long the step takes, or, if it is not ``played``, takes at least; without speeds its micro-batches."""
        hardware, settings, ask = self.machine.hardware, self.settings, step_seconds if played else bound_of
        return ask(plan, hardware, settings.schedule) if hardware else float(settings.accumulate)

    def fits(self) -> bool:
        """Whether there is a placement: quicker than looking for the best one."""
        where = self.settings.offload_activations
        places: tuple[str | None, ...] = {"auto": (None, "cpu"), "no": (None,)}.get(where, (where,))
        rooms = (True, False) if self.settings.schedule == "overlapped" else (False,)  # as the planner tries them
        for step, overlap, place in product(self.trace().forms, rooms, places):
            with suppress(BudgetExceeded):
                fill_fastest(problem_of(self.settings, self.machine, step, place, overlap=overlap))
                return True
        return False

    def least(self) -> float:
        """Seconds of computing alone; without speeds micro-batches."""
        machine = self.machine
        if machine.hardware is None:
            return float(self.settings.accumulate)
        sizes, trace = MeshSizes(dp=machine.ranks), self.trace()
        micro_batches = self.settings.accumulate // trace.micro_batches
        return least_seconds(trace, machine.hardware, sizes, micro_batches, per_machine=machine.sharing)


class Traces:
    """Steps traced and read for one answer. ``of_two``: those of alike layers or kept blocks come of two others."""

    def __init__(self, *, of_two: bool = False) -> None:
        self._take, self._num_alike = cache(take_trace), cache(_num_alike)
        self.take = cache(self._made) if of_two else self._take
        self.read, self.config = cache(_read_trace), cache(_config_of)

    def _made(self, settings: TraceSettings) -> MemoryTrace:
        if isinstance(kept := settings.kept_blocks, int) and kept != ALL:
            none, every = (self.take(replace(settings, kept_blocks=number)) for number in (None, ALL))
            with suppress(ValueError):  # no walk through blocks and back
                return with_kept(none, every, min(kept, every.kept_blocks))
            return self._take(settings)
        num_layers = self._num_alike(settings.config or "", settings.layers)
        if num_layers > SHALLOW + DEEP:
            # What moments keep does not grow evenly from layer to layer, or there is no such model of few.
            with suppress(ValueError, JobError, GeminiError):
                three, five = (self._take(replace(settings, layers=number)) for number in (SHALLOW, DEEP))
                return deepened(three, five, num_layers)
        return self._take(settings)


def _config_of(name: str, layers: int | None) -> Any:
    from gemini.jobs.models import find_config

    return find_config(name, layers).config


def _num_alike(name: str, layers: int | None) -> int:
    """The layers of a model in which all but the first and the last are alike, else 0."""
    config = _config_of(name, layers)
    count = getattr(config, "num_hidden_layers", None) or 0
    kinds = [value for value in config.to_dict().values() if isinstance(value, list) and len(value) == count]
    one_each = any(kind.count(kind[0]) < count for kind in kinds)
    return count if not one_each and are_alike(params_of(name, layers, "bf16").params) else 0


def _read_trace(path: Path, config: str | None, layers: int | None) -> MemoryTrace:
    trace = document.load(path, "--trace", MemoryTrace.from_json)
    if not trace.moments:
        raise PlanMismatch(f"--trace {path} has no moments: trace a whole forward and backward")
    if config is not None:
        params_of(config, layers, trace.precision).check_same_model(trace, what=f"--trace {path}")
    return trace


FEW_TILES = 8  # of MLPs, whose weights each reads anew
RUNNERS_UP = 4  # ways, or meshes, that are shown beside the best one


def choose(way: Way, status: Status) -> tuple[Way, list[Found[Way]], int]:
    """The quickest way (if none fits, the one that needs least), what was planned, the quickest that was played first,
    and of how many: of the ways that fit, each number of kept blocks that may be looked at, whether it fits too or not.
    """
    sequences = _sequences(way)
    way = Way(way.settings, Traces(of_two=True))
    ways = [(first.keeping, _kept(first, most)) for first, most in _ways(way, sequences)]
    of_all, planned = sum(len(least) for _, least in ways), count(1)

    def plan_of(other: Way) -> Plan | None:
        status.update(f"planning {options_of(other)}, {next(planned)} of at most {of_all} ...")
        with suppress(BudgetExceeded, JobError):
            return other.plan()
        return None

    def seconds_of(other: Way, plan: Plan, is_played: bool) -> float:
        if is_played:
            status.update(f"playing {options_of(other)} ...")
        return other.seconds_of(plan, played=is_played)

    if found := quickest(ways, plan_of, seconds_of):
        return found[0].way, found, of_all
    smallest = {"batch_size": 1, "accumulate": sequences} if way.settings.fastest else {}
    kernels = None if way.settings.kernels == "auto" else way.settings.kernels
    return way.changed(kept_blocks=None, kernels=kernels, **smallest), found, of_all


def _kept(way: Way, most: int) -> dict[int, float]:
    """The least that a way takes, by the number of kept blocks, of some up to ``most``: that of computing is a line."""
    none, every = way.least(), way.changed(kept_blocks=most or None).least()
    return {k: none + (every - none) * k / max(most, 1) for k in numbers_up_to(most)}


def _sequences(way: Way) -> int:
    """Sequences of a step, on each GPU."""
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


def _ways(way: Way, sequences: int) -> Iterator[tuple[Way, int]]:
    """Those that fit, as far as that is known without planning them, each with the blocks that it may keep."""
    asked = way.settings
    no_tiles: dict[str, Any] = {"tile_tokens": None} if asked.tile_tokens == "auto" else {}
    if asked.kernels == "auto":
        yield from _ways(way.changed(kernels=None), sequences)
        with suppress(JobError):  # of a model that they are not for, and with tiles that were asked for
            yield from _ways(way.changed(kernels="liger", **no_tiles), sequences)
        return
    one: dict[str, Any] = {"batch_size": 1} | no_tiles
    is_open = way.machine.hardware is not None and not asked.gradient_checkpointing
    keeps = way.machine.hardware is not None and asked.kept_blocks in (None, "auto")
    for checkpointing in (True, False) if is_open else (asked.gradient_checkpointing,):
        base = way.changed(gradient_checkpointing=checkpointing, kept_blocks=None if keeps else asked.kept_blocks)
        try:
            saves = base.changed(**one).trace().checkpoint_bytes > 0
        except GeminiError:
            if checkpointing and is_open:  # the model has none
                continue
            raise
        most = 0
        with suppress(GeminiError):  # it cannot be told by block
            most = base.changed(**one, kept_blocks=ALL).trace().kept_blocks if saves and keeps else 0
        places = ("no", "cpu") if saves else ("no",)
        may_move = way.machine.hardware and way.machine.compute is Tier.GPU and asked.offload_activations == "auto"
        for where in places if may_move else (asked.offload_activations,):
            yield from ((other, most) for other in _of_sizes(base.changed(offload_activations=where), sequences))
        if most:  # all kept is as good as none checkpointed
            return


def _of_sizes(way: Way, sequences: int) -> Iterator[Way]:
    """Ways by micro-batch: of several none fits that is larger than one that does not; one alone needs no sums."""
    asked, may_tile, too_large, fitting = way.settings, way.settings.tile_tokens == "auto", set[Any](), set[Any]()
    sizes = range(1, sequences + 1) if asked.fastest else [asked.batch_size or 1]
    config = _config_of(asked.config or "", asked.layers).get_text_config()
    orders, length = [None if (in_turn := _why_in_turn(config)) else asked.order], seq_len_of(asked, config)
    is_open = asked.fastest and asked.order is None and way.machine.hardware is not None
    if is_open and not (in_turn or asked.lora or hasattr(config, "router_aux_loss_coef")):  # they drop, TRL adds it
        with suppress(JobError):
            replace(asked, tokens_per_step=None, order="bfs").check()
            orders.append("bfs")
    for size, order in product([size for size in sizes if sequences % size == 0], orders):
        other = way.changed(batch_size=size, accumulate=sequences // size, order=order)
        alone, is_large = size == sequences, order in too_large
        if alone and order != orders[0] or is_large and not alone:
            continue
        if order != "bfs" and not alone and way.settings.gradients in ("transient", "retain"):
            continue
        if alone and is_large and not may_tile and not way.changed(batch_size=1, accumulate=1).fits():
            continue
        found, every = list[Way](), _tiles(config, size * length, only=order not in fitting)
        for tiles in every if may_tile else [asked.tile_tokens]:
            with suppress(JobError):  # no walk through blocks, or nothing to compute in tiles
                if (own := other.changed(tile_tokens=tiles)).fits():
                    found.append(own)
                    if tiles is not None:  # else those of the head as well: the room that it gives up may be worth more
                        break
        yield from found
        (fitting if found else too_large).add(order)


def _why_in_turn(config: Any) -> str:
    """What in the model's config keeps ``train_step`` from going block by block; "" if nothing does."""
    config = config.get_text_config()
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float) and value:
            return f"{name} of the model is {value}, and what is dropped has another order block by block"
    is_of_all = getattr(config, "output_router_logits", False)
    return "output_router_logits of the model is on, and every block adds to that loss" if is_of_all else ""


def _tiles(config: Any, tokens: int, *, only: bool) -> Iterator[int | str | None]:
    """Tiles of a micro-batch of so many tokens, first those that cost less. ``only``: no smaller one fits either."""
    head = tile_tokens_for(tokens, *(getattr(config, name, 1) for name in ("vocab_size", "hidden_size")))
    few = max(head, tokens // FEW_TILES)
    yield from (None, f"head={head}", as_tiles({"head": head, "mlp": few}), *([head] if only and few > head else []))


def options_of(way: Way) -> str:
    """The choice as options of ``gemini plan``."""
    names = "batch_size", "accumulate", "gradient_checkpointing", "kept_blocks", "offload_activations", "tile_tokens"
    return as_options({name: getattr(way.settings, name) for name in (*names, "kernels", "order")})


def run_by(way: Way, plan: Plan) -> dict[str, Any]:
    """Ways to run the plan of ``--out``: a command ("" where jobs have no step like it) and the lines of a program."""
    # Of drives those on which the plan has something.
    tiers = [tier for tier in way.machine.budgets if not tier.in_files or plan.bytes_per_tier.get(tier)]
    return {"command": _command(way, plan, tiers), "python": _program(way, plan, tiers)}


def _command(way: Way, plan: Plan, tiers: list[Tier]) -> str:
    settings = way.settings
    by_block, in_program = plan.trace.micro_batches > 1, plan.problem.gradients == "transient"
    if in_program or settings.layers is not None:
        return ""
    said = {
        "model_name_or_path": settings.config,
        "dataset_name": "DATA",
        "plan": settings.out or "PLAN",
        "order": by_block and "bfs",
        "nvme_path": any(tier.in_files for tier in tiers) and "FOLDER",
        "attn_implementation": settings.attn_implementation,
        "use_liger_kernel": settings.kernels == "liger",
        "torch_compile": plan.trace.float8,  # as it is traced
        "use_peft": settings.lora is not None,
        "lora_r": settings.lora,
        "lora_dropout": settings.lora and by_block and "0.0",  # what is dropped goes block by block in another order
        "lora_target_modules": settings.lora and "all-linear",
        "load_in_4bit": settings.load_in_4bit,
        "use_cpu": way.machine.compute is Tier.CPU,
    }
    start = f"torchrun --nproc-per-node {plan.layout.ranks} -m gemini" if plan.layout.ranks > 1 else "gemini"
    return f"{start} sft {as_options(said)}"


def _program(way: Way, plan: Plan, tiers: list[Tier]) -> list[str]:
    """Lines that wrap ``model``, as transformers makes it; none for layers in 4 bits, with which it is loaded."""
    settings, path = way.settings, str(way.settings.out or "PLAN")
    if settings.load_in_4bit:
        return []
    memory: dict[str, Any] = {tier.value: getattr(settings, tier.value) or way.machine.budgets[tier] for tier in tiers}
    memory |= {f"{tier.value}_path": "FOLDER" for tier in tiers if tier.in_files}
    how: dict[str, Any] = {"precision": plan.problem.precision, "gradients": plan.problem.gradients}
    how |= {name: True for name in ("fp16_accumulation", "float8") if getattr(plan.trace, name)}
    how |= {"states": settings.states} | ({"device": "cpu"} if way.machine.compute is Tier.CPU else {})
    lines = ["import gemini"]
    if settings.attn_implementation not in (None, "auto"):
        lines.append(f"model.set_attn_implementation({settings.attn_implementation!r})")
    if settings.kernels == "liger":
        family = plan.trace.model.removesuffix("ForCausalLM").lower()
        lines += ["import liger_kernel.transformers as liger", f"liger.apply_liger_kernel_to_{family}(model=model)"]
    if settings.lora is not None:
        how_adapted = f"r={settings.lora}, lora_alpha={2 * settings.lora}, target_modules='all-linear'"
        lines += ["import peft", f"model = peft.get_peft_model(model, peft.LoraConfig({how_adapted}))"]
    if plan.trace.checkpointing:
        lines.append("model.gradient_checkpointing_enable()")
    lines.append(
        f"model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=gemini.MemoryBudget({_arguments(memory)}), "
        f"placement=gemini.Plan.from_json(open({path!r}).read()), {_arguments(how)}, "
        f"optimizer=gemini.optim.{RULES[settings.optimizer].rule}()))"
    )
    if plan.trace.float8:
        lines.append("model.compile()")  # as it is traced
    if plan.trace.micro_batches > 1:
        lines.append("losses = gemini.train_step(model, micro_batches)")
    return lines


def _arguments(said: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in said.items())


def as_options(said: dict[str, Any]) -> str:
    """Fields as the command line spells them; those that are None or False are left out."""
    words: list[str] = []
    for name, value in said.items():
        words += [spelled(name)] if value is True else [] if value in (None, False, []) else [spelled(name), str(value)]
    return shlex.join(words)
