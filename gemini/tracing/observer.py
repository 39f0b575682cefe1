"""Cuts a step into moments: hooks like the engine's tell where calls begin and end, a meter what happens in between.

The rules are the engine's own (``gemini/train/modules/hooks.py`` says why): the same modules are hooked, :class:`Calls`
says what each phase keeps gathered, with params in place of chunks. So what a trace says a moment reads is what the
engine holds in it, whatever the layout. Every beginning and end of a call is a boundary; a stretch without operations
is none.

:class:`SavedInputs` notes which inputs of checkpointed blocks wait for backward, which is what offloading of
activations would move, and when: by the rule of ``gemini/train/activations/store.py``, with nothing moved.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gemini.planning.trace import MemoryTrace, Moment, Phase, Source
from gemini.tracing.meter import Meter, Target, dense
from gemini.train.activations.kept import INSIDE
from gemini.train.activations.store import MIN_BYTES, saved_by_checkpointing
from gemini.train.modules.calls import CallRecord, Calls
from gemini.train.modules.changing import hook_around
from gemini.train.modules.reading import Structure, structure_of
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import handle_of
from gemini.train.passes.hooks import ENTRANCE
from gemini.train.setup.problem import trace_of


class Kept:
    """One saved input of a checkpointed block, or what a kept one saved."""

    __slots__ = ("__weakref__", "is_back", "num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.is_back: bool | None = False if INSIDE.kept else None  # None: it is brought back whenever it is asked for
        self.num_bytes = tensor.numel() * tensor.element_size()


class SavedInputs:
    """Open while the outermost forward runs, as the engine's store is."""

    def __init__(self, observer: Observer):
        self._observer = observer
        self._is_open = False
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Kept]]] = {}
        self._saved = self._restored = 0

    def open(self) -> None:
        if not self._is_open and torch.is_grad_enabled() and self._observer.meter is not None:
            self._known.clear()
            self._saved = self._restored = 0
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def take(self) -> tuple[int, int]:
        """Bytes saved and bytes asked for since the last call."""
        taken, self._saved, self._restored = (self._saved, self._restored), 0, 0
        return taken

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Keep an input without its graph: an output that held its own is freed by the garbage collector only."""
        meter = self._observer.meter
        if (
            tensor.numel() * tensor.element_size() < MIN_BYTES
            or not (INSIDE.kept or saved_by_checkpointing(2))
            or not dense([tensor])
            or meter is None
            or meter.is_param(tensor)
        ):
            return self._without_graph(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        alive, known = self._known.get(key, (None, None))
        kept = known() if known is not None and alive is not None and not alive.expired() else None
        if kept is None:
            kept = Kept(self._without_graph(tensor))
            self._saved += kept.num_bytes
            self._known[key] = (StorageWeakRef(storage), weakref.ref(kept))
        return kept

    def _without_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        with self._observer.elsewhere():
            return tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Kept):
            return packed
        if not packed.is_back:
            self._restored += packed.num_bytes
        packed.is_back = packed.is_back is not None or None
        return packed.tensor


@dataclass
class ObservedStep:
    """One step as it was seen. ``moments``: those in which something ran (empty if operations were not counted). By
    boundary: ``keys``, what happened there (equal lists are equal sequences of calls); ``times``, seconds that ended
    there, without those in which somebody else worked; ``moment_at``, the moment that ended there, or None.
    """

    moments: list[Moment] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    moment_at: list[int | None] = field(default_factory=list)
    has_backward: bool = False
    differentiable: bool = False
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int = 0


class Observer:
    """Hooks on one model. Each forward of the root begins a :class:`ObservedStep`; its backward ends it.
    ``free_gradients``: complete gradients are dropped, as the engine does by moving them away. ``sent``: where those
    who imagine other ranks count what they would send them.
    """

    def __init__(self, model: nn.Module, target: Target, *, free_gradients: bool, sent: Counter[str] | None = None):
        self.model = model
        self._params = [param for param, _ in structure_of(model).params]
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self.target = target
        self._free_gradients = free_gradients
        self._sent = Counter[str]() if sent is None else sent
        self._hooks: list[Any] = []
        self.meter: Meter | None = None
        self.last: ObservedStep | None = None
        self._calls = Calls(self, self)
        self.saved = SavedInputs(self)
        self._outside = False
        self._resting = True  # no step is under way
        self._start_over()

    def _start_over(self) -> None:
        """Begin with a step of which nothing was seen."""
        self.step = ObservedStep()
        # The calls that run, with the paths of their modules, and the params that they have gathered.
        self._calls.abandon()
        self._calls.end_backward()
        self._path_of: dict[CallRecord, str] = {}
        self._gathered = Counter[int]()
        # The backward: whether it runs, and the innermost call whose backward does.
        self._in_backward = False
        self._inner: CallRecord | None = None
        # The moment that runs: the module it belongs to, gradients that are complete since the last operation, when it
        # began, and the seconds since then that were not the model's.
        self._path = ""
        self._gradients: set[int] = set()
        self._away, self._since = 0.0, self.now()

    # ---- attaching ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register the hooks on the same modules as the engine; what breaks this off leaves some to :meth:`detach`."""
        structure = Structure(self.model)
        for path, module, read, *_ in structure.readers:
            params = tuple(dict.fromkeys(self._index_of[id(p)] for p in read))
            entrance = ENTRANCE.fullmatch(path) is not None and id(module) in structure.holders
            if module is self.model or params or entrance:
                self._attach_to(path, module, params)
        for index, param in enumerate(self._params):
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(self._gradient_hook(index)))

    def detach(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.saved.close()

    def _attach_to(self, path: str, module: nn.Module, params: tuple[int, ...]) -> None:
        def pre(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self.model and not self._calls.running and torch._C._current_graph_task_id() == -1:
                self._begin_forward(args, kwargs)
            self._begin_call(path, module, params)

        def post(module: nn.Module, args: Any, output: Any) -> None:
            self._end_call(path, module, output)

        self._hooks += hook_around(module, pre, post, with_kwargs=True)

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def make_meter(self, run: Callable[[Any, Any, Any], Any] | None = None) -> Meter:
        """A meter that knows this model's params and buffers. It counts while it is entered."""
        meter = Meter(self.target, run)
        meter.begin_work = self._notice_backward
        for index, param in enumerate(self._params):
            handle = handle_of(param)
            meter.know_param(index, param if handle is None else handle.view)
        meter.leave_out(self.model.buffers())
        self.meter = meter
        return meter

    @contextmanager
    def elsewhere(self) -> Any:
        """Count nothing inside as the model's work: not its operations, bytes, or time."""
        if self._outside:
            yield
            return
        self._outside = True
        began = self.now()
        try:
            with nullcontext() if self.meter is None else self.meter.paused():
                yield
        finally:
            self._outside = False
            self._away += self.now() - began

    # ---- steps -------------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Called when a forward of the model begins, and no step is under way."""

    def take_step(self, step: ObservedStep) -> None:
        """Called with each whole step, forward and backward."""
        self.last = step

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        return time.perf_counter()

    def _begin_forward(self, args: Any, kwargs: Any) -> None:
        """A call of the model that is inside no other. It begins a step unless a backward may be of both (as with pairs
        of samples, whose forwards come one after the other).
        """
        with_backward = torch.is_grad_enabled()
        broken_off = self._in_backward  # an exception ended the backward before its end
        if self._resting or broken_off or not (with_backward and self.step.differentiable):
            self.before_step()
            self._resting = False
            if self.meter is not None:
                self.meter.reset()
            self._start_over()
        self.step.differentiable = with_backward
        names = list(inspect.signature(self.model.forward).parameters)
        names += [f"input {position}" for position in range(len(names), len(args))]
        shapes = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                shapes[name] = tuple(value.shape)
                if self.meter is not None:
                    self.meter.arrived(value)
        self.step.inputs = self.step.inputs or shapes
        self.step.tokens += count_tokens(shapes, self.model)

    def end_step(self) -> None:
        """Forward and backward are over."""
        self._cut("end of step")
        self._resting = True
        if self.meter is not None:
            self.meter.rest()
        self._calls.end_backward()
        self._in_backward = False
        self._path = ""
        step, self.step = self.step, ObservedStep()
        if step.has_backward:
            self.take_step(step)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = self.step.has_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_step)

    def _notice_backward(self) -> None:
        """A loss that is computed outside of the model has operations before any hook is reached. A module that has a
        gradient computed in its own forward (of a loss in tiles) is still in forward.
        """
        if not self._in_backward and not self._calls.running and torch._C._current_graph_task_id() != -1:
            self._cut(None)
            self._begin_backward()

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def _begin_call(self, path: str, module: nn.Module, params: tuple[int, ...]) -> None:
        self._cut(("call", path))
        outermost = not self._calls.running and not self._in_backward
        self._calls.begin(module, params)  # type: ignore[arg-type]
        record = self._calls.innermost
        assert record is not None
        self._path_of[record] = self._path = path
        if outermost:
            self.saved.open()

    def _end_call(self, path: str, module: nn.Module, output: Any) -> None:
        self._cut(("end", path))
        record = self._calls.end(module)
        if not self._calls.running:
            self.saved.close()
        around = self._calls.innermost
        self._path = "" if around is None else self._path_of[around]
        if record is None or output is None:
            return
        if record.chunks and record.parent is not None:
            keys = {self._params[i].untyped_storage()._cdata: i for i in record.chunks}  # type: ignore[call-overload]
            for tensor in dense([*iter_tensors(output)]):  # params that it returns
                if (index := keys.get(tensor.untyped_storage()._cdata)) is not None:
                    self._calls.hold(index)
        if torch.is_grad_enabled() and (record.chunks or (record.parent is None and not self._in_backward)):

            def begin(grad: torch.Tensor) -> None:
                self._begin_backward_of(record)

            record.on_gradient(output, begin)

    def _begin_backward_of(self, record: CallRecord) -> None:
        path = self._path_of.get(record)
        if path is None:
            return  # of an earlier step
        self._cut(("backward", path))
        self._begin_backward()
        self._calls.begin_backward(record)
        inner = self._inner
        if inner is None or self._calls.running or record not in inner.around():
            self._inner, self._path = record, path  # else one tensor is the result of both, and the inner one is first

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def complete(param: torch.Tensor) -> None:
            self._begin_backward()
            self._gradients.add(index)
            grad = param.grad
            if grad is None:
                return
            if self.meter is not None:
                self.meter.gone(grad)
            if self._free_gradients:
                param.grad = None

        return complete

    def acquire(self, index: Any) -> None:
        self._gathered[index] += 1

    def release(self, index: Any) -> None:
        self._gathered[index] -= 1
        if not self._gathered[index]:
            del self._gathered[index]

    def expose(self, index: Any) -> None:
        """Params are ordinary ones here in any case, and so for :meth:`cover`."""

    cover = expose

    def _cut(self, key: Any) -> None:
        """End the moment that runs. What stands between two boundaries without an operation is no moment."""
        step = self.step
        step.keys.append(key)
        step.times.append(max(0.0, self.now() - self._since - self._away))
        step.moment_at.append(self._close() if self.meter is not None else None)
        self._away, self._since = 0.0, self.now()

    def _close(self) -> int | None:
        meter, moments = self.meter, self.step.moments
        assert meter is not None
        if not meter.counts.num_ops:
            if self._gradients and moments:  # complete since the last operation
                last = moments[-1]
                moments[-1] = replace(last, gradients=tuple(sorted({*last.gradients, *self._gradients})))
                self._gradients = set()
            return None
        peak, taken = meter.take()
        saved, restored = self.saved.take()
        in_backward = Phase.RECOMPUTE if self._calls.running else Phase.BACKWARD
        moments.append(
            Moment(
                phase=in_backward if self._in_backward else Phase.FORWARD,
                module=self._path,
                params=tuple(sorted(taken.read.union(self._gathered))),
                live_bytes=meter.live,
                peak_bytes=peak,
                saved_bytes=saved,
                restored_bytes=restored,
                flops=taken.flops,
                touched_bytes=taken.touched,
                num_ops=taken.num_ops,
                gradients=tuple(sorted(self._gradients)),
                tp_bytes=self._sent.pop("tp", 0),
                cp_bytes=self._sent.pop("cp", 0),
                products=tuple(product._replace(times=n) for product, n in sorted(taken.products.items())),
                attention=taken.attention,
            )
        )
        self._gradients = set()
        return len(moments) - 1


def count_tokens(shapes: Mapping[str, tuple[int, ...]], model: Any = None) -> int:
    """Positions that a batch of these shapes has the model work on: its inputs', and those of an encoder-decoder's
    decoder, whose labels are its inputs once more and do not count. What has none (images) counts as samples.
    """
    source = next((shapes[name] for name in ("input_ids", "inputs_embeds") if name in shapes), None)
    decoder = 0
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        names = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
        target = next((shapes[name] for name in names if name in shapes), ())
        decoder = target[0] * target[1] if len(target) > 1 else 0
    if source is not None:
        return decoder + (source[0] * source[1] if len(source) > 1 else source[0])
    first = next(iter(shapes.values()), ())
    return decoder or (first[0] if first else 0)


def trace_of_step(
    model: nn.Module, step: ObservedStep, precision: str, kept: Collection[int], *, target: str, source: Source
) -> MemoryTrace:
    """The trace of a step that was observed; ``kept``: the params that stay in fp32, by their ``id``."""
    declared = trace_of(structure_of(model), precision, kept, target=target)
    return replace(
        declared,
        batch=step.inputs,
        tokens=step.tokens,
        source=source,
        moments=tuple(step.moments),
        checkpointing=any(moment.phase is Phase.RECOMPUTE for moment in step.moments),
        read_together=tuple(dict.fromkeys(moment.params for moment in declared.moments)),
    )
