"""Gemini trains models that do not fit: params, gradients and optimizer states in chunks over GPU, CPU and NVMe.

    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="8GiB", nvme_path="/scratch")))
    optimizer = gemini.HybridAdam(model.parameters(), lr=2e-5)

and the ordinary PyTorch loop. Names are imported when they are first used, so that ``import gemini`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemini.version import __version__ as __version__

_NAMES = {
    "gemini.config": "GeminiConfig",
    "gemini.errors": (
        "BudgetExceeded GeminiError IllegalTransition MissingFigure NonFiniteGradient ParamAccessError PlanMismatch "
        "RankLost RankMismatch StorageError"
    ),
    "gemini.pipeline.micro_batches": "train_step",
    "gemini.pipeline.pipeline": "Pipeline",
    "gemini.planning.hardware": "Hardware",
    "gemini.planning.placement": "StaticPlacement",
    "gemini.planning.plan": "Plan",
    "gemini.planning.planner": "plan",
    "gemini.planning.simulate": "simulate",
    "gemini.planning.timeline": "Timeline",
    "gemini.planning.together": "plan_together",
    "gemini.planning.trace": "MemoryTrace",
    "gemini.ranks.group": "data_rank",
    "gemini.sharing": "SharedBudget",
    "gemini.tiers": "MemoryBudget Tier",
    "gemini.tracing.ahead": "batch_for trace",
    "gemini.tracing.tracer": "MemoryTracer",
    "gemini.train.averages": "EMA",
    "gemini.train.checkpoint.saving": "PendingCheckpoint load_checkpoint save_checkpoint",
    "gemini.train.checkpoint.export": "weights_for",
    "gemini.train.context": "sequence_batch",
    "gemini.train.ddp": "GeminiDDP",
    "gemini.train.loading.skeleton": "from_config",
    "gemini.train.loading.from_pretrained": "from_pretrained",
    "gemini.train.optimizers.grad_scaler": "GradScaler",
    "gemini.train.optimizers.optimizer": "HybridAdam HybridOptimizer",
    "gemini.train.slices.slicing": "slice_tensors",
    "gemini.train.wrap": "release",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_WHERE, "__version__"])

if TYPE_CHECKING:
    from gemini import optim as optim
    from gemini.config import GeminiConfig as GeminiConfig
    from gemini.errors import BudgetExceeded as BudgetExceeded
    from gemini.errors import GeminiError as GeminiError
    from gemini.errors import IllegalTransition as IllegalTransition
    from gemini.errors import MissingFigure as MissingFigure
    from gemini.errors import NonFiniteGradient as NonFiniteGradient
    from gemini.errors import ParamAccessError as ParamAccessError
    from gemini.errors import PlanMismatch as PlanMismatch
    from gemini.errors import RankLost as RankLost
    from gemini.errors import RankMismatch as RankMismatch
    from gemini.errors import StorageError as StorageError
    from gemini.pipeline.micro_batches import train_step as train_step
    from gemini.pipeline.pipeline import Pipeline as Pipeline
    from gemini.planning.hardware import Hardware as Hardware
    from gemini.planning.placement import StaticPlacement as StaticPlacement
    from gemini.planning.plan import Plan as Plan
    from gemini.planning.planner import plan as plan
    from gemini.planning.simulate import simulate as simulate
    from gemini.planning.timeline import Timeline as Timeline
    from gemini.planning.together import plan_together as plan_together
    from gemini.planning.trace import MemoryTrace as MemoryTrace
    from gemini.ranks.group import data_rank as data_rank
    from gemini.sharing import SharedBudget as SharedBudget
    from gemini.tiers import MemoryBudget as MemoryBudget
    from gemini.tiers import Tier as Tier
    from gemini.tracing.ahead import batch_for as batch_for
    from gemini.tracing.ahead import trace as trace
    from gemini.tracing.tracer import MemoryTracer as MemoryTracer
    from gemini.train.averages import EMA as EMA
    from gemini.train.checkpoint.export import weights_for as weights_for
    from gemini.train.checkpoint.saving import PendingCheckpoint as PendingCheckpoint
    from gemini.train.checkpoint.saving import load_checkpoint as load_checkpoint
    from gemini.train.checkpoint.saving import save_checkpoint as save_checkpoint
    from gemini.train.context import sequence_batch as sequence_batch
    from gemini.train.ddp import GeminiDDP as GeminiDDP
    from gemini.train.loading.from_pretrained import from_pretrained as from_pretrained
    from gemini.train.loading.skeleton import from_config as from_config
    from gemini.train.optimizers.grad_scaler import GradScaler as GradScaler
    from gemini.train.optimizers.optimizer import HybridAdam as HybridAdam
    from gemini.train.optimizers.optimizer import HybridOptimizer as HybridOptimizer
    from gemini.train.slices.slicing import slice_tensors as slice_tensors
    from gemini.train.wrap import release as release


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("gemini.optim")
    if name not in _WHERE:
        raise AttributeError(f"module 'gemini' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
