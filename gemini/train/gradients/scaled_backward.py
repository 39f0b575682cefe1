"""Which loss scale the gradients of a model carry, and where a plain fp16 backward has one of its own.

The scale belongs at the loss: ``gemini.GradScaler.scale(loss)`` puts a node behind it which tells, when its backward
begins, by what everything below is multiplied. Gradients lie in their planes as they come, multiplied, and the update
takes the scale out as it reads them.

A plain ``loss.backward()`` in fp16 has no such node. The model's own scale then enters where a loss that was computed
inside leaves it (:class:`ScaleGradient`, at outputs without dimensions), and that is right only if every gradient that
flows into the model comes through there once and none flows out of it again. The graph that is about to be run tells:
see :meth:`Scaling._judge`. Whatever else a program does is refused before any gradient has landed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

from gemini.errors import GeminiError
from gemini.train.gradients.store import GradientStore
from gemini.train.modules.calls import iter_tensors
from gemini.train.params.handle import ParamHandle, ParamSet, handle_of, optimizer_of, stepping_in_backward
from gemini.train.step import StepState

# ---- the model's own scale -------------------------------------------------------------------------------------------

# The dynamic loss scale that an fp16 model has of its own, for plain backwards (``scaled_backward``).
#
# It multiplies the gradient of a loss that the model computes itself, so that ``loss.backward()`` stays plain. A step
# whose gradients are not finite is skipped and halves the scale; ``growth_interval`` good steps in a row double it (the
# scheme of Micikevicius et al., "Mixed Precision Training", 2018, with torch.amp's defaults).


@dataclass
class LossScale:
    """The dynamic loss scale of one fp16 model. Mutable on purpose, and saved in checkpoints. Changed by the training
    thread at a step.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000  # good steps in a row, after which it doubles
    num_good_steps: int = 0
    largest: float = 2.0**24

    def skipped(self) -> None:
        """Halve the scale after a step with inf or NaN: its weights, states and counters stay as they were."""
        # Powers of two: multiplying by one rounds nothing that is in range.
        self.scale = max(self.scale / 2, 2.0**-24)
        # In a row: one that is skipped begins the count anew.
        self.num_good_steps = 0

    def stepped(self) -> None:
        """Count a step that was made, and double the scale after enough of them."""
        self.num_good_steps += 1
        if self.num_good_steps >= self.growth_interval:
            self.scale = min(self.scale * 2, self.largest)
            self.num_good_steps = 0


REMEDY = (
    "Use gemini.GradScaler as torch.amp.GradScaler: scaler.scale(loss).backward(); scaler.step(optimizer); "
    "scaler.update()"
)
# Backwards that are remembered: those that broke off never say that they are over.
_MAX_TASKS = 64
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal

# How often gradients that arrive at a node were multiplied on their way, for one model; a node may have several marks.
_NEVER, _ONCE, _BY_ANOTHER, _TWICE = 1, 2, 4, 8


class Scale:
    """The loss scale between two of its changes. On a GPU the host waits for its value only when it is asked for."""

    def __init__(self, value: float | torch.Tensor, *, by_scaler: bool = False):
        self.by_scaler = by_scaler
        self._given, self._value = value, None if isinstance(value, torch.Tensor) else float(value)

    @property
    def value(self) -> float:
        """The number, for which the host waits where it is on a GPU."""
        if self._value is None:
            # The one wait for the device, at the first time that somebody asks.
            self._value = float(self._given)
        return self._value

    def snapshot(self) -> None:
        """Keep the value: the tensor it is read from is about to change."""
        if self._value is None:
            self._given = torch.as_tensor(self._given).clone()


_ONE = Scale(1.0)
_of_task: dict[int, Scale] = {}
"""By backward (autograd numbers them): what a scaler told of it."""
scalers_used = False
"""Whether any loss of this process was ever scaled: else no backward need be asked for its scale."""

scaler_steps: ContextVar[bool] = ContextVar("scaler_steps", default=False)
"""Whether a scaler that knows managed params is what asks an optimizer to step."""


