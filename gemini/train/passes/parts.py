"""The parts of one wrapped model that its passes and steps work with, as one value."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gemini.memory.store import ChunkStore
from gemini.ranks.wire import Wire
from gemini.train.activations.store import ActivationStore
from gemini.train.gradients.scaling import Scaling
from gemini.train.gradients.store import GradientStore
from gemini.train.modules.calls import Calls
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.observers import Observers, WriteObservers
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import Exposure
from gemini.train.params.handle import ParamSet
from gemini.train.sharding.shards import Company
from gemini.train.step import StepState
from gemini.train.update.sinks import GradientSink
from gemini.train.update.updates import Updates


@dataclass(frozen=True)
class Parts:
    """Made by the engine, from top to bottom."""

    params: ParamSet
    store: ChunkStore
    state: StepState
    lock: AbstractContextManager[Any]
    """Lock of the books: one thread at a time changes what is gathered. Workers never take it."""
    observers: Observers
    writes: WriteObservers
    exposure: Exposure
    saved_weights: SavedWeights
    calls: Calls
    updates: Updates
    gradients: GradientStore
    activations: ActivationStore
    scaling: Scaling
    company: Company
    sink: GradientSink
    by_names: ByName
    slices: Wire
    """Among the ranks with slices of the same params; this one alone of params that are whole."""
