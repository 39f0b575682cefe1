"""What is known of one managed param: its place in its chunk, its gradient, its counts of updates and of writes.

torch counts writes to a tensor, those through its views as well. The count is compared when a param is guarded, before
its weights are evicted and before they are updated: a write that is none of ours never reached the master.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import GeminiError
from gemini.kernels import Sums, crc32
from gemini.memory.chunks.chunk import Chunk
from gemini.patches import patch
from gemini.planning.layout import Part, Slot
from gemini.planning.planes import RuleSpec, shapes_of


class TensorSlice(NamedTuple):
    """Slice ``rank`` of ``size`` equal ones of a whole param: tensor parallel, where each rank of ``tp`` has one."""

    shape: tuple[int, ...]  # of the whole param
    dim: int  # along which it is cut
    groups: int  # how many matrices lie side by side along ``dim``, each of which is cut (gate and up in one: 2)
    rank: int
    size: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        return tuple(n // self.size if dim == self.dim else n for dim, n in enumerate(self.shape))

    @property
    def run(self) -> int:
        """Elements of a slice that stand side by side in the whole param, before those of the next slice come."""
        return math.prod(self.shape[self.dim :]) // (self.groups * self.size)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut this slice out of a whole value: a copy, or of one value for all elements that value again."""
        # An expanded scalar (stride 0 everywhere) takes no memory, and neither does its slice.
        if whole.numel() and not any(whole.stride()):
            return whole[(0,) * whole.dim()].expand(self.own_shape)
        return torch.cat(self.views_of(whole), self.dim)

    def views_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Find what of each group of a whole value is this slice's: views."""
        return [part.chunk(self.size, self.dim)[self.rank] for part in whole.chunk(self.groups, self.dim)]

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join all slices, in their order and each in its own shape, to the whole value."""
        # Groups lie outermost: the first group of every slice, then the second of every slice.
        of_groups = [one.chunk(self.groups, self.dim) for one in slices]
        return torch.cat([part for group in zip(*of_groups, strict=True) for part in group], self.dim)

    def in_whole(self, start: int, stop: int) -> torch.Tensor:
        """Say which elements of the whole param ``[start, stop)`` of this slice are, flat: int64."""
        # Run number r of a slice is run r * size + rank of the whole; within a run nothing changes.
        own = torch.arange(start, stop, device="cpu")
        return own.div(self.run, rounding_mode="floor").mul_(self.size).add_(self.rank).mul_(self.run) + own % self.run

    def of_whole(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Say which slices have these elements of the whole param, and which elements of the slices they are."""
        runs = elements.div(self.run, rounding_mode="floor")
        return runs % self.size, runs.div(self.size, rounding_mode="floor").mul_(self.run) + elements % self.run


def _nobody() -> None:
    """In the place of a weak reference."""


class Leftover(IntEnum):
    """Content that a plain loop's ``p.grad`` would have of earlier steps, while no gradient is here."""

    NOTHING = 0
    """Nothing: there was none since ``zero_grad()``."""
    USED = 1
    """One that a step has used, or skipped."""
    ZEROS = 2
    """Zeros, by ``zero_grad(set_to_none=False)``: the next step updates with them what gets no other."""
    TORN = 3
    """A sum in which there is a part of a micro-batch whose backward broke off."""


@dataclass(slots=True)
class WaitingResidual:
    """Rest of a master beside its weights (in bf16 the lower bits, in fp16 all of it) that came with the state of an
    optimizer. It belongs to one moment's weights, which may be loaded before or after that state, and waits for these
    until the next update: the loaded tensor itself, not a copy.
    """

    residual: torch.Tensor  # the residual as the plane has it, of the whole param; in fp16 the master
    of: int | None
    """The CRC-32 of the bf16 weights that it was saved with. A master says itself which they are."""
    num_steps: int  # the param's updates when it was loaded
    met: bool = False  # the weights that it belongs to were there since