class ScaleLoss(torch.autograd.Function):
    """Identity on a loss that was multiplied by a scaler's scale; in backward it tells so."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: Scale) -> torch.Tensor:  # type: ignore[override]
        # From the first scaled loss on every backward is asked; before, none need be.
        global scalers_used
        scalers_used = True
        ctx.scale = scale
        # A loss may be changed in place afterwards, which autograd forbids for views.
        return loss.clone() if loss.dim() == 0 else loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        task = torch._C._current_graph_task_id()
        if task not in _of_task:
            while len(_of_task) >= _MAX_TASKS:  # of backwards that broke off
                del _of_task[min(_of_task)]
            _of_task[task] = ctx.scale
            # Forgotten when the engine has run all of it: numbers of backwards are not given again, but the list would
            # grow.
            torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, task))
        return grad, None


def _forget(task: int) -> None:
    """Forget a backward that is over."""
    _of_task.pop(task, None)


class ScaleGradient(torch.autograd.Function):
    """Identity in forward; in a plain fp16 backward the gradient times the model's own loss scale."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: torch.Tensor, ref: weakref.ref[Scaling], begin_backward: Callable[[], None]
    ) -> torch.Tensor:
        """``begin_backward``: what to call when a gradient arrives; it does not keep the model, and may refuse."""
        ctx.ref, ctx.begin_backward = ref, begin_backward
        return loss.clone()  # it may be changed in place afterwards (transformers' Trainer does)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        # Before the factor is asked for: this is what decides it, and it may refuse.
        ctx.begin_backward()
        scaling = ctx.ref()
        assert scaling is not None
        factor = scaling.factor(grad)
        return grad if factor == 1.0 else grad * factor, None, None


_SCALE_LOSS: Any = ScaleLoss._backward_cls  # type: ignore[attr-defined]
_SCALE_GRADIENT: Any = ScaleGradient._backward_cls  # type: ignore[attr-defined]


