"""Stages: a model of which only some modules run, the others being stood in for.

Whatever is computed from a stand-in's values is one, and nothing that counts may be. How a forward runs through a model
was seen once, on one micro-batch without values (:mod:`gemini.pipeline.course`). Another micro-batch, a switch in a
closure or a value may lead another way. So a stage looks at what it gives: a result that one of these went into is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
from gemini.pipeline.course import LABELS, Course, is_in
from gemini.tracing.ahead import loss_of
from gemini.train.modules.reading import structure_of
from gemini.train.params.handle import StageParam


class Strayed(GeminiError):
    """A forward took another way than the one that was seen. ``has_begun``: some gradients of its step are there."""

    has_begun = False


_SHAPE_ALONE = set(
    "new_empty new_full new_ones new_zeros empty_like full_like ones_like zeros_like "
    "expand_as reshape_as type_as view_as".split()
)
"""Functions that look at the shape, the dtype or the device of one (with "_as" of the second argument), by name."""
_VALUES = {"__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__contains__"}


class Elsewhere(torch.Tensor):
    """A tensor of the right shape, whose values are another stage's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))  # x += y, x.add_(y)
        writes = in_place or name == "__setitem__" or "out" in kwargs
        if name in _VALUES or (writes and not isinstance(kwargs.get("out", args[0] if args else None), Elsewhere)):
            stray("its forward reads values that another of its parts makes")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        is_second = name.endswith("_as") and not isinstance(args[0], Elsewhere)
        if func in get_default_nowrap_functions() or name in _SHAPE_ALONE and (is_second or not name.endswith("_as")):
            return out
        return tree_map(standing_in, out)


def standing_in(value: Any) -> Any:
    return value.as_subclass(Elsewhere) if isinstance(value, torch.Tensor) else value


class _Unread:
    """In the place of an entry of a model's output that all stages together would have made."""

    def __init__(self, name: str):
        self.__dict__["_name"] = name

    def _stray(self, *_: Any) -> NoReturn:
        stray(f"output.{self.__dict__['_name']} is read, which no part of it has whole")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _stray
    __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _stray


def only(output: Any, readable: frozenset[str] | None) -> Any:
    """Keep of what a forward returns the entries that are ``readable``, if it has any by name."""
    if readable is None or not isinstance(output, dict):
        return output
    if type(output) is dict:
        output = dict(output)
    for name, value in output.items():
        if name not in readable and value is not None:
            output[name] = _Unread(name)
    return output


def check(value: Any) -> None:
    """Raises :class:`Strayed` if a tensor in it depends on what another stage computes."""
    if any(isinstance(leaf, Elsewhere) for leaf in tree_leaves(value)):
        stray("what one of its parts computes depends on more than the hidden states of the part before it")


def stray(why: str) -> NoReturn:
    raise Strayed(f"the model goes another way through its blocks than in the micro-batch that was looked at: {why}")


def params_of_stages(
    model: nn.Module, course: Course, ranges: Sequence[tuple[int, int]], num_ranks: int
) -> dict[str, StageParam]:
    """Which ranks have each param, by its first name, in the model's order. One that several have is told that name."""
    found: dict[str, StageParam] = {}
    for param, names in structure_of(model).params:
        ranks = sorted({_stage_of(name, course, ranges) % num_ranks for name in names})
        found[names[0]] = StageParam(tuple(param.shape), tuple(ranks))
        if len(ranks) > 1:
            param._gemini_first = names[0]  # type: ignore[attr-defined]
    return found


def _stage_of(name: str, course: Course, ranges: Sequence[tuple[int, int]]) -> int:
    """Which stage runs the module of a param; the first one for what never runs."""
    otherwise = len(ranges) - 1 if is_in(name, course.after) else 0
    return next((i for i, (start, stop) in enumerate(ranges) if is_in(name, course.blocks[start:stop])), otherwise)


class _StandIn(nn.Module):
    """In the place of a module that does not run. Other attributes than its own are those of its twin."""

    _gemini_stands_in = True

    def __init__(self, twin: nn.Module):
        super().__init__()
        self.__dict__["twin"] = twin

    def __getattr__(self, name: str) -> Any:
        return standing_in(getattr(self.__dict__["twin"], name))  # of weights as well


class Passing(_StandIn):
    """A block of another stage: hands hidden states on. The last stay in ``seen``; ``given`` go on in their place."""

    def __init__(self, twin: nn.Module, *, num_given: int):
        super().__init__(twin)
        self.__dict__.update(num_given=num_given, seen=None, given=None)
        # By these transformers counts the states of all blocks, and so sees which of them are another stage's.
        for key, hook in twin._forward_hooks.items():
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                self._forward_hooks[key] = hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        own = self.__dict__
        own["seen"] = hidden
        hidden = hidden if own["given"] is None else own["given"]
        return (hidden, *[None] * (own["num_given"] - 1)) if own["num_given"] else hidden