@dataclass(eq=False, slots=True)
class ParamHandle:
    """All that is known of one param, reachable from it as ``param._gemini``. Changed by the training thread, and
    inside backward by autograd's under the lock of the books. A worker fills ``norm_sums`` of a gradient that it lands,
    which nobody reads before that is waited for (``GradientStore.await_sums``), and takes them away where that fails.
    """

    name: str
    names: tuple[str, ...]
    param: nn.Parameter
    chunk: Chunk
    slot: Slot  # its place in the gathered weights
    part: Part
    """Its place in the planes of this rank: all of the slot in one process."""
    owner: weakref.ref[Any]
    """The model that manages it, as :func:`gemini.train.params.by_name.owner_of` knows it."""
    kind: type[nn.Parameter] = nn.Parameter
    """Its class while modules compute: an ordinary parameter's, or the one that a library has for its codes."""
    hook: Any = None  # the post-accumulate-grad hook, if the param is trained
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """The gathered weights of the param, in its shape. Only to be read while its chunk is gathered."""
    version: int = 0  # torch's count of writes to the param when it became ordinary
    fingerprint: int | None = None
    """The CRC-32 of the weights when ``param.data`` was asked for last, in a forward or backward."""
    siblings: tuple[ParamHandle, ...] = ()
    """Params with the same count of writes, this one too: views of one tensor that each was made a parameter."""
    num_writes: int = 0
    """Number of times that Gemini has changed the weights: a graph from before must not be used after."""
    poisoned: bool = False
    """``param.data`` is NaN: its weights are not gathered."""
    trained: bool = False  # ``requires_grad`` as of the last look; flips at rest are noticed by the guard
    norm_sums: Sums | None = None
    """Sums of squares of the gradient's norm tiles, on a device still perhaps; None while there is no gradient."""
    leftover: Leftover = Leftover.NOTHING
    num_steps: int = 0  # updates this param has had (Adam's bias correction); a skipped step leaves it
    restored: int = -1  # ``num_steps`` as a checkpoint had it that was loaded last, of masters and states together
    waiting: WaitingResidual | None = None  # loaded with the state of its optimizer, until the next update
    in_backward: int = -1  # the number of the backward in which the gradient arrived last
    optimizer: Callable[[], Stepper | None] = _nobody
    """A weak reference to the one that the param was given to, beside ``owners``: every step asks for it."""
    clip: float = 1.0
    """Factor by which clipping of some params (one optimizer's of several) multiplies the gradient; 1 without."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)  # states of it that are no planes, in host memory
    clip_folded: float = 1.0
    """The part of ``clip`` that is of an earlier step, and so of the gradient itself to whoever reads it."""
    cut: TensorSlice | None = None  # which slice of a whole param it is (tensor parallel); None for all of one
    layout: tuple[int, ...] = ()
    """Its strides before it was managed, if they were others than those of a contiguous param (channels_last)."""
    pid: int = field(default_factory=os.getpid)  # a child that is forked from this process does not have the weights

    @property
    def has_grad(self) -> bool:
        return self.norm_sums is not None

    @property
    def whole_name(self) -> str:
        """Its name in the whole model: a param that is tied to one of another stage has that one's name."""
        return getattr(self.param, "_gemini_first", self.name)

    @property
    def own_shape(self) -> torch.Size:
        """Its shape here. While a model is filled the param itself may show the shape of the whole."""
        return torch.Size(self.cut.own_shape) if self.cut else self.param.shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.cut.shape if self.cut else tuple(self.param.shape)

    def as_it_was(self, value: torch.Tensor) -> torch.Tensor:
        """Copy ``value`` into the memory layout that the param had before it was managed, if that was another."""
        if not self.layout or len(self.layout) != value.dim():
            return value
        return value.new_empty_strided(value.shape, self.layout).copy_(value)

    @property
    def takes_step(self) -> bool:
        """Whether the next ``optimizer.step()`` updates it."""
        return self.norm_sums is not None or self.leftover is Leftover.ZEROS

    def refuse_incomplete_gradient(self) -> None:
        """Refuse a gradient, before it is used or read, that a broken backward has a part in, or that torch would have
        added to one that a step has used: never where the optimizer steps inside backward for good, and none is left.
        """
        if self.norm_sums is None or self.leftover in (Leftover.NOTHING, Leftover.ZEROS):
            return
        if self.leftover is Leftover.TORN:
            raise GeminiError(
                f"the gradient of {self.name!r} is not whole: the backward of one of its micro-batches ran out of "
                "memory after a part of it had been added. Call optimizer.zero_grad() and begin the step anew"
            )
        stepper = self.optimizer()
        if stepper is None or not stepper.step_in_backward or stepper.speculate:
            raise GeminiError(
                f"the gradient of {self.name!r} is not whole: optimizer.step() has used the one before it without "
                "zero_grad() since, so torch would have added the two up, and Gemini keeps no gradient that a step has "
                "used. Call optimizer.zero_grad() after every optimizer.step()"
            )


