"""Leaves one rank of a mesh's ``ep`` its experts of a whole model, by the plan that transformers has for that.

Experts are matrices of three dims, of which the first counts experts. Each rank has as many of every layer, and all of
what is no expert.
"""

from __future__ import annotations

import re
from types import MethodType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import RankMismatch
from gemini.ranks.group import Ranks
from gemini.ranks.mesh import place_in, size_of
from gemini.train.modules.reading import is_a, is_tuner_layer
from gemini.train.params.tensor_slice import TensorSlice
from gemini.train.slices.differing import first_differing, sizes_that_divide
from gemini.train.slices.dispatch import ExpertExchange, dispatched_forward
from gemini.train.slices.whole import WholeParams

_MODULES, _PARAMS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers' ``ep_plan``."""


class SpreadExperts(WholeParams):
    """What became of a model that has some of its experts.

    Attributes:
        params: by every name of a param that is cut, which slice of it is here.
    """

    def __init__(self, modules: list[str], size: int):
        super().__init__()
        self._modules, self._size = modules, size
        self._put: list[nn.Module] = []

    def put_on(self, model: nn.Module, ranks: Ranks) -> None:
        """Let experts compute for the tokens of all ranks."""
        assert ranks.experts is not None
        here = {name: module for name, module in model.named_modules() if name in self._modules}
        most = max((int(module.num_experts) for module in here.values()), default=0)  # type: ignore[arg-type]
        exchange = ExpertExchange(ranks.experts, ranks.experts_collective, list(here), most)
        for number, module in enumerate(here.values()):
            module.num_experts = int(module.num_experts) // self._size  # type: ignore[arg-type, assignment]
            module.__dict__["_gemini_experts"] = exchange, number
            module.forward = MethodType(dispatched_forward, module)  # type: ignore[method-assign]
            self._put.append(module)

    def take_away(self) -> None:
        """Experts are the module's own again."""
        while self._put:
            module = self._put.pop()
            module.num_experts = int(module.num_experts) * self._size  # type: ignore[arg-type, assignment]
            del module.__dict__["_gemini_experts"], module.__dict__["forward"]


def spread_experts(model: nn.Module, mesh: DeviceMesh | None, *, is_filled: bool) -> SpreadExperts | None:
    """Leave this rank's experts, in place; None without ``ep``.

    Args:
        is_filled: the model has its values; else it is whole, and the same on every rank.

    Raises:
        ValueError: for a model without experts, adapters of experts, and sizes that do not divide; nothing is changed.
        RankMismatch: on every rank, if ranks of ``ep`` have other weights.
    """
    size = 1 if mesh is None else size_of(mesh, "ep")
    if mesh is None or size == 1:
        return None
    plan = plan_of(model)
    found = [name for name, _ in model.named_modules() if _style(plan, name) == _MODULES]
    adapted = next((name for name in found if any(map(is_tuner_layer, model.get_submodule(name).modules()))), None)
    if adapted is not None:
        raise ValueError(
            f"expert parallel does not divide adapters of experts ({adapted!r}): choose other modules for the adapters "
            "(target_modules=, target_parameters=), or use dp in place of ep"
        )
    cuts: dict[str, TensorSlice] = {}
    for name in found:
        module = model.get_submodule(name)
        for own, param in module._parameters.items():
            if param is None or _style(plan, f"{name}.{own}") != _PARAMS:
                continue
            if param.shape[0] % size:
                raise ValueError(
                    f"expert parallel over ep={size} ranks: {name} has {param.shape[0]} experts, which is not a "
                    f"multiple of {size}. Sizes that divide it: {sizes_that_divide(param.shape[0])}"
                )
            cuts[f"{name}.{own}"] = TensorSlice(tuple(param.shape), 0, 1, place_in(mesh, "ep"), size)
    if not cuts:
        raise ValueError(
            f"mesh has ep={size}, and {type(model).__name__} has no plan of transformers for dividing experts "
            "(ep_plan): use dp in place of ep"
        )
    if is_filled and (differing := first_differing(model, mesh, "ep")) is not None:
        raise RankMismatch(
            f"expert parallel: {differing!r} is not the same on all ranks of ep, which must have the same whole model: "
            "load the same weights, or draw them from the same seed"
        )
    spread = SpreadExperts(found, size)
    spread.cut(model, cuts)
    return spread


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that transformers has for a model, or for the base of one with adapters; empty if there is none."""
    base = model.get_base_model() if is_a(type(model), "PeftModel") else model  # type: ignore[operator]
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return {f"{prefix}{name}": style for name, style in (getattr(base, "ep_plan", None) or {}).items()}


def _style(plan: dict[str, str], name: str) -> str | None:
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