class Placeholder(_StandIn):
    """A stand-in for what other ranks do before the blocks: values of the right shape that take no memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def on_meta(value: Any) -> Any:
            return value.as_subclass(torch.Tensor).to("meta") if isinstance(value, torch.Tensor) else value

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.no_grad():
            made = self.__dict__["twin"](*map(on_meta, args), **{key: on_meta(v) for key, v in kwargs.items()})
        return standing_in(torch.zeros((), dtype=made.dtype, device=device).expand(made.shape))


class Stage(nn.Module):
    """Blocks ``[start, stop)`` of a model, with what comes before or after them at its ends. It takes the hidden states
    of the stage before, if any, and a micro-batch; gives hidden states, or on the last one what the model returns.
    """

    def __init__(self, model: Any, course: Course, start: int, stop: int):
        super().__init__()
        self.__dict__["model"] = model  # no submodule: its params are the model's
        self.is_first, self.is_last = start == 0, stop == len(course.blocks)
        self.stand_ins: dict[str, nn.Module] = {
            name: Passing(course.twin.get_submodule(name), num_given=course.num_given[number])
            for number, name in enumerate(course.blocks)
            if not start <= number < stop
        }
        """In the place of the modules that do not run, by their names."""
        if not self.is_first:
            self.stand_ins |= {name: Placeholder(course.twin.get_submodule(name)) for name in course.before}
        labels = inspect.signature(type(model).forward).parameters.get("labels")
        may_drop = not self.is_last and not course.reads_labels
        self._drops_labels = may_drop and labels is not None and labels.default is not labels.empty
        self._readable = course.readable
        for name in () if self.is_last else course.after:
            # A loss of what is no result needs its shape at least; without labels there is none.
            twin = course.twin.get_submodule(name)
            self.stand_ins[name] = Passing(twin, num_given=0) if self._drops_labels else Placeholder(twin)
        self._entry = None if self.is_first else self.stand_ins[course.blocks[start - 1]]
        self._exit = None if self.is_last else self.stand_ins[course.blocks[stop]]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks with params of this stage of a managed model, in their order."""
        handles = (h for h in self.__dict__["model"]._gemini_engine.params.handles if not is_in(h.name, self.stand_ins))
        return tuple(dict.fromkeys(handle.chunk for handle in handles))

    def forward(self, *received: torch.Tensor, **batch: Any) -> Any:
        for name in LABELS if self._drops_labels else ():
            batch.pop(name, None)
        if self._entry is not None:
            self._entry.__dict__["given"] = received[0]
        try:
            try:
                with _standing_in(self.__dict__["model"], self.stand_ins):
                    output = self.__dict__["model"](**batch)
            except Exception:
                # What comes after the blocks may look for what a block has left, and nobody needs what it gives.
                if self._exit is None or self._exit.__dict__["seen"] is None:
                    raise
            if self._exit is None:
                return only(output, self._readable)
            seen = self._exit.__dict__["seen"]
            check(seen)
            return seen
        finally:
            for end in (self._entry, self._exit):
                if end is not None:
                    end.__dict__.update(given=None, seen=None)

    def loss_of(self, output: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
        """The loss in what the last stage gave, or what ``loss`` makes of that. Raises :class:`Strayed` if it depends
        on what other stages have computed.
        """
        own = loss_of(self.__dict__["model"], output, loss)
        check(own)
        if foreign := self._other_params_behind(own):
            stray(f"its loss reads {foreign} of another part")
        return own

    @cached_property
    def _others(self) -> dict[int, str]:
        """The params that no module of this stage has, by their identity: their names."""
        named = list(self.__dict__["model"].named_parameters(remove_duplicate=False))
        own = {id(param) for name, param in named if not is_in(name, self.stand_ins)}
        return {id(param): name for name, param in named if id(param) not in own}

    def _other_params_behind(self, loss: torch.Tensor) -> str:
        """The name of a param of another stage that gets a gradient from the loss of this one; "" if none does."""
        todo, seen = [loss.grad_fn] if self._others else [], set()
        for node in todo:
            variable = getattr(node, "variable", None)
            if id(variable) in self._others:
                return self._others[id(variable)]
            new = [after for after, _ in getattr(node, "next_functions", ()) if after is not None and after not in seen]
            seen.update(new)
            todo += new
        return ""


class Numbered(nn.Module):
    """A stage for torch's schedules, which divide what they are given: it is told the number of one of ``parts``."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self.parts: Sequence[Mapping[str, Any]] = ()

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        output = self.stage(*received, **self.parts[int(number)])
        return self.stage.loss_of(output) if self.stage.is_last else output  # type: ignore[no-any-return]


def left_out(model: nn.Module, stages: Sequence[Stage]) -> AbstractContextManager[None]:
    """Let go of modules that run in none of these stages; they are back if what is done inside fails."""
    never = set.intersection(*(set(stage.stand_ins) for stage in stages))
    return _standing_in(model, {name: stages[0].stand_ins[name] for name in sorted(never)}, stay=True)


@contextmanager
def _standing_in(model: nn.Module, stand_ins: Mapping[str, nn.Module], *, stay: bool = False) -> Iterator[None]:
    """Put these in the places of modules of a model, by their names; for good if they ``stay`` and nothing fails."""
    paths = [name.rpartition(".") for name in stand_ins]
    places = [(model.get_submodule(path)._modules, key) for path, _, key in paths]
    before = [modules[key] for modules, key in places]
    try:
        for (modules, key), module in zip(places, stand_ins.values(), strict=True):
            modules[key] = module
        yield
    except BaseException:
        stay = False
        raise
    finally:
        if not stay:
            for (modules, key), was in zip(places, before, strict=True):
                modules[key] = was


def micro_batches_of(batch: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Equal parts of all tensors along their first dim; what is no tensor is in each."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    for name, value in tensors.items():
        if value.shape[0] % number:
            raise ValueError(f"{name} has {value.shape[0]} samples, which micro_batches={number} does not divide")
    if not tensors:
        raise ValueError("step() takes tensors by name, for example step(input_ids=ids, labels=ids)")
    parts = {name: value.chunk(number) for name, value in tensors.items()}
    return [{**batch, **{name: chunks[i] for name, chunks in parts.items()}} for i in range(number)]
