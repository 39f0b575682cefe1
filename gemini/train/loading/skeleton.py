"""A model whose params have shapes and no values yet, and what fills it once its chunks have homes.

While it is built, its params are *paged*: they come into ordinary memory when someone initializes them, and go home
again, written exactly, as soon as others need the room. A param that is away is a :class:`PagedParameter`: its shape
and dtype are answered, and anything that reads or writes it brings it in first. So constructors and ``_init_weights``
of any model run unchanged, in whatever order they touch params, and the memory they take is bounded by ``ROOM`` (or
one param, if that is larger), not by the model.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.ranks.group import Ranks
from gemini.train.checkpoint.states import rng_states, set_rng_states
from gemini.train.ddp import manage
from gemini.train.modules.reading import own_params
from gemini.train.observers import iter_tensors
from gemini.train.params.by_name import ByName
from gemini.train.params.guard import METADATA, OF_MEMORY, nan_of

ROOM = 128 * 2**20
"""Bytes of params in ordinary memory at once, if there is more than one."""


class Skeleton(ABC):
    """Made on every rank by itself; :meth:`manage` is for all of them together.

    Attributes:
        model: its params take no memory. After :meth:`manage` it is the managed model.
    """

    model: Any

    def manage(self, config: GeminiConfig, *, process_group: Any = None, mesh: Any = None) -> Any:
        """Place the chunks, write the values to their homes; returns the model, managed.

        Raises:
            BudgetExceeded: before any value is read or drawn, if the budgets cannot hold the model.
        """
        return manage(self.model, config, process_group=process_group, mesh=mesh, fill=self.fill)

    @abstractmethod
    def fill(self, homes: ByName, ranks: Ranks) -> nn.Module:
        """Write the value of every param to its home, and make the buffers; returns the model that has them."""


def attention_keyword(asked: Any) -> dict[str, Any]:
    """``attn_implementation=`` for transformers; nothing where the user leaves the choice to it."""
    return {} if asked in (None, "auto") else {"attn_implementation": asked}


def replace_by_stand_ins(model: nn.Module) -> dict[int, nn.Parameter]:
    """Give ``model`` params on the CPU that take no memory instead of its meta params: new ones by the id of old."""
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in own_params(module).items():
            # A tied param is one object, and stays one.
            if id(param) not in new:
                made = new[id(param)] = nn.Parameter(torch.empty(0, dtype=param.dtype), param.requires_grad)
                made.data = stand_in(param.shape, param.dtype)  # not made of it: they would share its count of writes
                new[id(param)].__dict__.update(param.__dict__)
            module._parameters[name] = new[id(param)]
    return new


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the random generators back afterwards: what is drawn inside is drawn again."""
    states = rng_states(of_gpus=False)
    try:
        yield
    finally:
        set_rng_states(states)


@contextlib.contextmanager
def generator_of_first(ranks: Ranks) -> Iterator[None]:
    """Let all ranks draw what the first one does; one whose generator stood elsewhere gets its own back."""
    own = torch.get_rng_state()
    shared = own.clone()
    # Into a copy: the generator itself is set when all have it.
    ranks.take_from_first({"the state of the random generator": shared}, ranks.job)
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            torch.set_rng_state(own)


# ---- params that are away --------------------------------------------------------------------------------------------