def handle_of(param: Any) -> ParamHandle | None:
    return getattr(param, "_gemini", None)


def original_class(managed: Any) -> Any:
    """The class that a model or an optimizer had before Gemini served it; None if it does not."""
    return getattr(managed, "_gemini_original", None)


def handles_of(params: Iterable[Any]) -> list[ParamHandle]:
    return [handle for handle in map(handle_of, params) if handle]


def params_of(optimizer: Any) -> list[nn.Parameter]:
    """The params of a torch optimizer, as its states number them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def plain_params_of(optimizer: Any) -> list[tuple[int, nn.Parameter]]:
    """The params of a torch optimizer that are not managed, with their numbers."""
    return [(number, param) for number, param in enumerate(params_of(optimizer)) if handle_of(param) is None]


def is_in_stages(param: nn.Parameter) -> bool:
    """Whether several stages of a pipeline read a param. Its chunk holds nothing else then, so that ranks that have
    the same part of their stages' chunks have the same part of the param.
    """
    return hasattr(param, "_gemini_first")


class StageParam(NamedTuple):
    """A param of a model in stages, as every rank knows it: its shape, and the stages' ranks (``pp``) that have it. The
    first of these writes it, and counts it in norms.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass
class ParamSet:
    """The managed params of one model, in its order."""

    handles: list[ParamHandle]
    by_chunk: dict[int, list[ParamHandle]]  # by the index of their chunk
    of_stages: Mapping[str, StageParam] = field(default_factory=dict)
    """Params of all stages, of a model in stages, in the order of the whole model; else none."""

    def copies(self, stage: int) -> list[ParamHandle]:
        """Find those of this stage that are another one's as well, which writes and counts them."""
        first = {name: param.ranks[0] for name, param in self.of_stages.items()}
        return [handle for handle in self.handles if first.get(handle.whole_name, stage) != stage]

    @property
    def in_fp32(self) -> set[int]:
        """The params (by ``id``) that stay in fp32 beside others."""
        return {id(handle.param) for handle in self.handles if handle.chunk.spec.fp32}


# ---- writes to weights -----------------------------------------------------------------------------------------------


def note_writes(handles: Iterable[ParamHandle]) -> None:
    """Count that the weights of these params change now. For autograd that is a write in place, as an update is in
    torch: a backward of a forward from before that reads them is refused.
    """
    handles = list(handles)
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        # One call for all: it is a hot line of every step. Siblings share torch's count, so each of them counts it too.
        torch.autograd.graph.increment_version([handle.param for handle in handles])
        for handle in handles:
            for sibling in handle.siblings:
                sibling.version += 1
            handle.num_writes += 1
        # After all siblings: params of one count may both be in `handles`, and the last count is to be compared with.
        for handle in handles:
            handle.version = handle.param._version


