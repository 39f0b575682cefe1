"""What has to be placed: the params, their sizes, and the bytes there are, before anything is allocated."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, PlanMismatch, parse_bytes, warn
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.memory.devices.device import Device
from gemini.memory.durable.folder import store_bytes
from gemini.memory.nvme import probe, striped_free_bytes
from gemini.memory.system import available_bytes
from gemini.planning.costs import Speeds
from gemini.planning.hardware import Hardware
from gemini.planning.placement import Placement, Problem, StaticPlacement, by_fractions, check_fits
from gemini.planning.plan import Plan
from gemini.planning.planner import Others, Planner, first_that_fits, pose_problem
from gemini.planning.quickest import quickest_kept
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam
from gemini.planning.working import MARGIN
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import Ranks
from gemini.sharing import pool_of
from gemini.tiers import DRIVE, FILED, Tier
from gemini.train.modules.codes import WHAT_WORKS, check_coded, scales_in
from gemini.train.modules.float8 import is_float8
from gemini.train.modules.mixed import KeepFp32, kept_in_fp32
from gemini.train.modules.reading import NamedParam, Structure, own_buffers, own_params, structure_of
from gemini.train.params.handle import handle_of, is_in_stages, optimizer_of
from gemini.train.slices.alike import refuse_unsuited
from gemini.version import __version__


def collect_params(model: nn.Module | Structure) -> list[NamedParam]:
    """The model's params in declaration order, tied ones once."""
    structure = structure_of(model)
    named = structure.params
    if not named:
        raise ValueError(f"{type(structure.model).__name__} has no params: there is nothing for GeminiDDP to manage")
    for param, names in named:
        handle = handle_of(param)
        if handle is not None:
            raise ValueError(
                f"param {names[0]!r} is managed by another GeminiDDP model already (as {handle.name!r}): "
                "a param can belong to one wrapped model only. Wrap the outermost model once"
            )
        if param.dtype is torch.float64:
            warn(f"param {names[0]!r} is float64: its master will be float32")
        elif id(param) in structure.coded:
            check_coded(names[0], param)
        elif param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"param {names[0]!r} is {param.dtype}: GeminiDDP manages float32, bfloat16 and float16 "
                "params (integer and complex ones are not supported): register it as a buffer; " + WHAT_WORKS
            )
        if param.is_meta:
            raise ValueError(
                f"param {names[0]!r} is on the meta device: it has no values to train from. Load or initialize "
                "the model first, or let gemini.from_pretrained or gemini.from_config do it piece by piece"
            )
        if param.layout is not torch.strided:
            raise TypeError(f"param {names[0]!r} is {param.layout}: GeminiDDP manages dense params only")
    # One value for all elements is a stand-in for what is loaded later.
    strided = [n for n in named if not n.param.is_contiguous() and any(n.param.stride())]
    if strided:
        warn(
            f"params are kept contiguous, and {len(strided)} of them were not (the first is {strided[0].names[0]!r}, "
            f"strides {strided[0].param.stride()}). Their values stay the same, but torch may choose other kernels, "
            "which round in another way: compare with a model whose params are contiguous"
        )
    return named


def _refuse_renormalizing(structure: Structure) -> None:
    """Refuse embeddings that every rank would renormalize for its own batch, so that weights would part."""
    for path, module in structure.modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{path or 'the model'!r} ({type(module).__name__}) has max_norm={module.max_norm}: it rewrites the "
                "rows of its batch in every forward, and on several ranks each would rewrite others. Set max_norm=None "
                "and renormalize between steps, inside model.gathered([weight], write=True)"
            )