def stand_in(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN that takes no memory but for one element, its own: what a param that is away, or not there yet,
    holds.
    """
    # A generator runs on one thread at a time.
    with _lock:
        return next(_elements(dtype)).expand(shape)


_lock = threading.Lock()


@cache
def _elements(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Elements of NaN without end. Many share an allocation: a small one each, between those of weights that come and
    go, would keep the allocator from giving back what lies around it (measured: 0.8 of the weights, in place of 0.4).
    """
    while True:
        yield from nan_of(dtype, torch.device("cpu")).repeat(512).unbind()


class PagedParameter(nn.Parameter):
    """A param whose values are at home."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Shapes and dtypes are those of the stand-in; nothing of memory is.
        if func in METADATA and func not in OF_MEMORY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # All of one operation stay in memory together: bringing one in must not send another home.
        given = list(iter_tensors((args, kwargs)))
        for param in given:
            if isinstance(param, PagedParameter):
                param._gemini_pager.bring_in(param, keep=given)  # type: ignore[attr-defined]
        result = func(*args, **kwargs)
        if func is torch.Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            result.__class__ = nn.Parameter  # it wants the type of what it was given, which is an ordinary one by now
        return result

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy


class Away(ABC):
    """Params that are away until somebody touches them; those that came first go again when others need the room.

    Args:
        shapes: the params, with the shapes that they show.
    """

    def __init__(self, shapes: Mapping[nn.Parameter, torch.Size]):
        self._params = list(shapes)
        self._inside: dict[int, nn.Parameter] = {}
        """Those in memory that may go again by their ids, oldest first."""
        self._inside_bytes = 0
        for param, shape in shapes.items():
            self._put_away(param, shape)

    @abstractmethod
    def _read(self, param: nn.Parameter) -> torch.Tensor:
        """Return the value of a param that is away, in memory of its own."""

    @abstractmethod
    def send_home(self, param: nn.Parameter) -> None:
        """Let a param of ``_inside`` go, if it may."""

    def _may_leave(self, param: nn.Parameter) -> bool:
        """Whether a param that comes in counts among those that go again."""
        return True

    def bring_in(
        self, param: nn.Parameter, value: torch.Tensor | None = None, keep: Collection[torch.Tensor] = ()
    ) -> None:
        """Make ``param`` ordinary: with ``value``, or what it held when it left. Those in ``keep`` stay in memory."""
        num_bytes, kept = param.numel() * param.dtype.itemsize, {id(other) for other in keep}
        # Before the new memory is taken: ROOM holds with it.
        for key, other in list(self._inside.items()):
            if self._inside_bytes + num_bytes <= ROOM:
                break
            if key not in kept:
                self.send_home(other)
        if value is None:
            value = self._read(param)
        param.__class__ = nn.Parameter
        param.data = value
        if self._may_leave(param):
            self._inside[id(param)] = param
            self._inside_bytes += num_bytes

    def finish(self) -> None:
        """Make all of them ordinary params, also those without values."""
        for param in self._params:
            param.__class__ = nn.Parameter
            del param._gemini_pager  # type: ignore[attr-defined]

    def _forget(self, param: nn.Parameter) -> None:
        """Count a param no longer among those that may go again."""
        self._inside_bytes -= self._inside.pop(id(param)).nbytes

    def _put_away(self, param: nn.Parameter, shape: torch.Size) -> None:
        param.data = stand_in(shape, param.dtype)
        param._gemini_pager = self  # type: ignore[attr-defined]
        param.__class__ = PagedParameter


class Pager(Away):
    """The params of a model that has not adopted them yet.

    Args:
        homes: are written and read.
        filled: names of the params whose values are at home already; the others start undefined.
    """

    def __init__(self, homes: ByName, filled: Collection[str] = ()):
        self._homes = homes
        self._handles = {id(handle.param): handle for handle in homes.handles}
        self._filled = {id(handle.param) for handle in homes.handles if handle.name in filled}
        # The whole shape, also of a param that is a slice: constructors see what they have made.
        super().__init__({handle.param: torch.Size(handle.whole_shape) for handle in homes.handles})

    def _read(self, param: nn.Parameter) -> torch.Tensor:
        if id(param) not in self._filled:
            return torch.zeros(param.shape, dtype=param.dtype, device="cpu")
        handle = self._handles[id(param)]
        # Read from the masters where the param is wider than what its chunk computes in.
        exact = None if param.dtype is handle.chunk.flat.dtype else torch.float32
        return self._homes.read_whole(handle, exact).to(param.dtype)

    def send_home(self, param: nn.Parameter) -> None:
        self._homes.write_whole(self._handles[id(param)], param.data)
        self._filled.add(id(param))
        # Written before it is forgotten: a write that fails leaves the param as it is.
        self._forget(param)
        self._put_away(param, param.shape)

    def finish(self) -> None:
        """Send everything home; the params are ordinary ones without values then."""
        for param in list(self._inside.values()):
            self.send_home(param)
        super().finish()
