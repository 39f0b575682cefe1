"""``gemini.train_step``, block by block: weights are fetched twice, and gradients land once, for all micro-batches."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_module

from gemini.errors import GeminiError, warn
from gemini.pipeline.course import OF_STAGES, Course, course_of, is_in, on_meta
from gemini.pipeline.stages import Stage, Strayed
from gemini.planning.planes import GRAD
from gemini.tracing.ahead import loss_of as loss_in
from gemini.tracing.ahead import rebind_forward
from gemini.train.modules.reading import structure_of
from gemini.train.params.handle import original_class, stepping_in_backward
from gemini.train.passes.again import marks_of, own_hooks

Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]

_SEEN = "_gemini_courses"
"""Attribute of a model: its :class:`_Seen`. Stages keep their model alive: here their cycle goes with it."""


@dataclass
class _Seen:
    """A model as it was seen in its ``settings`` (:func:`_settings`)."""

    settings: Any = None
    courses: dict[Any, Course | str] = field(default_factory=dict)
    """Of each kind of micro-batch the way through it, or why it is not cut."""
    course: Any = None  # of these stages
    stages: list[Stage] | None = None
    strayed: str = ""  # why a step went another way than was seen
    warned: str = ""  # of what, last


def _seen_of(model: nn.Module) -> _Seen:
    return model.__dict__.setdefault(_SEEN, _Seen())  # type: ignore[no-any-return]


def train_step(model: nn.Module, micro_batches: Sequence[Mapping[str, Any]], loss: Loss | None = None) -> torch.Tensor:
    """Run forward and backward of all micro-batches of a step, block by block. Call the optimizer's ``step()`` after.

    Losses and gradients have the bits of ``for batch in micro_batches: loss(model(**batch), batch).backward()``; with
    ``gradients="retain"`` a stage's sums are rounded once to what is retained, where the loop has fp32 sums. What
    cannot be computed otherwise with the same bits (models that cannot be cut into blocks, embeddings tied to the head,
    dropout, fp16, updates inside backward, several ranks) is computed in that order, and a warning says why, once. So
    is, without a warning, what has nothing to move: weights and sums that stay where modules compute.

    Args:
        model: a managed model, in training mode.
        micro_batches: what forward takes by name, of each micro-batch. Sizes may differ.
        loss: makes of what forward returns, and the micro-batch, what is differentiated: the losses of all are added
            up. By default forward's own loss over the number of micro-batches. It is called once more for each kind of
            micro-batch, on tensors without values, when a model comes here first or has changed.

    Returns:
        The loss of each micro-batch, as ``loss`` gave it, without a graph. Their sum is the loss of the step.

    After an error, or an interrupt, no gradients are there (on several ranks those of the micro-batches before it are).

    Raises:
        ValueError: without micro-batches, and for a model that is not managed.
        GeminiError: if forward gives no loss, and none is given; and if a micro-batch behind the first goes another way
            through the model than was seen.
        BudgetExceeded: if there is no room to add up gradients.
    """
    parts = list(micro_batches)
    if not parts or isinstance(micro_batches, Mapping) or not all(isinstance(part, Mapping) for part in parts):
        given = f"a {type(micro_batches).__name__} of {type(parts[0]).__name__}" if parts else "none"
        raise ValueError(
            "train_step(model, [{'input_ids': ..., 'labels': ...}, ...]) takes a list of the micro-batches of a step, "
            f"and was given {given}"
        )
    if "_gemini_engine" not in model.__dict__:
        raise ValueError(f"train_step() of a {type(model).__name__} that is not managed: wrap it with GeminiDDP first")
    try:
        return _losses_of(model, parts, loss)
    except BaseException:
        # Which gradients are there depends on the order, and so on where weights are.
        if model.__dict__["_gemini_engine"].ranks.are_alone:
            model.zero_grad()
        raise


def _losses_of(model: nn.Module, parts: list[Mapping[str, Any]], loss: Loss | None) -> torch.Tensor:
    def own_loss(find: Callable[..., torch.Tensor], output: Any, number: int) -> torch.Tensor:
        return find(output) / len(parts) if loss is None else find(output, lambda output: loss(output, parts[number]))

    stages = _stages_for(model, parts, loss) if len(parts) > 1 else "one micro-batch"
    if not isinstance(stages, str):
        before = marks_of([*model.modules()])
        try:
            foresight = model.__dict__["_gemini_engine"].store.manager.foresight
            with foresight.scope(foresight.of_stages([stage.chunks for stage in stages])):
                own_losses = partial(own_loss, stages[-1].loss_of)
                return breadth_first(model, stages, parts, own_losses, nullcontext, rounds=True)
        except Strayed as e:
            _seen_of(model).strayed = str(e)
            if e.has_begun or before != marks_of([*model.modules()]):
                raise Strayed(
                    f"{e}. Its gradients are dropped: call train_step() again. From now on it computes the "
                    "micro-batches of this model one after another"
                ) from None
            _warned(model, str(e))
    losses = []
    for number, part in enumerate(parts):
        with nullcontext() if number == len(parts) - 1 else model.no_sync():  # type: ignore[operator]
            own = own_loss(partial(loss_in, model), model(**part), number)
            own.backward()
        losses.append(own.detach())
    return torch.stack(losses)


def breadth_first(
    model: Any,
    stages: Sequence[Stage],
    parts: Sequence[Mapping[str, Any]],
    loss_of: Callable[[Any, int], torch.Tensor],
    in_backward: Callable[[], AbstractContextManager[None]],
    *,
    rounds: bool = False,
) -> torch.Tensor:
    """Let each stage take all micro-batches before the next one does: the losses. ``loss_of`` makes one of what forward
    returns and the number of a micro-batch; ``in_backward`` is entered for each backward. ``rounds``: a stage's sums,
    where gradients are retained narrower.
    """
    gradients = model._gemini_engine.backward.gradients
    chunks, manager = [stage.chunks for stage in stages], model._gemini_engine.store.manager
    values: list[torch.Tensor | None] = [None] * len(parts)  # of each micro-batch, what the next stage is given
    grads: list[torch.Tensor | None] = [None] * len(parts)  # and its gradient, which backward puts here (`_Entry`)
    held: list[list[Any]] = []  # by stage and micro-batch, the way back; None where nothing before is trained
    land = gradients.land if model._gemini_engine.ranks.are_alone else None
    at_hand = partial(gradients.homes.at_hand, land=land, rounds=rounds)
    for stage in stages[:-1]:
        manager.enter_stage(stage.chunks)
        row: list[Any] = []
        for number, part in enumerate(parts):
            output = stage(*_entry(values, grads, number, held), **part)
            # Of what goes on only the way back is kept here; its values are the next stage's.
            row.append(get_gradient_edge(output) if output.requires_grad else None)
            values[number] = output.detach()
            del output
        held.append(row)
    losses = []
    manager.enter_stage(chunks[-1])
    with at_hand(chunks[-1]):
        for number, part in enumerate(parts):
            # One micro-batch after another: logits are as large as nothing else, and never there for two.
            try:
                own = loss_of(stages[-1](*_entry(values, grads, number, held), **part), number)
            except Strayed as e:
                e.has_begun = number > 0
                raise
            values[number] = None
            manager.more_to_come = number < len(parts) - 1
            with in_backward():
                own.backward()
            losses.append(own.detach())
            del own
    while held and None not in held[-1]:
        manager.enter_stage(chunks[len(held) - 1])
        with at_hand(chunks[len(held) - 1]):
            for number, edge in enumerate(held.pop()):
                grad, grads[number] = grads[number], None
                manager.more_to_come = number < len(parts) - 1
                with in_backward():
                    torch.autograd.backward([edge], [grad])
    return torch.stack(losses)


class _Entry(torch.autograd.Function):
    """Hidden states of the stage before, whose gradient is put into ``grads``. A leaf would be kept by its graph on the
    device that computes, where checkpointing may have sent them to a slower tier.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, grads: list[Any], number: int) -> torch.Tensor:
        ctx.place = grads, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        grads, number = ctx.place
        grads[number] = grad
        return None, None, None, None