def prepare(
    structure: Structure,
    config: GeminiConfig,
    ranks: Ranks,
    *,
    filled: bool = True,
    cuts: Collection[int] | None = None,
    in_stages: bool = False,
) -> None:
    """See that all ranks have the same model and settings, and give them the weights and buffers of rank 0; before
    anything is built. ``filled``: the model has its values already; else whoever fills it sees that they are the same.
    ``cuts``: the ids of params that are slices. ``in_stages``: it is that of a :class:`gemini.Pipeline` over ranks.
    """
    if ranks.shares_params:
        _refuse_renormalizing(structure)
    named = collect_params(structure)  # before weights are compared: what cannot be managed has none that could be
    doing = "the comparison of ranks at the start"
    agree(ranks.job, doing, lambda: _facts_of_job(config), words="start")
    # Where all have the same settings all refuse them.
    refuse_unsuited(config, ranks, is_cut=bool(cuts), in_stages=in_stages)
    agree(ranks.everyone, doing, lambda: _facts_of_params(structure, named), words="start")
    if not filled:
        return
    # Ranks with other experts have other values for them: those are taken from the first with the same ones.
    experts = cuts if cuts and ranks.experts.size > 1 else ()
    every = [(names[0], param) for param, names in named]
    tensors = {name: param.data for name, param in every if id(param) not in experts}
    ranks.take_from_first({**tensors, **dict(structure.model.named_buffers()), **scales_in(every)})
    if experts:
        ranks.take_from_first({name: param.data for name, param in every if id(param) in experts}, ranks.alike)


def _facts_of_job(config: GeminiConfig) -> Facts:
    """State what must be alike on all ranks of a job."""
    # The paths may differ between machines: only whether there is one is compared.
    paths = {f"{tier.value}_path": bool(config.memory.paths_of(tier)) for tier in FILED}
    sizes = [f.name for f in fields(config.memory) if f.compare and f.name not in paths]
    return Facts(
        {
            "version of gemini": __version__,
            "version of torch": str(torch.__version__),
            "version of Python": ".".join(map(str, sys.version_info[:2])),
            "config": {name: _as_text(v) for name, v in vars(config).items() if name not in ("memory", "device")},
            "memory budget": {name: repr(getattr(config.memory, name)) for name in sizes},
            **paths,
            # Each rank has its own number of the device.
            "device": str(config.device).partition(":")[0],
        }
    )


def _facts_of_params(structure: Structure, named: list[NamedParam]) -> Facts:
    """State what must be alike on all ranks that have the same params."""
    # By every name: a tie on one rank alone shows as a difference here.
    params = {
        name: f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for param, names in named
        for name in names
    }
    # Checksums of what steps before the model was wrapped have left: each rank keeps a part of it.
    states = {
        f"{key} of {names[0]}": f"checksum {checksum_of(torch.as_tensor(value)):08x}"
        for param, names in named
        if (optimizer := optimizer_of(param)) is not None
        for key, value in optimizer.state.get(param, {}).items()
    }
    return Facts(
        {
            "model": type(structure.model).__name__,
            "set of params": params,
            "state of the optimizer": states,
            "set of tied params": [list(n.names) for n in named if len(n.names) > 1],
        }
    )


def _as_text(value: Any) -> str:
    """A setting in words that differ where it does; plans and traces are large."""
    if isinstance(value, (MemoryTrace, Plan, Hardware)):
        return hashlib.sha256(value.to_json().encode()).hexdigest()[:16]
    if hasattr(value, "choose"):  # an eviction policy of the user's own, whose repr has an address
        return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__dict__', '')}"
    return repr(value)


