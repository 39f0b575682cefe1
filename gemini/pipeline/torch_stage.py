"""A stage of torch's schedules whose backwards are those of a managed model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage


class ManagedStage(PipelineStage):
    """``around_backward`` is entered for the backward of each micro-batch."""

    def __init__(
        self, module: nn.Module, *args: Any, around_backward: Callable[[], AbstractContextManager[None]], **kwargs: Any
    ):
        super().__init__(module, *args, **kwargs)
        self._around_backward = around_backward

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._around_backward():
            return super().backward_one_chunk(*args, **kwargs)