def _entry(
    values: list[torch.Tensor | None], grads: list[torch.Tensor | None], number: int, held: list[list[Any]]
) -> tuple[Any, ...]:
    value = values[number]
    if value is None:
        return ()
    if held[-1][number] is None:
        return (value,)
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    return (_Entry.apply(anchor, value, grads, number),)  # type: ignore[no-untyped-call]


def _stages_for(model: nn.Module, parts: Sequence[Mapping[str, Any]], loss: Loss | None) -> list[Stage] | str:
    """Stages of a block or one of all, or why depth first; that is warned of once, unless nothing is lost by it."""
    if not has_to_move(model):
        return "nothing would move less often"
    if why := _why_not_now(model):
        return _warned(model, why)
    settings, seen = _settings(model, loss), _seen_of(model)
    if seen.settings != settings:
        seen.settings, seen.courses, seen.stages = settings, {}, None
    courses: list[Any] = []
    for part in parts:
        kind = _kind(part)
        if kind not in seen.courses:
            seen.courses[kind] = _course_of(model, part, loss)
        if isinstance(course := seen.courses[kind], str):
            return _warned(model, course)
        courses.append(course)
    ways = [[getattr(course, name, None) for name in OF_STAGES] for course in (seen.course, *courses)]
    if any(way != ways[1] for way in ways[2:]):
        return _warned(model, "its micro-batches go different ways through it")
    # Each stage calls the whole model in Python for each micro-batch. A plan knows stages of one block.
    wanted = 1 if _sums_fit(model) else len(courses[0].blocks)
    if seen.stages is None or len(seen.stages) != wanted or ways[0] != ways[1]:
        seen.course, number = courses[0], len(courses[0].blocks) // wanted
        seen.stages = [Stage(model, courses[0], at, at + number) for at in range(0, number * wanted, number)]
    return seen.stages


