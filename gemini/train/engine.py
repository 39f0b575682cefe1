"""The engine behind one wrapped model: phases, gathered weights, gradients, loss scale, reads and writes by name.

``GeminiDDP`` is the face, hooks tell the engine what happens, ``HybridAdam`` asks it for gradients and homes. The
engine knows when the model computes (a forward is on the stack, a backward is running, or ``gathered()`` is open) and
keeps the params guarded at all other times.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, ParamAccessError
from gemini.memory.chunk import Chunk, plane_dtype
from gemini.memory.device import make_device
from gemini.memory.manager import Manager
from gemini.memory.mover import Mover
from gemini.plan.planes import OPTIMIZER_PLANES, PlaneKind, plane_itemsizes
from gemini.tiers import Tier
from gemini.train.build import build, iter_chunks, make_plane
from gemini.train.by_name import ByName
from gemini.train.gradients import GradientStore
from gemini.train.guard import ManagedParameter, ParamHandle, engine_of, expose, hide
from gemini.train.loss_scale import LossScale


class CallRecord:
    """One call of a module that reads managed weights: its chunks, and the call around it.

    Autograd runs nodes strictly in the reverse order of forward, so when the backward of one call begins, every call
    that is neither around it nor inside it is over, and its chunks may go.
    """

    __slots__ = ("chunks", "module", "parent")

    def __init__(self, module: nn.Module, chunks: tuple[Chunk, ...], parent: CallRecord | None):
        self.module: nn.Module | None = module
        self.chunks = chunks
        self.parent = parent

    def is_around(self, other: CallRecord) -> bool:
        """Whether ``other`` is this call or one inside it."""
        record: CallRecord | None = other
        while record is not None:
            if record is self:
                return True
            record = record.parent
        return False


class Engine:
    """One per wrapped model; the model owns it, everything else refers to it weakly."""

    def __init__(self, model: nn.Module, config: GeminiConfig):
        self.config = config
        self.device = make_device(config.device)
        built = build(model, config, self.device, weakref.ref(self))
        self.layout, self.placement, self.ledger, self.spill = built.layout, built.placement, built.ledger, built.spill
        self.chunks, self.handles = built.chunks, built.handles
        self.by_chunk = iter_chunks(self.handles)
        self.mover = Mover(self.device, built.tile)
        self.manager = Manager(
            self.chunks, ledger=self.ledger, device=self.device, mover=self.mover, on_evict=self._hide_chunk
        )
        self.gradients = GradientStore(
            self.handles, ledger=self.ledger, device=self.device, mover=self.mover, spill=self.spill
        )
        self.by_names = ByName(self)
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self.clip_coefficient = 1.0
        self.moved_last_step: Counter[str] = Counter()
        self._gathered = 0
        self._backward_number = 0
        self._in_backward = False
        self._exposed: set[int] = set()
        self._calls: list[CallRecord] = []
        self._reading: list[CallRecord] = []
        for index, handles in self.by_chunk.items():
            for handle in handles:
                self._adopt(handle)
            self._hide_chunk(self.chunks[index])
        gc.collect(0)

    # ---- phases -------------------------------------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Whether params are ordinary parameters now: a forward, a backward or gathered() is under way."""
        return bool(self._calls) or self._in_backward or self._gathered > 0

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    def begin_call(self, module: nn.Module, chunks: tuple[Chunk, ...]) -> None:
        """A hooked module starts to compute: gather what it reads."""
        if not self.computing:
            self._expose_gathered()
        acquired = []
        try:
            for chunk in chunks:
                self.acquire(chunk)
                acquired.append(chunk)
        except BaseException:
            for chunk in acquired:
                self.manager.release(chunk)
            if not self.computing:
                self._rest()
            raise
        self._calls.append(CallRecord(module, chunks, self._calls[-1] if self._calls else None))

    def end_call(self, module: nn.Module) -> CallRecord | None:
        """A hooked module is done, or failed; calls inside it that ended without their hook end with it.

        None if the call never began (its own gathering failed).
        """
        if all(record.module is not module for record in self._calls):
            return None
        while True:
            record = self._calls.pop()
            for chunk in record.chunks:
                self.manager.release(chunk)
            if record.module is module:
                break
        record.module = None  # it may live as long as the graph; the module need not
        if not self.computing:
            self._rest()
        return record

    def recover_if_interrupted(self) -> None:
        """Forget a forward or backward that an exception ended without its hooks; called where none can be running."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._calls:
            first = self._calls[0].module
            assert first is not None
            self.end_call(first)
        if self._in_backward:
            self.end_backward()

    def begin_backward(self) -> None:
        """The first gradient of a backward is about to flow into the model.

        Raises:
            BudgetExceeded: if gradients of an earlier backward are kept and there is no room to accumulate.
        """
        if self._in_backward:
            return
        pending = any(handle.has_grad for handle in self.handles)
        if pending and self.config.gradients == "transient":
            raise GeminiError(
                'a second backward before optimizer.step(): gradients="transient" keeps nothing to add to. '
                'Use GeminiConfig(gradients="accumulate") (or "retain") to accumulate over micro-batches'
            )
        if pending:
            self.gradients.promote(self.chunks)
        self._backward_number += 1
        self._in_backward = True
        for chunk in self.chunks:
            chunk.num_missing_grads = sum(h.param.requires_grad for h in self.by_chunk[chunk.spec.index])
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def begin_backward_of(self, record: CallRecord) -> None:
        """The backward of one call begins: its weights are read now, those of finished calls are not."""
        self.begin_backward()
        staying = []
        for other in self._reading:
            if other.is_around(record) or record.is_around(other):
                staying.append(other)
            else:
                for chunk in other.chunks:
                    self.manager.release(chunk)
        self._reading = staying
        if record not in staying:
            acquired = []
            try:
                for chunk in record.chunks:
                    self.acquire(chunk)
                    acquired.append(chunk)
            except BaseException:
                for chunk in acquired:
                    self.manager.release(chunk)
                raise
            staying.append(record)

    def end_backward(self) -> None:
        """The whole graph is done (or was abandoned)."""
        for record in self._reading:
            for chunk in record.chunks:
                self.manager.release(chunk)
        self._reading = []
        self._in_backward = False
        if not self.computing:
            self._rest()

    # ---- gathered weights ---------------------------------------------------------------------------------------

    def acquire(self, chunk: Chunk) -> None:
        self.manager.acquire(chunk)
        self._expose_chunk(chunk)

    def serve(self, handle: ParamHandle) -> None:
        """A param is read outside its own module while the model computes: gather it for the call around the read."""
        chunk = handle.chunk
        if not chunk.resident:
            holder = self._calls[-1] if self._calls else (self._reading[-1] if self._reading else None)
            if holder is None:
                raise ParamAccessError(
                    f"managed param {handle.name!r} is read where no module of the model is computing; "
                    "read it inside the model's forward, or with model.gathered([param])"
                )
            if chunk not in holder.chunks:
                self.manager.acquire(chunk)
                holder.chunks += (chunk,)
        self._expose_chunk(chunk)

    @contextmanager
    def gathered(self, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
        """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.

        An exception inside undoes what was written.
        """
        chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
        acquired: list[Chunk] = []
        # Of weights that are changed in place nothing else tells what they were, so that the rest keeps its residual.
        before = {h.name: h.view.clone() for h in handles if write and h.chunk.resident}
        self._gathered += 1
        try:
            for chunk in chunks:
                self.acquire(chunk)
                acquired.append(chunk)
            try:
                yield
            except BaseException:
                for handle in handles:
                    if handle.name in before:
                        handle.view.copy_(before[handle.name])
                raise
            if write:
                for handle in handles:
                    self.by_names.take_over(handle, before.get(handle.name))
        finally:
            self._gathered -= 1
            for chunk in acquired:
                self.manager.release(chunk)
            if write:
                self.manager.drop(acquired)
            if not self.computing:
                self._rest()

    def _expose_chunk(self, chunk: Chunk) -> None:
        index = chunk.spec.index
        if index not in self._exposed:
            expose(chunk, self.by_chunk[index])
            self._exposed.add(index)

    def _hide_chunk(self, chunk: Chunk) -> None:
        self._exposed.discard(chunk.spec.index)
        hide(self.by_chunk[chunk.spec.index])

    def _expose_gathered(self) -> None:
        for chunk in self.chunks:
            if chunk.gathered:
                self._expose_chunk(chunk)

    def _rest(self) -> None:
        for index in list(self._exposed):
            self._hide_chunk(self.chunks[index])

    # ---- gradients ----------------------------------------------------------------------------------------------

    def take_grad(self, handle: ParamHandle) -> None:
        """The post-accumulate hook: move ``param.grad`` into the chunk."""
        grad = handle.param.grad
        if grad is None:
            return
        handle.param.grad = None
        self.begin_backward()
        if grad.requires_grad:
            raise GeminiError(
                f"the gradient of {handle.name!r} was asked for with create_graph=True: a double backward through "
                "managed params is not supported. Use torch.autograd.grad on an unwrapped model"
            )
        if grad.layout is not torch.strided:
            raise GeminiError(f"{handle.name!r} has a sparse gradient: build its module with sparse=False")
        chunk = handle.chunk
        if not chunk.gathered:
            raise GeminiError(
                f"the gradient of {handle.name!r} was computed while its weights were not gathered: its module's "
                "output was bypassed in backward. Please report the model; gradients=... and budgets do not matter here"
            )
        if self.config.gradients == "transient":
            self._update_now(handle, grad)
        else:
            if handle.has_grad:
                self.gradients.promote([chunk])  # a shared param under reentrant checkpointing arrives twice
            self.gradients.land(handle, grad)
        handle.in_backward = self._backward_number
        chunk.num_missing_grads -= 1
        if chunk.num_missing_grads == 0:
            self.manager.grads_complete(chunk)

    def _update_now(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        if handle.in_backward == self._backward_number:
            raise GeminiError(
                f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), after its "
                "update: "
                'gradients="transient" cannot be used with this model; use gradients="retain"'
            )
        optimizer = getattr(handle.param, "_gemini_optimizer", lambda: None)()
        if optimizer is not None:
            optimizer.update_in_backward(self, handle, grad)
            return
        raise GeminiError(
            f'gradients="transient": no HybridAdam(step_in_backward=True) owns {handle.name!r}, so its gradient '
            "would be "
            "lost. Give all trained params to the optimizer before the first backward, or freeze this one"
        )

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Total 2-norm of all gradients (unscaled); the coefficient is applied in the update."""
        self.recover_if_interrupted()
        if self.config.gradients == "transient":
            raise GeminiError(
                'clipping needs every gradient before the first update: gradients="transient" cannot be clipped. '
                'Use GeminiConfig(gradients="retain")'
            )
        total = math.sqrt(self.gradients.total_sum(self.handles)) * self.clip_coefficient * self.grad_unscale
        if error_if_nonfinite:
            self.gradients.check_finite(self.handles)
        if math.isfinite(total):
            self.clip_coefficient *= min(1.0, float(max_norm) / (total + 1e-6))
        return torch.tensor(total, dtype=torch.float32)

    @property
    def grad_unscale(self) -> float:
        """What gradients in the planes are multiplied by to be those of the loss."""
        return 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.scale

    def read_grad(self, handle: ParamHandle) -> torch.Tensor | None:
        """The gradient as the loss gives it (clipping not applied), on the CPU, or None."""
        if not handle.has_grad:
            return None
        grad = self.by_names.read_plane(handle, PlaneKind.GRAD)
        return grad if grad is None or self.loss_scale is None else grad.float().mul_(self.grad_unscale)

    def discard_grads(self, handles: Iterable[ParamHandle] | None = None) -> None:
        """zero_grad: forget gradients (all, or some), and the clipping that was computed from them."""
        self.recover_if_interrupted()
        self.gradients.discard(self.handles if handles is None else list(handles))
        self.clip_coefficient = 1.0

    def end_step(self) -> None:
        """After an optimizer step: what moved since the last one is what the report shows."""
        self.clip_coefficient = 1.0
        self.moved_last_step = self.mover.moved.copy()
        self.mover.moved.clear()

    # ---- trained or frozen --------------------------------------------------------------------------------------

    def note_requires_grad(self) -> None:
        """Follow ``requires_grad`` flips: a param that became trained gets its hook, its chunk its optimizer planes."""
        for handle in self.handles:
            if handle.param.requires_grad and handle.hook is None:
                self._make_trainable(handle.chunk)
                handle.hook = handle.param.register_post_accumulate_grad_hook(_grad_hook(handle))

    def _make_trainable(self, chunk: Chunk) -> None:
        """Give a frozen chunk the planes of a trained one, on the fastest tier below the GPU with room."""
        precision, gradients = self.config.precision, self.config.gradients
        sizes = plane_itemsizes(precision, gradients, trainable=True)
        missing = [kind for kind in (*OPTIMIZER_PLANES, PlaneKind.GRAD) if kind in sizes and kind not in chunk.planes]
        if not missing:
            return
        if precision == "fp16":
            raise GeminiError(
                f"{chunk.name} was frozen when the model was wrapped: in fp16 it has no fp32 master to train. "
                "Set requires_grad before wrapping, or use precision='bf16'"
            )
        num_bytes = sum(sizes[kind] for kind in missing) * chunk.spec.numel
        below = [tier for tier in self.ledger.tiers if tier is not Tier.GPU]
        tier = next((t for t in below if self.ledger.free(t) >= num_bytes), None)
        if tier is None:
            raise BudgetExceeded(
                f"{chunk.name} became trained after wrapping and needs optimizer states that no tier has room for; "
                "wrap the model with requires_grad already set, or raise a budget"
            )
        if tier is Tier.NVME and self.spill is None:
            from gemini.memory.nvme import SpillFile

            assert self.config.memory.nvme_path is not None
            self.spill = SpillFile(self.config.memory.nvme_path, 0)
        for kind in missing:
            self.ledger.reserve(tier, sizes[kind] * chunk.spec.numel, kind.value)
            dtype = plane_dtype(kind, precision, trainable=True, itemsize=sizes[kind])
            chunk.planes[kind] = make_plane(chunk.spec.numel, dtype, tier, self.device, self.spill)

    # ---- construction and end -----------------------------------------------------------------------------------

    def _adopt(self, handle: ParamHandle) -> None:
        """Move one param's values home and make the param a view of its chunk."""
        param = handle.param
        self.by_names.adopt(handle, param.data)
        param.grad = None
        param.data = handle.view
        param._gemini = handle  # type: ignore[attr-defined]
        if param.requires_grad:
            handle.hook = param.register_post_accumulate_grad_hook(_grad_hook(handle))

    def check_invariants(self) -> None:
        """Everything that must hold between steps; for tests."""
        self.manager.check_invariants()
        if not self.computing:
            assert all(isinstance(h.param, ManagedParameter) for h in self.handles)
            assert all(c.pins == 0 for c in self.chunks)

    def close(self) -> None:
        """Give the spill file and the lanes back; memory goes with the last tensor over it."""
        if self.spill is not None:
            self.spill.close()
        self.device.close()

    def __del__(self) -> None:
        if hasattr(self, "spill"):
            self.close()


def _grad_hook(handle: ParamHandle) -> Any:
    def take(param: torch.Tensor) -> None:
        engine_of(handle).take_grad(handle)

    return take