def find_siblings(handles: list[ParamHandle]) -> None:
    """Find params with one count of writes, as ``nn.Parameter(w[:8])`` and ``nn.Parameter(w[8:])`` have. torch has no
    name for it, so count one write to all: what has more than one since is such a param.
    """
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]

        def counted(once: list[ParamHandle]) -> list[int]:
            before = [handle.param._version for handle in handles]
            torch.autograd.graph.increment_version([handle.param for handle in once])
            return [handle.param._version - old for handle, old in zip(handles, before, strict=True)]

        shared = [handle for handle, number in zip(handles, counted(handles), strict=True) if number > 1]
        for handle in shared:
            if not handle.siblings:
                family = tuple(h for h, number in zip(handles, counted([handle]), strict=True) if number)
                for sibling in family:
                    sibling.siblings = family
        for handle in handles:
            handle.version = handle.param._version


def written_to(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Find those that were written to since the last look, by torch's count: as params, or through views of them."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        return [h for h in handles if h.param._version != h.version and notes_a_write(h)]


def notes_a_write(handle: ParamHandle) -> bool:
    """Note that torch has counted a write; whether it may have changed something. Gemma 3n clamps ``weight.data`` in
    each of its forwards, which changes nothing.
    """
    # Noted whatever comes out: a write is told once.
    handle.version = handle.param._version
    known = handle.fingerprint is not None and not handle.poisoned and handle.chunk.gathered
    return not known or crc32(handle.view.detach().cpu()) != handle.fingerprint


GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _data_of(param: nn.Parameter) -> torch.Tensor:
    if not (handle := handle_of(param)):
        return GET_DATA(param)
    # Only where nothing was written since the last look: else the fingerprint would be that of the write.
    view = param.detach()
    if not handle.poisoned and handle.chunk.gathered and param._version == handle.version and handle.pid == os.getpid():
        handle.fingerprint = crc32(handle.view.detach().cpu())
    return view


# torch counts no writes to param.data, and would hide them from us. Those to param.detach() are counted with the
# param's, and the two are the same otherwise. There is no other way to see ``param.data`` of an ordinary nn.Parameter.
patch("torch.nn.Parameter.data", property(_data_of, SET_DATA, doc=torch.Tensor.data.__doc__))


# ---- the optimizer that a param was given to -------------------------------------------------------------------------


Stepper = Any
"""The optimizer that updates a model's params: a ``HybridOptimizer``, which is in a room above."""

stepping_in_backward: weakref.WeakSet[Stepper] = weakref.WeakSet()
"""Optimizers that step inside backward; where there is none, nobody looks for them there."""

owners = WeakTensorKeyDictionary()
"""Params to weak references to their optimizers (:func:`give_to`), of those too that may be managed later.
No attribute of the param, which then could not be pickled."""


def optimizer_of(param: Any) -> Stepper | None:
    """The HybridAdam that was given ``param``, if it still lives."""
    handle = handle_of(param)
    return (handle.optimizer if handle else owners.get(param, _nobody))()


def owners_of(handles: Iterable[ParamHandle]) -> list[Stepper]:
    """The optimizers of params, each once, in the order of the params."""
    return list(dict.fromkeys(filter(None, (handle.optimizer() for handle in handles))))


def give_to(optimizer: Stepper | None, params: Iterable[torch.Tensor]) -> None:
    """Let :func:`optimizer_of` these params be this one from now on, or none."""
    # Weakly: a model must not keep an optimizer that the program has let go of, nor its states.
    reference = weakref.ref(optimizer) if optimizer else _nobody
    for param in params:
        owners[param] = reference
        if handle := handle_of(param):
            handle.optimizer = reference


def make_factors(rule: RuleSpec, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Make the factors of a trained param of ``shape``, zeros in host memory; whoever calls has reserved them."""
    # Tensors of inference mode could never be updated in place outside of it.
    with torch.inference_mode(False):
        found = shapes_of(rule.factors, shape)
        return {name: torch.zeros(own, dtype=torch.float32, device="cpu") for name, own in found.items()}
