"""``gemini.from_config``: a model drawn from scratch straight into chunks, with the values plain ``from_config`` draws.

The model is built twice. First without memory for params (each becomes a meta tensor as soon as a module registers it):
that tells the layout, so homes can be placed and reserved. Then for real, with the same random numbers, where each
param that a constructor registers is taken over by a :class:`~gemini.train.loading.skeleton.Pager`, which sends it home
when others need the room and brings it back if a later initialization touches it. Params are matched by the order of
their registration, and checked by name at the end: what came about in another way (a copied layer) is copied home then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import GeminiError
from gemini.patches import replaced
from gemini.ranks.group import Ranks
from gemini.train.loading.skeleton import (
    Pager,
    Skeleton,
    attention_keyword,
    generator_of_first,
    generators_kept,
    replace_by_stand_ins,
)
from gemini.train.params.by_name import ByName


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
    config = (GeminiConfig() if config is None else config).resolved()
    kwargs |= attention_keyword(attn_implementation)
    skeleton = skeleton_from_config(hf_config, model_class=model_class, **kwargs)
    return skeleton.manage(config, process_group=process_group, mesh=mesh)


def skeleton_from_config(hf_config: Any, *, model_class: Any = None, **kwargs: Any) -> Skeleton:
    """Make what :func:`from_config` makes before it places anything."""
    if model_class is None:
        model_class = class_of(hf_config)
    build = getattr(model_class, "from_config", None) or model_class._from_config
    return DrawnModel(lambda: build(hf_config, **kwargs))


class DrawnModel(Skeleton):
    """The model that ``make`` builds and initializes; it is called twice, with the same random numbers."""

    def __init__(self, make: Callable[[], nn.Module]):
        self._make = make
        to_meta = _ToMeta()
        # The second build must draw the same numbers: what this one draws is put back.
        with generators_kept(), _registering(to_meta), without_drawing():
            self.model = make()
        empties = replace_by_stand_ins(self.model)
        # By the order of registration; None for a param that the model has let go of since.
        self._expected = [empties.get(key) for key in to_meta.registered]

    def fill(self, homes: ByName, ranks: Ranks) -> nn.Module:
        pager = Pager(homes)
        with generator_of_first(ranks), _registering(_TakeOver(pager, self._expected)):
            self.model = self._make()
        # While the pager still serves: a copied layer is written home from memory.
        self._swap_params(homes)
        pager.finish()
        # A buffer may hold what a constructor drew or measured on this rank alone.
        ranks.take_from_first(dict(self.model.named_buffers()))
        return self.model

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


class _TakeOver:
    """Hands each param to the pager that a module registers while the model is built for real."""

    def __init__(self, pager: Pager, expected: list[nn.Parameter | None]):
        self._pager = pager
        self._expected = iter(expected)
        # Weak, so that the id of a param that has gone may be another one's.
        self._seen: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()

    def __call__(self, param: nn.Parameter) -> nn.Parameter:
        if id(param) in self._seen:
            return param
        # What does not match is left as it is: the check by name at the end finds its home, or refuses.
        ours = next(self._expected, None)
        if ours is None or ours.shape != param.shape or ours.dtype != param.dtype:
            self._seen[id(param)] = param
            return param
        self._pager.bring_in(ours, param.data)
        # Attributes that the constructor put on it (a flag for initialization, say).
        ours.__dict__.update(param.__dict__)
        self._seen[id(ours)] = ours
        return ours


class _ToMeta:
    """Makes each param a meta tensor that a module registers while the model is built without memory for params."""

    def __init__(self) -> None:
        self.registered: dict[int, nn.Parameter] = {}  # by id, in order

    def __call__(self, param: nn.Parameter) -> nn.Parameter:
        if id(param) in self.registered:
            return param  # it is shared now
        empty = param  # a copy of a meta param, or computed from one
        if not param.is_meta:
            empty = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
        self.registered[id(empty)] = empty
        return empty


@contextlib.contextmanager
def _registering(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Let ``replace`` say which param is registered whenever a module registers one."""
    original, thread = nn.Module.register_parameter, threading.get_ident()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # Other threads of the program may build modules meanwhile.
        is_ours = param is not None and threading.get_ident() == thread
        original(self, name, replace(param) if is_ours else param)  # type: ignore[arg-type]

    with replaced(nn.Module, "register_parameter", register):
        yield


@contextlib.contextmanager
def without_drawing() -> Iterator[None]:
    """Initializations do nothing (meta tensors have no values, and some models compute with theirs), ties are made."""
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    def only_tie(model: Any) -> None:
        # All that is left of it; a model may call it more than once.
        model.tie_weights(recompute_mapping=False)

    with no_init_weights(), replaced(PreTrainedModel, "init_weights", only_tie):
        yield


def class_of(hf_config: Any) -> Any:
    """The model class of transformers that a config names.

    Raises:
        ValueError: if it names none that transformers has, and there is no causal language model for it.
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
