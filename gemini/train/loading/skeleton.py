"""A model whose params have shapes and no values yet, and what fills it once its chunks have homes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.ranks.group import Ranks
from gemini.train.checkpoint.states import rng_states, set_rng_states
from gemini.train.ddp import manage
from gemini.train.loading.paging import stand_in
from gemini.train.modules.reading import own_params
from gemini.train.params.by_name import ByName


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


def need_transformers(what: str) -> None:
    """Say which optional part of Gemini ``what`` needs.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as e:
        raise ImportError(
            f"{what} needs transformers 5.0 or newer, the extra 'hf' of Gemini: pip install 'transformers>=5.0' ({e})",
            name="transformers",
        ) from e


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
    ranks.take_from_first({"the state of the random generator": shared}, of_job=True)
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            torch.set_rng_state(own)