def _measure_budgets(config: GeminiConfig, device: Device, ranks: Ranks, beside: int) -> dict[Tier, int]:
    """Bytes per existing tier for this process: as declared, else what is free now times ``MARGIN``; of a shared budget
    what other models leave, without ``beside`` bytes of the device that are nobody's. Host memory and disk are a
    machine's: the ranks on it divide them. What is measured is what the poorest rank has.
    """
    memory, free = config.memory, {Tier.CPU: available_bytes()}
    if device.tier is Tier.GPU:
        free = {Tier.GPU: device.free_bytes(), **free}
    elif memory.bytes_of(Tier.GPU):
        warn(f"memory gpu={memory.gpu!r} has no effect: the device is {device.name}")
    for tier in FILED:
        if paths := memory.paths_of(tier):
            directories = [probe(path, tier).directory for path in paths]
            free[tier] = striped_free_bytes(directories)
            if tier is DRIVE and memory.durable:  # the slots of an earlier run are used again
                free[tier] += store_bytes(directories[0])
    # A declared budget is taken as it is; of what is measured a margin stays for others.
    budgets = {t: int(n * MARGIN) if (given := memory.bytes_of(t)) is None else given for t, n in free.items()}
    # A GPU is this process's alone; memory and disks are shared by all ranks of the machine.
    budgets = {tier: n if tier is Tier.GPU else n // ranks.local_size for tier, n in budgets.items()}
    pool = pool_of(memory)
    if pool is not None:
        whole = {tier: max(n - beside, 0) if tier is device.tier else n for tier, n in budgets.items()}
        budgets = pool.offer(whole, device.tier, parse_bytes(getattr(memory, "later", 0)) // ranks.local_size)
    # All ranks plan alike, with what the poorest has: their layouts must be the same.
    return dict(zip(budgets, ranks.smallest(list(budgets.values())), strict=True))


class Decision(NamedTuple):
    """The homes of what is built, with the plan that was given or made; none for homes that the user fixed."""

    trace: MemoryTrace
    problem: Problem
    placement: Placement
    plan: Plan | None
    offload_activations: str | None = None
    kept: Mapping[int, str] = MappingProxyType({})
    """Why params stay in fp32, by their ``id``. What was made so can be seen no more when the model is managed."""
    tile_tokens: int | str | None = None
    """Tokens of the tiles in which MLPs and the head with its loss are computed; None for the model as it is."""
    kept_blocks: int = 0
    choice: MemoryTrace | None = None
    """The step with no block kept, and with all of them, where their number was chosen."""
    compared: Mapping[str, Any] | None = None
    """What the second look has found (:mod:`gemini.train.second_look`)."""


def decide(
    structure: Structure, config: GeminiConfig, device: Device, ranks: Ranks, apart: Collection[str] = ()
) -> Decision:
    """The homes the config asks for, in the budgets there are. ``apart``: first names of params that share no chunk."""
    kept = kept_in_fp32(structure, config.precision, config.keep_fp32)
    own = trace_of(structure, config.precision, kept)
    # Experts that are spread have chunks of their own, whose gradients other ranks add up.
    own = replace(own, params=tuple(replace(p, apart=p.apart or p.names[0] in apart) for p in own.params))
    if isinstance(config.placement, Plan):
        _check_plan(config.placement, own, config, device, ranks)
    trace = _trace_to_place(structure, own, config, ranks)
    try:
        chosen = _Chooser(config, device, ranks).best(trace)
    except BudgetExceeded as e:
        if structure.model.training or not any(param.requires_grad for param, _ in structure.params):
            raise
        raise BudgetExceeded(
            f"{e}. If it is only evaluated, freeze it before it is wrapped (model.requires_grad_(False)): then it "
            f"needs {COMPUTE_DTYPES[config.precision].itemsize} bytes per param"
        ) from e
    # With "auto" the size of the tiles is that of the trace which was chosen.
    tile_tokens = chosen.trace.tile_tokens if config.tile_tokens in (None, "auto") else config.tile_tokens
    given = config.kept_blocks
    kept_blocks = given if isinstance(given, int) else chosen.trace.kept_blocks
    return chosen._replace(tile_tokens=tile_tokens, kept=kept, kept_blocks=kept_blocks)


def _trace_to_place(structure: Structure, own: MemoryTrace, config: GeminiConfig, ranks: Ranks) -> MemoryTrace:
    """The trace of the plan or the config, as this model is run; else ``own``, that of its structure."""
    if isinstance(config.placement, Plan):
        trace = config.placement.trace
    else:
        # A trace may have been made without knowing what stays in fp32 here.
        trace = (config.trace or own).with_fp32({param.name for param in own.params if param.fp32})
        own.check_same_model(trace, what="the trace")
    if config.tile_tokens != "auto":
        # A trace may hold the model both ways: as it is, and in tiles.
        trace = next((form for form in trace.forms if form.tile_tokens == config.tile_tokens), trace)
    elif trace.source is Source.STRUCTURE:
        warn(
            'tile_tokens="auto" has no effect: the size of the activations is not known. Pass a trace: '
            'trace=gemini.trace(model, batch, tile_tokens="auto")'
        )
    _check_step(trace, structure.model, config, ranks.context.size)
    if structure.read_as_a_whole:  # they read more at once than any trace
        read = {*trace.read_together, *(moment.params for moment in own.moments)}
        trace = replace(trace, read_together=tuple(sorted(read)))
    return trace


def _check_step(trace: MemoryTrace, model: nn.Module, config: GeminiConfig, parts: int) -> None:
    """Raise PlanMismatch for a trace of another step than this run's, with ``parts`` of each sequence."""
    is_ahead = trace.source is Source.AHEAD
    if config.kept_blocks == "auto" and (not is_ahead or (trace.all_kept is None and trace.checkpoint_bytes)):
        raise PlanMismatch(
            'kept_blocks="auto" needs the step with no block kept and with all of them: pass '
            'trace=gemini.trace(model, batch, kept_blocks="auto"), or say a number of blocks'
        )
    if trace.kernels and not computes_with_liger(model):
        raise PlanMismatch(
            f"the trace is of a model with {trace.kernels}'s kernels, and this one computes without them, so its "
            "activation memory is wrong for this run. TrainingArguments(use_liger_kernel=True) or liger_kernel's "
            "apply_liger_kernel_to_...() puts them in; or trace without kernels="
        )
    ours = {
        "tile_tokens": trace.tile_tokens if config.tile_tokens == "auto" else config.tile_tokens,
        "kept_blocks": trace.kept_blocks if config.kept_blocks in (None, "auto") else config.kept_blocks,
        "fp16_accumulation": config.fp16_accumulation,
        "float8": config.float8 or (trace.float8 and any(map(is_float8, model.modules()))),
        "context_parallel": parts,
    }
    for name, value in ours.items() if is_ahead else ():
        if (theirs := getattr(trace, name)) != value:
            raise PlanMismatch(
                f"the trace has {name}={theirs!r}, and this run has {value!r}, so its activation memory is wrong here. "
                f"Trace (and plan) again with gemini.trace(..., {name}={value!r}), or run what was traced"
            )


def computes_with_liger(model: nn.Module) -> bool:
    """Whether a module of it has its forward from that package: of its class, or put in its place."""
    forwards = (module.forward for module in model.modules())
    return any((getattr(forward, "__module__", None) or "").startswith("liger_kernel.") for forward in forwards)


class _Chooser:
    """Chooses homes for one trace after the other, in budgets that are measured once: candidates can be compared. It is
    made before anything is allocated, by all ranks together.
    """

    def __init__(self, config: GeminiConfig, device: Device, ranks: Ranks):
        self._config, self._device, self._ranks = config, device, ranks
        # In this order on all ranks, which meet in each; the largest of all is the smallest of the negative values.
        beside, fragments, pool = 0, 0, pool_of(config.memory)
        if device.tier is Tier.GPU and config.memory.bytes_of(Tier.GPU) is not None:
            # The driver's and the allocator's. A budget that is measured is what these leave.
            asked = [-device.beside_bytes(config.rule_spec), -device.fragments_percent()]
            beside, fragments = (-n for n in ranks.smallest(asked))
        self._budgets = _measure_budgets(config, device, ranks, beside)
        self._beside, self._fragments = beside if pool is None else 0, fragments
        if fragments:
            warn(
                f"torch's allocator was set up to take segments of fixed sizes: {fragments} % of what activations and "
                "gradients take are set aside for fragments. PYTORCH_ALLOC_CONF=expandable_segments:True needs none"
            )
        self._schedule = "overlapped" if config.overlap else "serial"
        self._beyond = sys.maxsize  # bytes of host memory that no budget has, for activations if it computes
        if device.tier is Tier.CPU and config.kept_blocks == "auto":
            self._beyond = ranks.smallest([available_bytes() // ranks.local_size - self._budgets[Tier.CPU]])[0]
        self._others: Others | None = None
        if pool is not None:
            self._others = Others(-ranks.smallest([-pool.needed_by_others(None, device.tier)])[0], 0, pool.at_once)

    def best(self, trace: MemoryTrace) -> Decision:
        """Choose for the first form of the step that fits, of that with "auto" the quickest number of kept blocks.
        Raises BudgetExceeded if none fits.
        """
        config, hardware = self._config, self._config.hardware
        choose = partial(first_that_fits, self.choose, overlap=config.overlap)
        if trace.all_kept is None or hardware is None or config.kept_blocks != "auto":
            return choose(trace)

        def plan(step: MemoryTrace) -> Plan:
            found = choose(step).plan
            assert found is not None  # placement="auto"
            return found

        def keep(form: MemoryTrace, _: bool) -> Decision:
            return _as_planned(quickest_kept(form, hardware, self._schedule, plan)[0])._replace(choice=form)

        return first_that_fits(keep, trace, overlap=False)

    def choose(self, trace: MemoryTrace, overlap: bool) -> Decision:
        """Choose with staging for every worker (``overlap``), or with less of it."""
        config, given = self._config, self._config.placement
        offload = given.offload_activations if isinstance(given, Plan) else config.offload_activations
        pose = partial(self._pose, trace, overlap=overlap)
        if isinstance(given, str):
            return _as_planned(self._plan(trace, pose))
        problem = pose(None if offload == "auto" else offload)
        if isinstance(given, StaticPlacement):
            if problem.compute is Tier.CPU and (given.weights_on_gpu or given.optimizer_on_gpu or given.updates_on_gpu):
                warn("StaticPlacement: fractions on gpu have no effect without a GPU")
                given = replace(given, weights_on_gpu=0.0, optimizer_on_gpu=0.0, updates_on_gpu=0.0)
            return Decision(trace, problem, by_fractions(problem, given), None, offload)
        placement, of_plan = (given.placement, given) if isinstance(given, Plan) else (given, None)
        check_fits(problem, placement)
        return Decision(trace, problem, placement, of_plan, offload)

    def _pose(self, trace: MemoryTrace, offload_activations: str | None, *, overlap: bool) -> Problem:
        config, ranks, given = self._config, self._ranks, self._config.placement
        activations = 0 if trace.source is Source.STRUCTURE else None  # None: those of the trace
        if config.activations is not None:
            activations = parse_bytes(config.activations)
        elif isinstance(given, Plan):
            activations = given.problem.activations
        problem = pose_problem(
            trace,
            self._budgets,
            precision=config.precision,
            gradients=config.gradients,
            compute=self._device.tier,
            activations=activations,
            offload_activations=offload_activations,
            ranks=ranks.wire.size,
            sharing=ranks.local_size,
            replicas=ranks.replicas.size,
            reduce_itemsize=reduce_dtype(config).itemsize,
            max_chunk=config.max_chunk,
            overlap=overlap,
            rule=config.rule_spec,
            durable=config.memory.durable,
            others=self._others,
        )
        # Beside what activations were declared or traced to take, all of which they get.
        fragments = self._fragments * (problem.activations + problem.in_flight) // 100
        return replace(problem, activations=problem.activations + fragments, beside=self._beside)

    def _plan(self, trace: MemoryTrace, pose: Callable[[str | None], Problem]) -> Plan:
        config, hardware = self._config, self._config.hardware
        if trace.kept_blocks and trace.peak_bytes > self._beyond:
            raise BudgetExceeded("host memory beside the budget has no room for what so many kept blocks save")
        local = self._ranks.local_size
        speeds = Speeds.of(hardware, self._budgets, sharing=local) if hardware is not None else Speeds.typical()
        planner = Planner(trace, speeds, schedule=self._schedule, hardware=hardware, policy=config.eviction_policy)
        offload = config.offload_activations
        if trace.source is Source.STRUCTURE:  # the first step that runs says what moves when
            offload = None if offload == "auto" else offload
            return planner.choose(pose(offload), None, offload)
        return planner.best_of(pose, None, offload)


def _as_planned(plan: Plan) -> Decision:
    return Decision(plan.trace, plan.problem, plan.placement, plan, plan.offload_activations)


def _check_plan(plan: Plan, structure: MemoryTrace, config: GeminiConfig, device: Device, ranks: Ranks) -> None:
    structure.check_same_model(plan.trace, what="the plan")
    plan.check_settings(
        precision=config.precision,
        gradients=config.gradients,
        ranks=ranks.wire.size,
        max_chunk=config.max_chunk,
        compute=device.tier,
        rule=config.rule_spec,
        durable=config.memory.durable,
    )
    if config.offload_activations not in (None, "auto", plan.offload_activations):
        raise PlanMismatch(
            f"the plan was made for offload_activations={plan.offload_activations!r}, and the config says "
            f"{config.offload_activations!r}: leave it out, and the plan decides"
        )


def reduce_dtype(config: GeminiConfig) -> torch.dtype:
    """The dtype in which gradients are sent between ranks."""
    return COMPUTE_DTYPES[config.reduce_dtype or config.precision]


# What is read together, before anything is known of a step: no work, no bytes and no batch. The engine reserves room
# for these moments when it is given no trace. The names, ties and shapes that every trace of a model begins with come
# from here too.


def structural_trace(model: nn.Module | Structure, precision: str, keep_fp32: KeepFp32 = "auto") -> MemoryTrace:
    """The moments of ``model`` as its modules are declared, forward and then backward in reverse. A moment holds what
    one module reads, what the modules around it read, and, because a module that owns params may read its leaf
    children's weights itself (``out_proj.weight`` in an attention module that calls a fused op), theirs. So the largest
    set of chunks over the moments is the room that gathered weights need whatever forward does.
    """
    structure = structure_of(model)
    return trace_of(structure, precision, kept_in_fp32(structure, precision, keep_fp32))


def trace_of(structure: Structure, precision: str, kept: Collection[int], *, target: str = "cpu") -> MemoryTrace:
    """The same, where it is known which params stay in fp32 (``kept``, by their ``id``)."""
    params = tuple(
        TracedParam(
            names,
            tuple(param.shape),
            # As its layout has it: adapters that are switched off may be trained later.
            trainable=param.requires_grad or id(param) in structure.adapters,
            apart=is_in_stages(param),
            coded=id(param) in structure.coded,
            fp32=id(param) in kept,
        )
        for param, names in structure.params
    )
    index_of = {id(param): index for index, (param, _) in enumerate(structure.params)}
    forward, backward, done = list[Moment](), list[Moment](), set[int]()
    gathered: list[frozenset[int]] = []  # by the place of a visit: what it and those around it read
    for visit in structure.visits:
        # Visits come in the order of declaration: what is around a module was visited before it.
        around = gathered[visit.around] if gathered else frozenset[int]()
        own = [index_of[id(param)] for param in visit.params]
        gathered.append(around.union(own))
        if own:
            # A child without children of its own: its owner may read its weight without calling it.
            leaves = [child for child in visit.module.children() if not any(child.children())]
            reachable = [index_of[id(p)] for leaf in leaves for p in own_params(leaf).values()]
            read = tuple(sorted(gathered[-1].union(reachable)))
            forward.append(Moment(Phase.FORWARD, visit.path, read))
            # A shared param's gradient is complete at its first use.
            complete = {index for index in own if params[index].trainable} - done
            done |= complete
            backward.append(Moment(Phase.BACKWARD, visit.path, read, gradients=tuple(sorted(complete))))
    buffers = [buffer for _, module in structure.modules for buffer in own_buffers(module).values()]
    coded = [(names[0], param) for param, names in structure.params if id(param) in structure.coded]
    dense = [b for b in (*buffers, *scales_in(coded).values()) if b.layout is torch.strided]
    # By storage: views of one count once, with all of it.
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in dense}
    return MemoryTrace(
        model=type(structure.model).__name__,
        precision=precision,
        batch={},
        tokens=0,
        target=target,
        source=Source.STRUCTURE,
        params=params,
        moments=(*forward, *reversed(backward)),
        buffer_bytes=sum(storages.values()),
    )