def _sums_fit(model: Any) -> bool:
    """Whether no weight moves or is planned to, and fp32 sums of all gradients take less than half of what is free."""
    engine, store = model._gemini_engine, model._gemini_engine.store
    left = store.ledger.left_beside_windows(store.device.tier, store.working_set)
    fits = 8 * sum(handle.slot.numel for handle in engine.params.handles) < left
    return fits and not store.moves and engine.config.trace is None


def has_to_move(model: Any) -> bool:
    """Whether weights or sums of gradients move, or sums are there for a stage alone: block by block is for that."""
    store, retains = model._gemini_engine.store, model._gemini_engine.config.gradients == "retain"
    sums = {chunk.planes[GRAD].tier for chunk in store.manager.chunks if GRAD in chunk.planes}
    return store.moves or retains or bool(sums - {store.device.tier})


def _course_of(model: nn.Module, part: Mapping[str, Any], loss: Loss | None) -> Course | str:
    try:
        course = course_of(_plain_twin(model), part, None if loss is None else lambda output: loss(output, part))
    except Exception as e:  # of code that nobody has run without values before: the ordinary order needs none
        why = str(e) if isinstance(e, (ValueError, GeminiError)) else f"{type(e).__name__}: {e}"
        return why.partition(". Use dp")[0].partition(". Give Pipeline")[0]  # which is done instead here
    return _why_not(model, course) or course


def _kind(part: Mapping[str, Any]) -> Any:
    """The traits by which micro-batches are thought to take the same way. Sizes and numbers change too often:
    where they lead another way, stages see it (:mod:`gemini.pipeline.stages`).
    """

    def of(value: Any) -> Any:
        return value.dim() if isinstance(value, torch.Tensor) else str(value) if isinstance(value, (bool, str)) else ""

    return frozenset((name, type(value), of(value)) for name, value in part.items())


def _settings(model: nn.Module, loss: Loss | None) -> Any:
    """All that the way of a forward depends on and a program may change between steps: a dropout, what is trained."""
    of_modules = [
        [(name, value) for name, value in vars(module).items() if type(value) in (bool, int, float, str)]
        for module in model.modules()
    ]
    trained = [param.requires_grad for param in model.parameters()]
    of_config = str(getattr(getattr(model, "config", None), "__dict__", ""))  # its own str() makes JSON, slowly
    return of_modules, trained, of_config, getattr(loss, "__code__", type(loss))


def _why_not_now(model: Any) -> str | None:
    engine = model._gemini_engine
    if why := _seen_of(model).strayed:
        return why
    of_all = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    if any(of_all) or torch_module._global_backward_hooks:
        return "the program has hooked all modules, of which there are others block by block"
    if engine.config.precision == "fp16":
        return 'precision="fp16": the loss scale may change between micro-batches'
    if engine.config.gradients == "transient" or stepping_in_backward:
        return "an optimizer steps inside backward"
    if not engine.ranks.are_alone:
        return "there are several ranks: use gemini.Pipeline"
    if not engine.forward.observers.make_way():
        return "it is being recorded, by forwards of the whole model"
    ours = own_hooks(model)
    for module in model.modules():
        hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        names = {getattr(hook, "__name__", "") for known in hooks for at, hook in known.items() if at not in ours}
        # But for those of transformers on an embedding, for gradient checkpointing, and for states that are asked for.
        if names - {"make_inputs_require_grads", "output_capturing_hook"}:
            return f"the program has hooked a {type(module).__name__}, whose hooks would be called in another order"
    return None


def _why_not(model: nn.Module, course: Course) -> str | None:
    if course.is_random:
        return "its forward draws random numbers (dropout), in another order block by block: the bits would be others"
    last = (course.blocks[-1], *course.after)
    for _, own in structure_of(model).params:
        if len({is_in(name, last) for name in own}) > 1:
            return (
                f"{own[0]} is also {own[1]}: block by block the gradients of both uses would be added up in another "
                "order, with other bits"
            )
    return None


def _warned(model: nn.Module, why: str) -> str:
    if _seen_of(model).warned != why:
        _seen_of(model).warned = why
        warn(
            f"train_step() computes micro-batches of this {type(model).__name__} one after another, which fetches its "
            f"weights for each: {why}"
        )
    return why


def _plain_twin(model: Any) -> nn.Module:
    """The model as it was before it was managed, on the meta device."""
    memo, ours = on_meta(model), own_hooks(model)
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                # Gemini's gather, and belong to the engine. With others a forward shows more: hidden states.
                is_of_forward = name in ("_forward_pre_hooks", "_forward_hooks")
                theirs = ((key, hook) for key, hook in value.items() if is_of_forward and key not in ours)
                memo[id(value)] = OrderedDict(theirs)
    twin: Any = object.__new__(original_class(model))
    memo[id(model)] = twin
    own = {name: value for name, value in vars(model).items() if not name.startswith("_gemini") and name != "forward"}
    twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in own.items()})
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        rebind_forward(module, other, memo)
    return twin  # type: ignore[no-any-return]