class Scaling:
    """The loss scale of one model's gradients. Called by the training thread, or by the one that runs its backward.

    Args:
        loss_scale: the model's own, in fp16.
    """

    def __init__(self, params: ParamSet, state: StepState, gradients: GradientStore, loss_scale: LossScale | None):
        self._params, self._state, self._gradients = params, state, gradients
        self.loss_scale = loss_scale
        self.held = _ONE
        """Of the gradients that wait for the update."""
        self.is_scaled = loss_scale is not None
        """Whether gradients that are held may be multiplied by anything: else nobody need ask for their scale."""
        # By name: params that `unscale_` was called for since the last backward.
        self._unscaled: set[str] = set()
        # By backward, as autograd numbers them.
        self._factors: dict[int, float] = {}
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    # ---- forward ------------------------------------------------------------------------------------------------

    def watch_outputs(self, output: Any) -> None:
        """Remember what left the model beside its loss: if it keeps its gradient (``retain_grad``), somebody will look
        at it.
        """
        # Weakly: an output that nobody has is seen by nobody, and its graph must not live for this.
        new = [weakref.ref(t) for t in iter_tensors(output) if t.dim() > 0 and t.requires_grad]
        self._outputs = [ref for ref in self._outputs if ref() is not None] + new

    # ---- backward -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A gradient of a backward has reached the model: decide, once for each backward, which scale it has.

        Raises:
            GeminiError: where gradients would come out with another scale than the program means; none has landed.
        """
        task = torch._C._current_graph_task_id()
        if task in self._factors or task == -1:  # -1: a saved tensor was looked at outside of any backward
            return
        # The oldest first: numbers of backwards go up.
        while len(self._factors) >= _MAX_TASKS:
            del self._factors[min(self._factors)]
        holding = self._state.num_unreduced > 0 or bool(_to_be_used(self._params.handles))
        self._factors[task] = self._decide(task, holding)

    def factor(self, grad: torch.Tensor) -> float:
        """The factor by which a loss that leaves the model multiplies its gradient."""
        factor = self._factors[torch._C._current_graph_task_id()]
        # A gradient below the smallest normal number has lost bits already: scaling cannot bring them back. This waits
        # for the device, once for each loss.
        if factor != 1.0 and grad.dtype is torch.float16 and abs(float(grad)) < _SMALLEST_NORMAL:
            value = f"{float(grad):.3g}"
            raise GeminiError(
                f"the gradient of the loss that this model computed in fp16 is {value} before the loss scale enters: "
                f"fp16 has rounded it. {REMEDY}"
            )
        return factor

    def _decide(self, task: int, holding: bool) -> float:
        """Decide which scale a backward has. ``holding``: gradients of an earlier backward wait for the update."""
        scale, calls = _of_task.get(task), running_calls()
        if calls and not calls[0].accumulates:
            return 1.0  # what it gives is returned, and no param keeps any of it
        if scale is None:
            scale = self._scale_of(calls)
        if scale is not None:
            self._refuse_updates_inside()
            self._hold(scale, holding)
            return 1.0
        if self.loss_scale is None:
            self._hold(_ONE, holding)
            return 1.0
        if not calls:
            raise GeminiError(f"in fp16 it cannot be seen what this backward was started for. {REMEDY}")
        if not self._judge(calls):
            return 1.0
        # Gradients that wait keep their scale: the model's own may have changed between two micro-batches.
        own = self.held if holding and not self.held.by_scaler else Scale(self.loss_scale.scale)
        self._hold(own, holding)
        return own.value

    def _scale_of(self, calls: list[BackwardCall]) -> Scale | None:
        """The scale by which a scaler has multiplied this backward, or one that it runs inside of."""
        found = (first_below(call.roots, _SCALE_LOSS) for call in reversed(calls))
        return next((node.scale for node in found if node is not None), None)

    def _hold(self, scale: Scale, holding: bool) -> None:
        """Note that the gradients that are about to land have this scale.

        Raises:
            GeminiError: if those that are there have another one, or are unscaled already.
        """
        # By value only where it is another object: comparing values waits for the device.
        is_other = scale is not self.held and (scale.by_scaler, scale.value) != (self.held.by_scaler, self.held.value)
        if not holding:
            if is_other:
                self._gradients.discard([handle for handle in self._params.handles if handle.has_grad])  # nobody's
            self.held, self._unscaled = scale, set()
            self.is_scaled = self.loss_scale is not None or scale.by_scaler
            return
        if any(handle.name in self._unscaled for handle in _to_be_used(self._params.handles)):
            raise GeminiError(
                "a backward after GradScaler.unscale_(): its gradients would be added to unscaled ones. Call unscale_ "
                "after the last backward of a step, and optimizer.zero_grad() after the step"
            )
        self._unscaled = set()
        if is_other:
            raise GeminiError(
                f"gradients of an earlier backward are {_said(self.held)}, those of this one {_said(scale)}: they "
                "cannot be added up. Scale every loss of a step by the same GradScaler, call its update() once at the "
                "end of a step, and optimizer.zero_grad() where gradients are to be dropped"
            )

    def _refuse_updates_inside(self) -> None:
        """Whether a scaled step is skipped is known only when all gradients are there."""
        if not stepping_in_backward:
            return
        optimizers = [optimizer_of(handle.param) for handle in self._params.handles]
        if any(o is not None and o.step_in_backward and not o.may_guess for o in optimizers):
            raise GeminiError(
                "GradScaler with HybridAdam(step_in_backward=True): whether a step is skipped is known only when all "
                "gradients are there. Leave step_in_backward out, or the scaler (only fp16 needs one)"
            )

    # ---- a plain backward in fp16 -------------------------------------------------------------------------------

    def _judge(self, calls: list[BackwardCall]) -> bool:
        """Whether the model's scale enters at its loss (True), or nowhere, since no param is reached.

        Marks tell, for every node that is to run, how often the gradients arriving there were multiplied. Exact is:
        once for every managed param, never for anything else. A recomputation (checkpointing) runs a graph of its own
        inside a node: what arrived there goes on in it.

        Raises:
            GeminiError: for every other graph.
        """
        start, scales = _NEVER, False
        for call in reversed(calls):  # from the outermost one
            scales, start = self._judge_call(call, start, is_outer=call is calls[-1], is_this=call is calls[0])
        return scales

    def _judge_call(self, call: BackwardCall, start: int, *, is_outer: bool, is_this: bool) -> tuple[bool, int]:
        """Whether the model's scale enters in one call, and the marks of calls inside it.

        Args:
            is_outer: the outermost one. Leaves of the others are what a recomputation was given: their gradients go
                back to the node around it.
            is_this: the innermost one. Exits of those around it were looked at when they were entered; by now what runs
                refers to tensors of theirs.
        """
        if start not in (_NEVER, _ONCE):
            raise GeminiError(
                "in fp16 a recomputation inside this backward (checkpointing) may belong to what the model's loss led "
                f"to, or to something else. {REMEDY}"
            )
        own = weakref.ref(self)

        def through(node: Any, marks: int) -> int:
            if not isinstance(node, _SCALE_GRADIENT):
                return marks
            if node.ref() is not own():
                return (_BY_ANOTHER if marks & (_NEVER | _BY_ANOTHER) else 0) | (_TWICE if marks & ~_NEVER else 0)
            return (_ONCE if marks & _NEVER else 0) | (_TWICE if marks & ~_NEVER else 0)

        marks = marks_below(call.roots, start, through)
        leaves = [node for node in (call.inputs or marks) if is_leaf(node)]
        kept = [node for node in leaves if self._is_own(node)] if call.accumulates else []
        # Marks of nodes in whose backward another backward may run: what arrived there goes on in it.
        functions = 0
        for node, found in marks.items():
            if may_start_another(node) and not isinstance(node, (_SCALE_LOSS, _SCALE_GRADIENT)):
                functions |= found
        if not call.accumulates or not (kept or functions & _ONCE):
            return False, functions or start
        for node in kept:
            if marks.get(node, 0) != _ONCE:
                self._refuse_entry(node, marks.get(node, 0))
        if is_this:
            own_leaves = set(kept)
            others = [node for node in (call.inputs or leaves) if node not in own_leaves]
            self._refuse_exits(others, marks, ignored=0 if is_outer else start)
        return True, functions or start

    def _is_own(self, leaf: Any) -> bool:
        """Whether a leaf is a managed param of this model."""
        handle = handle_of(leaf.variable)
        return handle is not None and any(
            handle is own for own in self._params.by_chunk.get(handle.chunk.spec.index, ())
        )

    def _refuse_entry(self, leaf: Any, marks: int) -> None:
        """Refuse a gradient that comes to a param other than once through the model's loss."""
        handle = handle_of(leaf.variable)
        assert handle is not None
        if marks & (_TWICE | _BY_ANOTHER):
            why = "it would be multiplied by a loss scale twice (an output went in again, or into another model)"
        else:
            why = (
                "a gradient comes into the model past such a loss: from another output (or a loss in an object of a "
                "class that is no container), a feature taken by a hook, or something kept in an attribute"
            )
        raise GeminiError(
            f"in fp16 a plain backward is exact only for a loss that the model computes itself. For {handle.name!r} "
            f"{why}. {REMEDY}"
        )

    def _refuse_exits(self, nodes: Iterable[Any], marks: dict[Any, int], *, ignored: int) -> None:
        """Refuse that a gradient which was multiplied comes to be seen."""
        for node in nodes:
            found = marks.get(node, 0) & (_ONCE | _TWICE)
            if found in (0, ignored):
                continue
            if not is_leaf(node) or is_seen(node):
                shape = f" of shape {tuple(node.variable.shape)}" if is_leaf(node) else ""
                raise GeminiError(
                    f"in fp16 a plain backward would leave the gradient of a tensor{shape} that the model was given "
                    f"(or gave) multiplied by its loss scale. {REMEDY}; x.grad is scaled then, as in torch"
                )
        for ref in self._outputs:
            output = ref()
            if output is not None and output.retains_grad and marks.get(output.grad_fn, 0) & (_ONCE | _TWICE):
                raise GeminiError(
                    f"in fp16 a plain backward would leave the gradient of an output of shape {tuple(output.shape)} "
                    f"(retain_grad) multiplied by the model's loss scale. {REMEDY}; it is scaled then, as in torch"
                )

    # ---- the step -----------------------------------------------------------------------------------------------

    @property
    def is_by_scaler(self) -> bool:
        """Whether the gradients that are held were scaled by a scaler."""
        return self.held.by_scaler

    @property
    def unscale(self) -> float:
        """The factor by which gradients in the planes are multiplied to be those of the loss."""
        return 1.0 / self.held.value

    def left_scaled(self, handles: Iterable[ParamHandle]) -> list[ParamHandle]:
        """The params whose gradients no optimizer uses, and so no scaler unscales: norms see them as they are, in
        torch.
        """
        handles = list(handles)
        if not self.held.by_scaler:
            return []
        used = {id(handle) for handle in _to_be_used(handles)}
        return [h for h in handles if h.has_grad and id(h) not in used and h.name not in self._unscaled]

    def unscale_seen(self, handles: Iterable[ParamHandle]) -> float:
        """The factor of :attr:`unscale` for who looks at gradients now: 1 until ``GradScaler.unscale_``, as in torch.

        Raises:
            GeminiError: if some are unscaled and some are not.
        """
        if not self.held.by_scaler:
            return self.unscale
        done = {handle.name in self._unscaled for handle in _to_be_used(handles)}
        if len(done) > 1:
            raise GeminiError(
                "clip_grad_norm_ over gradients of which some are unscaled and some are not: call "
                "scaler.unscale_(optimizer) for each of the optimizers first, or clip each one's params"
            )
        return self.unscale if done == {True} else 1.0

    def check_scaled(self) -> None:
        """Refuse to unscale gradients of a loss that was not scaled."""
        if not self.held.by_scaler:
            raise GeminiError(
                "GradScaler.unscale_() or step() on gradients of a loss that was not scaled: call "
                "scaler.scale(loss).backward()"
            )

    def mark_unscaled(self, handles: Iterable[ParamHandle]) -> None:
        """Note ``GradScaler.unscale_``: nothing is computed, the update multiplies."""
        self._unscaled.update(handle.name for handle in handles)

    def check_unscaled(self, handles: Iterable[ParamHandle]) -> None:
        """Refuse an update with gradients that a scaler has scaled and not unscaled."""
        if self.held.by_scaler and any(handle.name not in self._unscaled for handle in handles):
            raise GeminiError(
                "optimizer.step() on gradients that GradScaler has scaled: call scaler.step(optimizer), which unscales "
                "them and skips steps with inf or NaN"
            )


