"""Models that a trainer only evaluates beside the one that it trains: a reference, reward models, a teacher.

What is given to ``Accelerator.prepare_model(model, evaluation_mode=True)`` is frozen and managed in the budget of the
trained model, at 2 bytes per param in half precision. It comes first, so that the trained model is planned with what
is left: into host memory if everything fits there, else on the drive, where reading it costs less than what training
would have to read and write in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, human_bytes, warn
from gemini.memory.system import available_bytes
from gemini.planning.placement import StaticPlacement
from gemini.planning.together import bytes_per_param, home_of_frozen
from gemini.planning.working import MARGIN
from gemini.sharing import SharedBudget
from gemini.tiers import DRIVE, Tier
from gemini.train.ddp import GeminiDDP

from .settings import config_of

STAGED = 4 * 2**20
"""Bytes of host memory for what models of a few thousand params stage, in all processes of a machine."""


def manage_beside(models: Sequence[nn.Module], trained: nn.Module, config: GeminiConfig, mesh: Any) -> GeminiConfig:
    """Freeze and manage these models, before or after the one that is trained; returns the config for that one, in the
    same budget. One that is managed already, or shares params with the trained one, stays as it is.
    """
    own = {id(param) for param in trained.parameters()}
    plain = [m for m in models if not isinstance(m, GeminiDDP) and own.isdisjoint(map(id, m.parameters()))]
    # Each once, however often it was given.
    plain = [model for model in dict.fromkeys(plain) if next(model.parameters(), None) is not None]
    if not plain:
        return config
    memory = SharedBudget.of(config.memory)
    memory.pool.at_once = True
    # What is of training only is as if it had not been given.
    of_step = "trace gradients activations states optimizer offload_activations tile_tokens kept_blocks step".split()
    defaults: dict[str, Any] = {field.name: field.default for field in fields(GeminiConfig)}
    frozen = replace(
        config,
        memory=replace(memory, durable=False),
        placement="auto" if isinstance(trained, GeminiDDP) else _lowest(plain, trained, config),
        keep_fp32=config.keep_fp32 if config.keep_fp32 is None else "auto",
        **{name: defaults[name] for name in of_step},
    )
    for model in plain:
        name = type(model).__name__
        try:
            GeminiDDP(model.requires_grad_(False), frozen, mesh=mesh)
        except BudgetExceeded as e:
            raise BudgetExceeded(f"{name}, which is evaluated beside the model that is trained: {e}") from e
        except (TypeError, ValueError) as e:  # what cannot be managed, such as quantized weights of other formats
            warn(f"{name} is evaluated outside of the budgets, since it cannot be managed: {e}")
    return replace(config, memory=memory)


def budget_for(config: GeminiConfig, number: float) -> SharedBudget:
    """The budget of ``config`` for a model that is managed before ``number`` others which are evaluated beside it, of
    its size: it leaves them their share of host memory, and with a drive a quarter, for all that is staged there, which
    is no less for a small model: of little memory it leaves up to five twelfths.
    """
    own, frozen = bytes_per_param(config.precision, config.gradients, config.rule_spec)
    host = _host_bytes(config)
    later = number * frozen / (own + number * frozen) * host
    if config.memory.paths_of(DRIVE):
        later = min(host * 5 / 12, max(host / 4, STAGED))
    memory = SharedBudget.of(config.memory, later=int(later))
    memory.pool.at_once = True
    return memory


def figures_of_all(model: Any, memory: Any) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Peak and budget of each tier (bytes) of a model and those in one budget with it, and what those hold, in words.
    ``memory``: the report of the model.
    """
    budget = config_of(model).memory  # type: ignore[union-attr]
    whole = budget.report() if isinstance(budget, SharedBudget) else memory
    figures = {
        tier.value: (whole[tier.value]["peak"], whole[tier.value]["budget"]) for tier in Tier if tier.value in whole
    }
    others = {tier: whole[tier]["used"] - memory[tier]["used"] for tier in figures}
    held = ", ".join(f"{tier} {human_bytes(num_bytes)}" for tier, num_bytes in others.items() if num_bytes)
    return figures, [f"models that are evaluated beside it: {held}"] if held else []


def _host_bytes(config: GeminiConfig) -> int:
    declared = config.memory.bytes_of(Tier.CPU)
    return int(MARGIN * available_bytes()) if declared is None else declared


def _lowest(frozen: Sequence[nn.Module], trained: nn.Module, config: GeminiConfig) -> StaticPlacement:
    """Host memory if all models fit there with all that they need, else the drive, on all ranks alike."""
    per_trained, per_frozen = bytes_per_param(config.precision, config.gradients, config.rule_spec)
    num_bytes = sum(
        (per_trained if param.requires_grad else per_frozen) * param.numel()
        for model in (*frozen, trained)
        for param in model.parameters()
    )
    chosen = [home_of_frozen(num_bytes, _host_bytes(config), has_drive=bool(config.memory.paths_of(DRIVE)))]
    broadcast_object_list(chosen)  # what is free differs from rank to rank
    return chosen[0]
