"""Params that become slices, and whole again if the model cannot be managed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gemini.train.params.handle import SET_DATA
from gemini.train.params.tensor_slice import TensorSlice


class WholeParams:
    """What params were before they became slices.

    Attributes:
        params: by every name of a param that is cut, which slice of it is here.
    """

    def __init__(self) -> None:
        self.params: dict[str, TensorSlice] = {}
        self._whole: list[tuple[nn.Parameter, torch.Tensor]] = []

    def cut(self, model: nn.Module, cuts: Mapping[str, TensorSlice]) -> None:
        """Leave the slices of these params, in place."""
        named = dict(model.named_parameters(remove_duplicate=False))
        self.params = dict(cuts)
        for param, cut in {id(named[name]): (named[name], cut) for name, cut in cuts.items()}.values():
            self._whole.append((param, param.data))
            SET_DATA(param, cut.of(param.data))

    def by_param(self, model: nn.Module) -> dict[int, TensorSlice]:
        """The slices by the ids of the params of ``model``, which may have let go of some."""
        named = dict(model.named_parameters(remove_duplicate=False))
        return {id(named[name]): cut for name, cut in self.params.items() if name in named}

    def give_back(self) -> None:
        """The params are whole again."""
        while self._whole:
            SET_DATA(*self._whole.pop())

    def keep(self) -> None:
        """There is no way back: whole values are let go of."""
        self._whole.clear()