def _to_be_used(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Params whose gradient waits for an update: of those that belong to an optimizer, or of all if none does."""
    handles = list(handles)
    owned = [handle for handle in handles if optimizer_of(handle.param) is not None]
    return [handle for handle in owned or handles if handle.has_grad]


def _said(scale: Scale) -> str:
    """The scale in words, for errors."""
    if scale.by_scaler:
        return f"scaled by {scale.value:g} (GradScaler)"
    return "not scaled by a GradScaler"


# ---- what a running backward was asked for ---------------------------------------------------------------------------

# What a backward that is running was asked for: the calls of torch's engine that are under way, and their graphs.
#
# Autograd tells a node that runs neither where its backward started nor what else flows into the nodes it leads to; the
# Python frame that waits for the engine knows the first, and the graph below it the second. Nothing is changed by
# looking, and where there is nothing to be seen (a backward that no Python started) the answer is that it is unknown.

_RUN = _engine_run_backward.__code__
_ACCUMULATE = "AccumulateGrad"
_MODULE_HOOK: Any = BackwardHookFunction._backward_cls  # type: ignore[attr-defined]


class BackwardCall(NamedTuple):
    """A ``backward()`` or ``autograd.grad()`` that is under way."""

    roots: tuple[Any, ...]
    """The nodes that it starts from."""
    given: tuple[Any, ...]
    """The tensors whose gradients alone were asked for; none for those of all leaves. Those of a transform of
    ``torch.func`` are its own, and have no node here."""
    accumulates: bool
    """Whether leaves keep their gradients (``backward``), or they are returned (``autograd.grad``)."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The nodes of :attr:`given`."""
        return tuple(map(_node_of, self.given))


def running_calls() -> list[BackwardCall]:
    """The calls around this point of a backward, the innermost first; none if it cannot be said.

    On a CPU they wait in this very thread. Nodes of another device run in a thread of autograd's own, and what they
    belong to waits in another one: only if a single one waits is it known to be that.
    """
    calls = list(_calls_on(sys._getframe()))
    if torch.cuda.is_initialized():
        own = threading.get_ident()
        others = [found for ident, f in sys._current_frames().items() if ident != own and (found := list(_calls_on(f)))]
        # Two threads wait: which of them this node runs for cannot be said.
        if len(others) > 1:
            return []
        # Those on this thread are inside of them: a recomputation runs on the thread of its device.
        calls += [call for found in others for call in found]
    return calls


def _calls_on(frame: FrameType | None) -> Iterator[BackwardCall]:
    """The calls of torch's engine that wait in the frames of a thread, the innermost first."""
    while frame is not None:
        if frame.f_code is _RUN:
            names, there = _RUN.co_varnames, frame.f_locals
            outputs, args, kwargs = (there[names[i]] for i in range(3))
            # Of torch.autograd.backward and torch.autograd.grad alike: gradients, retain_graph, create_graph, inputs.
            yield BackwardCall(tuple(map(_node_of, outputs)), tuple(args[3]), bool(kwargs.get("accumulate_grad")))
        frame = frame.f_back


def _node_of(output: Any) -> Any:
    """The node of autograd that a tensor or an edge stands for."""
    return output.node if isinstance(output, torch.autograd.graph.GradientEdge) else get_gradient_edge(output).node


def nodes_below(roots: tuple[Any, ...]) -> list[Any]:
    """Every node that a backward from ``roots`` may reach, each before those it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        if root in seen:
            continue
        # A path by hand and not by recursion: graphs are deeper than Python's stack.
        seen.add(root)
        path = [(root, iter(root.next_functions))]
        while path:  # depth first: a node is done when all below it are
            node, edges = path[-1]
            for child, _ in edges:
                if child is not None and child not in seen:
                    seen.add(child)
                    path.append((child, iter(child.next_functions)))
                    break
            else:
                order.append(node)
                path.pop()
    return order[::-1]


def first_below(roots: tuple[Any, ...], kind: type) -> Any:
    """A node of that class that a backward from ``roots`` may reach, the nearest one; None without one."""
    waiting = deque(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        if isinstance(node, kind):
            return node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return None


def marks_below(roots: tuple[Any, ...], start: int, through: Callable[[Any, int], int]) -> dict[Any, int]:
    """By node: the union of the marks with which gradients arrive there, over all paths from ``roots``.

    Args:
        start: the mark of the roots.
        through: (node, its marks) -> the marks of what it sends on.
    """
    order = nodes_below(roots)
    marks = dict.fromkeys(order, 0)
    for root in roots:
        marks[root] |= start
    # Each node before those it leads to: its marks are complete when it sends them on.
    for node in order:
        sent = through(node, marks[node])
        for child, _ in node.next_functions:
            if child is not None:
                marks[child] |= sent
    return marks


def is_leaf(node: Any) -> bool:
    """Whether gradients end here, in the ``.grad`` of ``node.variable``."""
    return type(node).__name__ == _ACCUMULATE


def may_start_another(node: Any) -> bool:
    """Whether it is a ``torch.autograd.Function``, in whose backward another one may run (checkpointing does)."""
    return isinstance(node, BackwardCFunction) and not isinstance(node, _MODULE_HOOK)


def is_seen(leaf: Any) -> bool:
    """Whether a program could look at the gradient of a leaf: anybody but the graph refers to its tensor."""
    return _num_references(leaf) > _NUM_UNSEEN


def _num_references(leaf: Any) -> int:
    """The references to the tensor of a leaf, the one of this call included."""
    return sys.getrefcount(leaf.variable)


def _unseen() -> Any:
    """A leaf to whose tensor nothing but its node refers."""
    return get_gradient_edge(torch.zeros(0, device="cpu").requires_grad_(True)).node


_NUM_UNSEEN = _num_references(_unseen())
