"""A model whose params have shapes and no values yet, and what fills it once its chunks have homes.

While it is built, its params are *paged*: they come into ordinary memory when someone initializes them, and go home
again, written exactly, as soon as others need the room. A param that is away is a :class:`PagedParameter`: its shape
and dtype are answered, and anything that reads or writes it brings it in first. So constructors and ``_init_weights``
of any model run unchanged, in whatever order they touch params, and the memory they take is bounded by ``ROOM`` (or
one param, if that is larger), not by the model. ``gemini.from_config`` draws one from scratch straight into chunks,
with the values that plain ``from_config`` draws.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig, config_of
from gemini.errors import GeminiError
from gemini.patches import original, replaced_for_thread
from gemini.ranks.group import Ranks
from gemini.train.checkpoint.states import generators_kept
from gemini.train.ddp import manage
from gemini.train.modules.reading import own_params
from gemini.train.observers import iter_tensors
from gemini.train.params.by_name import ByName
from gemini.train.params.guard import METADATA, OF_MEMORY, nan_of

ROOM = 128 * 2**20
"""Bytes of params in ordinary memory at once, if there is more than one."""


class Skeleton(ABC):
    """Made on each rank by itself; :meth:`manage` is for all. Until then params of ``model`` take no memory."""

    model: Any

    def manage(self, config: GeminiConfig, *, process_group: Any = None, mesh: Any = None) -> Any:
        """Place the chunks, write the values to their homes; returns the model, managed. Raises BudgetExceeded before
        any value is read or drawn, if the budgets cannot hold the model.
        """
        return manage(self.model, config, process_group=process_group, mesh=mesh, fill=self.fill)

    @abstractmethod
    def fill(self, homes: ByName, ranks: Ranks) -> nn.Module:
        """Write the value of every param to its home, and make the buffers; returns the model that has them."""


def need_transformers(what: str) -> None:
    """Raise ImportError, with the extra to install, if ``what`` cannot have transformers."""
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as e:
        raise ImportError(
            f"{what} needs transformers 5.0 or newer, the extra 'hf' of Gemini: pip install 'transformers>=5.0' ({e})",
            name="transformers",
        ) from e


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


def stand_in(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN whose only memory is one element: what a param that is away, or not there yet, holds."""
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
    """Params that are away until somebody touches them, with the shapes that they show; those that came first go again
    when others need the room.
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
    """The params of a model that has not adopted them yet. ``homes`` are written and read; ``filled`` are those whose
    values are at home already: the others start undefined.
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


def from_config(
    hf_config: Any,
    config: GeminiConfig | None = None,
    *,
    model_class: Any = None,
    attn_implementation: Any = None,
    process_group: Any = None,
    mesh: Any = None,
    **kwargs: Any,
) -> Any:
    """A managed transformers model with new random weights, which are initialized directly in their home tiers.

    Whatever the size of the model, host memory needs only ``gemini.train.loading.skeleton.ROOM`` bytes beside its
    budget, or twice the largest param. The weights are those that ``model_class.from_config(hf_config)`` gives with the
    same seed. With several ranks the random number generator of the first rank is used.

    Args:
        hf_config: a config object of transformers.
        config: the settings, as for :class:`gemini.GeminiDDP`.
        model_class: a model class or an auto class of transformers. By default the class in
            ``hf_config.architectures``, else ``AutoModelForCausalLM``.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ... as in transformers (or a dict by sub-config). By
            default, or with "auto", what ``hf_config`` says, else the choice of transformers.
        process_group, mesh: as for :class:`gemini.GeminiDDP`.
        **kwargs: passed to the model class, for example ``dtype=`` (by default that of ``hf_config``).

    Raises:
        BudgetExceeded: if the model does not fit, before anything is initialized.
        ImportError: from transformers, if FlashAttention is asked for and cannot run.
        ValueError: if no model class follows from the config.
        TypeError: for a path or a dict instead of a config object.
    """
    if isinstance(hf_config, (str, os.PathLike, dict)):
        raise TypeError(
            f"gemini.from_config(hf_config) takes a config object of transformers, got {type(hf_config).__name__}: "
            "read one with transformers.AutoConfig.from_pretrained(path), or make one (transformers.LlamaConfig(...)). "
            "gemini.from_pretrained(path) loads a model with its weights"
        )
    need_transformers("gemini.from_config")
    config = config_of(config).resolved()
    kwargs |= attention_keyword(attn_implementation)
    skeleton = skeleton_from_config(hf_config, model_class=model_class, **kwargs)
    return skeleton.manage(config, process_group=process_group, mesh=mesh)


def skeleton_from_config(hf_config: Any, *, model_class: Any = None, **kwargs: Any) -> Skeleton:
    """Make what :func:`from_config` makes before it places anything."""
    if model_class is None:
        model_class = class_of(hf_config)
    check_class(model_class)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    return DrawnModel(lambda: build(hf_config, **kwargs))


class DrawnModel(Skeleton):
    """The model that ``make`` builds and initializes, which is called twice, with the same random numbers. First
    without memory, on the meta device: that tells the layout, so homes can be placed and reserved. Then for real, where
    each param that a constructor registers is taken over by a :class:`Pager`, which sends it home when others need the
    room and brings it back if a later initialization touches it. Params are matched by the order of their registration,
    and checked by name at the end: what came about in another way (a copied layer) is copied home then.
    """

    def __init__(self, make: Callable[[], nn.Module]):
        self._make = make
        registered: dict[int, nn.Parameter] = {}  # by id, in order, and kept: another one must not get the id

        def note(param: nn.Parameter) -> nn.Parameter:
            return registered.setdefault(id(param), param)

        # The second build must draw the same numbers: what this one draws is put back.
        with generators_kept(), _registering(note), without_drawing(), torch.device("meta"):
            self.model = make()
        empties = replace_by_stand_ins(self.model)
        # By the order of registration; None for a param that the model has let go of since.
        self._expected = [empties.get(key) for key in registered]

    def fill(self, homes: ByName, ranks: Ranks) -> nn.Module:
        """Build the model once more, into its homes, with the numbers that the first rank draws."""
        pager = Pager(homes)
        with generator_of_first(ranks), _registering(self._taken_over_by(pager)):
            self.model = self._make()
        # While the pager still serves: a copied layer is written home from memory.
        self._swap_params(homes)
        pager.finish()
        # A buffer may hold what a constructor drew or measured on this rank alone.
        ranks.take_from_first(dict(self.model.named_buffers()))
        return self.model

    def _taken_over_by(self, pager: Pager) -> Callable[[nn.Parameter], nn.Parameter]:
        """Make what gives a param that has a home in the place of each that is registered."""
        expected = iter(self._expected)
        # Weak, so that the id of a param that has gone may be another one's.
        seen = weakref.WeakValueDictionary[int, nn.Parameter]()

        def take_over(param: nn.Parameter) -> nn.Parameter:
            if id(param) in seen:
                return param
            # What does not match is left as it is: the check by name at the end finds its home, or refuses.
            ours = next(expected, None)
            if ours is None or ours.shape != param.shape or ours.dtype != param.dtype:
                ours = param
            else:
                pager.bring_in(ours, param.data)
                # Attributes that the constructor put on it (a flag for initialization, say).
                ours.__dict__.update(param.__dict__)
            seen[id(ours)] = ours
            return ours

        return take_over

    def _swap_params(self, homes: ByName) -> None:
        """Let every param of the model become the one its name has a home for."""
        model = self.model
        names = {name: handle for handle in homes.handles for name in handle.names}
        ours = {id(handle.param): handle for handle in homes.handles}
        for name, param in list(model.named_parameters(remove_duplicate=False)):
            handle = names.pop(name, None)
            # Under its name there must be no other name's param, and none of another shape.
            if handle is None or ours.get(id(param), handle) is not handle or param.shape != handle.param.shape:
                raise _differs(model, name)
            # It came about without being registered as expected: its values go home, and our param takes its place.
            if param is not handle.param:
                homes.write_whole(handle, param.data)
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._parameters[leaf] = handle.param
        if names:
            raise _differs(model, next(iter(names)))


def _differs(model: nn.Module, name: str) -> GeminiError:
    return GeminiError(
        f"{type(model).__name__} came out differently when it was built a second time (param {name!r}): its "
        "constructor is not deterministic. Build it yourself and wrap it with GeminiDDP(model, config)"
    )


@contextlib.contextmanager
def _registering(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Let ``replace`` say which param is registered whenever a module registers one."""
    put = original(nn.Module, "register_parameter")

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        put(self, name, None if param is None else replace(param))

    with replaced_for_thread(nn.Module, "register_parameter", register):
        yield


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """On this thread models are not initialized (some compute with values, which meta tensors lack), ties are made."""
    from transformers import PreTrainedModel

    # Ties are all that is left of it; a model may call it more than once.
    with replaced_for_thread(PreTrainedModel, "init_weights", lambda model: model.tie_weights(recompute_mapping=False)):
        yield


def check_class(given: Any) -> None:
    """Refuse what is no model class and no auto class of transformers, with a TypeError."""
    if not hasattr(given, "from_pretrained"):
        raise TypeError(f"model_class= is a model class or an auto class of transformers, got {given!r}")


def class_of(hf_config: Any) -> Any:
    """The model class of transformers that a config names. Raises ValueError if it names none that transformers has,
    and there is no causal language model for it.
    """
    import transformers

    for name in getattr(hf_config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if type(hf_config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    raise ValueError(
        f"{type(hf_config).__name__} names no model class that transformers {transformers.__version__} has "
        f"(architectures={getattr(hf_config, 'architectures', None)}): pass model_class=, for example "
        "transformers.AutoModelForSequenceClassification"
    )
